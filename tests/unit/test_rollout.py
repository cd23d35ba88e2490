"""Both engines: log-probs of what was sampled, seeds, stop reasons, masks, and weights that are really replaced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.protocol import DataProto
from training.config import ModelConfig, RolloutConfig
from workers.hf_rollout import HFRollout, sample_tokens
from workers.model.builder import ModelSpec
from workers.rollout.base import BaseRollout
from workers.rollout.engine import Completion, Sampling
from workers.rollout.weight_sync import check_manifest, iter_weights, weight_manifest

RESPONSE = 8
CONFIG = RolloutConfig(dtype="float32", response_length=RESPONSE, max_model_len=40, max_num_seqs=32)
PROMPTS = ["above 3 below 8", "above 0 below 3", "above 5 below 11"]


def build_engine(name: str, spec: ModelSpec, config: RolloutConfig = CONFIG) -> BaseRollout:
    if name == "hf":
        return HFRollout(config, spec)
    pytest.importorskip("vllm")
    from workers.vllm_rollout_spmd import vLLMRollout

    return vLLMRollout(config, spec)


def model_spec(path: Path, device: str | torch.device = "cpu") -> ModelSpec:
    return ModelSpec(ModelConfig(dtype="float32", enable_gradient_checkpointing=False), str(path), torch.device(device))


MARKS = {"hf": (), "vllm": pytest.mark.vllm}
ENGINES = [pytest.param((name, tying), marks=marks) for name, marks in MARKS.items() for tying in ("untied", "tied")]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tiny_task: Path, tied_model: Path) -> Iterator[tuple[BaseRollout, nn.Module, ModelSpec]]:
    """Yields an engine, and a policy whose weights it has after one update away from the folder's."""
    name, tying = request.param
    if name == "vllm":
        pytest.importorskip("vllm")
    spec = model_spec(tied_model if tying == "tied" else tiny_task / "model")
    lm = spec.causal_lm(trainable=True).eval()
    assert lm.config.tie_word_embeddings == (tying == "tied")
    perturb(lm, seed=0)
    rollout = build_engine(name, spec)
    rollout.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
    yield rollout, lm, spec


def perturb(lm: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator).to(parameter.device))


def encode(spec: ModelSpec) -> list[list[int]]:
    def ids(text: str) -> list[int]:
        return spec.tokenizer.encode(f"<|im_start|> user {text} <|im_end|> <|im_start|> assistant")

    return [ids(text) for text in PROMPTS]


@torch.no_grad()
def policy_log_probs(lm: nn.Module, prompt: list[int], completion: Completion, temperature: float) -> Tensor:
    ids = torch.tensor([prompt + completion.token_ids], device=lm.device)
    log_probs = (lm(ids).logits[0].float() / temperature).log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


def worst_difference(rollout: BaseRollout, lm: nn.Module, spec: ModelSpec, temperature: float) -> float:
    sampling = Sampling(max_tokens=RESPONSE, temperature=temperature, stop_token_ids=spec.eos_token_ids)
    rollout.begin()
    prompts = encode(spec) * 4
    completions = rollout.inference(prompts, sampling)
    assert len({tuple(c.token_ids) for c in completions}) > 3
    return max(
        (policy_log_probs(lm, p, c, temperature) - torch.tensor(c.log_probs)).abs().max().item()
        for p, c in zip(prompts, completions, strict=True)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_log_probs_agree_with_the_policy_after_every_update(engine, temperature) -> None:
    rollout, lm, spec = engine
    for seed in (1, 2):
        perturb(lm, seed)
        rollout.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
        assert worst_difference(rollout, lm, spec, temperature) < 1e-4


def test_log_probs_disagree_when_one_tensor_is_kept_back(engine) -> None:
    """Shows what the agreement test is worth: weights that miss one tensor's update are seen at once."""
    rollout, lm, spec = engine
    old = {name: tensor.clone() for name, tensor in iter_weights(lm, torch.float32)}
    perturb(lm, seed=3)
    for name in ("lm_head.weight", "model.layers.1.self_attn.k_proj.weight"):
        stale = ((n, old[n] if n == name else t) for n, t in iter_weights(lm, torch.float32))
        rollout.update_weights(stale, weight_manifest(lm))
        assert worst_difference(rollout, lm, spec, 1.0) > 1e-3
    rollout.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
    assert worst_difference(rollout, lm, spec, 1.0) < 1e-4


def test_a_stream_that_leaves_a_tensor_out_is_refused_before_anything_is_sent(engine) -> None:
    rollout, lm, spec = engine
    manifest = weight_manifest(lm)
    dropped = "model.layers.0.mlp.up_proj.weight"
    partial = {name: shape for name, shape in manifest.items() if name != dropped}

    def untouched() -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the stream was read")
        yield

    with pytest.raises(ValueError, match=f"missing: {dropped}"):
        rollout.update_weights(untouched(), partial)
    assert worst_difference(rollout, lm, spec, 1.0) < 1e-4


def test_manifest_names_missing_unknown_and_misshapen_tensors() -> None:
    expected = {"a": torch.Size([2]), "b": torch.Size([3])}
    with pytest.raises(ValueError, match=r"missing: a \(2,\)\n  shape: b is \(4,\).*\(3,\)\n  unknown: c \(1,\)"):
        check_manifest({"b": torch.Size([4]), "c": torch.Size([1])}, expected)
    check_manifest(dict(expected), expected)


def test_the_same_seed_gives_the_same_sample_in_any_order(engine) -> None:
    rollout, _, spec = engine
    prompts = encode(spec)
    sampling = Sampling(max_tokens=RESPONSE, stop_token_ids=spec.eos_token_ids)

    def sample(order: list[int]) -> dict[int, list[int]]:
        rollout.begin()
        for i in order:
            rollout.submit(str(i), prompts[i % 3], replace(sampling, seed=i))
        found: dict[int, list[int]] = {}
        while len(found) < len(order):
            found |= {int(c.request_id): c.token_ids for c in rollout.step()}
        return found

    first = sample(list(range(9)))
    assert sample(list(range(8, -1, -1))) == first
    assert len({tuple(first[i]) for i in range(0, 9, 3)}) > 1, "other seeds give other samples of the same prompt"


def make_prompts(spec: ModelSpec, width: int = 14) -> DataProto:
    encoded = encode(spec)
    ids = torch.full((3, width), spec.pad_token_id)
    mask = torch.zeros(3, width, dtype=torch.long)
    for i, prompt in enumerate(encoded):
        ids[i, -len(prompt) :] = torch.tensor(prompt)
        mask[i, -len(prompt) :] = 1
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask},
        non_tensors={"uid": np.array(["a", "b", "c"], dtype=object)},
        meta_info={"global_steps": 1, "seed": 5, "seeded": True},
    )


