"""The updates: one gradient however a mini-batch is cut, and the numbers of a plain PPO step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from data.protocol import DataProto
from tests.unit.test_forward import LAYOUTS, make_batch, plain_log_probs
from training.config import (
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    MicroBatching,
    OptimConfig,
    PolicyLossChoice,
    RolloutCorrectionConfig,
    UpdatePlan,
)
from training.config.checks import load_custom_algorithm
from training.core_algos import LOSS_AGG_MODES, POLICY_LOSS_REGISTRY, agg_loss
from training.core_algos.masked_ops import masked_mean
from training.rollout_correction import apply_correction
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.model.attention import use_packed_attention
from workers.model.builder import ModelSpec
from workers.model.forward_settings import ForwardSettings
from workers.model.optimizer import build_optimizer, build_scheduler

SPLITS = [
    {"ppo_max_token_len_per_gpu": 1000},
    {"ppo_max_token_len_per_gpu": 24},
    {"ppo_micro_batch_size_per_gpu": 1},
    {"ppo_micro_batch_size_per_gpu": 3},
]


@pytest.fixture(scope="module")
def lm(tiny_task: Path) -> nn.Module:
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    assert use_packed_attention(lm)
    return lm


def make_update(seed: int = 0, **padding: int) -> DataProto:
    """Makes `make_batch` with everything an update reads, whatever the padding."""
    data = make_batch(seed, **padding)
    mask = data.batch["response_mask"]
    generator = torch.Generator().manual_seed(seed + 1)

    def noise(scale: float) -> Tensor:
        out = torch.zeros(mask.shape)
        out[:, :5] = scale * torch.randn(7, 5, generator=generator)
        return out * mask

    data.batch["advantages"] = noise(1.0)
    data.batch["old_log_probs"] = -3.5 + noise(0.3)
    data.batch["ref_log_prob"] = -3.5 + noise(0.3)
    data.batch["values"], data.batch["returns"] = noise(1.0), noise(1.0)
    data.non_tensor_batch["uid"] = np.array(list("aaaabbc"), dtype=object)
    data.meta_info = {"temperature": 1.0, "seed": 0, "global_steps": 1}
    return data


def weights_after(
    lm: nn.Module, data: DataProto, config: ActorConfig, rows: int = 7, **settings: Any
) -> tuple[Tensor, dict]:
    module = copy.deepcopy(lm)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    actor = DataParallelPPOActor(config, module, optimizer, forward=ForwardSettings(**settings))
    metrics = actor.update_policy(
        data, UpdatePlan.of_rows(len(data), rows, config.ppo_epochs, config.shuffle)
    )
    change = [p - q for p, q in zip(module.parameters(), lm.parameters(), strict=True)]
    return torch.cat([c.detach().flatten() for c in change]), metrics


@pytest.mark.seconds
@pytest.mark.parametrize("rollout_is", ["token", "sequence"])
@pytest.mark.parametrize("split", SPLITS)
def test_a_single_update_weighs_by_its_own_log_probs_as_if_they_had_been_computed_before(
    lm, rollout_is, split
) -> None:
    config, correction = (
        ActorConfig(grad_clip=1e9, **split),
        RolloutCorrectionConfig(rollout_is=rollout_is),
    )

    def updated(data: DataProto) -> tuple[Tensor, dict[str, float]]:
        module = copy.deepcopy(lm)
        actor = DataParallelPPOActor(
            config, module, torch.optim.SGD(module.parameters(), lr=0.1), correction
        )
        metrics = actor.update_policy(data)
        return torch.cat([p.detach().flatten() for p in module.parameters()]), metrics

    data = make_update()
    del data.batch["old_log_probs"]
    own = DataParallelPPOActor(config, lm).compute_log_prob(data)[0]
    apart = 0.8 * torch.randn(own.shape, generator=torch.Generator().manual_seed(3))
    data.batch["rollout_log_probs"] = own + apart * data.batch["response_mask"]
    got, metrics = updated(data)
    data.batch["old_log_probs"] = own
    unweighed, _ = updated(data)
    told = apply_correction(data, correction)
    expected, _ = updated(data)
    start = torch.cat([p.detach().flatten() for p in lm.parameters()])
    assert close(got - start, expected - start) and not close(unweighed - start, expected - start)
    for name in ("rollout_is_mean", "rollout_is_oob_ratio"):
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(
            told[f"rollout_corr/{name}"], rel=1e-4
        )


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-5 * b.norm()) and bool(b.norm() > 0)


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("order", ["abc", "cab"])
def test_groups_that_come_one_by_one_give_the_gradient_and_metrics_of_all(
    lm, order, loss_agg_mode
) -> None:
    config = ActorConfig(
        loss_agg_mode=loss_agg_mode,
        entropy_coeff=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.2,
        grad_clip=1e9,
    )
    data = make_update()
    expected, expected_metrics = weights_after(lm, data, config)
    module = copy.deepcopy(lm)
    actor = DataParallelPPOActor(config, module, torch.optim.SGD(module.parameters(), lr=0.1))
    for _ in range(2):
        module.load_state_dict(lm.state_dict())
        for uid in order:
            actor.add_groups(
                data.select_idxs(torch.tensor([i for i, own in enumerate("aaaabbc") if own == uid]))
            )
        metrics = actor.finish_update()
        change = [p - q for p, q in zip(module.parameters(), lm.parameters(), strict=True)]
        assert close(torch.cat([c.detach().flatten() for c in change]), expected)
        assert metrics == pytest.approx(expected_metrics, rel=2e-5, abs=1e-7)


def test_clip_cov_draws_by_the_runs_seed_and_the_step(lm) -> None:
    """Whatever else has drawn from torch's generator, and differently in each step."""
    choice = PolicyLossChoice(loss_mode="clip_cov", clip_cov_ratio=0.1, clip_cov_lb=-10.0)
    config = ActorConfig(policy_loss=choice, grad_clip=1e9, ppo_micro_batch_size_per_gpu=3)

    def updated(seed: int, step: int, drawn_before: int = 0) -> Tensor:
        data = make_update()
        data.meta_info |= {"seed": seed, "global_steps": step}
        torch.rand(drawn_before)
        before = torch.get_rng_state()
        weights, _ = weights_after(lm, data, config)
        assert torch.equal(torch.get_rng_state(), before)
        return weights

    expected = updated(seed=1, step=1)
    assert torch.equal(updated(seed=1, step=1, drawn_before=7), expected)
    # There are few tokens to draw among: some seeds draw alike.
    assert not all(torch.equal(updated(seed=1, step=step), expected) for step in range(2, 8))
    assert not all(torch.equal(updated(seed=seed, step=1), expected) for seed in range(2, 8))


