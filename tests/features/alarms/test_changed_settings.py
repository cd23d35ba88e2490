"""A run that goes on with other settings names them where an alarm may come of them, and first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from features.alarms.monitor import Alarms
from features.alarms.rule import ALARMS
from features.alarms.rules.rewards import EARNED_MORE, EARNS_ALL_THERE_IS, SourceRewards
from tests.features.alarms.made_steps import empty_batch
from training.config import PPOConfig
from training.config.leaves import leaves
from training.observers import Notice, ObservedRun, StepReport

LR = "actor_rollout_ref.actor.optim.lr"
FASTER = {LR: (1e-4, 1e-2)}
CALM = {"actor/ppo_kl": 0.001, "actor/entropy": 2.0, "canary/actor_moved": 0.01}
# A KL that cannot be negative rings an alarm of its own, ahead of jumps.
MOVED = {"actor/ppo_kl": 0.4, "actor/kl_loss": -0.1, "canary/actor_moved": 0.8}


def played(
    steps: Sequence[Mapping[str, float]],
    changes: Mapping[str, tuple[Any, Any]],
    *,
    behind: int = 0,
    alarms: Alarms | None = None,
    run_dir: Path = Path(),
) -> tuple[Alarms, list[list[Notice]]]:
    """Shows steps behind a step, with changed settings; returns what was told in each."""
    run = ObservedRun(config=PPOConfig(), run_dir=run_dir, changes=changes)
    shown = Alarms(run)
    if alarms is not None:
        # As it lies in a checkpoint.
        shown.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    shown.run_started(behind, ())
    told = []
    for number, metrics in enumerate(steps, start=behind + 1):
        report = StepReport(step=number, batch=empty_batch(), metrics=metrics)
        shown.step_made(report)
        told.append(report.notices)
    return shown, told


@pytest.mark.seconds
def test_a_jump_behind_another_learning_rate_names_it_at_once_and_before_its_symptoms() -> None:
    before, _ = played([CALM] * 3, {})
    _, [first] = played([MOVED], FASTER, behind=3, alarms=before)
    assert [notice.name for notice in first] == ["kl_jump", "kl_negative"]
    cause = f"; behind step 3 the run went on with {LR}=0.01 in place of 0.0001; check the"
    assert cause in first[0].text and "went on" not in first[1].text


def test_a_jump_that_no_change_explains_waits_and_stands_in_its_place() -> None:
    before, _ = played([CALM] * 3, {})
    other = {"trainer.save_freq": (1, 2), "critic.optim.lr": (1e-4, 1e-2)}
    _, [first, second] = played([MOVED] * 2, other, behind=3, alarms=before)
    assert [notice.name for notice in first] == ["kl_negative"]
    assert not any("went on" in notice.text for notice in (*first, *second))


@pytest.mark.parametrize("changes", [{}, FASTER], ids=["as before", "faster"])
def test_a_run_that_goes_on_calmly_rings_nothing(changes: dict[str, Any]) -> None:
    before, _ = played([CALM] * 3, {})
    _, told = played([CALM] * 30, changes, behind=3, alarms=before)
    assert not any(told)


def test_a_change_is_no_cause_for_ever() -> None:
    _, told = played([*[CALM] * 20, MOVED, MOVED], FASTER, behind=3)
    assert told[20:] and not any("went on" in notice.text for step in told for notice in step)


def test_a_change_is_known_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "config.1.yaml").write_text(f"# steps 1 to 3\n{nested('0.0001')}")
    (tmp_path / "config.yaml").write_text(nested("0.01"))
    _, [notices] = played([{"actor/ppo_kl": 0.9}], {}, behind=4, run_dir=tmp_path)
    [jump] = notices
    assert f"behind step 3 the run went on with {LR}=0.01 in place of 0.0001" in jump.text


def nested(rate: str) -> str:
    return f"actor_rollout_ref: {{actor: {{optim: {{lr: {rate}}}}}}}\n"


def test_of_many_changes_three_are_named() -> None:
    keys = ("optim.lr", "ppo_epochs", "grad_clip", "clip_ratio", "clip_ratio_c")
    changes = {f"actor_rollout_ref.actor.{key}": (1, 2) for key in keys}
    _, [[jump]] = played([{"actor/ppo_kl": 0.9}], changes, behind=1)
    assert jump.text.count("in place of") == 3 and ", 2 more; check" in jump.text


def test_settings_that_alarms_name_are_there() -> None:
    keys = tuple(dict(leaves(PPOConfig())))
    for alarm in ALARMS.values():
        for end in alarm.settings:
            assert any(key.endswith(end) for key in keys), f"{alarm.name}: {end}"


def test_constant_rewards_are_advised_by_what_was_earned_before() -> None:
    source = SourceRewards()
    source.add([0.0] * 16)
    assert source.advice(0.0) == ""
    source.add([0.0] * 15 + [1.0])
    source.add([0.0] * 64)
    assert source.advice(0.0) == EARNED_MORE
    solved = SourceRewards()
    solved.add([1.0] * 32)
    assert solved.is_suspicious(1.0) and solved.advice(1.0) == EARNS_ALL_THERE_IS


@pytest.mark.parametrize(
    ("rewards", "is_near"),
    [([1.0] * 30 + [0.0], True), ([1.0] * 20 + [0.0] * 5, False), ([0.5] * 9, False)],
)
def test_entropy_may_fall_where_the_task_is_all_but_solved(
    rewards: list[float], is_near: bool
) -> None:
    source = SourceRewards()
    assert not source.is_nearly_solved(rewards)
    source.add([0.0, 1.0, 0.5])
    assert source.is_nearly_solved(rewards) == is_near
