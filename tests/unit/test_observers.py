"""Observers are told in order, cost themselves where they raise, and keep their states."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from data.protocol import DataProto
from training import observers as observing
from training import observers_of_run
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.config.resources.user_code import check_observers
from training.features import Feature
from training.observers import (
    Notice,
    ObservedRun,
    Observer,
    Observers,
    RunStopped,
    StepReport,
    StopRequest,
)
from training.observers_of_run import open_observers
from training.run import recorded_config
from training.run.checkpoint_contents import DriverState, load_driver_state, save_driver_state
from training.run.recorded_config import flat_settings


def make_run(*settings: str) -> ObservedRun:
    from training.config.loader import load_config

    words = ["configs/quickstart.yaml", "trainer.progress=off", "trainer.logger=[]", *settings]
    return ObservedRun(config=load_config(words, check=False).config, run_dir=Path("run"))


def plain_run() -> ObservedRun:
    return ObservedRun(config=PPOConfig(), run_dir=Path("run"))


def report(step: int = 1, **parts: Any) -> StepReport:
    return StepReport(step=step, batch=DataProto(), **parts)


class Counts(Observer):
    def __init__(self, name: str = "mine/steps") -> None:
        self.name = name
        self.steps = 0

    def step_made(self, report: StepReport) -> Mapping[str, float]:
        self.steps += 1
        return {self.name: float(self.steps)}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps} if self.steps else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Raising(Observer):
    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.closed_with = ""

    def step_made(self, report: StepReport) -> None:
        raise self.error

    def closed(self) -> None:
        self.closed_with = "closed"


@pytest.fixture
def costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in users' runs."""
    monkeypatch.setattr(observing, "RAISES", False)


def test_an_observer_that_raises_is_off_and_said_once(
    costs_itself: None, caplog: pytest.LogCaptureFixture
) -> None:
    raising = Raising(KeyError("mine"))
    observers = Observers(plain_run(), {"raising": raising, "counts": Counts()})
    assert [observers.step_made(report(step)) for step in (1, 2)] == [
        {"mine/steps": 1.0},
        {"mine/steps": 2.0},
    ]
    assert caplog.text.count("observer raising is off, the run goes on without it") == 1
    observers.closed()
    assert raising.closed_with == "closed"


def test_in_our_suite_it_fails_the_test() -> None:
    with pytest.raises(KeyError, match="mine"):
        Observers(plain_run(), {"raising": Raising(KeyError("mine"))}).step_made(report())


class Panic(BaseException):
    """As what a library in Rust raises."""


@pytest.mark.parametrize(
    "error", [SystemExit(3), SystemExit(), asyncio.CancelledError(), Panic("index out of range")]
)
def test_what_is_no_exception_costs_the_observer_alone_too(
    costs_itself: None, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    observers = Observers(plain_run(), {"raising": Raising(error), "counts": Counts()})
    assert observers.step_made(report()) == {"mine/steps": 1.0}
    assert observers.off == {"raising"}
    assert f"the run goes on without it: {type(error).__name__}" in caplog.text


@pytest.mark.parametrize(
    "called",
    [
        *("went_to", "run_started", "generation_begins", "generation_ends", "validation_begins"),
        *("played", "scored", "update_begins", "step_made", "validated", "checkpoint_saved"),
        "validation_made",
        *("step_logged", "wants_to_stop", "run_ended", "summary", "closed", "state_dict"),
        "load_state_dict",
    ],
)
def test_an_observer_may_leave_by_sys_exit_wherever_it_is_called(
    costs_itself: None, called: str
) -> None:
    def leave(*arguments: Any) -> None:
        sys.exit("enough")

    leaving = type("Leaves", (Observer,), {called: leave})()
    observers = Observers(plain_run(), {"leaves": leaving, "counts": Counts()})
    batch = DataProto()
    observers.load_state_dict({"leaves": {"a": 1}})
    observers.went_to(0)
    with observers.watching(0):
        observers.validation_begins(0)
        with observers.generating(1, validate=False):
            observers.played(batch)
        observers.update_begins(batch, 1)
        observers.scored(batch, torch.zeros(0, 0))
        assert observers.step_made(report()) == {"mine/steps": 1.0}
        assert observers.validation_made([]) == {}
        observers.validated(1, {}, [])
        observers.checkpoint_saved(1)
        observers.step_logged({"loss": 1.0})
        observers.stop_if_asked()
        assert observers.state_dict()["counts"] == {"steps": 1}
    assert observers.summaries() == []
    observers.closed()
    assert observers.off == {"leaves"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), torch.OutOfMemoryError()])
