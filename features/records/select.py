"""Selects recorded episodes to learn from: `python -m features.records.select RUN… --out FILE`.

    --where "reward >= 0.9 and turns < 6"   which episodes (features/records/where.py)
    --per-task 2                            the best so many of each task
    --most 500                              the best so many of all
    --validation                            episodes of validations, too
    --masked                                also those that training left out
    --steps 10:50                           of these steps
    --out best.parquet                      or .jsonl

FILE has a line for each row of an episode: its token ids as they were sampled, `loss_mask` with 1
on those of the policy, and beside them, for people, the text and where it comes from. `--sft FILE`
and `sft.files` take it. Of equal rewards the episode with fewer sampled tokens is better, then the
earlier one; an episode whose tokens another one has is left out. Invariant: no id is ever made
again from text.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from features.records.episode_files import Recorded, read_episodes
from features.records.where import BadCondition, Condition
from features.shared.tokenizers import tokenizer_fingerprint
from training.config.plain_files import read_plain_text
from training.run.files import write_atomically
from training.run.recorded_config import flat_settings

PROGRAM = "python -m features.records.select"
TOKENIZER = "tokenizer"
# What a condition may ask of an episode that is an entry of its record.
ENTRIES = (
    "reward",
    "paid",
    "ending",
    "error",
    "step",
    "environment",
    "data_source",
    "task",
    "task_name",
    "env_seed",
    "uid",
    "episode_id",
    "sample",
    "masked",
    "attempts",
    "sampled_tokens",
    "cut_turns",
    "cut_observations",
    "seconds",
    "env_seconds",
    "info",
)
NAMES = (*ENTRIES, "turns", "rows", "tool_calls", "is_validation", "run")
SUFFIXES = (".parquet", ".jsonl")


class CannotSelect(ValueError):
    """Reports that there is nothing to write, in a sentence for users."""


@dataclass(frozen=True)
class Candidate:
    """Holds an episode that may be chosen.

    Attributes:
        run: its run's folder.
        episode: its record.
        fingerprint: of the tokenizer that its ids are of.
    """

    run: Path
    episode: Recorded
    fingerprint: str
    is_validation: bool = False

    def entries(self) -> dict[str, Any]:
        """Returns what a condition may ask."""
        episode = self.episode
        entries = {name: episode.get(name) for name in ENTRIES}
        entries["info"] = episode.get("info") or {}
        entries["turns"] = len(episode["turns"])
        entries["rows"] = len(episode["rows"])
        entries["tool_calls"] = len(episode.get("tool_calls") or ())
        entries["is_validation"] = self.is_validation
        entries["run"] = str(self.run)
        return entries

    @property
    def task(self) -> str:
        """Names the task: as the environment does, else its row, else its prompt or its seed."""
        episode = self.episode
        name = episode.get("task_name")
        what: Any = episode.get("task")
        if not name and not what:
            what = episode["env_seed"]
            is_prompt = episode.get("environment") == ""
            if is_prompt:
                what = episode["initial_messages"]
        return json.dumps([episode["data_source"], name or what], sort_keys=True, default=str)

    @property
    def rank(self) -> tuple[float, int]:
        """Returns what is smaller for a better episode."""
        return -float(self.episode["reward"]), int(self.episode.get("sampled_tokens") or 0)

    @property
    def tokens(self) -> tuple[bytes, ...]:
        """Returns the tokens of all rows, to tell episodes apart."""
        return tuple(
            row["prompt_ids"].tobytes() + b"|" + row["response_ids"].tobytes()
            for row in self.episode["rows"]
        )


def episodes_folder(run: Path) -> Path:
    """Returns the folder of a run's episodes.

    Raises:
        CannotSelect: there is none.
    """
    places = [run / "episodes", *_configured(run), run]
    for place in places:
        if place.is_dir() and any(place.glob("*.jsonl")) and (place / TOKENIZER).is_dir():
            return place
    looked = ", ".join(map(str, places))
    raise CannotSelect(
        f"{run} holds no episodes (looked for STEP.jsonl and {TOKENIZER}/ in {looked}); a run "
        "records them unless records.keep_gib=0"
    )


def _configured(run: Path) -> list[Path]:
    """Returns the folder that a run's config names, if it can be read and names one."""
    try:
        settings = flat_settings(read_plain_text(run / "config.yaml"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    named = settings.get("records.folder")
    return [Path(str(named))] if named else []


def candidates_of(
    run: Path, condition: Condition | None, args: argparse.Namespace
) -> Iterator[Candidate]:
    """Yields a run's episodes that meet the condition and have a token to learn.

    Raises:
        CannotSelect, BadCondition, ValueError: the run has no episodes, or the condition fails.
    """
    import transformers

    folder = episodes_folder(run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / TOKENIZER)
    fingerprint = tokenizer_fingerprint(tokenizer)
    for file in files_of(folder, args.validation, args.steps):
        is_validation = file.name.startswith("val-")
        for episode in read_episodes(file):
            candidate = Candidate(run, episode, fingerprint, is_validation)
            if episode.get("masked") and not args.masked:
                continue
            if not any(row["response_mask"].any() for row in episode["rows"]):
                continue
            where = f"{run}: {episode['where']}"
            reward = episode.get("reward")
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise CannotSelect(
                    f"{where} has the reward {reward!r}, by which no episode is better or worse: "
                    "leave its step out (--steps), or mend the file"
                )
            if condition is None or condition.holds(candidate.entries(), where):
                yield candidate


def files_of(folder: Path, validation: bool, steps: tuple[int, int] | None) -> list[Path]:
    """Lists the files of episodes, those of validations where they are wanted, by their steps."""
    numbered = []
    for file in folder.glob("*.jsonl"):
        number = file.stem.removeprefix("val-")
        is_validation = number != file.stem
        if not number.isdecimal() or (is_validation and not validation):
            continue
        if steps is None or steps[0] <= int(number) <= steps[1]:
            numbered.append((int(number), is_validation, file))
    return [file for _, _, file in sorted(numbered)]


def chosen(
    candidates: Iterable[Candidate], per_task: int | None, most: int | None
) -> list[Candidate]:
    """Returns the best of each task and of all, without doubles, in the order they were played."""
    ordered = list(candidates)
    seen: set[tuple[bytes, ...]] = set()
    of_task: dict[str, int] = {}
    kept: list[int] = []
    for number in sorted(range(len(ordered)), key=lambda number: ordered[number].rank):
        candidate = ordered[number]
        count = of_task.get(candidate.task, 0)
        is_double = candidate.tokens in seen
        if is_double or (per_task is not None and count >= per_task):
            continue
        if most is not None and len(kept) >= most:
            break
        seen.add(candidate.tokens)
        of_task[candidate.task] = count + 1
        kept.append(number)
    return [ordered[number] for number in sorted(kept)]


def rows_to_write(candidates: Sequence[Candidate]) -> Iterator[dict[str, Any]]:
    """Yields a line for each row that has a token of the policy's."""
    import transformers

    tokenizers: dict[Path, Any] = {}
    for candidate in candidates:
        episode = candidate.episode
        if candidate.run not in tokenizers:
            folder = episodes_folder(candidate.run) / TOKENIZER
            tokenizers[candidate.run] = transformers.AutoTokenizer.from_pretrained(folder)
        decode = tokenizers[candidate.run].decode
        for number, row in enumerate(episode["rows"]):
            prompt = row["prompt_ids"].tolist()
            response = row["response_ids"].tolist()
            mask = row["response_mask"].tolist()
            if not any(mask):
                continue
            yield {
                "input_ids": prompt + response,
                "loss_mask": [0] * len(prompt) + mask,
                "tokenizer": candidate.fingerprint,
                "text": decode(prompt + response),
                "reward": float(episode["reward"]),
                "task": candidate.task,
                "run": str(candidate.run),
                "step": int(episode.get("step") or 0),
                "episode_id": str(episode["episode_id"]),
                "row": number,
            }


def write_rows(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Writes the lines, as the file's name ends; a file that is there is replaced as a whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".jsonl":
        write_atomically(out, "".join(f"{json.dumps(row)}\n" for row in rows))
        return
    import pyarrow
    import pyarrow.parquet

    temporary = out.with_name(f".{out.name}.tmp")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), temporary)
    temporary.replace(out)


def select(args: argparse.Namespace) -> str:
    """Writes the selection; returns a line on it.

    Raises:
        CannotSelect, BadCondition, ValueError, OSError: there is nothing to write, or it cannot be.
    """
    condition = Condition(args.where, NAMES) if args.where else None
    found = [candidate for run in args.runs for candidate in candidates_of(run, condition, args)]
    kept = chosen(found, args.per_task, args.most)
    if not kept:
        asked = f" that meets --where {args.where!r}" if args.where else ""
        raise CannotSelect(
            f"no episode of {', '.join(map(str, args.runs))} is there{asked}; nothing was written. "
            "Ask for less, add --validation or --masked, or select from other runs"
        )
    fingerprints = {candidate.fingerprint for candidate in kept}
    if len(fingerprints) > 1:
        raise CannotSelect(
            "the runs have different tokenizers, whose ids are not the same words: select from "
            "runs of one model at a time"
        )
    rows = list(rows_to_write(kept))
    write_rows(rows, args.out)
    tasks = len({candidate.task for candidate in kept})
    learnt = sum(sum(row["loss_mask"]) for row in rows)
    rewards = [candidate.episode["reward"] for candidate in kept]
    mean = sum(rewards) / len(rewards)
    return (
        f"{args.out}: {len(kept)} episodes of {tasks} tasks, {len(rows)} rows, {learnt} sampled "
        f"tokens, mean reward {mean:.3g}"
    )


def steps_of(text: str) -> tuple[int, int]:
    """Reads A:B, the first and the last step."""
    first, _, last = text.partition(":")
    try:
        return int(first or 0), int(last or sys.maxsize)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no A:B, such as 10:50 or 10:") from None


def positive(text: str) -> int:
    """Reads a number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Selects as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--where", metavar="CONDITION")
    parser.add_argument("--per-task", type=positive, metavar="N")
    parser.add_argument("--most", type=positive, metavar="N")
    parser.add_argument("--steps", type=steps_of, metavar="A:B")
    parser.add_argument("--validation", action="store_true")
    parser.add_argument("--masked", action="store_true")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    if args.out.suffix not in SUFFIXES:
        parser.error(f"--out {args.out}: the file's name ends in {' or '.join(SUFFIXES)}")
    if args.out.is_dir():
        parser.error(f"--out {args.out} is a folder: name a file")
    if len({run.resolve() for run in args.runs}) < len(args.runs):
        parser.error("a run is named twice: its episodes would be counted twice")
    try:
        print(select(args))
    except (CannotSelect, BadCondition, ValueError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
