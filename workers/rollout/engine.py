"""The interface of a rollout engine: token ids in, sampled token ids out.

    submit(request_id, prompt_ids, sampling)    queues one request
    step() -> completions                       advances what is queued; returns what finished
    abort(request_id)                           gives one request up
    update_weights(weights, manifest)           replaces the weights
    sleep(), wake_up(part)                      lend the GPU memory to the trainer, and take it back

An engine knows nothing of episodes, environments or batches; the turn loop
(`workers/rollout/turn_loop.py`) keeps it busy. A new engine is one file and one registration: a
subclass of `BaseRollout` (`workers/rollout/base_rollout.py`), which has what all engines share, and
its line in `workers/rollout/engine_registry.py`. The class itself says which settings it refuses
(`check_config`) and which memory it takes (`plan_memory`).

Invariant: ids are returned as they were sampled; nothing is re-tokenised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from training.config import PPOConfig, RolloutConfig
    from workers.model.builder import ModelSpec

FinishReason = Literal["stop", "length", "abort"]
NamedTensors = Iterable[tuple[str, Tensor]]
# The parts of an engine's memory that `wake_up` takes one by one.
Part = Literal["weights", "kv_cache"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Holds how one request is sampled; its draws depend on `seed` alone.

    Requests that must differ carry different seeds.

    Args:
        max_tokens: the longest answer.
        temperature: 0 is greedy.
        top_k: sample among the k likeliest tokens; -1 is off.
        top_p: sample among the likeliest tokens of this total probability; 1 is off.
        stop_token_ids: any of them ends the answer, and is its last token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


Record = TypeVar("Record", "Sampling", "Completion")


def copy_with(record: Record, **changes: object) -> Record:
    """Copies a record of this file with other values of some fields.

    It does what `dataclasses.replace` does, in a fraction of its time: every turn needs three.
    """
    unknown = changes.keys() - record.__dict__.keys()
    if unknown:
        raise TypeError(f"{type(record).__name__} has no {', '.join(sorted(unknown))}")
    copied = object.__new__(type(record))
    copied.__dict__.update(record.__dict__)
    copied.__dict__.update(changes)
    return copied


class VersionSpan(NamedTuple):
    """Names the version of the weights that sampled the tokens from `start` up to `end`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Holds what an engine sampled for one request.

    Args:
        log_probs: nats, one a token, under the distribution that was sampled.
        finish_reason: `length`: `max_tokens` are there; `abort`: the engine gave the request up by
            itself, whatever it calls that.
        versions: which weights sampled which tokens; empty: all of them the engine's version at the
            end.
        routed_experts: (prompt and sampled tokens but the last, layers, experts of a token), the
            ids of those that the engine computed with; None: it does not say.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...] = ()
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)


