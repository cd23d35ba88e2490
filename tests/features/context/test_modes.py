"""What each mode leaves of a context, and when; a word is a token here."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from custom.env import Message
from features.context.cuts import ContextCut, DropThinking, DropToolResults, LastTurns
from features.context.due import Due
from features.context.own import OwnRule
from features.context.settings import ContextSettings
from features.context.summary import INSTEAD, Summarise
from workers.rollout.history import (
    Decision,
    HistoryFault,
    HistoryRule,
    NewContext,
    Standing,
    Writing,
    Written,
)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": "1"}


def count(messages: list[Message]) -> int:
    return sum(len(message["content"].split()) for message in messages)


TASK = [{"role": "system", "content": "be brief"}, user("the task")]
TURNS = [
    assistant("first turn"),
    user("first reply is long"),
    assistant("second turn"),
    user("second reply"),
    assistant("third turn"),
]
STANDING = Standing(
    task=TASK,
    messages=[*TASK, *TURNS],
    reply=[user("third reply")],
    turns=3,
    tokens=18,
    room=10,
    turn_tokens=4,
    max_prompt=100,
    seed=0,
    count=count,
)
FULL = replace(STANDING, room=3)


def settings(**given: Any) -> ContextSettings:
    return ContextSettings(**given)


def test_a_context_is_due_past_so_many_tokens_or_turns_or_where_it_is_full() -> None:
    assert not Due(settings()).is_due(STANDING)
    assert Due(settings()).is_due(FULL), "3 tokens are left, and a turn is to have 4"
    assert Due(settings(after_tokens=17)).is_due(STANDING)
    assert not Due(settings(after_tokens=18)).is_due(STANDING)
    assert Due(settings(after_turns=3)).is_due(STANDING)
    assert not Due(settings(after_turns=4)).is_due(STANDING)


def test_the_number_of_turns_is_drawn_for_each_context_between_two_bounds() -> None:
    due = Due(settings(after_turns=2, most_turns=5))
    drawn = [due.turns_of(seed, 2) for seed in range(200)]
    assert set(drawn) == {2, 3, 4, 5}
    assert drawn == [due.turns_of(seed, 2) for seed in range(200)]


@pytest.mark.parametrize("cls", [LastTurns, DropToolResults, DropThinking])
def test_a_context_that_is_not_due_goes_on(cls: type[ContextCut]) -> None:
    assert cls(settings(), "any").next_context(STANDING) is None


def test_last_turns_leaves_the_task_and_the_last_turns() -> None:
    rule = LastTurns(settings(after_turns=1), "last_turns")
    assert rule.next_context(STANDING) == NewContext(
        [*TASK, assistant("third turn"), user("third reply")], "last_turns"
    )
    two = LastTurns(settings(after_turns=1, keep_turns=2), "last_turns").next_context(STANDING)
    assert two is not None
    assert two.messages == [*TASK, *TURNS[2:], user("third reply")]


def test_last_turns_keeps_fewer_where_these_do_not_fit_and_makes_users_messages_one() -> None:
    tight = replace(STANDING, max_prompt=6)
    rule = LastTurns(settings(after_turns=1, keep_turns=2), "last_turns")
    assert rule.next_context(tight) == NewContext(
        [TASK[0], user("the task\n\nthird reply")], "last_turns"
    )
    assert rule.next_context(replace(STANDING, max_prompt=5)) is None


def test_what_leaves_nothing_out_is_no_new_context_unless_the_old_one_is_full() -> None:
    rule = LastTurns(settings(after_turns=1, keep_turns=3), "last_turns")
    assert rule.next_context(STANDING) is None
    cut = rule.next_context(FULL)
    assert cut is not None and cut.messages == [*TASK, *TURNS[2:], user("third reply")]


def test_a_tools_result_without_its_call_becomes_a_users_message() -> None:
    standing = replace(STANDING, reply=[tool("a result")])
    rule = LastTurns(settings(after_turns=1, keep_turns=0), "last_turns")
    new = rule.next_context(standing)
    assert new is not None and new.messages == [TASK[0], user("the task\n\na result")]


def test_drop_tool_results_leaves_the_turns_and_the_last_replies() -> None:
    rule = DropToolResults(settings(after_turns=1, keep_turns=1), "drop_tool_results")
    new = rule.next_context(STANDING)
    assert new is not None
    assert [message["content"] for message in new.messages] == [
        "be brief",
        "the task",
        "first turn",
        "[left out]",
        "second turn",
        "[left out]",
        "third turn",
        "third reply",
    ]
    again = replace(STANDING, messages=new.messages[:-1])
    assert rule.next_context(again) is None, "there is nothing left to drop"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>so</think> go", "go"),
        ("so it is</think> go", "go"),
        ("go <think>why</think> on", "go  on"),
        ("go", "go"),
        ("go <think>and is cut", "go"),
        ("<think>a</think><think>b</think>go", "go"),
    ],
)
def test_drop_thinking_leaves_what_stands_around_it(text: str, left: str) -> None:
    messages = [*TASK, assistant(text), user("r"), assistant("<think>last</think> b")]
    rule = DropThinking(settings(after_turns=1), "drop_thinking")
    new = rule.next_context(replace(STANDING, messages=messages))
    if text == left:
        assert new is None
        return
    assert new is not None
    assert new.messages[2] == assistant(left)
    assert new.messages[4] == assistant("<think>last</think> b"), "of a turn that stays"


def answered(rule: HistoryRule, standing: Standing, *texts: str) -> tuple[list[Writing], Decision]:
    """Answers what a rule has the policy write; returns that, and what it decides."""
    deciding: Any = rule.next_context(standing)
    if not isinstance(deciding, Generator):
        return [], deciding
    writings = [next(deciding)]
    for text in texts:
        try:
            writings.append(deciding.send(Written(text, len(text.split()))))
        except StopIteration as end:
            return writings, end.value
    raise AssertionError("it goes on writing")


def test_a_summary_stands_behind_the_task_and_before_the_last_turns() -> None:
    rule = Summarise(settings(after_turns=1, summary_text="So far: {summary}", summary_tokens=9))
    writings, new = answered(rule, STANDING, " a b ")
    assert writings == [Writing([user(settings().request)], 9, "summary", True)]
    assert new == NewContext(
        [
            TASK[0],
            user("the task\n\nSo far: a b"),
            assistant("third turn"),
            user("third reply"),
        ],
        "summary",
    )
    none = Summarise(settings(after_turns=1, keep_turns=0, train_summaries=False))
    writings, new = answered(none, STANDING, "a b")
    assert not writings[0].is_trained and new is not None
    assert new.messages == [
        TASK[0],
        user("the task\n\nSummary of the conversation so far:\na b\n\nthird reply"),
    ]
    assert answered(Summarise(settings()), STANDING) == ([], None), "it is not due"


def test_at_least_one_turn_is_summarised() -> None:
    rule = Summarise(settings(after_turns=1, keep_turns=5, summary_text="{summary}"))
    _, new = answered(rule, STANDING, "a b")
    assert new is not None
    assert new.messages == [
        TASK[0],
        user("the task\n\na b"),
        *TURNS[2:],
        user("third reply"),
    ]


@pytest.mark.parametrize(
    ("summary", "max_prompt", "fault"),
    [
        (
            "  ",
            100,
            "there was no room left to ask for one, in the context or of the episode's tokens "
            "(agent.max_episode_tokens)",
        ),
        ("a b c d e f g h i j k", 100, "it has 11 tokens, more than the 10 that it replaces"),
        (
            "a b c d e f g",
            12,
            "the task, a summary of 7 tokens and the last reply are more than a prompt may have "
            "(data.max_prompt_length=12)",
        ),
    ],
)
def test_a_summary_that_cannot_be_used_is_told_and_the_last_turns_stay(
    summary: str, max_prompt: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("features.context.summary.warn_first", lambda *words: told.append(words[2]))
    standing = replace(STANDING, max_prompt=max_prompt)
    _, new = answered(Summarise(settings(after_turns=1)), standing, summary)
    assert new == NewContext(
        [*TASK, assistant("third turn"), user("third reply")], "summary", fault
    )
    assert told == [f"a context's summary is not used: {fault}; {INSTEAD}"]


def test_an_empty_summary_is_told() -> None:
    deciding: Any = Summarise(settings(after_turns=1)).next_context(STANDING)
    next(deciding)
    with pytest.raises(StopIteration) as end:
        deciding.send(Written("\n", 1))
    assert end.value.value.fault == "it is empty"


OWN = """
class {name}:
    def __init__(self, turns=1):
        self.turns = turns

    def next_context(self, standing):
{body}
"""


def own(tmp_path: Path, body: str, **kwargs: Any) -> OwnRule:
    """Makes a rule of a class with this method."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    name = f"Own{len(list(tmp_path.iterdir()))}"
    file = tmp_path / f"{name.lower()}.py"
    file.write_text(OWN.format(name=name, body=lines))
    return OwnRule(f"{file}:{name}", kwargs, response_length=100)


