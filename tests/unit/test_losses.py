"""Tests policy, value and entropy losses: by hand, and the same gradient for every split."""

import math
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from training import core_algos as algos
from training.config import PolicyLossChoice, RolloutCorrectionConfig

MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
GLOBAL = {"batch_num_tokens": 9, "global_batch_size": 4}


def policy_inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    old, change, advantages = (torch.randn(5, 4, generator=generator) for _ in range(3))
    return old, old + 0.5 * change, advantages


# agg_loss


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 10 / 3),
        ("token-sum", 10.0),
        ("seq-mean-token-sum", 10 / 2),
        ("seq-mean-token-mean", (1.5 + 7) / 2),
        ("seq-mean-token-sum-norm", 10 / 2 / 3),
    ],
)
def test_aggregation_matches_numbers_worked_by_hand(mode, expected):
    losses = torch.tensor([[1.0, 2.0, 50.0], [7.0, 60.0, 70.0], [80.0, 90.0, float("nan")]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert algos.agg_loss(losses, mask, mode).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 3 * 10 / 12),
        ("token-sum", 3 * 10.0),
        ("seq-mean-token-sum", 3 * 10 / 5),
        ("seq-mean-token-mean", 3 * (1.5 + 7) / 5),
        ("seq-mean-token-sum-norm", 3 * 10 / 5 / 8),
    ],
)
def test_global_counts_replace_the_denominators_and_ranks_multiply(mode, expected):
    losses, mask = torch.tensor([[1.0, 2.0], [7.0, 60.0]]), torch.tensor([[1, 1], [1, 0]])
    loss = algos.agg_loss(
        losses,
        mask,
        mode,
        dp_size=3,
        batch_num_tokens=12,
        global_batch_size=torch.tensor(5),
        loss_scale_factor=8,
    )
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", algos.LOSS_AGG_MODES)
@pytest.mark.parametrize("counts", [{}, {"batch_num_tokens": 0, "global_batch_size": 0}])
def test_a_fully_masked_batch_has_loss_zero_and_a_gradient_path(mode, counts):
    losses = torch.randn(2, 3, requires_grad=True)
    loss = algos.agg_loss(losses * 2, torch.zeros(2, 3), mode, **counts)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(losses.grad, torch.zeros(2, 3))


def test_several_ranks_need_the_global_count_that_the_mode_divides_by():
    losses, mask = torch.ones(2, 2), torch.ones(2, 2)
    with pytest.raises(ValueError, match="dp_size=2 needs batch_num_tokens"):
        algos.agg_loss(losses, mask, "token-mean", dp_size=2, global_batch_size=4)
    with pytest.raises(ValueError, match="dp_size=2 needs global_batch_size"):
        algos.agg_loss(losses, mask, "seq-mean-token-mean", dp_size=2, batch_num_tokens=4)
    assert algos.agg_loss(losses, mask, "token-sum", dp_size=2).item() == 8


def test_unknown_aggregation_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"loss_agg_mode='token_mean' is unknown.*Did you mean 'token-mean'"
    ):
        algos.agg_loss(torch.ones(1, 1), torch.ones(1, 1), "token_mean")


# The vanilla policy loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped", "clipped_lower"),
    [
        (1.1, 1.0, -1.1, 0, 0),
        # The gain is capped at 1 + 0.2.
        (1.5, 1.0, -1.2, 1, 0),
        (0.5, 1.0, -0.5, 0, 0),
        # The loss is kept at 1 - 0.2.
        (0.5, -1.0, 0.8, 1, 0),
        (1.5, -1.0, 1.5, 0, 0),
        # The dual clip is at 3 |A|.
        (5.0, -2.0, 6.0, 0, 1),
        (5.0, 2.0, -2.4, 1, 0),
    ],
)
def test_vanilla_loss_of_one_token_matches_numbers_worked_by_hand(
    ratio, advantage, expected, clipped, clipped_lower
):
    old, new = torch.tensor([[-1.0]]), torch.tensor([[-1.0 + math.log(ratio)]])
    loss, metrics = algos.compute_policy_loss_vanilla(
        old, new, torch.tensor([[advantage]]), torch.ones(1, 1)
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert {name: value.item() for name, value in metrics.items()} == {
        "actor/pg_clipfrac": clipped,
        "actor/ppo_kl": pytest.approx(-math.log(ratio), rel=1e-5),
        "actor/pg_clipfrac_lower": clipped_lower,
    }


def test_the_two_sides_may_be_clipped_differently():
    config = algos.PolicyLossConfig(clip_ratio_low=0.1, clip_ratio_high=0.3)
    old, new = torch.zeros(1, 2), torch.tensor([[0.5, 2.0]]).log()
    loss, _ = algos.compute_policy_loss_vanilla(
        old, new, torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2), "token-sum", config
    )
    assert loss.item() == pytest.approx(0.9 - 1.3)


