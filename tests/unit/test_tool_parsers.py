"""Tests that parsers find the calls that are in a text and no others.

That holds whatever the text is, and they are quick.
"""

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from custom.env import BaseEnvironment
from custom.tools import MultiTurnManager, ToolRegistry
from custom.tools.calculator import CalculatorTool
from custom.tools.parsers import PARSERS, ActionParser, ToolCall, get_parser

ALL = [get_parser(name) for name in PARSERS]
JSON, REACT, FUNCTION = get_parser("json"), get_parser("react"), get_parser("function")
ADD = ToolCall("add", {"a": 1, "b": 2})


def kinds(calls: list[ToolCall]) -> list[str]:
    return [call.error_kind for call in calls]


# --- What is a call ---


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
        'I add them.\n```json\n{"name": "add", "parameters": {"a": 1, "b": 2}}\n```',
        'first {"x": 1}, then {"tool": "add", "args": {"a": 1, "b": 2}} {"name": "Bob"}',
        '{"thought": "so", "action": "add", "action_input": {"a": 1, "b": 2}}',
        '{"thought": "so", "action": {"name": "add", "arguments": {"a": 1, "b": 2}}}',
        '[{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}]',
        '{"tool_calls": [{"type": "function", "function": '
        '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}}]}',
        r"so \frac{1}{2} {not json} {'a': 1} {" + '"name": "add", "arguments": {"a": 1, "b": 2}}',
    ],
)
def test_json_calls_are_found_anywhere_in_a_text(text: str) -> None:
    assert JSON.parse(text) == [ADD]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        'Let me see.<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}',
        '{"name": "other", "arguments": {}} '
        '<tool_call>{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}</tool_call>',
        '{"tool_calls": [{"id": "1", "type": "function", '
        '"function": {"name": "add", "arguments": "{\\"a\\":1,\\"b\\":2}"}}]}',
        '{"role": "assistant", "function_call": '
        '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}}',
        '{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}',
        'I add them: {"name": "add", "arguments": {"a": 1, "b": 2}}',
        '<function_calls>{"tool_name": "add", "parameters": {"a": 1, "b": 2}}</function_calls>',
        "add(a=1, b=2)",
        'I add them.\n```python\nadd(\n  {"a": 1, "b": 2},\n)\n```\nThat is all.',
    ],
)
def test_function_calls_are_found_in_tags_in_openai_form_and_bare(text: str) -> None:
    assert FUNCTION.parse(text) == [ADD]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("say('it\\'s\\n', x=True)", None),
        ("say(t='it\\'s\\n', x=True, y=null)", {"t": "it's\n", "x": True, "y": None}),
        ("`say('two words')`;", "two words"),
        ('say("a\nb")', "a\nb"),
        ("say()", {}),
        ("say(t=[1, {\"a\": 'b'}])", None),
        ("say(x)", None),
        ("say(1 + 2)", None),
        ("say(t=='a')", None),
        ("He may say('so').", None),
        ("say('so') and go", None),
        ("say(t=1", None),
    ],
)
def test_a_call_as_in_python_stands_on_a_line_of_its_own_with_values_alone(
    text: str, arguments: Any
) -> None:
    calls = [call for call in FUNCTION.parse(text) if not call.error_kind]
    assert calls == ([] if arguments is None else [ToolCall("say", arguments)])