def test_a_class_of_the_users_decides(tmp_path: Path) -> None:
    rule = own(tmp_path, "if standing.turns >= self.turns: return standing.reply", turns=3)
    assert rule.next_context(STANDING) == NewContext([user("third reply")], "own")
    assert rule.next_context(replace(STANDING, turns=2)) is None


def test_a_class_of_the_users_has_the_policy_write(tmp_path: Path) -> None:
    rule = own(
        tmp_path,
        "from workers.rollout.history import Writing\n"
        "note = yield Writing([{'role': 'user', 'content': 'Note?'}], 5, 'note')\n"
        "more = yield Writing([{'role': 'user', 'content': 'More?'}], 5, 'note')\n"
        "return [{'role': 'user', 'content': note.text + more.text}]",
    )
    writings, new = answered(rule, STANDING, "a", "b")
    assert [each.messages for each in writings] == [[user("Note?")], [user("More?")]]
    assert new == NewContext([user("ab")], "own")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 1 / 0", r"next_context \(.*own0.py:6\) raised ZeroDivisionError: .*own0.py:7"),
        ("raise SystemExit(3)", r"raised SystemExit: 3 in .*own0.py:7"),
        ("return 7", r"returned 7 \(int\); allowed: None to go on, a list of messages"),
        ("return []", r"returned \[\] \(list\); allowed: None to go on"),
        ("return ['x']", r"returned the observation \['x'\] \(list\); allowed: a string, or a"),
        ("yield 3", r"yielded 3 \(int\); allowed: None to go on"),
        (
            "from workers.rollout.history import Writing\nyield Writing(standing.reply, 0, 'x')",
            r"allowed: max_tokens of 1 or more, and a purpose of one word",
        ),
        (
            "from workers.rollout.history import Writing\nyield Writing(standing.reply, 1, 'x')",
            r"returned None behind a Writing, which a new context has to follow",
        ),
    ],
)
def test_what_a_class_of_the_users_does_wrong_ends_the_run_with_a_sentence(
    tmp_path: Path, body: str, says: str
) -> None:
    rule = own(tmp_path, body)
    with pytest.raises(HistoryFault, match=rf"agent\.context=.*own0\.py:Own0: .*{says}"):
        answered(rule, STANDING, "a", "b")


