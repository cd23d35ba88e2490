"""Tests every built-in estimator: by hand, at its edges, and in what must not change it."""

from __future__ import annotations

import inspect
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from data.protocol import DataProto
from training import core_algos as algos

# Two groups: a has three rows, b two; the third row has a hole, the last is short.
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]])
INDEX = np.array(["a", "a", "a", "b", "b"], dtype=object)
SCORES = [3.0, 1.0, 0.0, 2.0, 4.0]
TURNS = torch.tensor([[0, 0, 1, -1], [0, 0, -1, -1], [0, -1, 1, 1], [0, 1, 1, 2], [0, -1, -1, -1]])
CONFIG = SimpleNamespace(
    gamma=1.0,
    turn_gamma=1.0,
    turn_lam=1.0,
    gigpo_step_weight=1.0,
    distillation_coef=1.0,
    distillation_task=None,
)


def outcome(scores: list[float], mask: Tensor) -> Tensor:
    """Each score on its row's last sampled token."""
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1, keepdim=True)
    return torch.zeros(mask.shape).scatter(1, last, torch.tensor(scores)[:, None]) * mask


def offered(
    scores: list[float] = SCORES,
    mask: Tensor = MASK,
    index: np.ndarray = INDEX,
    turns: Tensor = TURNS,
) -> dict:
    torch.manual_seed(0)
    rows = len(mask)
    return {
        "token_level_rewards": outcome(scores, mask),
        "response_mask": mask,
        "index": index,
        "values": torch.rand(mask.shape),
        "turn_ids": turns,
        "anchors": [[f"s{turn}" for turn in range(int(row.max()) + 1)] for row in turns],
        "branch_returns": [[[0.5, 1.5]] * (int(row.max()) + 1) for row in turns],
        "old_log_probs": -torch.rand(mask.shape),
        "ref_log_prob": -torch.rand(mask.shape),
        "sum_pi_squared": torch.rand(mask.shape) / 2,
        "reward_baselines": torch.rand(rows),
        "role": index,
        "state": {},
        "non_tensor_batch": {},
        "gamma": 0.9,
        "lam": 0.8,
    }


def estimate(name: str, **changed: object) -> tuple[Tensor, Tensor]:
    return algos.call_adv_estimator(name, **{**offered(), "state": {}, **changed})


def of_rows(name: str, **changed: object) -> list[float]:
    """The one advantage that each row's sampled tokens have."""
    advantages, _ = estimate(name, **changed)
    mask = changed.get("response_mask", MASK).bool()
    rows = [set(row[kept].tolist()) for row, kept in zip(advantages, mask, strict=True)]
    assert all(len(row) == 1 for row in rows) and not advantages[~mask].any()
    return [row.pop() for row in rows]


# By hand


def test_passk_rewards_the_best_by_its_distance_to_the_second() -> None:
    plain = of_rows("grpo_passk", norm_adv_by_std_in_grpo=False)
    assert plain == [2, 0, 0, 0, 2], "3 - 1 and 4 - 2"
    # std(3, 1, 0) = sqrt((25/9 + 1/9 + 16/9) / 2), std(2, 4) = sqrt(2).
    assert of_rows("grpo_passk") == pytest.approx(
        [2 / (7 / 3) ** 0.5, 0, 0, 0, 2 / 2**0.5], abs=1e-5
    )
    # verl's callers give it in the config.
    without_std = SimpleNamespace(norm_adv_by_std_in_grpo=False)
    assert of_rows("grpo_passk", config=without_std) == plain
    tied = outcome([3.0, 3.0, 0.0, 2.0, 4.0], MASK)
    assert of_rows("grpo_passk", token_level_rewards=tied, norm_adv_by_std_in_grpo=False) == [
        0,
        0,
        0,
        0,
        2,
    ]
    with pytest.raises(ValueError, match=r"single row: set rollout\.n above 1"):
        estimate("grpo_passk", index=np.array(["a", "a", "a", "b", "c"]))


