"""Checks environments against the rest of the run."""

from collections.abc import Iterator

from training.config.row_readers import row_reader_sentences
from training.config.schema.agent import turn_length_problems
from training.config.schema.ppo import PPOConfig
from training.features import named
from workers.rollout.history import KEEP, absent_sentence
from workers.rollout.kinds import kind_of_choice


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields what agents lack; what is wrong with an environment is in resources/agents.py."""
    agent = config.agent
    if agent.observation_loss_coef and not config.environments:
        yield (
            f"agent.observation_loss_coef={agent.observation_loss_coef} learns what "
            "environments say, and there is none"
        )
    if config.environments:
        yield from turn_length_problems(
            "agent", agent.max_turn_tokens, config.data.max_response_length
        )
    yield from _context_problems(config)
    lives_in_ray = bool(config.environments) and agent.environment.isolation == "ray"
    if lives_in_ray and not config.trainer.use_ray:
        yield (
            "agent.environment.isolation=ray needs trainer.launcher=ray; process has the "
            "same protection without it"
        )


def _context_problems(config: PPOConfig) -> Iterator[str]:
    """Yields that contexts, or an episode's tokens, are set where no turns are taken in turn."""
    agent = config.agent
    settings = []
    if agent.context != KEEP:
        settings.append(f"agent.context={agent.context}")
        if not any(named("history")):
            yield absent_sentence(agent.context)
        who = f"agent.context={agent.context} cuts episodes into rows"
        yield from row_reader_sentences(config, who)
    if agent.max_episode_tokens is not None:
        settings.append(f"agent.max_episode_tokens={agent.max_episode_tokens}")
    if not settings:
        return
    said = " and ".join(settings)
    if not config.environments:
        yield (
            f"{said} is of episodes of several turns, and there is no environment: name one "
            "(agent.environment), or take the setting out"
        )
    for choice in config.environments:
        kind = kind_of_choice(config, choice)
        if kind is not None and kind.player is not None:
            yield (
                f"{said} does not hold for a {kind.name}, which says itself what each prompt "
                "consists of: let it compact its own conversation, which begins a new row as well, "
                "and take the setting out"
            )
            return


def warnings(config: PPOConfig) -> Iterator[str]:
    """Yields that an environment which hangs is never ended."""
    agent = config.agent
    is_thread = config.environment_home.isolation == "thread"
    has_deadline = agent.step_timeout_s is not None or agent.episode_timeout_s is not None
    if config.environments and is_thread and not has_deadline:
        yield (
            "agent.step_timeout_s=null with isolation=thread: an environment that hangs stops "
            "the run; give a deadline here or in agent.episode_timeout_s"
        )
