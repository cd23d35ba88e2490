"""Plays recorded episodes through the turn loop, with an engine that answers with the recorded ids.

Invariant: the turn loop itself, the agents and the tokenizer are those of training; only the
engine, and for `rejoin` the environments, answer from the record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from custom.agent import AgentSpec
from data.array_ops import object_array
from data.protocol import DataProto
from features.records.episode_records import episode_records
from scripts.replay_episodes import NAMES, Recorded, as_read, row_of, turn_of
from training.config import PPOConfig
from workers.environments.reply import StepReply
from workers.model.builder import ModelSpec
from workers.multi_turn_rollout import AgentRollout
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode import FAILURES, Episode, Row
from workers.rollout.turn_loop import Batch, TurnLoop


class RecordedEngine(BaseRollout):
    """Answers each turn with the ids that were sampled in it, and aborts every further one.

    The request of an episode is the number that it has among `episodes`, as text. A program's has a
    number of its own behind it, and so has what an environment asked for: there may be several at
    once, and each is answered by what was sampled behind the same ids.
    """

    def __init__(self, config: PPOConfig, model: ModelSpec, episodes: Sequence[Recorded]) -> None:
        super().__init__(
            config.resolved_rollout,
            eos_token_ids=model.eos_token_ids,
            pad_token_id=model.pad_token_id,
        )
        self.episodes = episodes
        self.turns = [
            sampled_turns(str(key), episode, asides=False) for key, episode in enumerate(episodes)
        ]
        self.answered: set[tuple[int, int]] = set()
        self.pending: list[Completion] = []

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Takes the next recorded turn as the answer."""
        aborted = Completion(
            request_id=request_id, token_ids=[], log_probs=[], finish_reason="abort"
        )
        key, _, number = request_id.partition(".")
        if number:
            completion = self._sampled_behind(int(key), prompt_ids)
            self.pending.append(replace(completion or aborted, request_id=request_id))
            return
        self.pending.append(next(self.turns[int(request_id)], aborted))

    def _sampled_behind(self, key: int, prompt_ids: list[int]) -> Completion | None:
        """Returns the first turn that was sampled behind these ids and was not taken yet."""
        episode = self.episodes[key]
        turns = episode["turns"]
        # A program's turns all are its requests.
        has_asides = any(turn.get("aside") for turn in turns)
        for number, completion in enumerate(sampled_turns(str(key), episode)):
            if (key, number) in self.answered:
                continue
            if has_asides and not turns[number].get("aside"):
                continue
            if _ids_before(episode, number) == prompt_ids:
                self.answered.add((key, number))
                return completion
        return None

    def step(self) -> list[Completion]:
        """Returns the answers to all that was submitted."""
        completions = self.pending
        self.pending = []
        return completions

    def update_weights(self, weights: Any, manifest: Any) -> None:
        """Does nothing: there are no weights."""


def sampled_turns(request_id: str, episode: Recorded, asides: bool = True) -> Iterator[Completion]:
    """Yields what was sampled, turn by turn, as far as the rows hold it.

    Args:
        asides: with what the environment asked for.
    """
    for number, turn in enumerate(episode["turns"]):
        if turn.get("aside") and not asides:
            continue
        token_ids = []
        log_probs = []
        for row in episode["rows"]:
            for place, turn_id in enumerate(row["turn_ids"]):
                if turn_id == number:
                    token_ids.append(row["response_ids"][place])
                    log_probs.append(row["log_probs"][place])
        if not token_ids:
            return
        yield Completion(
            request_id=request_id,
            token_ids=token_ids,
            log_probs=log_probs,
            finish_reason=turn["finish_reason"],
        )


def _ids_before(episode: Recorded, number: int) -> list[int]:
    """Returns what stands before a turn in the row that it was sampled in."""
    for row in episode["rows"]:
        turn_ids = list(row["turn_ids"])
        if number in turn_ids:
            return [*row["prompt_ids"], *row["response_ids"][: turn_ids.index(number)]]
    return []


def asked_turns(episode: Recorded) -> list[Recorded]:
    """Lists the turns that the environment was asked for.

    Not those that were written for a new context, or that the end of a context cut; the last turn
    may be one that it failed to answer.
    """
    turns = episode["turns"]
    last = len(turns) - 1
    return [turn for k, turn in enumerate(turns) if turn["done"] is not None or k == last]


