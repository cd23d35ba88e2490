"""LoRA: what trains, what engines and folders get of it, and the policy without its adapters."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.unit.test_actor_critic import make_update
from tests.unit.test_checkpoint import save
from tests.unit.test_models import SIZES
from tests.unit.test_rollout import CONFIG, build_engine, worst_difference
from training.config import ActorConfig, ModelConfig, OptimConfig
from workers.dp_actor import DataParallelPPOActor
from workers.model import state as model_state
from workers.model.builder import ModelSpec, torch_dtype
from workers.model.checkpoint_reader import SafeReader
from workers.model.forward_settings import ForwardSettings
from workers.model.lora import adapter_export, add_adapters, without_adapters
from workers.model.optimizer import build_optimizer, build_scheduler
from workers.model.policy_model import PolicyModel, PolicyValueModel
from workers.weight_sync.manifest import iter_weights, weight_manifest

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
IDS = torch.tensor([[1, 5, 8, 16, 9, 20, 2, 1, 6]])


def lora_spec(path: Path, **more: Any) -> ModelSpec:
    own = {"lora_rank": 4, "dtype": "float32", "enable_gradient_checkpointing": False} | more
    return ModelSpec(ModelConfig(**own), str(path), torch.device("cpu"))


class Policy:
    """A policy with adapters, and what trains it."""

    def __init__(self, path: Path, values: bool = False, **more: Any) -> None:
        self.spec, optim = lora_spec(path, **more), OptimConfig(lr=0.02)
        self.lm = self.spec.causal_lm(trainable=True)
        self.module = PolicyModel(PolicyValueModel(self.lm) if values else self.lm)
        optimizer = build_optimizer(self.module, optim)
        self.actor = DataParallelPPOActor(ActorConfig(ppo_epochs=2), self.module, optimizer)
        self.state = (
            self.module if values else self.lm,
            optimizer,
            build_scheduler(optimizer, optim, 10),
        )

    def update(self, seed: int = 0) -> dict[str, float]:
        return self.actor.update_policy(make_update(seed))

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copies of the weights that train, and of the others."""
        named = {
            name: (p.detach().clone(), p.requires_grad)
            for name, p in self.module.named_parameters()
        }
        return tuple(
            {n: p for n, (p, trains) in named.items() if trains is kind} for kind in (True, False)
        )  # type: ignore[return-value]


@torch.no_grad()
def logits(lm: nn.Module) -> Tensor:
    return lm.eval()(IDS, use_cache=False).logits.float()


