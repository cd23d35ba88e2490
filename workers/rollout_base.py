"""The rollout engine's interface and the one turn loop over it.

An engine has four verbs: `submit`, `step`, `abort` and `update_weights`. Everything else (episodes, seeds, masks, the batch that the trainer
sees) is here and the same for every engine. Invariant: the token ids that an engine sampled are kept as they came; nothing is re-tokenised.

    token_ids     = P0 P1 | A0 A1 A2 | E0 E1 | A3 A4        P: prompt, A: sampled, E: the environment's reply
    response_mask =         1  1  1    0  0    1  1
    turn_ids      =         0  0  0   -1 -1    1  1
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from data.protocol import DataProto
from data.seeding import seed_for
from training.config import RolloutConfig
from workers.memory import return_free_heap

FinishReason = Literal["stop", "length", "abort"]
NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request is sampled. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 switch the filters off."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine sampled for one request; `log_probs` are nats under the distribution that was sampled."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason


@dataclass(kw_only=True)
class Episode:
    """One conversation while it is being generated; `prompt_ids` never changes, the three response lists grow together."""

    prompt_ids: list[int]
    group: int
    sample: int
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    turn: int = 0
    ending: str = ""

    def append_sampled(self, completion: Completion) -> None:
        count = len(completion.token_ids)
        self.response_ids += completion.token_ids
        self.response_mask += [1] * count
        self.log_probs += completion.log_probs
        self.turn_ids += [self.turn] * count
        self.ending = completion.finish_reason


NextTurn = Callable[[Episode, Completion], bool]
"""Looks at a finished turn, may append the environment's reply to the episode, and says whether another turn follows."""


def single_turn(episode: Episode, completion: Completion) -> bool:
    """The one-step agent: the first answer ends the episode."""
    return False


