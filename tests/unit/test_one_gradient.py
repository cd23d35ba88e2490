"""However episodes are cut into rows, an update has the gradient of their uncut trees.

The trees and their cuts are tests/uncut_trees.py; the gradient by hand, in plain autograd over each
token's path, is tests/uncut_gradients.py; the core's update is tests/cut_updates.py. All that can
depend on rows is tried: estimators, aggregation, losses, layouts, KL, entropy, corrections. What
cannot keep the gradient is refused with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cut_and_uncut import CLOSE, ByHand, by_hand, distance
from tests.cut_updates import LAYOUTS, SPLITS, config_of, make_models, update
from tests.uncut_gradients import ESTIMATORS, LOSSES, flat, gradient, one_number
from tests.uncut_trees import RESPONSE_WIDTH, batch_of, draw_episodes, fewest_rows, row_a_turn
from training.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    LOSS_AGG_MODES,
    POLICY_LOSS_REGISTRY,
    register_policy_loss,
)
from training.core_algos.built_in import (
    BUILT_IN_ESTIMATORS,
    ESTIMATORS_THAT_READ_ROWS,
    LOSSES_THAT_READ_ROWS,
    estimator_needs,
)

WITH_VALUES = ("gae", "turn_gae")


def numbered(names: Any) -> Iterator[tuple[int, str]]:
    yield from enumerate(sorted(names))


def test_every_estimator_and_loss_is_tried_or_refused() -> None:
    refused = ESTIMATORS_THAT_READ_ROWS.keys()
    # They compare turns with continuations, so that their trees have branches too.
    of_branches = {
        name for name in BUILT_IN_ESTIMATORS if "branch_returns" in estimator_needs(name)
    }
    assert ESTIMATORS.keys() | refused | of_branches == BUILT_IN_ESTIMATORS
    assert not ESTIMATORS.keys() & refused
    assert ADV_ESTIMATOR_REGISTRY.keys() >= BUILT_IN_ESTIMATORS
    by_themselves = {"gspo", "bypass_mode"}
    built_in = {
        name
        for name, loss in POLICY_LOSS_REGISTRY.items()
        if loss.__module__.startswith("training.core_algos")
    }
    assert built_in == LOSSES.keys() | LOSSES_THAT_READ_ROWS.keys() | by_themselves


def test_the_trees_have_forks_helpers_and_rows_that_share_beginnings() -> None:
    conversations = forks = 0
    for episode in by_hand().episodes:
        parents = [turn.parent for turn in episode.turns]
        conversations += parents.count(-1) - 1
        behind = [parent for parent in parents if parent >= 0]
        forks += len(behind) - len(set(behind))
    assert conversations >= 2 and forks >= 2
    rows = {len(cut) for cut in by_hand().random_cut(0)}
    assert len(rows) > 1 and max(rows) > 2


@pytest.mark.seconds
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize(("number", "estimator"), list(numbered(ESTIMATORS)))
def test_the_policys_gradient_is_that_of_the_uncut_tree(
    number: int, estimator: str, mode: str
) -> None:
    hand = by_hand()
    case = number * len(LOSS_AGG_MODES) + LOSS_AGG_MODES.index(mode)
    layout = sorted(LAYOUTS)[case % len(LAYOUTS)]
    config = config_of(estimator, actor={"loss_agg_mode": mode}, split=sorted(SPLITS)[case % 3])
    got = hand.cut(hand.random_cut(case), config, seed=case, layout=layout)
    assert distance(got.actor[0], hand.actor(estimator, mode)) <= CLOSE


@pytest.mark.seconds
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("estimator", WITH_VALUES)
def test_the_critics_gradient_is_that_of_the_uncut_tree(estimator: str, mode: str) -> None:
    hand = by_hand()
    case = LOSS_AGG_MODES.index(mode)
    config = config_of(estimator, critic={"loss_agg_mode": mode}, split=sorted(SPLITS)[case % 4])
    got = hand.cut(hand.random_cut(case), config, layout=sorted(LAYOUTS)[case % 4])
    assert distance(got.critic[0], hand.critic(estimator, mode)) <= CLOSE


@pytest.mark.seconds
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_neither_cut_nor_layout_nor_micro_batches_change_it(layout: str, split: str) -> None:
    hand = by_hand()
    mode = "seq-mean-token-mean"
    settings = {"loss_agg_mode": mode}
    config = config_of("gae", actor=settings, critic=settings, split=split)
    for cuts in (
        [fewest_rows(episode) for episode in hand.episodes],
        [row_a_turn(episode) for episode in hand.episodes],
    ):
        got = hand.cut(cuts, config, layout=layout)
        assert distance(got.actor[0], hand.actor("gae", mode)) <= CLOSE
        assert distance(got.critic[0], hand.critic("gae", mode)) <= CLOSE


@pytest.mark.seconds
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_policy_loss_that_can(loss: str, mode: str) -> None:
    hand = by_hand()
    own = {"loss_mode": loss} | ({"dro_beta": 0.5} if loss == "dro" else {})
    config = with_loss(config_of("rloo", actor={"loss_agg_mode": mode}), **own)
    got = hand.cut(hand.random_cut(7), config)
    # Its paper's aggregation, whatever is set.
    by_hand_mode = "seq-mean-token-mean" if loss == "sapo" else mode
    assert distance(got.actor[0], hand.actor("rloo", by_hand_mode, loss)) <= CLOSE


def with_loss(config: Any, **settings: Any) -> Any:
    policy = config.actor_rollout_ref
    loss = replace(policy.actor.policy_loss, **settings)
    actor = replace(policy.actor, policy_loss=loss)
    return replace(config, actor_rollout_ref=replace(policy, actor=actor))


@pytest.mark.seconds
@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_the_single_update_of_a_step_takes_its_own_log_probs(loss: str) -> None:
    """gspo's ratio is then 1, in rows of any length."""
    hand = by_hand()
    config = with_loss(config_of(actor={"loss_agg_mode": "token-mean"}), loss_mode=loss)
    got = hand.cut(hand.random_cut(1), config, on_policy=True)
    assert distance(got.actor[0], hand.actor("grpo", "token-mean", on_policy=True)) <= CLOSE


