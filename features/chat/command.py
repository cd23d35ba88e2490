"""Plays one episode with a person: `python main.py CONFIG --chat MODEL [key=value ...]`.

    --as environment   the model plays, the person says what the environment would say
    --as policy        the configured environment plays, the person answers in the model's place
    --as watcher       the configured environment and the model play, Enter goes on
    --out FOLDER       what is written: config.yaml, episodes/val-0.jsonl, tokenizer/
    --episode N        which of validation's episodes is played; 0 is the first

MODEL is a Hugging Face folder, a checkpoint or a run's folder (training/run/named_model.py).
Without --as the person is the environment, or, where one is configured, the watcher. Invariant:
turns, tokens, limits and tools are those of training; the record is written however the episode
ends. Ctrl-C ends it when the person is asked next, twice ends it at once; the record is whole.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from custom.agent import AgentSpec
from custom.env_suite import EnvironmentSuite
from custom.envs.person import PersonEnvironment
from data.disk_errors import as_os_errors
from data.protocol import DataProto
from data.seeds import step_info
from features.chat.players import (
    Calls,
    CallsHere,
    PersonEngine,
    ShownCalls,
    ShownHistory,
)
from features.chat.terminal import ENVIRONMENT_HELP, HELP, EnvironmentsVoice, Terminal
from training.building import read_tasks
from training.config import PPOConfig
from training.config.checks import load_custom_algorithm
from training.config.loader import ConfigError, load_config
from training.config.resources.files import unwritable_folder
from training.features import features
from training.run.files import from_here
from training.run.model_source import local_model, reading_model, tokenizer_folder
from training.run.named_model import CannotUse
from training.run.recorded_config import record_config
from training.run.signals import EndingSignals
from workers.agent_rollout import AgentRollout
from workers.agent_specs import agent_specs
from workers.environments.names import CannotBuild, environment_name
from workers.model.builder import ModelSpec, find_device
from workers.ranks import worker_process
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.episode import LEFT, Episode, Row, TurnLimits
from workers.rollout.episode_descriptions import describe_episodes
from workers.rollout_building import build_rollout
from workers.turn_reading import turn_tokens
from workers.weight_sync.manifest import iter_weights, weight_manifest

ROLES = ("environment", "policy", "watcher")
PERSON = "custom.envs.person:PersonEnvironment"
# The feature that writes the episode down, where it is there.
RECORDS = "records"
# One rank plays, and what fails is not played again.
ONE_EPISODE = (
    "trainer.launcher=local",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "trainer.rollout_n_gpus=0",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "agent.max_refills=0",
)
# In place of whatever the agents act in, and of what pays them.
PERSONS_ENVIRONMENT = (
    "~env_template",
    "~agent.environment",
    f"agent.environment.name={PERSON}",
    "~agent.cls",
    "~custom_reward_function.path",
)
ENGINE = "actor_rollout_ref.rollout.name"


@dataclass(frozen=True)
class Chat:
    """Holds what is played, and where it is written.

    Attributes:
        role: the person's.
        number: of validation's episode.
        out: the folder of the record.
        terminal: the person's.
    """

    config: PPOConfig
    role: str
    number: int
    out: Path
    terminal: Terminal

    @property
    def specs(self) -> list[AgentSpec]:
        """Returns how the agents are built, as the config says.

        Raises:
            ConfigError: one of them is a program, which plays by itself.
        """
        specs = [spec for spec in agent_specs(self.config) if isinstance(spec, AgentSpec)]
        if len(specs) < len(self.config.environments):
            raise ConfigError(["a program plays by itself: --serve MODEL lets it play by hand"])
        return specs


def chat_command(argv: Sequence[str], signals: EndingSignals) -> int:
    """Plays the episode that the command line asks for; returns the exit code.

    Raises:
        ConfigError: the words, or the configuration, are wrong.
    """
    args, words = make_parser().parse_known_args(argv)
    try:
        chat = read_chat(args, words, signals)
        with _model(args.chat, chat) as (model, engine):
            return play(chat, model, engine)
    except CannotUse as error:
        print(error, file=sys.stderr)
        return 2
    except CannotBuild as error:
        raise ConfigError(error.problems) from None


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of all but the config's file and the settings."""
    parser = argparse.ArgumentParser(prog="python main.py CONFIG.yaml", allow_abbrev=False)
    parser.add_argument("--chat", required=True, metavar="MODEL")
    parser.add_argument("--as", dest="role", choices=ROLES)
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--episode", type=int, default=0, metavar="N")
    return parser


