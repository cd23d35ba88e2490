"""Estimators and losses are tried before a model is loaded; what is wrong is told with its line."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.config.helpers import load
from training import algorithm_trial
from training.algorithm_trial import made_up_batch, try_algorithm
from training.config import PPOConfig
from training.config.checks import load_custom_algorithm
from training.config.loader import ConfigError
from training.core_algos import POLICY_LOSS_REGISTRY
from training.core_algos.built_in import BUILT_IN_ESTIMATORS
from workers.dp_actor import DataParallelPPOActor

ACTOR = "actor_rollout_ref.actor"
GAME = "agent.environment.name=custom.envs.guess_number:GuessNumberEnvironment"
SMALL = ("data.train_batch_size=4", "trainer.device=cpu", "actor_rollout_ref.rollout.n=4")

ESTIMATORS = """
import torch
from training.core_algos import register_adv_est

@register_adv_est("own_nothing")
def nothing(token_level_rewards, response_mask):
    torch.zeros(1)

@register_adv_est("own_single")
def single(token_level_rewards, response_mask):
    return token_level_rewards

@register_adv_est("own_per_row")
def per_row(token_level_rewards, response_mask):
    scores = token_level_rewards.sum(1)
    return scores, scores

@register_adv_est("own_nan")
def nan(token_level_rewards, response_mask):
    advantages = token_level_rewards / 0.0
    return advantages, advantages

@register_adv_est("own_raises")
def raises(token_level_rewards, response_mask, config):
    advantages = token_level_rewards * config.custom_kwargs["scale"]
    return advantages, advantages

@register_adv_est("own_novelty")
def novelty(token_level_rewards, response_mask, novelty):
    return novelty, novelty

@register_adv_est("own_weights", needs=("rollout_is_weights",))
def weights(token_level_rewards, response_mask, rollout_is_weights):
    return rollout_is_weights, rollout_is_weights

@register_adv_est("own_engine", needs=("rollout_log_probs",))
def engine(token_level_rewards, response_mask, **fields):
    return fields["rollout_log_probs"], fields["rollout_log_probs"]

@register_adv_est("own_column")
def column(token_level_rewards, response_mask, non_tensor_batch):
    bonus = torch.tensor(non_tensor_batch["acc"])
    return bonus, bonus

@register_adv_est("own_values", needs=("values", "ref_log_prob", "reward_baselines"))
def values(token_level_rewards, response_mask, values, ref_log_prob, reward_baselines, state):
    state["calls"] = state.get("calls", 0) + 1
    advantages = (values - ref_log_prob - reward_baselines[:, None]) * response_mask
    return advantages, advantages

@register_adv_est("own_exits")
def exits(token_level_rewards, response_mask):
    raise SystemExit("no licence")
"""
LOSSES = """
import random
import torch
from training.core_algos import agg_loss, policy_loss, register_policy_loss

@register_policy_loss("own_nothing")
def nothing(old_log_prob, log_prob, advantages, response_mask):
    torch.zeros(1)

@register_policy_loss("own_single")
def single(log_prob, response_mask, loss_agg_mode):
    return agg_loss(-log_prob, response_mask, loss_agg_mode)

@register_policy_loss("own_matrix")
def matrix(log_prob, advantages):
    return -advantages * log_prob, {}

@register_policy_loss("own_detached")
def detached(log_prob, advantages, response_mask, loss_agg_mode):
    return agg_loss(-advantages * log_prob.detach(), response_mask, loss_agg_mode), {}

@register_policy_loss("own_number")
def number(log_prob, advantages):
    return (-advantages * log_prob).mean().item(), {}

@register_policy_loss("own_elsewhere")
def elsewhere(advantages, response_mask, loss_agg_mode):
    weight = torch.ones((), requires_grad=True)
    return agg_loss(weight * advantages, response_mask, loss_agg_mode), {}

@register_policy_loss("own_nan")
def nan(log_prob, advantages):
    return (log_prob.abs() + 1).neg().log().mean(), {}

@register_policy_loss("own_steep")
def steep(log_prob, advantages):
    return (log_prob * 0.0).abs().sqrt().mean(), {}

@register_policy_loss("own_metrics")
def metrics(log_prob, advantages):
    return (-advantages * log_prob).mean(), {"actor/all": [1, 2]}

@register_policy_loss("own_many")
def many(log_prob, advantages):
    return (-advantages * log_prob).mean(), {"actor/many": log_prob.detach()}

@register_policy_loss("own_reference")
def reference(log_prob, ref_log_prob):
    return (log_prob - ref_log_prob).mean(), {}

