"""Tests datasets: file forms, padding and truncation by hand, and what is said about bad rows."""

import json
import logging
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast

from data.rl_dataset import (
    PromptCollator,
    RLHFDataset,
    collate_fn,
    create_dataset,
    normalise_row,
    read_rows,
)
from training.config import DataConfig

WORDS = ["<pad>", "<unk>", "user", "assistant", *[f"w{i}" for i in range(20)]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}{{ suffix }}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", chat_template=template
    )


def make_config(**kwargs) -> SimpleNamespace:
    defaults = {
        "prompt_key": "prompt",
        "reward_fn_key": "data_source",
        "max_prompt_length": 8,
        "truncation": "error",
        "return_raw_chat": False,
        "filter_overlong_prompts": False,
        "filter_overlong_prompts_workers": 1,
        "apply_chat_template_kwargs": {},
        "custom_cls": SimpleNamespace(path=None, name=None),
    }
    return SimpleNamespace(**(defaults | kwargs))


def make_row(words: int, index: int) -> dict:
    """Makes a row whose prompt takes words + 2 tokens: user w0 w1 … assistant."""
    return {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": " ".join(f"w{i}" for i in range(words))}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(words)},
        "extra_info": {"index": index, "split": "train"},
    }


def write(path, rows) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- Reading ---


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_every_file_form_gives_the_same_rows(tmp_path, tokenizer, suffix):
    dataset = RLHFDataset(
        write(tmp_path / f"d{suffix}", [make_row(1, 7), make_row(3, 8)]), tokenizer, make_config()
    )
    row = dataset[1]
    ids = [WORDS.index(w) for w in ("user", "w0", "w1", "w2", "assistant")]
    assert len(dataset) == 2 and row["raw_prompt_ids"] == ids
    assert row["input_ids"].tolist() == [0, 0, 0, *ids]
    assert row["attention_mask"].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert row["position_ids"].tolist() == [0, 0, 0, 0, 1, 2, 3, 4]
    assert (
        row["input_ids"].dtype
        == row["attention_mask"].dtype
        == row["position_ids"].dtype
        == torch.int64
    )
    assert row["reward_model"] == {"style": "rule", "ground_truth": "3"} and row["index"] == 8
    assert (
        row["data_source"] == "toy"
        and row["ability"] == "math"
        and row["extra_info"]["split"] == "train"
    )
    assert "prompt" not in row and "raw_prompt" not in row


def test_several_files_follow_each_other(tmp_path, tokenizer):
    files = [
        write(tmp_path / "a.jsonl", [make_row(1, 0)]),
        write(tmp_path / "b.parquet", [make_row(2, 5)]),
    ]
    assert [row["index"] for row in RLHFDataset(files, tokenizer, make_config())] == [0, 5]


