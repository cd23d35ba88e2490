"""Plays recorded episodes again, without a model server: are environments, tokens and endings what the record says?

    python scripts/replay.py RUN_DIR_OR_CONFIG EPISODES.jsonl [--first N] [--loss] [key=value ...]

EPISODES.jsonl is a file of `agent.episodes_dir`; RUN_DIR holds the run's config.yaml (a validation alone leaves
RUN_DIR/config.validation.yaml beside it). The turn loop itself runs twice,
with an engine that answers with the recorded ids:

    tokens        beside environments that answer with the record:
                  rows (prompt, sampled ids, joins, mask, turns) and texts must come out the same
    environments  beside fresh agents of the config, reset with env_seed:
                  initial messages, observations, rewards, done and ending must

It prints one line for each difference, and ends with exit code 1 if there are any (2: nothing could be replayed). An
episode whose environment differs is played once more, which tells one that is not reproducible from one that has
changed. Of a refilled episode the file holds the last attempt. A crash must come again; a call that timed out is not
made again, and the turns before it must be the same.

With --loss the episodes go on through rewards and advantages to the policy loss and its gradient, with the config's
model on the CPU; `actor_rollout_ref.model.path=FOLDER` takes another one, such as the `huggingface` folder of a
checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from custom.agent import AgentSpec
from data.containers import object_array
from data.protocol import DataProto
from training.agent_trainer import environment_rewards
from training.config import PPOConfig
from training.config.checks import load_custom_algorithm
from training.config.loader import ConfigError, load_config
from training.core_algos import estimator_needs, get_kl_controller
from training.reward import apply_kl_penalty, compute_advantage, compute_reward
from training.run.metric_utils import strict_json
from workers.environments.env_server import StepReply
from workers.fsdp_workers import ActorRolloutRefWorker
from workers.model.builder import ModelSpec
from workers.multi_turn_rollout import AgentRollout, agent_specs, episode_record
from workers.rollout.base import BaseRollout, Batch, TurnLoop
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode import FAILURES, Episode, Row, Span, Turn

# So many episodes have their environments open at once.
TOGETHER = 16
NEEDED = (
    "uid",
    "episode_id",
    "data_source",
    "agent_index",
    "env_seed",
    "ending",
    "initial_messages",
    "turns",
    "rows",
)
PER_TOKEN = ("response_ids", "response_mask", "turn_ids", "log_probs", "rewards")
# One rank on the CPU, whatever the run had; retries are not repeated, and AgentRollout is to hand out its records.
HERE = (
    *(
        "trainer.device=cpu",
        "trainer.launcher=local",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
    ),
    *(
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.actor.ppo_epochs=1",
    ),
    *(
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "agent.max_refills=0",
        "agent.episodes_dir=replay",
    ),
)

Recorded = dict[str, Any]


def read_config(place: Path, overrides: Sequence[str] = ()) -> PPOConfig:
    """Reads a run's folder, or a YAML file, for one rank on the CPU; what only training needs is not checked."""
    file = place / "config.yaml" if place.is_dir() else place
    config = load_config([str(file), *HERE, *overrides], check=False).config
    environment = config.agent.environment
    if environment.isolation != "ray":
        return config
    return replace(
        config, agent=replace(config.agent, environment=replace(environment, isolation="process"))
    )


def read_episodes(path: Path, first: int | None = None) -> list[Recorded]:
    """Reads the episodes, each with `where` it stands; a last line that is cut short is left out, and said.

    Raises:
        ValueError: another line is no JSON object, or an episode lacks something.
    """
    episodes: list[Recorded] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if first is not None and len(episodes) >= first:
                break
            where = f"{path.name} line {number}"
            try:
                episodes.append({**json.loads(line), "where": where})
            except (ValueError, TypeError) as error:
                if line.endswith(b"\n"):
                    raise ValueError(f"{where} is no episode: {error}") from error
                print(f"{where} is cut short, left out: the process ended while it wrote")
                break
            if fault := fault_of(episodes[-1]):
                raise ValueError(f"{where}: {fault}")
    return episodes


def fault_of(episode: Recorded) -> str | None:
    """Says what keeps the record from being an episode."""
    if missing := [name for name in NEEDED if name not in episode]:
        return f"lacks {', '.join(missing)}; a file of agent.episodes_dir has them"
    for number, row in enumerate(episode["rows"]):
        lengths = {name: len(row[name]) for name in PER_TOKEN}
        if len(set(lengths.values())) > 1:
            return f"row {number} has {', '.join(f'{count} {name}' for name, count in lengths.items())}"
    return None