@pytest.mark.seconds
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_entropy_bonus_and_kl_loss_count_an_episode_once(mode: str) -> None:
    hand = by_hand()
    settings = {
        "loss_agg_mode": mode,
        "entropy_coeff": 0.3,
        "use_kl_loss": True,
        "kl_loss_coef": 0.5,
        "kl_loss_type": "k2",
    }
    got = hand.cut(hand.random_cut(2), config_of(actor=settings))
    lines = hand.lines()
    kl = 0.5 * (hand.new.log_probs - hand.ref) ** 2
    further = 0.5 * kl - 0.3 * hand.new.entropies
    loss = hand.loss("grpo", mode) + one_number(further, lines, mode, hand.all, RESPONSE_WIDTH)
    assert distance(got.actor[0], gradient(loss, hand.plain.policy)) <= CLOSE


@pytest.mark.seconds
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_kl_in_the_reward_and_its_controller_count_an_episode_once(estimator: str) -> None:
    hand = by_hand()
    adaptive = {"type": "adaptive", "kl_coef": 0.2, "target_kl": 0.05, "horizon": 100}
    config = config_of(estimator, algorithm={"use_kl_in_reward": True, "kl_ctrl": adaptive})
    got = hand.cut(hand.random_cut(3), config)
    lines = hand.lines()
    for line in lines:
        line.rewards = line.rewards - 0.2 * (line.old - line.ref)
    advantages = flat(ESTIMATORS[estimator](lines), 0)
    per_token = LOSSES["vanilla"](hand.tokens(advantages))
    loss = one_number(per_token, lines, "token-mean", hand.all, RESPONSE_WIDTH)
    assert distance(got.actor[0], gradient(loss, hand.plain.policy)) <= CLOSE
    mean = float(np.mean([np.mean(line.old - line.ref) for line in lines]))
    error = min(max(mean / 0.05 - 1, -0.2), 0.2)
    assert got.metrics["actor/reward_kl_penalty"] == pytest.approx(mean, rel=1e-4)
    assert got.kl_coefficient == pytest.approx(0.2 * (1 + error * len(lines) / 100), rel=1e-6)


# Corrections


def ratios(hand: ByHand) -> Tensor:
    return (hand.old.log_probs - hand.engine).exp()


