"""Data files hold numbers bit for bit, and texts that no page takes for anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.prepare_tiny_prompts import make_tokenizer
from features.viewer.data_files import MOST_NESTED, DataFolder, encode, pack, plain
from features.viewer.token_texts import TokenTexts
from tests.viewer_data import unpack


def test_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    arrays = {
        "odd": np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], dtype=np.float32),
        "same": np.full(1000, 0.1, dtype=np.float32),
        "again": np.full(1000, 0.1, dtype=np.float32),
        "nan": np.full(5, np.nan, dtype=np.float32),
        "small": np.arange(-3, 4, dtype=np.int8),
        "none": np.zeros(0, dtype=np.int32),
        "double": np.array([0.1, 1 / 3]),
    }
    DataFolder(tmp_path).write("pages/0/0", {"text": "a"}, arrays)
    _, read = unpack(tmp_path / "pages/0/0.js")
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        assert read[name].tobytes() == array.tobytes(), name
    assert (tmp_path / "pages/0/0.js").stat().st_size < 1000


def test_headers_hold_what_json_has_not(tmp_path: Path) -> None:
    nasty = "</script>\u2028\x00\ud800\u202e"
    numbers = [float("nan"), float("inf"), np.float32(0.5)]
    header = {"text": nasty, "numbers": numbers, "path": tmp_path}
    folder = DataFolder(tmp_path)
    folder.write("list/0", plain(header), {})
    read, _ = unpack(tmp_path / "list/0.js")
    assert read["text"] == nasty
    assert read["numbers"] == ["NaN", "Infinity", 0.5]
    assert (tmp_path / "list/0.js").read_text().isascii()


def nested(depth: int, inner: Any) -> Any:
    for level in range(depth):
        inner = {"in": inner} if level % 2 else [inner, 1]
    return inner


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from([np.float32(0.1), np.int64(7), np.float64("nan"), Path("a"), 10**400]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.integers(), inner, max_size=2),
    ),
    max_leaves=12,
)


@given(VALUES, st.integers(0, 2 * MOST_NESTED))
def test_a_value_is_encoded_as_what_is_plain_of_it(value: Any, depth: int) -> None:
    for one in (value, nested(depth, value)):
        assert encode(one) == json.dumps(plain(one), allow_nan=False)
    described = {"known": [[1, "a"]], "turns": [{"facts": nested(depth, value)}]}
    text = encode(described, recorded=[described["turns"][0]["facts"]])
    assert text == json.dumps(plain(described), allow_nan=False)


def test_what_is_nested_too_deep_is_left_out_where_it_is_recorded() -> None:
    for depth in range(MOST_NESTED - 12, MOST_NESTED + 3):
        described = {"turns": [{"facts": nested(depth, "inside")}]}
        text = encode(described, recorded=[described["turns"][0]["facts"]])
        assert text == json.dumps(plain(described))
        assert ("inside" in text) == (depth + 3 <= MOST_NESTED)


def test_entries_that_are_encoded_already_come_first() -> None:
    arrays = {"a": np.arange(3, dtype=np.int32)}
    header = {"episodes": [{"id": "é"}, {"id": "b"}], "ids": [1]}
    encoded = {"episodes": '[{"id": "\\u00e9"}, {"id": "b"}]'}
    assert pack({"ids": [1]}, arrays, encoded) == pack(header, arrays)


def test_a_dtype_that_pages_lack_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="complex128 has no counterpart in a page: x"):
        DataFolder(tmp_path).write("list/0", {}, {"x": np.zeros(2, dtype=complex)})


def test_texts_of_tokens_read_as_the_whole() -> None:
    tokenizer = make_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("guess 3 higher 7")
    assert "".join(texts.of(one) for one in ids).split() == tokenizer.decode(ids).split()
    assert texts.of(10**6).startswith("#") or texts.of(10**6) == ""


def test_bytes_of_one_character_are_shown_with_the_first_token() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({character: i for i, character in enumerate(alphabet)}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    ids = np.array(fast.encode("a漢b"))
    texts = TokenTexts(fast)
    assert texts.joined(ids) == {1: "漢", 2: "", 3: ""}
    assert texts.of(int(ids[0])) == "a"


def test_without_a_tokenizer_ids_are_shown() -> None:
    texts = TokenTexts(None)
    assert texts.of(17) == "#17 "
    assert texts.joined(np.array([1, 2])) == {}
