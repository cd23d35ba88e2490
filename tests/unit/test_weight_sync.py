"""Weights on their way to an engine.

For each kind of model the real vLLM has the trainer's weights after an update, and every tensor
that is missing, foreign, misshapen or doubled is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from examples.prepare_tiny_prompts import make_tokenizer
from tests.e2e.test_training import tiny_config
from tests.unit.test_rollout import build_engine, model_spec, perturb, worst_difference
from workers.fsdp_workers import ActorRolloutRefWorker
from workers.hf_rollout import HFRollout
from workers.model.builder import ModelSpec
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import NamedTensors, Part
from workers.weight_sync.load_trial import LoadTrial
from workers.weight_sync.manifest import (
    Manifest,
    as_announced,
    check_manifest,
    iter_weights,
    weight_manifest,
)
from workers.weight_sync.saved_form import SavedForm

EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
KINDS: dict[str, tuple[type[PreTrainedModel], Any, dict[str, Any]]] = {
    "tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "biases": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
}


def make_model(kind: str, folder: Path) -> Path:
    """Saves a tiny model of this kind, of random weights, with its tokenizer."""
    torch.manual_seed(3)
    tokenizer = make_tokenizer()
    model_class, config_class, settings = KINDS[kind]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **settings,
    )
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=list(KINDS))
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[BaseRollout, nn.Module, ModelSpec]]:
    """Yields vLLM, and the policy whose weights it is to have."""
    pytest.importorskip("vllm")
    spec = model_spec(make_model(request.param, tmp_path_factory.mktemp(request.param)))
    yield build_engine("vllm", spec), spec.causal_lm(trainable=True).eval(), spec


def send(rollout: BaseRollout, lm: nn.Module) -> None:
    rollout.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))


def untouched() -> Iterator[tuple[str, Tensor]]:
    raise AssertionError("the stream was read")
    yield


@pytest.mark.vllm
def test_log_probs_are_the_trainers_after_every_update(engine) -> None:
    rollout, lm, spec = engine
    for seed in (1, 2):
        perturb(lm, seed)
        if seed == 2:
            assert worst_difference(rollout, lm, spec, 1.0) > 1e-3
        send(rollout, lm)
        assert worst_difference(rollout, lm, spec, 1.0) < 1e-4


@pytest.mark.vllm
def test_an_engine_with_experts_may_follow_one_without_which_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    engines = []
    for kind in ("tied", "qwen3_moe"):
        spec = model_spec(make_model(kind, tmp_path / kind))
        engines.append((build_engine("vllm", spec), spec.causal_lm(trainable=True).eval(), spec))
    for rollout, lm, spec in engines:
        send(rollout, lm)
        assert worst_difference(rollout, lm, spec, 1.0) < 1e-4


def parts_of(lm: nn.Module) -> list[str]:
    """Names a layer's tensors, the head and the embedding: one of all that an engine may fuse."""
    return [name for name in weight_manifest(lm) if "layers.1." in name or "layers." not in name]


@pytest.mark.vllm
def test_a_manifest_that_does_not_fill_the_engine_once_is_refused_by_name_before_anything_is_sent(
    engine,
) -> None:
    rollout, lm, spec = engine
    send(rollout, lm)
    manifest = weight_manifest(lm)
    for dropped in parts_of(lm):
        without = {name: shape for name, shape in manifest.items() if name != dropped}
        with pytest.raises(ValueError, match=f"missing: {whole_name(dropped)} gets "):
            rollout.update_weights(untouched(), without)
    for foreign in ("extra.weight", "model.layers.0.extra.weight", "model.layers.1.mlp.extra.bias"):
        with pytest.raises(ValueError, match=f"(does not take|unused:) {foreign}"):
            rollout.update_weights(untouched(), manifest | {foreign: torch.Size([3])})
    with pytest.raises(ValueError, match=r"does not take model.norm.weight \(3,\)"):
        rollout.update_weights(untouched(), manifest | {"model.norm.weight": torch.Size([3])})
    # An ignored one, which the engine would not speak of.
    with pytest.raises(ValueError, match=r"unused: model.layers.0.self_attn.rotary_emb.inv_freq"):
        rollout.update_weights(
            untouched(),
            manifest | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.Size([3])},
        )
    # Both names of the fused matrix, whole and in parts.
    query = manifest["model.layers.1.self_attn.q_proj.weight"]
    fused = {"model.layers.1.self_attn.qkv_proj.weight": torch.Size([2 * query[0], query[1]])}
    with pytest.raises(
        ValueError, match=r"written twice: model.layers.1.self_attn.qkv_proj.weight, by .*q_proj"
    ):
        rollout.update_weights(untouched(), manifest | fused)
    assert worst_difference(rollout, lm, spec, 1.0) < 1e-4


def whole_name(name: str) -> str:
    """Matches the engine's name of what holds a tensor of the policy's."""
    name = re.sub(r"\.(q|k|v)_proj\.", ".qkv_proj.", name)
    name = re.sub(r"(?<!experts)\.(gate|up)_proj\.", ".gate_up_proj.", name)
    name = re.sub(r"experts\.gate_up_proj$", r"experts.*w13_weight", name)
    name = re.sub(r"experts\.down_proj$", r"experts.*w2_weight", name)
    return name.replace(".mlp.", "(.mlp.|.block_sparse_moe.)")