def over_episodes(hand: ByHand, per_token: Tensor, mean: bool = False) -> Tensor:
    """Each token gets its episode's sum, or mean."""
    spread = torch.zeros_like(per_token)
    for line in hand.lines():
        total = per_token[line.places]
        spread[line.places] = total.mean() if mean else total.sum()
    return spread


@pytest.mark.seconds
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("rollout_is", ["token", "sequence"])
def test_importance_weights_are_those_of_whole_episodes(rollout_is: str, normalised: bool) -> None:
    hand = by_hand()
    correction = {
        "rollout_is": rollout_is,
        "rollout_is_threshold": "1.5",
        "rollout_is_batch_normalize": normalised,
    }
    config = config_of("rloo", algorithm={"rollout_correction": correction})
    got = hand.cut(hand.random_cut(4), config)
    weights = ratios(hand)
    if rollout_is == "sequence":
        weights = over_episodes(hand, weights.log()).exp()
    weights = weights.clamp(max=1.5)
    if normalised:
        mean = weights.mean()
        if rollout_is == "sequence":
            mean = torch.stack([weights[line.places][0] for line in hand.lines()]).mean()
        weights = weights / mean
    expected = hand.actor("rloo", "token-mean", weights=weights)
    assert distance(got.actor[0], expected) <= CLOSE


@pytest.mark.seconds
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("rollout_rs", ["token_k1", "seq_mean_k1"])
def test_what_is_left_of_an_episode_counts_as_the_episode(rollout_rs: str, mode: str) -> None:
    """An episode keeps its score while a token of it is left, and leaves its group without one."""
    hand = by_hand()
    band = {"token_k1": "0.8_1.25", "seq_mean_k1": "0.97_1.25"}[rollout_rs]
    correction = {"rollout_rs": rollout_rs, "rollout_rs_threshold": band}
    config = config_of(
        "rloo", actor={"loss_agg_mode": mode}, algorithm={"rollout_correction": correction}
    )
    got = hand.cut(hand.random_cut(5), config)
    log_ratio = ratios(hand).log()
    if rollout_rs == "seq_mean_k1":
        log_ratio = over_episodes(hand, log_ratio, mean=True)
    # k1 is minus the log ratio.
    low, high = (float(np.log(float(bound))) for bound in band.split("_"))
    kept = (-log_ratio >= low) & (-log_ratio <= high)
    assert 0 < kept.sum() < len(kept)
    lines = hand.lines()
    left = [line for line in lines if kept[line.places].any()]
    assert len(left) >= 4
    advantages = torch.zeros(len(kept), dtype=torch.float64)
    for line, (numbers, _) in zip(left, ESTIMATORS["rloo"](left), strict=True):
        advantages[line.places] = torch.from_numpy(numbers)
    per_token = LOSSES["vanilla"](hand.tokens(advantages))
    loss = one_number(per_token, lines, mode, kept, RESPONSE_WIDTH)
    assert distance(got.actor[0], gradient(loss, hand.plain.policy)) <= CLOSE


@pytest.mark.seconds
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_mode_weighs_tokens(loss_type: str) -> None:
    hand = by_hand()
    correction = {"bypass_mode": True, "loss_type": loss_type, "rollout_is": "token"}
    config = config_of("rloo", algorithm={"rollout_correction": correction})
    got = hand.cut(hand.random_cut(6), config, on_policy=True)
    lines = hand.lines()
    tokens = hand.tokens(flat(ESTIMATORS["rloo"](lines), 0))
    tokens.old = hand.engine
    per_token = LOSSES["vanilla"](tokens)
    if loss_type == "reinforce":
        per_token = LOSSES["gpg"](tokens) * tokens.ratio.detach().clamp(max=2.0)
    loss = one_number(per_token, lines, "token-mean", hand.all, RESPONSE_WIDTH)
    assert distance(got.actor[0], gradient(loss, hand.plain.policy)) <= CLOSE


# Several mini-batches


