"""Calls of turns that a limit cut: what is not finished is never executed, in any form.

Each turn is cut behind each of its characters. What is executed then must be what the whole turn's
first calls are: none with fewer arguments, none with a shorter text, none that the whole turn has
not.
"""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from custom.tools import (
    ActionParser,
    MultiTurnManager,
    Tool,
    ToolCall,
    ToolDefinition,
    ToolRegistry,
    get_parser,
)
from custom.tools.vllm_parsers import VLLMParser
from data.cut_text import CutText
from tests.zoo.tool_forms import TOOL_FORMS
from tests.zoo.tool_proofs import CALLED, PlayedForm
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode import Ask, Episode, Sample, TurnLimits
from workers.rollout.episode_play import play_episode


class Note(Tool):
    """Notes what it is called with."""

    definition = ToolDefinition(
        name="note",
        description="Notes.",
        parameters={
            "type": "object",
            "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["q"],
        },
    )

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []

    def execute(self, q: str, n: int = 0) -> str:
        """Answers."""
        self.got.append({"q": q, "n": n})
        return "noted"


class Rest(Tool):
    """Takes nothing, and notes that it was called."""

    definition = ToolDefinition(name="rest", description="Rests.")

    def __init__(self, note: Note) -> None:
        self.note = note

    def execute(self) -> str:
        """Answers."""
        self.note.got.append({})
        return "rested"


class CallLines(ActionParser):
    """Reads CALL NAME TEXT on a line: a parser of a user's, which knows of no cuts."""

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls."""
        return [ToolCall(*found.groups()) for found in re.finditer(r"CALL (\w+) (\w+)", text)]


def played(parser: ActionParser, text: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Plays a turn; returns what was executed, and the kinds of what was not."""
    tool = Note()
    turn = MultiTurnManager(ToolRegistry([tool, Rest(tool)]), parser).step(text)
    return tool.got, [record.error_kind for record in turn.calls if record.error_kind]


def parser_of(name: str) -> ActionParser:
    """Returns a parser by name, or a user's."""
    return CallLines() if name == "own" else get_parser(name)


TWO = '{"name": "note", "arguments": {"q": "a b", "n": 3}}'
# By parser: turns whose last call nothing closes, and how many calls they have.
UNCLOSED = {
    "react with text": ("react", "Thought: so\nAction: note\nAction Input: some text here", 1),
    "react with JSON": ("react", 'Action: note\nAction Input: {"q": "a b", "n": 34}', 1),
    "react with fence": ("react", "Action: note\nAction Input: ```\nab\n```\nand more", 1),
    "react with brackets": ("react", "Action: note[a b [c] d]", 1),
    "react on a line": ("react", "Thought: so Action: note Action Input: some text", 1),
    "react alone": ("react", "Action: rest", 1),
    "react, two": ("react", "Action: note\nAction Input: one\nAction: note\nInput: two", 2),
    "json": ("json", f"I call {TWO}", 1),
    "json, a name alone": ("json", 'So {"tool": "note", "input": "ab"}', 1),
    "json, in an object": ("json", '{"thought": "x", "action": ' + TWO + "}", 1),
    "function, a line": ("function", 'So\nnote(q="a b", n=34)', 1),
    "function, two lines": ("function", 'note(q="a")\nnote(q="b")', 2),
    "function, an open tag": ("function", f"<tool_call>{TWO}", 1),
    "function, bare": ("function", f"So {TWO}", 1),
    "function, OpenAI's": ("function", f'{{"tool_calls": [{{"function": {TWO}}}]}}', 1),
    "llama3_json": ("llama3_json", '{"name": "note", "parameters": {"q": "a b", "n": 34}}', 1),
    "llama3_json, two": ("llama3_json", f"{TWO}; {TWO}", 2),
    "mistral": ("mistral", f"[TOOL_CALLS][{TWO}]", 1),
    "mistral v11": ("mistral", '[TOOL_CALLS]note[ARGS]{"q": "a b", "n": 34}', 1),
    "mistral v11, two": (
        "mistral",
        '[TOOL_CALLS]note[ARGS]{"q": "1"}[TOOL_CALLS]note[ARGS]{"q": "2"}',
        2,
    ),
    "pythonic": ("pythonic", '[note(q="a b", n=34)]', 1),
    "pythonic, two": ("pythonic", '[note(q="a"), note(q="bc", n=3)]', 2),
    "a user's": ("own", "CALL note abc", 1),
    "a user's, two": ("own", "CALL note abc CALL note defg", 2),
}


@pytest.mark.parametrize("case", UNCLOSED)
def test_the_last_call_of_a_cut_turn_is_not_executed_where_nothing_closes_it(case: str) -> None:
    name, text, count = UNCLOSED[case]
    parser = parser_of(name)
    whole, faults = played(parser, text)
    assert (len(whole), faults) == (count, [])
    for end in range(len(text) + 1):
        got, _ = played(parser, CutText(text[:end]))
        assert got == whole[: len(got)], text[:end]
        assert len(got) < count, text[:end]
    got, kinds = played(parser, CutText(text))
    assert kinds[-1:] == ["cut"]


