"""The index gives every episode that holds a text, in any case of letters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from features.viewer import search_index
from features.viewer.data_files import DataFolder
from features.viewer.episode_pages import joined_texts
from features.viewer.search_index import (
    FILE_SHIFT,
    LONG_STEP,
    SearchIndex,
    encode_postings,
    fold,
    numbers_of,
)
from tests.viewer_data import unpack


def decode(arrays: dict[str, np.ndarray], number: int) -> list[int]:
    """Reads a sequence's episodes as the page does."""
    place = int(np.searchsorted(arrays["numbers"], number))
    if place == len(arrays["numbers"]) or arrays["numbers"][place] != number:
        return []
    start = int(arrays["ends"][place - 1]) if place else 0
    steps = arrays["steps"][start : int(arrays["ends"][place])].tolist()
    found, episode = [], -1
    while steps:
        step = steps.pop(0)
        if step == LONG_STEP:
            step = int.from_bytes(bytes(steps[:4]), "little")
            steps = steps[4:]
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


@given(st.text(max_size=40), st.data())
def test_a_texts_sequences_are_among_those_of_what_holds_it(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    part = data.draw(st.sampled_from([text[start:end], fold(text[start:end])]))
    numbers = {tuple(number) for number in numbers_of([part]).tolist()}
    assert numbers <= {tuple(number) for number in numbers_of([text]).tolist()}


def test_lone_surrogates_and_other_scripts_have_sequences() -> None:
    assert len(numbers_of(["\ud800x", "Ünïcode", "漢字", "\U0001f600"])) > 10


def test_what_does_not_fit_into_memory_is_found_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_index, "WAITING_PAIRS", 50)
    index = SearchIndex(tmp_path / "temporary")
    texts = [f"episode {number} says {'hello' if number % 3 else 'HELLO'}" for number in range(40)]
    for number, text in enumerate(texts):
        index.add(number, [text])
    index.write(DataFolder(tmp_path / "data"))
    assert not (tmp_path / "temporary").exists()
    for number, check in numbers_of(["hello"]).tolist():
        _, arrays = unpack(tmp_path / f"data/search/{number >> FILE_SHIFT}.js")
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
        ([["a\0b"], ["c"]], "ascii"),
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
        # What marks the end of a text is a blank within one.
        assert part == "".join(text.replace("\0", " ") + "\0" for text in texts)
        start = end
    assert start == len(arrays[name])
