"""The index gives every episode that holds a text, in any case of letters."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.viewer import search_index
from features.viewer.data_files import DataFolder
from features.viewer.episode_pages import episode_texts, joined_texts
from features.viewer.records import RecordedEpisode
from features.viewer.search_index import (
    CHECK_MIX,
    LENGTHS,
    LONG_STEP,
    MIX,
    IndexPart,
    SearchIndex,
    code_units,
    decode_postings,
    encode_postings,
    fold,
    merge_indexes,
    numbers_of,
)
from tests.viewer_data import unpack


def decode(arrays: dict[str, np.ndarray], number: int) -> list[int]:
    """Reads a sequence's episodes as the page does."""
    place = int(np.searchsorted(arrays["numbers"], number))
    if place == len(arrays["numbers"]) or arrays["numbers"][place] != number:
        return []
    start = int(arrays["ends"][place - 1]) if place else 0
    long_places = arrays["long_places"].tolist()
    found, episode = [], -1
    for at in range(start, int(arrays["ends"][place])):
        step = int(arrays["steps"][at])
        if step == LONG_STEP:
            step = int(arrays["long_steps"][long_places.index(at)])
        episode += step
        found.append(episode)
    return found


def test_postings_are_read_back_with_long_steps() -> None:
    pairs = [[7, 0, 5], [7, 254, 5], [7, 509, 5], [7, 70000, 5], [9, 3, 1], [9, 258, 1]]
    arrays = encode_postings(np.array(pairs, dtype=np.uint32))
    assert arrays["checks"].tolist() == [5, 1]
    assert decode(arrays, 7) == [0, 254, 509, 70000]
    assert decode(arrays, 9) == [3, 258]
    assert decode(arrays, 8) == []
    assert decode_postings(arrays).tolist() == pairs
    nothing = encode_postings(np.zeros((0, 3), dtype=np.uint32))
    assert decode_postings(nothing).shape == (0, 3)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.lists(st.text("abAB é", max_size=12), max_size=3), min_size=1, max_size=12),
    st.data(),
)
def test_indexes_that_are_merged_have_the_bytes_of_one(
    episodes: list[list[str]], data: st.DataObject
) -> None:
    edges = data.draw(st.sets(st.integers(1, len(episodes)), max_size=4))
    starts = [0, *sorted(edges - {len(episodes)})]
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_index, "FILE_PAIRS", data.draw(st.integers(1, 40)))
        folder = DataFolder(Path(name))
        parts = []
        for number, (start, end) in enumerate(
            zip(starts, [*starts[1:], len(episodes)], strict=True)
        ):
            index = SearchIndex(Path(name) / "temporary", start)
            for episode in range(start, end):
                index.add(episode, episodes[episode])
            pairs, files = index.write(folder, number)
            parts.append(IndexPart(number=number, first=start, files=files, pairs=pairs))
        merged = merge_indexes(folder, parts, 100)
        whole = SearchIndex(Path(name) / "temporary", 0)
        for episode, texts in enumerate(episodes):
            whole.add(episode, texts)
        assert whole.write(folder, 200) == merged
        for file in range(merged[1]):
            one, other = (folder.path(f"search/{number}/{file}") for number in (100, 200))
            assert one.read_text().replace("search/100/", "search/200/") == other.read_text()