def test_what_may_be_text_calls_only_a_tool_that_there_is() -> None:
    class Said(BaseEnvironment):
        def reset(self) -> str:
            return ""

        def step(self, action: str) -> tuple:
            return f"heard {action}", 0.0, False, {}

    registry = ToolRegistry([CalculatorTool()])
    manager = MultiTurnManager(registry, FUNCTION, Said())
    for text in ("go('north')", '{"name": "go", "arguments": {"to": "north"}}'):
        assert manager.step(text).observation == f"heard {text}"
    for text in (
        "calculator('1 + 2')",
        'calculator(expression="1 + 2")',
        '{"name": "calculator", "arguments": {"expression": "1 + 2"}}',
    ):
        assert manager.step(text).tool_call.result == "3"
    assert manager.step("calculator(1, 2)").tool_call.error_kind == "bad_arguments"
    tagged = '<tool_call>{"name": "go", "arguments": {}}</tool_call>'
    assert manager.step(tagged).tool_call.error_kind == "unknown_tool"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('Thought: I add.\nAction: add\nInput: {"a": 1}', {"a": 1}),
        ("Thought: I add.\nAction: add\nInput: 1 and 2\nObservation: 3", "1 and 2"),
        ("Action: add\nAction Input: 1\nInput: 2", "1\nInput: 2"),
        ("Input: 1\nAction: add", {}),
        ('Thought: I add. Action: add Action Input: {"a": 1}', {"a": 1}),
        ("Thought: I add. Action: add Input: 1 and 2", "1 and 2"),
        (
            'Thought: I add.\nAction: add\nAction Input: {"a": 1, "b": 2}\nObservation: 3',
            {"a": 1, "b": 2},
        ),
        (
            '**Action:** `add`\n**Action Input:** ```json\n{\n "a": 1,\n "b": 2}\n```',
            {"a": 1, "b": 2},
        ),
        ("Action: add\nAction Input: 1 and 2\nThought: wait", "1 and 2"),
        ("Action: add[1 and 2]", "1 and 2"),
        ("Action 1: add [1 and [2], or 3].\n\nAs said in [1]", "1 and [2], or 3"),
        ("Action: add[]", ""),
        ("Action: add\nAction Input:\n```python\nprint(1)\nprint(2)\n```", "print(1)\nprint(2)"),
        ("Action: add", {}),
        ("Action: add\nAction Input:", ""),
        (
            'Action: add\nAction Input: {"code": "x\nAction: no\nAction Input: {}"}',
            {"code": "x\nAction: no\nAction Input: {}"},
        ),
    ],
)
def test_react_actions_take_json_text_or_nothing(text: str, arguments: Any) -> None:
    assert REACT.parse(text) == [ToolCall("add", arguments)]


def test_several_calls_come_in_their_order() -> None:
    tags = "".join(
        f'<tool_call>{{"name": "t{i}", "arguments": {{}}}}</tool_call>\n' for i in range(3)
    )
    react = "".join(
        f"Thought: x\nAction: t{i}\nAction Input: {{}}\nObservation: made up\n" for i in range(3)
    )
    objects = " and ".join(f'{{"tool": "t{i}"}}' for i in range(3))
    expected = [ToolCall(f"t{i}") for i in range(3)]
    assert FUNCTION.parse(tags) == REACT.parse(react) == JSON.parse(objects) == expected


@pytest.mark.parametrize("parser", ALL)
@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "go north",
            "x = {1: 2}",
            '{"name": "Bob", "age": 3}',
            '{"action": "north"}',
            "[1, 2]",
            '{"a": {"tool": "x"}}',
        ),
        *(
            "Action: go north",
            "Actions: add",
            "the Action: add",
            "tool_call",
            '"tool_calls": []',
            "{}",
        ),
        '{"name": 3, "arguments": {}}',
    ],
)
def test_data_and_prose_are_no_calls(parser: ActionParser, text: str) -> None:
    assert parser.parse(text) == []


def test_raw_newlines_in_strings_of_code_are_read() -> None:
    assert JSON.parse('{"tool": "python", "args": {"code": "a = 1\nprint(a)"}}')[0].arguments == {
        "code": "a = 1\nprint(a)"
    }