class RecordedEngine(BaseRollout):
    """Answers each turn with the ids that were sampled when the episode was recorded, and aborts every further one."""

    def __init__(self, config: PPOConfig, model: ModelSpec, episodes: Sequence[Recorded]) -> None:
        super().__init__(
            config.resolved_rollout,
            eos_token_ids=model.eos_token_ids,
            pad_token_id=model.pad_token_id,
        )
        self.turns = [sampled_turns(str(key), episode) for key, episode in enumerate(episodes)]
        self.pending: list[Completion] = []

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Takes the next recorded turn as the answer."""
        nothing = Completion(
            request_id=request_id, token_ids=[], log_probs=[], finish_reason="abort"
        )
        self.pending.append(next(self.turns[int(request_id)], nothing))

    def step(self) -> list[Completion]:
        """Returns the answers to all that was submitted."""
        done, self.pending = self.pending, []
        return done

    def update_weights(self, weights: Any, manifest: Any) -> None:
        """Does nothing: there are no weights."""


def sampled_turns(request_id: str, episode: Recorded) -> Iterator[Completion]:
    """Yields what was sampled, turn by turn, as far as the rows hold it."""
    for number, turn in enumerate(episode["turns"]):
        tokens = [
            (token_id, log_prob)
            for row in episode["rows"]
            for token_id, log_prob, of in zip(
                row["response_ids"], row["log_probs"], row["turn_ids"], strict=True
            )
            if of == number
        ]
        if not tokens:
            return
        ids, log_probs = map(list, zip(*tokens, strict=True))
        yield Completion(
            request_id=request_id,
            token_ids=ids,
            log_probs=log_probs,
            finish_reason=turn["finish_reason"],
        )


class RecordedEnvironments:
    """Answers every call as the environment did when the episode was recorded."""

    def __init__(self, episodes: Sequence[Recorded]) -> None:
        self.episodes = episodes
        self.turns = [iter(episode["turns"]) for episode in episodes]
        self.replies: list[tuple[int, StepReply]] = []

    def reset(self, key: int, spec_index: int, seed: int, task: dict[str, Any]) -> None:
        """Answers with the initial messages."""
        messages = self.episodes[key]["initial_messages"]
        self._answer(key, failed=not messages, messages=messages)

    def step(self, key: int, text: str) -> None:
        """Answers with the next turn's observation."""
        turn = next(self.turns[key])
        given = {
            "messages": turn["observation"],
            "reward": turn["reward"],
            "done": bool(turn["done"]),
        }
        self._answer(key, failed=turn["done"] is None, **given)

    def finish(self, key: int, ending: str) -> None:
        """Ends the episode; it fails here where it did so in the record."""
        self._answer(
            key, failed=ending not in FAILURES and self.episodes[key]["ending"] in FAILURES
        )

    def poll(self, timeout: float) -> list[tuple[int, StepReply]]:
        """Returns the answers that nobody has taken yet."""
        replies, self.replies = self.replies, []
        return replies

    def _answer(self, key: int, *, failed: bool, **given: Any) -> None:
        failure: Any = self.episodes[key]["ending"] if failed else ""
        self.replies.append((key, StepReply(failure=failure, **given)))


def describe(config: PPOConfig, episodes: Sequence[Recorded]) -> DataProto:
    """Describes the episodes as `AgentRollout.run` wants it, each with an agent of its own."""
    numbers = np.arange(len(episodes))
    columns = {name: object_array([episode[name] for episode in episodes]) for name in NEEDED[:3]}
    columns |= {
        "group_index": numbers,
        "sample_index": np.zeros_like(numbers),
        "agent_index": numbers,
    }
    columns["task"] = object_array([episode.get("task", {}) for episode in episodes])
    columns["env_seed"] = np.array([episode["env_seed"] for episode in episodes], dtype=np.int64)
    meta = {"global_steps": 0, "seed": config.data.run_seed, "seeded": False, "validate": False}
    return DataProto.from_dict(
        tensors={"agent": torch.tensor(numbers)}, non_tensors=columns, meta_info=meta
    )


def own_record(ending: str, record: dict[str, Any]) -> Recorded:
    """Returns the record as it would be read from a file."""
    return json.loads(strict_json({"ending": ending, **record}))


