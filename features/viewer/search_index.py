"""Makes an inverted index of all texts: which episodes hold a sequence of 1, 2, 3 or 5 characters.

A page that looks for a longer text takes those that hold all of its sequences of five, and then
looks into their texts. A sequence is kept as a number of 32 bits; two that share a number only cost
a look into a text. Invariant: an episode that holds a text is among those that the index gives, in
any case of letters; memory does not grow with the number of episodes.

    "Doors" -> d, o, r, s; do, oo, or, rs; doo, oor, ors; doors
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
LENGTHS = (1, 2, 3, 5)
# Mixes the characters of a sequence; the page's search.js has the same.
MIX = np.uint32(0x9E3779B1)
MIX_SHIFT = np.uint32(15)
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


def sequence_numbers(units: np.ndarray, length: int) -> np.ndarray:
    """Mixes each `length` characters that follow each other into a number: uint32."""
    count = max(len(units) - length + 1, 0)
    mixed = np.full(count, length, dtype=np.uint32)
    for place in range(length):
        mixed = (mixed ^ units[place : place + count].astype(np.uint32)) * MIX
        mixed ^= mixed >> MIX_SHIFT
    return mixed


def numbers_of(texts: list[str]) -> np.ndarray:
    """Returns the numbers of all sequences of LENGTHS characters, each once: uint32."""
    parts = [code_units(text) for text in texts]
    if not parts:
        return np.zeros(0, dtype=np.uint32)
    lengths = [len(part) for part in parts]
    units = np.concatenate(parts)
    # How much of its text follows a place: a sequence lies within one text.
    room = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(units))
    numbers = []
    for length in LENGTHS:
        mixed = sequence_numbers(units, length)
        numbers.append(mixed[room[: len(mixed)] >= length])
    return np.unique(np.concatenate(numbers))


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
        pairs = np.empty((len(numbers), 2), dtype=np.uint32)
        pairs[:, 0] = numbers
        pairs[:, 1] = episode
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
            pairs = np.frombuffer(data, dtype=np.uint32).reshape(-1, 2)
            pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
            folder.write(f"search/{file}", {}, encode_postings(pairs))
            path.unlink(missing_ok=True)
        shutil.rmtree(self._temporary)


def encode_postings(pairs: np.ndarray) -> dict[str, np.ndarray]:
    """Encodes (n, 2) pairs of sequence and episode, both rising.

    Returns: `numbers` (k,) of the sequences, `ends` (k,) where each one's bytes end, and `steps`:
        from one episode to the next a byte, or LONG_STEP and four bytes, little endian. The first
        counts from -1.
    """
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
    return {"numbers": numbers, "ends": ends.astype(np.uint32), "steps": encoded}
