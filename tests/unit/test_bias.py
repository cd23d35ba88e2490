"""The bias table: zero where theory says so, for groups at once and one by one."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace

import pytest
import torch

from scripts import bias_branches as branches
from scripts import bias_mdp as mdp
from scripts import bias_table as bias
from training import core_algos
from training.config.schema.algorithm import RolloutCorrectionConfig

SMALL = mdp.Groups.every(mdp.policies_after(0).sampler, size=2)
UNBIASED = ("rloo", "remax", "rae", "turn_return", "turn_gae unwhitened")
# They weigh a token's gradient with its ratio, which is 1, or with nothing.
PLAIN_LOSSES = ("vanilla", "gpg", "reinforce", "cispo", "dppo_tv", "dppo_kl", "dro", "bypass_mode")


def case(stale: int = 0, correction: str = "old", groups: mdp.Groups = SMALL) -> bias.Case:
    return bias.Case(groups, mdp.policies_after(stale), correction)


def bias_of(estimator: str, loss: str, mode: str, chosen: bias.Case) -> tuple[float, float]:
    true = bias.true_gradient(estimator, chosen.policies)
    return bias.compare(bias.expected_gradient(estimator, loss, mode, chosen), true)


def test_episodes_and_groups_are_all_of_them() -> None:
    policies = mdp.policies_after(2)
    assert len(mdp.EPISODES) == 15 and float(SMALL.probabilities.sum()) == pytest.approx(
        1, abs=1e-12
    )
    for logits in (policies.sampler, policies.updated, policies.teacher):
        assert float(mdp.WORLD.probabilities(logits).sum()) == pytest.approx(1, abs=1e-12)


def test_the_true_gradient_is_the_finite_difference_of_the_expected_reward() -> None:
    logits, step = mdp.policies_after(0).sampler, 1e-6
    gradient, rewards = mdp.WORLD.expected(logits), mdp.WORLD.rewards.sum(-1)
    for place in itertools.product(range(6), range(2)):
        ends = []
        for sign in (1, -1):
            moved = logits.clone()
            moved[place] += sign * step
            ends.append(float((mdp.WORLD.probabilities(moved) * rewards).sum()))
        assert float(gradient[place]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("estimator", UNBIASED)
@pytest.mark.parametrize("loss", PLAIN_LOSSES)
def test_what_is_unbiased_is_the_policy_gradient_exactly(estimator: str, loss: str) -> None:
    cosine, ratio = bias_of(estimator, loss, "seq-mean-token-sum", case())
    assert (cosine, ratio) == pytest.approx((1.0, 1.0), abs=1e-8)


# Their rows are counted in hundreds of thousands.
MANY = {name for name in branches.UNBIASED_WAYS if "2 continuations" in name}
MANY |= {name for name in branches.BIASED_WAYS if "2 continuations" in name}


@pytest.mark.parametrize("name", sorted(branches.UNBIASED_WAYS.keys() - MANY))
def test_branches_give_the_policy_gradient_exactly(name: str) -> None:
    found = bias.branch_comparison(branches.UNBIASED_WAYS[name])
    assert found == pytest.approx((1.0, 1.0), abs=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(branches.UNBIASED_WAYS.keys() & MANY))
def test_branches_of_several_continuations_give_the_policy_gradient_exactly(name: str) -> None:
    found = bias.branch_comparison(branches.UNBIASED_WAYS[name])
    assert found == pytest.approx((1.0, 1.0), abs=1e-8)


def test_the_own_return_among_the_continuations_halves_the_gradient() -> None:
    found = bias.branch_comparison(branches.BIASED_WAYS["vine, 1 continuation and the own return"])
    assert found == pytest.approx((1.0, 0.5), abs=1e-8)


@pytest.mark.parametrize(
    "name", sorted(name for name in branches.BIASED_WAYS.keys() - MANY if "own" not in name)
)
def test_what_the_literature_leaves_out_turns_the_gradient(name: str) -> None:
    assert bias.branch_comparison(branches.BIASED_WAYS[name]).cosine < 0.99


def test_branches_are_sampled_as_often_as_the_policy_does() -> None:
    """A row's number is its chance; with branches trained on, tokens are met more than once."""
    for make in (branches.vine, branches.redraw, lambda: branches.drawn_turn(weighted=True)):
        groups = make()
        assert float(groups.probabilities.sum()) == pytest.approx(1, abs=1e-12)
        met = torch.zeros(len(mdp.EPISODES), dtype=torch.float64)
        met.index_add_(0, groups.rows, groups.probabilities)
        torch.testing.assert_close(met, torch.tensor(branches.chances(), dtype=torch.float64))
    tree = branches.tree(weighted=True)
    whole = tree.trained[:, 0]
    assert float(tree.probabilities[whole].sum()) == pytest.approx(1, abs=1e-12)
    several_turns = sum(
        chance
        for episode, chance in zip(mdp.EPISODES, branches.chances(), strict=True)
        if len(episode.rewards) > 1
    )
    assert float(tree.probabilities[~whole].sum()) == pytest.approx(several_turns, abs=1e-12)


def test_a_redraw_is_another_draw_of_one_turn_alone() -> None:
    """Of equal seeds the return is the episode's own; of other ones that of a fresh continuation.

    So the mean return of a redraw of turn 0 is the value of the game.
    """
    groups = branches.redraw()
    first = torch.tensor([lists[0][0] for lists in groups.branch_returns], dtype=torch.float64)
    expected = sum(value * chance for value, chance in branches.continuations((), 0).items())
    assert float((first * groups.probabilities).sum()) == pytest.approx(expected, abs=1e-12)