def test_gspo_takes_means_of_sequences_unless_told_otherwise(lm) -> None:
    data = make_update()
    gspo = ActorConfig(
        policy_loss=PolicyLossChoice(loss_mode="gspo"), entropy_coeff=0.1, grad_clip=1e9
    )
    by_sequence, metrics = weights_after(
        lm, data, replace(gspo, loss_agg_mode="seq-mean-token-mean")
    )
    by_token, _ = weights_after(lm, data, replace(gspo, loss_agg_mode="token-mean"))
    untold, metrics_untold = weights_after(lm, data, gspo)
    assert torch.equal(untold, by_sequence) and metrics_untold == metrics
    assert not close(untold, by_token)
    # All other losses are by token.
    vanilla = ActorConfig(grad_clip=1e9)
    expected, _ = weights_after(lm, data, replace(vanilla, loss_agg_mode="token-mean"))
    assert torch.equal(weights_after(lm, data, vanilla)[0], expected)


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("split", SPLITS[1:])
def test_gradient_and_metrics_do_not_depend_on_micro_batch_size(lm, split, loss_agg_mode) -> None:
    config = ActorConfig(
        loss_agg_mode=loss_agg_mode,
        entropy_coeff=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.2,
        grad_clip=1e9,
    )
    data = make_update()
    expected, expected_metrics = weights_after(lm, data, replace(config, **SPLITS[0]))
    got, metrics = weights_after(lm, data, replace(config, **split))
    assert close(got, expected)
    assert metrics == pytest.approx(expected_metrics, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("loss_agg_mode", LOSS_AGG_MODES)
def test_a_loss_written_for_verl_has_vanillas_gradient_for_any_split(
    lm, loss_agg_mode, monkeypatch
) -> None:
    """It gives `agg_loss` a loss, a mask and a mode, and returns metrics as plain numbers."""

    def clipped(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
        ratio = (log_prob - old_log_prob).exp()
        bounded = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
        losses = torch.maximum(-advantages * ratio, -advantages * bounded)
        losses = torch.where(
            advantages < 0, torch.minimum(losses, -advantages * config.clip_ratio_c), losses
        )
        loss = agg_loss(losses, response_mask, loss_agg_mode)
        return loss, {"actor/longer": masked_mean((bounded != ratio).float(), response_mask).item()}

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "clipped", clipped)
    config = ActorConfig(loss_agg_mode=loss_agg_mode, grad_clip=1e9, clip_ratio=0.05)
    data = make_update()
    expected, _ = weights_after(lm, data, replace(config, **SPLITS[0]))
    seen = []
    for split in SPLITS:
        own = replace(config, policy_loss=PolicyLossChoice(loss_mode="clipped"), **split)
        got, metrics = weights_after(lm, data, own)
        assert close(got, expected)
        seen.append(metrics["actor/longer"])
    assert seen == pytest.approx([seen[0]] * len(SPLITS), rel=1e-5)
    assert 0 < seen[0] <= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_does_not_depend_on_padding_or_row_order(lm, layout) -> None:
    config = ActorConfig(grad_clip=1e9, ppo_max_token_len_per_gpu=40)
    data = make_update()
    expected, _ = weights_after(lm, data, config)
    padded, _ = weights_after(
        lm, make_update(pad_prompt=3, pad_response=2), config, **LAYOUTS[layout]
    )
    assert close(padded, expected)
    shuffled = data.select_idxs(torch.tensor([6, 2, 4, 0, 5, 1, 3]))
    reordered, _ = weights_after(lm, shuffled, config, **LAYOUTS[layout])
    assert close(reordered, expected)


def test_rows_of_zero_mask_change_nothing(lm) -> None:
    config = ActorConfig(grad_clip=1e9, ppo_max_token_len_per_gpu=40)
    data = make_update()
    expected, _ = weights_after(lm, data, config)
    padded = data.pad_with_dummies(4)
    assert len(padded) == 8
    got, _ = weights_after(lm, padded, config, rows=8)
    assert close(got, expected)
    empty = make_update()
    empty.batch["response_mask"] = torch.zeros_like(empty.batch["response_mask"])
    change, metrics = weights_after(lm, empty, config)
    assert not change.any()
    assert all(np.isfinite(value) for value in metrics.values())


def test_update_is_plain_ppo_with_dual_clip(lm) -> None:
    """Against the formula written out over single rows."""
    config = ActorConfig(grad_clip=1e9, clip_ratio_low=0.1, clip_ratio_high=0.3)
    data = make_update()
    got, metrics = weights_after(lm, data, config)
    module = copy.deepcopy(lm)
    log_probs, _ = plain_log_probs(module, data, 1.0)
    advantages, mask = data.batch["advantages"], data.batch["response_mask"]
    ratio = (log_probs - data.batch["old_log_probs"]).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.9, 1.3))
    losses = torch.where(advantages < 0, torch.minimum(clipped, -3.0 * advantages), clipped)
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    expected = torch.cat([(-0.1 * p.grad).flatten() for p in module.parameters()])
    assert close(got, expected)
    assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_the_update_takes_the_entropy_bonus_off_the_loss_and_adds_the_kl(lm) -> None:
    """Against formulas written out: the signs of both, and their coefficients."""
    terms = ActorConfig(
        grad_clip=1e9,
        entropy_coeff=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.2,
        kl_loss_type="k2",
    )
    data = make_update()
    with_terms, metrics = weights_after(lm, data, terms)
    without, _ = weights_after(lm, data, ActorConfig(grad_clip=1e9))
    module = copy.deepcopy(lm)
    log_probs, entropy = plain_log_probs(module, data, 1.0)
    mask = data.batch["response_mask"]
    kl = ((log_probs - data.batch["ref_log_prob"]).square() / 2 * mask).sum() / mask.sum()
    bonus = (entropy * mask).sum() / mask.sum()
    (0.2 * kl - 0.1 * bonus).backward()
    expected = torch.cat([(-0.1 * p.grad).flatten() for p in module.parameters()])
    assert close(with_terms - without, expected)
    assert metrics["actor/kl_loss"] == pytest.approx(kl.item(), rel=1e-4)
    assert metrics["actor/entropy"] == pytest.approx(bonus.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("term", "name", "grows"),
    [
        ({"entropy_coeff": 5.0}, "actor/entropy", True),
        ({"kl_loss_coef": 5.0}, "actor/kl_loss", False),
    ],
)
def test_the_bonus_raises_entropy_and_the_kl_term_lowers_the_kl(
    lm, term: dict[str, float], name: str, grows: bool
) -> None:
    data = make_update()
    data.batch["advantages"] = torch.zeros_like(data.batch["advantages"])
    module = copy.deepcopy(lm)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    config = ActorConfig(use_kl_loss="kl_loss_coef" in term, **term)
    actor = DataParallelPPOActor(config, module, optimizer)
    first, *_, last = [actor.update_policy(data)[name] for _ in range(4)]
    assert (last > first) == grows