def base(path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


@pytest.mark.parametrize("values", [False, True])
def test_an_update_changes_the_adapters_and_nothing_else(tiny_task: Path, values: bool) -> None:
    policy = Policy(tiny_task / "model", values)
    trained, frozen = policy.parts()
    assert all(".ppo_core." in name or name == "value_head.weight" for name in trained)
    assert {p for group in policy.state[1].param_groups for p in group["params"]} == {
        p for p in policy.module.parameters() if p.requires_grad
    }
    assert policy.update()["actor/grad_norm"] > 0
    trained_after, frozen_after = policy.parts()
    changed = [name for name in trained if not torch.equal(trained[name], trained_after[name])]
    assert changed == [*trained]
    assert frozen.keys() == frozen_after.keys()
    assert all(torch.equal(frozen[name], frozen_after[name]) for name in frozen)


def test_the_gradient_is_the_whole_models_by_the_chain_rule(tiny_task: Path) -> None:
    """W = V + s B A: dB = s dW A^T and dA = s B^T dW, with dW of a model of merged weights."""
    policy, data = Policy(tiny_task / "model", lora_alpha=8), make_update()
    perturb_adapters(policy.lm)
    whole = base(tiny_task / "model")
    whole.load_state_dict(dict(iter_weights(policy.lm, torch.float32)))
    own = {name: p.detach().clone() for name, p in policy.lm.named_parameters()}
    changes = []
    for lm in (policy.lm, whole):
        before = {name: p.detach().clone() for name, p in lm.named_parameters()}
        # The change is then the gradient, negated.
        optimizer = torch.optim.SGD([p for p in lm.parameters() if p.requires_grad], lr=1.0)
        DataParallelPPOActor(ActorConfig(grad_clip=1e6), lm, optimizer).update_policy(data)
        changes.append({name: p.detach() - before[name] for name, p in lm.named_parameters()})
    for name in [name for name in own if name.endswith("base_layer.weight")]:
        layer = name.removesuffix("base_layer.weight")
        a, b = (f"{layer}lora_{part}.ppo_core.weight" for part in "AB")
        of_whole = 8 / 4 * changes[1][f"{layer}weight"]
        torch.testing.assert_close(changes[0][b], of_whole @ own[a].T, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(changes[0][a], own[b].T @ of_whole, atol=2e-5, rtol=1e-4)
        assert changes[0][a].abs().max() > 1e-4


@pytest.mark.parametrize("tying", ["untied", "tied"])
def test_merged_weights_are_the_policy_under_the_base_models_names(
    tiny_task, tied_model, tying
) -> None:
    path = tied_model if tying == "tied" else tiny_task / "model"
    policy, whole = Policy(path), base(path)
    assert torch.equal(logits(policy.lm), logits(whole)), "adapters begin with no effect"
    for seed in (1, 2):
        policy.update(seed)
        before = copy.deepcopy(policy.lm.state_dict())
        sent = dict(iter_weights(policy.lm, torch.float32))
        assert (
            weight_manifest(policy.lm)
            == weight_manifest(whole)
            == {n: t.shape for n, t in sent.items()}
        )
        whole.load_state_dict(sent)
        torch.testing.assert_close(logits(whole), logits(policy.lm), atol=2e-5, rtol=0)
        assert (logits(whole) - logits(base(path))).abs().max() > 1e-2
        assert all(
            torch.equal(tensor, before[name]) for name, tensor in policy.lm.state_dict().items()
        )


def test_merged_weights_are_right_where_layers_hold_their_weights_transposed(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    ).save_pretrained(tmp_path)
    lm, whole = (
        lora_spec(tmp_path, target_modules=("c_attn", "c_proj")).causal_lm(trainable=True),
        base(tmp_path),
    )
    perturb_adapters(lm)
    whole.load_state_dict(dict(iter_weights(lm, torch.float32)))
    assert (logits(whole) - logits(base(tmp_path))).abs().max() > 1e-3
    torch.testing.assert_close(logits(whole), logits(lm), atol=2e-5, rtol=0)


def perturb_adapters(lm: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in lm.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def test_an_engine_that_is_sent_merged_weights_has_the_policy_after_every_update(
    tiny_task: Path,
) -> None:
    policy = Policy(tiny_task / "model")
    rollout = build_engine("hf", policy.spec)
    for seed in (1, 2):
        policy.update(seed)
        if seed == 2:
            assert worst_difference(rollout, policy.lm.eval(), policy.spec, 1.0) > 1e-3
        rollout.update_weights(iter_weights(policy.lm, torch.float32), weight_manifest(policy.lm))
        assert worst_difference(rollout, policy.lm.eval(), policy.spec, 1.0) < 1e-4
    with pytest.raises(NotImplementedError, match="HFRollout takes merged weights alone"):
        rollout.load_adapter("anywhere")


@pytest.mark.vllm
@pytest.mark.parametrize(("rank", "targets"), [(4, ("all-linear",)), (16, ("v_proj", "down_proj"))])
def test_vllm_with_the_adapter_has_the_policy_after_every_update(
    tiny_task, tmp_path, rank, targets
) -> None:
    policy = Policy(tiny_task / "model", lora_rank=rank, target_modules=targets)
    rollout: Any = build_engine("vllm", policy.spec, replace(CONFIG, lora_as_adapter=True))
    seen = []
    for seed in (1, 2, 3):
        policy.update(seed)
        if seed > 1:
            assert worst_difference(rollout, policy.lm.eval(), policy.spec, 1.0) > 1e-3
        folder = tmp_path / str(seed)
        adapter_export(folder, policy.lm)()
        rollout.load_adapter(str(folder))
        assert worst_difference(rollout, policy.lm.eval(), policy.spec, 1.0) < 1e-4
        seen += rollout.engine.list_loras()
        with torch.no_grad():
            expected = (
                policy.lm(IDS).logits[0, :-1].log_softmax(-1).gather(1, IDS[0, 1:, None])[:, 0]
            )
        for scored in rollout.score(IDS.tolist() * 3):
            torch.testing.assert_close(torch.tensor(scored), expected, atol=1e-4, rtol=0)
    assert seen == [1, 2, 3], "an adapter at a time, each of a number of its own"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_base_before_and_after_updates(tiny_task: Path, dtype: str) -> None:
    policy, data = (
        Policy(tiny_task / "model", dtype=dtype, enable_gradient_checkpointing=True),
        make_update(),
    )
    frozen = lora_spec(tiny_task / "model", lora_rank=0, dtype=dtype).causal_lm(trainable=False)
    settings = ForwardSettings(dtype=torch_dtype(dtype))
    expected = DataParallelPPOActor(ActorConfig(), frozen, forward=settings).compute_log_prob(data)[
        0
    ]
    policy.actor.settings = settings
    for _ in range(2):
        flags = [parameter.requires_grad for parameter in policy.module.parameters()]
        with without_adapters(policy.module):
            assert torch.equal(policy.actor.compute_log_prob(data)[0], expected)
            assert [parameter.requires_grad for parameter in policy.module.parameters()] == flags
        assert [parameter.requires_grad for parameter in policy.module.parameters()] == flags
        policy.update()
        assert (policy.actor.compute_log_prob(data)[0] - expected).abs().max() > 0.05


def test_without_adapters_changes_nothing_in_a_model_that_has_none(tiny_task: Path) -> None:
    lm = base(tiny_task / "model").requires_grad_(False)
    with without_adapters(lm):
        assert not any(parameter.requires_grad for parameter in lm.parameters())


def test_adapters_are_float32_on_weights_of_the_compute_type_and_every_run_begins_alike(
    tiny_task: Path,
) -> None:
    kept = torch.get_rng_state()
    one, other = (
        lora_spec(tiny_task / "model", dtype="bfloat16").causal_lm(trainable=True) for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), kept)
    for (name, parameter), own in zip(one.named_parameters(), other.parameters(), strict=True):
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), (
            name
        )
        assert torch.equal(parameter, own)
        assert not (name.endswith("lora_B.ppo_core.weight") and parameter.any())
        assert "lora_A" not in name or parameter.std() > 0.01


def test_targets_are_layers_by_name_and_others_are_refused(tiny_task: Path) -> None:
    lm = lora_spec(tiny_task / "model", target_modules=("q_proj", "down_proj")).causal_lm(
        trainable=True
    )
    found = {
        name.split(".lora_A")[0].split(".")[-1]
        for name, _ in lm.named_parameters()
        if ".lora_A." in name
    }
    assert found == {"q_proj", "down_proj"}
    whole = base(tiny_task / "model")
    for name in ("lm_head", "embed_tokens", "qq_proj"):
        with pytest.raises(ValueError, match=f"is called {name}; there are down_proj, gate_proj"):
            add_adapters(
                whole, ModelConfig(lora_rank=4, target_modules=("q_proj", name)), "a folder"
            )
    assert not any(".lora_A." in name for name, _ in whole.named_parameters())


EXPERTS: dict[str, Any] = {
    **SIZES,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# Kinds with experts, and settings of their own.
KINDS_WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": {},
    "mixtral": {},
    "olmoe": {},
    "granitemoe": {},
    "gpt_oss": {},
    "glm4_moe": {"first_k_dense_replace": 1},
    "glm4_moe all": {"first_k_dense_replace": 0},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_num_experts": 4, "moe_k": 2},
    "phimoe": {},
}


def with_experts(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.split()[0], **{**EXPERTS, **KINDS_WITH_EXPERTS[kind]})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS_WITH_EXPERTS)
def test_experts_without_adapters_are_told_and_engines_get_the_models_names(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    lm = with_experts(kind)
    names = set(lm.state_dict())
    weights = dict(lm.base_model.named_parameters())
    experts = sum(p.numel() for name, p in weights.items() if ".experts." in name)
    assert experts
    share = experts / sum(p.numel() for p in weights.values())
    lm = add_adapters(lm, ModelConfig(path="x", lora_rank=2), "x")
    [line] = [record.getMessage() for record in caplog.records]
    told = float(line.removeprefix("LoRA: ").split(" %")[0]) / 100
    assert told >= share - 5e-4
    assert "experts.gate_up_proj" in line
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    sent = dict(iter_weights(lm, torch.float32))
    assert set(sent) == names == set(weight_manifest(lm))
    plain = with_experts(kind)
    plain.load_state_dict(sent)
    torch.testing.assert_close(logits(plain), logits(lm), rtol=1e-4, atol=1e-4)


def test_what_peft_takes_for_experts_is_refused_by_name() -> None:
    settings = ModelConfig(path="x", lora_rank=2, target_modules=("q_proj", "down_proj"))
    with pytest.raises(ValueError, match=r"'glm4_moe': peft takes down_proj for parts of its"):
        add_adapters(with_experts("glm4_moe"), settings, "x")


def test_a_model_whose_layers_all_have_adapters_is_told_nothing(
    tiny_task: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lora_spec(tiny_task / "model").causal_lm(trainable=True)
    assert "LoRA" not in caplog.text


@pytest.mark.seconds
@pytest.mark.parametrize("values", [False, True])
def test_a_checkpoint_holds_what_trains_and_goes_on_bitwise(
    tiny_task: Path, tmp_path: Path, values: bool
) -> None:
    parts = ("model", "optimizer", "extra")
    policy = Policy(tiny_task / "model", values)
    policy.update(1)
    save(tmp_path, policy.state, parts)
    saved = SafeReader(tmp_path / "model").read_metadata().state_dict_metadata
    assert len(saved) == 28 + values and all(
        ".ppo_core." in name or name == "value_head.weight" for name in saved
    )
    again = Policy(tiny_task / "model", values)
    model_state.load(tmp_path, again.state, parts)
    for own in (policy, again):
        own.update(2)
    both = zip(policy.module.parameters(), again.module.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in both)
    other = Policy(tiny_task / "model", values, lora_rank=8)
    with pytest.raises(ValueError, match="was saved by another model"):
        model_state.load(tmp_path, other.state, ("model",))


def test_the_export_is_the_policy_to_peft_and_to_transformers(
    tiny_task: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    # Weights that bfloat16 holds.
    folder = tmp_path / "base"
    whole = base(tiny_task / "model", torch.bfloat16)
    whole.save_pretrained(folder)
    lora_spec(tiny_task / "model").tokenizer.save_pretrained(folder)
    policy = Policy(folder)
    policy.update(1)
    expected = logits(policy.lm)
    export = model_state.huggingface_export(
        tmp_path / "huggingface", policy.lm, policy.spec.tokenizer, weights=True
    )
    # The file holds the weights as they were when they were gathered.
    policy.update(2)
    export()
    adapted = PeftModel.from_pretrained(base(folder), tmp_path / "adapter")
    assert torch.equal(logits(adapted), expected)
    # The folder names the model that the adapter belongs to.
    assert torch.equal(logits(base(tmp_path / "adapter")), expected)
    merged = base(tmp_path / "huggingface")
    assert not (tmp_path / "huggingface/adapter_config.json").exists()
    assert weight_manifest(merged) == weight_manifest(whole)
    torch.testing.assert_close(logits(merged), expected, atol=0.1, rtol=0.05)
    assert (logits(base(folder)) - expected).abs().max() > 0.5
