"""Keeps the judged batches of a court: OUT/judged.jsonl, a line a batch, and what was asked.

Invariant: a batch counts once its line is whole on the disk; lines that another question was
answered by are never mixed with these.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from features.branching.judged import JudgedBatch
from features.branching.judging_words import WantedCourt
from training.config import PPOConfig
from training.run.files import append_line, write_atomically

logger = logging.getLogger(__name__)
JUDGED_FILE = "judged.jsonl"


def append(batch: JudgedBatch, out: Path) -> None:
    """Adds a batch to OUT/judged.jsonl, whole or not at all."""
    append_line(out / JUDGED_FILE, json.dumps(asdict(batch)))


def read_judged(config: PPOConfig, wanted: WantedCourt, out: Path) -> list[JudgedBatch]:
    """Reads what an earlier call of this court has judged, if it asked the same.

    What it judged for another question is set aside, as judged.jsonl.old.
    """
    asked = out / "asked.json"
    path = out / JUDGED_FILE
    question = json.dumps(_question(config, wanted), default=str, sort_keys=True, indent=1)
    if not asked.exists() or asked.read_text() != question:
        if path.exists():
            older = path.with_name(f"{JUDGED_FILE}.old")
            path.replace(older)
            logger.warning("%s was judged for another question; it is %s now", path, older.name)
        write_atomically(asked, question)
        return []
    if not path.exists():
        return []
    batches = list(_whole_lines(path))
    logger.info("%s: %d batches were judged before; the court goes on", path, len(batches))
    return batches


def _whole_lines(path: Path) -> Iterator[JudgedBatch]:
    """Yields the batches of a file up to a line that is broken off; cuts it, and all behind it."""
    whole: list[str] = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            batch = JudgedBatch(**json.loads(line))
        except (ValueError, TypeError):
            logger.warning(
                "%s: line %d is no whole batch: it is judged again", path, len(whole) + 1
            )
            write_atomically(path, "".join(f"{each}\n" for each in whole))
            return
        whole.append(line)
        yield batch


def _question(config: PPOConfig, wanted: WantedCourt) -> dict[str, Any]:
    """Returns all that the judged numbers follow from, but for how many episodes there are."""
    return {
        "model": wanted.model,
        "samples": wanted.samples,
        "estimators": wanted.estimators,
        "config": asdict(config),
        "files": _digests(config),
        "weights": _weights(config),
    }


def _weights(config: PPOConfig) -> dict[str, list[int]]:
    """Returns size and time of each file below what is judged: other weights may take its place."""
    place = config.trainer.resume_from_path or config.actor_rollout_ref.model.path
    if place is None:
        return {}
    folder = Path(place)
    stats = {path: path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        str(path.relative_to(folder)): [stat.st_size, stat.st_mtime_ns]
        for path, stat in stats.items()
    }


def _digests(config: PPOConfig) -> dict[str, str]:
    """Returns a digest of each file of the user's that makes estimators or environments."""
    places = [config.custom_algorithm, *(choice.path for choice in config.environments)]
    files = {str(place).partition(":")[0] for place in places if place}
    return {
        name: hashlib.sha256(Path(name).read_bytes()).hexdigest()
        for name in sorted(files)
        if Path(name).is_file()
    }