@register_policy_loss("own_novelty")
def novelty(log_prob, novelty):
    return (log_prob * novelty).mean(), {}

@register_policy_loss("own_raises")
def raises(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    return log_prob.mean() * config.policy_loss.custom_kwargs["missing"], {}

@register_policy_loss("own_bounds")
def bounds(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    ratio = (log_prob - old_log_prob).exp()
    kept = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    random.random(), torch.rand(1)
    return agg_loss(-advantages * torch.min(kept, ratio), response_mask, loss_agg_mode), {}

@policy_loss("own_formula")
def formula(inputs):
    return inputs.aggregate(-inputs.advantages * inputs.log_ratio.exp().detach())
"""


@pytest.fixture
def own(tmp_path: Path, registries_as_they_were: None) -> Path:
    """A file with estimators and losses of a user's, which is loaded."""
    for name, source in (("estimators.py", ESTIMATORS), ("losses.py", LOSSES)):
        (tmp_path / name).write_text(source)
        load_custom_algorithm(str(tmp_path / name))
    return tmp_path


def config_of(*words: str) -> PPOConfig:
    return load(*SMALL, *words)


def problem(*words: str) -> str:
    """Returns what the trial says of a config."""
    with pytest.raises(ConfigError) as caught:
        try_algorithm(config_of(*words))
    (found,) = caught.value.problems
    assert found.endswith("seen before the first step, on made-up numbers")
    return found


@pytest.mark.parametrize("games", [False, True])
@pytest.mark.parametrize("name", sorted(BUILT_IN_ESTIMATORS))
def test_every_estimator_of_this_project_passes(name: str, games: bool) -> None:
    words = [f"algorithm.adv_estimator={name}"]
    if games:
        words.append(GAME)
    if name == "gdpo":
        words.append("algorithm.gdpo_reward_keys=[a,b]")
    if name == "on_policy_distillation":
        words.append("algorithm.distillation_task=grpo")
    try_algorithm(config_of(*words))


@pytest.mark.parametrize("name", sorted(POLICY_LOSS_REGISTRY))
def test_every_loss_of_this_project_passes(name: str) -> None:
    words = [f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.policy_loss.dro_beta=0.1"]
    if name == "bypass_mode":
        words.append("algorithm.rollout_correction.bypass_mode=true")
    try_algorithm(config_of(*words))


@pytest.mark.parametrize(
    "words",
    [
        (
            f"{ACTOR}.use_kl_loss=true",
            f"{ACTOR}.entropy_coeff=0.1",
            "algorithm.use_kl_in_reward=true",
        ),
        ("algorithm.rollout_correction.rollout_is=token",),
        ("algorithm.rollout_correction.rollout_is=sequence", f"{ACTOR}.ppo_mini_batch_size=2"),
        (
            "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        ),
        ("critic.share_backbone=true", "algorithm.adv_estimator=gae"),
        ("agent.observation_loss_coef=0.1", GAME),
        ("trainer.train_finished_groups=true", "algorithm.adv_estimator=grpo"),
        ("actor_rollout_ref.rollout.n=1",),
        ("data.max_response_length=1",),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",),
    ],
)
def test_every_way_to_train_passes(words: tuple[str, ...]) -> None:
    try_algorithm(config_of(*words))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "returned None; allowed: advantages and returns, two tensors of shape"),
        ("single", r"returned a tensor of shape \(8, 6\); allowed: advantages and returns"),
        ("per_row", r"returned 2 values \(a tensor of shape \(8,\), a tensor"),
        ("nan", "advantages must be finite"),
        ("raises", r"KeyError: 'scale' in \S+/estimators.py:25"),
        ("novelty", "takes novelty, which nothing gives; there are: values, index, "),
        ("weights", r"takes rollout_is_weights, .*algorithm.rollout_correction.rollout_is gives"),
        ("exits", "SystemExit: no licence"),
    ],
)
def test_an_estimator_is_told_with_function_file_and_line(own: Path, name: str, words: str) -> None:
    said = problem(f"algorithm.adv_estimator=own_{name}")
    assert re.match(rf"{name} \({own}/estimators.py:\d+\): estimator 'own_{name}'", said), said
    assert re.search(words, said), said


def test_an_estimator_needs_what_the_engine_does_not_give(own: Path) -> None:
    said = problem(
        "algorithm.adv_estimator=own_engine", "actor_rollout_ref.rollout.calculate_log_probs=false"
    )
    assert f"engine ({own}/estimators.py:" in said and "rollout_log_probs" in said


def test_what_an_estimator_needs_is_there_as_in_the_run(own: Path) -> None:
    try_algorithm(config_of("algorithm.adv_estimator=own_values"))
    try_algorithm(config_of("algorithm.adv_estimator=own_engine"))


def test_a_column_that_rows_may_have_in_the_run_is_no_problem(
    own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    try_algorithm(config_of("algorithm.adv_estimator=own_column"))
    assert "estimator 'own_column' is not tried: it reads 'acc'" in caplog.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", r"must return \(loss, metrics\).*; it returned NoneType"),
        ("single", r"must return \(loss, metrics\).*; it returned Tensor"),
        ("matrix", r"returned a tensor of shape \(8, 6\) for the loss; allowed: a tensor without"),
        ("detached", "without a gradient by log_prob, so that nothing would be learnt"),
        ("number", r"returned .*\(float\) for the loss; allowed: a tensor without dimensions"),
        ("elsewhere", "without a gradient by log_prob"),
        ("nan", "returned nan for the loss"),
        ("steep", "has a gradient that is not finite"),
        ("metrics", r"returned \[1, 2\] for the metric 'actor/all'; allowed: a number"),
        ("many", r"returned a tensor of shape \(8, 6\) for the metric 'actor/many'"),
        ("reference", r"takes ref_log_prob, .*actor_rollout_ref.actor.use_kl_loss=true gives"),
        ("novelty", "takes novelty, which nothing gives; there are: advantages, "),
        ("raises", r"KeyError: 'missing' in \S+/losses.py:57"),
        ("formula", "without a gradient by log_prob"),
    ],
)
def test_a_loss_is_told_with_function_file_and_line(own: Path, name: str, words: str) -> None:
    said = problem(f"{ACTOR}.policy_loss.loss_mode=own_{name}")
    assert re.match(rf"{name} \({own}/losses.py:\d+\): policy loss 'own_{name}'", said), said
    assert re.search(words, said), said


