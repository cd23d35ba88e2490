"""A rollout engine's interface: token ids in, sampled token ids out.

It has three verbs: `submit`, `step` and `update_weights`. An engine knows nothing of episodes, environments or batches;
the turn loop (`workers/rollout/base.py`) keeps it busy. Invariant: ids are returned as they were sampled; nothing is
re-tokenised.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
NamedTensors = Iterable[tuple[str, Tensor]]
Part = Literal["weights", "kv_cache"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Says how one request is sampled: `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 switch the filters off.

    Its draws are of `seed` alone: requests that must differ carry different ones.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Holds what an engine sampled for one request; `log_probs` are nats under the distribution that was sampled.

    The stop reason `length` says that `max_tokens` are there, `abort` that the engine gave the request up by itself,
    whatever it calls that. `versions` says which weights sampled the tokens from a start up to an end: (version, start,
    end); none are said: the engine's own version at the end.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    versions: tuple[tuple[int, int, int], ...] = ()


def finish_reason(told: Any, sampled: int, asked: int) -> FinishReason:
    """Reads what an engine tells: "length" is also said where a request is given up for the engine's own limits."""
    return told if told == "stop" or (told == "length" and sampled == asked) else "abort"


class Engine(ABC):
    """Is a rollout engine by its verbs; it keeps a copy of the policy for itself.

    With `completes_batches` its `step` returns only when all that is pending is done, so that requests had better come
    together. With `updates_in_flight` it takes new weights between two steps while requests run. `version` counts the
    updates of its weights.
    """

    completes_batches = False
    updates_in_flight = False
    version = 0

    @abstractmethod
    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queues one request."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Advances the engine and returns what finished; every submitted request is returned exactly once."""

    @abstractmethod
    def update_weights(self, weights: NamedTensors, manifest: dict[str, torch.Size]) -> None:
        """Replaces all weights.

        `manifest` (names and shapes of `weights`) is checked before the first tensor is touched.

        Raises:
            ValueError: naming tensors that are missing, unknown, of another shape or sent twice.
        """

    def set_version(self, version: int) -> None:
        """Says of which version the weights are that were sent last."""
        self.version = version

    def load_adapter(self, folder: str) -> None:
        """Samples from now on with the adapter of a peft folder, beside the weights that the engine began with."""
        raise NotImplementedError(
            f"{type(self).__name__} takes merged weights alone: set lora_as_adapter=false"
        )

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Returns log-probs at temperature 1 of every token but the first, in nats; samples nothing."""
        raise NotImplementedError(f"{type(self).__name__} has no score")

    def begin(self) -> None:  # noqa: B027  (optional hook)
        """Drops caches before each batch of episodes, so that a batch's results depend on its inputs alone."""

    def sleep(self) -> None:  # noqa: B027  (optional hook)
        """Gives the GPU memory that only generation needs back, while the trainer works."""

    def wake_up(self, part: Part | None = None) -> None:  # noqa: B027  (optional hook)
        """Takes back what `sleep` freed, or a part of it; all weights must then be sent again."""

    def release(self) -> None:
        """Does what `sleep` does, under verl's name."""
        self.sleep()

    def resume(self) -> None:
        """Does what `wake_up` does, under verl's name."""
        self.wake_up()