def test_a_merge_takes_in_numbers_that_two_sequences_share(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    parts = []
    for number, pairs in enumerate(([[7, 0, 3], [9, 0, 3]], [[7, 0, 5], [9, 1, 3]], [[7, 0, 3]])):
        count = search_index.write_file(folder, number, 0, np.array(pairs, dtype=np.uint32))
        parts.append(IndexPart(number=number, first=10 * number, files=1, pairs=count))
    assert merge_indexes(folder, parts, 3) == (5, 1)
    _, arrays = unpack(tmp_path / "search/3/0.js")
    assert arrays["checks"].tolist() == [0, 3]
    assert decode(arrays, 7) == [0, 10, 20] and decode(arrays, 9) == [0, 11]


@given(st.text(max_size=40), st.data())
def test_a_texts_sequences_are_among_those_of_what_holds_it(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    part = data.draw(st.sampled_from([text[start:end], fold(text[start:end])]))
    numbers = {tuple(number) for number in numbers_of([part]).tolist()}
    assert numbers <= {tuple(number) for number in numbers_of([text]).tolist()}


def mixed(units: list[int], mix: int) -> int:
    """Mixes a sequence's characters as the page's search.js does."""
    number = len(units)
    for unit in units:
        number = ((number ^ unit) * mix) % 2**32
        number ^= number >> 15
    return number


@given(st.lists(st.text(max_size=9), max_size=4))
def test_numbers_are_those_that_the_page_looks_up(texts: list[str]) -> None:
    expected = set()
    for text in texts:
        units = code_units(text).tolist()
        for length in LENGTHS:
            for start in range(len(units) - length + 1):
                sequence = units[start : start + length]
                check = mixed(sequence, int(CHECK_MIX)) | 1
                expected.add((mixed(sequence, int(MIX)), check))
    numbers = numbers_of(texts)
    assert numbers.shape == (len(expected), 2) and numbers.dtype == np.uint32
    assert numbers.tolist() == [list(pair) for pair in sorted(expected)]


def test_lone_surrogates_and_other_scripts_have_sequences() -> None:
    assert len(numbers_of(["\ud800x", "Ünïcode", "漢字", "\U0001f600"])) > 10


def test_what_does_not_fit_into_memory_is_found_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_index, "WAITING_PAIRS", 50)
    index = SearchIndex(tmp_path / "temporary", 1000)
    texts = [f"episode {number} says {'hello' if number % 3 else 'HELLO'}" for number in range(40)]
    for number, text in enumerate(texts):
        index.add(1000 + number, [text])
    monkeypatch.setattr(search_index, "FILE_PAIRS", 400)
    pairs, files = index.write(DataFolder(tmp_path / "data"), 5)
    assert not (tmp_path / "temporary").exists() and files == 16 and pairs > 2000
    for number, check in numbers_of(["hello"]).tolist():
        _, arrays = unpack(tmp_path / f"data/search/5/{(number * files) >> 32}.js")
        assert decode(arrays, number) == list(range(40))
        assert arrays["checks"][np.searchsorted(arrays["numbers"], number)] == check > 0


def test_two_sequences_that_share_a_number_are_told_by_their_check() -> None:
    pairs = [[7, 0, 3], [7, 1, 3], [7, 1, 5], [7, 2, 5], [9, 0, 3]]
    arrays = encode_postings(np.array(pairs, dtype=np.uint32))
    assert arrays["checks"].tolist() == [0, 3]
    assert decode(arrays, 7) == [0, 1, 2]


def test_a_hundred_thousand_sequences_have_checks_of_their_own() -> None:
    numbers = numbers_of([f"{number:05d}" for number in range(100_000)])
    assert len(np.unique(numbers, axis=0)) == 10 + 100 + 1000 + 10_000 + 100_000


@pytest.mark.parametrize(
    ("episodes", "name"),
    [
        ([["one", "two"], [], ["three"]], "ascii"),
        ([["Ünï", "\U0001f600 x"], ["plain"]], "units"),
        ([["lone \ud800"], ["漢字"]], "units"),
    ],
)
def test_a_file_holds_its_texts_as_one_with_the_end_of_each_episode(
    episodes: list[list[str]], name: str
) -> None:
    arrays = joined_texts(episodes)
    assert set(arrays) == {"ends", name}
    start = 0
    for texts, end in zip(episodes, arrays["ends"].tolist(), strict=True):
        encoding = "ascii" if name == "ascii" else "utf-16-le"
        part = arrays[name][start:end].tobytes().decode(encoding, "surrogatepass")
        assert part == "".join(text + "\0" for text in texts)
        start = end
    assert start == len(arrays[name])


def test_the_mark_between_texts_is_a_blank_within_one() -> None:
    turns = [{"text": "one\0two"}, {"text": "one two"}]
    episode = RecordedEpisode("group", "episode", {}, [], turns, [])
    assert episode_texts(episode) == ["one two", "episode", "group"]
