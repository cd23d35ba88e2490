"""Tests the guard around vLLM's parsers: a call that is cut is not executed."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from custom.tools.chat_form import WrongForm, form_problem, resolve_parser
from custom.tools.vllm_parsers import VLLMParser, markers_around
from data.turn_tokens import TurnTokens
from tests.zoo.tool_forms import TOOL_FORMS, make_byte_tokenizer
from tests.zoo.tool_proofs import CALLED, PlayedForm

# By form of the zoo: the parser of vLLM's that reads it.
PARSERS = {
    "hermes": "hermes",
    "qwen3_xml": "qwen3_coder",
    "glm": "glm45",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v31",
    "deepseek_v3_2": "deepseek_v32",
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
    "mistral": "mistral",
    "llama3_json": "llama3_json",
    "pythonic": "lfm2",
    "pythonic_bare": "pythonic",
    "gemma": "gemma4",
}


def tokens_of(form: str) -> TurnTokens:
    return PlayedForm.of(TOOL_FORMS[form]).tokens


def reading(parser: VLLMParser, arguments: str) -> VLLMParser:
    """Returns the parser with a class of vLLM's that always calls search with these arguments."""

    class Careless:
        def __init__(self, tokenizer: Any, tools: Any) -> None:
            pass

        def extract_tool_calls(self, text: str, request: Any) -> Any:
            function = SimpleNamespace(name="search", arguments=arguments)
            called = "<tool_call>" in text
            calls = [SimpleNamespace(function=function)] if called else []
            return SimpleNamespace(tools_called=called, tool_calls=calls, content=text[:0])

    parser.__dict__["parser_class"] = Careless
    return parser


def test_what_opens_and_closes_a_call_is_what_two_renderings_share() -> None:
    one = '<tool_call>\n{"name": "a", "arguments": {"q": 1}}\n</tool_call>'
    other = '<tool_call>\n{"name": "bc", "arguments": {"x": "y"}}\n</tool_call>'
    assert markers_around(one, other) == ("<tool_call>", "</tool_call>")
    assert markers_around('{"a": 1}', '{"b": 2}') == ("", "")


@pytest.mark.vllm
def test_a_parser_that_calls_whatever_stands_there_is_not_asked_about_a_cut_call() -> None:
    parser = VLLMParser("vllm:any", None, opens="<tool_call>", closes="</tool_call>")
    careless = reading(parser, '{"q": "a"}')
    whole = "<tool_call>search</tool_call>"
    assert [call.error_kind for call in careless.parse(whole)] == [""]
    assert [call.error_kind for call in careless.parse(f"{whole}<tool_call>sea")] == [
        "",
        "bad_json",
    ]
    assert [call.error_kind for call in careless.parse("<tool_call>sea")] == ["bad_json"]
    for broken in ('{"q": "a"', "[1]", "", "null"):
        calls = reading(parser, broken).parse(whole)
        assert [call.error_kind for call in calls] == ["bad_json"], broken


def test_a_template_that_renders_no_calls_is_refused_for_want_of_a_guard() -> None:
    form = TOOL_FORMS["hermes"]
    tokenizer = make_byte_tokenizer(form)
    tokenizer.chat_template = form.template.replace("m.tool_calls", "none")
    stops: Any = tokenizer.convert_tokens_to_ids(list(form.stops))
    tokens = TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=stops)
    with pytest.raises(WrongForm, match="renders no tool calls, by which a call that is cut off"):
        resolve_parser("vllm:hermes", tokens)


@pytest.mark.vllm
def test_an_unknown_parser_is_named_with_those_of_the_installed_vllm() -> None:
    with pytest.raises(WrongForm, match=r"no parser 'nobody'; it has .*qwen3_coder"):
        resolve_parser("vllm:nobody", tokens_of("hermes"))


@pytest.mark.vllm
@pytest.mark.parametrize("name", PARSERS)
def test_vllms_parsers_read_whole_calls_and_no_cut_ones(name: str, tmp_path: Path) -> None:
    form = TOOL_FORMS[name]
    base = tokens_of(name)
    source = f"vllm:{PARSERS[name]}"
    parser = resolve_parser(source, base)
    assert isinstance(parser, VLLMParser)
    assert form_problem(source, parser, base) == ""
    played = PlayedForm(form, base.read_by(parser), parser)
    reply = played.answer(form.sampled)
    assert played.tool.got == CALLED
    assert [message["role"] for message in reply] == ["tool"]
    assert played.join(form.sampled, reply).rewritten is None
    text = played.tokens.text(played.ids(form.sampled))
    whole = parser.read(text).finished
    for length in range(0, len(text), 3):
        finished = parser.read(text[:length]).finished
        assert finished in ([], whole), text[:length]
    base.tokenizer.save_pretrained(tmp_path)
    base.tokenizer.name_or_path = str(tmp_path)
    assert pickle.loads(pickle.dumps(parser)).read(text).finished == whole


@pytest.mark.vllm
def test_a_parser_of_vllms_that_reads_nothing_is_refused() -> None:
    tokens = tokens_of("harmony")
    parser = resolve_parser("vllm:openai", tokens)
    problem = form_problem("vllm:openai", parser, tokens)
    assert problem.endswith("set agent.parser=harmony, or auto")
