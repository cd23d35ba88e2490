"""Forward passes and updates on CUDA against the CPU's.

They run in float32 and bfloat16, for every layout of a micro-batch.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_actor_critic import critic_change, make_update, weights_after
from tests.unit.test_forward import LAYOUTS
from training.batch.head import LogitForm, head_log_probs
from training.config import ActorConfig, CriticConfig, CriticModelConfig, ModelConfig, OptimConfig
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.model import policy_model
from workers.model.builder import ModelSpec
from workers.model.forward_settings import ForwardSettings
from workers.model.micro_batches import iter_micro_batches
from workers.model.optimizer import build_optimizer
from workers.model.packing import ForwardBatch
from workers.model.packing_check import check_forward
from workers.model.policy_model import PolicyModel

pytestmark = pytest.mark.gpu

CONFIG = ActorConfig(
    entropy_coeff=0.1,
    use_kl_loss=True,
    kl_loss_coef=0.2,
    grad_clip=1e9,
    ppo_max_token_len_per_gpu=40,
)
CPU = torch.device("cpu")
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def assert_near(got: Tensor, expected: Tensor, relative: float) -> None:
    """Checks that the difference's norm is at most `relative` of what is expected, not 0."""
    got, expected = got.detach().cpu().float(), expected.detach().cpu().float()
    assert expected.norm() > 0
    assert (got - expected).norm() <= relative * expected.norm()


@EVERY_LAYOUT
def test_the_policy_update_is_the_cpus_in_float32(lm, cpu_lm, device, layout) -> None:
    expected, expected_metrics = weights_after(cpu_lm, make_update(), CONFIG, **LAYOUTS[layout])
    got, metrics = weights_after(lm, make_update(), CONFIG, device=device, **LAYOUTS[layout])
    assert_near(got, expected, 1e-4)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)


@EVERY_LAYOUT
def test_the_policy_update_is_near_the_cpus_in_bfloat16(lm, cpu_lm, device, layout) -> None:
    expected, _ = weights_after(cpu_lm, make_update(), CONFIG)
    got, _ = weights_after(
        lm, make_update(), CONFIG, device=device, **LAYOUTS[layout], dtype=torch.bfloat16
    )
    assert_near(got, expected, 0.05)