def test_ctrl_c_and_out_of_memory_pass_through(costs_itself: None, error: BaseException) -> None:
    with pytest.raises(type(error)):
        Observers(plain_run(), {"raising": Raising(error)}).step_made(report())


def test_a_later_observer_has_the_metrics_and_notices_of_earlier_ones() -> None:
    seen = []

    class Notices(Observer):
        def step_made(self, report: StepReport) -> None:
            report.notices.append(Notice("odd", "it is odd"))

    class Reads(Observer):
        def step_made(self, report: StepReport) -> None:
            seen.append((dict(report.metrics), list(report.notices)))

    named = {"notices": Notices(), "counts": Counts(), "reads": Reads()}
    Observers(plain_run(), named).step_made(report(metrics={"loss": 1.0}))
    assert seen == [({"loss": 1.0, "mine/steps": 1.0}, [Notice("odd", "it is odd")])]


def test_a_metric_of_the_step_is_not_changed(costs_itself: None) -> None:
    observers = Observers(plain_run(), {"counts": Counts("loss")})
    assert observers.step_made(report(metrics={"loss": 1.0})) == {}
    assert observers.off == {"counts"}


def test_the_first_that_wants_to_stop_ends_the_run() -> None:
    class Stops(Observer):
        def wants_to_stop(self) -> StopRequest:
            return StopRequest("enough tokens", 7)

    Observers(plain_run(), {"counts": Counts()}).stop_if_asked()
    with pytest.raises(RunStopped, match="enough tokens") as stopped:
        Observers(plain_run(), {"counts": Counts(), "stops": Stops()}).stop_if_asked()
    assert stopped.value.exit_code == 7


@pytest.mark.parametrize("answer", [False, True, "no", StopRequest("enough", "x")])  # type: ignore[arg-type]
def test_an_answer_that_is_no_request_costs_the_observer(costs_itself: None, answer: Any) -> None:
    class Answers(Observer):
        def wants_to_stop(self) -> Any:
            return answer

    observers = Observers(make_run(), {"answers": Answers()})
    observers.stop_if_asked()
    assert observers.off == {"answers"}


def test_metrics_without_names_and_numbers_too_large_cost_the_observer(costs_itself: None) -> None:
    class Nameless(Observer):
        def step_made(self, report: StepReport) -> Any:
            return {3: 1.0}

    class Large(Observer):
        def state_dict(self) -> dict[str, Any]:
            return {"a": 2**3000}

    observers = Observers(make_run(), {"nameless": Nameless(), "large": Large()})
    assert observers.step_made(report()) == {}
    assert observers.state_dict() == {}
    assert observers.off == {"nameless", "large"}


def test_an_observer_that_is_off_keeps_the_state_it_had(costs_itself: None) -> None:
    class Forgets(Observer):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise KeyError("another shape")

    observers = Observers(make_run(), {"forgets": Forgets()})
    observers.load_state_dict({"forgets": {"steps": 3}})
    assert observers.off == {"forgets"}
    assert observers.state_dict() == {"forgets": {"steps": 3}}


def test_how_the_run_ends_is_told_also_where_it_fails() -> None:
    ends = []

    class Ends(Observer):
        def run_ended(self, error: BaseException | None) -> None:
            ends.append(error)

    observers = Observers(plain_run(), {"ends": Ends()})
    with observers.watching(0):
        pass
    error = ValueError("of a step")
    with pytest.raises(ValueError, match="of a step"), observers.watching(0):
        raise error
    assert ends == [None, error]


