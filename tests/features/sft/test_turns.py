"""The rows of a conversation: the tokens that rollouts make, and which of them are learnt."""

from __future__ import annotations

from typing import Any

import pytest

from data.turn_tokens import TurnTokens
from features.sft.turns import BadConversation, TrainedRow, rows_of_conversation, turn_ids
from tests.unit.test_turn_tokens import (
    CHATML_TEMPLATE,
    QWEN3,
    TEMPLATES,
    THINK_IN_PROMPT,
    TOOL,
    assistant,
    decode,
    of_template,
    system,
    tool,
    turn_tokens,
    user,
)

Messages = list[dict[str, Any]]
DIALOGUE = [user("2 + 2?"), assistant("Four."), user("Sure?"), assistant("Quite sure.")]
# Templates that go on where a turn ends.
KEEPING = [name for name in TEMPLATES if name not in ("qwen3", "mistral-v3")]


def learnt_texts(tokens: TurnTokens, row: TrainedRow) -> list[str]:
    """The texts of the row's stretches of learnt tokens."""
    assert len(row.ids) == len(row.mask)
    texts: list[list[int]] = []
    before = 0
    for token, is_on in zip(row.ids, row.mask, strict=True):
        if is_on and not before:
            texts.append([])
        if is_on:
            texts[-1].append(token)
        before = is_on
    return [decode(tokens, ids) for ids in texts]


@pytest.mark.parametrize("name", KEEPING)
def test_a_row_says_what_the_template_says_and_learns_each_answer_with_its_end(name: str) -> None:
    tokens = turn_tokens(name)
    (row,) = rows_of_conversation(tokens, DIALOGUE)
    # By transformers itself, without anything of ours.
    whole = tokens.tokenizer.apply_chat_template(DIALOGUE, tokenize=False)
    end = tokens.tokenizer.eos_token
    assert decode(tokens, row.ids).split() == whole[: whole.rindex(end) + len(end)].split()
    learnt = learnt_texts(tokens, row)
    assert [text.split() for text in learnt] == [
        ["Four." + end] if name not in ("llama2",) else ["Four.", end],
        ["Quite", "sure." + end] if name not in ("llama2",) else ["Quite", "sure.", end],
    ]
    assert row.mask[-1] == 1 and row.mask[0] == 0


@pytest.mark.parametrize("name", TEMPLATES)
def test_rows_are_those_of_a_rollout_that_samples_the_answers(name: str) -> None:
    """A rollout: the prompt, what was sampled, the join, or the whole new prompt."""
    tokens = turn_tokens(name)
    messages = [*DIALOGUE, user("And 3 + 3?"), assistant("Six.")]
    conversation = tokens.conversation(messages[:1])
    rows = [TrainedRow(conversation.prompt(), [])]
    rows[0].mask.extend([0] * len(rows[0].ids))
    for place in (1, 3, 5):
        sampled = turn_ids(tokens, messages[:place], messages[place], messages[place + 1 :])
        assert sampled[-1] in tokens.eos_token_ids
        rows[-1].ids.extend(sampled)
        rows[-1].mask.extend([1] * len(sampled))
        if place == 5:
            break
        join = conversation.join(sampled, [messages[place + 1]])
        if join.rewritten is None:
            rows[-1].ids.extend(join.token_ids)
            rows[-1].mask.extend([0] * len(join.token_ids))
        else:
            rows.append(TrainedRow(list(join.rewritten), [0] * len(join.rewritten)))
    assert rows_of_conversation(tokens, messages) == rows


def test_a_template_that_drops_thinking_gives_a_row_for_each_turn() -> None:
    tokens = turn_tokens("qwen3")
    thought = "<think>\nHm.\n</think>\n\nFour."
    rows = rows_of_conversation(tokens, [user("2 + 2?"), assistant(thought), *DIALOGUE[2:]])
    assert [learnt_texts(tokens, row) for row in rows] == [
        [f"{thought}<|im_end|>"],
        ["<think>\n\n</think>\n\nQuite sure.<|im_end|>"],
    ]
    assert "Hm." not in decode(tokens, rows[1].ids)


def test_thinking_that_a_prompt_begins_is_not_written_twice() -> None:
    tokens = of_template(THINK_IN_PROMPT)
    answer = assistant("<think>\nHm.</think>Four.")
    (row,) = rows_of_conversation(tokens, [user("2 + 2?"), answer])
    assert learnt_texts(tokens, row) == ["Hm.</think>Four.<|im_end|>"]
    assert decode(tokens, row.ids).count("<think>") == 1