def test_a_mean_that_includes_the_episode_itself_shrinks_an_outcome_evenly_and_turns_unevenly() -> (
    None
):
    outcome = bias_of("grpo no_std", "vanilla", "seq-mean-token-sum", case())
    assert outcome == pytest.approx((1.0, 1 / 2), abs=1e-8)
    cosine, _ = bias_of("turn_return with itself", "vanilla", "seq-mean-token-sum", case())
    assert cosine < 1 - 1e-4


@pytest.mark.parametrize("stale", [1, 2])
def test_whole_sequences_weights_make_old_samples_unbiased(
    stale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    untruncated = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold="1e6")
    monkeypatch.setitem(bias.CORRECTIONS, "untruncated", untruncated)
    for estimator, loss in itertools.product(
        ("rloo", "remax", "rae"), ("gpg", "vanilla", "bypass_mode")
    ):
        found = bias_of(estimator, loss, "seq-mean-token-sum", case(stale, "untruncated"))
        assert found == pytest.approx((1.0, 1.0), abs=1e-8)
    # Tokens' own weights leave out what came before.
    monkeypatch.setitem(bias.CORRECTIONS, "untruncated", replace(untruncated, rollout_is="token"))
    assert bias_of("rloo", "gpg", "seq-mean-token-sum", case(stale, "untruncated"))[0] < 1 - 1e-4


def test_a_mean_over_tokens_favours_short_episodes() -> None:
    assert bias_of("rloo", "vanilla", "token-mean", case())[0] < 1 - 1e-4
    assert bias_of("rloo", "vanilla", "seq-mean-token-mean", case())[0] < 1 - 1e-4


@pytest.mark.parametrize("correction", ["old", "token band", "sequence rejection"])
@pytest.mark.parametrize(
    ("estimator", "loss", "mode"),
    [
        ("grpo", "vanilla", "token-mean"),
        ("gigpo no_std", "gspo", "seq-mean-token-mean"),
        ("optimal_token_baseline", "sapo", "token-mean"),
        ("gpg", "geo_mean", "seq-mean-token-sum"),
        ("reinforce_plus_plus", "cispo", "seq-mean-token-sum"),
        ("rloo", "bypass_mode", "token-mean"),
        ("rloo", "kl_cov", "seq-mean-token-sum-norm"),
    ],
)
def test_all_groups_at_once_are_each_group_by_itself(
    estimator: str, loss: str, mode: str, correction: str
) -> None:
    some = SMALL.only(list(range(0, 120, 7)))
    chosen = case(2, correction, some)
    batch = chosen.tensors()
    expected = torch.zeros(6, 2, dtype=torch.float64)
    config = bias.loss_config(chosen.settings)
    for number, chance in enumerate(some.probabilities):
        one = {name: tensor[2 * number : 2 * number + 2] for name, tensor in batch.items()}
        alone = some.only([number])
        advantages = bias.advantages_of(estimator, one, alone)
        leaf = chosen.policies.updated.clone().requires_grad_()
        new = mdp.WORLD.log_probs(leaf)[alone.rows]
        bypass = loss == "bypass_mode"
        value, _ = core_algos.get_policy_loss_fn(loss)(
            one["rollout_log_probs" if bypass else "old_log_probs"],
            new,
            advantages,
            mdp.WORLD.mask[alone.rows] if bypass else one["response_mask"],
            mode,
            config,
            None if bypass else one.get("rollout_is_weights"),
        )
        expected -= chance * torch.autograd.grad(value, leaf)[0]
    torch.testing.assert_close(
        bias.expected_gradient(estimator, loss, mode, chosen), expected, rtol=1e-9, atol=1e-12
    )


@pytest.mark.seconds
@pytest.mark.parametrize(
    "key", [("grpo", "vanilla", "old"), ("turn_return", "gpg", "token"), ("gae", "gspo", "none")]
)
def test_the_table_holds_what_is_computed(key: tuple[str, str, str]) -> None:
    with bias.TABLE.open() as file:
        (row,) = [
            row
            for row in csv.DictReader(file)
            if (row["estimator"], row["loss"], row["correction"]) == key
        ]
    for stale, mode in ((0, "token-mean"), (2, "seq-mean-token-sum")):
        cosine, ratio = bias_of(*key[:2], mode, case(stale, key[2], mdp.GROUPS))
        assert row[f"{mode}/{stale}"] == f"{cosine:.3f} {ratio:.2f}"


@pytest.mark.seconds
def test_the_table_holds_what_is_computed_of_branches() -> None:
    with bias.TABLE.open() as file:
        (row,) = [
            row
            for row in csv.DictReader(file)
            if (row["estimator"], row["loss"], row["correction"])
            == ("vine_redraw", "vanilla", "token")
        ]
    for stale, mode in ((0, "token-mean"), (2, "seq-mean-token-sum")):
        chosen = case(stale, "token", branches.BRANCHED["vine_redraw"]())
        cosine, ratio = bias_of("vine_redraw", "vanilla", mode, chosen)
        assert row[f"{mode}/{stale}"] == f"{cosine:.3f} {ratio:.2f}"