def read_chat(args: argparse.Namespace, words: Sequence[str], signals: EndingSignals) -> Chat:
    """Reads the config for one rank and one episode.

    Raises:
        ConfigError: it is wrong, or names no environment that the role needs.
    """
    loaded = load_config([*words, *ONE_EPISODE], check=False)
    config = loaded.config
    role = args.role or ("watcher" if config.environments else "environment")
    own: list[str] = []
    if args.episode < 0:
        raise ConfigError([f"--episode={args.episode}: 0 is the first"])
    if role == "environment":
        own += PERSONS_ENVIRONMENT
    elif not config.environments:
        raise ConfigError([f"--as {role} needs an environment: set agent.environment.name or path"])
    if loaded.sources[ENGINE] == "default" and not torch.cuda.is_available():
        own.append(f"{ENGINE}=hf")
    run_dir = Path(config.trainer.run_dir)
    out = args.out or run_dir / "chats" / time.strftime("%Y-%m-%d_%H-%M-%S")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError([f"--out={out} is there already: name another folder"])
    unwritable = list(unwritable_folder("--out", str(out)))
    if unwritable:
        raise ConfigError(unwritable)
    if RECORDS in features():
        # The record is written whatever the run keeps.
        own += ["~records.keep_gib", f"records.folder={out.absolute() / 'episodes'}"]
    # Read again as the episode is played, so that its config.yaml says so.
    own.append(f"actor_rollout_ref.model.path={tokenizer_folder(args.chat)}")
    own += [
        "actor_rollout_ref.model.lora_rank=0",
        "actor_rollout_ref.rollout.lora_as_adapter=false",
    ]
    config = load_config([*words, *ONE_EPISODE, *own], check=False).config
    return Chat(config, role, args.episode, out, Terminal(signals=signals))


@contextmanager
def _model(place: str, chat: Chat) -> Iterator[tuple[ModelSpec, BaseRollout]]:
    """Builds the engine with the model's weights; a person's engine has none."""
    config = chat.config
    if config.custom_algorithm:
        load_custom_algorithm(config.custom_algorithm)
    rollout = config.actor_rollout_ref.rollout
    device = find_device(config.trainer.device)
    worker_process.start_worker(device, deterministic=config.trainer.deterministic)
    # The engine has its weights in this type.
    settings = replace(config.actor_rollout_ref.model, dtype=rollout.dtype)
    if chat.role == "policy":
        spec = ModelSpec(settings, str(settings.path), device)
        tokens = turn_tokens(config, spec.tokenizer, spec.eos_token_ids)
        yield spec, PersonEngine(config, spec, tokens, chat.terminal)
        return
    with local_model(place, rollout.dtype) as folder:
        with reading_model(place):
            spec = ModelSpec(settings, folder.path, device)
            engine = build_rollout(config.resolved_rollout, spec)
            lm = spec.causal_lm(trainable=False)
            engine.update_weights(iter_weights(lm, lm.dtype), weight_manifest(lm))
            del lm
        yield spec, engine


# The episode


def play(chat: Chat, model: ModelSpec, engine: BaseRollout) -> int:
    """Plays the episode to its end and writes its record; returns the exit code."""
    specs = chat.specs
    described = describe(chat, specs)
    signals = chat.terminal.signals
    signals.step = "turn"
    signals.postpone = lambda: not chat.terminal.is_reading
    with closing(AgentRollout(chat.config, engine, model.tokenizer, specs, None)) as rollout:
        batch = rollout.batch_of(described)
        episode = batch.episodes[0]
        limits = batch.limits[episode.spec]
        _greet(chat, limits)
        person: PersonEnvironment | None = None
        calls: Calls | None = rollout.pool
        try:
            if chat.role == "environment":
                person = _persons_environment(chat.terminal)
                calls = CallsHere(replace(specs[0], environment=person.itself))
            _show_calls(chat, rollout, calls, episode, limits)
            rollout.loop.run(batch)
        except (EOFError, KeyboardInterrupt):
            _leave(episode)
        # A user who presses Ctrl-C once more has a whole record all the same.
        signals.close()
        if person is not None:
            episode.task = person.task
        # `PersonEngine` gave these up.
        if chat.role == "policy" and episode.ending == "engine_error":
            _leave(episode)
        return _record(chat, rollout, described, episode)


