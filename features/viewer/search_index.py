"""Makes an inverted index of all texts: which episodes hold a sequence of 1 to 5 characters.

A page that looks for a longer text takes those that hold all of its sequences of five, and then
looks into their texts. A sequence is kept as a number of 32 bits, and another one that checks it:
what holds a sequence of up to five characters is known without a look into a text, but where two
sequences share a number, whose check is 0. Invariant: an episode that holds a text is among those
that the index gives, in any case of letters; memory does not grow with the number of episodes; and
indexes of episodes that follow each other are merged to the bytes that one of all of them has.

    "Doors" -> d, o, r, s; do, oo, or, rs; doo, oor, ors; door, oors; doors
"""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from features.viewer.data_files import DataFolder

# A sequence's number says in its highest bits in which of an index's files it is.
MOST_FILES = 256
# A file holds about so many pairs of sequence and episode.
FILE_PAIRS = 1 << 16
# So many pairs of sequence and episode wait in memory.
WAITING_PAIRS = 1 << 22
# How long the sequences are.
LENGTHS = (1, 2, 3, 4, 5)
LENGTHS_COLUMN = np.array(LENGTHS, dtype=np.uint32)[:, None]
# Mixes the characters of a sequence; the page's search.js has the same.
MIX = np.uint32(0x9E3779B1)
MIX_SHIFT = np.uint32(15)
# The same for the number that checks it.
CHECK_MIX = np.uint32(0x85EBCA6B)
MIXES = np.array([[MIX], [CHECK_MIX]])
# A step to the next episode that takes more than a byte.
LONG_STEP = 255


@dataclass(frozen=True, kw_only=True)
class IndexPart:
    """Says what the index of a part of the episodes is.

    Attributes:
        number: of its folder, search/NUMBER.
        first: the number of its first episode; its postings count from there on.
        files: so many files it has.
        pairs: of sequence and episode, counted.
    """

    number: int
    first: int
    files: int
    pairs: int


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


def joined_units(texts: list[str]) -> tuple[np.ndarray, list[int]]:
    """Returns the units of all texts, one behind the other, uint32, and how many each has."""
    whole = "".join(texts)
    if whole.isascii():
        units = np.frombuffer(whole.lower().encode("ascii"), dtype=np.uint8)
        return units.astype(np.uint32), [len(text) for text in texts]
    parts = [code_units(text) for text in texts]
    return np.concatenate(parts).astype(np.uint32), [len(part) for part in parts]


def sequence_numbers(units: np.ndarray) -> np.ndarray:
    """Mixes the characters of all sequences, those of all LENGTHS at once.

    Args:
        units: (n,) uint32, a character's each.

    Returns: (lengths, 2, n) uint32, by length and first character the number and its check, which
        is never 0. Behind the end of `units` zeros follow.
    """
    size = len(units)
    longest = len(LENGTHS)
    padded = np.zeros(size + longest, dtype=np.uint32)
    padded[:size] = units
    mixed = np.empty((longest, 2, size), dtype=np.uint32)
    mixed[:] = LENGTHS_COLUMN[:, :, None]
    for place in range(longest):
        # The sequences that are longer than this.
        longer = mixed[place:]
        longer ^= padded[place : place + size]
        longer *= MIXES
        longer ^= longer >> MIX_SHIFT
    mixed[:, 1] |= np.uint32(1)
    return mixed


def numbers_of(texts: list[str]) -> np.ndarray:
    """Returns all sequences of LENGTHS characters, each once: (n, 2) uint32, number and check."""
    units, lengths = joined_units(texts)
    # How much of its text follows a place: a sequence lies within one text.
    room = np.repeat(np.cumsum(lengths, dtype=np.int64), lengths) - np.arange(len(units))
    is_within = room >= LENGTHS_COLUMN
    mixed = sequence_numbers(units)
    both = mixed[:, 0][is_within].astype(np.uint64)
    both <<= np.uint64(32)
    both |= mixed[:, 1][is_within]
    both = np.unique(both)
    # The number is the high half.
    return both.astype("<u8", copy=False).view("<u4").reshape(-1, 2)[:, ::-1]