@pytest.mark.seconds
def test_each_mini_batch_has_whole_episodes() -> None:
    """Two mini-batches of a group each, of another number of rows."""
    hand = by_hand()
    mode = "seq-mean-token-mean"
    config = config_of("rloo", actor={"loss_agg_mode": mode, "ppo_mini_batch_size": 1})
    got = hand.cut(hand.random_cut(8), config)
    assert len(got.actor) == 2
    lines = hand.lines()
    per_token = LOSSES["vanilla"](hand.tokens(flat(ESTIMATORS["rloo"](lines), 0)))
    expected = []
    for group in ("g0", "g1"):
        own = [line for line in lines if line.episode.group == group]
        loss = one_number(per_token, own, mode, hand.all, RESPONSE_WIDTH)
        expected.append(gradient(loss, hand.plain.policy))
    # Which group comes first is the batch's order.
    if distance(got.actor[0], expected[0]) > CLOSE:
        expected.reverse()
    for found, by_hand_gradient in zip(got.actor, expected, strict=True):
        assert distance(found, by_hand_gradient) <= CLOSE


# What cannot keep the gradient


def other_by_rows(config: Any) -> float:
    """How far the gradient of cut episodes is from that of one row each, where rows count."""
    hand = by_hand(in_rows=True)
    policy = config.actor_rollout_ref
    actor = replace(policy.actor, loss_agg_counts="rows")
    config = replace(config, actor_rollout_ref=replace(policy, actor=actor))
    cuts = [fewest_rows(episode) for episode in hand.episodes]
    found = [hand.cut(cut, config).actor[0] for cut in (cuts, hand.random_cut(9))]
    return distance(found[0], found[1])


def bypassing(**settings: Any) -> dict[str, Any]:
    return {"rollout_correction": {"bypass_mode": True, **settings}}


