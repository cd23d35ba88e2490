"""The trial of an engine before a run: its samples have the trainer's log-probs, or it says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.protocol import DataProto
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Completion, Sampling
from workers.rollout.engine_check import check_engine, plan_trial

LOG_PROB = -1.5


class OffEngine(BaseRollout):
    """Says log-probs that are off, the first time or behind it."""

    def __init__(self, off: float = 0.0, off_again: float = 0.0, longest: int = 64) -> None:
        config: Any = SimpleNamespace(response_length=8, max_model_len=longest, name="vllm")
        super().__init__(config, eos_token_ids=(2,), pad_token_id=0)
        self.offs = [off, off_again]
        self.pending: list[tuple[str, Sampling]] = []
        self.batches = 0
        self.begun = 0

    @property
    def cached_block(self) -> int:
        return 16

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        self.pending.append((request_id, sampling))

    def step(self) -> list[Completion]:
        torch.randn(1)
        off = self.offs[self.batches]
        self.batches += 1
        done = [
            Completion(
                request_id=name,
                token_ids=[3] * sampling.max_tokens,
                log_probs=[LOG_PROB + off] * sampling.max_tokens,
                finish_reason="length",
            )
            for name, sampling in self.pending
        ]
        self.pending = []
        return done

    def update_weights(self, weights: Any, manifest: Any) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        self.begun += 1


def log_probs_of(data: DataProto) -> Tensor:
    return torch.full(data.batch["responses"].shape, LOG_PROB)


def check(engine: OffEngine, exact: bool = True) -> None:
    check_engine(engine, log_probs_of, vocabulary=9, kind="lfm2", exact=exact)


@pytest.mark.parametrize("off", [(0.01, 0.0), (0.0, 0.01), (float("nan"), 0.0)])
def test_log_probs_that_are_off_are_refused_with_the_number(off: tuple[float, float]) -> None:
    with pytest.raises(
        ValueError, match=r"rollout.name=vllm gives other log-probs for model type 'lfm2' .*: \S+ "
    ):
        check(OffEngine(*off))


def test_rounding_passes_and_leaves_no_trace() -> None:
    engine = OffEngine(0.3)
    state = torch.random.get_rng_state()
    check(engine, exact=False)
    assert torch.equal(state, torch.random.get_rng_state())
    assert (engine.calls, engine.begun) == (0, 1)
    with pytest.raises(ValueError, match=r"3\.0e-01"):
        check(OffEngine(0.3))


def test_a_prompt_is_longer_than_a_block_of_the_cache_where_the_engine_holds_it() -> None:
    long_enough = plan_trial(OffEngine(), 9)
    assert long_enough is not None
    assert [len(prompt) for prompt in long_enough.prompts] == [2, 7, 16, 25]
    short = plan_trial(OffEngine(longest=16), 9)
    assert short is not None
    assert [len(prompt) for prompt in short.prompts] == [2, 7]
    assert plan_trial(OffEngine(longest=2), 9) is None