class SearchIndex:
    """Collects which episode of a part holds what, on disk where it is much, and writes it.

    Args:
        temporary: a folder that is not there yet, for what does not fit into memory.
        first: the number of the part's first episode.
    """

    def __init__(self, temporary: Path, first: int) -> None:
        self._temporary = temporary
        self._first = first
        self._waiting: list[np.ndarray] = []
        self._pairs_waiting = 0
        self._pairs = 0

    def add(self, episode: int, texts: list[str]) -> None:
        """Adds the texts of the episode of that number; numbers must rise."""
        numbers = numbers_of(texts)
        pairs = np.empty((len(numbers), 3), dtype=np.uint32)
        pairs[:, 0] = numbers[:, 0]
        pairs[:, 1] = episode - self._first
        pairs[:, 2] = numbers[:, 1]
        self._waiting.append(pairs)
        self._pairs_waiting += len(pairs)
        self._pairs += len(pairs)
        if self._pairs_waiting > WAITING_PAIRS:
            self._spill()

    def _take_waiting(self) -> np.ndarray:
        """Returns what waits, by number: (n, 3)."""
        pairs = np.concatenate([np.zeros((0, 3), dtype=np.uint32), *self._waiting])
        self._waiting = []
        self._pairs_waiting = 0
        return pairs[np.argsort(pairs[:, 0], kind="stable")]

    def _spill(self) -> None:
        """Adds what waits to a temporary file for each of the most parts that an index has."""
        self._temporary.mkdir(parents=True, exist_ok=True)
        pairs = self._take_waiting()
        for file, pairs_of_file in enumerate(cut(pairs, MOST_FILES)):
            if len(pairs_of_file):
                with (self._temporary / str(file)).open("ab") as kept:
                    kept.write(pairs_of_file.tobytes())

    def write(self, folder: DataFolder, number: int) -> tuple[int, int]:
        """Writes search/NUMBER/0 and on; returns how many pairs they hold, and how many they are.

        Nothing temporary is left.
        """
        files = files_for(self._pairs)
        parts: Iterable[np.ndarray]
        if not self._temporary.exists():
            parts = cut(self._take_waiting(), files)
        else:
            self._spill()
            parts = (self._read_spilled(file, files) for file in range(files))
        pairs = 0
        for file, pairs_of_file in enumerate(parts):
            pairs += write_file(folder, number, file, pairs_of_file)
        shutil.rmtree(self._temporary, ignore_errors=True)
        return pairs, files

    def _read_spilled(self, file: int, files: int) -> np.ndarray:
        """Reads the temporary files that make up a file of the index, by number: (n, 3)."""
        each = MOST_FILES // files
        data = []
        for place in range(file * each, (file + 1) * each):
            path = self._temporary / str(place)
            data.append(path.read_bytes() if path.exists() else b"")
            path.unlink(missing_ok=True)
        pairs = np.frombuffer(b"".join(data), dtype=np.uint32).reshape(-1, 3)
        return pairs[np.argsort(pairs[:, 0], kind="stable")]


def files_for(pairs: int) -> int:
    """Returns in how many files, a power of two, an index of so many pairs lies."""
    files = 1
    while files < MOST_FILES and pairs > files * FILE_PAIRS:
        files *= 2
    return files


