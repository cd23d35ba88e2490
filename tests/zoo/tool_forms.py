"""Chat templates that announce tools, render calls and their results, after the forms of families.

They are written for the zoo, as short as they can be. Thinking is rendered where a family renders
it: behind the last question, and dropped before. Invariant: the tokenizer of a form has the 256
bytes and the form's special tokens, so that any text is what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# The number of the last question, behind which thinking is rendered.
LAST_QUESTION = (
    "{%- set ns = namespace(last=-1, name='') -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
AS_JSON = "{{ c.arguments if c.arguments is string else (c.arguments | tojson) }}"
AS_TEXT = "{{ v if v is string else (v | tojson) }}"


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """Describes how a family writes tools, calls, thinking and results.

    Attributes:
        parser: which of the parsers reads it.
        specials: the special tokens.
        stops: which of them end a turn.
        sampled: a call of search(q="a b", n=3) as the policy writes it, the turn's end included.
        thinking: what opens and closes thinking in a sampled turn; None: the family has none.
    """

    parser: str
    template: str
    specials: tuple[str, ...]
    stops: tuple[str, ...]
    sampled: str
    thinking: tuple[str, str] | None = ("<think>\n", "\n</think>\n\n")


def template_of(
    *,
    call: str,
    result: str,
    tools: str = "",
    user: str = "<|im_start|>user\n{{ m.content }}<|im_end|>\n",
    assistant: str = "<|im_start|>assistant\n",
    closes: str = "<|im_end|>\n",
    calls: tuple[str, str] = ("", ""),
    thinking: tuple[str, str] | None = ("<think>\n", "\n</think>\n\n"),
    begins: str = "",
    prompt: str | None = None,
) -> str:
    """Writes a template.

    Args:
        call: of the call `c`, a function's name and arguments.
        result: of the message `m` of the role `tool`.
        tools: what stands before the conversation where there are tools.
        calls: what stands around a turn's calls.
        prompt: the generation prompt; None: as an assistant's turn begins.
    """
    thought = ""
    if thinking is not None:
        opens, ends = thinking
        thought = (
            "{%- if m.reasoning_content and loop.index0 > ns.last -%}"
            f"{{{{ {opens!r} + m.reasoning_content + {ends!r} }}}}{{%- endif -%}}"
        )
    before, behind = calls
    body = (
        "{%- if m.role == 'assistant' -%}"
        f"{{{{ {assistant!r} }}}}{thought}{{{{ m.content }}}}"
        "{%- if m.tool_calls -%}"
        f"{{{{ {before!r} }}}}"
        "{%- for entry in m.tool_calls -%}{%- set c = entry.function -%}"
        f"{call}{{%- endfor -%}}{{{{ {behind!r} }}}}{{%- endif -%}}{{{{ {closes!r} }}}}"
        f"{{%- elif m.role == 'tool' -%}}{result}"
        f"{{%- else -%}}{user}{{%- endif -%}}"
    )
    generation = assistant if prompt is None else prompt
    template = (
        f"{LAST_QUESTION}{{{{ {begins!r} }}}}{{%- if tools -%}}{tools}{{%- endif -%}}"
        f"{{%- for m in messages -%}}{body}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{ {generation!r} }}}}{{%- endif -%}}"
    )
    # Beside a block a newline of the template's own is dropped.
    return template.replace("\n", "{{ '\\n' }}")


def announced(form: str, opens: str = "<|im_start|>system\n", closes: str = "<|im_end|>\n") -> str:
    """Writes the system turn that announces tools and the form of their calls."""
    return f"{{{{ {opens!r} }}}}{{{{ tools | tojson }}}} {{{{ {form!r} + {closes!r} }}}}"


CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
CHATML_RESULT = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
NAMED_JSON = '{"name": "{{ c.name }}", "KEY": ' + AS_JSON + "}"
QWEN_CALL = (
    "<tool_call>\n<function={{ c.name }}>{%- for k, v in c.arguments.items() %}\n"
    "<parameter={{ k }}>\n" + AS_TEXT + "\n</parameter>{% endfor %}\n</function>\n</tool_call>"
)
GLM_CALL = (
    "\n<tool_call>{{ c.name }}{%- for k, v in c.arguments.items() %}\n<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>" + AS_TEXT + "</arg_value>{% endfor %}\n</tool_call>"
)
MINIMAX_CALL = (
    '<invoke name="{{ c.name }}">{%- for k, v in c.arguments.items() %}\n'
    '<parameter name="{{ k }}">' + AS_TEXT + "</parameter>{% endfor %}\n</invoke>\n"
)
DSML_CALL = (
    '<｜DSML｜invoke name="{{ c.name }}">{%- for k, v in c.arguments.items() %}\n'
    "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    + AS_TEXT
    + "</｜DSML｜parameter>{% endfor %}\n</｜DSML｜invoke>\n"
)
GEMMA_VALUE = "{{ '<|\"|>' + v + '<|\"|>' if v is string else (v | tojson) }}"
GEMMA_CALL = (
    "<|tool_call>call:{{ c.name }}{{ '{' }}{%- for k, v in c.arguments.items() -%}"
    "{{ k }}:" + GEMMA_VALUE + "{{ ',' if not loop.last }}{%- endfor -%}{{ '}' }}<tool_call|>"
)
PYTHONIC_CALL = (
    "{{ c.name }}({%- for k, v in c.arguments.items() -%}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{%- endfor -%}){{ ', ' if not loop.last }}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<think>",
    "</think>",
)
DEEPSEEK_TURNS: dict[str, Any] = {
    "begins": "<｜begin▁of▁sentence｜>",
    "user": "<｜User｜>{{ m.content }}",
    "assistant": "<｜Assistant｜>",
    "closes": "<｜end▁of▁sentence｜>",
    "tools": "{{ tools | tojson }}",
    "thinking": ("<think>", "</think>"),
}
DEEPSEEK_RESULT = (
    "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "<｜tool▁outputs▁end｜>"
)
# A message of harmony's: analysis, which is dropped before the last question, a call, or text.
HARMONY = (
    LAST_QUESTION
    + "{%- if tools -%}<|start|>developer<|message|># Tools {{ tools | tojson }}<|end|>"
    "{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{%- if '<|channel|>' in m.content -%}{{ raise_exception('channels in a content') }}"
    "{%- endif -%}"
    "{%- if m.thinking and loop.index0 > ns.last and (m.tool_calls or loop.last) -%}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{%- endif -%}"
    "{%- if m.tool_calls -%}{%- set c = m.tool_calls[0].function -%}"
    "{%- set ns.name = c.name -%}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>"
    "{%- elif loop.last and not add_generation_prompt -%}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{%- else -%}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{%- endif -%}"
    "{%- elif m.role == 'tool' -%}{%- if not ns.name -%}"
    "{{ raise_exception('a result without its call') }}{%- endif -%}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
MISTRAL_CALL = (
    "{%- if entry.id | length != 9 -%}{{ raise_exception('ids have nine letters') }}{%- endif -%}"
)
HERMES_SAMPLED = '<tool_call>\n{"name": "search", "arguments": {"q": "a b", "n": 3}}\n</tool_call>'
QWEN_SAMPLED = (
    "<tool_call>\n<function=search>\n<parameter=q>\na b\n</parameter>\n<parameter=n>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)

TOOL_FORMS: dict[str, ToolForm] = {
    "hermes": ToolForm(
        parser="hermes",
        template=template_of(
            tools=announced("<tool_call>"),
            call="<tool_call>\n" + NAMED_JSON.replace("KEY", "arguments") + "\n</tool_call>",
            result=CHATML_RESULT,
        ),
        specials=CHATML,
        stops=("<|im_end|>",),
        sampled=HERMES_SAMPLED + "<|im_end|>",
    ),
    "qwen3_xml": ToolForm(
        parser="qwen3_xml",
        template=template_of(
            tools=announced("<tool_call>"),
            call=QWEN_CALL,
            result=CHATML_RESULT,
            prompt="<|im_start|>assistant\n<think>\n",
        ),
        specials=CHATML,
        stops=("<|im_end|>",),
        sampled="hm\n</think>\n\n" + QWEN_SAMPLED + "<|im_end|>",
        thinking=("", "\n</think>\n\n"),
    ),
    "seed": ToolForm(
        parser="qwen3_xml",
        template=template_of(
            begins="<seed:bos>",
            tools="<seed:bos>system\n{{ tools | tojson }}<seed:eos>",
            user="<seed:bos>{{ m.role }}\n{{ m.content }}<seed:eos>",
            assistant="<seed:bos>assistant\n",
            closes="<seed:eos>",
            call=QWEN_CALL.replace("tool_call>", "seed:tool_call>"),
            result="<seed:bos>tool\n{{ m.content }}<seed:eos>",
            thinking=("<seed:think>", "</seed:think>"),
        ),
        specials=(
            *("<seed:bos>", "<seed:eos>", "<seed:think>", "</seed:think>"),
            *("<seed:tool_call>", "</seed:tool_call>"),
        ),
        stops=("<seed:eos>",),
        sampled=QWEN_SAMPLED.replace("tool_call>", "seed:tool_call>") + "<seed:eos>",
        thinking=("<seed:think>", "</seed:think>"),
    ),
    "glm": ToolForm(
        parser="glm",
        template=template_of(
            begins="[gMASK]<sop>",
            tools="<|system|>\n{{ tools | tojson }}",
            user="<|{{ m.role }}|>\n{{ m.content }}",
            assistant="<|assistant|>",
            closes="",
            call=GLM_CALL,
            result="<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>",
            thinking=("\n<think>", "</think>"),
        ),
        specials=(
            *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            *("<think>", "</think>", "<tool_call>", "</tool_call>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        stops=("<|user|>", "<|observation|>"),
        sampled="\n<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>a b</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>",
        thinking=("\n<think>", "</think>"),
    ),
    "harmony": ToolForm(
        parser="harmony",
        template=HARMONY,
        specials=(
            *("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"),
            *("<|end|>", "<|call|>", "<|return|>"),
        ),
        stops=("<|return|>", "<|call|>"),
        sampled="<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
        '{"q": "a b", "n": 3}<|call|>',
        thinking=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
    "deepseek_v3": ToolForm(
        parser="deepseek",
        template=template_of(
            **DEEPSEEK_TURNS,
            calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            call="{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.name + '\\n```json\\n' + "
            "c.arguments + '\\n```<｜tool▁call▁end｜>' }}",
            result=DEEPSEEK_RESULT,
        ),
        specials=DEEPSEEK,
        stops=("<｜end▁of▁sentence｜>",),
        sampled="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
        '{"q": "a b", "n": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        thinking=("<think>", "</think>"),
    ),
    "deepseek_v3_1": ToolForm(
        parser="deepseek",
        template=template_of(
            **DEEPSEEK_TURNS,
            calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            call="<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>"
            + AS_JSON
            + "<｜tool▁call▁end｜>",
            result=DEEPSEEK_RESULT,
        ),
        specials=DEEPSEEK,
        stops=("<｜end▁of▁sentence｜>",),
        sampled="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>"
        '{"q": "a b", "n": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        thinking=("<think>", "</think>"),
    ),
    "deepseek_v3_2": ToolForm(
        parser="deepseek",
        template=template_of(
            **DEEPSEEK_TURNS,
            calls=("\n\n<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
            call=DSML_CALL,
            result="\n\n<function_results>\n<result>{{ m.content }}</result>\n</function_results>",
        ),
        specials=(*DEEPSEEK, "｜DSML｜"),
        stops=("<｜end▁of▁sentence｜>",),
        sampled='\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="search">\n'
        '<｜DSML｜parameter name="q" string="true">a b</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls><｜end▁of▁sentence｜>",
        thinking=("<think>", "</think>"),
    ),
    "kimi": ToolForm(
        parser="kimi",
        template=template_of(
            tools="<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>",
            user="<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>",
            assistant="<|im_assistant|>assistant<|im_middle|>",
            closes="<|im_end|>",
            calls=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            call="<|tool_call_begin|>{{ entry.id }}<|tool_call_argument_begin|>"
            + AS_JSON
            + "<|tool_call_end|>",
            result="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n"
            "{{ m.content }}<|im_end|>",
            thinking=("<think>", "</think>"),
        ),
        specials=(
            *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        stops=("<|im_end|>",),
        sampled="<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0"
        '<|tool_call_argument_begin|>{"q": "a b", "n": 3}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>",
        thinking=("<think>", "</think>"),
    ),
    "minimax": ToolForm(
        parser="minimax",
        template=template_of(
            tools=announced("<minimax:tool_call>", "]~b]system\n", "[e~[\n"),
            user="]~b]{{ m.role }}\n{{ m.content }}[e~[\n",
            assistant="]~b]ai\n",
            closes="[e~[\n",
            calls=("<minimax:tool_call>\n", "</minimax:tool_call>"),
            call=MINIMAX_CALL,
            result="]~b]tool\n<response>{{ m.content }}</response>[e~[\n",
        ),
        specials=("]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
        stops=("[e~[",),
        sampled='<minimax:tool_call>\n<invoke name="search">\n<parameter name="q">a b</parameter>'
        '\n<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>[e~[',
    ),
    "mistral": ToolForm(
        parser="mistral",
        template=template_of(
            begins="<s>",
            tools="[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]",
            user="[INST]{{ m.content }}[/INST]",
            assistant="",
            closes="</s>",
            calls=("[TOOL_CALLS][", "]"),
            call=MISTRAL_CALL
            + NAMED_JSON.replace("KEY", "arguments")
            + "{{ ', ' if not loop.last }}",
            result='[TOOL_RESULTS]{"content": {{ m.content | tojson }}}[/TOOL_RESULTS]',
            thinking=None,
        ),
        specials=("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
        stops=("</s>",),
        sampled='[TOOL_CALLS][{"name": "search", "arguments": {"q": "a b", "n": 3}}]</s>',
        thinking=None,
    ),
    "mistral_v11": ToolForm(
        parser="mistral",
        template=template_of(
            begins="<s>",
            tools="[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]",
            user="[INST]{{ m.content }}[/INST]",
            assistant="",
            closes="</s>",
            call="[TOOL_CALLS]{{ c.name }}[ARGS]" + AS_JSON,
            result="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
            thinking=("[THINK]", "[/THINK]"),
        ),
        specials=(
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"),
            *("[TOOL_RESULTS]", "[THINK]", "[/THINK]"),
        ),
        stops=("</s>",),
        sampled='[TOOL_CALLS]search[ARGS]{"q": "a b", "n": 3}</s>',
        thinking=("[THINK]", "[/THINK]"),
    ),
    "llama3_json": ToolForm(
        parser="llama3_json",
        template=template_of(
            begins="<|begin_of_text|>",
            tools=announced(
                '{"name": NAME, "parameters": {…}}',
                "<|start_header_id|>system<|end_header_id|>\n\n",
                "<|eot_id|>",
            ),
            user="<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
            assistant="<|start_header_id|>assistant<|end_header_id|>\n\n",
            closes="<|eot_id|>",
            call=NAMED_JSON.replace("KEY", "parameters"),
            result="<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}<|eot_id|>",
            thinking=None,
        ),
        specials=(
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<|python_tag|>",
        ),
        stops=("<|eot_id|>",),
        sampled='{"name": "search", "parameters": {"q": "a b", "n": 3}}<|eot_id|>',
        thinking=None,
    ),
    "llama_function": ToolForm(
        parser="llama_function",
        template=template_of(
            tools=announced("<function=NAME>{…}</function>"),
            call="<function={{ c.name }}>" + AS_JSON + "</function>",
            result="<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
            thinking=None,
        ),
        specials=("<|im_start|>", "<|im_end|>"),
        stops=("<|im_end|>",),
        sampled='<function=search>{"q": "a b", "n": 3}</function><|im_end|>',
        thinking=None,
    ),
    "pythonic": ToolForm(
        parser="pythonic",
        template=template_of(
            tools=announced("[NAME(ARGUMENT=VALUE)]"),
            calls=("<|tool_call_start|>[", "]<|tool_call_end|>"),
            call=PYTHONIC_CALL,
            result="<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
        ),
        specials=("<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        stops=("<|im_end|>",),
        sampled='<|tool_call_start|>[search(q="a b", n=3)]<|tool_call_end|><|im_end|>',
    ),
    "pythonic_bare": ToolForm(
        parser="pythonic",
        template=template_of(
            tools=announced("[NAME(ARGUMENT=VALUE)]"),
            calls=("[", "]"),
            call=PYTHONIC_CALL,
            result="<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
            thinking=None,
        ),
        specials=("<|im_start|>", "<|im_end|>"),
        stops=("<|im_end|>",),
        sampled='[search(q="a b", n=3)]<|im_end|>',
        thinking=None,
    ),
    "gemma": ToolForm(
        parser="gemma",
        template=template_of(
            begins="<bos>",
            tools=announced("<|tool_call>", "<|turn>system\n", "<turn|>\n"),
            user="<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n",
            assistant="<|turn>model\n",
            closes="{}",
            call=GEMMA_CALL,
            result="<|tool_response>response:{{ m.name }}{{ '{value:' }}"
            "{{ '<|\"|>' + m.content + '<|\"|>}' }}<tool_response|>",
            thinking=("<|channel>thought\n", "\n<channel|>"),
        )
        # A turn goes on behind the result of its call.
        .replace("{{ '{}' }}", "{{ '' if m.tool_calls else '<turn|>\\n' }}")
        .replace(
            "{{ '<|turn>model\\n' }}",
            "{{ '<|turn>model\\n' if loop is not defined or loop.index0 == 0 or "
            "messages[loop.index0 - 1].role != 'tool' else '' }}",
            1,
        )
        .replace(
            "{%- if add_generation_prompt -%}",
            "{%- if add_generation_prompt and messages[-1].role != 'tool' -%}",
        ),
        specials=(
            *("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>"),
            *("<tool_call|>", '<|"|>', "<|tool_response>", "<tool_response|>"),
        ),
        stops=("<turn|>", "<|tool_response>"),
        sampled='<|tool_call>call:search{q:<|"|>a b<|"|>,n:3}<tool_call|><|tool_response>',
        thinking=("<|channel>thought\n", "\n<channel|>"),
    ),
    "json_fence": ToolForm(
        parser="json_fence",
        template=template_of(
            tools=announced("```json"),
            call="```json\n" + NAMED_JSON.replace("KEY", "arguments") + "\n```",
            result="<|im_start|>user\n```tool_output\n{{ m.content }}\n```<|im_end|>\n",
            thinking=None,
        ),
        specials=("<|im_start|>", "<|im_end|>"),
        stops=("<|im_end|>",),
        sampled='```json\n{"name": "search", "arguments": {"q": "a b", "n": 3}}\n```<|im_end|>',
        thinking=None,
    ),
}


# By family of the zoo: how its chat models write calls. Those that are not here have a form that is
# read by none of our parsers, or none.
FORMS_OF_FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": ("hermes",),
    "qwen3_moe": ("hermes", "qwen3_xml"),
    "qwen3_next": ("hermes",),
    "qwen3_5": ("qwen3_xml",),
    "qwen3_5_moe": ("qwen3_xml",),
    "llama3": ("llama3_json", "llama_function", "pythonic_bare"),
    "mistral": ("mistral",),
    "ministral3": ("mistral_v11",),
    "smollm3": ("hermes",),
    "seed_oss": ("seed",),
    "gemma3": ("json_fence",),
    "gemma4": ("gemma",),
    "exaone4": ("hermes",),
    "gpt_oss": ("harmony",),
    "glm4_moe": ("glm",),
    "glm4_moe_lite": ("glm",),
    "deepseek_v3": ("deepseek_v3", "deepseek_v3_1", "deepseek_v3_2"),
    "kimi_k2": ("kimi",),
    "kimi_linear": ("kimi",),
    "minimax_m2": ("minimax",),
    "granite4": ("hermes",),
    "nemotron_h": ("qwen3_xml",),
    "lfm2": ("pythonic",),
}


def make_byte_tokenizer(form: ToolForm) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of the 256 bytes and the form's special tokens, with its template."""
    words = ["<pad>", *form.specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token=form.stops[0],
        extra_special_tokens=[special for special in form.specials if special != form.stops[0]],
        chat_template=form.template,
    )