def test_max_samples_takes_the_first_rows(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", [make_row(1, i) for i in range(5)])
    assert len(RLHFDataset(file, tokenizer, make_config(), max_samples=2)) == 2
    assert len(RLHFDataset(file, tokenizer, make_config(), max_samples=9)) == 5
    assert len(create_dataset(file, make_config(), tokenizer, max_samples=3)) == 3


def test_a_row_without_an_index_gets_its_number_and_a_string_prompt_is_a_user_message(
    tmp_path, tokenizer
):
    rows = [make_row(1, 0), {**make_row(1, 0), "prompt": "w0", "extra_info": None}]
    dataset = RLHFDataset(
        write(tmp_path / "a.jsonl", rows), tokenizer, make_config(return_raw_chat=True)
    )
    assert dataset[1]["index"] == 1
    assert dataset[1]["raw_prompt_ids"] == dataset[0]["raw_prompt_ids"]
    assert (
        dataset[1]["raw_prompt"] == [{"role": "user", "content": "w0"}] == dataset[0]["raw_prompt"]
    )


def test_template_arguments_reach_the_template(tmp_path, tokenizer):
    config = make_config(apply_chat_template_kwargs={"suffix": " w9"})
    dataset = RLHFDataset(write(tmp_path / "a.jsonl", [make_row(1, 0)]), tokenizer, config)
    assert dataset[0]["raw_prompt_ids"][-1] == WORDS.index("w9")


@pytest.mark.parametrize("workers", [1, 3])
def test_overlong_prompts_are_dropped_and_counted(tmp_path, tokenizer, caplog, workers):
    rows = [make_row(words, words) for words in (6, 7, 1, 12)]
    config = make_config(filter_overlong_prompts=True, filter_overlong_prompts_workers=workers)
    with caplog.at_level(logging.INFO):
        dataset = RLHFDataset(write(tmp_path / "a.jsonl", rows), tokenizer, config)
    assert [row["index"] for row in dataset] == [6, 1]
    assert "dropped 2 of 4 prompts longer than 8 tokens" in caplog.text


def test_dropping_every_prompt_is_an_error(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", [make_row(12, 0)])
    with pytest.raises(ValueError, match="leaves no prompt: all 1 are longer"):
        RLHFDataset(file, tokenizer, make_config(filter_overlong_prompts=True))


# --- Bad input ---


@pytest.mark.parametrize("workers", [1, 3])
def test_overlong_prompts_are_refused_before_the_run_with_file_row_length_and_remedies(
    tmp_path, tokenizer, workers
):
    file = write(tmp_path / "a.jsonl", [make_row(words, words) for words in (1, 9, 2, 7, 12)])
    config = make_config(filter_overlong_prompts_workers=workers)
    remedies = (
        "raise it, set data.filter_overlong_prompts=true, "
        "or data.truncation to left, right or middle"
    )
    with pytest.raises(ValueError) as caught:
        RLHFDataset(file, tokenizer, config)
    assert str(caught.value) == (
        f"{file} row 1: the prompt has 11 tokens, data.max_prompt_length is 8 "
        f"(2 more prompts are too long); {remedies}"
    )
    with pytest.raises(ValueError, match=rf"row 1: .* is 8; {remedies}"):
        RLHFDataset(file, tokenizer, config, max_samples=2)
    assert len(RLHFDataset(file, tokenizer, config, max_samples=1)) == 1
    assert len(RLHFDataset(file, tokenizer, make_config(truncation="left"))) == 5


def test_a_row_without_the_scoring_column_is_named_where_scores_are_needed(tmp_path, tokenizer):
    rows = [make_row(1, 0), make_row(1, 1), {**make_row(1, 2), "data_source": None}]
    del rows[1]["data_source"]
    file = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(
        ValueError,
        match=r"2 of 3 rows .*a\.jsonl row 1 has no text under 'data_source'.*so have 1 more",
    ):
        RLHFDataset(file, tokenizer, make_config())
    with pytest.raises(ValueError, match=r"row 0 has no text under 'rule'.*data\.reward_fn_key"):
        RLHFDataset(file, tokenizer, make_config(reward_fn_key="rule"))
    assert len(RLHFDataset(file, tokenizer, make_config(), require_ground_truth=False)) == 3


def test_all_bad_rows_are_counted_and_the_first_are_named(tmp_path, tokenizer):
    rows = [make_row(1, i) for i in range(6)]
    rows[1]["prompt"] = None
    rows[2]["reward_model"] = {"style": "rule"}
    rows[3]["prompt"] = []
    rows[4]["reward_model"] = "5"
    file = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError) as caught:
        RLHFDataset(file, tokenizer, make_config())
    message = str(caught.value)
    assert "4 of 6 rows cannot be used" in message and "a.jsonl row 1 has no prompt" in message
    assert "a.jsonl row 2 has no reward_model.ground_truth" in message and "row 4" not in message
    with pytest.raises(ValueError, match="2 of 6 rows"):
        RLHFDataset(file, tokenizer, make_config(), require_ground_truth=False)


@pytest.mark.parametrize(
    "message", [{"content": "a"}, {"role": "user"}, {"role": "user", "content": None}, "hello"]
)
def test_a_message_without_role_or_content_is_named(tmp_path, tokenizer, message):
    rows = [make_row(1, 0), make_row(1, 1)]
    rows[1]["prompt"] = [message]
    with pytest.raises(
        ValueError, match=r"a.jsonl row 1 has the message .*without role or content"
    ):
        RLHFDataset(write(tmp_path / "a.jsonl", rows), tokenizer, make_config())


def test_extra_info_that_is_no_mapping_is_named(tmp_path, tokenizer):
    rows = [make_row(1, 0), {**make_row(1, 1), "extra_info": "easy"}]
    with pytest.raises(
        ValueError, match=r"a.jsonl row 1 has extra_info='easy', which must be a mapping"
    ):
        RLHFDataset(write(tmp_path / "a.jsonl", rows), tokenizer, make_config())


def test_a_wrong_prompt_key_shows_the_columns(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", [make_row(1, 0)])
    with pytest.raises(
        ValueError, match=r"under 'question'\. Their columns are .*'prompt'.*data\.prompt_key"
    ):
        RLHFDataset(file, tokenizer, make_config(prompt_key="question"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"prompt": "x"}\n\n{"prompt": \n',
            r"a\.jsonl line 3, column 12, cannot be read",
        ),
        ("a.jsonl", "\n", r"a\.jsonl holds no rows"),
        ("a.jsonl", "{}\n[1]\n", r"a\.jsonl line 2 holds '\[1\]', which is no JSON object"),
        ("a.jsonl", "[\n{}]\n", r"line 1, column 2, .* several lines is a \.json file"),
        ("a.json", '{"prompt": "x"}', r"a\.json holds one object, with prompt; a .* list of rows"),
        ("a.json", "{}\n{}\n", r"an object a line ends in \.jsonl"),
        ("a.json", "[1]", r"a\.json must hold rows, each an object"),
        ("a.parquet", "version https://git-lfs.github.com/spec/v1\n", "`git lfs pull`"),
        ("a.json", '{"prompt": "x"}\n{}', r"a\.json cannot be read: .*line 2"),
        ("a.json", "[]", r"a\.json holds no rows"),
        ("a.parquet", "not parquet", r"a\.parquet cannot be read"),
        ("a.csv", "x", r"ends in \.parquet, \.json, \.jsonl; this one in '\.csv'"),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"prompt": "\xe9"}\n',
            r"a\.jsonl line 2 cannot be read: .*0xe9",
        ),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        RLHFDataset(str(tmp_path / name), tokenizer, make_config())


def test_utf8_text_is_read_as_it_is(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "é\u2028日本"}\r\n'.encode())
    assert read_rows(tmp_path / "a.jsonl") == [{"prompt": "é\u2028日本"}]


def test_a_parquet_file_with_damaged_pages_is_named(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["x"] * 2000}), file)
    content = bytearray(file.read_bytes())
    content[10:60] = b"\xff" * 50
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read: ."):
        read_rows(file)