def test_first_update_has_the_policy_gradient():
    old, _, advantages = policy_inputs()
    new = old.clone().requires_grad_()
    algos.compute_policy_loss_vanilla(old, new, advantages, MASK)[0].backward()
    torch.testing.assert_close(new.grad, -advantages * MASK / 9)


def test_log_ratio_is_bounded_so_that_nothing_overflows():
    loss, metrics = algos.compute_policy_loss_vanilla(
        torch.tensor([[-1000.0]]), torch.tensor([[0.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1)
    )
    assert loss.item() == 3.0 and metrics["actor/ppo_kl"].item() == -20


def test_log_probs_of_padding_reach_neither_loss_nor_gradient():
    old, new, advantages = policy_inputs()
    expected, expected_metrics = algos.compute_policy_loss_vanilla(old, new, advantages, MASK)
    old, new, advantages = (
        torch.where(MASK.bool(), x, y)
        for x, y in ((old, -math.inf), (new, math.nan), (advantages, math.nan))
    )
    new.requires_grad_()
    loss, metrics = algos.compute_policy_loss_vanilla(old, new, advantages, MASK)
    loss.backward()
    torch.testing.assert_close((loss.detach(), metrics), (expected, expected_metrics))
    assert new.grad.isfinite().all() and (new.grad[~MASK.bool()] == 0).all()


def test_rollout_weights_multiply_each_tokens_loss():
    old, new, advantages = torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, 2.0]])
    loss, _ = algos.compute_policy_loss_vanilla(
        old, new, advantages, torch.ones(1, 2), rollout_is_weights=torch.tensor([[3.0, 0.5]])
    )
    assert loss.item() == pytest.approx(-(3.0 + 1.0) / 2)


