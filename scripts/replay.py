"""Plays recorded episodes again, without a model server, and names what differs from the record.

    python scripts/replay.py RUN_DIR_OR_CONFIG EPISODES.jsonl [--first N] [--loss] [key=value ...]
    python scripts/replay.py RUN_DIR_OR_CONFIG EPISODES.jsonl --episode ID --until-turn K
        [--model PATH] [--times N] [key=value ...]

EPISODES.jsonl is a file of RUN_DIR/episodes; RUN_DIR holds the run's config.yaml, and config.N.yaml
where it went on with other settings: those of the episodes' step are taken (a validation alone
leaves RUN_DIR/config.validation.yaml beside it). A config may be a stranger's: one that asks for
code other than this project's (an environment in a file of yours, say) is to be named itself,
RUN_DIR/config.yaml in place of RUN_DIR. The turn loop itself runs twice, with an engine that
answers with the recorded ids:

    tokens        beside environments that answer with the record:
                  rows (prompt, sampled ids, joins, mask, turns) and texts must come out the same
    environments  beside fresh agents of the config, reset with env_seed:
                  initial messages, observations, rewards, done and ending must

It prints one line for each difference, and ends with exit code 1 if there are any (2: nothing could
be replayed). An episode whose environment differs is played once more, which tells one that is not
reproducible from one that has changed. The file holds the last attempt of a refilled episode. A
crash must come again; a call that timed out is not made again, and the turns before it must be the
same.

With --loss the episodes go on through rewards and advantages to the policy loss and its gradient,
with the config's model on the CPU; `actor_rollout_ref.model.path=FOLDER` takes another one, such as
the `huggingface` folder of a checkpoint.

With --until-turn the episode that --episode names (else the file's first) is not compared: the
turns before K are answered as recorded, and from turn K on (the first is 1) the config's model, or
the one of --model, plays. PATH is a Hugging Face folder, or a global_step_N of the run.
`data.seed=N` samples otherwise, and with --times N it goes on from there N times. The state before
turn K is had as a run has it that continues from states (features/branching): by the environment's
snapshot, by a copy, or by playing the turns again, whichever holds in a trial first. Where none
does, and for programs, the turns are played again and nothing is proved, which is said.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from scripts.replay_continued import (
    config_words_of,
    load_model,
    play_on,
    require_turn,
    tell_conversation,
)
from scripts.replay_differences import compare
from scripts.replay_episodes import Recorded, read_episodes
from scripts.replay_episodes import row_of as row_of
from scripts.replay_loss import loss_of
from scripts.replay_player import Player
from scripts.replay_states import NoState, play_on_from_state, tell_continuations
from training.config import PPOConfig
from training.config.found_config import require_no_code
from training.config.loader import ConfigError, load_config
from training.run.recorded_config import config_of_step
from workers.model.builder import ModelSpec
from workers.multi_turn_rollout import agent_specs

# One rank on the CPU, whatever the run had.
ONE_RANK = (
    "trainer.device=cpu",
    "trainer.launcher=local",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
    "actor_rollout_ref.actor.ppo_epochs=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
)
# Retries are not repeated, and AgentRollout is to hand out its records.
WITH_RECORDS = ("agent.max_refills=0", "records.keep_gib=1")
# Nothing is written.
NO_PLACES = (
    "records.folder=null",
    "trainer.default_local_dir=null",
    "trainer.rollout_data_dir=null",
    "trainer.validation_data_dir=null",
)
# An error shows so many ids.
NAMES_SHOWN = 5
# Exit codes.
SAME = 0
DIFFERENT = 1
NOTHING_REPLAYED = 2


def read_config(place: Path, overrides: Sequence[str] = (), step: int | None = None) -> PPOConfig:
    """Reads a run's folder, or a YAML file, for one rank on the CPU.

    Args:
        step: whose settings are meant, where a run went on with others; None: the last ones.
    What only training needs is not checked.

    Raises:
        ConfigError: it is wrong; or a folder's asks for code, which nobody has named.
    """
    file = config_of_step(place, step) if place.is_dir() else place
    words = [str(file), *ONE_RANK, *WITH_RECORDS, *NO_PLACES, *overrides]
    loaded = load_config(words, check=False)
    if place.is_dir():
        require_no_code(loaded, str(file), f"python scripts/replay.py {file} EPISODES.jsonl …")
    config = loaded.config
    environment = config.agent.environment
    if environment.isolation != "ray":
        return config
    environment = replace(environment, isolation="process")
    return replace(config, agent=replace(config.agent, environment=environment))


def player_of(config: PPOConfig, place: Path) -> Player:
    """Makes what plays the config's agents, with its model's tokenizer.

    Raises:
        ValueError: the config, read from `place`, names no environment.
    """
    if not config.environments:
        raise ValueError(f"{place} names no environment: agent.environment.name, or .path and .cls")
    model = ModelSpec(
        config.actor_rollout_ref.model,
        str(config.actor_rollout_ref.model.path),
        torch.device("cpu"),
    )
    return Player(config, model, agent_specs(config))


def step_of(place: Path, episodes: Sequence[Recorded]) -> int | None:
    """Returns a step that has the settings of all the episodes' steps; None without episodes.

    Raises:
        ValueError: a run's folder has different settings for them.
    """
    steps = sorted({int(episode["step"]) for episode in episodes if "step" in episode})
    if not steps:
        return None
    files = {config_of_step(place, step).name: step for step in steps}
    if len(files) > 1:
        raise ValueError(
            f"the episodes are of steps {steps[0]} to {steps[-1]}, which were made with different "
            f"settings ({', '.join(files)}): replay the files of single steps, or name one of these"
        )
    return steps[0]


def chosen_episode(episodes: Sequence[Recorded], episode_id: str) -> Recorded:
    """Returns the episode of this id.

    Raises:
        ValueError: there is none; it names the first that there are.
    """
    for episode in episodes:
        if episode["episode_id"] == episode_id:
            return episode
    there = ", ".join(str(episode["episode_id"]) for episode in episodes[:NAMES_SHOWN])
    raise ValueError(f"--episode {episode_id} is not in the file, which has {there} …")


def summary(episodes: Sequence[Recorded], lines: Sequence[str]) -> str:
    """Describes what was replayed, and what could not be."""
    endings = Counter(episode["ending"] for episode in episodes)
    counts = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
    parts = [f"{len(episodes)} episodes ({counts})"]
    parts.append(f"{len(lines)} differences" if lines else "all the same")
    if endings["env_timeout"]:
        parts.append(f"{endings['env_timeout']} timed out, replayed up to that call")
    retried = [episode for episode in episodes if episode.get("attempt", 0) > 0]
    if retried:
        parts.append(f"{len(retried)} were tried again, and the file holds their last attempt")
    return "; ".join(parts)


def go_on(player: Player, lm: nn.Module, episode: Recorded, until_turn: int, times: int) -> None:
    """Plays an episode on from the state before a turn, and prints how it went on.

    Raises:
        ValueError: there is no such turn, or it is to go on several times and no state can be had.
    """
    require_turn(episode, until_turn)
    try:
        continued = play_on_from_state(player, lm, episode, until_turn, times)
    except NoState as error:
        if times > 1:
            why = str(error) or "it has none that could be continued from"
            raise ValueError(
                f"--times {times} needs the state before turn {until_turn}: {why}"
            ) from error
        if str(error):
            print(f"{error}; what follows may begin in another state")
        continued = [play_on(player, lm, episode, until_turn)]
    tell_continuations(episode, continued, until_turn, tell_conversation)


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of all but the overrides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="RUN_DIR_OR_CONFIG")
    parser.add_argument("episodes", type=Path, metavar="EPISODES.jsonl")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N episodes")
    parser.add_argument("--episode", metavar="ID", help="only the episode of this episode_id")
    parser.add_argument(
        "--until-turn", type=int, metavar="K", help="go on from turn K with a model; the first is 1"
    )
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="what goes on: a model folder, or global_step_N"
    )
    parser.add_argument(
        "--times", type=int, default=1, metavar="N", help="go on from there N times"
    )
    parser.add_argument(
        "--loss", action="store_true", help="also: rewards, advantages, policy loss, gradient norm"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Replays from the command line; returns the exit code."""
    parser = make_parser()
    args, overrides = parser.parse_known_args(argv)
    wrong = [word for word in overrides if "=" not in word or word.startswith("-")]
    if wrong:
        parser.error(f"unknown: {' '.join(wrong)}")
    if args.model is not None and args.until_turn is None:
        parser.error("--model is what goes on from a turn: give --until-turn K, too")
    if args.times < 1 or (args.times > 1 and args.until_turn is None):
        parser.error("--times is how often it goes on, 1 or more, from a turn: --until-turn K")
    try:
        episodes = read_episodes(args.episodes, args.first)
        if args.episode is not None:
            episodes = [chosen_episode(episodes, args.episode)]
        step = step_of(args.config, episodes)
        config = read_config(args.config, [*config_words_of(args.model), *overrides], step)
        player = player_of(config, args.config)
        if args.until_turn is not None:
            go_on(player, load_model(config, args.model), episodes[0], args.until_turn, args.times)
            return SAME
        lines = compare(player, episodes)
    except (ConfigError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return NOTHING_REPLAYED
    print("\n".join([*lines, summary(episodes, lines)]))
    if args.loss and episodes:
        for name, value in loss_of(config, player.training_rows(episodes)).items():
            print(f"{name} {value:.6g}")
    return DIFFERENT if lines else SAME


if __name__ == "__main__":
    sys.exit(main())