@pytest.mark.parametrize(
    ("parser", "text", "kind"),
    [
        (JSON, '{"name": "add", "arguments": {"a": 1', "bad_json"),
        (REACT, "Action: add[1 and 2", "bad_json"),
        (JSON, '{"thought": "t", "action": {"name": "add", "arguments": {"a": }}}', "bad_json"),
        (JSON, '{"name": "add", "arguments": [1, 2]}', "bad_arguments"),
        (JSON, '{"name": "add", "arguments": "{1, 2}"}', "bad_json"),
        (FUNCTION, "<tool_call>add(1, 2)</tool_call>", "bad_json"),
        (FUNCTION, '<tool_call>{"name": "add", "arguments": {"a": 1}', "bad_json"),
        (FUNCTION, '<tool_call>{"arguments": {"a": 1}}</tool_call>', "bad_json"),
        (FUNCTION, "<tool_call>", "bad_json"),
        (FUNCTION, '<tool_call>{"name": "add", "arguments": 5}</tool_call>', "bad_arguments"),
        (FUNCTION, '{"tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}', "bad_json"),
        (FUNCTION, '{"tool_calls": [{"function": ', "bad_json"),
        (REACT, 'Action: add\nAction Input: {"a": 1,, }', "bad_json"),
        (JSON, '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "bad_json"),
        (JSON, '{"name": "add", "arguments": ' + '{"a":' * 5000, "bad_json"),
    ],
)
def test_a_call_that_was_begun_and_broke_is_reported(
    parser: ActionParser, text: str, kind: str
) -> None:
    calls = parser.parse(text)
    assert kinds(calls) == [kind]
    assert calls[0].error


def test_a_good_call_behind_a_broken_one_is_still_found() -> None:
    text = (
        '<tool_call>{"name": <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    )
    assert FUNCTION.parse(text)[1:] == [ADD]
    assert (
        JSON.parse('{"name": {"name": "add", "arguments": {"a": 1, "b": 2}}')[-1].error_kind
        == "bad_json"
    )
    assert JSON.parse('{"name": oh {"name": "add", "arguments": {"a": 1, "b": 2}}')[1:] == [ADD]


def test_an_unknown_parser_is_named_with_those_there_are() -> None:
    with pytest.raises(
        ValueError,
        match=r"'jsn' is unknown; allowed: deepseek, function, .*react. Did you mean 'json'\?",
    ):
        get_parser("jsn")


# --- Properties ---


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(5 if depth > 2 else 7)
    if kind < 5:
        return [
            rng.randrange(-99, 99),
            rng.random(),
            rng.choice('aé😀\n"\\{}<[') * rng.randrange(4),
            None,
            True,
        ][kind]
    if kind == 5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice("abcd"): random_value(rng, depth + 1) for _ in range(rng.randrange(3))}


def test_what_is_written_in_a_form_is_read_back_exactly() -> None:
    rng = random.Random(0)
    for _ in range(500):
        calls = [
            ToolCall(
                rng.choice(("add", "f-1", "get.it")),
                {k: random_value(rng) for k in rng.sample("xyz", rng.randrange(3))},
            )
            for _ in range(rng.randrange(1, 4))
        ]
        ascii_only = rng.random() < 0.5
        dump = lambda value: json.dumps(value, ensure_ascii=ascii_only)  # noqa: E731, B023
        bare = [{"name": call.name, "arguments": call.arguments} for call in calls]
        nested = [
            {"type": "function", "function": {"name": c.name, "arguments": dump(c.arguments)}}
            for c in calls
        ]
        tags = "ok\n".join(f"<tool_call>\n{dump(call)}\n</tool_call>" for call in bare)
        react = "\n".join(
            f"Action: {c.name}\nAction Input: {dump(c.arguments)}\nObservation: {{" for c in calls
        )
        assert JSON.parse(" then ".join(map(dump, bare))) == calls
        assert FUNCTION.parse(tags) == FUNCTION.parse(dump({"tool_calls": nested})) == calls
        assert REACT.parse(react) == calls


SEEDS = [
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.5, true, null]}}\n</tool_call>',
    '{"tool_calls": [{"id": "c1", "type": "function", '
    '"function": {"name": "say", "arguments": "{\\"t\\": \\"h\\\\u00e9\\"}"}}]}',
    '{"name": "python", "arguments": {"code": "print(\\"x\\")\\nfor i in range(3): pass"}}',
    "Thought: I must look.\nAction: search\n"
    'Action Input: {"query": "caf\\u00e9 \\ud83d\\ude00"}\nObservation: none',
    "Thought: done\nAction: finish[the answer is 42]\nFinal Answer: 42",
    '{"thought": "x", "action": {"tool": "calc", "input": {"expression": "2+3"}}}',
    "Action: python\nAction Input: ```python\nprint('a')\n```",
    'So Action: say Action Input: {"t": "hi"}\nThought: x\nAction: say\nInput: hi',
    "So:\nsay(t=\"hi\", n=2)\nsay('ho')",
    'I think <tool_call>{"name": "a", "arguments": {"x": {"y": {"z": "deep"}}}}</tool_call>'
    '<tool_call>{"name": "b"}</tool_call>',
    "The answer is \\boxed{42} and {x | x > 0}.",
]
FRAGMENTS = (
    *'{}[]",:\\ \n`*<>/0123456789-.eE',
    *(
        '{"',
        '"}',
        '":',
        '"name"',
        '"arguments"',
        '"tool"',
        '"args"',
        '"action"',
        '"tool_calls": [',
        '"function": {',
        "\\u00e9",
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        "Action:",
        "\nAction: ",
        "\nAction Input: ",
        "\nThought:",
        "\nObservation:",
        "```json\n",
        "```",
    ),
    *(
        "true",
        "null",
        "NaN",
        "-Infinity",
        "1e999",
        "\\ud800",
        "\ud800",
        "\x00",
        "é",
        "😀",
        "add",
        " " * 40,
        '\\"',
        "\\n",
    ),
)


def mutated(rng: random.Random) -> str:
    """Makes a model output as training meets them.

    A good one cut, spliced and dirtied, or mere fragments.
    """
    if rng.random() < 0.2:
        return "".join(rng.choices(FRAGMENTS, k=rng.randrange(40)))
    text = rng.choice(SEEDS)
    for _ in range(rng.randrange(1, 6)):
        i, j = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        other = rng.choice(SEEDS)
        text = rng.choice(
            (
                text[:i] + text[j:],
                text[:i],
                text[:i] + rng.choice(FRAGMENTS) + text[i:],
                text[:i] + text[i:j] * 2 + text[j:],
                text[:i] + other[rng.randrange(len(other)) :],
                text[:i] + rng.choice(FRAGMENTS) + text[i + 1 :],
            )
        )
    return text


