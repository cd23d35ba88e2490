"""Rules register themselves: an alarm stands in one place, and a broken rule costs itself alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from data.protocol import DataProto
from features.alarms.catalogue import ADVICE, rules_in_order
from features.alarms.finding import Finding
from features.alarms.monitor import Alarms
from features.alarms.rule import ALARMS, RULES, RulesWithMemory, rule
from features.alarms.rules.batch import tokens_left_out
from features.alarms.rules.engine import EngineRules
from features.alarms.rules.lengths import LengthRules
from features.alarms.rules.rewards import RewardRules
from features.alarms.seen_step import SeenStep
from features.alarms.settings import config_problems
from tests.features.alarms.made_steps import changed, empty_batch, made_run, seen_step
from training.config import PPOConfig
from training.config.loader import load_config
from training.observers import ObservedRun, StepReport


@pytest.fixture
def own_rules() -> Iterator[None]:
    """Leaves out all rules, so that a test has its own alone."""
    rules = dict(RULES)
    alarms = dict(ALARMS)
    RULES.clear()
    ALARMS.clear()
    yield
    RULES.clear()
    ALARMS.clear()
    RULES.update(rules)
    ALARMS.update(alarms)


def run_steps(count: int, alarms: Alarms | None = None) -> list[StepReport]:
    """Shows steps of one empty episode."""
    alarms = alarms or Alarms(made_run())
    reports = []
    for step in range(1, count + 1):
        report = StepReport(step=step, batch=empty_batch())
        alarms.step_made(report)
        reports.append(report)
    return reports


def test_every_alarm_is_described_and_a_rule_rings_it() -> None:
    rung = {alarm for each in rules_in_order() for alarm in each.alarms}
    assert rung == set(ALARMS) == set(ADVICE)


def test_a_decorated_function_is_all_that_an_alarm_needs(own_rules: None) -> None:
    @rule("odd_step", advice="the calendar", waits=True, view="sort=-tokens")
    def odd_steps(seen: SeenStep) -> Iterator[Finding]:
        yield Finding("odd_step", f"step {seen.step} was seen")

    first, second = run_steps(2)
    assert first.notices == []
    [notice] = second.notices
    assert notice.text == "alarm odd_step: step 2 was seen, since step 1; check the calendar"
    assert notice.view == "list?kind=train&step=2&sort=-tokens"


def test_an_alarm_that_is_ignored_does_not_ring(own_rules: None) -> None:
    @rule("odd_step", advice="the calendar", order=10)
    def odd_steps(seen: SeenStep) -> Iterator[Finding]:
        yield Finding("odd_step", f"step {seen.step} was seen")

    @rule("even_step", advice="the clock", order=20)
    def even_steps(seen: SeenStep) -> Iterator[Finding]:
        yield Finding("even_step", f"step {seen.step} was seen")

    words = ["configs/quickstart.yaml", "alarms.mode=stop", "alarms.ignore=[odd_step]"]
    config = load_config(words, check=False).config
    alarms = Alarms(made_run(config))
    [report] = run_steps(1, alarms)
    assert [notice.name for notice in report.notices] == ["even_step"]
    [stop] = [alarms.wants_to_stop()]
    assert stop is not None and "odd_step" not in stop.reason


def test_a_name_that_no_alarm_has_is_refused() -> None:
    words = ["configs/quickstart.yaml", "alarms.ignore=[reward_difers, kl_jump]"]
    config = load_config(words, check=False).config
    [problem] = config_problems(config)
    assert "alarms.ignore has 'reward_difers'" in problem
    assert problem.endswith("Did you mean 'reward_differs'?")


def test_a_rule_with_memory_has_one_for_each_run_and_checkpoint(own_rules: None) -> None:
    class Counting(RulesWithMemory):
        name = "counting"

        def __init__(self, run: ObservedRun) -> None:
            super().__init__(run)
            self.count = 0

        @rule("counted", advice="nothing")
        def counts(self, seen: SeenStep) -> Iterator[Finding]:
            self.count += 1
            yield Finding("counted", f"{self.count}")

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

    alarms = Alarms(made_run())
    run_steps(3, alarms)
    assert alarms.state_dict() == {"counting": {"count": 3}}
    assert Alarms(made_run()).state_dict() == {"counting": {"count": 0}}


def test_what_comes_first_in_order_is_told(own_rules: None) -> None:
    @rule("twice", advice="both", order=2)
    def later(seen: SeenStep) -> Iterator[Finding]:
        yield Finding("twice", "the later one")

    @rule("twice", order=1)
    def earlier(seen: SeenStep) -> Iterator[Finding]:
        yield Finding("twice", "the earlier one")

    [report] = run_steps(1)
    assert [notice.text.split(",")[0] for notice in report.notices] == [
        "alarm twice: the earlier one"
    ]


def test_an_alarm_is_described_once(own_rules: None) -> None:
    rule("mine", advice="this")
    with pytest.raises(ValueError, match="alarm 'mine' is described twice"):
        rule("mine", advice="that")


def test_an_alarm_that_none_describes_is_refused(own_rules: None) -> None:
    @rule("bare")
    def bare(seen: SeenStep) -> Iterator[Finding]:
        yield Finding("bare", "rings")

    with pytest.raises(ValueError, match="the rule bare rings bare, and no @rule line says"):
        rules_in_order()


def test_a_rule_that_fails_or_rings_another_alarm_costs_itself_and_is_named_once(
    own_rules: None, caplog: pytest.LogCaptureFixture
) -> None:
    @rule("first", advice="a")
    def failing(seen: SeenStep) -> Iterator[Finding]:
        raise KeyError("missing")

    @rule("second", advice="b")
    def straying(seen: SeenStep) -> Iterator[Finding]:
        yield Finding("nobodys", "is not named")

    @rule("third", advice="c")
    def sound(seen: SeenStep) -> Iterator[Finding]:
        yield Finding("third", "rings")

    with caplog.at_level(logging.WARNING, logger="features.alarms"):
        reports = run_steps(2)
    assert [[notice.name for notice in report.notices] for report in reports] == [["third"]] * 2
    said = [text for text in caplog.messages if "do without" in text]
    assert said == [
        "alarms do without the rule failing: KeyError: 'missing'",
        "alarms do without the rule straying: ValueError: straying rings 'nobodys'; its @rule "
        "lines name second: add one",
    ]


@pytest.mark.parametrize("has_all", [True, False], ids=["the last form", "the first form"])
def test_a_state_of_an_older_version_is_read(has_all: bool) -> None:
    state = {"template": 7.5, "rewards": {"game": [1.0, [0.0, 1.0], 4]}}
    if has_all:
        state |= {"spread": {"past": [True, False], "flat": 3, "last": 2}, "fewest_cut": 0.125}
    alarms = Alarms(made_run())
    alarms.load_state_dict(state)
    spread = {"past": [True, False], "flat": 3, "last": 2}
    assert alarms.state_dict() == {
        "engine": {"template": 7.5},
        "rewards": {
            "sources": {"game": [1.0, [0.0, 1.0], 4, 0.0]},
            "spread": spread if has_all else {"past": [], "flat": 0, "last": 0},
        },
        "lengths": {"fewest_cut": 0.125 if has_all else 1.0},
        "turn_costs": {"most_turns": 0.0, "most_won": 0.0, "pay": 0.0},
    }
    again = Alarms(made_run())
    again.load_state_dict(alarms.state_dict())
    assert again.state_dict() == alarms.state_dict()
    assert {EngineRules, RewardRules, LengthRules} <= set(again.memories)


def test_tokens_may_be_left_out_where_a_correction_does_so() -> None:
    batch = DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([[1, 0]]),
            "turn_ids": torch.tensor([[0, 0]]),
        }
    )
    [finding] = tokens_left_out(seen_step(batch))
    assert finding.alarm == "tokens_left_out"
    config = changed(PPOConfig(), "algorithm.rollout_correction.rollout_is", "token")
    assert config.algorithm.rollout_correction.corrects
    assert not list(tokens_left_out(seen_step(batch, config=config)))


def test_rules_whose_memory_cannot_be_made_cost_themselves_and_are_named_once(
    own_rules: None, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(RulesWithMemory):
        name = "broken"

        def __init__(self, run: ObservedRun) -> None:
            raise AttributeError("lr_lambdas")

        @rule("first", advice="a")
        def never(self, seen: SeenStep) -> Iterator[Finding]:
            yield Finding("first", "rings")

    class Forgetful(RulesWithMemory):
        name = "forgetful"

        @rule("second", advice="b")
        def second(self, seen: SeenStep) -> Iterator[Finding]:
            yield Finding("second", "rings")

        def state_dict(self) -> dict[str, object]:
            raise KeyError("nothing")

    with caplog.at_level(logging.WARNING, logger="features.alarms"):
        alarms = Alarms(made_run())
        reports = run_steps(2, alarms)
        assert set(alarms.state_dict()) <= {"history"}
        alarms.load_state_dict({"forgetful": {}})
    assert [[notice.name for notice in report.notices] for report in reports] == [["second"]] * 2
    assert [text for text in caplog.messages if "do without" in text] == [
        "alarms do without the rule Broken: AttributeError: lr_lambdas",
        "alarms do without the rule state of Forgetful: KeyError: 'nothing'",
    ]
