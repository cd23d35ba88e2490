"""Tests the joining of turns in token space, under the chat templates of the usual models."""

import copy
import functools
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.template_check import check_template
from data.turn_tokens import (
    CHATML_TEMPLATE,
    Join,
    TemplateRefusal,
    TurnTokens,
    fold_system_message,
)

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TOOLS_IN_SYSTEM = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
"""

TOOL_AS_USER = r"""
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
"""

QWEN25 = (
    TOOLS_IN_SYSTEM
    + r"""{%- else %}
    {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. ' }}
    {{- 'You are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"""
    + TOOL_AS_USER
    + r"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

# Thinking is kept behind the last user message, dropped before it.
QWEN3 = (
    TOOLS_IN_SYSTEM
    + r"""{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == "user" %}
        {%- set ns.found = true %}{%- set ns.last_query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}{%- set thinking = '' %}
        {%- if '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].rstrip('\n') %}
            {%- set thinking = thinking.split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thinking) %}
            {%- set content = '<think>\n' + thinking.strip('\n') + '\n</think>\n\n'
                + content.lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}"""
    + TOOL_AS_USER
    + r"""{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
)

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)

MISTRAL_V1 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)

# The tools and the system message stand in the last user turn.
MISTRAL_V3 = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles are supported!") }}
    {%- endif %}
{%- endfor %}"""

# The start of the thinking is part of the prompt; thinking is dropped from every earlier turn.
THINK_IN_PROMPT = (
    "{% for m in messages %}"
    "{% set text = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)

TEMPLATES = {
    "smollm2": SMOLLM2,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral-v1": MISTRAL_V1,
    "mistral-v3": MISTRAL_V3,
}
END = {"llama2": "</s>", "llama3": "<|eot_id|>", "mistral-v1": "</s>", "mistral-v3": "</s>"}
CONTROL = {
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"],
    "mistral-v3": [
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
    ],
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def byte_level_core() -> Tokenizer:
    """Makes a byte tokenizer whose merges may join text with the template's where turns meet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("Ġ", "Ġ"),
        ("Ċ", "Ċ"),
        ("ĠĠ", "Ċ"),
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        (".", "Ċ"),
        ("Ġ", "["),
    ]
    words = [*alphabet, *(first + second for first, second in merges)]
    core = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
                "isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return core


def sentencepiece_core() -> Tokenizer:
    """Makes a tokenizer as Llama 2's.

    A space is in front of every piece of text between special tokens.
    """
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁▁",
        *map(chr, range(33, 127)),
    ]
    merges = [("▁", "▁")]
    core = Tokenizer(
        models.BPE(
            {w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return core


def make_tokenizer(
    template: str, end: str, control: list[str], core: Tokenizer
) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        name_or_path="tiny",
        bos_token="<s>",
        eos_token=end,
        pad_token="<|endoftext|>",
        additional_special_tokens=control,
        chat_template=template,
    )
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return tokenizer


@functools.cache
def turn_tokens(name: str) -> TurnTokens:
    control = CONTROL.get(name, ["<|im_start|>", "<|object_ref_start|>"])
    return of_template(TEMPLATES[name], END.get(name, "<|im_end|>"), control)


def of_template(
    template: str, end="<|im_end|>", control=("<|im_start|>",), core=None, **template_kwargs
) -> TurnTokens:
    tokenizer = make_tokenizer(template, end, list(control), core or byte_level_core())
    stops = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    return TurnTokens(tokenizer, template_kwargs=template_kwargs, eos_token_ids=stops)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def tool(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text}


def encode(turns: TurnTokens, text: str) -> list[int]:
    return turns.tokenizer.encode(text, add_special_tokens=False)


def decode(turns: TurnTokens, token_ids: list[int]) -> str:
    return turns.tokenizer.decode(
        token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def joined_text(turns: TurnTokens, sampled: str, reply: list[dict[str, str]], **kwargs) -> str:
    join = turns.join([user("Hi")], encode(turns, sampled), reply, **kwargs)
    assert join.rewritten is None
    return decode(turns, join.token_ids)


# --- Joining ---


@pytest.mark.parametrize(
    ("name", "sampled", "joined"),
    [
        ("smollm2", "7<|im_end|>", "\n<|im_start|>user\nlow<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen2.5", "7<|im_end|>", "\n<|im_start|>user\nlow<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen2.5", "7<|im_end|>\n", "<|im_start|>user\nlow<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen2.5", "7", "<|im_end|>\n<|im_start|>user\nlow<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "7<|im_end|>", "\n<|im_start|>user\nlow<|im_end|>\n<|im_start|>assistant\n"),
        ("llama2", " 7 </s>", "<s>[INST] low [/INST]"),
        ("llama2", " 7</s>", "<s>[INST] low [/INST]"),
        ("llama2", " 7 ", "</s><s>[INST] low [/INST]"),
        ("llama2", " 7", " </s><s>[INST] low [/INST]"),
        (
            "llama3",
            "7<|eot_id|>",
            "<|start_header_id|>user<|end_header_id|>\n\nlow<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral-v1", " 7</s>", "[INST] low [/INST]"),
        ("mistral-v1", " 7", "</s>[INST] low [/INST]"),
        ("mistral-v3", " 7", "</s>[INST] low[/INST]"),
    ],
)
def test_exactly_what_was_not_sampled_of_the_template_is_appended(name, sampled, joined):
    assert joined_text(turn_tokens(name), sampled, [user("low")]) == joined


def test_an_end_that_is_not_the_templates_own_is_kept_and_the_templates_follows():
    text = joined_text(turn_tokens("qwen2.5"), "7<|endoftext|>", [user("low")])
    assert text.startswith("<|im_end|>\n<|im_start|>user")


def test_an_empty_turn_gets_its_end():
    for name in ("qwen2.5", "llama3", "mistral-v1"):
        turns = turn_tokens(name)
        join = turns.join([user("Hi")], [], [user("low")])
        assert join.rewritten is None and decode(turns, join.token_ids).startswith(
            END.get(name, "<|im_end|>\n")
        )


def test_a_template_that_closes_only_turns_that_others_follow_gets_no_second_end():
    turns = of_template(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{{ '' if loop.last and m.role == 'assistant' else '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    )
    assert joined_text(turns, "7<|im_end|>", [user("low")]).count("<|im_end|>") == 1
    check_template(turns)


def test_a_reply_of_no_messages_or_of_several_is_joined():
    turns = turn_tokens("qwen2.5")
    assert joined_text(turns, "7<|im_end|>", []) == "\n<|im_start|>assistant\n"
    assert joined_text(turns, "7<|im_end|>", [tool("1"), tool("2"), user("so?")]) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_that_has_the_words_used_as_placeholders_is_joined_as_any_other():
    turns = turn_tokens("qwen2.5")
    word = "textofthisturn textofthisturnx textofthereply"
    join = turns.join([user(word)], encode(turns, word + "<|im_end|>"), [user(word)])
    assert (
        decode(turns, join.token_ids)
        == f"\n<|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_halves_of_surrogate_pairs_do_not_stop_a_run():
    assert "low?" in joined_text(turn_tokens("qwen2.5"), "7", [user("low\ud800")])


# --- Rewritten histories ---


def test_dropped_thinking_starts_a_new_row_whose_prompt_is_the_templates():
    turns, reply = turn_tokens("qwen3"), user("Sure?")
    text = "<think>\nHm.\n</think>\n\nYes."
    join = turns.join([user("Hi")], encode(turns, text + "<|im_end|>"), [reply])
    assert join == Join([], turns.prompt([user("Hi"), assistant(text), reply]))
    assert "Hm" not in decode(turns, join.rewritten) and "Yes." in decode(turns, join.rewritten)


def test_thinking_goes_on_behind_a_tools_result_and_is_dropped_at_the_next_question():
    turns = turn_tokens("qwen3")
    text = "<think>Hm.</think>Call."
    assert "<tool_response>" in joined_text(turns, text + "<|im_end|>", [tool("4")])
    history = [user("Hi"), assistant(text), tool("4")]
    plain = encode(turns, "Four.<|im_end|>")
    assert turns.join(history, plain, [tool("5")]).rewritten is None
    rewritten = turns.join(history, plain, [user("Sure?")]).rewritten
    assert rewritten == turns.prompt([*history, assistant("Four."), user("Sure?")])


def test_a_generation_prompt_that_is_not_in_the_history_starts_a_new_row():
    turns = of_template(QWEN3, enable_thinking=False)
    assert decode(turns, turns.prompt([user("Hi")])).endswith("assistant\n<think>\n\n</think>\n\n")
    assert turns.join([user("Hi")], encode(turns, "Yes.<|im_end|>"), [user("Sure?")]).rewritten
    turns = of_template(THINK_IN_PROMPT)
    assert decode(turns, turns.prompt([user("Hi")])).endswith("assistant\n<think>\n")
    assert turns.join(
        [user("Hi")], encode(turns, "Hm.\n</think>\n\nYes.<|im_end|>"), [user("Sure?")]
    ).rewritten


def test_a_generation_prompt_with_thinking_stays_in_the_row_where_the_template_renders_it_again():
    template = THINK_IN_PROMPT.replace("m.content.split('</think>')[-1]", "'<think>\n' + m.content")
    assert joined_text(
        of_template(template), "Hm.</think>Yes.<|im_end|>", [user("Sure?")]
    ).startswith("\n<|im_start|>")


def test_tools_or_a_system_message_that_move_to_the_last_user_turn_start_a_new_row():
    turns = turn_tokens("mistral-v3")
    sampled, reply = encode(turns, " 7</s>"), [user("low")]
    with_tools = turns.join([user("Hi")], sampled, reply, tools=[TOOL])
    assert decode(turns, with_tools.rewritten).startswith(
        "<s>[INST] Hi[/INST] 7</s>[AVAILABLE_TOOLS]"
    )
    with_system = turns.join([system("Play."), user("Hi")], sampled, reply)
    assert (
        decode(turns, with_system.rewritten)
        == "<s>[INST] Hi[/INST] 7</s>[INST] Play.\n\nlow[/INST]"
    )
    assert turns.join([user("Hi")], sampled, [tool("4")], tools=[TOOL]).rewritten is None


def test_white_space_that_the_template_strips_from_a_turn_is_no_rewriting():
    for name in ("llama2", "llama3", "mistral-v3"):
        turns = turn_tokens(name)
        assert turns.join([user("Hi")], encode(turns, "\n\n 7 \n"), [user("low")]).rewritten is None


def test_an_empty_turn_that_the_template_leaves_out_starts_a_new_row_though_the_rest_fits():
    turns = of_template(
        "{% for m in messages if m.content %}[{{ m.content }}]{% endfor %}"
        "{{ '[' if add_generation_prompt }}"
    )
    assert joined_text(turns, "7", [user("low")]) == "][low]["
    # The prompt "[Hi][" and the closing "][low][" overlap in "[Hi][low][".
    assert decode(turns, turns.join([user("Hi")], [], [user("low")]).rewritten) == "[Hi][low]["


# --- Text ---


def test_the_environment_reads_no_end_of_turn_and_all_markers():
    turns = turn_tokens("qwen2.5")
    assert (
        turns.text(encode(turns, " é<tool_call>{}</tool_call> \n<|im_end|>"))
        == " é<tool_call>{}</tool_call> \n"
    )
    assert turns.text(encode(turns, "a\ufdd0b")) == "ab"
    assert turns.text(encode(turns, "<s>a<|im_start|>b<|endoftext|>")) == "ab"
    mistral = turn_tokens("mistral-v3")
    assert (
        mistral.text(encode(mistral, '[TOOL_CALLS] [{"name": "add"}]</s>'))
        == '[TOOL_CALLS] [{"name": "add"}]'
    )
    assert turns.text([]) == ""


def test_text_of_a_template_of_one_turn_is_read_too():
    turns = of_template(
        "{{ messages[0].content }}{{ raise_exception('one') if messages | length > 1 }}"
    )
    assert turns.text(encode(turns, "7<|im_end|>")) == "7"


# --- System messages and tools ---


def test_a_system_message_is_folded_where_the_template_refuses_it(caplog):
    turns = of_template(MISTRAL_V1, "</s>")
    messages = [system("Be brief."), user("2 + 2?")]
    with caplog.at_level(logging.WARNING):
        assert decode(turns, turns.prompt(messages)) == "<s>[INST] Be brief.\n\n2 + 2? [/INST]"
        turns.join(messages, encode(turns, "4"), [user("Sure?")])
    assert len(caplog.records) == 1 and "takes no system message" in caplog.text
    silent = of_template("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}")
    assert not silent.accepts_system and turn_tokens("llama2").accepts_system


def test_folding_keeps_every_text():
    assert fold_system_message([system("a"), user("b"), assistant("c")]) == [
        user("a\n\nb"),
        assistant("c"),
    ]
    assert fold_system_message([system("a"), assistant("c")]) == [user("a"), assistant("c")]
    assert fold_system_message([user("b")]) == [user("b")]
    assert fold_system_message([]) == []


def test_tools_and_variables_reach_the_template():
    turns = turn_tokens("qwen2.5")
    assert '"name": "add"' in decode(turns, turns.prompt([user("Hi")], tools=[TOOL]))
    assert joined_text(turns, "7<|im_end|>", [tool("4")], tools=[TOOL]).startswith(
        "\n<|im_start|>user\n<tool_response>"
    )


# --- The check at start-up ---


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_usual_templates_pass_the_check_in_silence(name, caplog):
    with caplog.at_level(logging.WARNING):
        turn_tokens(name).accepts_system  # noqa: B018
        caplog.clear()
        check_template(turn_tokens(name))
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "qwen3", "mistral-v3"])
def test_templates_with_tools_pass_the_check_with_their_replies(name):
    check_template(
        turn_tokens(name), tools=[TOOL], reply_roles=[("user",), ("tool",), ("tool", "user"), ()]
    )


def test_a_system_message_that_gets_lost_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        check_template(turn_tokens("mistral-v3"), tools=[TOOL], reply_roles=[("tool",)])
    assert (
        "leaves out the system message in a conversation of system, user, assistant, tool"
        in caplog.text
    )


def test_a_boundary_of_turns_that_is_tokenised_differently_is_logged(caplog):
    turns = of_template(LLAMA2, "</s>", core=sentencepiece_core())
    with caplog.at_level(logging.WARNING):
        check_template(turns)
    assert "tokenises the boundary of two turns differently" in caplog.text


@pytest.mark.parametrize(
    ("template", "roles", "fault"),
    [
        (
            MISTRAL_V1,
            ("user", "user"),
            r"refuses a conversation of user, assistant, user, user: .*must alternate",
        ),
        (
            LLAMA2,
            ("tool", "user"),
            r"refuses a conversation of system, user, assistant, tool, user: .*must alternate",
        ),
        (
            LLAMA2,
            ("tool",),
            r"refuses a conversation of system, user, assistant, tool: .*must alternate",
        ),
        (
            SMOLLM2.replace("add_generation_prompt", "false"),
            ("user",),
            r"not with add_generation_prompt=True",
        ),
        (SMOLLM2.replace("message['content']", "''"), ("user",), r"leaves out the user message"),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            ("tool",),
            r"out the tool message",
        ),
        (
            "{{ messages[0].content + messages[9].content }}",
            ("user",),
            r"refuses .*messages that the template takes",
        ),
    ],
)
def test_a_template_that_cannot_do_it_is_named_with_its_fault(template, roles, fault):
    with pytest.raises(ValueError, match=fault):
        check_template(of_template(template), reply_roles=[roles])


def test_what_costs_quality_but_not_exactness_is_logged(caplog):
    turns = turn_tokens("smollm2")
    no_stop = TurnTokens(
        turns.tokenizer, template_kwargs={}, eos_token_ids=[turns.tokenizer.pad_token_id]
    )
    with caplog.at_level(logging.INFO):
        check_template(no_stop, tools=[TOOL])
    assert "ends turns with '<|im_end|>\\n', where sampling does not stop" in caplog.text
    assert "ignores tools=" in caplog.text
    assert "earlier thinking" not in caplog.text
    with caplog.at_level(logging.INFO):
        check_template(turn_tokens("qwen3"))
    assert "drops or moves earlier thinking: such turns start new rows" in caplog.text


# --- Properties over random conversations ---

SPECIAL_LOOKS = [
    "<|im_end|>",
    "<|im_start|>user\n",
    "</s>",
    "<s>",
    "[INST]",
    "<think>",
    "</think>",
    "<tool_call>",
]
texts = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from([*SPECIAL_LOOKS, " ", "\n", " the"])), max_size=4
).map("".join)
words = st.builds(
    "{}{}".format, st.sampled_from("abcthe"), st.text("abcthe 123.,", max_size=12).map(str.rstrip)
)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[str, list, list]:
    """Draws a template's name, the first messages, and turns of (sampled ids, reply)."""
    name = draw(st.sampled_from(sorted(TEMPLATES)))
    turns = turn_tokens(name)
    first = [system(draw(texts))] if draw(st.booleans()) else []
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            sampled = draw(st.lists(st.integers(0, len(turns.tokenizer) - 1), max_size=8))
        else:
            sampled = encode(turns, draw(texts))
        sampled += [turns.tokenizer.eos_token_id] * draw(st.integers(0, 1))
        steps.append((sampled, [user(draw(texts))]))
    return name, [*first, user(draw(texts))], steps


def has_end(turns: TurnTokens, name: str, sampled: list[int]) -> bool:
    """Tells whether the end-of-turn token was sampled; ChatML's has a newline behind it."""
    if name not in END and sampled[-1:] == encode(turns, "\n"):
        sampled = sampled[:-1]
    return sampled[-1:] == [turns.tokenizer.eos_token_id]


@pytest.mark.seconds
@settings(max_examples=250, deadline=None)
@given(episodes())
def test_rows_grow_by_prefix_keep_every_sampled_id_and_read_as_the_template_renders(episode):
    name, messages, steps = episode
    turns = turn_tokens(name)
    row = turns.prompt(messages)
    reads = decode(turns, row)
    for sampled, reply in steps:
        seen, before = list(row), list(sampled)
        join = turns.join(messages, sampled, reply)
        assert sampled == before, "the caller's ids are not touched"
        text = turns.text(sampled)
        messages = [*messages, assistant(text), *reply]
        whole = turns.prompt(messages)
        if join.rewritten is not None:
            assert join == Join([], whole)
            row, reads = join.rewritten, decode(turns, whole)
            continue
        row = row + sampled + join.token_ids
        assert row[: len(seen)] == seen and row[len(seen) : len(seen) + len(sampled)] == sampled
        reads += text + (END.get(name, "<|im_end|>") if has_end(turns, name, sampled) else "")
        reads += decode(turns, join.token_ids)
        # White space does not count, since templates strip turns.
        assert "".join(reads.split()) == "".join(decode(turns, whole).split())


@pytest.mark.seconds
@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["smollm2", "qwen2.5", "qwen3", "llama3"]),
    said=st.lists(words, min_size=2, max_size=8),
)
def test_rows_of_plain_words_are_the_full_rendering_tokenised_at_once(name, said):
    turns = turn_tokens(name)
    messages = [user(said[0])]
    row = turns.prompt(messages)
    for place, (answer, reply) in enumerate(zip(said[1::2], said[2::2], strict=False)):
        # Every other turn is cut by its limit.
        end = [turns.tokenizer.eos_token_id] if place % 2 == 0 else []
        sampled = encode(turns, answer) + end
        join = turns.join(messages, sampled, [user(reply)])
        messages += [assistant(answer), user(reply)]
        row += sampled + join.token_ids
        assert row == turns.prompt(messages)


def test_equal_tools_are_marked_once_and_no_others_are_taken_for_them():
    turns = turn_tokens("qwen2.5")
    known = turns.marked_tools([TOOL])
    assert turns.marked_tools(copy.deepcopy([TOOL])) is known
    # A template writes names in their order.
    reordered = dict(reversed(TOOL.items()))
    assert reordered == TOOL
    assert list(turns.marked_tools([reordered]).marked[0]) == list(reordered)
    assert turns.marked_tools(None).marked is None


def test_a_turn_whose_markers_the_template_refuses_stays_as_it_was_sampled() -> None:
    """It was a failure of the environment, so that episodes with such turns were played again."""
    refuses = (
        "{% for m in messages %}{% if '<|box|>' in m.content %}{{ raise_exception('a box') }}"
        "{% endif %}{% endfor %}" + CHATML_TEMPLATE
    )
    turns = of_template(refuses, control=["<|im_start|>", "<|box|>"])
    plain = of_template(CHATML_TEMPLATE, control=["<|im_start|>", "<|box|>"])
    sampled = encode(turns, "in the <|box|> it is<|im_end|>")
    assert "<|box|>" in turns.text(sampled), "or nothing is refused"
    conversation = turns.conversation([user("where?")])
    alike = plain.conversation([user("where?")])
    for answer in (sampled, encode(turns, "there<|im_end|>"), sampled):
        join = conversation.join(answer, [user("no")])
        assert join.rewritten is None
        assert join == alike.join(answer, [user("no")])
    assert turns.text(conversation.prompt()).count("box") == 2


def test_an_environments_words_that_the_template_refuses_are_the_environments_fault() -> None:
    refuses = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{% endfor %}" + CHATML_TEMPLATE
    )
    conversation = of_template(refuses).conversation([user("where?")])
    with pytest.raises(TemplateRefusal, match="no tools"):
        conversation.join(encode(of_template(refuses), "there<|im_end|>"), [tool("x")])
