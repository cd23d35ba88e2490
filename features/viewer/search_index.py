"""Makes an inverted index of all texts: which episodes hold a sequence of 1 to 5 characters.

A page that looks for a longer text takes those that hold all of its sequences of five, and then
looks into their texts. A sequence is kept as a number of 32 bits, and another one that checks it:
what holds a sequence of up to five characters is known without a look into a text, but where two
sequences share a number, whose check is 0. Invariant: an episode that holds a text is among those
that the index gives, in any case of letters; memory does not grow with the number of episodes.

    "Doors" -> d, o, r, s; do, oo, or, rs; doo, oor, ors; door, oors; doors
"""

import shutil
from functools import lru_cache
from pathlib import Path

import numpy as np

from features.viewer.data_files import DataFolder

# A sequence's number says in its highest bits which file it is in.
FILES = 256
FILE_SHIFT = 24
# So many pairs of sequence and episode wait in memory.
WAITING_PAIRS = 1 << 22
# How long the sequences are.
LENGTHS = (1, 2, 3, 4, 5)
# Mixes the characters of a sequence; the page's search.js has the same.
MIX = np.uint32(0x9E3779B1)
MIX_SHIFT = np.uint32(15)
# The same for the number that checks it.
CHECK_MIX = np.uint32(0x85EBCA6B)
# A step to the next episode that takes more than a byte.
LONG_STEP = 255


def fold(text: str) -> str:
    """Lowers the case of each character by itself, where that leaves it one character."""
    if text.isascii():
        return text.lower()
    return "".join(map(_fold_character, text))


@lru_cache(maxsize=1 << 16)
def _fold_character(character: str) -> str:
    lower = character.lower()
    # More than 16 bits: two units in JavaScript, whose cases are left as they are.
    return lower if len(lower) == 1 and character < "\U00010000" else character


def code_units(text: str) -> np.ndarray:
    """Returns the 16-bit units of a folded text, as JavaScript has them."""
    return np.frombuffer(fold(text).encode("utf-16-le", "surrogatepass"), dtype="<u2")


def sequence_numbers(units: np.ndarray, length: int, mix: np.uint32 = MIX) -> np.ndarray:
    """Mixes each `length` characters that follow each other into a number: uint32."""
    count = max(len(units) - length + 1, 0)
    mixed = np.full(count, length, dtype=np.uint32)
    for place in range(length):
        mixed = (mixed ^ units[place : place + count].astype(np.uint32)) * mix
        mixed ^= mixed >> MIX_SHIFT
    return mixed


def numbers_of(texts: list[str]) -> np.ndarray:
    """Returns all sequences of LENGTHS characters, each once: (n, 2) uint32, number and check."""
    parts = [code_units(text) for text in texts]
    if not parts:
        return np.zeros((0, 2), dtype=np.uint32)
    lengths = [len(part) for part in parts]
    units = np.concatenate(parts)
    # How much of its text follows a place: a sequence lies within one text.
    room = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(units))
    numbers = []
    for length in LENGTHS:
        within = room[: max(len(units) - length + 1, 0)] >= length
        number = sequence_numbers(units, length)[within].astype(np.uint64)
        # A check is never 0.
        check = sequence_numbers(units, length, CHECK_MIX)[within] | np.uint32(1)
        numbers.append((number << np.uint64(32)) | check)
    both = np.unique(np.concatenate(numbers))
    return np.stack([both >> np.uint64(32), both & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)


class SearchIndex:
    """Collects which episode holds what, on disk, and writes the index's files in the end."""

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        temporary.mkdir(parents=True)
        self._waiting: list[np.ndarray] = []
        self._pairs = 0

    def add(self, episode: int, texts: list[str]) -> None:
        """Adds the texts of the episode of that number; numbers must rise."""
        numbers = numbers_of(texts)
        pairs = np.empty((len(numbers), 3), dtype=np.uint32)
        pairs[:, 0] = numbers[:, 0]
        pairs[:, 1] = episode
        pairs[:, 2] = numbers[:, 1]
        self._waiting.append(pairs)
        self._pairs += len(pairs)
        if self._pairs > WAITING_PAIRS:
            self._spill()

    def _spill(self) -> None:
        """Adds what waits to a file for each part of the index."""
        if not self._waiting:
            return
        pairs = np.concatenate(self._waiting)
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        ends = np.searchsorted(pairs[:, 0] >> FILE_SHIFT, np.arange(FILES), side="right")
        start = 0
        for file, end in enumerate(ends.tolist()):
            if end > start:
                with (self._temporary / str(file)).open("ab") as pairs_of_file:
                    pairs_of_file.write(pairs[start:end].tobytes())
            start = end
        self._waiting = []
        self._pairs = 0

    def write(self, folder: DataFolder) -> None:
        """Writes search/0 to search/255, and takes the temporary files away."""
        self._spill()
        for file in range(FILES):
            path = self._temporary / str(file)
            data = path.read_bytes() if path.exists() else b""
            pairs = np.frombuffer(data, dtype=np.uint32).reshape(-1, 3)
            pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
            folder.write(f"search/{file}", {}, encode_postings(pairs))
            path.unlink(missing_ok=True)
        shutil.rmtree(self._temporary)


def encode_postings(pairs: np.ndarray) -> dict[str, np.ndarray]:
    """Encodes (n, 3): sequence and episode, both rising, and the sequence's check.

    Returns: `numbers` (k,) of the sequences, `checks` (k,), 0 where several share a number, `ends`
        (k,) where each one's bytes end, and `steps`: from one episode to the next a byte, or
        LONG_STEP and four bytes, little endian. The first counts from -1.
    """
    numbers, starts, counts = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    checks = np.zeros(len(numbers), dtype=np.uint32)
    if len(numbers):
        lowest = np.minimum.reduceat(pairs[:, 2], starts)
        highest = np.maximum.reduceat(pairs[:, 2], starts)
        checks = np.where(lowest == highest, lowest, 0).astype(np.uint32)
        # An episode that holds two such sequences counts once.
        is_new = np.ones(len(pairs), dtype=bool)
        is_new[1:] = (pairs[1:, :2] != pairs[:-1, :2]).any(axis=1)
        pairs = pairs[is_new]
        numbers, starts, counts = np.unique(pairs[:, 0], return_index=True, return_counts=True)
    episodes = pairs[:, 1].astype(np.int64)
    steps = np.diff(episodes, prepend=-1)
    steps[starts] = episodes[starts] + 1
    sizes = np.where(steps < LONG_STEP, 1, 5)
    ends_of_steps = np.cumsum(sizes)
    places = ends_of_steps - sizes
    encoded = np.zeros(int(sizes.sum()), dtype=np.uint8)
    is_long = steps >= LONG_STEP
    encoded[places] = np.where(is_long, LONG_STEP, steps)
    for byte in range(4):
        encoded[places[is_long] + 1 + byte] = (steps[is_long] >> (8 * byte)) & 0xFF
    ends = ends_of_steps[starts + counts - 1] if len(starts) else starts
    return {"numbers": numbers, "checks": checks, "ends": ends.astype(np.uint32), "steps": encoded}
