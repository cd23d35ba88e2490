"""Collects what the list of episodes is filtered, sorted and counted by: a row an episode.

Invariant: a number of an episode that cannot be told is NaN, and texts that many episodes share are
kept once in a file.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from features.viewer.data_files import SORTING_ENCODER, DataFolder, encode, plain
from features.viewer.records import RecordedEpisode, as_text, message_text
from features.viewer.token_columns import ShownTokens

# Characters of the first messages that the list shows.
BEGINNING = 160
# Characters of the last answer's end, where its result mostly stands.
ANSWER = 120
# Characters of a task's row that its label has.
ROW_LABEL = 80
NUMBERS = (
    "reward",
    "tokens",
    "turns",
    "mismatch",
    "ratio",
    "entropy",
    "kl",
    "advantage",
    "gradient",
    "seconds",
    "env_seconds",
    "engine_seconds",
    "attempts",
    "rows",
)
# Texts that many episodes share; each is kept once in a file.
TEXTS = ("uid", "ending", "source", "task", "task_name", "beginning", "tools")
FLAGS = ("no_spread", "empty", "stale", "masked", "failed", "cut")
FAILURES = ("env_crash", "env_timeout", "engine_error", "error")


@dataclass
class Texts:
    """Numbers texts, each once."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        """Returns a text's number."""
        return self.numbers.setdefault(text, len(self.numbers))


def task_key(episode: RecordedEpisode) -> str:
    """Returns what the same task has in common over steps and runs: 16 characters.

    That is the name that its environment gives it. Without one the dataset's row names a task, or
    else the seed of its environment; and its first messages.
    """
    source = episode.text("environment") or episode.text("data_source")
    name = episode.text("task_name")
    if name:
        return _digest([source, name])
    task = episode.entries.get("task")
    which: Any = task if task else episode.entries.get("env_seed")
    first = [[as_text(m.get("role", "")), message_text(m)] for m in episode.initial_messages]
    if not episode.text("environment") and not task:
        # Prompts have no seed of their own: the prompt is the task.
        which = None
    return _digest([source, which, first])


def _digest(value: Any) -> str:
    text = encode(value, encoder=SORTING_ENCODER)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def task_label(episode: RecordedEpisode) -> str:
    """Returns what tells a task from others with the same first message.

    That is its name, else the dataset's row, else the environment's seed; "" of a prompt, which
    says itself what it is.
    """
    name = episode.text("task_name")
    if name:
        return name[:ROW_LABEL]
    task = episode.entries.get("task")
    if task:
        text = json.dumps(plain(task), ensure_ascii=False)
        return text if len(text) <= ROW_LABEL else f"{text[: ROW_LABEL - 1]}…"
    seed = episode.text("env_seed")
    return f"seed {seed}" if seed and episode.text("environment") else ""


def last_answer(episode: RecordedEpisode) -> str:
    """Returns the end of what the policy said last."""
    said = as_text(episode.turns[-1].get("text", "")).strip() if episode.turns else ""
    return said if len(said) <= ANSWER else f"…{said[-ANSWER:]}"


def policy_text(episode: RecordedEpisode) -> str:
    """Returns all that the policy said."""
    return "\n".join(as_text(turn.get("text", "")) for turn in episode.turns)


def tool_names(episode: RecordedEpisode) -> list[str]:
    """Lists the tools that were called, each once."""
    calls = episode.entries.get("tool_calls")
    if not isinstance(calls, list):
        of_turns = [turn.get("tool_calls") for turn in episode.turns]
        calls = [call for listed in of_turns if isinstance(listed, list) for call in listed]
    return sorted({as_text(call["name"]) for call in calls if _is_named(call)})


def _is_named(call: Any) -> bool:
    return isinstance(call, dict) and "name" in call


def list_numbers(
    episode: RecordedEpisode, rows: list[ShownTokens], gradient: float
) -> dict[str, float]:
    """Returns the numbers that the list sorts by; NaN where they were not recorded.

    mismatch: largest |engine's - trainer's log-prob|, nats; ratio: largest of new / old probability
    and its inverse; entropy, kl (old log-prob less the reference's), advantage: means over tokens
    that the loss took.
    """
    sampled_tokens = sum(int((row.columns["sampled"] > 0).sum()) for row in rows)
    numbers = {
        "reward": episode.number("reward"),
        "tokens": float(sampled_tokens),
        "turns": float(len(episode.turns)),
        "rows": float(len(rows)),
        "seconds": episode.number("seconds"),
        "env_seconds": episode.number("env_seconds"),
        "engine_seconds": engine_seconds(episode),
        "attempts": episode.number("attempts", default=episode.number("attempt", 0.0) + 1),
        "gradient": gradient,
        "mismatch": _largest(rows, engine_column(rows), trainer_column(rows)),
        "kl": _mean(rows, "old_log_probs", "ref_log_prob"),
        "entropy": _mean(rows, "entropy"),
        "advantage": _mean(rows, "advantages"),
    }
    numbers["ratio"] = float(np.exp(_largest(rows, "log_prob", "old_log_probs")))
    return numbers


def engine_seconds(episode: RecordedEpisode) -> float:
    """Sums the seconds that the engine took for the turns; NaN where none was recorded."""
    recorded = [turn.get("engine_seconds") for turn in episode.turns]
    seconds = [float(one) for one in recorded if isinstance(one, int | float)]
    return sum(seconds) if seconds else float("nan")


