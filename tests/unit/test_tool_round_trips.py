"""Tests that tool calls go round in every form: rendered, read, executed, answered and joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from custom.tools import FAMILIES, get_parser
from custom.tools.chat_form import form_problem, resolve_parser
from custom.tools.families import FamilyParser
from data.turn_tokens import TurnTokens
from tests.zoo.tool_forms import TOOL_FORMS, ToolForm
from tests.zoo.tool_proofs import CALLED, QUESTION, PlayedForm, call_goes_round

EVERY_FORM = [pytest.param(form, id=name) for name, form in TOOL_FORMS.items()]
WITH_THINKING = [
    pytest.param(form, id=name) for name, form in TOOL_FORMS.items() if form.thinking is not None
]
ROW_FORMS = [
    pytest.param(form, id=name)
    for name, form in TOOL_FORMS.items()
    # The policy writes harmony's header in another order than its template.
    if name != "harmony"
]


def thought(form: ToolForm, sampled: str) -> str:
    """Returns a turn that begins with thinking."""
    assert form.thinking is not None
    opens, closes = form.thinking
    return opens + "hm" + closes + sampled.removeprefix("hm\n</think>\n\n")


def test_every_parser_has_a_form() -> None:
    assert {form.parser for form in TOOL_FORMS.values()} == set(FAMILIES)


@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_call_goes_round(form: ToolForm) -> None:
    assert call_goes_round(form)


@pytest.mark.parametrize("form", ROW_FORMS)
def test_the_joined_row_is_the_templates_own_rendering(form: ToolForm) -> None:
    played = PlayedForm.of(form)
    reply = played.answer(form.sampled)
    join = played.join(form.sampled, reply)
    row = played.tokens.prompt(QUESTION, played.tools) + played.ids(form.sampled) + join.token_ids
    whole = played.tokens.prompt([*QUESTION, played.in_parts(form.sampled), *reply], played.tools)
    assert played.tokens.tokenizer.decode(row) == played.tokens.tokenizer.decode(whole)
    assert row == whole


@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_turn_that_was_cut_gets_its_end_once(form: ToolForm) -> None:
    """A turn of the most tokens is closed; behind a whole one its end is not written again."""
    played = PlayedForm.of(form)
    [stop] = [stop for stop in form.stops if form.sampled.endswith(stop)]
    if stop == "<|call|>":
        # There the stop is what finishes the call.
        return
    reply = played.answer(form.sampled)
    whole = played.join(form.sampled, reply)
    cut = played.join(form.sampled.removesuffix(stop), reply)
    assert cut.token_ids == played.ids(stop) + whole.token_ids


@pytest.mark.parametrize("form", WITH_THINKING)
def test_thinking_stays_as_it_was_sampled_until_the_template_drops_it(form: ToolForm) -> None:
    played = PlayedForm.of(form)
    sampled = thought(form, form.sampled)
    text = played.tokens.text(played.ids(sampled))
    assert played.parser.read(text).thinking == "hm"
    reply = played.answer(sampled)
    assert played.tool.got == CALLED
    join = played.join(sampled, reply)
    # Behind the result of a tool thinking is kept.
    assert join.rewritten is None
    # Behind another question it is not.
    messages = [*QUESTION, played.in_parts(sampled), *reply]
    final = {"role": "assistant", "content": "It is 5."}
    question = {"role": "user", "content": "Sure?"}
    conversation = played.tokens.conversation(QUESTION, played.tools)
    conversation.join(played.ids(sampled), reply)
    last = thought(form, "It is 5.")
    if form.parser == "harmony":
        last = last.removesuffix("It is 5.") + "<|channel|>final<|message|>It is 5.<|return|>"
    later = conversation.join(played.ids(last), [question])
    assert later.rewritten == played.tokens.prompt([*messages, final, question], played.tools)
    assert "hm" not in played.tokens.tokenizer.decode(later.rewritten)


@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_broken_call_is_told_and_stays_in_the_row(form: ToolForm) -> None:
    played = PlayedForm.of(form)
    [stop] = [stop for stop in form.stops if form.sampled.endswith(stop)]
    half = form.sampled[: form.sampled.index("a b") + 2] + stop
    reply = played.answer(half)
    assert not played.tool.got
    assert [message["role"] for message in reply] == ["user"]
    assert "Error (bad_json)" in reply[0]["content"]
    assert FAMILIES[form.parser].form in reply[0]["content"]
    join = played.join(half, reply)
    shown = played.tokens.tokenizer.decode(join.rewritten or join.token_ids)
    assert "Error (bad_json)" in shown


def test_gpt_oss_goes_on_behind_a_call_with_the_ids_that_were_sampled() -> None:
    """The template writes the recipient before the channel, models write it behind."""
    played = PlayedForm.of(TOOL_FORMS["harmony"])
    sampled = TOOL_FORMS["harmony"].sampled
    join = played.join(sampled, played.answer(sampled))
    assert join.rewritten is None
    assert played.tokens.tokenizer.decode(join.token_ids) == (
        "<|start|>functions.search to=assistant<|channel|>commentary<|message|>"
        '"found 3 of a b"<|end|><|start|>assistant'
    )


@pytest.mark.parametrize("stop", ["<|user|>", "<|observation|>"])
def test_the_next_roles_marker_ends_a_turn_and_stands_there_once(stop: str) -> None:
    played = PlayedForm.of(TOOL_FORMS["glm"])
    call = TOOL_FORMS["glm"].sampled.removesuffix("<|observation|>")
    reply = played.answer(call + stop)
    join = played.join(call + stop, reply)
    text = played.tokens.tokenizer.decode(join.rewritten or join.token_ids)
    if stop == "<|observation|>":
        assert text == "\n<tool_response>\nfound 3 of a b\n</tool_response><|assistant|>"
    else:
        # The turn ended as if a user were to speak: the template has it otherwise.
        assert join.rewritten is not None
        assert "<|user|><|observation|>" not in text
        assert text.count("<|observation|>") == 1


@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_parser_of_another_form_is_refused_and_the_right_one_named(form: ToolForm) -> None:
    tokens = PlayedForm.of(form).tokens
    for name in FAMILIES:
        if name == form.parser:
            continue
        parser = resolve_parser(name, tokens)
        problem = form_problem(name, parser, tokens)
        assert f"set agent.parser={form.parser}, or auto" in problem, (name, problem)
    problem = form_problem("react", get_parser("react"), tokens)
    assert f"set agent.parser={form.parser}, or auto" in problem
    assert bool(form_problem("function", get_parser("function"), tokens)) == (
        form.parser not in ("hermes", "mistral", "llama3_json", "json_fence", "llama_function")
        or form in (TOOL_FORMS["mistral_v11"], TOOL_FORMS["llama_function"])
    )


@pytest.mark.parametrize("form", EVERY_FORM)
def test_auto_reads_a_template_that_only_announces_calls(form: ToolForm) -> None:
    """Some templates render no calls, and say in their own text how these are written."""
    if form.parser in ("llama3_json", "json_fence", "pythonic"):
        return
    plain = form.template.replace("m.tool_calls", "none")
    announces = "{#- " + form.sampled.replace("{", "(").replace("}", ")") + " -#}"
    played_form = replace(form, template=announces + plain)
    assert PlayedForm.of(played_form).parser.name == form.parser


def tokens_of(template: str) -> TurnTokens:
    form = replace(TOOL_FORMS["hermes"], template=template)
    return PlayedForm.of(form).tokens if "tool_call" in template else bare_tokens(form)


def bare_tokens(form: ToolForm) -> TurnTokens:
    from tests.zoo.tool_forms import make_byte_tokenizer

    tokenizer = make_byte_tokenizer(form)
    stops: Any = tokenizer.convert_tokens_to_ids(list(form.stops))
    return TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=stops)


def test_a_template_without_calls_is_read_as_before() -> None:
    tokens = tokens_of(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    parser = resolve_parser("auto", tokens)
    assert not isinstance(parser, FamilyParser)
    assert parser is not None and form_problem("react", get_parser("react"), tokens) == ""
