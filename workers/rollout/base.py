"""What every rollout engine does with its verbs, and the turn loop: prompts and episodes become the trainer's batch.

The loop runs single turns, many turns and tools, over any engine and any env workers: it resumes episodes (episode.py)
with what they asked for. It is event-driven: as soon as an episode's turn is sampled its environment steps, elsewhere,
and as soon as that has answered the next turn is submitted, while the other episodes go on generating. In lockstep all
turns are awaited before the next are submitted, in a fixed order.

Invariant: every request is answered exactly once, and on all ranks of a tensor-parallel group in the same order;
episodes, seeds, masks and the layout of the batch are the same for every engine.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data.containers import object_array, seed_for
from data.protocol import DataProto
from data.texts import unknown_name
from data.turn_tokens import Tools, TurnTokens
from data.watch import WATCH, beat
from training.config import RolloutConfig
from workers.environments.env_server import StepReply
from workers.environments.pool import EnvironmentPool
from workers.ranks.distributed import from_leader, is_leader
from workers.rollout.engine import Completion, Engine, Sampling
from workers.rollout.episode import (
    Ended,
    Episode,
    Play,
    Row,
    Sample,
    Sampler,
    TurnLimits,
    play_episode,
    unfinished,
)

# Where the engine has nothing to do, replies are awaited for this many seconds at a time.
WAIT_S = 1.0
# An engine that runs whole batches (`completes_batches`) is given what there is once no reply has come for so many
# seconds.
LULL_S = 0.005


@dataclass(eq=False)
class Batch:
    """Holds episodes that are played together; it has ended when none of them is left, and `finish` makes rows of it.

    Args:
        sampler: of an episode's next turn; its `max_tokens` is a bound of the turn beside `limits`.
        limits: what ends a turn and an episode, for each environment spec.
    """

    episodes: Sequence[Episode]
    sampler: Sampler
    limits: Sequence[TurnLimits]
    finish: Callable[[], DataProto] = field(init=False)
    left: int = field(default=0, init=False)
    waiting: deque[tuple[Episode, int]] = field(default_factory=deque, init=False)


@dataclass(eq=False)
class TurnLoop:
    """Runs batches of episodes to their end.

    Args:
        engine: what samples.
        tokens: joins turns; None: every episode has its prompt already and ends with its first answer.
        environments: None with `tokens` None, and on all ranks of a `group` but its leader.
        tools: per environment spec, its tools' schemas.
        lockstep: all outstanding turns are awaited before the next are submitted, in a fixed order, and a batch begins
            when the one before it has ended, so that the same inputs give the same batches.
        max_live: episodes at once; None: all.
        group: the tensor-parallel group, whose ranks share the engine; each runs this loop, and the leader, which is
            the first, tells the others what the environments answered.
    """

    engine: Engine
    _: KW_ONLY
    tokens: TurnTokens | None = None
    environments: EnvironmentPool | None = None
    tools: Sequence[Tools] = (None,)
    lockstep: bool = False
    max_live: int | None = None
    group: dist.ProcessGroup | None = None
    # Those that have not ended, those that have and were not asked for, and running episodes by their number, which
    # count on: their coroutines, whether they await the engine or their environment, when they started.
    batches: list[Batch] = field(default_factory=list, init=False)
    ended: list[Batch] = field(default_factory=list, init=False)
    plays: dict[int, tuple[Play, Episode, Batch]] = field(default_factory=dict, init=False)
    sampling: set[int] = field(default_factory=set, init=False)
    stepping: set[int] = field(default_factory=set, init=False)
    started: dict[int, float] = field(default_factory=dict, init=False)
    numbers: Iterator[int] = field(default_factory=itertools.count, init=False)
    late: bool = field(default=False, init=False)

    def add(self, batch: Batch) -> None:
        """Takes a batch in, to be played with those that are there."""
        WATCH.show(unfinished, self)
        batch.left = len(batch.episodes)
        (self.batches if batch.left else self.ended).append(batch)
        batch.waiting.extend(zip(batch.episodes, self.numbers, strict=False))

    def run(self, batch: Batch) -> None:
        """Fills the batch's episodes in; returns when every one has ended."""
        self.add(batch)
        while batch.left:
            self._advance()
        self.ended.remove(batch)

    def play(self, seconds: float = math.inf, to_idle: bool = False) -> list[Batch]:
        """Goes on with all batches until some have ended, which are returned, or for about so many seconds.

        With `to_idle` the engine must have nothing to sample, too.
        """
        until, self.late = time.perf_counter() + seconds, False
        while self.batches and not self.late and (not self.ended or (to_idle and self.sampling)):
            self._advance(until)
        ended, self.ended = self.ended, []
        return ended

    def drain(self) -> None:
        """Brings the running episodes to their end; those that wait go on waiting."""
        while self.plays:
            self._advance(admits=False)

    def _advance(self, until: float = math.inf, admits: bool = True) -> None:
        """Takes what environments and engine have for the episodes, and goes on with these."""
        if admits:
            self._admit()
        for key, reply in self._replies(until):
            self._resume(key, reply)
        for completion in self._completions():
            self._resume(int(completion.request_id), completion)

    def _admit(self) -> None:
        """Starts episodes while there is room for them, those of earlier batches first."""
        for batch in self.batches[: 1 if self.lockstep else None]:
            if not self.plays:
                self.engine.begin()
            while batch.waiting and (self.max_live is None or len(self.plays) < self.max_live):
                episode, key = batch.waiting.popleft()
                self.started[key] = time.perf_counter()
                play = play_episode(
                    episode, batch.sampler, batch.limits[episode.spec], self.tokens, self.tools
                )
                self.plays[key] = play, episode, batch
                self._resume(key, None)

    def _resume(self, key: int, answer: StepReply | Completion | None) -> None:
        """Gives an episode what it asked for, and begins what it asks for next."""
        beat("a turn was sampled or answered")
        if isinstance(answer, Completion) and not answer.versions:
            answer = replace(answer, versions=((self.engine.version, 0, len(answer.token_ids)),))
        play = self.plays[key][0]
        for awaiting in (self.sampling, self.stepping):
            awaiting.discard(key)
        try:
            request = play.send(answer)
            while isinstance(request, Sample):
                try:
                    self.engine.submit(str(key), request.token_ids, request.sampling)
                    self.sampling.add(key)
                    return
                # This request is refused; the engine goes on.
                except (ValueError, RuntimeError) as error:
                    request = play.throw(Ended("engine_error", f"{type(error).__name__}: {error}"))
            self.stepping.add(key)
            if is_leader(self.group):
                getattr(self.environments, request.kind)(key, *request.args)
        except StopIteration:
            self._ended(key)

    def _completions(self) -> list[Completion]:
        """Advances the engine; in lockstep until all that is sampled is done."""
        if not self.sampling:
            return []
        done = self.engine.step()
        while self.lockstep and len(done) < len(self.sampling):
            done += self.engine.step()
        return (
            sorted(done, key=lambda completion: int(completion.request_id))
            if self.lockstep
            else done
        )

    def _replies(self, until: float) -> list[tuple[int, StepReply]]:
        """Collects what the environments answered, and tells the other ranks of the group, also whether it is late."""
        if not self.stepping and until == math.inf:
            return []
        found = None
        if is_leader(self.group):
            found = self._poll(until) if self.stepping else [], time.perf_counter() >= until
        replies, self.late = from_leader(found, self.group)
        return replies

    def _poll(self, until: float) -> list[tuple[int, StepReply]]:
        """Waits for replies where there is nothing else to do, in lockstep for all of them."""
        assert self.environments is not None
        most = min(WAIT_S, max(until - time.perf_counter(), 0.0))
        replies = self.environments.poll(0.0 if self.sampling else most)
        while (self.lockstep or self.engine.completes_batches) and len(replies) < len(
            self.stepping
        ):
            late = self.environments.poll(WAIT_S if self.lockstep else LULL_S)
            if not (late or self.lockstep):
                break
            replies += late
        return sorted(replies, key=lambda reply: reply[0]) if self.lockstep else replies

    def _ended(self, key: int) -> None:
        """Has an episode that crashed start again, `max_refills` times at most."""
        _, episode, batch = self.plays.pop(key)
        episode.seconds = time.perf_counter() - self.started.pop(key)
        episode.first_error = episode.first_error or episode.error
        crashed = episode.ending in ("env_crash", "engine_error")
        if crashed and episode.attempt < batch.limits[episode.spec].max_refills:
            episode.restart()
            batch.waiting.append((episode, key))
            return
        batch.left -= 1
        if not batch.left:
            self.batches.remove(batch)
            self.ended.append(batch)


