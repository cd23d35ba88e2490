"""Tests the checks of estimators, losses and rollout correction, users' own among them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.unit.config.helpers import (
    ACTOR,
    ROLLOUT,
    assert_refused,
    checked,
    load,
    problems_of,
    warned,
)
from training import core_algos
from training.config.cross_checks import cross_problems
from training.core_algos import registry
from training.core_algos.built_in import ESTIMATOR_NEEDS, LOSSES_SUMMED_OVER_TOKENS
from training.rollout_correction import rejection_limits


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["algorithm.adv_estimator=on_policy_distillation"],
            "algorithm.adv_estimator=on_policy_distillation needs a teacher, "
            "actor_rollout_ref.ref.model.path, or with distillation_task the policy as it began",
        ),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.adv_estimator=grpo"],
            "algorithm.filter_groups.enable=true: a group of actor_rollout_ref.rollout.n=1 never "
            "differs within itself; raise n",
        ),
        (
            ["algorithm.adv_estimator=maxrl", f"{ROLLOUT}.n=2", "algorithm.use_kl_in_reward=true"],
            "algorithm.adv_estimator=maxrl divides by a group's mean reward, and with "
            "algorithm.use_kl_in_reward=true that of wrong answers is their KL alone: set it to "
            "false, and actor_rollout_ref.actor.use_kl_loss=true instead",
        ),
        (
            ["algorithm.adv_estimator=grpo_passk"],
            "algorithm.adv_estimator=grpo_passk compares the two best of a group, and a group of "
            "actor_rollout_ref.rollout.n=1 has no second: set n above 1",
        ),
        (
            [
                "algorithm.adv_estimator=on_policy_distillation",
                "algorithm.distillation_task=grpo_passk",
            ],
            "algorithm.distillation_task=grpo_passk compares the two best of a group, and a group "
            "of actor_rollout_ref.rollout.n=1 has no second: set n above 1",
        ),
    ],
)
def test_an_estimator_that_lacks_something_is_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


@pytest.mark.parametrize("name", ["vine", "vine_redraw", "tree_grpo"])
def test_continuations_are_not_compared_with_rewards_that_have_a_kl(
    name: str, runnable: list[str]
) -> None:
    chosen = f"algorithm.adv_estimator={name}"
    found = checked(runnable, chosen, "algorithm.use_kl_in_reward=true")
    begin = f"{chosen} compares rewards with what continuations earned, which has"
    assert any(problem.startswith(begin) for problem in found)


def test_groups_of_two_can_be_compared_and_filtered(runnable: list[str]) -> None:
    passk = ("algorithm.adv_estimator=grpo_passk", f"{ROLLOUT}.n=2")
    assert checked(runnable, *passk, "algorithm.filter_groups.enable=true") == []


@pytest.mark.parametrize("mode", ["token-mean", "token-sum"])
def test_gspo_by_token_is_done_and_said(
    mode: str, runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    gspo = f"{ACTOR}.policy_loss.loss_mode=gspo"
    (sentence,) = warned(caplog, runnable, gspo, f"{ACTOR}.loss_agg_mode={mode}")
    assert sentence.startswith(f"{ACTOR}.loss_agg_mode={mode}: the paper of policy_loss.loss_mode")
    assert warned(caplog, runnable, gspo) == []
    assert warned(caplog, runnable, gspo, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum") == []


@pytest.mark.parametrize("name", ["rollout_is", "rollout_rs"])
def test_a_threshold_may_be_a_number_or_two(name: str, tmp_path: Path) -> None:
    """In YAML as on the command line."""
    key = f"algorithm.rollout_correction.{name}_threshold"
    file = tmp_path / "run.yaml"
    for written, text in (("2.0", "2.0"), ("3", "3"), ("'0.5_2.0'", "0.5_2.0"), ("1e3", "1e3")):
        file.write_text(f"algorithm: {{rollout_correction: {{{name}_threshold: {written}}}}}\n")
        for config in (load(str(file)), load(f"{key}={text}")):
            threshold = config.algorithm.rollout_correction[f"{name}_threshold"]
            assert isinstance(threshold, str)
            assert rejection_limits("token_k2", threshold.split("_")[-1]) == {
                "token_k2": (-math.inf, float(text.split("_")[-1]))
            }
    file.write_text(f"algorithm: {{rollout_correction: {{{name}_threshold: [2.0]}}}}\n")
    (problem,) = problems_of(str(file))
    assert problem.startswith(f"{key}=[2.0] (run.yaml): must be text")


def test_names_that_are_taken_without_a_look_are_registered() -> None:
    """A config with these names is checked without importing torch."""
    registered = core_algos.POLICY_LOSS_REGISTRY
    assert registered.keys() >= set(LOSSES_SUMMED_OVER_TOKENS)
    for name in LOSSES_SUMMED_OVER_TOKENS:
        assert core_algos.accepted_arguments(registered[name], {"rollout_is_weights": None}), name
    assert registry.ADV_ESTIMATOR_REGISTRY.keys() >= ESTIMATOR_NEEDS.keys()


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("algorithm.adv_estimator=grop", "grpo"),
        (f"{ACTOR}.policy_loss.loss_mode=vanila", "vanilla"),
        ("reward_model.reward_manager=naiv", "naive"),
    ],
)
def test_an_unregistered_name_is_refused_with_the_nearest(
    override: str, near: str, runnable: list[str]
) -> None:
    (problem,) = checked(runnable, override)
    key, name = override.split("=")
    assert f"{key}='{name}' is unknown" in problem
    assert f"Did you mean '{near}'?" in problem


@pytest.mark.usefixtures("registries_as_they_were")
def test_a_custom_algorithm_file_registers_before_names_are_checked(
    runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from training.core_algos import register_adv_est\n\n"
        "@register_adv_est('config_test_estimator', needs=('values',))\n"
        "def estimate(token_level_rewards, response_mask, values):\n    return values, values\n"
    )
    mine = [
        f"custom_algorithm={tmp_path / 'mine.py'}",
        "algorithm.adv_estimator=config_test_estimator",
    ]
    assert checked(runnable, *mine) == []
    assert checked(runnable, *mine, "critic.enable=false") == [
        "algorithm.adv_estimator=config_test_estimator reads a critic's values: set "
        "critic.enable=true, or null"
    ]


UNWEIGHED = """
from training.core_algos import register_policy_loss