def test_reinforce_plus_plus_baseline_whitens_the_deviations_over_tokens() -> None:
    deviations = torch.tensor([5 / 3, -1 / 3, -4 / 3, -1.0, 1.0])
    tokens = torch.repeat_interleave(deviations, MASK.sum(1))
    expected = (deviations - tokens.mean()) / tokens.std()
    assert of_rows("reinforce_plus_plus_baseline") == pytest.approx(expected.tolist(), abs=1e-5)


def test_opo_weighs_scores_with_lengths() -> None:
    # Lengths 3, 2, 3 and 4, 1: (9 + 2 + 0) / 8 and (8 + 4) / 5.
    assert of_rows("opo") == pytest.approx(
        [3 - 11 / 8, 1 - 11 / 8, -11 / 8, 2 - 12 / 5, 4 - 12 / 5]
    )


def test_gpg_scales_by_the_share_of_scores_that_are_not_zero() -> None:
    assert of_rows("gpg") == pytest.approx([5 / 4 * x for x in (5 / 3, -1 / 3, -4 / 3, -1, 1)])
    assert of_rows("gpg", f_norm=2.0)[0] == pytest.approx(5 / 8 * 5 / 3)


def test_maxrl_divides_by_the_mean() -> None:
    assert of_rows("maxrl") == pytest.approx([1.25, -0.25, -1, -1 / 3, 1 / 3])
    nothing = outcome([0.0, 0.0, 0.0, 2.0, 4.0], MASK)
    assert of_rows("maxrl", token_level_rewards=nothing)[:3] == [0, 0, 0]


@pytest.mark.parametrize(
    "scores",
    [
        [-1.0, -3.0, -2.0, -5.0, -4.0],
        [1.0, -1.0, 0.0, 2.0, -2.0],
        [1.0, -1.125, 0.0, 0.5, -0.5625],
        [0.0, -1e-6, 0.0, 0.25, -0.25],
    ],
    ids=["all below zero", "a mean of zero", "a mean just below zero", "one penalty"],
)
def test_maxrl_never_rewards_the_worse_answer(scores: list[float]) -> None:
    advantages = of_rows("maxrl", token_level_rewards=outcome(scores, MASK))
    for group, size in ((slice(0, 3), 3), (slice(3, 5), 2)):
        by_score = sorted(zip(scores[group], advantages[group], strict=True))
        ordered = [advantage for _, advantage in by_score]
        assert ordered == sorted(ordered)
        assert ordered[0] == -1 and 0 < ordered[-1] <= size - 1
        assert sum(ordered) == pytest.approx(0, abs=1e-6)


def test_maxrl_counts_from_the_lowest_score_of_the_group_where_that_is_below_zero() -> None:
    # Shifted by 1: 2, 0 and 1, with mean 1. The other group is left as it is.
    given = outcome([1.0, -1.0, 0.0, 2.0, 4.0], MASK)
    expected = [1, -1, 0, -1 / 3, 1 / 3]
    assert of_rows("maxrl", token_level_rewards=given) == pytest.approx(expected)
    # Equal scores below zero teach nothing; a row without a sampled token is not the lowest.
    equal = outcome([-0.1, -0.1, -0.1, 2.0, 4.0], MASK)
    assert of_rows("maxrl", token_level_rewards=equal)[:3] == [0, 0, 0]
    empty_row = MASK * torch.tensor([1, 0, 1, 1, 1])[:, None]
    given = torch.where(empty_row > 0, outcome([-1.0, -9.0, -2.0, 2.0, 4.0], MASK), -9.0)
    advantages, _ = estimate("maxrl", token_level_rewards=given, response_mask=empty_row)
    assert advantages[:3, 0].tolist() == [1, 0, -1]