# Turns between the sampling seeds of an episode's restarts.
ATTEMPT = 10_000


class BaseRollout(Engine):
    """Is a rollout engine that also turns prompts into batches.

    Args:
        config: the rollout section; with `response_length` (tokens) and `max_model_len` filled in.
        eos_token_ids: any of them ends a turn (and is kept as the turn's last sampled token).
        pad_token_id: fills `responses` behind the last token.
    """

    def __init__(
        self, config: RolloutConfig, *, eos_token_ids: Sequence[int], pad_token_id: int
    ) -> None:
        if config.response_length is None or config.max_model_len is None:
            raise ValueError(
                "rollout.response_length or max_model_len is not set; give PPOConfig.resolved_rollout"
            )
        self.config = config
        self.response_length: int = config.response_length
        self.max_model_len: int = config.max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id
        # Of `inference` and `generate_sequences`.
        self.calls = 0
        # Whether a batch says of each sampled token which version of the weights it is of.
        self.records_versions = False

    def inference(
        self, inputs: Sequence[list[int]], sampling: Sampling | None = None
    ) -> list[Completion]:
        """Completes token-id prompts, in order, up to `max_model_len`; without `sampling`, as the config says.

        Each prompt's seed is of (`sampling.seed`, its place), so that the same call gives the same completions.
        """
        sampling = sampling or self.sampling({})
        # Of no call before, which may have been interrupted.
        self.calls, ids = self.calls + 1, [f"{self.calls}.{i}" for i in range(len(inputs))]
        for i, prompt_ids in enumerate(inputs):
            most = min(sampling.max_tokens, self.max_model_len - len(prompt_ids))
            own = replace(sampling, max_tokens=most, seed=seed_for(sampling.seed, 0, i))
            self.submit(ids[i], list(prompt_ids), own)
        done: dict[str, Completion] = {}
        while not done.keys() >= set(ids):
            done.update((c.request_id, c) for c in self.step())
        return [done[own] for own in ids]

    def generate_sequences(self, prompts: DataProto, **own: Any) -> DataProto:
        """Answers every row's prompt, as episodes of a single turn.

        Args:
            prompts: `input_ids`, `attention_mask` (B, P) left-padded; non-tensor `group_index`, `sample_index` (B,)
                and meta_info `seed` (run; 0), `global_steps` (the calls so far) seed the sampling; meta_info
                `validate`, `do_sample` choose it.
            own: of this call's sampling: temperature, top_k, top_p, max_tokens, stop_token_ids.
        Returns:
            What `build_batch` gives, one row a prompt, with `ending`; the prompts' own columns are kept.
        """
        batch = self.batch_of(prompts, **own)
        TurnLoop(self).run(batch)
        return self.rows_of(prompts, batch.episodes)

    # verl's other name.
    batch_generation = generate_sequences

    def batch_of(self, prompts: DataProto, **own: Any) -> Batch:
        """Makes episodes of a single turn of the prompts; arguments as of `generate_sequences`."""
        self.calls += 1
        info = {"seed": 0, "global_steps": self.calls} | prompts.meta_info
        width, most = prompts.batch["input_ids"].shape[1], self.response_length
        limits = TurnLimits(prompt_length=width, response_length=most, max_model_len=width + most)
        return Batch(start_episodes(prompts), self.sampler(info, **own), [limits])

    def rows_of(self, prompts: DataProto, episodes: Sequence[Episode]) -> DataProto:
        """Makes a batch of the prompts and their answers; see `generate_sequences`."""
        batch = self.build_batch(
            [episode.row for episode in episodes], prompts.batch["input_ids"].shape[1]
        )
        # Columns of the user's dataset travel on; prompts and responses say all that these two would.
        held = {"input_ids", "position_ids", *batch.batch.keys()}
        batch.batch.update(
            {name: tensor for name, tensor in prompts.batch.items() if name not in held}
        )
        columns = prompts.non_tensor_batch | {
            "ending": object_array([episode.ending for episode in episodes])
        }
        return replace(batch, non_tensor_batch=columns, meta_info=dict(prompts.meta_info))

    def sampling(self, meta_info: dict[str, Any], **own: Any) -> Sampling:
        """Makes the config's sampling, with validation's overrides where `meta_info["validate"]`.

        It is greedy where `do_sample` is false. Settings in `own` win.

        Raises:
            ValueError: one of `own` is unknown, or out of its bounds; names those there are.
        """
        allowed = Sampling.__dataclass_fields__.keys() - {"seed"}
        for name in own.keys() - allowed:
            raise unknown_name("sampling", name, allowed)
        validate, stops = (
            meta_info.get("validate"),
            () if self.config.ignore_eos else self.eos_token_ids,
        )
        cfg = self.config.val_kwargs if validate else self.config
        do_sample = meta_info.get("do_sample", not validate or self.config.val_kwargs.do_sample)
        drawn = (
            {name: cfg[name] for name in ("temperature", "top_k", "top_p")}
            if do_sample
            else {"temperature": 0.0}
        )
        made = Sampling(
            **{"max_tokens": self.response_length, "stop_token_ids": stops, **drawn, **own}
        )
        if not (made.temperature >= 0 and 0 < made.top_p <= 1 and made.max_tokens >= 1):
            raise ValueError(
                f"{made}: temperature must be 0 or more, top_p above 0 and at most 1, max_tokens 1 or more"
            )
        return made

    def sampler(self, meta_info: dict[str, Any], **own: Any) -> Sampler:
        """Makes the sampling of each turn, with a seed of its own, of (run, step, group, sample, turn).

        So no generator that others share decides, and the ranks of a tensor-parallel engine draw the same.
        """
        sampling = self.sampling(meta_info, **own)
        return lambda episode: replace(sampling, seed=turn_seed(meta_info, episode))

    def build_batch(self, rows: Sequence[Row], prompt_width: int) -> DataProto:
        """Makes tensors of rows, with P `prompt_width` and R `config.response_length`, in the dtypes of `FIELDS`.

        Returns:
            `prompts` (B, P), `responses`, `response_mask`, `turn_ids`, `rollout_log_probs`, where they are recorded
            `weight_versions` (B, R), `attention_mask` (B, P + R).
        """
        size, width = len(rows), self.response_length
        prompts = np.full((size, prompt_width), self.pad_token_id, np.int32)
        responses = np.full((size, width), self.pad_token_id, np.int32)
        log_probs = np.zeros((size, width), np.float32)
        mask, turns = np.zeros((size, width), np.int8), np.full((size, width), -1, np.int16)
        versions = np.full((size, width if self.records_versions else 0), -1, np.int32)
        attended = np.zeros((size, prompt_width + width), np.int8)
        for i, row in enumerate(rows):
            # An episode that never had a prompt attends to one token.
            prompt_ids, end = row.prompt_ids or [self.pad_token_id], len(row.ids)
            start = prompt_width - len(prompt_ids)
            prompts[i, start:] = prompt_ids
            responses[i, :end], log_probs[i, :end] = row.ids, row.own_log_probs
            attended[i, start : prompt_width + end] = 1
            for span in row.spans:
                sampled = slice(span.start, span.end)
                mask[i, sampled], turns[i, sampled], versions[i, sampled] = (
                    1,
                    span.turn,
                    span.version,
                )
        fields = {"prompts": prompts, "responses": responses, "response_mask": mask}
        fields |= {"turn_ids": turns, "attention_mask": attended}
        fields |= {"rollout_log_probs": log_probs} if self.config.calculate_log_probs else {}
        fields |= {"weight_versions": versions} if self.records_versions else {}
        return DataProto.from_dict(
            tensors={name: torch.from_numpy(field) for name, field in fields.items()}
        )


def start_episodes(prompts: DataProto) -> list[Episode]:
    """Makes an episode of each row, whose prompt is the row's own tokens without padding."""
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()  # (B, P)
    rows = np.arange(len(ids))
    groups = prompts.non_tensor_batch.get("group_index", rows)
    samples = prompts.non_tensor_batch.get("sample_index", np.zeros_like(rows))
    played = zip(groups.tolist(), samples.tolist(), ids, mask, strict=True)
    return [
        Episode(group=g, sample=k, rows=[Row(prompt_ids=row[own].tolist())])
        for g, k, row, own in played
    ]


def turn_seed(meta_info: dict[str, Any], episode: Episode) -> int:
    """Returns sampling's seed of (run, step, group, sample, turn).

    A restarted episode samples anew, and validation for itself.
    """
    turn = len(episode.turns) + ATTEMPT * episode.attempt
    sample = -1 - episode.sample if meta_info.get("validate") else episode.sample
    return seed_for(meta_info["seed"], meta_info["global_steps"], episode.group, sample, turn)