@register_policy_loss("unweighed")
def unweighed(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    return (log_prob * 0).sum(), {}
"""


@pytest.mark.usefixtures("registries_as_they_were")
def test_a_loss_that_would_drop_the_importance_weights_is_refused(
    runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "loss.py").write_text(UNWEIGHED)
    own = (f"custom_algorithm={tmp_path}/loss.py", f"{ACTOR}.policy_loss.loss_mode=unweighed")
    correction = "algorithm.rollout_correction.rollout_is"
    assert checked(runnable, *own) == []
    (problem,) = checked(runnable, *own, f"{correction}=token")
    assert problem.startswith(
        f"{ACTOR}.policy_loss.loss_mode=unweighed takes no rollout_is_weights, which"
    )
    ahead = ("trainer.rollout_n_gpus=1", "trainer.async_level=1")
    assert any(
        "takes no rollout_is_weights" in problem for problem in checked(runnable, *own, *ahead)
    )
    assert not any(
        "rollout_is_weights" in problem
        for problem in checked(runnable, *own, *ahead, f"{correction}=off")
    )


@pytest.mark.parametrize("name", ["vanilla", "gspo", "kl_cov", "bypass_mode", "reinforce"])
def test_our_losses_take_importance_weights(runnable: list[str], name: str) -> None:
    own = (f"{ACTOR}.policy_loss.loss_mode={name}", "algorithm.rollout_correction.rollout_is=token")
    assert not any("takes no rollout_is_weights" in problem for problem in checked(runnable, *own))


def test_a_group_of_one_is_a_warning(runnable: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert warned(caplog, runnable, "algorithm.adv_estimator=grpo") == [
        f"algorithm.adv_estimator=grpo compares the responses of a group, but {ROLLOUT}.n=1: each "
        "keeps its raw score"
    ]
    assert warned(caplog, runnable, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4") == []
    assert warned(caplog, runnable, "algorithm.adv_estimator=reinforce_plus_plus") == []


def test_a_teacher_that_nothing_reads_is_refused(runnable: list[str]) -> None:
    model = runnable[0].split("=")[1]
    teacher = f"actor_rollout_ref.ref.model.path={model}"
    assert checked(runnable, teacher) == [
        f"{teacher} is not read: set {ACTOR}.use_kl_loss=true, algorithm.use_kl_in_reward=true or "
        "algorithm.adv_estimator=on_policy_distillation, or take it out"
    ]
    for reader in (
        f"{ACTOR}.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.adv_estimator=on_policy_distillation",
    ):
        assert checked(runnable, teacher, reader) == []


CUT = "agent.context=last_turns"


def row_readers(*words: str) -> list[str]:
    config = load(*words)
    sentences = cross_problems(config)
    return [each for each in sentences if "how an episode is cut into rows" in each]


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["algorithm.adv_estimator=optimal_token_baseline"], "algorithm.adv_estimator="),
        ([f"{ACTOR}.policy_loss.loss_mode=geo_mean"], f"{ACTOR}.policy_loss.loss_mode=geo_mean"),
        (
            [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.ppo_epochs=2"],
            f"{ACTOR}.policy_loss.loss_mode=gspo",
        ),
        (["agent.observation_loss_coef=0.1"], "agent.observation_loss_coef=0.1"),
        (["algorithm.use_pf_ppo=true"], "algorithm.use_pf_ppo=true"),
        (
            ["data.train_batch_size=8", "critic.ppo_mini_batch_size=4", "critic.shuffle=true"],
            "critic.shuffle=true",
        ),
    ],
)
def test_what_reads_rows_is_refused_where_contexts_are_cut(
    overrides: list[str], setting: str
) -> None:
    """Where it is not known that there are such episodes, the first batch with one is refused."""
    assert row_readers(*overrides) == []
    (sentence,) = row_readers(CUT, *overrides)
    assert sentence.startswith(f"agent.context=last_turns cuts episodes into rows, and {setting}")
    assert sentence.endswith(
        f"or set {ACTOR}.loss_agg_counts=rows, with which each row counts by itself"
    )
    assert row_readers(CUT, *overrides, f"{ACTOR}.loss_agg_counts=rows") == []


def test_gspo_is_taken_with_a_single_update_and_sizes_that_do_not_divide_raise_nothing() -> None:
    assert row_readers(CUT, f"{ACTOR}.policy_loss.loss_mode=gspo") == []
    uneven = ["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=3", f"{ACTOR}.shuffle=true"]
    assert len(row_readers(CUT, *uneven)) == 1