@pytest.mark.vllm
def test_a_stream_that_is_not_what_was_announced_is_refused_by_name(engine) -> None:
    """Leaves the engine of no use, so it comes last."""
    rollout, lm, _ = engine
    weights, manifest = list(iter_weights(lm, torch.float32)), weight_manifest(lm)
    doubled = weights[3][0]
    with pytest.raises(ValueError, match=f"{doubled} .* comes twice"):
        rollout.update_weights([*weights, weights[3]], manifest)
    with pytest.raises(ValueError, match=f"{doubled} never came"):
        rollout.update_weights(weights[:3] + weights[4:], manifest)


def test_a_stream_passes_as_announced_and_names_what_is_not() -> None:
    manifest: Manifest = {"a": torch.Size([2]), "b": torch.Size([3])}
    a, b = ("a", torch.zeros(2)), ("b", torch.zeros(3))
    assert list(as_announced([b, a], manifest)) == [b, a]
    for stream, fault in (
        ([a, a, b], r"a \(2,\) was not announced, or comes twice"),
        ([a, ("b", torch.zeros(2))], r"b \(2,\) was not announced"),
        ([("c", torch.zeros(1)), a, b], r"c \(1,\) was not announced"),
        ([b], "a never came"),
    ):
        with pytest.raises(ValueError, match=fault):
            list(as_announced(stream, manifest))


def test_manifest_names_missing_unknown_and_misshapen_tensors() -> None:
    expected = {"a": torch.Size([2]), "b": torch.Size([3])}
    with pytest.raises(ValueError) as refused:
        check_manifest({"b": torch.Size([4]), "c": torch.Size([1])}, expected)
    assert str(refused.value).split("\n  ")[1:] == [
        "missing: a (2,)",
        "missing: b (3,)",
        "unknown: b (4,)",
        "unknown: c (1,)",
    ]
    check_manifest(dict(expected), expected)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_saved_form_is_what_is_in_the_checkpoint(kind, tmp_path) -> None:
    from safetensors.torch import load_file

    spec = model_spec(make_model(kind, tmp_path))
    lm = spec.causal_lm(trainable=False)
    saved = dict(SavedForm(spec.hf_config).of(iter_weights(lm, torch.float32)))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(saved.pop(name), tensor), name
    assert set(saved) <= {"lm_head.weight"}, "a tied head is sent, and not saved"


def test_a_trial_sees_every_element_and_writes_none() -> None:
    """A fused parameter of three rows, which comes as row 0 and rows 1 and 2."""
    parameter = torch.ones(3, 2)

    def run(*parts: tuple[int, int]) -> list[str]:
        trial = LoadTrial({f"part {i}": torch.Size([rows, 2]) for i, (_, rows) in enumerate(parts)})
        with trial:
            for (start, rows), (_, weight) in zip(parts, trial.weights(), strict=True):
                parameter[start : start + rows].copy_(weight)
                parameter[3:].fill_(0)
        return trial.problems({"fused": parameter}, {})

    assert run((0, 1), (1, 2)) == []
    assert run((0, 1)) == ["missing: fused gets 2 of its 6 elements, from part 0"]
    assert run() == ["missing: fused gets 0 of its 6 elements, from no tensor"]
    assert run((0, 1), (1, 2), (0, 1)) == ["written twice: fused, by part 0, part 1, part 2"]
    assert torch.equal(parameter, torch.ones(3, 2))


def test_a_trial_knows_buffers_and_what_a_models_code_does_by_itself() -> None:
    parameters = {"loaded": torch.ones(2), "copied": torch.ones(2)}
    buffers = {"scalar": torch.ones(1), "angles": torch.ones(4)}
    others = {"scalar": torch.Size([1]), "head": torch.Size([3])}
    trial = LoadTrial({name: torch.Size([2]) for name in parameters} | others)
    load = trial.marked(lambda param, loaded_weight: param.copy_(loaded_weight))
    with trial:
        for name, weight in trial.weights():
            if name == "loaded":
                load(parameters[name], weight)
            elif name == "copied":
                parameters[name].copy_(weight.zero_())
            elif name == "scalar":
                load(buffers[name], weight)
    assert trial.problems(parameters, buffers) == ["unused: head (3,)"]
    assert trial.problems(parameters, buffers, spare=["head"]) == []
    assert trial.direct(parameters) == {"copied"}
    assert trial.changed == {"copied"}


class NotingEngine(HFRollout):
    """Notes what the worker has it do."""

    def wake_up(self, part: Part | None = None) -> None:
        self.notes.append(f"wake {part}")

    def sleep(self) -> None:
        self.notes = ["sleep"]

    def update_weights(self, weights: NamedTensors, manifest: Manifest) -> None:
        super().update_weights(weights, manifest)
        self.notes.append("update")


class NotingWorker(ActorRolloutRefWorker):
    """Notes, among the engine's, when the policy is on the device."""

    @contextmanager
    def _on_device(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        self.rollout.notes.append("actor there")
        with super()._on_device(optimizer):
            yield
        self.rollout.notes.append("actor gone")


def test_the_engines_cache_wakes_after_the_policy_has_left_the_device(
    tiny_task, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("workers.hf_rollout.HFRollout", NotingEngine)
    config = tiny_config(
        tiny_task, tmp_path, "actor_rollout_ref.actor.fsdp_config.param_offload=true"
    )
    worker = NotingWorker(config, "actor_rollout")
    worker.init_model(10, config.batch_plan)
    synced = ["wake weights", "actor there", "update", "actor gone", "wake kv_cache"]
    assert worker.rollout.notes == ["sleep", *synced]
    worker.sleep_rollout()
    worker.sync_weights()
    assert worker.rollout.notes == ["sleep", *synced]