def test_a_parquet_file_whose_text_is_not_utf8_is_named(tmp_path):
    _, offsets, content = pa.array([b"\xff\xfe"], pa.binary()).buffers()
    pq.write_table(
        pa.table({"prompt": pa.StringArray.from_buffers(1, offsets, content)}),
        tmp_path / "a.parquet",
    )
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read: .*utf-8"):
        read_rows(tmp_path / "a.parquet")


def test_a_missing_file_is_named(tokenizer):
    with pytest.raises(FileNotFoundError, match=r"'nowhere/train\.parquet' does not exist"):
        RLHFDataset("nowhere/train.parquet", tokenizer, make_config())


# --- Rows of any Dataset ---


def normalise(ids, mask, length=4, truncation="error"):
    row = {"input_ids": ids, "attention_mask": mask, "state": "s"}
    return normalise_row(row, max_prompt_length=length, pad_token_id=9, truncation=truncation)


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        ([5, 6], [1, 1]),
        ([0, 0, 0, 0, 5, 6], [0, 0, 0, 0, 1, 1]),
        ([5, 6, 0], [1, 1, 0]),
        ([5, 0, 6], [1, 0, 1]),
    ],
)
@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_any_padding_side_and_type_gives_the_same_row(ids, mask, kind):
    row = normalise(kind(ids), kind(mask))
    assert row["input_ids"].tolist() == [9, 9, 5, 6] and row["attention_mask"].tolist() == [
        0,
        0,
        1,
        1,
    ]
    assert row["position_ids"].tolist() == [0, 0, 0, 1] and row["raw_prompt_ids"] == [5, 6]
    assert row["state"] == "s"


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [("left", [3, 4, 5, 6, 7]), ("right", [1, 2, 3, 4, 5]), ("middle", [1, 2, 5, 6, 7])],
)
def test_truncation_keeps_the_right_part(truncation, kept):
    row = normalise(list(range(1, 8)), [1] * 7, length=5, truncation=truncation)
    assert row["input_ids"].tolist() == row["raw_prompt_ids"] == kept
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4]