class RecordedEnvironments:
    """Answers every call as the environment did when the episode was recorded.

    Args:
        episodes: the records.
        played: the episodes that are played of them, to which the tokens are added that the
            environment asked for, in a row aside.
    """

    def __init__(self, episodes: Sequence[Recorded], played: Sequence[Episode]) -> None:
        self.episodes = episodes
        self.played = played
        self.turns = [iter(asked_turns(episode)) for episode in episodes]
        self.replies: list[tuple[int, StepReply]] = []

    def reset(self, key: int, spec_index: int, seed: int, task: dict[str, Any]) -> None:
        """Answers with the initial messages."""
        messages = self.episodes[key]["initial_messages"]
        self._add_asides(key, self.episodes[key])
        self._answer(key, failed=not messages, messages=messages)

    def step(self, key: int, text: str) -> None:
        """Answers with the next turn's observation."""
        turn = next(self.turns[key])
        self._add_asides(key, turn)
        self._answer(
            key,
            failed=turn["done"] is None,
            messages=turn["observation"],
            reward=turn["reward"],
            done=bool(turn["done"]),
            replaces_history=turn.get("replaces_history", False),
        )

    def _add_asides(self, key: int, recorded: Recorded) -> None:
        """Makes the row aside as long as all that the environment had asked for by then."""
        tokens = recorded.get("aside_tokens", 0)
        if not tokens:
            return
        rows = self.played[key].rows
        aside = next((row for row in rows if row.aside), None)
        if aside is None:
            aside = Row(prompt_ids=[], aside=True)
            rows.append(aside)
        aside.append_tokens([0] * (tokens - len(aside.ids)))

    def finish(self, key: int, ending: str) -> None:
        """Ends the episode; it fails here where it did so in the record."""
        failed_then = self.episodes[key]["ending"] in FAILURES
        self._answer(key, failed=failed_then and ending not in FAILURES)

    def poll(self, timeout: float) -> list[tuple[int, StepReply]]:
        """Returns the answers that nobody has taken yet."""
        replies = self.replies
        self.replies = []
        return replies

    def _answer(self, key: int, *, failed: bool, **reply: Any) -> None:
        """Queues a reply to the episode's call; of a failed one with the recorded failure."""
        failure: Any = self.episodes[key]["ending"] if failed else ""
        self.replies.append((key, StepReply(failure=failure, **reply)))


def describe(config: PPOConfig, episodes: Sequence[Recorded]) -> DataProto:
    """Describes the episodes as `AgentRollout.run` wants it, each with an agent of its own."""
    numbers = np.arange(len(episodes))
    columns = {name: object_array([episode[name] for episode in episodes]) for name in NAMES}
    columns["group_index"] = numbers
    # What is drawn for an episode's contexts is drawn by it.
    columns["sample_index"] = np.array(
        [episode.get("sample", 0) for episode in episodes], dtype=np.int64
    )
    columns["agent_index"] = numbers
    columns["task"] = object_array([episode.get("task", {}) for episode in episodes])
    columns["env_seed"] = np.array([episode["env_seed"] for episode in episodes], dtype=np.int64)
    return DataProto.from_dict(
        tensors={"agent": torch.tensor(numbers)},
        non_tensors=columns,
        meta_info={
            "global_steps": 0,
            "seed": config.data.run_seed,
            "seeded": False,
            "validate": False,
        },
    )


@dataclass(frozen=True)
class Player:
    """Replays episodes with the config's agents and the model's tokenizer."""

    config: PPOConfig
    model: ModelSpec
    specs: Sequence[AgentSpec]

    def open(self, episodes: Sequence[Recorded], specs: Sequence[AgentSpec]) -> AgentRollout:
        """Opens what surrounds the turn loop, with a fresh agent of each spec."""
        engine = RecordedEngine(self.config, self.model, episodes)
        return AgentRollout(self.config, engine, self.model.tokenizer, specs, None)

    def _specs_of(self, episodes: Sequence[Recorded]) -> list[AgentSpec]:
        """Lists the spec of each episode's agent."""
        return [self.specs[episode["agent_index"] % len(self.specs)] for episode in episodes]

    def rejoin(self, episodes: Sequence[Recorded]) -> list[Recorded]:
        """Returns what the turn loop makes of the recorded ids and the recorded answers."""
        played = [
            Episode(
                group=key,
                sample=episode.get("sample", 0),
                spec=key,
                seed=int(episode["env_seed"]),
            )
            for key, episode in enumerate(episodes)
        ]
        with closing(self.open(episodes, self._specs_of(episodes))) as rollout:
            loop = TurnLoop(
                rollout.engine,
                tokens=rollout.tokens,
                environments=RecordedEnvironments(episodes, played),
                tools=rollout.tools,
                history=rollout.history,
            )
            sampler = rollout.engine.sampler(describe(self.config, episodes).meta_info)
            limits = [rollout.limits(spec) for spec in rollout.specs]
            loop.run(Batch(played, sampler, limits))
        for episode in played:
            episode.rows = [row for row in episode.rows if not row.aside]
        records = episode_records(played)
        return [
            as_read(episode.ending, record) for episode, record in zip(played, records, strict=True)
        ]

    def play(self, episodes: Sequence[Recorded]) -> list[Recorded]:
        """Returns what the turn loop makes of the recorded ids and of fresh environments."""
        with closing(self.open(episodes, self._specs_of(episodes))) as rollout:
            batch = rollout.run(describe(self.config, episodes))
        played = []
        for facts in batch.non_tensor_batch["episode_facts"]:
            # Only an episode's first row has them.
            if facts is not None:
                episode = as_read(facts["ending"], json.loads(facts["record"]))
                episode["error"] = facts["error"]
                played.append(episode)
        return played

    def training_rows(self, episodes: Sequence[Recorded]) -> DataProto:
        """Returns the rows that the episodes were, or would be, trained on.

        What becomes of failed ones is what the config says.
        """
        recorded = []
        for key, record in enumerate(episodes):
            episode = Episode(
                group=key,
                sample=0,
                rows=[row_of(row) for row in record["rows"]],
                turns=[turn_of(turn) for turn in record["turns"]],
                ending=record["ending"],
            )
            recorded.append(episode)
        with closing(self.open(episodes, specs=[])) as rollout:
            return rollout.rows_of(describe(self.config, episodes), recorded)
