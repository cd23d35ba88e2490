"""Compares two runs' folders bitwise: texts, metrics, and the tensors of the last checkpoint.

Invariant: what a run computes is compared; what only the machine decides is left out by rule
(`is_of_the_machine`), and a metric that one run alone has is listed, not a difference.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# Metrics of time, memory and load; alarms may watch those.
MACHINE_PREFIXES = ("timing_s/", "timing_per_token_ms/", "perf/", "alarms/")
MACHINE_WORDS = ("seconds", "throughput", "memory", "mfu")
# Folders of texts in a run's folder, in the order in which they come about.
TEXT_FOLDERS = ("texts", "validation_texts")
# A line shows so much of a text.
MAX_CHARS = 60

Steps = dict[int, dict[str, Any]]


@dataclass
class RunDifferences:
    """Holds what came of comparing two runs.

    Attributes:
        differences: a line each, in the order of the steps; what follows from one comes after it.
        new, gone: metrics that the new run alone, or the old one alone, has.
        compared: how many of each kind were compared.
    """

    differences: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)


def compare_runs(old: Path, new: Path, last_step: int) -> RunDifferences:
    """Compares the folders of two runs that ended well, step by step, then the last checkpoint."""
    old_steps = read_steps(old / "metrics.jsonl")
    new_steps = read_steps(new / "metrics.jsonl")
    result = RunDifferences()
    old_names = metric_names(old_steps)
    new_names = metric_names(new_steps)
    result.new = sorted(new_names - old_names)
    result.gone = sorted(old_names - new_names)
    old_texts = read_texts(old)
    new_texts = read_texts(new)
    for step in sorted(old_steps.keys() | new_steps.keys()):
        result.differences += text_differences(step, old_texts, new_texts)
        result.differences += metric_differences(
            step, old_steps.get(step), new_steps.get(step), old_names & new_names
        )
    old_tensors = read_checkpoint(old / f"global_step_{last_step}")
    new_tensors = read_checkpoint(new / f"global_step_{last_step}")
    result.differences += tensor_differences(old_tensors, new_tensors)
    result.compared = {
        "steps": len(old_steps),
        "metrics": len(old_names & new_names),
        "texts": sum(len(rows) for rows in old_texts.values()),
        "tensors": len(old_tensors),
    }
    nothing = [kind for kind, count in result.compared.items() if count == 0]
    if nothing:
        result.differences.append(f"nothing to compare: no {', no '.join(nothing)}")
    return result


# Metrics.


def is_of_the_machine(name: str) -> bool:
    """Checks whether a metric is time, memory or load, which no two runs have alike."""
    return name.startswith(MACHINE_PREFIXES) or any(word in name for word in MACHINE_WORDS)


def read_steps(path: Path) -> Steps:
    """Reads metrics.jsonl: {step: {name: value}}, without the machine's."""
    steps: Steps = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        step = record.pop("step")
        kept = {name: value for name, value in record.items() if not is_of_the_machine(name)}
        steps[step] = steps.get(step, {}) | kept
    return steps


def metric_names(steps: Steps) -> set[str]:
    """Returns the names that any step has."""
    return {name for metrics in steps.values() for name in metrics}


def metric_differences(
    step: int, old: dict[str, Any] | None, new: dict[str, Any] | None, names: set[str]
) -> Iterator[str]:
    """Names the metrics of a step whose values differ.

    Args:
        step: their number.
        old, new: its metrics; None where a run has no such step.
        names: the metrics that both runs have.
    """
    if old is None or new is None:
        missing = "old" if old is None else "new"
        yield f"step {step}: the {missing} run has none"
        return
    for name in [*old, *sorted(new.keys() - old.keys())]:
        if name in names and old.get(name) != new.get(name):
            yield f"step {step}, {name}: old {old.get(name)}, new {new.get(name)}"


# Texts.


def read_texts(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Reads the dumped episodes: {"texts/3": rows of step 3}."""
    texts = {}
    for folder in TEXT_FOLDERS:
        for path in sorted((run / folder).glob("*.jsonl")):
            lines = path.read_text().splitlines()
            texts[f"{folder}/{path.stem}"] = [json.loads(line) for line in lines]
    return texts


def text_differences(
    step: int, old: dict[str, list[dict[str, Any]]], new: dict[str, list[dict[str, Any]]]
) -> Iterator[str]:
    """Names the first difference of a step's dumped episodes; a row's new fields are none."""
    for folder in TEXT_FOLDERS:
        name = f"{folder}/{step}"
        old_rows = old.get(name, [])
        new_rows = new.get(name, [])
        if len(old_rows) != len(new_rows):
            yield f"step {step}, {name}: old {len(old_rows)} rows, new {len(new_rows)}"
        difference = _first_row_difference(old_rows, new_rows)
        if difference is not None:
            yield f"step {step}, {name}, {difference}"


def _first_row_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str | None:
    """Describes the first field that differs, None where all are alike."""
    for number, (old_row, new_row) in enumerate(zip(old, new, strict=False)):
        for key, value in old_row.items():
            if new_row.get(key) != value:
                return f"row {number}, {key}: {_described(value, new_row.get(key))}"
    return None


def _described(old: object, new: object) -> str:
    """Writes two values from the place on at which they part."""
    old_text = str(old)
    new_text = str(new)
    # Where the common beginning ends; the shorter text's end, where it has no other.
    places = range(min(len(old_text), len(new_text)))
    differing = (place for place in places if old_text[place] != new_text[place])
    parted_at = next(differing, len(places))
    start = max(0, parted_at - MAX_CHARS // 2)
    end = start + MAX_CHARS
    return f"old {old_text[start:end]!r}, new {new_text[start:end]!r}"


# Tensors.


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Reads every tensor of a checkpoint: {"actor/optimizer: NAME": tensor}."""
    tensors: dict[str, Tensor] = {}
    for metadata in sorted(folder.glob("*/*/.metadata")):
        part = metadata.parent
        name = part.relative_to(folder).as_posix()
        tensors |= {f"{name}: {key}": tensor for key, tensor in _read_part(part).items()}
    return tensors


def _read_part(folder: Path) -> dict[str, Tensor]:
    """Reads the tensors of one model or optimizer, however many ranks wrote them."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {}
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        # It says that there is one process, as there is.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def tensor_differences(old: dict[str, Tensor], new: dict[str, Tensor]) -> Iterator[str]:
    """Names the tensors that differ in any bit, and those that one checkpoint alone has."""
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            missing = "old" if name not in old else "new"
            yield f"checkpoint, {name}: the {missing} run has none"
        elif not same_bits(old[name], new[name]):
            yield f"checkpoint, {name}: {_distance(old[name], new[name])}"


def same_bits(old: Tensor, new: Tensor) -> bool:
    """Checks whether two tensors are equal bit by bit: NaN equals itself, 0.0 is not -0.0."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    old_bytes = old.contiguous().reshape(-1).view(torch.uint8)
    return torch.equal(old_bytes, new.contiguous().reshape(-1).view(torch.uint8))


def _distance(old: Tensor, new: Tensor) -> str:
    """Describes how two tensors differ."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"old {tuple(old.shape)} {old.dtype}, new {tuple(new.shape)} {new.dtype}"
    distance = (old.double() - new.double()).abs().max().item()
    return f"they differ by {distance:.3g} at most"