def test_a_class_that_cannot_be_made_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(HistoryFault, match=r"cannot be made: TypeError: .*unexpected keyword"):
        own(tmp_path, "return None", nonsense=1)


def test_a_class_that_asks_for_ever_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    body = "from workers.rollout.history import Writing\n"
    body += "while True: yield Writing(standing.reply, 1, 'note')"
    deciding = own(tmp_path, body).next_context(STANDING)
    assert isinstance(deciding, Generator)
    next(deciding)
    with pytest.raises(HistoryFault, match="yielded more than 100 times for one context"):
        for _ in range(1000):
            deciding.send(Written("", 0))


def test_what_a_class_writes_into_the_messages_changes_no_record(tmp_path: Path) -> None:
    standing = replace(
        STANDING,
        task=[dict(each) for each in STANDING.task],
        messages=[dict(each) for each in STANDING.messages],
        reply=[dict(each) for each in STANDING.reply],
    )
    body = "for each in [*standing.task, *standing.messages, *standing.reply]:\n"
    body += "    each['content'] = 'other'\n"
    body += "standing.messages.clear()\nstanding.reply.clear()\nstanding.task.clear()"
    assert own(tmp_path, body).next_context(standing) is None
    assert standing == STANDING


@pytest.mark.parametrize("reserved", ["-1", "100", "2.5", "'x'", "True"])
def test_a_class_may_not_reserve_what_a_row_has_not(tmp_path: Path, reserved: str) -> None:
    file = tmp_path / "reserves.py"
    file.write_text(
        f"class Reserves:\n    reserved = {reserved}\n\n    def next_context(self, standing):\n"
        "        return None\n"
    )
    with pytest.raises(HistoryFault, match=r"Reserves\.reserved=.*data\.max_response_length"):
        OwnRule(f"{file}:Reserves", {}, response_length=100)
