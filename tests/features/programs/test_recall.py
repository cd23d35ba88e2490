"""What clients see of an answer, and how it is known again; what pays a program."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from custom.env import BadRewardFunction
from custom.tools.parsers import get_parser
from features.programs.attempt import without_beginnings
from features.programs.exchange import Answer, AnsweredCompletion, AskedCompletion, Earned
from features.programs.play import cut_completion, first_stop
from features.programs.protocols import PROTOCOLS
from features.programs.recall import Recall
from features.programs.report import NoReward, report_of_output
from features.programs.rewards import ProgramReward
from features.shared.conversations import Conversations
from tests.features.programs.hostile import TOOL
from tests.unit.test_turn_tokens import turn_tokens
from workers.rollout.engine import Completion, VersionSpan
from workers.rollout.episode import TurnLimits
from workers.rollout.speaker import Speaker

ASKED = [{"role": "user", "content": "Hello"}]


def shown(recall: Recall, text: str, number: int = 1, **asked: Any) -> AnsweredCompletion:
    request = AskedCompletion(**({"messages": ASKED} | asked))
    return shown_to(recall, request, Answer(text=text), number)


def shown_to(
    recall: Recall, request: AskedCompletion, answer: Answer, number: int = 1
) -> AnsweredCompletion:
    before = recall.recalled(request.messages, request.speaker).digest
    return recall.shown(request, "id", number, answer, before)


def test_thinking_is_told_apart_and_comes_back_as_it_was_sampled() -> None:
    recall = Recall(get_parser("function"))
    first = "<think>\nTwo and two\n</think>\n\n4"
    second = "<think>\nCounting\n</think>\n\n4"
    answer = shown(recall, first)
    assert (answer.thinking, answer.text) == ("Two and two", "4")
    other = [{"role": "user", "content": "Other"}]
    shown(recall, second, 2, messages=other)
    for asked, sampled, thinking in ((ASKED, first, "Two and two"), (other, second, "Counting")):
        answered = {"role": "assistant", "content": "4", "reasoning_content": thinking}
        sent = [*asked, answered, {"role": "user", "content": "?"}]
        assert recall.recalled(sent).messages[1] == {"role": "assistant", "content": sampled}


DROPPED = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("thinking", ["Another thought", "Two and", None])
def test_an_answer_whose_thinking_is_dropped_or_changed_reads_as_it_was_sent(
    thinking: str | None,
) -> None:
    recall = Recall(get_parser("function"))
    shown(recall, "<think>\nTwo and two\n</think>\n\n4")
    sent = [*ASKED, DROPPED if thinking is None else DROPPED | {"reasoning_content": thinking}]
    assert recall.recalled(sent).messages == sent


def test_thinking_that_was_dropped_is_added_again_where_a_run_wants_that() -> None:
    sampled = "<think>\nTwo and two\n</think>\n\n4"
    recall = adding()
    shown(recall, sampled)
    further = [*ASKED, DROPPED, {"role": "user", "content": "?"}]
    shown(recall, "<think>\nHm.\n</think>\n\n5", messages=further)
    # It comes back now, and is dropped then.
    back = [*ASKED, DROPPED | {"reasoning_content": "Two and two"}, further[-1]]
    for sent in (further, back):
        answered = [*sent, {"role": "assistant", "content": "5"}]
        recalled = recall.recalled(answered).messages
        assert [recalled[1]["content"], recalled[3]["content"]] == [
            sampled,
            "<think>\nHm.\n</think>\n\n5",
        ]


def test_an_answer_of_no_thoughts_has_none_to_drop() -> None:
    recall = Recall(get_parser("function"))
    shown(recall, "<think>\n\n</think>\n\n4")
    [_, answer] = recall.recalled([*ASKED, DROPPED]).messages
    assert answer["content"] == "<think>\n\n</think>\n\n4"


def sent_back(path: str, written: dict[str, Any]) -> dict[str, Any]:
    """Makes the request that goes on behind an answer, as clients do that keep all of it."""
    user = {"role": "user", "content": "Hello"}
    if path == "/responses":
        return {"input": [user, *written["output"], user]}
    answer = {"role": "assistant", "content": written.get("content")}
    if path == "/chat/completions":
        answer = written["choices"][0]["message"]
    return {"messages": [user, answer, user], "max_tokens": 9}


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
@pytest.mark.parametrize("text", ["4", ""])
@pytest.mark.parametrize("calls", [False, True])
def test_each_protocol_shows_thinking_and_takes_it_back(path: str, text: str, calls: bool) -> None:
    protocol = PROTOCOLS[path]
    sampled = f"<think>\nTwo  and\ntwo\n</think>\n\n{text}"
    if calls:
        sampled += '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    asked = AskedCompletion(messages=ASKED, shows_thinking=True, tools=[TOOL] if calls else None)
    for adds_thinking in (False, True):
        recall = Recall(get_parser("function"), adds_thinking=adds_thinking)
        written = protocol.write(asked, shown_to(recall, asked, Answer(text=sampled)))
        read = protocol.read(json.loads(json.dumps(sent_back(path, written))))
        recalled = recall.recalled(read.messages).messages
        assert recalled[1] == {"role": "assistant", "content": sampled}
        for message in read.messages:
            message.pop("reasoning_content", None)
        recalled = recall.recalled(read.messages).messages
        assert (recalled[1]["content"] == sampled) == adds_thinking


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_row_begins_anew_behind_thinking_that_was_dropped_and_grows_otherwise(
    is_dropped: bool,
) -> None:
    recall = Recall(get_parser("function"))
    sampled = "<think>\nTwo and two\n</think>\n\n4"
    shown(recall, sampled)
    tokens = turn_tokens("smollm2")
    limits = TurnLimits(prompt_length=300, response_length=300, max_model_len=600)
    talk = Conversations(tokens, limits, [])
    place = talk.place(ASKED, None)
    assert place is not None
    ids = tokens.tokenizer.encode(f"{sampled}<|im_end|>", add_special_tokens=False)
    completion = Completion(
        request_id="0.1", token_ids=ids, log_probs=[-1.0] * len(ids), finish_reason="stop"
    )
    talk.enter(place).append_sampled(completion, 0)
    talk.leave(place, 0, ids)
    answer = DROPPED if is_dropped else DROPPED | {"reasoning_content": "Two and two"}
    later = talk.place(recall.recalled([*ASKED, answer, *ASKED]).messages, None)
    assert later is not None and later.kind == ("begins" if is_dropped else "grows")
    assert ("Two and" in tokens.tokenizer.decode(later.row.token_ids)) == (not is_dropped)


def adding() -> Recall:
    """Knows an answer again also without its thinking."""
    return Recall(get_parser("function"), adds_thinking=True)


SECRET = "<think>\nA secret.\n</think>\n\nYes"
YES = {"role": "assistant", "content": "Yes"}
FURTHER = {"role": "user", "content": "And now?"}
MADE_UP = {
    "an example in another conversation": [
        {"role": "system", "content": "Judge."},
        *ASKED,
        YES,
        FURTHER,
    ],
    "another question": [{"role": "user", "content": "Is the sky blue?"}, YES, FURTHER],
    "a conversation that the assistant begins": [YES, FURTHER],
    "a second one behind the policy's own": [*ASKED, YES, FURTHER, YES, FURTHER],
    "a history that was cut": [FURTHER, YES, FURTHER],
    "behind a message that was changed": [{"role": "user", "content": "Hello!"}, YES, FURTHER],
    "behind another's words": [*ASKED, {"role": "user", "content": "B: No"}, YES, FURTHER],
    "two in a row": [*ASKED, {"role": "assistant", "content": "No"}, YES, FURTHER],
}


@pytest.mark.parametrize("case", MADE_UP)
def test_a_message_that_looks_like_an_answer_stays_its_clients(case: str) -> None:
    """Few-shot examples, other agents' words and rewritten histories held others' thinking."""
    recall = adding()
    shown(recall, SECRET)
    sent = MADE_UP[case]
    recalled = recall.recalled(sent).messages
    own = 1 if case == "a second one behind the policy's own" else None
    assert [place for place, message in enumerate(recalled) if message != sent[place]] == (
        [] if own is None else [own]
    )


def test_a_speakers_answer_is_no_other_speakers() -> None:
    recall = adding()
    solver, critic = Speaker("solver"), Speaker("critic")
    shown(recall, SECRET, speaker=solver)
    sent = [*ASKED, YES, FURTHER]
    assert recall.recalled(sent, solver).messages[1]["content"] == SECRET
    assert recall.recalled(sent, critic).messages == sent == recall.recalled(sent).messages


def test_where_two_answers_look_alike_the_text_counts_as_it_was_sent() -> None:
    recall = adding()
    sent = [*ASKED, YES, FURTHER]
    for _ in range(2):
        shown(recall, SECRET)
        assert recall.recalled(sent).messages[1]["content"] == SECRET
    shown(recall, "<think>\nAnother.\n</think>\n\nYes")
    assert recall.recalled(sent).messages == sent
    shown(recall, SECRET)
    assert recall.recalled(sent).messages == sent


def test_a_call_comes_back_as_it_was_written_unless_the_client_changed_it() -> None:
    recall = Recall(get_parser("function"))
    text = 'So: <tool_call>{"name":"add",  "arguments": {"a": 1}}</tool_call>'
    answer = shown(recall, text, tools=[TOOL])
    [call] = answer.calls
    assert (answer.text, call.name, json.loads(call.arguments)) == ("So:", "add", {"a": 1})
    assert answer.finish_reason == "tool_calls"
    function = {"name": "add", "arguments": {"a": 1}}
    sent = {"role": "assistant", "content": "So:", "tool_calls": [{"function": function}]}
    assert recall.recalled([*ASKED, sent]).messages[1]["content"] == text
    changed = {**sent, "tool_calls": [{"function": {**function, "arguments": {"a": 2}}}]}
    assert recall.recalled([*ASKED, changed]).messages[1] == changed


def test_what_cannot_be_read_as_a_call_is_text_and_is_counted() -> None:
    recall = Recall(get_parser("function"))
    text = '<tool_call>{"name": "add", </tool_call>'
    answer = shown(recall, text, tools=[TOOL])
    assert (answer.text, answer.calls, recall.unread) == (text, [], 1)
    assert shown(recall, "a call: add(a=1)").calls == []
    unasked = shown(recall, '<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    assert not unasked.calls, "nobody offered a tool"


def test_a_stop_text_is_left_out_of_what_a_client_sees() -> None:
    recall = Recall(get_parser("function"))
    request = AskedCompletion(messages=ASKED)
    answer = shown_to(recall, request, Answer(text="one STOP", stop="STOP"))
    assert answer.text == "one "
    sent = [*ASKED, {"role": "assistant", "content": "one"}]
    assert recall.recalled(sent).messages[1]["content"] == "one STOP"


def test_an_answer_that_a_later_request_goes_on_from_stays_though_nobody_took_it() -> None:
    tokens = turn_tokens("smollm2")
    limits = TurnLimits(prompt_length=300, response_length=300, max_model_len=600)
    talk = Conversations(tokens, limits, [])
    place = talk.place(ASKED, None)
    assert place is not None
    ids = tokens.tokenizer.encode("Yes.<|im_end|>", add_special_tokens=False)
    row = talk.enter(place)
    completion = Completion(
        request_id="0.1", token_ids=ids, log_probs=[-1.0] * len(ids), finish_reason="stop"
    )
    row.append_sampled(completion, 0)
    talk.leave(place, 0, ids)
    following = [*ASKED, {"role": "assistant", "content": "Yes."}, *ASKED]
    later = talk.place(following, None)
    assert later is not None and later.kind == "grows"
    talk.enter(later)
    assert not talk.retract(0)
    talk.drop(later)
    assert row.spans and len(row.ids) == len(ids)


def test_a_cut_completion_keeps_the_versions_of_its_tokens() -> None:
    versions = (VersionSpan(3, 0, 2), VersionSpan(4, 2, 5))
    whole = Completion(
        request_id="0.1",
        token_ids=[1, 2, 3, 4, 5],
        log_probs=[-1.0] * 5,
        finish_reason="length",
        versions=versions,
    )
    assert cut_completion(whole, 5) is whole
    assert cut_completion(whole, 3).versions == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    assert cut_completion(whole, 2).versions == (VersionSpan(3, 0, 2),)
    assert first_stop("a b c", ("c", "b", "x")) == "b" and first_stop("a", ()) is None


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("1", 1.0),
        ("words\n-0.5\n\n", -0.5),
        ('{"reward": 2, "why": "x"}', 2.0),
        ("true", 1.0),
        ("\ufeff0.5", 0.5),
        ('{"reward": 1, "note": "a\u2028b\x85c"}', 1.0),
        ("10 %\r100 %\r0.5\r\n", 0.5),
    ],
)
def test_the_last_line_pays(output: str, reward: float) -> None:
    assert report_of_output(output).reward == reward


@pytest.mark.parametrize(
    "output",
    [
        "",
        "words",
        "NaN",
        '{"score": 1}',
        "[1]",
        '"1"',
        "null",
        "1e400",
        "[" * 5000,
        '{"conversations": [1]}',
        '{"conversations": {"a": 1}}',
        '{"conversations": {"a": {"reward": "1"}}}',
        '{"reward": 1, "metrics": [1]}',
    ],
)
def test_what_is_no_reward_is_told(output: str) -> None:
    with pytest.raises(NoReward):
        report_of_output(output)


def test_the_last_line_may_pay_each_conversation_and_name_numbers() -> None:
    said = {
        "conversations": {"a": {"reward": 0.5}, "b": {"trained": False}},
        "metrics": {"steps": 3, "name": "x", "nothing": float("nan")},
    }
    report = report_of_output(json.dumps(said))
    assert report.reward is None
    assert report.earned == {"a": Earned(reward=0.5), "b": Earned(trained=False)}
    assert report.metrics == {"steps": 3.0}


def test_a_reward_function_gets_what_it_asks_for_by_name() -> None:
    assert ProgramReward(lambda output: float(output)).run({}, "3", []) == 3.0
    assert ProgramReward(lambda task, conversations: len(conversations)).run({}, "", [[], []]) == 2
    own = partial(lambda output, models: float(output) + len(models), models="ab")
    assert ProgramReward(own).run({}, "3", []) == 5.0, "what the config names stays"
    with pytest.raises(BadRewardFunction, match="ZeroDivisionError"):
        ProgramReward(lambda task: 1 / 0).run({}, "", [])


def test_a_conversation_that_another_begins_with_is_told_once() -> None:
    a, b, c = ({"content": text} for text in "abc")
    assert without_beginnings([[a], [a, b], [c], [a, c]]) == [[c], [a, c], [a, b]]