def cut(pairs: np.ndarray, files: int) -> list[np.ndarray]:
    """Cuts pairs by number, (n, 3), into those of each file: a number's highest bits tell."""
    edges = [(file << 32) // files for file in range(1, files)]
    return np.split(pairs, np.searchsorted(pairs[:, 0].astype(np.uint64), edges))


def write_file(folder: DataFolder, number: int, file: int, pairs: np.ndarray) -> int:
    """Writes search/NUMBER/FILE of pairs by number, (n, 3); returns how many it holds."""
    encoded = encode_postings(pairs)
    folder.write(f"search/{number}/{file}", {}, encoded)
    return len(encoded["steps"])


def merge_indexes(folder: DataFolder, sources: Sequence[IndexPart], number: int) -> tuple[int, int]:
    """Writes the index of parts that follow each other as search/NUMBER.

    Returns: how many pairs it holds, and in how many files. It has the same bytes as an index that
        is made of their episodes at once. Memory holds a file of each source.
    """
    files = files_for(sum(source.pairs for source in sources))
    readers = [PartReader(folder, source) for source in sources]
    first = sources[0].first
    pairs = 0
    for file in range(files):
        parts = []
        for reader in readers:
            part = reader.pairs(file, files)
            part[:, 1] += np.uint32(reader.source.first - first)
            parts.append(part)
        merged = np.concatenate(parts)
        merged = merged[np.argsort(merged[:, 0], kind="stable")]
        pairs += write_file(folder, number, file, merged)
    return pairs, files


class PartReader:
    """Reads the pairs of an index that is part of a larger one, a file at a time."""

    def __init__(self, folder: DataFolder, source: IndexPart) -> None:
        self.source = source
        self._folder = folder
        self._file = -1
        self._cut: list[np.ndarray] = []

    def pairs(self, file: int, files: int) -> np.ndarray:
        """Returns a copy of those of a file of the larger index, which has so many: (n, 3)."""
        each = files // self.source.files
        if file // each != self._file:
            self._file = file // each
            _, arrays = self._folder.read(f"search/{self.source.number}/{self._file}")
            pairs = decode_postings(arrays)
            edges = [(self._file * each + k) * (1 << 32) // files for k in range(1, each)]
            self._cut = np.split(pairs, np.searchsorted(pairs[:, 0].astype(np.uint64), edges))
        return self._cut[file % each].copy()


def encode_postings(pairs: np.ndarray) -> dict[str, np.ndarray]:
    """Encodes (n, 3): sequence and episode, both rising, and the sequence's check.

    Returns: `numbers` (k,) of the sequences, `checks` (k,), 0 where several share a number, `ends`
        (k,) where each one's steps end, and `steps`: from one episode to the next. The first counts
        from -1. A step of LONG_STEP or more is LONG_STEP there; `long_places`, which rise, say of
        each where it stands, `long_steps` how long it is.
    """
    numbers, starts = np.unique(pairs[:, 0], return_index=True)
    checks = np.zeros(len(numbers), dtype=np.uint32)
    if len(numbers):
        lowest = np.minimum.reduceat(pairs[:, 2], starts)
        highest = np.maximum.reduceat(pairs[:, 2], starts)
        checks = np.where(lowest == highest, lowest, 0).astype(np.uint32)
        # An episode that holds two such sequences counts once.
        is_new = np.ones(len(pairs), dtype=bool)
        is_new[1:] = (pairs[1:, :2] != pairs[:-1, :2]).any(axis=1)
        pairs = pairs[is_new]
        numbers, starts = np.unique(pairs[:, 0], return_index=True)
    episodes = pairs[:, 1].astype(np.int64)
    steps = np.diff(episodes, prepend=-1)
    steps[starts] = episodes[starts] + 1
    long_places = np.flatnonzero(steps >= LONG_STEP)
    ends = np.append(starts[1:], len(pairs))[: len(starts)]
    return {
        "numbers": numbers.astype(np.uint32),
        "checks": checks,
        "ends": ends.astype(np.uint32),
        "steps": np.minimum(steps, LONG_STEP).astype(np.uint8),
        "long_places": long_places.astype(np.uint32),
        "long_steps": steps[long_places].astype(np.uint32),
    }


def decode_postings(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the pairs that `encode_postings` was given, each once: (n, 3) uint32."""
    steps = arrays["steps"].astype(np.int64)
    steps[arrays["long_places"]] = arrays["long_steps"]
    ends = arrays["ends"].astype(np.int64)
    counts = np.diff(ends, prepend=0)
    passed = np.cumsum(steps)
    before = np.concatenate([[0], passed])[ends - counts]
    pairs = np.empty((len(steps), 3), dtype=np.uint32)
    pairs[:, 0] = np.repeat(arrays["numbers"], counts)
    pairs[:, 1] = passed - np.repeat(before, counts) - 1
    pairs[:, 2] = np.repeat(arrays["checks"], counts)
    return pairs
