"""What files may hold, what of it becomes rows, and each fault's sentence."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data.turn_tokens import TurnTokens
from examples.prepare_tiny_prompts import make_tokenizer
from features.sft.batches import batch_of
from features.sft.beside import FilesObserver
from features.sft.config import sft_config
from features.sft.data_files import BadData, RowReader, fingerprint
from features.sft.settings import SFTSettings
from features.sft.turns import TrainedRow, rows_of_conversation
from features.shared.tokenizers import tokenizer_fingerprint
from tests.unit.test_turn_tokens import assistant, decode, of_template, turn_tokens, user
from training.config.loader import ConfigError, load_config

DIALOGUE = [user("2 + 2?"), assistant("Four.")]
# A template that writes calls, and the arguments that it is given.
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{% for name in call.function.arguments %}{{ name }}={{ call.function.arguments[name] }}"
    "{% endfor %}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def reader(tokens: Any = None, max_length: int = 400, **settings: Any) -> RowReader:
    tokens = tokens or turn_tokens("smollm2")
    return RowReader(SFTSettings(**settings), tokens, max_length, len(tokens.tokenizer))


def write(folder: Path, *rows: dict[str, Any], name: str = "data.jsonl") -> str:
    path = folder / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
def test_messages_and_prompts_with_answers_are_one(tmp_path: Path, name: str) -> None:
    made = reader()
    expected = rows_of_conversation(made.tokens, DIALOGUE)
    for row in (
        {"messages": DIALOGUE},
        {"prompt": "2 + 2?", "answer": "Four."},
        {"prompt": DIALOGUE[:1], "answer": "Four."},
        {"messages": json.dumps(DIALOGUE)},
    ):
        assert made.read([write(tmp_path, row, name=name)]) == expected
    named = reader(prompt_key="question", answer_key="reply")
    assert named.read([write(tmp_path, {"question": "2 + 2?", "reply": "Four."})]) == expected


def test_a_tables_nulls_are_no_keys(tmp_path: Path) -> None:
    """Arrow gives every message the keys of all others."""
    tokens = of_template(CALLS)
    # A table has no empty objects.
    tool = {"type": "function", "function": {"name": "add"}}
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    other = {"function": {"name": "sub", "arguments": {"b": 3}}}
    rows = [
        {"messages": [user("Hi"), {**assistant(""), "tool_calls": [call]}], "tools": [tool]},
        {"messages": [user("Hi"), {**assistant(""), "tool_calls": [other]}]},
    ]
    read = [
        reader(tokens).read([write(tmp_path, *rows, name=name)])
        for name in ("data.jsonl", "data.parquet")
    ]
    assert read[0] == read[1]
    texts = [decode(tokens, row.ids) for row in read[0]]
    assert "<tool_call>add a=2</tool_call>" in texts[0]
    assert "<tool_call>sub b=3</tool_call>" in texts[1]


def test_arguments_in_json_text_are_given_as_the_mapping_where_the_template_wants_it(
    tmp_path: Path,
) -> None:
    tokens = of_template(CALLS)
    call = {"function": {"name": "add", "arguments": '{"a": 2}'}}
    file = write(tmp_path, {"messages": [user("Hi"), {**assistant(""), "tool_calls": [call]}]})
    (row,) = reader(tokens).read([file])
    assert "<tool_call>add a=2</tool_call>" in decode(tokens, row.ids)


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    made = reader()
    own = tokenizer_fingerprint(made.tokens.tokenizer)
    given = {"input_ids": [9, 8, 7, 6, 5], "loss_mask": [0, 1, 0, 1, 0], "tokenizer": own}
    expected = [TrainedRow([9, 8, 7, 6], [0, 1, 0, 1])]
    for name in ("data.jsonl", "data.parquet"):
        assert made.read([write(tmp_path, given, name=name)]) == expected
    del given["tokenizer"]
    assert made.read([write(tmp_path, given)]) == expected


def test_a_tokenizer_is_told_from_one_with_a_word_more() -> None:
    one = turn_tokens("smollm2").tokenizer
    other = of_template("", control=("<|im_start|>", "<|more|>")).tokenizer
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(one)
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)


FAULTS = [
    ({"text": "Hi"}, {}, "has neither messages, nor prompt and answer, nor input_ids"),
    ({"messages": []}, {}, "has a conversation without a message"),
    ({"messages": ["Hi"]}, {}, "a conversation is a list of messages"),
    ({"messages": [{"role": 3, "content": "Hi"}]}, {}, "a role is a text"),
    ({"messages": [user("Hi"), {"role": "assistant", "content": 5}]}, {}, "a content is a text"),
    ({"prompt": "Hi", "answer": 5}, {}, "has the answer 5; an answer is a text"),
    ({"messages": DIALOGUE, "tools": "add"}, {}, "cannot be learnt"),
    ({"messages": DIALOGUE, "tools": 7}, {}, "tools are a list of schemas"),
    ({"messages": DIALOGUE}, {"max_length": 5}, "more than 5 \\(sft.max_length"),
    ({"input_ids": [1, 2], "loss_mask": [0]}, {}, "has 2 input_ids and 1 loss_mask"),
    ({"input_ids": [1, 2], "loss_mask": [0, 3]}, {}, "those of loss_mask are 0 or 1"),
    ({"input_ids": [1, 2], "loss_mask": [1, 1]}, {}, "learns its first token"),
    ({"input_ids": [1, 99999], "loss_mask": [0, 1]}, {}, "the id 99999, which the model does not"),
    (
        {"input_ids": [1, 2], "loss_mask": [0, 1], "tokenizer": "abc"},
        {},
        "ids of the tokenizer abc, and the model's is ",
    ),
    ({"messages": [*DIALOGUE, {"role": "assistant", "content": "\ud800"}]}, {}, "no character"),
]


@pytest.mark.parametrize(("row", "settings", "says"), FAULTS)
def test_a_row_that_cannot_be_learnt_is_told_with_its_place(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    file = write(tmp_path, row)
    with pytest.raises(BadData, match=says) as error:
        reader(**settings).read([file])
    assert f"{file} row 0" in str(error.value)


def test_a_message_that_the_template_leaves_out_is_told(tmp_path: Path) -> None:
    deaf = "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    deaf += "<|im_end|>\n{% endfor %}"
    deaf += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    messages = [user("Hi"), assistant("add"), {"role": "tool", "content": "is 4"}, assistant("4")]
    with pytest.raises(BadData, match="says 'is 4' in its tool message 2, which the chat template"):
        reader(of_template(deaf)).read([write(tmp_path, {"messages": messages})])


def test_a_role_that_the_template_refuses_is_told(tmp_path: Path) -> None:
    messages = [user("Hi"), user("Ho"), assistant("4")]
    with pytest.raises(BadData, match="refuses a conversation of user, user"):
        reader(turn_tokens("mistral-v1")).read([write(tmp_path, {"messages": messages})])


def test_nothing_to_learn_is_told_with_the_reasons(tmp_path: Path) -> None:
    silent = {"messages": [DIALOGUE[0], {**DIALOGUE[1], "train": False}]}
    with pytest.raises(BadData, match="has no token to learn: 1 rows have none in messages of ass"):
        reader().read([write(tmp_path, silent)])
    with pytest.raises(BadData, match="and 1 are longer than 5 tokens"):
        reader(max_length=5, too_long="drop").read([write(tmp_path, {"messages": DIALOGUE})])


def test_long_rows_are_dropped_or_cut_as_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    longer = [*DIALOGUE, user("Sure?"), assistant("Quite sure, as sure as can be.")]
    file = write(tmp_path, {"messages": DIALOGUE}, {"messages": longer})
    (short,) = rows_of_conversation(turn_tokens("smollm2"), DIALOGUE)
    limit = len(short.ids) + 2
    with caplog.at_level(logging.WARNING):
        assert reader(max_length=limit, too_long="drop").read([file]) == [short]
    assert f"1 rows have more than {limit} tokens, and are left out" in caplog.text
    # The cut row ends with its last learnt token.
    assert reader(max_length=limit, too_long="cut").read([file]) == [short, short]


def test_many_faults_are_told_in_one_sentence(tmp_path: Path) -> None:
    file = write(tmp_path, *[{"text": "Hi"}] * 9)
    with pytest.raises(BadData, match=r"row 4 .*; so 4 more rows"):
        reader().read([file])


def test_a_batch_splits_each_row_before_its_first_learnt_token() -> None:
    rows = [TrainedRow([1, 2, 3, 4, 5], [0, 0, 1, 0, 1]), TrainedRow([6, 7], [0, 1])]
    batch = batch_of(rows, pad_id=9).batch
    assert batch["prompts"].tolist() == [[1, 2], [9, 6]]
    assert batch["responses"].tolist() == [[3, 4, 5], [7, 9, 9]]
    assert batch["response_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]


def test_a_fingerprint_tells_rows_and_their_order_apart() -> None:
    rows = [TrainedRow([1, 2], [0, 1]), TrainedRow([3, 4], [0, 1])]
    told = {fingerprint(rows), fingerprint(rows[::-1]), fingerprint(rows[:1])}
    assert len(told) == 3 and fingerprint(list(rows)) in told


def test_a_run_that_goes_on_with_other_files_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path, {"messages": DIALOGUE})
    state = FilesObserver([file]).state_dict()
    FilesObserver([file]).load_state_dict(state)
    assert "hold something else" not in caplog.text
    write(tmp_path, {"messages": DIALOGUE}, {"messages": DIALOGUE})
    FilesObserver([file]).load_state_dict(state)
    assert f"sft.files=[{file}] hold something else than when the checkpoint" in caplog.text


# The settings


def problems_of(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(list(words))
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sft.loss_coef=0.1"], "sft.loss_coef=0.1 has nothing to learn from: name sft.files"),
        (["sft.loss_coef=-1"], "sft.loss_coef"),
        (["sft.trained_roles=[]"], "sft.trained_roles=[] learns nothing"),
        (["sft.too_long=shorten"], "sft.too_long"),
        (["sft.batch_size=0"], "sft.batch_size"),
        (
            ["sft.loss_coef=0.1", "sft.files=[/nowhere/x.jsonl]"],
            "sft.files=/nowhere/x.jsonl is not a file",
        ),
        (
            ["sft.loss_coef=0.1", "sft.files=[pyproject.toml]", "sft.max_length=99999"],
            "cannot hold a row of sft.max_length=99999 tokens",
        ),
    ],
)
def test_settings_are_refused_with_a_sentence(words: list[str], says: str) -> None:
    assert says in problems_of(*words)


def test_the_other_name_of_the_coefficient_is_read() -> None:
    words = ["actor_rollout_ref.actor.sft_loss_coef=0.5", "sft.files=[x.jsonl]"]
    config = load_config(words, check=False).config
    assert config.section(SFTSettings).loss_coef == 0.5


def test_a_supervised_run_has_its_own_folder_sizes_and_nothing_that_plays() -> None:
    words = [
        "trainer.default_local_dir=/tmp/run",
        "sft.files=[a.jsonl]",
        "sft.batch_size=8",
        "sft.lr=0.5",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.total_training_steps=7",
        "sft.loss_coef=0.1",
    ]
    config = sft_config(load_config(words, check=False).config, ["b.jsonl"])
    actor = config.actor_rollout_ref.actor
    assert config.section(SFTSettings).files == ("b.jsonl",)
    assert config.section(SFTSettings).loss_coef == 0
    assert config.trainer.run_dir == "/tmp/run/sft"
    assert config.prompts_per_step == actor.ppo_mini_batch_size == 8
    assert actor.optim.lr == 0.5
    assert not config.need_critic and not config.need_reference
    assert config.trainer.total_training_steps is None
    with pytest.raises(ConfigError, match="--sft has nothing to learn from"):
        sft_config(load_config([], check=False).config, [])


ADDS = {"function": {"name": "add", "arguments": {"a": 2}}}


def with_calls(calls: Any) -> dict[str, Any]:
    return {"messages": [user("Hi"), {**assistant(""), "tool_calls": calls}]}


@pytest.mark.parametrize("calls", [json.dumps([ADDS]), [json.dumps(ADDS)], ADDS])
def test_calls_in_json_text_are_calls(tmp_path: Path, calls: Any) -> None:
    tokens = of_template(CALLS)
    expected = reader(tokens).read([write(tmp_path, with_calls([ADDS]))])
    assert reader(tokens).read([write(tmp_path, with_calls(calls))]) == expected


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (with_calls([None]), "has the call None; a call is"),
        (with_calls([{"function": "add"}]), "has the call {'function': 'add'}"),
        (with_calls("add(2)"), "has the tool_calls 'add(2)', a text that is no JSON"),
        ({"messages": DIALOGUE, "tools": "{not"}, "has the tools '{not', a text that is no JSON"),
        ({"messages": "Hi there"}, "has the conversation 'Hi there', a text that is no JSON"),
        ({"input_ids": "12", "loss_mask": [0, 1]}, "has '12' in input_ids; it is a list of whole"),
        ({"input_ids": [1, 2.5], "loss_mask": [0, 1]}, "has 2.5 in input_ids"),
        ({"input_ids": [1, None], "loss_mask": [0, 1]}, "has None in input_ids"),
        ({"input_ids": [[1], [2]], "loss_mask": [[0], [1]]}, "has [1] in input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "has 0.5 in loss_mask"),
        ({"prompt": "Hi", "answer": "\ud800"}, "which is no character that a tokenizer takes"),
    ],
)
def test_a_row_that_is_no_such_is_told_by_its_number(
    tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadData) as raised:
        reader(of_template(CALLS)).read([write(tmp_path, {"messages": DIALOGUE}, row)])
    assert says in str(raised.value)
    assert "data.jsonl row 1 has" in str(raised.value)


def test_words_that_the_tokenizer_has_not_are_not_learnt_as_others(tmp_path: Path) -> None:
    """A tokenizer of words has one id for all that it does not know."""
    tokenizer = make_tokenizer()
    tokens = TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=[tokenizer.eos_token_id])
    assert reader(tokens).read([write(tmp_path, {"prompt": "1 2", "answer": "3"})])
    with pytest.raises(BadData, match=r"row 0 says .*has no tokens: take the row out"):
        reader(tokens).read([write(tmp_path, {"prompt": "1 2", "answer": "eleven"})])