def test_maxrl_is_in_expectation_log_likelihoods_expansion_up_to_pass_at_n_minus_one() -> None:
    """Enumerates what a group of n answers can be, each right with chance p."""
    size, chance = 4, 0.3
    mask = torch.ones(size, 1, dtype=torch.long)
    expected = 0.0
    for hits in itertools.product((0.0, 1.0), repeat=size):
        scores = torch.tensor(hits)[:, None]
        advantages, _ = algos.call_adv_estimator(
            "maxrl", token_level_rewards=scores, response_mask=mask, index=np.array(["a"] * size)
        )
        # The derivative of the log of each answer's chance by p.
        slopes = torch.where(scores > 0, 1 / chance, -1 / (1 - chance))
        probability = math.prod(chance if hit else 1 - chance for hit in hits)
        expected += probability * float((advantages * slopes).mean())
    # pass@k = 1 - (1 - p)^k, divided by k, has the derivative (1 - p)^(k - 1).
    by_hand = sum((1 - chance) ** (k - 1) for k in range(1, size))
    assert expected == pytest.approx(by_hand, rel=1e-6)


def test_gdpo_normalises_each_kind_of_reward_by_itself() -> None:
    config = SimpleNamespace(gdpo_reward_keys=("hit", "form"), gdpo_reward_weights=(1.0, 0.5))
    kinds = {"hit": [1, 0, 0, 1, 0], "form": [100, 200, 100, 0, 0]}
    # Where one of three scores differs by d, the unbiased deviation is d / sqrt(3).
    high, low = 2 / 3**0.5, -1 / 3**0.5
    hit = torch.tensor([high, low, low, 0.5**0.5, -(0.5**0.5)])
    form = torch.tensor([low, high, low, 0.0, 0.0])
    total = hit + 0.5 * form
    tokens = torch.repeat_interleave(total, MASK.sum(1))
    expected = (total - tokens.mean()) / tokens.std()
    assert of_rows("gdpo", config=config, non_tensor_batch=kinds) == pytest.approx(
        expected.tolist(), abs=1e-4
    )
    with pytest.raises(ValueError, match="gdpo_reward_keys='hit' is unknown; allowed: form"):
        estimate("gdpo", config=config, non_tensor_batch={"form": kinds["form"]})


def test_remax_subtracts_the_greedy_reward() -> None:
    given = {"reward_baselines": torch.tensor([1.0, 1.0, 1.0, 0.0, 0.5])}
    assert of_rows("remax", **given) == [2, 0, -1, 2, 3.5]


def test_rae_compares_with_the_running_mean_of_the_role_before_it_moves() -> None:
    state = {"b": 1.0}
    assert of_rows("rae", state=state) == [3, 1, 0, 1, 3]
    assert state["a"] == pytest.approx((1 - 0.95**3) * 4 / 3)
    assert state["b"] == pytest.approx(0.95**2 * 1 + (1 - 0.95**2) * 3)
    assert of_rows("rae", state=state)[0] == pytest.approx(3 - (1 - 0.95**3) * 4 / 3), (
        "the state is used"
    )


def test_optimal_token_baseline_weighs_returns_with_what_varied_up_to_there() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    given = {
        "token_level_rewards": outcome([1.0, 0.0], mask),
        "response_mask": mask,
        "index": np.array(["a", "a"]),
        "old_log_probs": torch.log(torch.tensor([[0.5, 0.5, 0.5], [0.25, 0.25, 1.0]])),
        "sum_pi_squared": torch.tensor([[0.5, 0.5, 0.5], [0.25, 0.25, 0.0]]),
    }
    # 1 - 2 pi + sum pi^2: 0.5 a token in the first row, 0.75 in the second; they add up.
    first, _ = algos.call_adv_estimator("optimal_token_baseline", **given)
    baseline = 0.5 / 1.25
    assert first[0].tolist() == pytest.approx([1 - baseline, 1 - baseline, 1.0]), (
        "no baseline where one is left"
    )
    assert first[1, :2].tolist() == pytest.approx([-baseline, -baseline])
    kept, _ = algos.call_adv_estimator("optimal_token_baseline", **given, handle_zero_tail=False)
    assert kept[0].tolist() == pytest.approx([1 - baseline, 1 - baseline, 0.0], abs=1e-6)