class BaseRollout(ABC):
    """A rollout engine and the turn loop over it.

    Args:
        config: the rollout section; with `response_length` (tokens) and `max_model_len` filled in.
        eos_token_ids: any of them ends a turn (and is kept as the turn's last sampled token).
        pad_token_id: fills `responses` behind the last token.
    """

    def __init__(self, config: RolloutConfig, *, eos_token_ids: Sequence[int], pad_token_id: int) -> None:
        if config.response_length is None:
            raise ValueError("rollout.response_length is not set; give PPOConfig.resolved_rollout")
        self.config = config
        self.response_length: int = config.response_length
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id

    @abstractmethod
    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queues one request."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Advances the engine and returns what finished; every submitted request is returned exactly once unless aborted."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Forgets a request; its completion is never returned."""

    @abstractmethod
    def update_weights(self, weights: NamedTensors, manifest: dict[str, torch.Size]) -> None:
        """Replaces all weights. `manifest` (names and shapes of `weights`) is checked before the first tensor is touched.

        Raises:
            ValueError: naming tensors that are missing, unknown or of another shape.
        """

    def begin(self) -> None:  # noqa: B027  (optional hook)
        """Called before each batch of episodes: drops caches, so that a batch's results depend on its inputs alone."""

    def sleep(self) -> None:
        """Gives the memory that only generation needs back, while the trainer works; on a CPU that is free heap."""
        return_free_heap()

    def wake_up(self) -> None:  # noqa: B027  (optional hook)
        """Takes back what `sleep` freed; weights may have to be sent again."""

    def release(self) -> None:
        self.sleep()

    def resume(self) -> None:
        self.wake_up()

    def inference(self, inputs: Sequence[list[int]], sampling: Sampling | None = None) -> list[Completion]:
        """Completes token-id prompts, in order; without `sampling`, as the config says."""
        sampling = sampling or self.sampling({})
        for i, prompt_ids in enumerate(inputs):
            self.submit(str(i), list(prompt_ids), sampling)
        done: dict[str, Completion] = {}
        while len(done) < len(inputs):
            done.update((c.request_id, c) for c in self.step())
        return [done[str(i)] for i in range(len(inputs))]

    def batch_generation(self, batch: DataProto) -> DataProto:
        return self.generate_sequences(batch)

    def generate_sequences(self, prompts: DataProto, next_turn: NextTurn = single_turn) -> DataProto:
        """Runs every row's episode to its end.

        Args:
            prompts: `input_ids`, `attention_mask` (B, P) left-padded; non-tensor `group_index`, `sample_index` (B,) where sampling is seeded;
                meta_info `validate`, `do_sample` choose the sampling; with `seeded`, `seed` (run) and `global_steps` seed it.
        Returns:
            `prompts` (B, P), `responses`, `response_mask`, `turn_ids`, `rollout_log_probs` (B, R), `input_ids`, `attention_mask`,
            `position_ids` (B, P + R); the prompts' non-tensor fields are kept. R is `config.response_length`.
        """
        self.begin()
        episodes = start_episodes(prompts)
        self.run_episodes(episodes, self.sampling(prompts.meta_info), prompts.meta_info, next_turn)
        return self.build_batch(prompts, episodes)

    def sampling(self, meta_info: dict[str, Any]) -> Sampling:
        """The config's sampling, with the validation overrides where `meta_info["validate"]`; greedy where `do_sample` is false."""
        cfg = self.config.val_kwargs if meta_info.get("validate") else self.config
        do_sample = meta_info.get("do_sample", self.config.val_kwargs.do_sample if meta_info.get("validate") else True)
        return Sampling(
            max_tokens=self.response_length,
            temperature=cfg.temperature if do_sample else 0.0,
            top_k=cfg.top_k if do_sample else -1,
            top_p=cfg.top_p if do_sample else 1.0,
            stop_token_ids=() if self.config.ignore_eos else self.eos_token_ids,
        )

    def run_episodes(
        self, episodes: list[Episode], sampling: Sampling, meta_info: dict[str, Any], next_turn: NextTurn
    ) -> None:
        """The turn loop: an episode's next turn is submitted as soon as its last one came back, while the others go on generating."""
        running: dict[str, Episode] = {}

        def submit(number: int, episode: Episode) -> None:
            left = self.response_length - len(episode.response_ids)
            # The ranks of a tensor-parallel engine sample by themselves, and must agree.
            seeded = meta_info.get("seeded") or self.config.tensor_model_parallel_size > 1
            request = replace(sampling, max_tokens=left, seed=turn_seed(meta_info, episode) if seeded else None)
            running[str(number)] = episode
            self.submit(str(number), episode.prompt_ids + episode.response_ids, request)

        for number, episode in enumerate(episodes):
            submit(number, episode)
        while running:
            for completion in self.step():
                episode = running.pop(completion.request_id)
                episode.append_sampled(completion)
                if next_turn(episode, completion):
                    episode.turn += 1
                    submit(int(completion.request_id), episode)

    def build_batch(self, prompts: DataProto, episodes: list[Episode]) -> DataProto:
        width = self.response_length
        prompt_ids, prompt_mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]  # (B, P)
        responses = pad_right([e.response_ids for e in episodes], width, self.pad_token_id)  # (B, R)
        valid = pad_right([[1] * len(e.response_ids) for e in episodes], width, 0)
        attention_mask = torch.cat([prompt_mask, valid.to(prompt_mask.dtype)], dim=1)  # (B, P + R)
        tensors = {
            "prompts": prompt_ids,
            "responses": responses,
            "response_mask": pad_right([e.response_mask for e in episodes], width, 0),
            "turn_ids": pad_right([e.turn_ids for e in episodes], width, -1),
            "input_ids": torch.cat([prompt_ids, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        }
        own = {name: prompts.batch[name] for name in prompts.batch.keys() if name not in tensors}  # noqa: SIM118
        tensors |= own  # columns of the user's dataset travel on
        if self.config.calculate_log_probs:
            tensors["rollout_log_probs"] = pad_right([e.log_probs for e in episodes], width, 0.0)
        non_tensors = dict(prompts.non_tensor_batch)
        non_tensors["ending"] = np.array([e.ending for e in episodes], dtype=object)
        return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors, meta_info=dict(prompts.meta_info))


def start_episodes(prompts: DataProto) -> list[Episode]:
    """One episode a row, from the row's own tokens without padding."""
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()  # (B, P)
    rows = np.arange(len(ids))
    groups = prompts.non_tensor_batch.get("group_index", rows)
    samples = prompts.non_tensor_batch.get("sample_index", np.zeros_like(rows))
    return [
        Episode(prompt_ids=ids[i][mask[i]].tolist(), group=int(groups[i]), sample=int(samples[i]))
        for i in range(len(ids))
    ]


def turn_seed(meta_info: dict[str, Any], episode: Episode) -> int:
    """Sampling's seed of (run, step, group, sample, turn)."""
    return seed_for(meta_info["seed"], meta_info["global_steps"], episode.group, episode.sample, episode.turn)


def pad_right(rows: Sequence[Sequence[float]], width: int, value: float) -> Tensor:
    """(len(rows), width); float32 where the padding value is a float, else int64."""
    dtype = torch.float32 if isinstance(value, float) else torch.int64
    out = torch.full((len(rows), width), value, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return out
