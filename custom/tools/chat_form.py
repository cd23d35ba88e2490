"""Finds out in which form a chat template writes tool calls, and which parser reads them.

    the template renders     [user, assistant: look_up(query="red apples", count=3)]
    what it wrote            <tool_call>\\n<function=look_up>…
    who reads that           qwen3_xml

Invariant: a template that renders calls is played with a parser that reads what it renders, or not
at all; what a template cannot render decides nothing.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from custom.tools.calls import ToolCall
from custom.tools.families import FAMILIES, FamilyParser, TemplateFacts
from custom.tools.families.family import typed_arguments
from custom.tools.parsers import PARSERS, ActionParser, get_parser
from custom.tools.vllm_parsers import PREFIX, VLLMParser, markers_around
from data.turn_tokens import TemplateRefusal, TurnTokens

logger = logging.getLogger(__name__)

AUTO = "auto"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What is looked for."},
                "count": {"type": "integer", "description": "How many are wanted."},
            },
            "required": ["query", "count"],
        },
    },
}
NAME = "look_up"
ARGUMENTS: dict[str, Any] = {"query": "red apples", "count": 3}
# Another call, unlike the first in its name and in every argument.
OTHER_NAME = "find"
OTHER_ARGUMENTS: dict[str, Any] = {"topic": "x y"}
RESULT = "twelvewerefound"
QUESTION = [{"role": "user", "content": "Hello"}]
# A template that renders no calls may still announce these in its own text.
ANNOUNCED = {
    "qwen3_xml": r"<function=.*<parameter=|<parameter=.*<function=",
    "glm": r"<arg_key>",
    "minimax": r"<minimax:tool_call>",
    "deepseek": r"<｜tool▁calls▁begin｜>|｜DSML｜",
    "kimi": r"<\|tool_calls_section_begin\|>",
    "mistral": r"\[TOOL_CALLS\]",
    "harmony": r"<\|channel\|>",
    "gemma": r"<\|tool_call>",
    "hermes": r"<tool_call>",
    "llama_function": r"<function=",
}
# Characters of what a template wrote that an error shows.
SHOWN = 200


class WrongForm(ValueError):
    """Reports that a parser does not read what the chat template writes."""


def call_message(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    """Makes the message of an assistant that calls a tool."""
    function = {"name": name, "arguments": arguments}
    entry = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [entry]}


def written_calls(
    tokens: TurnTokens, name: str = NAME, arguments: dict[str, Any] = ARGUMENTS
) -> Iterator[tuple[str, bool]]:
    """Yields what the template writes for a call, and whether it was given JSON text.

    Some templates take a call's arguments as an object, others as text; some want ids of nine
    letters.
    """
    for call_id in ("call00000", f"functions.{name}:0"):
        for as_text in (False, True):
            given = json.dumps(arguments) if as_text else arguments
            try:
                written = tokens.written_turn(
                    QUESTION, call_message(name, given, call_id), tools=[TOOL]
                )
            except TemplateRefusal:
                continue
            if name in written:
                yield written, as_text


def reads(parser: ActionParser, written: str) -> bool:
    """Checks whether a parser reads the probe's call, and nothing else, in what was written."""
    if isinstance(parser, FamilyParser):
        turn = parser.read(written)
        return not turn.text and not turn.thinking and _is_probe(list(turn.calls))
    return _is_probe(parser.parse(written))


def _is_probe(calls: list[ToolCall]) -> bool:
    """Checks whether these are the one call that was rendered."""
    if len(calls) != 1 or calls[0].error_kind or calls[0].name != NAME:
        return False
    return typed_arguments(calls[0], [TOOL]) == ARGUMENTS


def resolve_parser(name: str, tokens: TurnTokens) -> ActionParser:
    """Returns the parser of a name for a chat template; `auto` is the one that reads its calls.

    Raises:
        WrongForm: the parser is vLLM's, and cannot be told a call that is cut from a whole one.
        ValueError: there is no such parser.
    """
    if name == AUTO:
        name = parser_of_template(tokens)
        logger.info("agent.parser=auto: %s, as the chat template of %r writes", name, tokens.name)
    if name.startswith(PREFIX):
        return _vllm_parser(name, tokens)
    parser = get_parser(name)
    if not isinstance(parser, FamilyParser):
        return parser
    return under_template(parser, tokens)


def under_template(parser: FamilyParser, tokens: TurnTokens) -> FamilyParser:
    """Returns a family's parser that knows the chat template."""
    facts = TemplateFacts(opens_thinking=opens_thinking(parser, tokens))
    # The call that is looked at stands behind no thinking.
    closed = parser.under(TemplateFacts())
    for written, as_text in written_calls(tokens):
        if reads(closed, _as_sampled(closed, written, tokens)):
            facts = replace(facts, renders_calls=True, arguments_as_text=as_text)
            break
    facts = replace(facts, results_as_tool=_takes_results(closed.under(facts), tokens))
    return parser.under(facts)