def _persons_environment(terminal: Terminal) -> PersonEnvironment:
    """Makes the environment that a person is, once its first message is there.

    Raises:
        EOFError, KeyboardInterrupt: the person leaves before that.
    """
    voice = EnvironmentsVoice(terminal)
    replies = itertools.chain([voice.ask()], iter(voice.ask, None))
    return PersonEnvironment(partial(next, replies))


def _show_calls(
    chat: Chat, rollout: AgentRollout, calls: Any, episode: Episode, limits: TurnLimits
) -> None:
    """Has the turn loop ask `calls`, and the person see what they answer."""
    shown: Any = ShownCalls(
        calls,
        chat.terminal,
        episode,
        limits,
        shows_policy=chat.role != "policy",
        pauses=chat.role == "watcher",
    )
    rollout.loop.environments = shown
    if rollout.history is not None:
        rollout.loop.history = ShownHistory(
            rollout.history, chat.terminal, shows_policy=chat.role != "policy"
        )


def describe(chat: Chat, specs: Sequence[AgentSpec]) -> DataProto:
    """Describes the episode: one of validation's."""
    info = step_info(step=0, seed=chat.config.data.run_seed, validate=True)
    names = [environment_name(spec.source) for spec in specs]
    return describe_episodes(
        1,
        1,
        info,
        first_group=chat.number,
        suite=EnvironmentSuite(names, [1.0] * len(names)),
        tasks=_task(chat),
    )


def _task(chat: Chat) -> list[dict[str, Any]]:
    """Returns the dataset's row that the environment is reset with, where it plays a dataset.

    Raises:
        ConfigError: the dataset has fewer rows.
    """
    data = chat.config.data
    files = data.val_files or data.train_files
    if chat.role == "environment" or not files:
        return []
    rows = read_tasks(files, data, -1)
    if chat.number >= len(rows):
        raise ConfigError([f"--episode={chat.number}: {files} hold {len(rows)} rows"])
    return [dict(rows[chat.number])]


def _greet(chat: Chat, limits: TurnLimits) -> None:
    """Says who the person is, and how they end the episode."""
    who = {
        "environment": "You are the environment: write what the policy reads first.",
        "policy": "You are the policy: answer the environment.",
        "watcher": "The policy plays; Enter goes on.",
    }[chat.role]
    turns = "" if limits.max_turn is None else f"{limits.max_turn} turns and "
    chat.terminal.show(f"{who} At most {turns}{limits.response_length} tokens.")
    if chat.role != "watcher":
        chat.terminal.show(ENVIRONMENT_HELP if chat.role == "environment" else HELP)


def _leave(episode: Episode) -> None:
    """Ends an episode that the person left; nothing failed."""
    episode.ending = LEFT
    episode.error = ""
    episode.first_error = ""
    if not episode.rows:
        episode.rows.append(Row(prompt_ids=[]))


def _record(chat: Chat, rollout: AgentRollout, described: DataProto, episode: Episode) -> int:
    """Writes the episode's record, and says where; returns the exit code."""
    terminal = chat.terminal
    turns = len(episode.turns)
    ending = f"{episode.ending}, {episode.error}" if episode.error else episode.ending
    if episode.ending == LEFT:
        ending = "the person left"
    if not turns:
        terminal.show(f"no turn was played ({ending}): nothing is recorded")
        return 0
    reward = sum(sum(row.reward_at.values()) for row in episode.rows)
    batch = rollout.rows_of(described, [episode])
    if RECORDS not in features():
        terminal.show(f"{turns} turns, reward {reward:g}, ending: {ending}")
        return 0
    from features.records.feature import write_episodes

    record_config(chat.out, chat.config, 0)
    write_episodes(chat.out / "episodes", batch)
    with as_os_errors(chat.out / "tokenizer"):
        rollout.tokens.tokenizer.save_pretrained(chat.out / "tokenizer")
    file = from_here(chat.out / "episodes/val-0.jsonl")
    config = from_here(chat.out / "config.yaml")
    terminal.show(f"{turns} turns, reward {reward:g}, ending: {ending}; recorded in {file}")
    terminal.show(f"again: python scripts/replay.py {config} {file}")
    return 0