def test_metrics_carry_no_gradient():
    old, new, advantages = policy_inputs()
    _, metrics = algos.compute_policy_loss_vanilla(old, new.requires_grad_(), advantages, MASK)
    assert all(value.ndim == 0 and not value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("mode", algos.LOSS_AGG_MODES)
@pytest.mark.parametrize("cuts", [[5], [1, 4], [2, 1, 2], [1, 1, 1, 1, 1]])
def test_gradient_and_metrics_do_not_depend_on_the_micro_batch_split(mode, cuts):
    old, new, advantages = policy_inputs()
    config = algos.PolicyLossConfig(
        global_batch_info={"dp_size": 1, "loss_scale_factor": 4, **GLOBAL}
    )

    def summed(splits):
        leaf = new.clone().requires_grad_()
        total, metrics = 0.0, {}
        parts = zip(*(x.split(splits) for x in (old, leaf, advantages, MASK)), strict=True)
        for part in parts:
            loss, part_metrics = algos.compute_policy_loss_vanilla(*part, mode, config)
            loss.backward()
            total += loss.item()
            metrics = {key: metrics.get(key, 0) + value for key, value in part_metrics.items()}
        return total, leaf.grad, metrics

    whole_loss, whole_metrics = algos.compute_policy_loss_vanilla(old, new, advantages, MASK, mode)
    loss, gradient, metrics = summed(cuts)
    assert loss == pytest.approx(whole_loss.item(), rel=1e-5)
    torch.testing.assert_close(gradient, summed([5])[1], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(metrics, whole_metrics, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("mode", [mode for mode in algos.LOSS_AGG_MODES if mode != "token-sum"])
def test_average_over_ranks_equals_the_gradient_of_one_rank(mode):
    old, new, advantages = policy_inputs()
    config = algos.PolicyLossConfig(
        global_batch_info={"dp_size": 2, "loss_scale_factor": 4, **GLOBAL}
    )
    single = new.clone().requires_grad_()
    algos.compute_policy_loss_vanilla(old, single, advantages, MASK, mode)[0].backward()
    leaf = new.clone().requires_grad_()
    for rank in (slice(0, 2), slice(2, 5)):
        part = (x[rank] for x in (old, leaf, advantages, MASK))
        (algos.compute_policy_loss_vanilla(*part, mode, config)[0] / 2).backward()
    torch.testing.assert_close(leaf.grad, single.grad, rtol=1e-5, atol=1e-8)


def test_loss_config_reads_by_key_as_losses_written_for_verl_do():
    config = algos.PolicyLossConfig(clip_ratio=0.1, global_batch_info={"dp_size": 2})
    assert config["clip_ratio"] == config.clip_ratio == 0.1
    assert config.get("clip_ratio_c", 7.0) == 3.0 and config.get("nothing", 7.0) == 7.0
    with pytest.raises(AttributeError):
        config.clip_ratio = 0.3


def test_dual_clip_must_be_above_one():
    with pytest.raises(ValueError, match=r"clip_ratio_c=1.0 must be above 1"):
        algos.PolicyLossConfig(clip_ratio_c=1.0)


def test_older_forms_agree_with_the_vanilla_loss():
    inputs = (*policy_inputs(), MASK)
    settings = {
        "clip_ratio": 0.3,
        "clip_ratio_low": 0.1,
        "clip_ratio_high": 0.4,
        "clip_ratio_c": 1.5,
    }
    plain = SimpleNamespace(**settings, loss_agg_mode="seq-mean-token-mean", global_batch_info={})
    loss, metrics = algos.get_policy_loss_fn("vanilla")(*inputs, "seq-mean-token-mean", plain)
    assert algos.compute_policy_loss(*inputs, 0.3, 0.1, 0.4, 1.5, "seq-mean-token-mean") == (
        loss,
        *metrics.values(),
    )
    assert algos.compute_ppo_loss(*inputs, config=plain) == loss
    assert algos.compute_ppo_loss(*inputs) == algos.compute_policy_loss_vanilla(*inputs)[0]


def test_a_kind_of_kl_has_its_own_gradient_where_it_is_asked_for_forward():
    log_prob = torch.tensor([0.5, -0.2], requires_grad=True)
    reference = torch.tensor([0.1, 0.3])
    for kind in algos.KL_KINDS:
        forward = algos.kl_penalty_forward(log_prob, reference, f"{kind}+")
        assert torch.equal(forward, algos.kl_penalty(log_prob, reference, kind))
    (own,) = torch.autograd.grad(
        algos.kl_penalty_forward(log_prob, reference, "k1+").sum(), log_prob
    )
    assert own.tolist() == [1, 1]
    with pytest.raises(ValueError, match="kl_penalty='k9' is unknown"):
        algos.kl_penalty_forward(log_prob, reference, "k9")


def test_the_older_form_takes_an_actors_whole_omegaconf():
    """verl's own holds sections that the loss does not read, with keys that are not ours."""
    inputs = (*policy_inputs(), MASK)
    whole = OmegaConf.create(
        {
            "actor": {
                "clip_ratio": 0.1,
                "clip_ratio_high": "${.clip_ratio}",
                "policy_loss": {"_target_": "verl.PolicyLossConfig", "loss_mode": "vanilla"},
                "optim": {"lr": 1e-6, "min_lr_ratio": None},
                "rollout_correction": None,
                "use_torch_compile": True,
                "global_batch_info": {"batch_num_tokens": 7},
            }
        }
    )
    plain = SimpleNamespace(clip_ratio=0.1, global_batch_info={"batch_num_tokens": 7})
    expected = algos.compute_ppo_loss(*inputs, config=plain)
    assert algos.compute_ppo_loss(*inputs, config=whole.actor) == expected
    plain_mapping = OmegaConf.to_container(whole.actor, resolve=True)
    assert algos.compute_ppo_loss(*inputs, config=plain_mapping) == expected
    assert algos.compute_ppo_loss(*inputs) != expected


# Value and entropy


def test_value_loss_matches_numbers_worked_by_hand():
    # old 0, clip 0.5: prediction 2 is kept at 0.5. Returns 3: errors 1 and 6.25. Returns 0: errors
    # 4 and 0.25.
    loss, clipped = algos.compute_value_loss(
        torch.full((1, 3), 2.0),
        torch.tensor([[3.0, 0.0, 9.0]]),
        torch.zeros(1, 3),
        torch.tensor([[1, 1, 0]]),
        0.5,
    )
    assert loss.item() == pytest.approx(0.5 * (6.25 + 4) / 2)
    assert clipped.item() == 0.5


@pytest.mark.parametrize("mode", algos.LOSS_AGG_MODES)
def test_value_loss_does_not_depend_on_the_micro_batch_split(mode):
    returns, values, change = policy_inputs()
    counts = {**GLOBAL, "loss_scale_factor": 4}
    whole = values.add(change).requires_grad_()
    loss, clipped = algos.compute_value_loss(whole, returns, values, MASK, 0.5, mode, **counts)
    loss.backward()
    leaf = whole.detach().clone().requires_grad_()
    parts = zip(*(x.split([2, 3]) for x in (leaf, returns, values, MASK)), strict=True)
    losses = [algos.compute_value_loss(*part, 0.5, mode, **counts) for part in parts]
    sum(loss for loss, _ in losses).backward()
    torch.testing.assert_close(sum(clipped for _, clipped in losses), clipped)
    torch.testing.assert_close(leaf.grad, whole.grad, rtol=1e-5, atol=1e-8)


def test_value_loss_ignores_garbage_outside_the_mask():
    returns, values, change = policy_inputs()
    expected, _ = algos.compute_value_loss(values + change, returns, values, MASK, 0.5)
    predictions = torch.where(MASK.bool(), values + change, math.nan).requires_grad_()
    loss, _ = algos.compute_value_loss(predictions, returns, values, MASK, 0.5)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert predictions.grad.isfinite().all()


def test_entropy_loss_of_uniform_logits_is_the_log_of_the_vocabulary():
    logits = torch.zeros(2, 3, 8)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert algos.compute_entropy_loss(logits, mask).item() == pytest.approx(math.log(8))
    assert algos.compute_entropy_loss(logits, mask, batch_num_tokens=6).item() == pytest.approx(
        math.log(8) / 2
    )
    assert algos.compute_entropy_loss(logits, mask, "token-sum").item() == pytest.approx(
        3 * math.log(8)
    )


def test_a_fraction_of_tokens_is_detached_and_sums_over_micro_batches_to_the_mini_batchs():
    clipped = torch.tensor([[1.0, 0.0, 5.0], [1.0, 5.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    whole = algos.token_fraction(clipped, mask, {})
    assert whole.item() == pytest.approx(2 / 3) and not whole.requires_grad
    counts = algos.GlobalBatchInfo(dp_size=2, batch_num_tokens=3)
    parts = [
        algos.token_fraction(clipped[row : row + 1], mask[row : row + 1], counts).item()
        for row in (0, 1)
    ]
    assert parts == pytest.approx([1 / 3, 1 / 3])


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", sorted(algos.POLICY_LOSS_REGISTRY.keys() - {"clip_cov", "kl_cov"}))
def test_no_loss_depends_on_how_a_mini_batch_is_cut(name, weighed):
    """clip_cov and kl_cov do: they choose tokens of a micro-batch."""
    old, new, advantages = policy_inputs()
    correction = RolloutCorrectionConfig(
        loss_type="reinforce",
        rollout_is="token",
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.5_2.0",
    )
    config = algos.PolicyLossConfig(
        policy_loss=PolicyLossChoice(dro_beta=0.1),
        rollout_correction=correction,
        global_batch_info=GLOBAL,
    )
    weights = torch.rand(MASK.shape, generator=torch.Generator().manual_seed(0))
    gradients = []
    for parts in ([slice(0, 5)], [slice(0, 1), slice(1, 3), slice(3, 5)]):
        leaf = new.clone().requires_grad_()
        for rows in parts:
            loss, _ = algos.get_policy_loss_fn(name)(
                old[rows],
                leaf[rows],
                advantages[rows],
                MASK[rows],
                loss_agg_mode="token-mean",
                config=config,
                rollout_is_weights=weights[rows] if weighed else None,
            )
            loss.backward()
        gradients.append(leaf.grad)
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-8)


def loss_settings(**changed):
    correction = RolloutCorrectionConfig(
        loss_type="reinforce",
        rollout_is="token",
        rollout_rs="seq_mean_k1",
        rollout_rs_threshold="0.2_5.0",
    )
    choice = PolicyLossChoice(dro_beta=0.1, clip_cov_lb=0.0, clip_cov_ratio=0.2, kl_cov_ratio=0.2)
    return algos.PolicyLossConfig(policy_loss=choice, rollout_correction=correction, **changed)


@pytest.mark.parametrize("name", sorted(algos.POLICY_LOSS_REGISTRY))
def test_the_gradient_is_the_finite_difference_of_the_loss(name, monkeypatch):
    """In float64; what a loss detaches is held at its value, as it counts as a constant."""
    old, new, advantages = (x.double() for x in policy_inputs(1))
    detached, detach = [], torch.Tensor.detach

    def record(tensor):
        detached.append(detach(tensor))
        return detached[-1]

    def loss(log_prob):
        torch.manual_seed(0)
        value, _ = algos.get_policy_loss_fn(name)(
            old,
            log_prob,
            advantages,
            MASK,
            loss_agg_mode="token-mean",
            config=loss_settings(global_batch_info=GLOBAL),
        )
        return value

    leaf, step = new.clone().requires_grad_(), 1e-6
    monkeypatch.setattr(torch.Tensor, "detach", record)
    loss(leaf).backward()
    gradient = torch.zeros_like(new)
    for place in MASK.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            recorded = iter(detached)
            monkeypatch.setattr(
                torch.Tensor, "detach", lambda tensor, values=recorded: next(values)
            )
            moved = new.clone()
            moved[tuple(place)] += sign * step
            ends.append(float(loss(moved)))
        gradient[tuple(place)] = (ends[0] - ends[1]) / (2 * step)
    monkeypatch.undo()
    assert leaf.grad is not None and leaf.grad.any()
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-6, atol=1e-8)


def test_a_loss_of_several_ranks_needs_the_counts_of_all():
    old, new, advantages = policy_inputs()
    config = algos.PolicyLossConfig(global_batch_info={"dp_size": 2})
    with pytest.raises(ValueError, match="dp_size=2 needs batch_num_tokens"):
        algos.get_policy_loss_fn("vanilla")(old, new, advantages, MASK, "token-mean", config)


@pytest.mark.parametrize("name", sorted(algos.POLICY_LOSS_REGISTRY))
def test_a_formula_with_its_counts_is_the_loss_in_verls_form_inside_an_update(name):
    """An update hands counts to a formula; a loss in verl's form finds them around its call."""
    old, new, advantages = policy_inputs()
    counts = algos.GlobalBatchInfo(dp_size=2, loss_scale_factor=4, **GLOBAL)
    row_weights = torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0])
    config = loss_settings()
    formula = algos.policy_loss_formula(name)
    assert formula is not None
    inputs = algos.LossInputs(
        old_log_prob=old,
        log_prob=new,
        advantages=advantages,
        mask=MASK.bool(),
        loss_agg_mode="seq-mean-token-mean",
        config=config,
        importance_weights=None,
        rollout_log_prob=old,
        counts=counts,
        row_weights=row_weights,
    )
    torch.manual_seed(0)
    loss, metrics = formula(inputs)
    arguments = {
        "old_log_prob": old,
        "rollout_log_prob": old,
        "log_prob": new,
        "advantages": advantages,
        "response_mask": MASK,
        "loss_agg_mode": "seq-mean-token-mean",
        "config": config,
        "rollout_is_weights": None,
    }
    torch.manual_seed(0)
    by_name, metrics_by_name = algos.call_policy_loss(name, arguments, counts, row_weights)
    assert torch.equal(loss, by_name)
    assert metrics == metrics_by_name
    torch.manual_seed(0)
    without_counts, _ = algos.call_policy_loss(name, arguments)
    assert not torch.equal(loss, without_counts)