def test_the_optimiser_is_adamw_as_its_settings_say() -> None:
    """The first step: a decay by rate x weight_decay, and the rate against the gradient's sign."""
    module = nn.Linear(2, 1, bias=False)
    frozen = nn.Linear(1, 1)
    frozen.requires_grad_(False)
    module.add_module("frozen", frozen)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[2.0, -4.0]]))
    settings = OptimConfig(lr=0.1, weight_decay=0.5, betas=(0.8, 0.9))
    optimizer = build_optimizer(module, settings)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.1, 0.5, (0.8, 0.9))
    assert [parameter is module.weight for parameter in group["params"]] == [True]
    module.weight.grad = torch.tensor([[3.0, 0.0]])
    optimizer.step()
    kept = 1 - 0.1 * 0.5
    assert module.weight.tolist()[0] == pytest.approx([2.0 * kept - 0.1, -4.0 * kept], rel=1e-6)


def test_mini_batches_are_steps_of_their_own_and_need_old_log_probs(lm) -> None:
    data = make_update().select_idxs(torch.arange(6))
    config = ActorConfig(ppo_epochs=2, grad_clip=1e9)
    one, _ = weights_after(lm, data, replace(config, ppo_epochs=1), rows=6)
    four, _ = weights_after(lm, data, config, rows=3)
    assert not close(four, one)
    missing = data.select(batch_keys=[k for k in data.batch.keys() if k != "old_log_probs"])  # noqa: SIM118
    with pytest.raises(KeyError, match="old_log_probs"):
        weights_after(lm, missing, config, rows=3)