@EVERY_LAYOUT
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_log_probs_and_entropies_are_the_cpus(lm, cpu_lm, device, layout, dtype, tolerance) -> None:
    expected = DataParallelPPOActor(CONFIG, cpu_lm).compute_log_prob(
        make_update(), calculate_entropy=True
    )
    settings = ForwardSettings(device=device, dtype=dtype, **LAYOUTS[layout])
    got = DataParallelPPOActor(CONFIG, lm, forward=settings).compute_log_prob(
        make_update(), calculate_entropy=True
    )
    for a, b in zip(got, expected, strict=True):
        assert a.device == CPU
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def value_models(tiny_task: Path, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Returns the value model with a random head, on the device and on the CPU."""
    spec = ModelSpec(
        CriticModelConfig(enable_gradient_checkpointing=False), str(tiny_task / "model"), CPU
    )
    module = spec.value_model()
    torch.manual_seed(0)
    nn.init.normal_(module.score.weight, std=0.1)
    return copy.deepcopy(module).to(device), module


def test_values_and_their_update_are_the_cpus(value_models, device) -> None:
    on_device, on_cpu = value_models
    config = CriticConfig(grad_clip=1e9, ppo_max_token_len_per_gpu=40)
    expected = DataParallelPPOCritic(config, on_cpu).compute_values(make_update())
    got = DataParallelPPOCritic(
        config, on_device, forward=ForwardSettings(device=device)
    ).compute_values(make_update())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    expected_change, expected_metrics = critic_change(on_cpu, make_update(), config)
    change, metrics = critic_change(on_device, make_update(), config, device=device)
    assert_near(change, expected_change, 1e-4)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)


@EVERY_LAYOUT
def test_inputs_lie_on_the_device_without_a_mask(device, layout) -> None:
    settings = ForwardSettings(device=device, **LAYOUTS[layout])
    for _, _, inputs in iter_micro_batches(make_update(), settings, CONFIG.micro_batching):
        assert (
            inputs.input_ids.device
            == inputs.logit_positions.device
            == inputs.labels.device
            == device
        )
        assert inputs.attention_mask is None
        if inputs.sequences is not None:
            assert inputs.sequences.boundaries.device == device
            assert inputs.sequences.keys is None or inputs.sequences.keys.device == device


@pytest.mark.parametrize("strip_padding", [True, False])
def test_padded_rows_give_the_same_update(lm, cpu_lm, device, strip_padding) -> None:
    expected, _ = weights_after(cpu_lm, make_update(), CONFIG)
    got, _ = weights_after(
        lm,
        make_update(pad_prompt=3, pad_response=2),
        CONFIG,
        device=device,
        strip_padding=strip_padding,
    )
    assert_near(got, expected, 1e-4)


def test_gradient_checkpointing_changes_no_gradient(tiny_task, device) -> None:
    changes = []
    for checkpointing in (False, True):
        config = ModelConfig(enable_gradient_checkpointing=checkpointing)
        module = ModelSpec(config, str(tiny_task / "model"), device).causal_lm(trainable=True)
        assert module.is_gradient_checkpointing == checkpointing
        check_forward(module)
        changes.append(weights_after(module, make_update(), CONFIG, device=device)[0])
    assert_near(changes[1], changes[0], 1e-5)


def test_a_head_in_chunks_gives_the_same_update(lm, device, monkeypatch) -> None:
    expected, _ = weights_after(lm, make_update(), CONFIG, device=device)
    # Three positions of a 64-word vocabulary.
    monkeypatch.setattr(policy_model, "LOGITS_CHUNK_BYTES", 2 * 64 * 3)
    got, _ = weights_after(lm, make_update(), CONFIG, device=device)
    assert_near(got, expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1 << 27, 131_072 * 14])
def test_log_probs_of_a_real_vocabulary_and_their_gradient_are_the_formulas(
    device, dtype, chunk
) -> None:
    """In one chunk and in several, the last a small one."""
    generator = torch.Generator().manual_seed(0)
    rows, vocab = (300, 131_072) if device.type == "cuda" else (30, 131_072)
    given = [torch.randn(n, 16, generator=generator).to(device, dtype) for n in (rows, vocab)]
    labels = torch.randint(vocab, (rows,), generator=generator).to(device)
    states, weight = (x.clone().requires_grad_() for x in given)
    log_probs, entropies = head_log_probs(
        states, weight, None, labels, LogitForm(0.7), "grad", chunk
    )
    (log_probs.sum() + entropies.sum()).backward()
    plain_states, plain_weight = (x.clone().requires_grad_() for x in given)
    distribution = ((plain_states @ plain_weight.T).float() / 0.7).log_softmax(-1)
    expected = distribution.gather(1, labels[:, None])[:, 0]
    expected_entropies = -(distribution.exp() * distribution).sum(-1)
    (expected.sum() + expected_entropies.sum()).backward()
    torch.testing.assert_close(log_probs, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropies, expected_entropies, rtol=1e-4, atol=1e-4)
    for got, plain in ((states, plain_states), (weight, plain_weight)):
        assert_near(got.grad, plain.grad, 1e-4 if dtype == torch.float32 else 1e-2)


def test_three_steps_of_the_fused_optimizer_end_like_the_cpus(lm, cpu_lm, device) -> None:
    ends = []
    start = nn.utils.parameters_to_vector(cpu_lm.parameters()).detach()
    for module, where in ((copy.deepcopy(lm), device), (copy.deepcopy(cpu_lm), CPU)):
        optimizer = build_optimizer(module, OptimConfig(lr=1e-3))
        actor = DataParallelPPOActor(
            CONFIG, module, optimizer, forward=ForwardSettings(device=where)
        )
        for _ in range(3):
            metrics = actor.update_policy(make_update())
        assert metrics["actor/skipped_updates"] == 0
        assert {state["step"].device for state in optimizer.state.values()} == {where}
        ends.append(nn.utils.parameters_to_vector(module.parameters()).detach().cpu() - start)
    # AdamW divides by the gradient's size: where that is next to nothing, so is what the two agree
    # on.
    assert_near(ends[0], ends[1], 1e-2)


def test_an_infinite_gradient_is_skipped_on_the_device_too(lm, device) -> None:
    data = make_update()
    data.batch["advantages"][0, 0] = float("inf")
    change, metrics = weights_after(lm, data, ActorConfig(), device=device)
    assert not change.any()
    assert metrics["actor/skipped_updates"] == 1


def test_logits_of_a_batch_never_exist_as_a_whole(tiny_task, cuda_memory) -> None:
    """1,024 sampled tokens of a vocabulary of 262,144.

    Logits and their gradient would take 1 GiB each in float32.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    device, vocab, tokens = cuda_memory, 262_144, 1024
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    with torch.device(device):
        policy = PolicyModel(LlamaForCausalLM(config))
    ids = torch.randint(vocab, (1, tokens + 1), device=device)
    steps = torch.arange(tokens, device=device)
    inputs = ForwardBatch(
        input_ids=ids,
        position_ids=torch.arange(tokens + 1, device=device)[None],
        attention_mask=None,
        logit_positions=steps,
        labels=ids[0, 1:],
        rows=torch.zeros_like(steps),
        columns=steps,
    )
    before = torch.cuda.memory_allocated(device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        policy(inputs, "value")[0].sum().backward()
    gradients = 4 * sum(p.numel() for p in policy.parameters())
    peak = torch.cuda.max_memory_allocated(device) - before - gradients
    assert peak < 5 * policy_model.LOGITS_CHUNK_BYTES, (
        "a chunk's logits, their gradient and float32 blocks of it"
    )