@dataclass(frozen=True)
class Player:
    """Replays episodes with the config's agents and the model's tokenizer."""

    config: PPOConfig
    model: ModelSpec
    specs: Sequence[AgentSpec]

    def open(self, episodes: Sequence[Recorded]) -> AgentRollout:
        """Opens the turn loop's surroundings, with a fresh agent for each episode."""
        own = [self.specs[episode["agent_index"] % len(self.specs)] for episode in episodes]
        engine = RecordedEngine(self.config, self.model, episodes)
        return AgentRollout(self.config, engine, self.model.tokenizer, own, None)

    def rejoin(self, episodes: Sequence[Recorded]) -> list[Recorded]:
        """Returns what the turn loop makes of the recorded ids and the recorded answers of the environments."""
        made = [Episode(group=key, sample=0, spec=key) for key in range(len(episodes))]
        with closing(self.open(episodes)) as rollout:
            loop = TurnLoop(
                rollout.engine,
                tokens=rollout.tokens,
                environments=RecordedEnvironments(episodes),
                tools=rollout.tools,
            )
            sampler = rollout.engine.sampler(describe(self.config, episodes).meta_info)
            loop.run(Batch(made, sampler, [rollout.limits(spec) for spec in rollout.specs]))
        return [own_record(episode.ending, episode_record(episode)) for episode in made]

    def play(self, episodes: Sequence[Recorded]) -> list[Recorded]:
        """Returns what the turn loop makes of the recorded ids and of environments that are asked anew."""
        with closing(self.open(episodes)) as rollout:
            batch = rollout.run(describe(self.config, episodes))
        facts = [facts for facts in batch.non_tensor_batch["episode_facts"] if facts is not None]
        return [
            own_record(fact["ending"], fact["record"]) | {"error": fact["error"]} for fact in facts
        ]

    def training_rows(self, episodes: Sequence[Recorded]) -> DataProto:
        """Returns the rows that the episodes were, or would be, trained on; failed ones settled as the config says."""
        made = [
            Episode(
                group=key,
                sample=0,
                rows=[row_of(row) for row in episode["rows"]],
                turns=[turn_of(turn) for turn in episode["turns"]],
                ending=episode["ending"],
            )
            for key, episode in enumerate(episodes)
        ]
        engine = RecordedEngine(self.config, self.model, episodes)
        with closing(AgentRollout(self.config, engine, self.model.tokenizer, [], None)) as rollout:
            return rollout.rows_of(describe(self.config, episodes), made)


def turn_of(record: Recorded) -> Turn:
    """Makes the turn whose record this is."""
    reply = None
    if record["done"] is not None:
        given = {name: record[name] for name in ("reward", "done", "tool_calls")}
        reply = StepReply(messages=record["observation"], seconds=record["env_seconds"], **given)
    return Turn(text=record["text"], finish_reason=record["finish_reason"], reply=reply)


def row_of(record: Recorded) -> Row:
    """Makes the row whose record this is."""
    row, end = Row(prompt_ids=record["prompt_ids"]), 0
    row.append_given(record["response_ids"], as_numbers(record["log_probs"]))
    for turn, tokens in groupby(record["turn_ids"]):
        start, end = end, end + len(list(tokens))
        if turn >= 0:
            row.spans.append(Span(start, end, turn))
    row.reward_at = {place: reward for place, reward in enumerate(record["rewards"]) if reward}
    return row


def as_numbers(values: Sequence[float | None]) -> list[float]:
    """Puts NaN where the file says null."""
    return [float("nan") if value is None else value for value in values]


def without_timed_out_call(episode: Recorded) -> Recorded:
    """Cuts the episode at a call that timed out, where the replay's engine has no further turn and aborts."""
    turns = episode["turns"]
    if episode["ending"] != "env_timeout" or not turns or turns[-1]["done"] is not None:
        return episode
    episode, last = deepcopy(episode), len(turns) - 1
    row = episode["rows"][-1]
    length = row["turn_ids"].index(last) if last in row["turn_ids"] else len(row["turn_ids"])
    episode["rows"][-1] = row | {name: row[name][:length] for name in PER_TOKEN}
    return episode | {"turns": turns[:-1], "ending": "engine_error"}


# What differs