def test_the_multi_turn_one_counts_sampled_tokens() -> None:
    torch.manual_seed(1)
    whole = {
        name: torch.rand(4, 3)
        for name in ("token_level_rewards", "old_log_probs", "sum_pi_squared")
    }
    index = np.array(["a", "a", "b", "b"])
    places = torch.tensor([[0, 2, 4], [1, 2, 3], [0, 1, 2], [2, 3, 4]])
    spread = {name: torch.full((4, 5), 7.0).scatter(1, places, x) for name, x in whole.items()}
    mask = torch.zeros(4, 5, dtype=torch.long).scatter(1, places, 1)
    name = "optimal_token_baseline"
    expected, _ = algos.call_adv_estimator(
        name, **whole, response_mask=torch.ones(4, 3), index=index
    )
    seen, _ = algos.call_adv_estimator(f"tir_{name}", **spread, response_mask=mask, index=index)
    assert torch.equal(seen.gather(1, places), expected) and not seen[mask == 0].any()


def test_distillation_looks_at_each_token_alone() -> None:
    given = offered()
    advantages, _ = estimate("on_policy_distillation")
    difference = given["ref_log_prob"] - given["old_log_probs"]
    assert torch.equal(advantages, difference * MASK)
    both = SimpleNamespace(
        **{**vars(CONFIG), "distillation_coef": 0.5, "distillation_task": "rloo"}
    )
    expected = 0.5 * difference * MASK + estimate("rloo")[0]
    torch.testing.assert_close(estimate("on_policy_distillation", config=both)[0], expected)


# Turns

# Two episodes of one group, of two and three turns.
TWO = {
    "response_mask": torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 1, 1, 0, 1]]),
    "turn_ids": torch.tensor([[0, 0, -1, 1, -1, -1], [0, -1, 1, 1, -1, 2]]),
    "token_level_rewards": torch.tensor([[0, 1.0, 0, 2.0, 0, 0], [0.5, 0, 0, 1.0, 0, 4.0]]),
    "index": np.array(["a", "a"]),
}


def test_turn_return_compares_a_turn_with_others_that_got_so_far() -> None:
    config = SimpleNamespace(turn_gamma=0.5, turn_lam=1.0)
    advantages, returns = algos.compute_turn_return_advantage(**TWO, config=config)
    # Returns 1 + .5 x 2 = 2, 2; and .5 + .5 x (1 + .5 x 4) = 2, 3, 4.
    assert returns.tolist() == [[2, 2, 0, 2, 0, 0], [2, 0, 3, 3, 0, 4]]
    assert advantages.tolist() == [[0, 0, 0, -1, 0, 0], [0, 0, 1, 1, 0, 4]], (
        "nobody else reached turn 2"
    )
    halved, _ = algos.compute_turn_return_advantage(**TWO, config=config, leave_one_out=False)
    assert halved.tolist() == [[0, 0, 0, -0.5, 0, 0], [0, 0, 0.5, 0.5, 0, 0]], "m / (m + 1) of it"


def test_gigpo_compares_turns_that_began_in_the_same_state() -> None:
    config = SimpleNamespace(turn_gamma=1.0, turn_lam=1.0, gigpo_step_weight=2.0)
    given = {
        **TWO,
        "anchors": [["start", "door"], ["start", "hall", "door"]],
        "norm_adv_by_std_in_grpo": False,
    }
    advantages, returns = algos.compute_gigpo_advantage(**given, config=config)
    # Returns 3, 2 and 5.5, 5, 4. Episodes: 3 - 4.25 and 5.5 - 4.25; start: 3, 5.5; door: 2, 4; the
    # hall was met once.
    assert returns.tolist() == [[3, 3, 0, 2, 0, 0], [5.5, 0, 5, 5, 0, 4]]
    expected = [
        [-1.25 - 2.5, -1.25 - 2.5, 0, -1.25 - 2, 0, 0],
        [1.25 + 2.5, 0, 1.25, 1.25, 0, 1.25 + 2],
    ]
    assert advantages.tolist() == expected
    with pytest.raises(ValueError, match="5 turns were played, and anchors name 3"):
        algos.compute_gigpo_advantage(
            **{**given, "anchors": [["start"], ["start", "hall"]]}, config=config
        )


