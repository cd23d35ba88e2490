"""Tests that each family's calls are read, whole alone, with the types of the tool's schema."""

import json
import random
import time
from typing import Any

import pytest

from custom.tools import FAMILIES, MultiTurnManager, Tool, ToolDefinition, ToolRegistry, get_parser
from custom.tools.families import FamilyParser, TemplateFacts
from custom.tools.families.family import typed_arguments
from custom.tools.parsers import ToolCall

SCHEMA = {
    "type": "object",
    "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["q", "n"],
}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": SCHEMA}}]
ARGUMENTS = {"q": "a b", "n": 3}
# By family, and by what else the form is called: one call as the models write it.
FORMS: dict[str, tuple[str, str]] = {
    "hermes": (
        "hermes",
        '<tool_call>\n{"name": "search", "arguments": {"q": "a b", "n": 3}}\n</tool_call>',
    ),
    "qwen3_xml": (
        "qwen3_xml",
        "<tool_call>\n<function=search>\n<parameter=q>\na b\n</parameter>\n<parameter=n>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        "glm",
        "<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>a b</arg_value>\n<arg_key>n</arg_key>"
        "\n<arg_value>3</arg_value>\n</tool_call>",
    ),
    "harmony": (
        "harmony",
        "<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
        '{"q": "a b", "n": 3}<|call|>',
    ),
    "harmony as templates write it": (
        "harmony",
        ' to=functions.search<|channel|>commentary json<|message|>{"q": "a b", "n": 3}<|call|>',
    ),
    "deepseek v3": (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
        '{"q": "a b", "n": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "deepseek v3.1": (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>"
        '{"q": "a b", "n": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "deepseek v3.2": (
        "deepseek",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="search">\n'
        '<｜DSML｜parameter name="q" string="true">a b</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    "kimi": (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0"
        '<|tool_call_argument_begin|>{"q": "a b", "n": 3}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ),
    "minimax": (
        "minimax",
        '<minimax:tool_call>\n<invoke name="search">\n<parameter name="q">a b</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "mistral list": (
        "mistral",
        '[TOOL_CALLS][{"name": "search", "arguments": {"q": "a b", "n": 3}}]',
    ),
    "mistral v11": ("mistral", '[TOOL_CALLS]search[ARGS]{"q": "a b", "n": 3}'),
    "mistral v11 with an id": (
        "mistral",
        '[TOOL_CALLS]search[CALL_ID]abc123def[ARGS]{"q": "a b", "n": 3}',
    ),
    "llama3_json": ("llama3_json", '{"name": "search", "parameters": {"q": "a b", "n": 3}}'),
    "llama3_json with a tag": (
        "llama3_json",
        '<|python_tag|>{"name": "search", "parameters": {"q": "a b", "n": 3}}',
    ),
    "llama_function": ("llama_function", '<function=search>{"q": "a b", "n": 3}</function>'),
    "pythonic": ("pythonic", '[search(q="a b", n=3)]'),
    "pythonic of LFM2": (
        "pythonic",
        "<|tool_call_start|>[search(q='a b', n=3)]<|tool_call_end|>",
    ),
    "pythonic of OLMo 3": (
        "pythonic",
        '<function_calls>search(q="a b", n=3)</function_calls>',
    ),
    "gemma": ("gemma", '<|tool_call>call:search{q:<|"|>a b<|"|>,n:3}<tool_call|>'),
    "json_fence": (
        "json_fence",
        '```json\n{"name": "search", "arguments": {"q": "a b", "n": 3}}\n```',
    ),
}
# Several calls of the same form in a turn: the text between two that are written one by one.
BETWEEN = {
    "hermes": "\n",
    "qwen3_xml": "\n",
    "glm": "\n",
    "deepseek v3": "\n",
    "deepseek v3.1": "",
    "deepseek v3.2": "\n",
    "kimi": "",
    "minimax": "\n",
    "mistral v11": "",
    "llama3_json": "; ",
    "llama_function": "\n",
    "gemma": "",
    "json_fence": "\n",
    "pythonic of LFM2": "\n",
}
THINKING = {"gemma": ("<|channel>thought\n", "<channel|>")}


class Search(Tool):
    definition = ToolDefinition(name="search", parameters=SCHEMA)

    def __init__(self) -> None:
        self.got: list[Any] = []

    def execute(self, q: str, n: int) -> str:
        self.got.append({"q": q, "n": n})
        return f"found {n} of {q}"


def every_form() -> list[Any]:
    return [pytest.param(*FORMS[name], id=name) for name in FORMS]


def finished(parser: FamilyParser, text: str) -> list[tuple[str, Any]]:
    """Lists the calls that can be executed, with the schema's types."""
    calls = parser.read(text).finished
    return [(call.name, typed_arguments(call, TOOLS)) for call in calls]


def parser_of(family: str) -> FamilyParser:
    parser = get_parser(family)
    assert isinstance(parser, FamilyParser)
    return parser


@pytest.mark.parametrize(("family", "text"), every_form())
def test_a_call_is_read_with_its_types_and_leaves_no_text(family: str, text: str) -> None:
    read = parser_of(family).read(text)
    assert [call.error_kind for call in read.calls] == [""]
    assert finished(parser_of(family), text) == [("search", ARGUMENTS)]
    assert (read.text, read.thinking) == ("", "")
    tool = Search()
    manager = MultiTurnManager(ToolRegistry([tool]), parser_of(family))
    assert manager.step(text).observation == "found 3 of a b"
    assert tool.got == [ARGUMENTS]


@pytest.mark.parametrize(("family", "text"), every_form())
def test_a_call_that_is_cut_anywhere_is_not_executed(family: str, text: str) -> None:
    parser = parser_of(family)
    for length in range(len(text)):
        for begin in ("", "So I look.\n"):
            if family == "harmony" and begin:
                continue
            found = finished(parser, begin + text[:length])
            # What stands around a whole call may be cut.
            assert found in ([], [("search", ARGUMENTS)]), (length, found)
            if found:
                assert length >= text.rindex("3") + 2, text[:length]


@pytest.mark.parametrize(("family", "text"), every_form())
def test_two_thirds_of_a_call_are_told_to_the_policy_in_its_own_form(
    family: str, text: str
) -> None:
    cut = text[: len(text) * 2 // 3]
    calls = parser_of(family).parse(cut)
    assert [call.error_kind for call in calls] == ["bad_json"]
    assert FAMILIES[family].form in calls[0].error
    tool = Search()
    manager = MultiTurnManager(ToolRegistry([tool]), parser_of(family))
    assert "Error (bad_json)" in str(manager.step(cut).observation)
    assert not tool.got


@pytest.mark.parametrize("name", BETWEEN)
def test_several_calls_of_a_turn_are_read_in_order(name: str) -> None:
    family, text = FORMS[name]
    second = text.replace("a b", "c").replace("3", "4") if "v3" not in name else text
    whole = text + BETWEEN[name] + second
    found = finished(parser_of(family), whole)
    assert len(found) == 2
    assert found[0] == ("search", ARGUMENTS)
    cut = finished(parser_of(family), whole[:-1]) if family != "json_fence" else found[:1]
    assert cut[:1] == found[:1]


def test_a_list_that_is_not_closed_has_no_call_that_is_executed() -> None:
    text = '[search(q="a b", n=3), search(q="c", n=4)]'
    assert len(finished(parser_of("pythonic"), text)) == 2
    assert finished(parser_of("pythonic"), text[:-1]) == []
    text = '[TOOL_CALLS][{"name": "search", "arguments": {"q": "a", "n": 1}}]'
    assert finished(parser_of("mistral"), text[:-1]) == []


@pytest.mark.parametrize(("family", "text"), every_form())
def test_calls_inside_of_thinking_are_text(family: str, text: str) -> None:
    if family == "harmony":
        body = text.partition("<|message|>")[0].replace("<|channel|>", "channel ") + " so"
        turn = f"<|channel|>analysis<|message|>{body}<|end|><|start|>assistant"
        turn += "<|channel|>final<|message|>It is 5.<|return|>"
        read = parser_of(family).read(turn)
        assert (read.calls, read.thinking, read.text) == ((), body, "It is 5.")
        return
    opens, closes = THINKING.get(family, ("<think>\n", "\n</think>"))
    parser = parser_of(family)
    read = parser.read(f"{opens}I might {text} or not{closes}\n\nIt is 5.")
    assert (read.calls, read.text) == ((), "It is 5.")
    assert read.thinking == f"I might {text} or not"
    assert parser.read(f"{opens}I might {text}").calls == ()
    both = parser.read(f"{opens}I might {text} or not{closes}\n{text}")
    assert [call.error_kind for call in both.calls] == [""]
    later = parser.read(f"Well. {opens}{text}{closes} It is 5.")
    assert (later.calls, later.text) == ((), "Well.  It is 5.")


def test_thinking_that_the_prompt_opened_ends_with_its_closing_or_never() -> None:
    call = FORMS["hermes"][1]
    opened = parser_of("hermes").under(TemplateFacts(opens_thinking=True))
    assert opened.read(f"hm {call}").calls == ()
    assert opened.read(f"hm {call}").thinking == f"hm {call}"
    read = opened.read(f"hm {call}</think>{call}")
    assert (len(read.calls), read.thinking) == (1, f"hm {call}")
    # Nobody said that it was opened, yet it was closed.
    assert len(parser_of("hermes").read(f"hm {call}</think>It is 5.").calls) == 0


@pytest.mark.parametrize("family", ["qwen3_xml", "glm", "minimax"])
@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "string"}, "  spaced\n\n", "  spaced\n\n"),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "3.5", 3.5),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": "object"}, '{"a": [1, null]}', {"a": [1, None]}),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nothing", "nothing"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", 3),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x", "x"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"$ref": "#/$defs/Count"}, "4", 4),
        ({}, "4", 4),
        ({}, "four", "four"),
    ],
)
def test_arguments_without_types_get_those_of_the_schema(
    family: str, schema: dict[str, Any], written: str, value: Any
) -> None:
    text = {
        "qwen3_xml": f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n"
        "</tool_call>",
        "minimax": f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{written}'
        "</parameter>\n</invoke>\n</minimax:tool_call>",
    }[family]
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "$defs": {"Count": {"type": "integer"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    [call] = parser_of(family).parse(text)
    typed = typed_arguments(call, tools)["a"]
    assert (typed, type(typed)) == (value, type(value))


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "qwen3_xml",
            "<tool_call>\n<function=f>\n<parameter=a>\nx </parameter> y\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "glm",
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x </parameter> y</arg_value>\n"
            "</tool_call>",
        ),
        (
            "hermes",
            '<tool_call>\n{"name": "f", "arguments": {"a": "x </parameter> y"}}\n</tool_call>',
        ),
        (
            "kimi",
            '<|tool_call_begin|>functions.f:2<|tool_call_argument_begin|>{"a": '
            '"x </parameter> y"}<|tool_call_end|>',
        ),
        ("gemma", '<|tool_call>call:f{a:<|"|>x </parameter> y<|"|>}<tool_call|>'),
        ("pythonic", '[f(a="x </parameter> y")]'),
    ],
)
def test_values_may_spell_what_closes_values(family: str, text: str) -> None:
    assert parser_of(family).parse(text) == [ToolCall("f", {"a": "x </parameter> y"})]