def test_a_message_says_itself_whether_it_is_learnt() -> None:
    tokens = turn_tokens("smollm2")
    first = {**DIALOGUE[1], "train": False}
    (row,) = rows_of_conversation(tokens, [DIALOGUE[0], first, *DIALOGUE[2:]])
    assert learnt_texts(tokens, row) == ["Quite sure.<|im_end|>"]
    (weighed,) = rows_of_conversation(
        tokens, [DIALOGUE[0], {**DIALOGUE[1], "weight": 0}, *DIALOGUE[2:]]
    )
    assert weighed == row
    last = {**DIALOGUE[3], "train": False}
    (row,) = rows_of_conversation(tokens, [*DIALOGUE[:3], last])
    assert learnt_texts(tokens, row) == ["Four.<|im_end|>"]
    assert row.mask[-1] == 1, "what stands behind the last learnt token is left out"
    with pytest.raises(BadConversation, match="train='no'; allowed: true and false"):
        rows_of_conversation(tokens, [user("Hi"), {**assistant("Hi"), "train": "no"}])


@pytest.mark.parametrize("name", ["smollm2", "llama3", "mistral-v1"])
def test_other_roles_are_learnt_where_they_are_asked_for(name: str) -> None:
    tokens = turn_tokens(name)
    (row,) = rows_of_conversation(tokens, DIALOGUE, trained_roles=("user",))
    told = [text.strip() for text in learnt_texts(tokens, row)]
    assert told == ["2 + 2?", "Sure?"]
    both = ("assistant", "user")
    (row,) = rows_of_conversation(tokens, DIALOGUE, trained_roles=both)
    joined = " ".join(learnt_texts(tokens, row))
    for message in DIALOGUE:
        assert message["content"] in joined
    assert "assistant" not in joined and "INST" not in joined


def test_a_message_of_another_role_that_is_learnt_by_its_own_word() -> None:
    tokens = turn_tokens("smollm2")
    messages = [*DIALOGUE[:2], {**user("Sure?"), "train": True}, *DIALOGUE[3:]]
    (row,) = rows_of_conversation(tokens, messages)
    assert [text.strip() for text in learnt_texts(tokens, row)] == [
        "Four.<|im_end|>",
        "Sure?",
        "Quite sure.<|im_end|>",
    ]


def test_tools_and_their_results_stand_in_the_row() -> None:
    tokens = turn_tokens("qwen2.5")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    messages = [system("Be brief."), user("2 + 2?"), assistant(call), tool("4"), assistant("4.")]
    (row,) = rows_of_conversation(tokens, messages, [TOOL])
    assert learnt_texts(tokens, row) == [f"{call}<|im_end|>", "4.<|im_end|>"]
    text = decode(tokens, row.ids)
    assert '"name": "add"' in text and "<tool_response>\n4\n</tool_response>" in text


def test_a_special_token_that_a_message_spells_stays_text() -> None:
    tokens = turn_tokens("smollm2")
    messages = [user("Say <|im_end|>"), assistant("I say <|im_end|> so.")]
    (row,) = rows_of_conversation(tokens, messages)
    end = tokens.tokenizer.eos_token_id
    learnt = [token for token, is_on in zip(row.ids, row.mask, strict=True) if is_on]
    assert learnt.count(end) == 1 and learnt[-1] == end


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([user("Hi")], "has no message of the role assistant"),
        ([assistant("Hi"), user("Hi")], "begins with an assistant's message"),
        (
            [user("Hi"), {**assistant("Hi"), "tool_calls": [{"function": {"name": "add"}}]}],
            "has a call of 'add' that the chat template of 'tiny' leaves out",
        ),
    ],
)
def test_what_gives_no_rows_is_told(messages: Messages, says: str) -> None:
    with pytest.raises(BadConversation, match=says):
        rows_of_conversation(turn_tokens("smollm2"), messages)


def test_a_template_that_cannot_mark_a_role_is_told() -> None:
    shouting = CHATML_TEMPLATE.replace("message['content']", "message['content'] | upper")
    shouting = shouting.replace("message.content", "message.content | upper")
    assert "upper" in shouting
    with pytest.raises(BadConversation, match="cannot mark where the messages of user stand"):
        rows_of_conversation(of_template(shouting), DIALOGUE, trained_roles=("user", "assistant"))


def test_without_a_learnt_message_there_is_no_row() -> None:
    silent = [{**message, "train": False} for message in DIALOGUE]
    assert rows_of_conversation(turn_tokens("smollm2"), silent) == []


def test_qwen3_is_among_the_templates_that_rewrite() -> None:
    assert QWEN3 is TEMPLATES["qwen3"]
    assert len(rows_of_conversation(turn_tokens("qwen3"), DIALOGUE)) == 2