def read_finish_reason(reported: object, num_sampled: int, max_tokens: int) -> FinishReason:
    """Returns why a request ended, from what the engine reports.

    "length" is also reported where a request is given up for the engine's own limits: then it has
    fewer than `max_tokens` tokens, and was aborted.
    """
    if reported == "stop":
        return "stop"
    if reported == "length" and num_sampled == max_tokens:
        return "length"
    return "abort"


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Holds what the memory plan must know of an engine, on each of its ranks.

    Args:
        kv_cache: bytes of the cache that the engine reserves when it is built; None: it reserves
            nothing, and its cache grows with the batch that it generates.
        sleeps: it gives weights and cache back while the trainer works.
    """

    kv_cache: int | None = None
    sleeps: bool = False


class Engine(ABC):
    """Holds a copy of the policy of its own, and samples from it.

    Attributes:
        completes_batches: `step` returns only when all that is pending is done, so that requests
            had better come together.
        updates_in_flight: it takes new weights between two steps while requests run.
        casts_weights: `update_weights` takes tensors of any dtype, and casts them as it copies.
        tensor_parallel: several ranks may share one engine.
        takes_adapters: `load_adapter` works.
        reads_folder: once built it has the weights of the model's folder.
        counts_tokens: it adds each token to `PLAYED.tokens` as it is sampled; where it does not,
            the turn loop adds a turn's once it is there.
        bans_tokens: it never samples the ids that `banned_token_ids` lists, and its log-probs, of
            `score` too, are those over the others.
        tells_experts: its completions have `routed_experts`, where the config asks for them.
        is_tried: its log-probs are compared with the trainer's before the run begins
            (workers/rollout/engine_check.py), as its code is another than the trainer's.
        version: of the weights; counts their updates.
    """

    completes_batches = False
    updates_in_flight = False
    casts_weights = False
    tensor_parallel = False
    takes_adapters = False
    reads_folder = False
    counts_tokens = False
    bans_tokens = False
    tells_experts = False
    is_tried = False
    version = 0

    # The engine's demands on a config: asked of the class, before anything is built.

    @classmethod
    def check_config(cls, config: PPOConfig) -> Iterator[str]:
        """Yields the problems of a config with this engine; each names the key and the fix.

        Here stands what follows from the class's attributes. An engine with checks of its own
        yields these first: `yield from super().check_config(config)`.
        """
        rollout = config.actor_rollout_ref.rollout
        if rollout.tensor_model_parallel_size > 1 and not cls.tensor_parallel:
            yield (
                "actor_rollout_ref.rollout.tensor_model_parallel_size="
                f"{rollout.tensor_model_parallel_size}: "
                f"rollout.name={rollout.name} has one rank an engine; use 1"
            )
        if rollout.banned_token_ids and not cls.bans_tokens:
            yield (
                f"actor_rollout_ref.rollout.banned_token_ids={rollout.banned_token_ids}: "
                f"rollout.name={rollout.name} cannot keep ids from being sampled; use hf or vllm"
            )
        if config.replays_routing and not cls.tells_experts:
            yield (
                "actor_rollout_ref.actor.router_replay.mode=R3: "
                f"rollout.name={rollout.name} does not say which experts it chose; use hf or vllm, "
                "or disabled"
            )
        has_adapters = config.actor_rollout_ref.model.lora_rank > 0
        has_own_ranks = config.trainer.rollout_n_gpus > 0
        adapters_can_be_sent = cls.takes_adapters and has_adapters and not has_own_ranks
        if rollout.lora_as_adapter and not adapters_can_be_sent:
            yield (
                "actor_rollout_ref.rollout.lora_as_adapter=true needs "
                f"actor_rollout_ref.rollout.name=vllm, not {rollout.name}, "
                "actor_rollout_ref.model.lora_rank above 0 and trainer.rollout_n_gpus=0; "
                "false sends merged weights"
            )

    @classmethod
    def plan_memory(
        cls,
        spec: ModelSpec,
        rollout: RolloutConfig,
        *,
        weight_bytes: int,
        device_bytes: int | None,
    ) -> PlannedMemory:
        """Returns what the engine takes beside its weights; loads no model.

        Args:
            rollout: `PPOConfig.resolved_rollout`.
            weight_bytes: of the engine's weights on a rank.
            device_bytes: of the CUDA device; None on a CPU.
        """
        return PlannedMemory()

    # The verbs.

    @abstractmethod
    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queues one request."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Advances the engine and returns what finished.

        Every submitted request is returned exactly once, but for those that were given up.
        """

    def abort(self, request_id: str) -> None:  # noqa: B027  (optional hook)
        """Gives a request up: it is sampled no further, and what comes of it nobody reads."""

    @abstractmethod
    def update_weights(self, weights: NamedTensors, manifest: dict[str, torch.Size]) -> None:
        """Replaces all weights.

        `manifest` (names and shapes of `weights`) is checked before the first tensor is touched.

        Raises:
            ValueError: naming tensors that are missing, unknown, of another shape or sent twice.
        """

    def set_version(self, version: int) -> None:
        """Records which version of the weights was sent last."""
        self.version = version

    def load_adapter(self, folder: str) -> None:
        """Samples from now on with a peft folder's adapter, beside the weights of the beginning."""
        raise NotImplementedError(
            f"{type(self).__name__} takes merged weights alone: set lora_as_adapter=false"
        )

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Returns log-probs of every token but the first, in nats at temperature 1.

        Samples nothing that anyone reads.
        """
        raise NotImplementedError(f"{type(self).__name__} has no score")

    @property
    def cached_block(self) -> int:
        """Returns how many tokens a prompt must begin with to be found in the engine's cache."""
        return 0

    def begin(self) -> None:  # noqa: B027  (optional hook)
        """Drops caches before a batch of episodes, whose results then follow from its inputs."""

    def sleep(self) -> None:  # noqa: B027  (optional hook)
        """Gives the GPU memory that only generation needs back, while the trainer works."""

    def wake_up(self, part: Part | None = None) -> None:  # noqa: B027  (optional hook)
        """Takes back what `sleep` freed, or a part of it; all weights must then be sent again."""

    def release(self) -> None:
        """Calls `sleep`, under verl's name."""
        self.sleep()

    def resume(self) -> None:
        """Calls `wake_up`, under verl's name."""
        self.wake_up()