def test_turn_gae_is_gae_over_turns_and_inside_them_over_tokens() -> None:
    config = SimpleNamespace(turn_gamma=0.5, turn_lam=0.8)
    values = torch.arange(12.0).view(2, 6) / 10
    given = {name: TWO[name] for name in ("response_mask", "turn_ids", "token_level_rewards")}
    raw, returns = algos.compute_turn_gae_advantage_return(
        **given, values=values, gamma=0.9, lam=0.7, config=config, whiten=False
    )
    # First episode: turns start at values 0 and .3. A_1 = 2 - .3 = 1.7 and
    # A_0 = 1 + .5 x .3 - 0 + .4 x 1.7 = 1.83.
    # Turn 0 is to reach 1.83 over values 0, .1; turn 1 reaches 2 over .3.
    last = 1.83 - 0.1
    assert raw[0].tolist() == pytest.approx([0.9 * 0.1 - 0 + 0.63 * last, last, 0, 1.7, 0, 0])
    assert returns[0].tolist() == pytest.approx([0.09 + 0.63 * last, 1.83, 0, 2.0, 0, 0])
    plain = algos.compute_gae_advantage_return(
        given["token_level_rewards"], values, given["response_mask"], whiten=False
    )
    same = algos.compute_turn_gae_advantage_return(**given, values=values, whiten=False)
    torch.testing.assert_close(
        same[0], plain[0], msg="with nothing discounted turns make no difference"
    )


# Edges and invariances

ALL = [str(name) for name in algos.AdvantageEstimator]
PAIRS = [name for name in ALL if name != "grpo_passk"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_results_are_finite_float32_and_zero_outside_the_mask(
    name: str, dtype: torch.dtype
) -> None:
    given = offered()
    for key, x in given.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            given[key] = x.to(dtype)
    for result in algos.call_adv_estimator(name, **given):
        assert result.dtype in (torch.float32, dtype)
        assert result.isfinite().all()
        assert not result[MASK == 0].any()


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    "mask",
    [torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 0, 0]]), torch.ones(2, 3)],
    ids=["empty", "one", "equal"],
)
def test_nothing_to_learn_from_is_defined(name: str, mask: Tensor) -> None:
    mask = mask.long()
    given = offered([1.0, 1.0], mask, np.array(["a", "a"]), torch.where(mask > 0, 0, -1))
    given["anchors"] = [["s"], ["s"]]
    advantages, returns = algos.call_adv_estimator(name, **given)
    assert (
        advantages.isfinite().all() and returns.isfinite().all() and not advantages[mask == 0].any()
    )


@pytest.mark.parametrize("garbage", [float("nan"), 1e9])
@pytest.mark.parametrize("name", ALL)
def test_nothing_outside_the_mask_is_seen(name: str, garbage: float) -> None:
    given = offered()
    fields = ("token_level_rewards", "values", "old_log_probs", "ref_log_prob", "sum_pi_squared")
    dirty = given | {field: torch.where(MASK.bool(), given[field], garbage) for field in fields}
    clean = algos.call_adv_estimator(name, **{**given, "state": {}})
    seen = algos.call_adv_estimator(name, **{**dirty, "state": {}})
    assert clean[0].any()
    assert torch.equal(clean[0], seen[0]) and torch.equal(clean[1], seen[1])


