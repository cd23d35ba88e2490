"""What a step's episodes tell of their environments: different tasks, failures, masks, crashes of
one group.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from custom.tools import Tool, ToolDefinition, ToolError, ToolRegistry
from custom.tools.parsers import ToolCall
from training.run.abort_policy import EnvironmentsFail, FailureWatch, require_same_tasks
from training.run.console import format_line
from training.run.metrics.episode_metrics import episode_metrics
from workers.environments.reply import (
    MAX_NUMBERS,
    MAX_TEXT_CHARS,
    MAX_TEXTS,
    StepReply,
    numbers,
    read_reply,
    task_name,
    texts,
    tool_calls,
    write_reply,
)

NAMES = ["game", "other"]


def fact(group: int = 0, **own: Any) -> dict[str, Any]:
    plain = {
        "ending": "done",
        "error": "",
        "environment": 0,
        "group": group,
        "begins": "a",
        "turns": 2,
        "attempts": 1,
    }
    plain |= {
        "cut_turns": 0,
        "cut_observations": 0,
        "env_seconds": 0.1,
        "seconds": 0.2,
        "tool_calls": [],
        "reward": 1.0,
        "masked": False,
        "info": {},
    }
    return plain | own


def test_members_of_a_group_that_begin_differently_stop_the_run() -> None:
    require_same_tasks(
        [fact(0), fact(0), fact(1, begins="b"), fact(1, begins="b"), fact(1, begins="")], NAMES
    )
    with pytest.raises(
        EnvironmentsFail, match=r"environment other: in 1 of 2 groups .*allow_different_tasks=true"
    ):
        require_same_tasks(
            [fact(0), fact(1, environment=1), fact(1, environment=1, begins="b")], NAMES
        )


def test_a_run_whose_environments_fail_for_three_steps_stops_with_the_first_error() -> None:
    watch = FailureWatch(0.5)
    bad = [
        fact(ending="env_crash", error="ZeroDivisionError: why"),
        fact(ending="env_timeout"),
        fact(),
    ]
    watch.check(bad)
    watch.check(bad)
    with pytest.raises(
        EnvironmentsFail, match=r"6 of 9 attempts .*max_failure_rate=0.5.*ZeroDivisionError: why"
    ):
        watch.check(bad)


def test_three_steps_together_count_and_retries_do_too() -> None:
    watch = FailureWatch(0.5)
    watch.check([fact(ending="env_crash")] * 4)
    watch.check([fact()] * 4)
    # Three of four attempts failed, seven of sixteen in all.
    watch.check([fact(attempts=4)] + [fact()] * 4)
    watch.check([fact()] * 4)
    never = FailureWatch(1.0)
    for _ in range(4):
        never.check([fact(ending="env_crash")])


def test_masked_episodes_and_groups_are_counted_and_stand_on_the_console() -> None:
    facts = [
        fact(0),
        fact(0, masked=True),
        fact(1, masked=True),
        fact(1, masked=True, ending="env_crash", attempts=4),
    ]
    metrics = episode_metrics(facts, ["game"])
    assert (metrics["agent/masked"], metrics["agent/masked_groups"]) == (3, 1)
    assert (metrics["agent/failed"], metrics["agent/episodes"], metrics["agent/retries"]) == (
        1,
        4,
        3,
    )
    line = format_line(metrics, step=1)
    assert "failed 1 of 4 | masked 3 of 4 | retries 3" in line and "overflow" not in line


def test_several_environments_have_metrics_each() -> None:
    facts = [
        fact(0, reward=3.0),
        fact(1, environment=1, reward=1.0),
        fact(1, environment=1, reward=9.0, masked=True),
    ]
    metrics = episode_metrics(facts, NAMES)
    assert metrics["env/game/reward"] == 3.0 and metrics["env/other/reward"] == 1.0
    assert metrics["env/other/episodes"] == 2
    assert not any(name.startswith("env/") for name in episode_metrics(facts[:1], ["game"]))


def test_a_group_that_crashes_more_often_than_the_others_is_an_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calm = [fact(group) for group in range(4) for _ in range(8)]
    with caplog.at_level(logging.WARNING):
        episode_metrics(
            [*calm, *(fact(4, attempts=2) for _ in range(4)), *(fact(4) for _ in range(4))],
            ["game"],
        )
    assert "group 4 crashed in 4 of 12 attempts, the others in 0 of 32" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        episode_metrics([fact(group, attempts=2) for group in range(4) for _ in range(8)], ["game"])
    assert "attempts" not in caplog.text


def test_numbers_of_info_are_metrics_of_the_episodes_that_give_them() -> None:
    facts = [
        fact(info={"won": 1.0, "lives": 3.0}),
        fact(info={"won": 0.0}),
        fact(info={"won": 9.0}, masked=True),
    ]
    metrics = episode_metrics(facts, ["game"])
    assert (metrics["agent/info/won/mean"], metrics["agent/info/lives/mean"]) == (0.5, 3.0)


def test_of_an_info_finite_numbers_leave_the_environments_home() -> None:
    given = {
        "won": True,
        "steps": np.int64(4),
        "share": 0.5,
        "bad": float("nan"),
        "text": "x",
        5: 1.0,
        "x" * 65: 1.0,
    }
    assert numbers(given) == {"won": 1.0, "steps": 4.0, "share": 0.5}
    assert len(numbers({str(i): i for i in range(100)})) == MAX_NUMBERS
    assert numbers({"no float holds it": 10**400, "won": 1}) == {"won": 1.0}


def test_of_an_info_short_texts_leave_the_environments_home() -> None:
    given = {
        "hint": "above 4",
        "task": "guess",
        "won": True,
        5: "x",
        "x" * 65: "y",
        "long": "z" * 9_000,
    }
    found = texts(given)
    assert found.keys() == {"hint", "long"} and found["hint"] == "above 4"
    assert len(found["long"]) == MAX_TEXT_CHARS and "left out" in found["long"]
    assert len(texts({str(i): "x" for i in range(100)})) == MAX_TEXTS
    reply = StepReply(reward=1.0, texts=found)
    assert read_reply(write_reply(reply, "step")).texts == found


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_the_first_exception_of_a_tool_is_logged_with_its_place(
    timeout_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Tool):
        definition = ToolDefinition(f"broken_{timeout_s}", "Fails.", timeout_s=timeout_s)
        error: Exception

        def execute(self) -> str:
            raise self.error

    registry = ToolRegistry([Broken()])
    name = Broken.definition.name
    errors = (ToolError("meant"), KeyError("boom"), KeyError("bang"))
    for Broken.error in errors:
        # As it travels from the process that has the tool.
        info = {"tool_calls": [registry.execute(ToolCall(name)).as_info()]}
        episode_metrics([fact(tool_calls=tool_calls(info))])
    [warning] = caplog.records
    assert warning.levelname == "WARNING"
    assert warning.getMessage().startswith(f"tool {name}: KeyError: 'boom' in ")
    assert "test_episode_facts.py:" in warning.getMessage()


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ({"task": "room 3"}, "room 3"),
        ({"task": "x" * 500}, "x" * 64),
        ({"task": ""}, ""),
        ({"task": 3}, ""),
        ({"task": {"row": 1}}, ""),
        ({"task": None}, ""),
        ({}, ""),
    ],
)
def test_a_text_in_a_steps_info_names_the_task(info: dict[str, Any], name: str) -> None:
    assert task_name(info) == name
    travelled = read_reply(write_reply(StepReply(task=task_name(info)), "step"))
    assert travelled.task == name


@pytest.mark.parametrize(
    ("call", "record"),
    [
        ({"name": "look"}, (True, "", 0.0)),
        ({"name": "look", "ok": True, "seconds": 2}, (True, "", 2.0)),
        ({"name": "look", "ok": False}, (False, "unnamed", 0.0)),
        ({"name": "look", "error_kind": "timeout"}, (False, "timeout", 0.0)),
        ({"name": "look", "error": "no such room"}, (False, "unnamed", 0.0)),
        ({"name": "look", "ok": np.bool_(False), "error_kind": None}, (False, "unnamed", 0.0)),
        ({"name": "look", "ok": 1, "seconds": float("nan")}, (True, "", 0.0)),
        ({"name": "look", "seconds": "soon"}, (True, "", 0.0)),
    ],
)
def test_an_environments_record_of_a_call_is_completed(
    call: dict[str, Any], record: tuple[Any, ...]
) -> None:
    [found] = tool_calls({"tool_calls": [call]})
    assert found["name"] == "look"
    assert (found["ok"], found["error_kind"], found["seconds"]) == record
    reply = read_reply(write_reply(StepReply(tool_calls=[found]), "step"))
    assert reply.tool_calls == [found]
    assert episode_metrics([fact(tool_calls=[found])])["tool/look/calls"] == 1


def test_what_names_no_tool_is_no_call() -> None:
    for call in ("look", {"ok": True}, {"name": ""}, {"name": 3}, None):
        assert tool_calls({"tool_calls": [call]}) == []


def test_a_result_that_is_cut_is_counted_and_told() -> None:
    class Long(Tool):
        definition = ToolDefinition("long", "Says much.")

        def execute(self) -> str:
            return "x" * 500

    record = ToolRegistry([Long()]).execute(ToolCall("long"), max_chars=200)
    assert record.chars_left_out == 300
    [call] = tool_calls({"tool_calls": [record.as_info()]})
    assert call["chars_left_out"] == 300
    metrics = episode_metrics([fact(tool_calls=[call], cut_observations=1)])
    assert (metrics["tool/long/cut"], metrics["agent/cut_observations"]) == (1.0, 1.0)
    whole = ToolRegistry([Long()]).execute(ToolCall("long"))
    assert "chars_left_out" not in whole.as_info()
