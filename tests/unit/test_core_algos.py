"""Tests estimators, registries and KL: numbers worked by hand, and loops that read like papers."""

import logging
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data.warn_once import warn_once
from training import core_algos as algos
from training.batch.masked_ops import masked_whiten

pytestmark = pytest.mark.usefixtures("registries_as_they_were")

MASK = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0]])


def random_rows(seed=0, batch=3, length=6):
    """Draws rewards and values, (batch, length) each."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(batch, length, generator=generator)
    values = torch.randn(batch, length, generator=generator)
    return rewards, values


def outcome(scores, mask):
    """Puts each score on the last sampled token of its row."""
    rewards = torch.zeros(mask.shape)
    for row, score in enumerate(scores):
        positions = mask[row].nonzero()
        if len(positions):
            rewards[row, positions[-1]] = score
    return rewards


def loop_gae(rewards, values, mask, gamma, lam):
    """Loops over the sampled tokens only, as if the masked ones had been cut out."""
    advantages, returns = torch.zeros(mask.shape), torch.zeros(mask.shape)
    for row in range(len(mask)):
        next_value = next_advantage = 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            delta = rewards[row, t] + gamma * next_value - values[row, t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[row, t]
            advantages[row, t] = next_advantage
            returns[row, t] = next_advantage + values[row, t]
    return advantages, returns


# GAE and REINFORCE++


def test_gae_of_two_tokens_matches_numbers_worked_by_hand():
    # delta_1 = 1 - 0.4 = 0.6; delta_0 = 0 + 0.5 * 0.4 - 0.2 = 0; A_0 = 0 + 0.5 * 0.5 * 0.6 = 0.15
    advantages, returns = algos.compute_gae_advantage_return(
        torch.tensor([[0.0, 1.0]]),
        torch.tensor([[0.2, 0.4]]),
        torch.ones(1, 2),
        gamma=0.5,
        lam=0.5,
        whiten=False,
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.15, 0.6]]))
    torch.testing.assert_close(returns, torch.tensor([[0.35, 1.0]]))


def test_gae_carries_value_and_advantage_across_masked_tokens_worked_by_hand():
    # The same two tokens with an environment reply between them, whose value and reward must not
    # be seen.
    advantages, returns = algos.compute_gae_advantage_return(
        torch.tensor([[0.0, 9.0, 1.0]]),
        torch.tensor([[0.2, 7.0, 0.4]]),
        torch.tensor([[1, 0, 1]]),
        gamma=0.5,
        lam=0.5,
        whiten=False,
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.15, 0.0, 0.6]]))
    torch.testing.assert_close(returns, torch.tensor([[0.35, 0.0, 1.0]]))


def test_gae_equals_a_loop_over_sampled_tokens_only():
    rewards, values = random_rows()
    result = algos.compute_gae_advantage_return(rewards, values, MASK, 0.9, 0.8, whiten=False)
    torch.testing.assert_close(result, loop_gae(rewards, values, MASK, 0.9, 0.8))


@pytest.mark.parametrize("holes", [False, True])
def test_gae_rounds_as_a_loop_over_sampled_tokens_does(holes):
    rewards, values = random_rows(seed=1, batch=7, length=20)
    mask = torch.arange(20) < torch.arange(0, 21, 3)[:, None]
    mask &= torch.tensor([True, not holes, True, True]).repeat(5)
    ours = algos.compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8, whiten=False)
    assert all(map(torch.equal, ours, loop_gae(rewards, values, mask, 0.9, 0.8)))


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name.removeprefix("aten::").rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


def test_gae_takes_three_operations_a_step():
    rewards, values = random_rows(batch=2, length=500)
    with Operations() as seen:
        algos.compute_gae_advantage_return(rewards, values, torch.ones(2, 500), 0.9, 0.8)
    assert seen.calls["mul"] + seen.calls["add"] < 2 * 500 + 20 and seen.calls["where"] < 500 + 20


def test_turns_are_found_by_three_goes_over_the_tokens():
    rewards, values = random_rows()
    turn_ids = torch.where(MASK > 0, torch.arange(6) // 3, -1)
    with Operations() as seen:
        algos.compute_turn_gae_advantage_return(rewards, values, MASK, turn_ids)
    assert sum(calls for name, calls in seen.calls.items() if name.startswith("scatter")) == 3


def test_gae_advantages_are_whitened_and_returns_are_not():
    rewards, values = random_rows()
    plain, plain_returns = algos.compute_gae_advantage_return(
        rewards, values, MASK, 0.9, 0.8, whiten=False
    )
    advantages, returns = algos.compute_gae_advantage_return(rewards, values, MASK, 0.9, 0.8)
    valid = plain[MASK.bool()]
    torch.testing.assert_close(
        advantages[MASK.bool()], (valid - valid.mean()) / valid.std(), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(advantages[~MASK.bool()], torch.zeros(6 * 3 - int(MASK.sum())))
    torch.testing.assert_close(returns, plain_returns)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e9])
def test_gae_does_not_see_what_lies_outside_the_mask(garbage):
    rewards, values = random_rows()
    clean = algos.compute_gae_advantage_return(rewards, values, MASK, 0.9, 0.8)
    dirty_rewards, dirty_values = (torch.where(MASK.bool(), x, garbage) for x in (rewards, values))
    torch.testing.assert_close(
        algos.compute_gae_advantage_return(dirty_rewards, dirty_values, MASK, 0.9, 0.8), clean
    )


def test_gae_does_not_depend_on_row_order_or_padding():
    rewards, values = random_rows()
    advantages, _ = algos.compute_gae_advantage_return(rewards, values, MASK, 0.9, 0.8)
    order = torch.tensor([2, 0, 1])
    padded = [torch.nn.functional.pad(x[order], (2, 3)) for x in (rewards, values, MASK)]
    torch.testing.assert_close(
        algos.compute_gae_advantage_return(*padded, 0.9, 0.8)[0][:, 2:-3], advantages[order]
    )


def test_gae_of_a_fully_masked_batch_is_zero():
    rewards, values = random_rows()
    for result in algos.compute_gae_advantage_return(rewards, values, torch.zeros(3, 6), 0.9, 0.8):
        assert torch.equal(result, torch.zeros(3, 6))


def test_reinforce_plus_plus_return_is_discounted_per_sampled_token_and_crosses_masked_ones():
    returns = algos.discounted_returns(
        torch.tensor([[0.0, 0.0, 0.0, 8.0]]), torch.tensor([[1, 0, 1, 1]]), 0.5
    )
    torch.testing.assert_close(returns, torch.tensor([[2.0, 0.0, 4.0, 8.0]]))


def test_reinforce_plus_plus_equals_a_loop_and_is_whitened():
    rewards, _ = random_rows()
    expected = torch.zeros(3, 6)
    for row in range(3):
        running = 0.0
        for t in reversed(MASK[row].nonzero().flatten().tolist()):
            running = rewards[row, t] + 0.7 * running
            expected[row, t] = running
    advantages, returns = algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, MASK, config=SimpleNamespace(gamma=0.7)
    )
    torch.testing.assert_close(returns, expected)
    valid = expected[MASK.bool()]
    torch.testing.assert_close(
        advantages[MASK.bool()], (valid - valid.mean()) / valid.std(), rtol=1e-5, atol=1e-6
    )


def test_estimate_advantages_stops_at_episode_ends():
    # Two episodes in a row of steps: 1 step of reward 1, then 2 steps; gamma 0.5, lam 1, values 0.
    rewards, dones = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[1, 0, 1]])
    # By the older of its names, too.
    advantages, returns = algos.advantage_estimation(rewards, torch.zeros(1, 3), dones, 0.5, 1.0)
    torch.testing.assert_close(advantages, torch.tensor([[1.0, 4.0, 4.0]]))
    torch.testing.assert_close(returns, advantages)
    # With values [.5, .5, .5]: deltas .5, 2 + .25 - .5 = 1.75, 3.5; A_1 = 1.75 + 0.5 * 3.5
    advantages, returns = algos.estimate_advantages(
        rewards, torch.full((1, 3), 0.5), dones, 0.5, 1.0
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.5, 3.5, 3.5]]))
    torch.testing.assert_close(returns, torch.tensor([[1.0, 4.0, 4.0]]))


# Group estimators

GROUPS = np.array(["b", "a", "b", "a", "b", "alone"], dtype=object)
SCORES = [1.0, 0.0, 0.0, 2.0, 5.0, 3.0]
GROUP_MASK = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 0, 0], [0, 1, 0], [1, 1, 0]])
GROUP_ESTIMATORS = [algos.compute_grpo_outcome_advantage, algos.compute_rloo_outcome_advantage]


def loop_group_advantages(kind, scores, groups):
    result = []
    for i, group in enumerate(groups):
        members = [scores[j] for j in range(len(scores)) if groups[j] == group]
        others = [scores[j] for j in range(len(scores)) if groups[j] == group and j != i]
        if len(members) == 1:
            result.append(scores[i])
        elif kind == "rloo":
            result.append(scores[i] - sum(others) / len(others))
        else:
            spread = np.std(members, ddof=1) + 1e-6 if kind == "grpo" else 1.0
            result.append((scores[i] - np.mean(members)) / spread)
    return torch.tensor(result, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_group_estimators_equal_a_loop_over_groups(kind):
    rewards = outcome(SCORES, GROUP_MASK)
    if kind == "rloo":
        advantages, returns = algos.compute_rloo_outcome_advantage(rewards, GROUP_MASK, GROUPS)
    else:
        advantages, returns = algos.compute_grpo_outcome_advantage(
            rewards, GROUP_MASK, GROUPS, norm_adv_by_std_in_grpo=kind == "grpo"
        )
    expected = loop_group_advantages(kind, SCORES, GROUPS)[:, None] * GROUP_MASK
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected)


def test_grpo_of_scores_0_and_2_is_minus_and_plus_one_over_root_two():
    mask = torch.ones(2, 1)
    advantages, _ = algos.compute_grpo_outcome_advantage(
        torch.tensor([[0.0], [2.0]]), mask, np.array([7, 7])
    )
    torch.testing.assert_close(advantages, torch.tensor([[-0.70711], [0.70711]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_row_without_sampled_tokens_leaves_its_groups_statistics_and_gets_zero(estimator):
    rewards = outcome(SCORES, GROUP_MASK)
    advantages, _ = estimator(rewards, GROUP_MASK, GROUPS)
    with_failed = torch.cat([rewards, torch.full((1, 3), 100.0)])
    mask = torch.cat([GROUP_MASK, torch.zeros(1, 3, dtype=torch.int64)])
    result, _ = estimator(with_failed, mask, np.append(GROUPS, "b"))
    torch.testing.assert_close(result[:-1], advantages)
    assert torch.equal(result[-1], torch.zeros(3))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_batch_without_any_sampled_token_gives_zeros(estimator):
    advantages, _ = estimator(torch.full((6, 3), float("nan")), torch.zeros(6, 3), GROUPS)
    assert torch.equal(advantages, torch.zeros(6, 3))


def test_a_group_of_equal_scores_has_no_advantage_despite_rounding():
    scores = torch.full((7, 1), 0.1)
    advantages, _ = algos.compute_grpo_outcome_advantage(
        scores, torch.ones(7, 1), np.zeros(7, dtype=object)
    )
    assert advantages.abs().max() < 1e-6


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_group_advantages_do_not_depend_on_row_order_or_padding(estimator):
    rewards = outcome(SCORES, GROUP_MASK)
    advantages, _ = estimator(rewards, GROUP_MASK, GROUPS)
    order = [4, 2, 5, 0, 1, 3]
    rewards, mask = (torch.nn.functional.pad(x[order], (1, 4)) for x in (rewards, GROUP_MASK))
    torch.testing.assert_close(
        estimator(rewards, mask, GROUPS[order])[0][:, 1:-4], advantages[order]
    )


def test_index_may_mix_uids_with_numbers_and_must_name_every_row():
    rewards, mask = torch.tensor([[1.0], [3.0], [5.0]]), torch.ones(3, 1)
    advantages, _ = algos.compute_rloo_outcome_advantage(
        rewards, mask, np.array([1, 1, "dummy"], dtype=object)
    )
    torch.testing.assert_close(advantages, torch.tensor([[-2.0], [2.0], [5.0]]))
    with pytest.raises((RuntimeError, IndexError)):
        algos.compute_rloo_outcome_advantage(rewards, mask, np.array(["a", "a"]))


def test_a_group_of_one_is_logged_once(caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            algos.compute_rloo_outcome_advantage(outcome(SCORES, GROUP_MASK), GROUP_MASK, GROUPS)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "some groups have a single sample"
    ]


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_the_last_member_of_a_masked_group_has_nothing_to_be_compared_with(estimator):
    mask = torch.tensor([[1, 1], [0, 0], [0, 0], [1, 0], [1, 1]])
    index = np.array(["masked", "masked", "masked", "whole", "whole"])
    advantages, _ = estimator(outcome([110.0, 0.0, 0.0, 1.0, 0.0], mask), mask, index)
    assert advantages[0].tolist() == [0, 0]
    assert advantages[3, 0] > 0 > advantages[4, 0]


def test_estimators_do_not_write_into_their_arguments():
    rewards, values = random_rows()
    before = rewards.clone(), values.clone()
    algos.compute_gae_advantage_return(rewards, values, MASK, 0.9, 0.8)
    algos.compute_grpo_outcome_advantage(rewards, MASK, np.array(["a", "a", "b"]))
    assert torch.equal(rewards, before[0]) and torch.equal(values, before[1])


# Registries


def test_every_listed_estimator_is_registered_and_nothing_else():
    ours = {
        name
        for name, fn in algos.ADV_ESTIMATOR_REGISTRY.items()
        if fn.__module__.startswith(algos.__name__)
    }
    assert {str(name) for name in algos.AdvantageEstimator} == ours
    assert algos.get_adv_estimator_fn(algos.AdvantageEstimator.GAE) is algos.get_adv_estimator_fn(
        "gae"
    )
    assert (
        algos.get_adv_estimator_fn("grpo_vectorized")
        is algos.compute_grpo_vectorized_outcome_advantage
    )


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(
        ValueError,
        match=r"adv_estimator='grop' is unknown; allowed: .*gae,.*grpo,.*Did you mean 'grpo'\?",
    ):
        algos.get_adv_estimator_fn("grop")
    with pytest.raises(
        ValueError, match=r"loss_mode='vanila' is unknown; allowed: .*Did you mean 'vanilla'\?"
    ):
        algos.get_policy_loss_fn("vanila")


def test_a_name_belongs_to_one_function():
    def mine(token_level_rewards, response_mask):
        return token_level_rewards, token_level_rewards

    assert algos.register_adv_est("mine")(mine) is mine
    algos.register_adv_est("mine")(mine)
    with pytest.raises(
        ValueError, match=r"'mine' is already registered by .*mine; register .*another name"
    ):
        algos.register_adv_est("mine")(lambda **kwargs: None)
    with pytest.raises(ValueError, match="policy loss 'vanilla' is already registered"):
        algos.register_policy_loss("vanilla")(mine)


def test_the_flag_says_which_estimators_whiten_over_the_batch_and_can_be_told_not_to():
    rewards, values = random_rows()
    index = np.array(["a", "a", "b"])
    offered = {
        "token_level_rewards": rewards,
        "response_mask": MASK,
        "values": values,
        "index": index,
        "turn_ids": torch.where(MASK > 0, 0, -1),
    }
    flagged = [name for name in algos.AdvantageEstimator if algos.estimator_whitens_batch(name)]
    assert sorted(flagged) == [
        "gae",
        "gdpo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "turn_gae",
    ]
    for name in flagged:
        whitened, _ = algos.call_adv_estimator(name, **offered)
        raw, _ = algos.call_adv_estimator(name, **offered, whiten=False)
        assert whitened[MASK.bool()].mean().abs() < 1e-6
        torch.testing.assert_close(masked_whiten(raw, MASK), whitened)


@pytest.mark.parametrize(
    ("says", "shown"),
    [
        ({"span": "episode"}, "span='episode': allowed are scores, episodes, groups, batch"),
        ({"compares": "all"}, "compares='all': allowed are group, turns, states, or None"),
        ({"needs": ("value",)}, r"needs=\('value',\) of mine: allowed are values, index, "),
    ],
)
def test_an_estimator_that_says_of_itself_what_nobody_reads_is_refused(says, shown) -> None:
    with pytest.raises(ValueError, match=shown):
        algos.register_adv_est("mine", **says)


def test_an_estimator_of_parts_of_a_batch_declares_that_it_whitens():
    def whitening(token_level_rewards, response_mask, whiten=True):
        return token_level_rewards, token_level_rewards

    def plain(token_level_rewards, response_mask):
        return token_level_rewards, token_level_rewards

    with pytest.raises(ValueError, match="'mine' has a parameter whiten: register it with"):
        algos.register_adv_est("mine", span="episodes")(whitening)
    with pytest.raises(ValueError, match="'mine' is registered with whitens_batch=True and has no"):
        algos.register_adv_est("mine", span="episodes", whitens_batch=True)(plain)
    assert "mine" not in algos.ADV_ESTIMATOR_REGISTRY
    # As written for verl, which calls it on whole batches alone.
    algos.register_adv_est("of_verl")(whitening)
    assert algos.estimator_span("of_verl") == "batch"
    assert not algos.estimator_whitens_batch("of_verl")


def test_needs_are_declared_or_read_from_the_signature():
    def verl_style(
        token_level_rewards, response_mask, index=None, old_log_probs=None, config=None, **kwargs
    ):
        return token_level_rewards, token_level_rewards

    algos.register_adv_est("undeclared")(verl_style)
    algos.register_adv_est("declared", needs=("values",))(verl_style)
    assert algos.estimator_needs("undeclared") == ("index", "old_log_probs")
    assert algos.estimator_needs("declared") == ("values",)
    assert algos.estimator_needs("gae") == ("values",)
    assert algos.estimator_needs("rloo") == ("index",)
    assert algos.estimator_needs("reinforce_plus_plus") == ()


def test_calling_by_name_hands_over_what_the_signature_takes():
    seen = {}

    @algos.register_adv_est("greedy")
    def greedy(token_level_rewards, response_mask, **kwargs):
        seen.update(kwargs)
        return token_level_rewards, token_level_rewards

    rewards, values = random_rows()
    offered = {
        "token_level_rewards": rewards,
        "response_mask": MASK,
        "values": values,
        "gamma": 0.9,
        "lam": 0.8,
    }
    torch.testing.assert_close(
        algos.call_adv_estimator("gae", **offered, index=GROUPS),
        algos.compute_gae_advantage_return(rewards, values, MASK, 0.9, 0.8),
    )
    algos.call_adv_estimator("greedy", **offered)
    assert set(seen) == {"values", "gamma", "lam"}
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'index'"):
        algos.call_adv_estimator("grpo", **offered)


# KL


def test_kl_kinds_match_numbers_worked_by_hand():
    # Log-ratios of 1 and -0.5.
    log_prob, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5])
    expected = {
        "kl": [1.0, -0.5],
        "abs": [1.0, 0.5],
        "mse": [0.5, 0.125],
        "low_var_kl": [0.3678794 + 1 - 1, 1.6487213 - 0.5 - 1],
    }
    for kind, alias in (("kl", "k1"), ("abs", "abs"), ("mse", "k2"), ("low_var_kl", "k3")):
        for name in (kind, alias, f"{kind}+", f"{alias}+"):
            torch.testing.assert_close(
                algos.kl_penalty(log_prob, ref, name), torch.tensor(expected[kind])
            )


@pytest.mark.parametrize("kind", ["kl+", "abs+", "k2+", "low_var_kl+"])
def test_straight_through_kl_has_the_gradient_of_k2(kind):
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    algos.kl_penalty(log_prob, torch.tensor([-2.0, -1.5]), kind).sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([1.0, -0.5]))


def test_low_variance_kl_is_bounded():
    far = torch.tensor([1000.0, -1000.0])
    torch.testing.assert_close(
        algos.kl_penalty(far, torch.zeros(2), "k3"), torch.tensor([10.0, 10.0])
    )


def test_unknown_kl_kind_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"kl_penalty='low_var_k' is unknown.*Did you mean 'low_var_kl'"
    ):
        algos.kl_penalty(torch.zeros(1), torch.zeros(1), "low_var_k")


def test_rewards_lose_the_kl_times_its_coefficient():
    scores = torch.tensor([[0.0, 1.0]])
    old = torch.tensor([[-1.0, -2.0]])
    ref = torch.tensor([[-2.0, -1.0]])
    torch.testing.assert_close(
        algos.compute_rewards(scores, old, ref, 0.1), torch.tensor([[-0.1, 1.1]])
    )
    torch.testing.assert_close(algos.compute_kl_penalty(old, ref), torch.tensor([[1.0, -1.0]]))


def test_adaptive_kl_coefficient_moves_towards_the_target_by_at_most_a_fifth_per_horizon():
    controller = algos.get_kl_controller(
        SimpleNamespace(type="adaptive", kl_coef=1.0, target_kl=0.1, horizon=100)
    )
    # An error of 0.1 over half a horizon.
    controller.update(current_kl=0.11, n_steps=50)
    assert controller.value == pytest.approx(1.05)
    controller.update(current_kl=100.0, n_steps=100)
    assert controller.value == pytest.approx(1.05 * 1.2)
    controller.update(current_kl=0.0, n_steps=100)
    assert controller.value == pytest.approx(1.05 * 1.2 * 0.8)


def test_a_fixed_kl_coefficient_stays():
    fixed = algos.get_kl_controller(
        SimpleNamespace(type="fixed", kl_coef=0.3, target_kl=0.1, horizon=100)
    )
    fixed.update(current_kl=5.0, n_steps=100)
    assert fixed.value == 0.3