def test_generate_sequences_lays_out_the_documented_fields(engine) -> None:
    rollout, _, spec = engine
    prompts = make_prompts(spec)
    batch = rollout.generate_sequences(prompts)
    mask, valid = batch.batch["response_mask"].bool(), batch.batch["attention_mask"][:, 14:].bool()
    assert torch.equal(mask, valid), "in a single turn every response token was sampled"
    assert torch.equal(batch.batch["input_ids"][:, :14], prompts.batch["input_ids"])
    assert torch.equal(batch.batch["turn_ids"], torch.where(mask, 0, -1))
    assert list(batch.non_tensor_batch["uid"]) == ["a", "b", "c"]
    for row, stop_reason in enumerate(batch.non_tensor_batch["ending"]):
        count = int(mask[row].sum())
        last = batch.batch["responses"][row, count - 1].item()
        assert stop_reason == ("stop" if last in spec.eos_token_ids else "length")
        assert stop_reason == "stop" or count == RESPONSE
        assert batch.batch["position_ids"][row][batch.batch["attention_mask"][row].bool()].tolist() == list(
            range(int(batch.batch["attention_mask"][row].sum()))
        )
    again = rollout.batch_generation(make_prompts(spec))
    assert torch.equal(again.batch["responses"], batch.batch["responses"]), "seeded by (run, step, group, sample)"
    other = make_prompts(spec)
    other.meta_info["global_steps"] = 2
    assert not torch.equal(rollout.generate_sequences(other).batch["responses"], batch.batch["responses"])


def test_validation_is_greedy_by_default(engine) -> None:
    rollout, lm, spec = engine
    prompts = make_prompts(spec)
    prompts.meta_info["validate"] = True
    batch = rollout.generate_sequences(prompts)
    first = batch.batch["responses"][:, 0]
    for row, prompt in enumerate(encode(spec)):
        with torch.no_grad():
            assert lm(torch.tensor([prompt])).logits[0, -1].argmax() == first[row]


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (2, 1.0), (-1, 0.6)])
def test_sampled_frequencies_follow_the_filtered_distribution(top_k, top_p) -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    kept = {(-1, 1.0): 4, (2, 1.0): 2, (-1, 0.6): 2}[top_k, top_p]
    expected = probs[:kept] / probs[:kept].sum()
    logits = probs.log().repeat(20_000, 1)
    torch.manual_seed(0)
    tokens, log_probs = sample_tokens(logits, Sampling(max_tokens=1, top_k=top_k, top_p=top_p), [None] * 20_000)
    frequencies = torch.bincount(tokens, minlength=4)[:kept] / 20_000
    torch.testing.assert_close(frequencies, expected, atol=0.015, rtol=0)
    torch.testing.assert_close(log_probs, expected.log()[tokens], atol=1e-5, rtol=0)
