"""The kinds of episodes that programs bring: programs, and environments that verifiers plays."""

from dataclasses import replace

from features.programs.settings import PREFIX, ProgramsSettings
from training.config.schema.agent import EnvironmentChoice
from training.config.schema.ppo import CoreConfig
from workers.rollout.kinds import EpisodeKind

OPEN_POOL = "features.programs.opening:open_pool"
PLAYER = "features.programs.play:player_of"
TRIAL = "features.programs.trial:try_programs"


def named_program(config: CoreConfig) -> EnvironmentChoice | None:
    """Returns the program that plays all episodes, where `programs` names one."""
    programs = config.section(ProgramsSettings)
    if not programs.is_set:
        return None
    return replace(config.agent.environment, command=programs.command, program=programs.function)


def owns_program(config: CoreConfig, choice: EnvironmentChoice) -> bool:
    """Checks whether something asks for its turns itself."""
    return choice.plays_by_itself


def owns_verifiers(config: CoreConfig, choice: EnvironmentChoice) -> bool:
    """Checks whether it is an environment of verifiers, which has an interpreter of its own."""
    if config.section(ProgramsSettings).verifiers.python is None or choice.name is None:
        return False
    return choice.name.startswith(PREFIX)


PROGRAM = EpisodeKind(
    name="program",
    named=named_program,
    owns=owns_program,
    make_spec="features.programs.opening:program_spec",
    open_pool=OPEN_POOL,
    player=PLAYER,
    trial=TRIAL,
    check="features.programs.checks:check_program",
    check_reward="features.programs.checks:check_reward_of_programs",
    names_speakers=True,
)
VERIFIERS = EpisodeKind(
    name="environment of verifiers",
    owns=owns_verifiers,
    make_spec="features.programs.with_verifiers.spec:verifiers_spec",
    open_pool=OPEN_POOL,
    player=PLAYER,
    trial=TRIAL,
    check="features.programs.with_verifiers.checks:check_verifiers",
    check_reward="features.programs.checks:check_reward_of_programs",
    names_speakers=True,
)