_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def unescaped(text: str) -> str:
    """Reads JSON's escapes in the text once, wherever they stand."""

    def one(found: re.Match[str]) -> str:
        code = found.group(1)
        return chr(int(code[1:], 16)) if len(code) == 5 else _SHORT.get(code, code)

    return (
        _ESCAPE.sub(one, text).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    )


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def invented(text: str, call: ToolCall) -> list[Any]:
    """Returns what the call says and the text does not.

    An independent reading, by the text's characters alone.
    """
    views = [text, unescaped(text), unescaped(unescaped(text))]
    views += [
        view.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") for view in views
    ]

    def is_there(leaf: Any) -> bool:
        if isinstance(leaf, str):
            return any(leaf in view for view in views)
        if leaf is None or isinstance(leaf, bool):
            return json.dumps(leaf) in text
        if leaf != leaf or leaf in (float("inf"), float("-inf")):
            return (
                "NaN" in text or "Infinity" in text or "e999" in text or bool(_NUMBER.search(text))
            )
        # the digits may begin within a longer run of digits only where a mutation joined them,
        # never in a parsed call
        return any(float(number) == leaf for view in views for number in _NUMBER.findall(view))

    return [leaf for leaf in [call.name, *leaves(call.arguments)] if not is_there(leaf)]


def check_mutations(count: int, seed: int) -> int:
    rng, found = random.Random(seed), 0
    for _ in range(count):
        text = mutated(rng)
        for parser in ALL:
            for call in parser.parse(text):
                assert not invented(text, call), (type(parser).__name__, text, call)
                assert call.name or call.error_kind
                found += not call.error_kind
    return found


def test_mutated_outputs_raise_nothing_and_yield_no_call_that_was_not_there() -> None:
    assert check_mutations(3000, seed=1) > 500


@pytest.mark.slow
def test_100_000_mutated_outputs_raise_nothing_and_yield_no_call_that_was_not_there() -> None:
    assert check_mutations(100_000, seed=2) > 20_000


def test_the_check_for_invented_calls_can_fail() -> None:
    text = '{"name": "add", "arguments": {"a": 12, "t": "h\\u00e9"}}'
    assert not invented(text, ToolCall("add", {"a": 12, "t": "hé"}))
    for wrong in (
        ToolCall("sub", {}),
        ToolCall("add", {"a": 13}),
        ToolCall("add", {"t": "ho"}),
        ToolCall("add", {"a": None}),
    ):
        assert invented(text, wrong)


PIECES = [
    "{",
    '{"',
    "{\n",
    '{\n"a"\n',
    '{"a":',
    '{"a":"',
    '{"tool":',
    '{"tool":"a',
    '{"tool":"a"}',
    "[{",
    '{"a":[',
    '{"\\"',
    "\\",
    '"',
]
PIECES += [
    "<tool_call>",
    "<tool_call>\n",
    "<tool_call>{",
    '<tool_call>{"a":"',
    "<tool_call>[",
    "</tool_call>",
    "<tool_call>{}",
]
PIECES += [
    "Action:",
    "Action:\n",
    "\nAction: a",
    "\nAction Input: {",
    'Action: a\nAction Input: {"a":\n',
    "Action: a[",
    "a[]",
    "* ",
]
PIECES += [
    'Action: a\nAction Input: {"a":"\n',
    "Action: a\nAction Input: ```\n",
    "\n",
    " ",
    "`",
    "9",
    '"tool_calls":',
    '{"name":"a","arguments":"{',
    "f(",
    "\nf(",
    "\nf('",
    '\nf(a="',
    "\nf(1,",
    "\nf(1 ",
    "\nf([",
    "f(a=",
    ",",
    "(",
    "'",
    " Action: a Input:",
    " Action: a ",
]


@pytest.mark.seconds
@pytest.mark.parametrize("parser", ALL)
def test_time_is_linear_in_the_text_on_adversarial_inputs(parser: ActionParser) -> None:
    slow = []
    for piece in PIECES:
        for text in (
            piece * (100_000 // len(piece)),
            "Action: a\n" + '{"tool":' + piece * (100_000 // len(piece)),
        ):
            started = time.process_time()
            parser.parse(text)
            # A quadratic parser would take minutes.
            if (seconds := time.process_time() - started) > 2.0:
                slow.append((text[:40], seconds))
    assert not slow
