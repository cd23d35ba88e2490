"""The canaries over SGLang's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from features.alarms.probes.canary import Canary
from tests.sglang_server import Model, serving
from tests.unit.test_rollout import CONFIG, model_spec
from tests.unit.test_sglang_rollout import asking
from workers.model.builder import ModelSpec


@pytest.fixture(scope="module")
def spec(tiny_task: Path) -> ModelSpec:
    return model_spec(tiny_task / "model")


@pytest.fixture
def server(spec: ModelSpec) -> Iterator[str]:
    with serving(Model(spec, CONFIG.max_model_len)) as url:
        yield url


@pytest.mark.seconds
def test_the_canaries_read_the_servers_scores(spec, server) -> None:
    rollout, lm = asking(spec, server), spec.causal_lm(trainable=True)
    canary = Canary(rollout.max_model_len, len(spec.tokenizer), lambda messages: [])
    with torch.no_grad():
        log_probs = lm(canary.ids).logits[:, :-1].float().log_softmax(-1)
    actor = log_probs.gather(2, canary.ids[:, 1:, None])[:, :, 0]
    measured = canary.weights_taken(rollout, actor)
    assert measured.maxima["canary/difference"] < 1e-4