@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": VALUE}}\n</tool_call>'),
        (
            "kimi",
            '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": VALUE}'
            "<|tool_call_end|>",
        ),
        ("pythonic", "[f(a=VALUE)]"),
        ("llama3_json", '{"name": "f", "parameters": {"a": VALUE}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": VALUE}'),
    ],
)
@pytest.mark.parametrize(
    "value",
    ["</tool_call>", "]", "\n", 'say "hi"', "[f(a=1)]", "{}", "é😀", "\\", "<think>", "; "],
)
def test_texts_of_any_characters_are_read_as_they_were_written(
    family: str, written: str, value: str
) -> None:
    text = written.replace("VALUE", json.dumps(value, ensure_ascii=False))
    assert parser_of(family).parse(text) == [ToolCall("f", {"a": value})]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>\nsearch for a\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "search", "arguments": {"q": "a}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {"q": "a"}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "search", "arguments": {"q": "a"}} {}</tool_call>'),
        ("qwen3_xml", "<tool_call>\nsearch\n</tool_call>"),
        ("qwen3_xml", "<tool_call>\n<function=search>\nq: a\n</function>\n</tool_call>"),
        ("qwen3_xml", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>I call search</tool_call>"),
        ("glm", "<tool_call>search\n<arg_key>q</arg_key>\n<arg_key>n</arg_key></tool_call>"),
        ("harmony", "<|channel|>commentary to=functions.search<|message|>a, 3<|call|>"),
        ("harmony", '<|channel|>commentary to=functions.search<|message|>{"q": "a"}<|end|>'),
        ("deepseek", "<｜tool▁call▁begin｜>search a<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>search<｜tool▁sep｜>a<｜tool▁call▁end｜>"),
        ("kimi", "<|tool_call_begin|>search a<|tool_call_end|>"),
        (
            "kimi",
            "<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>a<|tool_call_end|>",
        ),
        ("minimax", '<invoke name="search">q is a</invoke>'),
        ("mistral", "[TOOL_CALLS] look for a"),
        ("mistral", '[TOOL_CALLS][{"name": "search", "arguments": '),
        ("llama3_json", '{"name": "search", "parameters": {"q": a}}'),
        ("llama_function", "<function=search>a</function>"),
        ("pythonic", "[search(q=a)]"),
        ("pythonic", '[search(q="a" n=3)]'),
        ("gemma", "<|tool_call>search a<tool_call|>"),
        ("gemma", "<|tool_call>call:search{q:a b}<tool_call|>"),
        ("json_fence", '```json\n{"name": "search", "arguments": {"q": a}}\n```'),
    ],
)
def test_what_was_begun_and_cannot_be_read_is_told(family: str, text: str) -> None:
    calls = parser_of(family).parse(text)
    assert [call.error_kind for call in calls] == ["bad_json"]
    assert FAMILIES[family].form in calls[0].error


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text",
    [
        "It is 5.",
        "",
        "[1, 2, 3] and {a}",
        '{"x": 1}',
        "f(x) = [g(x)] for all x",
        "see [the page](http://x)",
        "if a < b and c > d: <b>bold</b>",
        "```python\nprint([f(x)])\n```",
    ],
)
def test_prose_and_data_are_no_calls(family: str, text: str) -> None:
    read = parser_of(family).read(text)
    assert read.calls == ()
    assert read.text == text.strip()


