"""Tests that a conversation of many turns is joined as if all of it were rendered at each."""

import random
import time

import pytest

from data.template_window import Window, window_of
from data.turn_tokens import CHATML_TEMPLATE, Conversation, TurnTokens
from tests.unit.test_turn_tokens import (
    END,
    LLAMA2,
    QWEN3,
    SMOLLM2,
    TEMPLATES,
    THINK_IN_PROMPT,
    TOOL,
    assistant,
    encode,
    of_template,
    system,
    tool,
    turn_tokens,
    user,
)

# A template of gemma's kind: the assistant has another name, and roles alternate.
ALTERNATING = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set first = '' %}"
    "{% set loop_messages = messages %}{% endif %}{% for m in loop_messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<|im_start|>' + role + '\n' + (first if loop.first else '') + m.content | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "window"),
    [
        (CHATML_TEMPLATE, Window(1, 1)),
        (SMOLLM2, Window(2, 1)),
        (TEMPLATES["qwen2.5"], Window(3, 3)),
        (TEMPLATES["llama3"], Window(3, 1)),
        (TEMPLATES["mistral-v1"], Window(1, 1)),
        (LLAMA2, Window(4, 1)),
        (ALTERNATING, Window(3, 1)),
        (THINK_IN_PROMPT, Window(1, 1)),
        ("{{ messages[-1].role }}" + LOOP, Window(1, 3)),
        ("{% if messages | length > 3 %}x{% endif %}" + LOOP, Window(6, 1)),
        (LOOP.replace("m.content", "m.x[0]"), Window(1, 1)),
        (LOOP.replace("{{", "{% for t in m.x %}{{ loop.index }}{% endfor %}{{"), Window(1, 1)),
    ],
)
def test_a_templates_window_is_read_from_its_source(template, window):
    assert window_of(template) == window


@pytest.mark.parametrize(
    "template",
    [
        QWEN3,
        TEMPLATES["mistral-v3"],
        "{{ messages | length }}" + LOOP,
        "{{ messages }}" + LOOP,
        "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
        "{% for m in messages[-2:] %}{{ m.content }}{% endfor %}",
        "{% for m in messages[:5] %}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.cycle('a', 'b', 'c') }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ messages[-1].content }}{% endfor %}",
        "{% for m in messages %}{{ loop.index0 % 3 }}{% endfor %}",
        "{% for m in messages %}{% if m.stop %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
        "{% endfor %}",
        "{% set row = cycler('a', 'b') %}{% for m in messages %}{{ row.next() }}{% endfor %}",
        "{% for m in messages %}{% set outer = loop %}{{ outer.index }}{% endfor %}",
        "{% for m in messages %}{% macro f() %}{{ loop.index }}{% endmacro %}{{ f() }}{% endfor %}",
        "{% macro f() %}{{ rest[-1].content }}{% endmacro %}{% set rest = messages[1:] %}{{ f() }}",
        "{% set messages = messages | selectattr('role') | list %}" + LOOP,
        "{% with all = messages %}{{ all[-1].content }}{% endwith %}" + LOOP,
        "{% if nothing closes it",
    ],
)
def test_a_template_that_may_depend_on_every_message_has_no_window(template):
    assert window_of(template) is None


def long_conversation(
    turns: TurnTokens, rng: random.Random, roles: list[str], has_system: bool
) -> tuple[list, list]:
    """Draws the first messages, and twenty turns of (sampled ids, reply)."""
    words = ["higher", "lower ", "\n", "<think>Hm.</think>", "the", "<|im_end|>", "7", "<s>"]

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(0, 4)))

    first = [system("Be brief.")] if has_system else []
    steps = []
    for _ in range(20):
        sampled = encode(turns, text())
        sampled += [turns.tokenizer.eos_token_id] * rng.randint(0, 1)
        kinds = [rng.choice(roles) for _ in range(rng.randint(1, 2) if len(roles) > 1 else 1)]
        steps.append(
            (sampled, [tool(text()) if kind == "tool" else user(text()) for kind in kinds])
        )
    return [*first, user(text() or "Hi")], steps


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("name", [*TEMPLATES, "alternating", "chatml", "think in prompt"])
def test_many_turns_are_joined_as_if_everything_were_rendered_at_each(name, tools):
    own = {
        "alternating": ALTERNATING,
        "chatml": CHATML_TEMPLATE,
        "think in prompt": THINK_IN_PROMPT,
    }
    turns = of_template(own[name]) if name in own else turn_tokens(name)
    roles = ["user", "tool"] if name in ("qwen2.5", "qwen3", "smollm2", "chatml") else ["user"]
    for seed in range(6):
        rng = random.Random(seed)
        messages, steps = long_conversation(turns, rng, roles, has_system=seed % 2 == 0)
        growing = turns.conversation(messages, tools)
        assert growing.prompt() == turns.prompt(messages, tools)
        for sampled, reply in steps:
            assert growing.join(sampled, reply) == turns.join(messages, sampled, reply, tools)
            messages = [*messages, assistant(turns.text(sampled)), *reply]
        assert growing.prompt() == turns.prompt(messages, tools)


def test_what_is_rendered_of_a_long_conversation_stays_short():
    turns = turn_tokens("qwen2.5")
    growing = turns.conversation([user("Hi")])
    for _ in range(100):
        growing.join(encode(turns, "7<|im_end|>"), [user("low")])
    assert len(growing._shown) < 20 and len(growing._messages) == 201


@pytest.mark.parametrize("tools", [None, [TOOL] * 10])
def test_a_join_behind_200_turns_costs_what_it_costs_behind_ten(tools):
    turns = turn_tokens("qwen2.5")
    sampled = encode(turns, "7" + END.get("qwen2.5", "<|im_end|>"))
    short: Conversation = turns.conversation([user("Hi")], tools)
    long: Conversation = turns.conversation([user("Hi")], tools)

    def cost_of_join(conversation: Conversation) -> float:
        begun = time.process_time()
        conversation.join(sampled, [user("low")])
        return time.process_time() - begun

    for _ in range(10):
        short.join(sampled, [user("low")])
    for _ in range(200):
        long.join(sampled, [user("low")])
    # In turns, so that whatever else the machine does meets both; it only adds to the least.
    costs = [(cost_of_join(short), cost_of_join(long)) for _ in range(50)]
    assert min(late for _, late in costs) < 2 * min(early for early, _ in costs)