def test_normalising_twice_changes_nothing():
    once = normalise([5, 6], [1, 1])
    twice = normalise_row(once, max_prompt_length=4, pad_token_id=9, truncation="error")
    assert once.keys() == twice.keys() and torch.equal(once["input_ids"], twice["input_ids"])
    assert torch.equal(once["position_ids"], twice["position_ids"])


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([5, 6], [0, 0], "no tokens"),
        ([5.0, 6.5], [1, 1], r"input_ids are torch\.float32; allowed: integers"),
        ([True, False], [1, 1], r"input_ids are torch\.bool; allowed: integers"),
        ([5, -100], [1, 1], "input_ids has -100; token ids start at 0"),
        ([5, 6], [1], r"of one length; their shapes: \(2,\) and \(1,\)"),
        (torch.ones(2, 2), torch.ones(2, 2), r"1-D .*\(2, 2\)"),
        ([], [], "no tokens"),
    ],
)
def test_a_row_that_cannot_train_says_why(ids, mask, message):
    with pytest.raises(ValueError, match=message):
        normalise(ids, mask)


def test_ids_of_any_integer_type_and_negative_ones_under_the_mask_are_taken():
    for dtype in (np.uint16, np.int32, np.uint8):
        assert normalise(np.array([5, 6], dtype=dtype), [1, 1])["raw_prompt_ids"] == [5, 6]
    assert normalise([-100, 5, 6], [0, 1, 1])["input_ids"].tolist() == [9, 9, 5, 6]


def test_missing_and_unknown_choices_are_named():
    with pytest.raises(ValueError, match=r"lacks \['attention_mask'\]"):
        normalise_row({"input_ids": [1]}, max_prompt_length=2, pad_token_id=0, truncation="error")
    with pytest.raises(
        ValueError, match=r"'center' is unknown; allowed: error, left, middle, right"
    ):
        normalise([1, 2, 3], [1, 1, 1], length=2, truncation="center")


# --- Collating ---


def test_collating_stacks_tensors_and_keeps_equal_lists_apart(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", [make_row(2, i) for i in range(4)])
    loader = DataLoader(
        RLHFDataset(file, tokenizer, make_config()), batch_size=2, collate_fn=collate_fn
    )
    first = next(iter(loader))
    assert first["input_ids"].shape == (2, 8)
    assert first["raw_prompt_ids"].shape == (2,) and isinstance(first["raw_prompt_ids"][0], list)
    assert first["reward_model"].dtype == object and first["index"].tolist() == [0, 1]


def test_an_optional_key_that_a_row_lacks_is_none_there():
    columns = collate_fn([{"a": 1}, {"b": [2, 3], "a": 4}, {"a": 5, "c": {}}])
    assert {key: column.tolist() for key, column in columns.items()} == {
        "a": [1, 4, 5],
        "b": [None, [2, 3], None],
        "c": [None, None, {}],
    }
    assert all(column.dtype == object for column in columns.values())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"x": torch.ones(2)}, {}],
            r"'x' cannot be stacked: it is \(2,\) in row 0 .* NoneType in row 1",
        ),
        ([{}, {}, {"x": torch.ones(2)}], r"'x' .* it is NoneType in row 0 .* \(2,\) in row 2"),
        ([{"x": torch.ones(2)}, {"x": [1.0, 1.0]}], r"'x' .* \(2,\) in row 0 .* list in row 1"),
        (
            [{"x": torch.ones(2)}, {"x": torch.ones(3)}],
            r"'x' .* \(2,\) in row 0 .* \(3,\) in row 1.*pad it",
        ),
    ],
)
def test_tensors_that_lack_or_differ_in_shape_are_named(rows, message):
    with pytest.raises(ValueError, match=message):
        collate_fn(rows)


# --- Custom classes ---


def custom(tmp_path, source: str, name: str = "Mine") -> SimpleNamespace:
    (tmp_path / "mine.py").write_text(source)
    return make_config(custom_cls=SimpleNamespace(path=str(tmp_path / "mine.py"), name=name))


def test_a_custom_class_with_verls_constructor_is_used(tmp_path, tokenizer):
    config = custom(
        tmp_path,
        "from data.rl_dataset import RLHFDataset\n\n"
        "class Mine(RLHFDataset):\n"
        "    def __init__(self, data_files, tokenizer, config, processor=None):\n"
        "        super().__init__(data_files, tokenizer, config, processor)\n\n"
        "    def __getitem__(self, item):\n"
        "        return super().__getitem__(item) | {'mine': True}\n",
    )
    file = write(tmp_path / "a.jsonl", [make_row(1, i) for i in range(3)])
    dataset = create_dataset(file, config, tokenizer)
    assert isinstance(dataset, RLHFDataset) and len(dataset) == 3 and dataset[0]["mine"]
    assert [row["index"] for row in create_dataset(file, config, tokenizer, max_samples=2)] == [
        0,
        1,
    ]