def engine_column(rows: list[ShownTokens]) -> str:
    """Returns the name of the engine's log-probs: those of the batch where it has them."""
    has_batch = any("rollout_log_probs" in row.columns for row in rows)
    return "rollout_log_probs" if has_batch else "log_probs"


def trainer_column(rows: list[ShownTokens]) -> str:
    """Returns the name of the trainer's log-probs: those of the pass where there were no others."""
    has_old = any("old_log_probs" in row.columns for row in rows)
    return "old_log_probs" if has_old else "log_prob"


def _loss_mask(columns: dict[str, np.ndarray]) -> np.ndarray:
    return (columns["response_mask"] if "response_mask" in columns else columns["sampled"]) > 0


def _largest(rows: list[ShownTokens], first: str, second: str) -> float:
    """Returns the largest |first - second| over sampled tokens."""
    largest = float("nan")
    for row in rows:
        columns = row.columns
        if first in columns and second in columns:
            sampled = columns["sampled"] > 0
            differences = np.abs(columns[first] - columns[second])[sampled]
            known = differences[~np.isnan(differences)]
            if len(known):
                largest = float(np.fmax(largest, known.max()))
    return largest


def _mean(rows: list[ShownTokens], name: str, less: str | None = None) -> float:
    """Averages a column, less another one, over the tokens that the loss took."""
    total, count = 0.0, 0
    for row in rows:
        columns = row.columns
        if name not in columns or (less is not None and less not in columns):
            continue
        mask = _loss_mask(columns)
        values = columns[name] if less is None else columns[name] - columns[less]
        total += float(values[mask].sum(dtype=np.float64))
        count += int(mask.sum())
    return total / count if count else float("nan")


def flags(episode: RecordedEpisode, rows: list[ShownTokens], step: int) -> dict[str, bool]:
    """Returns what an episode is, or is not; `no_spread` is the group's, and set later."""
    stale = False
    for row in rows:
        if "weight_versions" in row.columns:
            versions = row.columns["weight_versions"][row.columns["sampled"] > 0]
            stale = stale or bool((versions < step - 1).any())
    # The error of one that was played again belongs to an attempt before.
    has_error = bool(episode.text("error")) and not episode.entries.get("failed_attempts")
    return {
        "no_spread": False,
        "empty": not policy_text(episode).strip(),
        "stale": stale,
        "masked": bool(episode.entries.get("masked")),
        "failed": episode.text("ending") in FAILURES or has_error,
        "cut": any(turn.get("finish_reason") == "length" for turn in episode.turns),
    }


def fate_bits(rows: list[ShownTokens]) -> int:
    """Returns a bit for each fate that a token of the episode has."""
    bits = 0
    for row in rows:
        for fate in set(row.columns["fate"].tolist()):
            bits |= 1 << min(fate, 31)
    return bits


def beginning(episode: RecordedEpisode) -> str:
    """Returns how the last of the first messages begins."""
    if not episode.initial_messages:
        return ""
    return message_text(episode.initial_messages[-1])[:BEGINNING]


INTEGERS = ("step", "run", "page", "in_page", "text_page", "fates", "val")


def write_list(folder: DataFolder, number: int, rows: list[dict[str, Any]]) -> None:
    """Writes rows of the list as list/NUMBER, and their last answers as answers/NUMBER."""
    arrays = {}
    for name in (*NUMBERS, *INTEGERS):
        dtype = "<f8" if name in NUMBERS else "<u4"
        arrays[name] = np.array([row[name] for row in rows], dtype=dtype)
    for name in FLAGS:
        arrays[name] = np.array([row["flags"][name] for row in rows], dtype=np.uint8)
    header: dict[str, Any] = {"ids": [row["episode_id"] for row in rows]}
    for name in TEXTS:
        texts = Texts()
        numbers = [texts.number(row[name]) for row in rows]
        arrays[name] = np.array(numbers, dtype="<u4")
        header[name] = list(texts.numbers)
    folder.write(f"list/{number}", header, arrays)
    # They are read where somebody wants to see them: each is another text.
    folder.write(f"answers/{number}", {"answers": [row["answer"] for row in rows]}, {})


def merge_lists(folder: DataFolder, sources: Sequence[int], number: int) -> None:
    """Writes the rows of several files, one behind the other, as list/NUMBER and answers/NUMBER."""
    read = [folder.read(f"list/{source}") for source in sources]
    arrays = {}
    for name in (*NUMBERS, *INTEGERS, *FLAGS):
        arrays[name] = np.concatenate([of_file[name] for _, of_file in read])
    header: dict[str, Any] = {"ids": [one for told, _ in read for one in told["ids"]]}
    for name in TEXTS:
        texts = Texts()
        parts = []
        for told, of_file in read:
            renumbered = [texts.number(text) for text in told[name]]
            parts.append(np.array(renumbered, dtype="<u4")[of_file[name]])
        arrays[name] = np.concatenate(parts)
        header[name] = list(texts.numbers)
    folder.write(f"list/{number}", header, arrays)
    answers: list[str] = []
    for source in sources:
        answers += folder.read(f"answers/{source}")[0]["answers"]
    folder.write(f"answers/{number}", {"answers": answers}, {})