def test_gradient_clipping_bounds_the_step_and_reports_the_norm_before(lm) -> None:
    change, metrics = weights_after(lm, make_update(), ActorConfig(grad_clip=0.01))
    assert metrics["actor/grad_norm"] > 0.01
    assert change.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_an_update_with_infinite_gradient_is_skipped_and_counted(lm) -> None:
    data = make_update()
    data.batch["advantages"][0, 0] = float("inf")
    change, metrics = weights_after(lm, data, ActorConfig())
    assert not change.any()
    assert metrics["actor/skipped_updates"] == 1


def test_a_skipped_update_says_whose_loss_it_was_in_which_step_and_mini_batch(lm, caplog) -> None:
    data = make_update()
    data.batch["advantages"][0, 0] = float("nan")
    weights_after(lm, data, ActorConfig())
    assert (
        "step 1, mini-batch 1 of 1 of the actor: its gradient has norm nan, "
        "from the loss of ranks [0]" in caplog.text
    )
    caplog.clear()
    broken = copy.deepcopy(lm)
    next(broken.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    optimizer = torch.optim.SGD(broken.parameters(), lr=0.1)
    DataParallelPPOActor(ActorConfig(), broken, optimizer).update_policy(
        make_update(), UpdatePlan.of_rows(7, 7)
    )
    assert "from the loss of ranks none: it is the backward pass" in caplog.text


@contextmanager
def small_device(module: nn.Module, tokens: int) -> Iterator[list[int]]:
    """Has the module run out of a device's memory in the backward pass of more tokens than these.

    The list holds the tokens of the passes that ended well; the first layers' gradients are there
    already when one does not.
    """
    sizes: list[int] = []
    embedding = module.get_input_embeddings()

    def limit(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        size = given[0].numel()

        def check(gradient: Tensor) -> None:
            if size > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            sizes.append(size)

        if output.requires_grad:
            output.register_hook(check)
        elif size > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = embedding.register_forward_hook(limit)
    yield sizes
    handle.remove()


@pytest.mark.parametrize(("settings", "fits"), [({}, 31), ({"pack_rows": True}, 15)])
def test_an_update_that_runs_out_of_memory_is_made_with_half_the_tokens_and_the_same_numbers(
    lm, caplog, settings, fits
) -> None:
    config, plan = (
        ActorConfig(ppo_max_token_len_per_gpu=1000, ppo_epochs=2),
        UpdatePlan.of_rows(7, 7, 2),
    )
    expected, expected_metrics = weights_after(lm, make_update(), config, **settings)
    module = copy.deepcopy(lm)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    actor = DataParallelPPOActor(config, module, optimizer, forward=ForwardSettings(**settings))
    with small_device(module, 24) as sizes:
        metrics = actor.update_policy(make_update(), plan)
        assert max(sizes) <= 24
        change = [p - q for p, q in zip(module.parameters(), lm.parameters(), strict=True)]
        assert close(torch.cat([c.detach().flatten() for c in change]), expected)
        assert metrics == pytest.approx(expected_metrics, rel=2e-5, abs=1e-7)
        said = [record.message for record in caplog.records if "ran out" in record.message]
        assert (
            f"at most MicroBatching(max_token_len={fits}, micro_batch_size=None) "
            "for the rest of the run" in said[-1]
        )
        actor.update_policy(make_update(), plan)
        assert len([record for record in caplog.records if "ran out" in record.message]) == len(
            said
        ), "it stays"
    with small_device(module, 3), pytest.raises(torch.OutOfMemoryError):
        actor.update_policy(make_update(), plan)


def test_compute_log_prob_gives_the_log_probs_at_the_temperature(lm) -> None:
    data = make_update()
    data.meta_info["temperature"] = 0.5
    actor = DataParallelPPOActor(ActorConfig(), lm)
    log_probs, entropies = actor.compute_log_prob(data, calculate_entropy=True)
    expected, expected_entropies = plain_log_probs(lm.eval(), data, 0.5)
    torch.testing.assert_close(log_probs, expected.detach(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(entropies, expected_entropies.detach(), rtol=1e-5, atol=2e-6)
    small, none = actor.compute_log_prob(data, limits=MicroBatching(micro_batch_size=2))
    torch.testing.assert_close(small, log_probs, rtol=1e-5, atol=2e-6)
    assert none is None


def in_verls_form(data: DataProto) -> DataProto:
    """Makes the batch that verl's own trainer hands on: input_ids in place of prompts."""
    batch = data.select()
    ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1)
    batch.batch["input_ids"] = ids
    batch.batch["position_ids"] = (data.batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    del batch.batch["prompts"]
    return batch


def test_a_batch_of_verls_form_gives_the_same_numbers(lm, transformer) -> None:
    data = make_update()
    verls = in_verls_form(data)
    names = set(verls.batch.keys())
    actor = DataParallelPPOActor(ActorConfig(), lm)
    assert torch.equal(actor.compute_log_prob(verls)[0], actor.compute_log_prob(data)[0])
    assert torch.equal(actor.forward(verls)[0], actor.forward(data)[0])
    expected, _ = weights_after(lm, data, ActorConfig())
    got, _ = weights_after(lm, verls, ActorConfig())
    assert torch.equal(got, expected)
    critic = DataParallelPPOCritic(CriticConfig(), transformer)
    assert torch.equal(critic.compute_values(verls), critic.compute_values(data))
    expected, _ = critic_change(transformer, data, CriticConfig())
    got, _ = critic_change(transformer, verls, CriticConfig())
    assert torch.equal(got, expected)
    assert set(verls.batch.keys()) == names, "the batch itself stays as it is"


def test_without_a_mask_all_of_a_response_was_sampled(lm) -> None:
    """verl's own call for log-probs hands no response_mask on."""
    data = make_update()
    length = data.batch["responses"].shape[1]
    data.batch["response_mask"] = data.batch["attention_mask"][:, -length:]
    verls = in_verls_form(data)
    del verls.batch["response_mask"]
    actor = DataParallelPPOActor(ActorConfig(), lm)
    assert torch.equal(actor.compute_log_prob(verls)[0], actor.compute_log_prob(data)[0])


def test_bfloat16_autocast_stays_near_float32_and_keeps_float32_weights(lm) -> None:
    data = make_update()
    settings = ForwardSettings(dtype=torch.bfloat16)
    exact, _ = DataParallelPPOActor(ActorConfig(), lm).compute_log_prob(data)
    rough, _ = DataParallelPPOActor(ActorConfig(), lm, forward=settings).compute_log_prob(data)
    assert 0 < (exact - rough).abs().max() < 0.1
    assert rough.dtype == torch.float32
    module = copy.deepcopy(lm)
    DataParallelPPOActor(
        ActorConfig(), module, torch.optim.SGD(module.parameters(), lr=0.1), forward=settings
    ).update_policy(data)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_gradient_checkpointing_changes_no_gradient(tiny_task: Path) -> None:
    from training.config import ModelConfig

    data, config = make_update(), ActorConfig(grad_clip=1e9)
    changes = []
    for checkpointing in (False, True):
        spec = ModelSpec(
            ModelConfig(enable_gradient_checkpointing=checkpointing),
            str(tiny_task / "model"),
            torch.device("cpu"),
        )
        module = spec.causal_lm(trainable=True)
        assert module.is_gradient_checkpointing == checkpointing
        changes.append(weights_after(module, data, config)[0])
    assert close(changes[1], changes[0])


@pytest.mark.parametrize("split", SPLITS[1:])
def test_the_example_loss_and_its_metric_do_not_depend_on_micro_batch_size(lm, split) -> None:
    load_custom_algorithm("examples/custom_algorithm.py")
    choice = PolicyLossChoice(loss_mode="soft_clip", custom_kwargs={"sharpness": 3.0})
    config, data = ActorConfig(policy_loss=choice, grad_clip=1e9), make_update()
    expected, expected_metrics = weights_after(lm, data, replace(config, **SPLITS[0]))
    got, metrics = weights_after(lm, data, replace(config, **split))
    assert close(got, expected)
    assert metrics == pytest.approx(expected_metrics, rel=2e-5, abs=1e-7)
    other = replace(config, policy_loss=replace(choice, custom_kwargs={"sharpness": 1.0}))
    assert not close(weights_after(lm, data, other)[0], expected)


def test_a_loss_that_returns_something_else_is_named(lm, monkeypatch) -> None:
    from training import core_algos

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "odd", lambda log_prob: log_prob.sum())
    config = ActorConfig(policy_loss=PolicyLossChoice(loss_mode="odd"))
    with pytest.raises(ValueError, match=r"policy loss 'odd' must return \(loss, metrics\)"):
        weights_after(lm, make_update(), config)


# The critic


@pytest.fixture(scope="module")
def transformer(tiny_task: Path) -> nn.Module:
    spec = ModelSpec(
        CriticModelConfig(enable_gradient_checkpointing=False),
        str(tiny_task / "model"),
        torch.device("cpu"),
    )
    module = spec.value_model()
    torch.manual_seed(0)
    nn.init.normal_(module.score.weight, std=0.1)
    return module


def critic_change(
    transformer: nn.Module, data: DataProto, config: CriticConfig, **settings: Any
) -> tuple[Tensor, dict]:
    module = copy.deepcopy(transformer)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    critic = DataParallelPPOCritic(config, module, optimizer, forward=ForwardSettings(**settings))
    metrics = critic.update_critic(
        data, UpdatePlan.of_rows(len(data), 7, config.ppo_epochs or 1, config.shuffle)
    )
    change = [p - q for p, q in zip(module.parameters(), transformer.parameters(), strict=True)]
    return torch.cat([c.detach().flatten() for c in change]), metrics


@pytest.mark.parametrize("split", SPLITS[1:])
def test_critic_gradient_does_not_depend_on_micro_batch_size(transformer, split) -> None:
    data, config = make_update(), CriticConfig(grad_clip=1e9)
    expected, expected_metrics = critic_change(transformer, data, config)
    got, metrics = critic_change(transformer, data, replace(config, **split))
    assert close(got, expected)
    assert metrics == pytest.approx(expected_metrics, rel=2e-5, abs=1e-7)


def test_critic_loss_is_the_clipped_squared_error(transformer) -> None:
    data = make_update()
    values = DataParallelPPOCritic(CriticConfig(), transformer).compute_values(data)
    mask, old, returns = data.batch["response_mask"], data.batch["values"], data.batch["returns"]
    clipped = values.clamp(old - 0.5, old + 0.5)
    expected = (
        0.5
        * (torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) * mask).sum()
        / mask.sum()
    )
    _, metrics = critic_change(transformer, data, CriticConfig())
    assert metrics["critic/vf_loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_leaves_no_gradient_in_memory(lm, transformer, dtype) -> None:
    policy, values = copy.deepcopy(lm), copy.deepcopy(transformer)
    settings = ForwardSettings(dtype=dtype)
    for build, module in ((DataParallelPPOActor, policy), (DataParallelPPOCritic, values)):
        config = ActorConfig(ppo_mini_batch_size=7) if module is policy else CriticConfig()
        worker = build(
            config, module, torch.optim.SGD(module.parameters(), lr=0.1), forward=settings
        )
        _ = (
            worker.update_policy(make_update())
            if module is policy
            else worker.update_critic(make_update())
        )
        assert [name for name, p in module.named_parameters() if p.grad is not None] == []


# The schedules


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        (OptimConfig(lr=1.0), [1, 1, 1, 1]),
        (OptimConfig(lr=1.0, lr_warmup_steps=2), [0, 0.5, 1, 1]),
        (OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.5), [0, 0.5, 1, 1]),
        (
            OptimConfig(lr=1.0, scheduler="cosine", min_lr_ratio=0.2),
            [1, 0.2 + 0.8 * (2 + 2**0.5) / 4, 0.6, 0.2 + 0.8 * (2 - 2**0.5) / 4],
        ),
    ],
)
def test_schedules_by_hand_over_four_steps(optim: OptimConfig, expected: list[float]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=optim.lr)
    scheduler = build_scheduler(optimizer, optim, total_steps=4)
    rates = []
    for _ in range(4):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected)