REFUSED: dict[str, tuple[Any, str]] = {
    "optimal_token_baseline": (
        lambda: config_of("optimal_token_baseline"),
        "algorithm.adv_estimator=optimal_token_baseline counts the columns between the turns",
    ),
    "geo_mean": (
        lambda: with_loss(config_of("gae"), loss_mode="geo_mean"),
        "policy_loss.loss_mode=geo_mean takes a mean over the tokens of a row",
    ),
    "gspo": (
        lambda: with_loss(config_of("gae", actor={"ppo_epochs": 2}), loss_mode="gspo"),
        "policy_loss.loss_mode=gspo clips the ratio of a row",
    ),
    "clip_cov": (
        lambda: with_loss(
            config_of("gae", split="rows"),
            loss_mode="clip_cov",
            clip_cov_ratio=0.5,
            clip_cov_lb=-9.0,
        ),
        "policy_loss.loss_mode=clip_cov compares the tokens of a micro-batch",
    ),
    "kl_cov": (
        lambda: with_loss(config_of("gae", split="rows"), loss_mode="kl_cov", kl_cov_ratio=0.3),
        "policy_loss.loss_mode=kl_cov compares the tokens of a micro-batch",
    ),
    "sequence weights of bypass_mode": (
        lambda: config_of(algorithm=bypassing(loss_type="reinforce", rollout_is="sequence")),
        "rollout_is=sequence weighs a row",
    ),
    "normalised weights of bypass_mode": (
        lambda: config_of(
            split="rows",
            algorithm=bypassing(
                loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True
            ),
        ),
        "rollout_is_batch_normalize=true divides by a micro-batch's mean",
    ),
    "rejections of bypass_mode": (
        lambda: config_of(
            algorithm=bypassing(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9_1.1")
        ),
        "rollout_rs=seq_mean_k1 leaves tokens out by the row",
    ),
    "rejected tokens of bypass_mode, averaged": (
        lambda: config_of(
            actor={"loss_agg_mode": "seq-mean-token-mean"},
            algorithm=bypassing(rollout_rs="token_k1", rollout_rs_threshold="0.8_1.25"),
        ),
        "rollout_rs=token_k1 leaves tokens out by the row",
    ),
    "veto of bypass_mode": (
        lambda: config_of(algorithm=bypassing(rollout_token_veto_threshold=0.6)),
        "rollout_token_veto_threshold=0.6 leaves a row out",
    ),
    "pf_ppo": (
        lambda: config_of(algorithm={"use_pf_ppo": True}),
        "algorithm.use_pf_ppo=true draws rows",
    ),
    "shuffle": (
        lambda: config_of(actor={"shuffle": True, "ppo_mini_batch_size": 1}),
        "actor_rollout_ref.actor.shuffle=true cuts 2 mini-batches by rows",
    ),
}


@pytest.mark.seconds
@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_rows_is_refused_and_would_have_another_gradient(name: str) -> None:
    make_config, sentence = REFUSED[name]
    hand = by_hand()
    with pytest.raises(ValueError, match="episodes have several rows, and") as refusal:
        hand.cut(hand.random_cut(9), make_config())
    assert sentence in str(refusal.value)
    assert "or set actor_rollout_ref.actor.loss_agg_counts=rows" in str(refusal.value)
    # The number of mini-batches may differ too.
    if name != "shuffle":
        assert other_by_rows(make_config()) > 100 * CLOSE


def test_episodes_of_a_row_each_are_refused_nothing() -> None:
    hand = by_hand()
    single = [replace(episode, turns=episode.turns[:1]) for episode in hand.episodes]
    batch = batch_of(single, [[[0]] for _ in single], hand.engine_by_turn)
    for make_config, _ in REFUSED.values():
        config = make_config()
        if not config.algorithm.use_pf_ppo:
            assert update(hand.models, batch, single, config).actor


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_where_rows_count_the_gradient_is_another(mode: str) -> None:
    """So that the tests above could fail."""
    assert other_by_rows(config_of("gae", actor={"loss_agg_mode": mode})) > 100 * CLOSE


def test_a_loss_of_ones_own_says_that_it_reads_rows(registries_as_they_were: None) -> None:
    @register_policy_loss("first_token", reads_rows="learns the first token of a row")
    def first_token(log_prob: Tensor, advantages: Tensor) -> Any:
        return (-advantages[:, :1] * log_prob[:, :1]).sum(), {}

    hand = by_hand()
    with pytest.raises(ValueError) as refusal:
        hand.cut(hand.random_cut(9), with_loss(config_of(), loss_mode="first_token"))
    assert str(refusal.value) == (
        "6 of 6 episodes have several rows, and actor_rollout_ref.actor.policy_loss.loss_mode="
        "first_token learns the first token of a row: the gradient would depend on how an episode "
        "is cut into rows; set actor_rollout_ref.actor.loss_agg_counts=rows, with which each row "
        "counts by itself"
    )


# Tokens that are computed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_computed_are_counted_with_what_is_computed_again(layout: str) -> None:
    hand = by_hand()
    cuts = [row_a_turn(episode) for episode in hand.episodes]
    got = hand.cut(cuts, config_of(), layout=layout)
    prefixes = set()
    rows = []
    for episode in hand.episodes:
        for turn in range(len(episode.turns)):
            ids, _ = episode.path(turn)
            rows.append(len(ids))
            prefixes |= {tuple(ids[:n]) for n in range(1, len(ids) + 1)}
    computed = {
        "shared": len(prefixes),
        "packed": sum(rows),
        "padded": len(rows) * max(rows),
        "unstripped": len(rows) * 2 * RESPONSE_WIDTH,
    }[layout]
    assert got.metrics["actor/computed_tokens"] == computed
    for model in ("actor", "critic"):
        ratio = got.metrics[f"{model}/computed_per_unique_token"]
        assert ratio == pytest.approx(computed / len(prefixes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_any_tree_cut_anyhow(seed: int) -> None:
    """Other weights and trees; every estimator, with modes, layouts and cuts that are drawn."""
    rng = np.random.default_rng(seed)
    hand = ByHand(make_models(seed), draw_episodes(100 + seed))
    for estimator in ESTIMATORS:
        mode = str(rng.choice(LOSS_AGG_MODES))
        settings = {"loss_agg_mode": mode}
        config = config_of(
            estimator, actor=settings, critic=settings, split=str(rng.choice(list(SPLITS)))
        )
        got = hand.cut(
            hand.random_cut(int(rng.integers(1000))),
            config,
            seed=int(rng.integers(1000)),
            layout=str(rng.choice(list(LAYOUTS))),
        )
        assert distance(got.actor[0], hand.actor(estimator, mode)) <= CLOSE
        if estimator in WITH_VALUES:
            assert distance(got.critic[0], hand.critic(estimator, mode)) <= CLOSE