def token_differences(recorded: Recorded, made: Recorded) -> Iterator[str]:
    """Names where texts and rows are not what the tokenizer makes of the episode."""
    for number, (old, new) in enumerate(zip(recorded["turns"], made["turns"], strict=False)):
        yield from difference(f"turn {number}, text of its ids", old["text"], new["text"])
    if len(recorded["rows"]) != len(made["rows"]):
        yield f"rows: recorded {len(recorded['rows'])}, replayed {len(made['rows'])}"
    for number, (old, new) in enumerate(zip(recorded["rows"], made["rows"], strict=False)):
        for name in ("prompt_ids", "response_ids", "response_mask", "turn_ids"):
            yield from first_difference(f"row {number}, {name}", old[name], new[name])


def play_differences(recorded: Recorded, played: Recorded) -> Iterator[str]:
    """Names where the environment answered otherwise; rewards of rows are compared where its answers are the same."""
    answers = difference(
        "initial messages", recorded["initial_messages"], played["initial_messages"]
    )
    for number, (old, new) in enumerate(zip(recorded["turns"], played["turns"], strict=False)):
        if (old["done"] is None) != (new["done"] is None):
            answers.append(
                f"turn {number}: {answered(old)} in the record, {answered(new)} in the replay"
            )
            continue
        for name in ("observation", "reward", "done"):
            answers += difference(f"turn {number}, {name}", old[name], new[name])
    yield from answers
    yield from ending_difference(recorded, played)
    if answers:
        return
    for number, (old, new) in enumerate(zip(recorded["rows"], played["rows"], strict=False)):
        yield from first_difference(f"row {number}, rewards", old["rewards"], new["rewards"])


def answered(turn: Recorded) -> str:
    """Says whether, and with what, the environment answered the turn."""
    return "not answered" if turn["done"] is None else f"answered {short(turn['observation'])}"


def ending_difference(recorded: Recorded, played: Recorded) -> list[str]:
    """Names the difference of two endings; none where they are the same."""

    def named(episode: Recorded) -> str:
        error = episode.get("error")
        return f"{episode['ending']} ({error.splitlines()[0]})" if error else episode["ending"]

    if recorded["ending"] == played["ending"]:
        return []
    # The replay's engine had no further turn to answer with.
    goes_on = played["ending"] == "engine_error"
    replayed = ": the episode goes on" if goes_on else f" {named(played)}"
    return [f"ending: recorded {named(recorded)}, replayed{replayed}"]


def difference(what: str, old: Any, new: Any) -> list[str]:
    """Names the difference of two values; none where they are equal."""
    return [] if old == new else [f"{what}: recorded {short(old)}, replayed {short(new)}"]


def first_difference(what: str, old: Sequence[float], new: Sequence[float]) -> list[str]:
    """Names the first place at which two lists differ."""
    place = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )
    if place < min(len(old), len(new)):
        return difference(f"{what}[{place}]", old[place], new[place])
    return difference(f"{what}, length", len(old), len(new))