def test_thinking_and_a_call_of_harmony_are_read_apart() -> None:
    turn = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.search "
        '<|constrain|>json<|message|>{"q": "a b", "n": 3}<|call|>'
    )
    read = parser_of("harmony").read(turn)
    assert (read.thinking, read.text) == ("hm", "I look it up.")
    assert finished(parser_of("harmony"), turn) == [("search", ARGUMENTS)]
    read = parser_of("harmony").read("<|channel|>analysis<|message|>hm and")
    assert (read.thinking, read.text, read.calls) == ("hm and", "", ())
    assert parser_of("harmony").read("no channel at all").text == "no channel at all"


def pieces_of_all_forms() -> list[str]:
    pieces = ['"', "{", "}", "[", "]", "(", ")", "\n", " ", "a", "3", ":", ",", "=", "\\"]
    for parser in FAMILIES.values():
        pieces += [*parser.markers, *(marker for pair in parser.thinking for marker in pair)]
    return pieces + [text for _, text in FORMS.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_that_is_written_raises(family: str) -> None:
    draw = random.Random(family)
    pieces = pieces_of_all_forms()
    parser = parser_of(family)
    for _ in range(300):
        text = "".join(draw.choice(pieces) for _ in range(draw.randint(1, 30)))
        read = parser.read(text)
        assert all(call.error_kind or call.name for call in read.calls)
        assert parser.reads_alike(text, text)


@pytest.mark.parametrize("family", FAMILIES)
def test_time_is_linear_in_the_text(family: str) -> None:
    parser = parser_of(family)
    head = next(text for name, text in FORMS.values() if name == family)
    for piece in set(pieces_of_all_forms()):
        started = time.process_time()
        parser.read(piece * (20_000 // len(piece)))
        parser.read(head[: len(head) // 2] + piece * (20_000 // len(piece)))
        assert time.process_time() - started < 5, piece