def test_a_custom_class_that_is_no_dataset_is_refused(tmp_path, tokenizer):
    with pytest.raises(
        TypeError, match=r"Mine of .*mine\.py must subclass torch\.utils\.data\.Dataset"
    ):
        create_dataset("x.jsonl", custom(tmp_path, "def Mine(**kwargs): ...\n"), tokenizer)


def test_without_a_custom_class_verls_dataset_is_built(tmp_path, tokenizer):
    dataset = create_dataset(
        write(tmp_path / "a.jsonl", [make_row(1, 0)]), make_config(), tokenizer
    )
    assert type(dataset) is RLHFDataset and isinstance(dataset, Dataset)


# --- verl's hooks ---


class OfMyOwn(RLHFDataset):
    """Overrides each of the three.

    Rows of its own, one of them left out, and prompts out of another column.
    """

    def _read_files_and_tokenize(self) -> None:
        rows = [
            {"data_source": "own", "question": f"w{i}", "reward_model": {"ground_truth": "1"}}
            for i in range(4)
        ]
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def maybe_filter_out_long_prompts(self, dataframe=None):
        return [row for row in dataframe if row["question"] != "w2"]

    def _build_messages(self, example):
        return [{"role": "user", "content": example.pop("question")}]


def test_hooks_of_verls_dataset_are_called(tokenizer):
    dataset = OfMyOwn("not read.parquet", tokenizer, make_config(return_raw_chat=True), None, -1)
    rows = [dataset[i] for i in range(len(dataset))]
    assert [row["raw_prompt"][0]["content"] for row in rows] == ["w0", "w1", "w3"]
    assert "question" not in rows[0] and [row["index"] for row in rows] == [0, 1, 2]
    assert rows[2]["raw_prompt_ids"] == [WORDS.index(word) for word in ("user", "w3", "assistant")]


def test_messages_of_a_hook_decide_which_prompts_are_too_long(tmp_path, tokenizer):
    class Doubled(RLHFDataset):
        def _build_messages(self, example):
            content = example[self.prompt_key][0]["content"]
            return [{"role": "user", "content": f"{content} {content}"}]

    file = write(tmp_path / "d.jsonl", [make_row(2, 0), make_row(4, 1)])
    assert len(RLHFDataset(file, tokenizer, make_config(filter_overlong_prompts=True))) == 2
    assert (
        len(Doubled(file, tokenizer, make_config(filter_overlong_prompts=True), max_samples=-1))
        == 1
    )


def test_max_samples_may_be_positional_as_in_verl(tmp_path, tokenizer):
    file = write(tmp_path / "d.jsonl", [make_row(1, i) for i in range(5)])
    assert len(RLHFDataset(file, tokenizer, make_config(), None, 2)) == 2


def test_a_dataset_that_is_built_by_hand_takes_an_omegaconf_with_a_runs_defaults(
    tmp_path, tokenizer
):
    settings = OmegaConf.create(
        {"max_prompt_length": 8, "truncation": "${how}", "how": "left", "image_key": "images"}
    )
    dataset = RLHFDataset(write(tmp_path / "d.jsonl", [make_row(9, 0)]), tokenizer, settings)
    assert (
        dataset.config == DataConfig(max_prompt_length=8, truncation="left")
        and dataset.prompt_key == "prompt"
    )
    assert tokenizer.decode(dataset[0]["raw_prompt_ids"]) == "w2 w3 w4 w5 w6 w7 w8 assistant"


def test_lists_of_a_collate_function_become_columns_of_objects(tokenizer):
    def collate(rows):
        return {
            "input_ids": torch.stack([row["input_ids"] for row in rows]),
            "level": [row["level"] for row in rows],
        }

    columns = PromptCollator(make_config(), tokenizer, collate)(
        [{"raw_prompt": "w1", "level": [1]}] * 2
    )
    assert columns["level"].dtype == object and columns["level"].tolist() == [[1], [1]]


def test_a_row_with_nothing_but_a_raw_prompt_is_tokenised(tokenizer):
    collate = PromptCollator(make_config(), tokenizer)
    columns = collate(
        [{"raw_prompt": [{"role": "user", "content": "w1"}]}, {"raw_prompt": "w1 w2"}]
    )
    assert columns["attention_mask"].sum(1).tolist() == [3, 4]
    assert columns["raw_prompt_ids"][0] == [
        WORDS.index(word) for word in ("user", "w1", "assistant")
    ]