@pytest.mark.parametrize("name", ALL)
def test_neither_row_order_nor_padding_matters(name: str) -> None:
    given, order = offered(), [4, 2, 0, 3, 1]
    moved = dict(given)
    for key, x in given.items():
        if isinstance(x, Tensor):
            moved[key] = x[order]
            if x.dim() == 2:
                value = -1 if key == "turn_ids" else 0
                moved[key] = torch.nn.functional.pad(x[order], (1, 2), value=value)
    moved["index"] = moved["role"] = INDEX[order]
    for column in ("anchors", "branch_returns"):
        moved[column] = [given[column][i] for i in order]
    moved["state"] = {}
    for expected, seen in zip(estimate(name), algos.call_adv_estimator(name, **moved), strict=True):
        torch.testing.assert_close(seen[:, 1:-2], expected[order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
@pytest.mark.parametrize("name", sorted(algos.ESTIMATOR_NEEDS))
def test_an_empty_batch_has_empty_advantages(name: str, shape: tuple[int, int]) -> None:
    mask = torch.zeros(shape, dtype=torch.long)
    given = offered()
    changed = {
        key: torch.zeros(shape)
        for key, value in given.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 2
    }
    changed["reward_baselines"] = torch.zeros(shape[0])
    index = np.array(["a"] * shape[0], dtype=object)
    changed["role"] = index
    anchors = [[] for _ in range(shape[0])]
    changed |= {"anchors": anchors, "branch_returns": anchors}
    advantages, _ = estimate(name, response_mask=mask, turn_ids=mask, index=index, **changed)
    assert advantages.shape == shape


def test_gdpo_names_the_reward_that_is_missing_or_no_number() -> None:
    config = SimpleNamespace(gdpo_reward_keys=["hits"], gdpo_reward_weights=[])
    for columns, message in (
        ({"hit": [1] * 5, "uid": list("abcde")}, r"allowed: hit, uid\. Did you mean 'hit'"),
        ({"hits": ["one"] * 5}, "convert string to float: 'one'"),
    ):
        with pytest.raises(ValueError, match=message):
            estimate("gdpo", config=config, non_tensor_batch=columns)
    some = {"hits": [1.0, None, 1.0, None, 2.0]}
    advantages, _ = estimate("gdpo", config=config, non_tensor_batch=some)
    assert advantages.isfinite().all() and advantages.any(), "what gives none gives 0"


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_pf_ppo_draws_no_row_without_a_sampled_token(method: str) -> None:
    scores = torch.tensor([-1.0, -0.5, 0.0, -0.2])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]])
    data = DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_scores": scores[:, None] * mask,
            "row": torch.arange(4),
        },
        non_tensors={"uid": np.array(list("abcd"), dtype=object)},
    )
    drawn = [
        algos.compute_pf_ppo_reweight_data(data, method, seed=seed).batch["row"].tolist()
        for seed in range(20)
    ]
    for rows in drawn:
        assert len(rows) == 4 and 2 not in rows


@pytest.mark.parametrize(
    "name",
    [
        "rloo",
        "opo",
        "gpg",
        "grpo_passk",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "gdpo",
    ],
)
def test_estimators_take_what_verls_callers_hand_on(name: str) -> None:
    estimator = algos.get_adv_estimator_fn(name)
    mask = torch.ones(4, 2)
    own = {
        "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.5], [0.0, 0.0], [1.0, 1.0]]),
        "response_mask": mask,
        "index": np.array(["a", "a", "b", "b"], dtype=object),
        "reward_baselines": torch.zeros(4),
    }
    parameters = inspect.signature(estimator).parameters
    own = {key: value for key, value in own.items() if key in parameters}
    # verl's gdpo reads prompts and attention_mask off `batch`; its others take any keyword.
    batch = {"prompts": torch.ones(4, 1), "attention_mask": torch.ones(4, 3)}
    further = {"batch": batch}
    if name != "gdpo":
        further |= {"values": mask, "num_repeat": 2}
    expected, _ = estimator(**own)
    found, _ = estimator(**own, **further)
    assert torch.equal(found, expected)