@pytest.mark.parametrize("case", UNCLOSED)
@pytest.mark.parametrize("space", [" ", "\n", "\n\n"])
def test_space_behind_a_call_closes_none(case: str, space: str) -> None:
    name, text, count = UNCLOSED[case]
    if (case, space[0]) in CLOSED_BY_A_LINE:
        return
    assert len(played(parser_of(name), CutText(text + space))[0]) < count


# A newline ends a call that is a line.
CLOSED_BY_A_LINE = [("a user's", " "), ("a user's", "\n")]

# What closes the last call of each.
CLOSED = {
    "react": "Action: note\nAction Input: some text\nObservation: it",
    "react with JSON": 'Action: note\nAction Input: {"q": "a"}\nSo I look.',
    "json": f"I call {TWO} and wait",
    "json, a list": f"[{TWO}]",
    "function": f"<tool_call>{TWO}</tool_call>",
    "function, a line": 'note(q="a b")\nSo',
    "llama3_json": f"{TWO} and wait",
    "mistral": f"[TOOL_CALLS][{TWO}] and wait",
    "pythonic": '[note(q="a b")]\nand wait',
    "hermes": f"<tool_call>{TWO}</tool_call>",
    "json_fence": f"```json\n{TWO}\n```",
    "llama_function": '<function=note>{"q": "a"}</function>',
    "own": "CALL note abc and wait",
}


@pytest.mark.parametrize("case", CLOSED)
def test_a_call_that_is_closed_is_executed_though_a_limit_cut_the_turn(case: str) -> None:
    parser = parser_of(case.partition(",")[0].partition(" ")[0])
    whole, _ = played(parser, CLOSED[case])
    got, kinds = played(parser, CutText(CLOSED[case]))
    assert (len(got), kinds) == (1, [])
    assert got == whole


@pytest.mark.parametrize("name", TOOL_FORMS)
def test_a_turn_of_a_family_that_is_cut_anywhere_calls_nothing_else(name: str) -> None:
    form = TOOL_FORMS[name]
    play = PlayedForm.of(form)
    text = play.tokens.text(play.ids(form.sampled))
    for end in range(len(text) + 1):
        play.tool.got.clear()
        turn = play.manager.step(CutText(text[:end]))
        assert play.tool.got in ([], CALLED), text[:end]
        kinds = {record.error_kind for record in turn.calls}
        assert kinds <= {"", "cut"}, (text[:end], turn.observation)


def test_a_form_of_vllms_without_a_marker_is_read_as_one_that_nothing_closes() -> None:
    class Reads(VLLMParser):
        """Reads what a parser of vLLM's would."""

        def _read_whole(self, text: str) -> tuple[list[ToolCall], str]:
            return get_parser("llama3_json").parse(text), ""

    for closes, count in (("", 0), ("}}", 1)):
        parser = Reads("vllm:some", None, opens="", closes=closes)
        assert len(played(parser, CutText(TWO))[0]) == count
        assert len(played(parser, TWO)[0]) == 1


class Speaks:
    """Stands for the tokens of a conversation."""

    tools = None

    def conversation(self, *arguments: Any) -> Speaks:
        """Returns itself."""
        return self

    def prompt(self) -> list[int]:
        """Returns a prompt."""
        return [1]

    def text(self, ids: list[int]) -> str:
        """Returns a turn's text."""
        return "Action: note\nAction Input: some te"


@pytest.mark.parametrize(("reason", "executed"), [("length", 0), ("stop", 1)])
def test_the_engines_reason_reaches_the_parser_through_pickled_calls(
    reason: Any, executed: int
) -> None:
    from workers.environments.reply import StepReply

    limits = TurnLimits(
        prompt_length=8, response_length=64, max_model_len=72, max_turn=2, max_turn_tokens=4
    )
    sampling = Sampling(max_tokens=4, temperature=1.0, seed=0)
    play = play_episode(
        Episode(group=0, sample=0, seed=1),
        lambda _: sampling,
        limits,
        Speaks(),
        [None],  # type: ignore[arg-type]
    )
    assert isinstance(next(play), Ask)
    assert isinstance(play.send(StepReply(messages=[{"role": "user", "content": "x"}])), Sample)
    done = Completion(
        request_id="0", token_ids=[1, 2, 3, 4], log_probs=[0.0] * 4, finish_reason=reason
    )
    asked = play.send(done)
    assert isinstance(asked, Ask)
    kind, (text,) = pickle.loads(pickle.dumps((asked.kind, asked.args)))
    assert kind == "step"
    got, kinds = played(get_parser("react"), text)
    assert (len(got), kinds) == (executed, [] if executed else ["cut"])
