"""Models that also see, on text, by vLLM: the language part, without torchvision."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zoo.families import WHOLE
from training.config import ModelConfig, RolloutConfig
from workers.model.builder import ModelSpec, torch_dtype
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Sampling
from workers.rollout_building import build_rollout
from workers.weight_sync.manifest import iter_weights, weight_manifest

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
# vLLM's kernels on a CPU take gated delta nets in bfloat16 alone, with heads of this size.
KERNEL_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
NEVER = [20, 21, 22]
CASES: dict[str, tuple[str, str, float, dict[str, Any]]] = {
    "gemma3": ("gemma3_vision", "float32", 1e-5, {}),
    # Both round; a state adds it up.
    "qwen3_5": ("qwen3_5_vision", "bfloat16", 0.2, {"enable_prefix_caching": False}),
}


def build(case: str, folder: Path) -> tuple[BaseRollout, torch.nn.Module]:
    """Makes an engine with the weights of a model's language part; returns that, too."""
    name, dtype, _, settings = CASES[case]
    family = WHOLE[name]
    if family.keeps_state:
        part = replace(family.part, settings=family.part.settings | KERNEL_HEADS)
        family = replace(family, part=part)
    path = str(family.make(folder / name))
    spec = ModelSpec(ModelConfig(path=path, dtype=dtype), path, torch.device("cpu"))
    rollout = RolloutConfig(
        name="vllm",
        dtype=dtype,
        response_length=20,
        max_model_len=64,
        max_num_seqs=8,
        banned_token_ids=NEVER,
        engine_kwargs={"vllm": settings},
    )
    engine = build_rollout(rollout, spec)
    lm = spec.causal_lm(trainable=False).eval()
    engine.update_weights(iter_weights(lm, torch_dtype(dtype)), weight_manifest(lm))
    return engine, lm


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_vllm_plays_the_language_part_and_never_samples_what_is_banned(
    case: str, tmp_path: Path
) -> None:
    engine, lm = build(case, tmp_path)
    if importlib.util.find_spec("torchvision") is None:
        assert "torchvision" not in sys.modules
    assert not engine.reads_folder
    banned = [*NEVER, *sorted(WHOLE[CASES[case][0]].placeholders.values())]
    tolerance = CASES[case][2]

    def log_probs(ids: list[int]) -> torch.Tensor:
        logits = lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        logits[:, banned] = -torch.inf
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    prompts = [list(range(10, 10 + length)) for length in (3, 17, 30)]
    done = engine.inference(prompts, Sampling(max_tokens=16, seed=1))
    for prompt, completion in zip(prompts, done, strict=True):
        assert not set(completion.token_ids) & set(banned)
        expected = log_probs(prompt + completion.token_ids)[len(prompt) - 1 :]
        gap = (torch.tensor(completion.log_probs) - expected).abs().max()
        assert gap <= tolerance
    ids = [23, 30, 31, 40, 41, 50]
    [scores] = engine.score([ids])
    torch.testing.assert_close(torch.tensor(scores), log_probs(ids), rtol=0, atol=tolerance)
    greedy = engine.inference(prompts, Sampling(max_tokens=16, temperature=0.0))
    assert not set(greedy[0].token_ids) & set(banned)


def test_adapters_beside_weights_that_vllm_does_not_read_are_refused(tmp_path: Path) -> None:
    path = str(WHOLE["gemma3_vision"].make(tmp_path))
    spec = ModelSpec(ModelConfig(path=path, lora_rank=4), path, torch.device("cpu"))
    rollout = RolloutConfig(name="vllm", response_length=8, max_model_len=16, lora_as_adapter=True)
    with pytest.raises(ValueError, match="false sends merged weights"):
        build_rollout(rollout, spec)