def test_states_are_kept_by_name_and_those_of_others_stay() -> None:
    before = Observers(plain_run(), {"counts": Counts()})
    before.step_made(report())
    states = before.state_dict() | {"gone": {"value": 3}}
    after = Observers(plain_run(), {"counts": Counts(), "new": Counts("new/steps")})
    after.load_state_dict(states)
    assert after.step_made(report()) == {"mine/steps": 2.0, "new/steps": 1.0}
    assert after.state_dict() == {
        "counts": {"steps": 2},
        "new": {"steps": 1},
        "gone": {"value": 3},
    }


def test_a_state_that_no_checkpoint_can_keep_costs_the_observer(
    costs_itself: None, caplog: pytest.LogCaptureFixture
) -> None:
    class Keeps(Observer):
        def state_dict(self) -> dict[str, Any]:
            return {"folder": Path("somewhere")}

    observers = Observers(plain_run(), {"keeps": Keeps(), "counts": Counts()})
    observers.step_made(report())
    assert observers.state_dict() == {"counts": {"steps": 1}}
    assert "a checkpoint keeps numbers, strings" in caplog.text


def test_an_older_checkpoint_has_the_state_of_the_alarms_alone(tmp_path: Path) -> None:
    alarms = {"template": "abc", "rewards": {}, "fewest_cut": 0.5}
    older = {"global_steps": 3, "epoch": 0, "rows_done": 8, "kl_coef": 0.1, "alarms": alarms}
    torch.save(older, tmp_path / "data.pt")
    state = load_driver_state(tmp_path)
    assert (state.global_steps, state.observers) == (3, {"alarms": alarms})


def test_a_checkpoint_keeps_the_states(tmp_path: Path) -> None:
    observers = {"counts": {"steps": 2, "sums": torch.ones(2), "last": [1.5, "a", None]}}
    save_driver_state(tmp_path, DriverState(global_steps=1, observers=observers))
    assert load_driver_state(tmp_path).observers["counts"]["last"] == [1.5, "a", None]


# What a run opens


def open_counts(run: ObservedRun) -> Observer:
    return Counts()


def open_nothing(run: ObservedRun) -> None:
    return None


def raise_at_opening(run: ObservedRun) -> None:
    raise KeyError("broken")


def test_features_come_in_their_order_and_the_users_own_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "watch.py"
    file.write_text(
        "from training.observers import Observer\n"
        "class Mine(Observer):\n    pass\n"
        "class Knows(Observer):\n"
        "    def __init__(self, run):\n        self.folder = run.run_dir\n"
    )
    first = Feature(observer="tests.unit.test_observers:open_counts", observer_order=1)
    last = Feature(observer="tests.unit.test_observers:open_counts")
    off = Feature(observer="tests.unit.test_observers:open_nothing", observer_order=2)
    brought = {"a_last": last, "none": Feature(), "off": off, "z_first": first}
    monkeypatch.setattr(observers_of_run, "features", lambda: brought)
    run = make_run(f"trainer.observers=[{file}:Mine,{file}:Knows]", "trainer.logger=[console]")
    observers = open_observers(run)
    assert list(observers.named) == ["console", "z_first", "a_last", "Mine", "Knows"]
    assert vars(observers.named["Knows"])["folder"] == Path("run")
    assert list(open_observers(make_run()).named) == ["z_first", "a_last"]
    assert list(open_observers(run, []).named) == ["console"]
    assert list(open_observers(run, [Counts(), Counts()]).named) == [
        "console",
        "Counts",
        "Counts#2",
    ]