def opens_thinking(parser: FamilyParser, tokens: TurnTokens) -> bool:
    """Checks whether the generation prompt ends inside of thinking."""
    prompt = tokens.rendered(QUESTION).rstrip()
    return any(prompt.endswith(opens) for opens, _ in parser.thinking)


def _takes_results(parser: FamilyParser, tokens: TurnTokens) -> bool:
    """Checks whether the template renders a call's result as a message of the role `tool`."""
    if not parser.facts.renders_calls:
        return False
    call = ToolCall(NAME, ARGUMENTS)
    given: Any = json.dumps(ARGUMENTS) if parser.facts.arguments_as_text else ARGUMENTS
    message = call_message(NAME, given, parser.call_id(call, 0))
    result = {
        "role": "tool",
        "content": RESULT,
        "name": NAME,
        "tool_call_id": parser.call_id(call, 0),
    }
    try:
        return RESULT in tokens.rendered([*QUESTION, message, result], [TOOL])
    except TemplateRefusal:
        return False


def _as_sampled(parser: ActionParser, written: str, tokens: TurnTokens) -> str:
    """Returns what a template wrote as the parser would read it: up to what ends the turn."""
    kept = parser.read_markers if isinstance(parser, FamilyParser) else frozenset()
    ends = [written.find(stop) for stop in tokens.stop_texts if stop not in kept]
    found = [end for end in ends if end >= 0]
    return written[: min(found)] if found else written


def parser_of_template(tokens: TurnTokens) -> str:
    """Returns the name of the parser that reads the template's calls; `function`: none does."""
    for written, _ in written_calls(tokens):
        name = _who_reads(written, tokens)
        if name:
            return name
    source = tokens.template_source
    for name, pattern in ANNOUNCED.items():
        if re.search(pattern, source, re.DOTALL):
            return name
    return "function"


def _who_reads(written: str, tokens: TurnTokens) -> str:
    """Returns the name of the family that reads what was written; "": none does."""
    for name, family in FAMILIES.items():
        parser = family()
        if reads(parser, _as_sampled(parser, written, tokens)):
            return name
    return ""


def form_problem(name: str, parser: ActionParser, tokens: TurnTokens) -> str:
    """Returns what keeps a parser from reading the calls that the template announces; "": nothing.

    Args:
        name: by which `agent.parser` calls it.
        parser: as `resolve_parser` gave it.
    """
    texts = [written for written, _ in written_calls(tokens)]
    closed = parser.under(TemplateFacts()) if isinstance(parser, FamilyParser) else parser
    if not texts or any(reads(closed, _as_sampled(closed, text, tokens)) for text in texts):
        return ""
    shown = _as_sampled(closed, texts[0], tokens).strip()[:SHOWN]
    problem = (
        f"agent.parser={name} does not read the calls of the chat template of {tokens.name!r}, "
        f"which writes {shown!r}"
    )
    would = next(filter(None, (_who_reads(text, tokens) for text in texts)), "")
    if would:
        return f"{problem}: set agent.parser={would}, or auto"
    allowed = ", ".join([*PARSERS, *FAMILIES])
    return (
        f"{problem}; no parser that is here does ({allowed}): try vllm:NAME, or set another chat "
        "template"
    )


def reading_problem(parser: str | ActionParser, tokens: TurnTokens) -> str:
    """Does as `form_problem` with a spec's parser; one of a user's own has none."""
    if isinstance(parser, FamilyParser):
        return form_problem(parser.source, parser, tokens)
    if isinstance(parser, str):
        return form_problem(parser, resolve_parser(parser, tokens), tokens)
    return ""


def _vllm_parser(name: str, tokens: TurnTokens) -> VLLMParser:
    """Makes a parser of vLLM's that knows what opens and what closes the template's calls.

    Raises:
        WrongForm: the template renders no calls, by which a cut one could be told; vLLM has no such
            parser, or is not there.
    """
    one = next(iter(written_calls(tokens)), None)
    other = next(iter(written_calls(tokens, OTHER_NAME, OTHER_ARGUMENTS)), None)
    if one is None or other is None:
        raise WrongForm(
            f"agent.parser={name}: the chat template of {tokens.name!r} renders no tool calls, by "
            "which a call that is cut off could be told from a whole one, and vLLM's parsers "
            "return both: set a template that renders them, or one of "
            f"{', '.join(FAMILIES)}"
        )
    bare = VLLMParser(name, tokens.tokenizer)
    try:
        _ = bare.parser_class
    except ValueError as error:
        raise WrongForm(str(error)) from error
    opens, closes = markers_around(
        _as_sampled(bare, one[0], tokens), _as_sampled(bare, other[0], tokens)
    )
    parser = VLLMParser(name, tokens.tokenizer, opens=opens, closes=closes)
    facts = TemplateFacts(
        opens_thinking=opens_thinking(parser, tokens),
        arguments_as_text=one[1],
        renders_calls=True,
    )
    facts = replace(facts, results_as_tool=_takes_results(parser.under(facts), tokens))
    return parser.under(facts)