def test_a_detached_loss_is_told_beside_terms_that_have_a_gradient(own: Path) -> None:
    said = problem(
        f"{ACTOR}.policy_loss.loss_mode=own_detached",
        f"{ACTOR}.entropy_coeff=0.1",
        f"{ACTOR}.use_kl_loss=true",
    )
    assert "without a gradient by log_prob" in said


def test_estimator_and_loss_are_told_together(own: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        try_algorithm(
            config_of("algorithm.adv_estimator=own_nan", f"{ACTOR}.policy_loss.loss_mode=own_nan")
        )
    assert len(caught.value.problems) == 2


def test_a_loss_of_ones_own_reads_both_bounds_as_numbers(own: Path) -> None:
    """As in verl, where they are 0.2 by default; and the global generators stay as they are."""
    before: Any = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    try_algorithm(config_of(f"{ACTOR}.policy_loss.loss_mode=own_bounds"))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert np.array_equal(np.random.get_state()[1], before[2])


def test_the_made_up_rows_are_what_a_step_has() -> None:
    batch = made_up_batch(config_of())
    mask = batch.batch["response_mask"]
    assert mask.any(dim=1).all(), "each row has a token"
    assert len(set(mask.sum(dim=1).tolist())) > 1, "and not all as many"
    assert batch.non_tensor_batch["uid"].tolist() == ["1.0"] * 4 + ["1.1"] * 4
    scores = batch.batch["token_level_scores"]
    assert scores.sum(dim=1).tolist() == [0, 1] * 4 and not (scores * (1 - mask)).any()


def reading(field: str) -> Callable[..., Any]:
    """Makes a `micro_loss` that reads a field of an edit's own."""
    own = DataParallelPPOActor._policy_loss

    def read(actor: Any, fields: Any, log_prob: Any, counts: Any) -> Any:
        return own(actor, fields | {"advantages": fields[field]}, log_prob, counts)

    return read


def test_a_field_that_is_not_listed_is_told_with_the_place_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DataParallelPPOActor, "_policy_loss", reading("my_weight"))
    found = problem()
    assert f"read ({__file__}:" in found
    assert "compute_policy_loss_vanilla" not in found
    assert "there is no 'my_weight'" in found
    assert "POLICY_LOSS_FIELDS lists (workers/model/loss_fields.py)" in found


def test_a_listed_field_that_an_edit_makes_elsewhere_is_no_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = (*algorithm_trial.POLICY_LOSS_FIELDS, "my_weight")
    monkeypatch.setattr(algorithm_trial, "POLICY_LOSS_FIELDS", listed)
    monkeypatch.setattr(DataParallelPPOActor, "_policy_loss", reading("my_weight"))
    try_algorithm(config_of())