def test_a_users_observer_that_is_none_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "watch.py"
    file.write_text("class Mine:\n    pass\ndef function():\n    pass\n")

    def problems(source: str) -> list[str]:
        return list(check_observers(make_run(f"trainer.observers=[{source}]").config))

    assert "does not define 'Gone'" in problems(f"{file}:Gone")[0]
    assert "is not a file" in problems(f"{tmp_path}/none.py:Mine")[0]
    assert "is no class" in problems(f"{file}:function")[0]
    assert "write FILE.py:CLASS" in problems(f"{file}")[0]
    assert problems(f"{file}:Mine") == []
    with pytest.raises(ConfigError, match="is no observer: write"):
        open_observers(make_run(f"trainer.observers=[{file}:Mine]"))


def test_a_users_observer_that_cannot_be_made_is_refused_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "watch.py"
    file.write_text(
        "from training.observers import Observer\n"
        "class Mine(Observer):\n"
        "    def __init__(self):\n        raise RuntimeError('no such folder')\n"
    )
    with pytest.raises(ConfigError, match=r"Mine cannot be made: RuntimeError: no such folder"):
        open_observers(make_run(f"trainer.observers=[{file}:Mine]"))


def test_a_feature_that_does_not_open_costs_itself(
    costs_itself: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Feature(observer="tests.unit.test_observers:raise_at_opening")
    monkeypatch.setattr(observers_of_run, "features", lambda: {"broken": broken})
    assert "broken" not in open_observers(make_run()).named
    assert "the run goes on without the feature broken" in caplog.text


def test_a_config_that_was_recorded_under_older_keys_is_read_under_the_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = {"trainer.older_seed": "data.seed", "agent.older_length": "data.max_prompt_length"}
    monkeypatch.setattr(recorded_config, "moved_keys", lambda: moved)
    older = "trainer:\n  older_seed: 7\nagent:\n  older_length: 9\n  max_turn: 3\n"
    assert flat_settings(older) == {
        "data.seed": 7,
        "data.max_prompt_length": 9,
        "agent.max_turn": 3,
    }


class Notices(Observer):
    """Appends something to the notices of each step."""

    def __init__(self, notice: Any) -> None:
        self.notice = notice

    def step_made(self, report: StepReport) -> None:
        report.notices.append(self.notice)


@pytest.mark.parametrize(
    "notice", [("name", "text"), "text", Notice(None, "text"), Notice("name", "text", 5)]
)
def test_what_is_no_notice_costs_the_one_that_appended_it(costs_itself: None, notice: Any) -> None:
    observers = Observers(plain_run(), {"good": Notices(Notice("a", "b")), "bad": Notices(notice)})
    made = report()
    observers.step_made(made)
    assert observers.off == {"bad"}
    assert made.notices == [Notice("a", "b")]


class Texts(Observer):
    """Names and says what no UTF-8 can hold."""

    def step_made(self, report: StepReport) -> dict[str, float]:
        report.notices.append(Notice("n\ud800", "t\ud800", "v\ud800"))
        return {"mine/\ud800": 1.0}

    def summary(self) -> Any:
        return "sum\ud800"


def test_what_no_utf8_can_hold_is_replaced_where_an_observer_gives_it() -> None:
    observers = Observers(plain_run(), {"texts": Texts()})
    made = report()
    assert observers.step_made(made) == {"mine/?": 1.0}
    assert made.notices == [Notice("n?", "t?", "v?")]
    assert observers.summaries() == ["sum?"]


class FiveForASummary(Observer):
    def summary(self) -> Any:
        return 5


def test_a_summary_that_is_no_text_costs_the_observer(costs_itself: None) -> None:
    observers = Observers(plain_run(), {"bad": FiveForASummary(), "texts": Texts()})
    assert observers.summaries() == ["sum?"]
    assert observers.off == {"bad"}


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_that_cannot_say_what_it_is_is_told_all_the_same(
    costs_itself: None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    observers = Observers(plain_run(), {"mute": Raising(Mute())})
    observers.step_made(report())
    assert "observer mute is off, the run goes on without it: Mute: (its __str__" in caplog.text
    assert "Logging error" not in capsys.readouterr().err