def short(value: Any) -> str:
    """Writes a value in at most 100 characters, a single message as its text."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content", value[0])
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def compare(player: Player, episodes: Sequence[Recorded]) -> list[str]:
    """Writes one line for each difference between the episodes and their replay."""
    lines: list[str] = []

    def report(episode: Recorded, found: Iterator[str] | Sequence[str]) -> bool:
        name = f"{episode['where']}: {episode['data_source']}, episode {episode['episode_id']}"
        before = len(lines)
        lines.extend(f"{name}: {text}" for text in found)
        return len(lines) > before

    for start in range(0, len(episodes), TOGETHER):
        part = episodes[start : start + TOGETHER]
        for episode, made in zip(part, player.rejoin(part), strict=True):
            report(episode, token_differences(episode, made))
        asked = [
            without_timed_out_call(episode)
            for episode in part
            if episode["initial_messages"] or not timed_out(episode)
        ]
        first = player.play(asked) if asked else []
        pairs = zip(asked, first, strict=True)
        differ = [(old, new) for old, new in pairs if report(old, play_differences(old, new))]
        second = player.play([old for old, _ in differ]) if differ else []
        for (old, new), again in zip(differ, second, strict=True):
            if any(play_differences(new, again)):
                text = (
                    f"is not reproducible: two replays with env_seed={old['env_seed']} differ, too"
                )
                report(old, [f"the environment {text}"])
    return lines


def timed_out(episode: Recorded) -> bool:
    """Says whether a call of the episode ran into its deadline."""
    return episode["ending"] == "env_timeout"


# The loss


def loss_of(
    config: PPOConfig, batch: DataProto, say: Callable[[str], None] = print
) -> dict[str, float]:
    """Computes rewards, advantages, the policy loss and its gradient's norm, with the config's model.

    All rows are one mini-batch. The weights in memory take the step, and are forgotten.
    """
    if config.custom_algorithm:
        load_custom_algorithm(config.custom_algorithm)
    worker = ActorRolloutRefWorker(config, "actor")
    worker.init_model(1, config.batch_plan)
    batch.meta_info["temperature"] = config.actor_rollout_ref.rollout.temperature
    batch.batch["old_log_probs"] = worker.compute_log_prob(batch).batch["old_log_probs"]
    report_log_probs(batch, say)
    rewards, _ = compute_reward(batch, environment_rewards)  # (rows, response_len)
    batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = rewards
    # The reference starts from the config's model, too.
    if config.need_reference:
        batch.batch["ref_log_prob"] = batch.batch["old_log_probs"].clone()
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward:
        batch, _ = apply_kl_penalty(
            batch, get_kl_controller(algorithm.kl_ctrl), algorithm.kl_penalty
        )
    if "values" in estimator_needs(algorithm.adv_estimator):
        say(
            f"{algorithm.adv_estimator} reads a critic's values, of which there is no record: taken as zeros"
        )
        batch.batch["values"] = torch.zeros_like(batch.batch["old_log_probs"])
    batch = compute_advantage(
        batch,
        algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    metrics = worker.actor.update_policy(batch, replace(config.batch_plan.actor, mini_batches=1))
    wanted = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm")
    return {name: value for name, value in metrics.items() if name in wanted}


def report_log_probs(batch: DataProto, say: Callable[[str], None]) -> None:
    """Says in one line a row how far the recorded log-probs are from the model's, in nats."""
    if "rollout_log_probs" not in batch.batch:
        say("rollout.calculate_log_probs=false: there are no recorded log-probs to compare")
        return
    only = "which agree only where these weights generated the episodes"
    say(f"log-probs of the record and of the config's model, {only}")
    mask = batch.batch["response_mask"].bool()
    gaps = (batch.batch["rollout_log_probs"] - batch.batch["old_log_probs"]).abs()
    columns = batch.non_tensor_batch
    for i, (episode, row) in enumerate(
        zip(columns["episode_id"], columns["episode_row"], strict=True)
    ):
        gap = gaps[i][mask[i]]
        shown = f"mean {gap.mean():.2e}, max {gap.max():.2e}" if len(gap) else "nothing to train on"
        say(f"  episode {episode}, row {row}: {len(gap)} tokens, {shown}")


def summary(episodes: Sequence[Recorded], lines: Sequence[str]) -> str:
    """Says what was replayed, and what could not be."""
    endings = Counter(episode["ending"] for episode in episodes)
    parts = [
        f"{len(episodes)} episodes ({', '.join(f'{count} {name}' for name, count in endings.most_common())})"
    ]
    parts.append(f"{len(lines)} differences" if lines else "all the same")
    if count := endings["env_timeout"]:
        parts.append(f"{count} timed out, replayed up to that call")
    if count := sum(episode.get("attempt", 0) > 0 for episode in episodes):
        parts.append(f"{count} were tried again, and the file holds their last attempt")
    return "; ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Replays from the command line; returns 0 for the same, 1 for differences, 2 where nothing could be replayed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="RUN_DIR_OR_CONFIG")
    parser.add_argument("episodes", type=Path, metavar="EPISODES.jsonl")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N episodes")
    parser.add_argument(
        "--loss", action="store_true", help="also: rewards, advantages, policy loss, gradient norm"
    )
    args, overrides = parser.parse_known_args(argv)
    if wrong := [word for word in overrides if "=" not in word or word.startswith("-")]:
        parser.error(f"unknown: {' '.join(wrong)}")
    try:
        config = read_config(args.config, overrides)
        specs = agent_specs(config)
        if not specs:
            raise ValueError(
                f"{args.config} names no environment: agent.environment.name, or .path and .cls"
            )
        episodes = read_episodes(args.episodes, args.first)
        model = ModelSpec(
            config.actor_rollout_ref.model,
            str(config.actor_rollout_ref.model.path),
            torch.device("cpu"),
        )
        player = Player(config, model, specs)
        lines = compare(player, episodes)
    except (ConfigError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join([*lines, summary(episodes, lines)]))
    if args.loss and episodes:
        for name, value in loss_of(config, player.training_rows(episodes)).items():
            print(f"{name} {value:.6g}")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
