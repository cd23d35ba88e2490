"""Describes a checkpoint, folder by folder and entry by entry, with the writer and reader of each.

`CONTENTS` is the list of files; `DriverState` that of the entries in `data.pt`; the names here are
those the code uses. Nothing random is kept: all of it derives from the run's seed and the step.
Invariant: reading what stands here runs no code from it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from data.plain_pickles import reading_plainly
from data.plain_state import kept_state
from data.protocol import DataProto
from training.run.data_position import DataPosition
from training.run.step_source import GeneratedStep

# In the run's folder: the number of the step that was saved last.
LATEST = "latest_checkpointed_iteration.txt"
# The run's saves, a step a line, also of checkpoints that are pruned since.
SAVED_STEPS = "saved_steps.txt"
# In global_step_N/:
ACTOR = "actor"
CRITIC = "critic"
DRIVER_STATE = "data.pt"
IN_FLIGHT = "in_flight"
MANIFEST = "manifest.json"
# The types of the entries of data.pt.
ENTRY_TYPES: dict[str, tuple[type, ...]] = {
    "global_steps": (int,),
    "epoch": (int,),
    "rows_done": (int,),
    "sampled_tokens": (int,),
    "kl_coef": (int, float),
    "observers": (dict,),
    "estimator": (dict,),
    "sampler": (dict,),
    "suite": (dict, type(None)),
}
# In data.pt: an older checkpoint has the state of this observer alone, as an entry of its own.
OLDER_OBSERVER = "alarms"


@dataclass(frozen=True)
class Entry:
    """Describes one file, or folder of files, of `global_step_N/`.

    Attributes:
        path: inside it.
        holds: what is in it.
        writer, reader: the functions, by file.
    """

    path: str
    holds: str
    writer: str
    reader: str


def _model_entries(folder: str, model: str) -> tuple[Entry, ...]:
    """Lists the folder of a trained model; save_contents and load_contents choose among it."""
    writer = "workers/model/state.py: save"
    reader = "workers/model/state.py: load"
    return (
        Entry(
            f"{folder}/model", f"DCP: the {model}'s weights; with LoRA the adapters", writer, reader
        ),
        Entry(f"{folder}/optimizer", "DCP: AdamW's moments and step", writer, reader),
        Entry(f"{folder}/scheduler.json", "the learning rate schedule's place", writer, reader),
        Entry(
            f"{folder}/huggingface",
            "config and tokenizer; with `hf_model` the weights as transformers reads them",
            writer,
            "transformers, engines: not the trainer",
        ),
        Entry(
            f"{folder}/adapter",
            "with `hf_model`, of a policy with LoRA: the adapters as peft reads them",
            writer,
            "peft, engines: not the trainer",
        ),
    )


CONTENTS: tuple[Entry, ...] = (
    *_model_entries(ACTOR, "policy"),
    *_model_entries(CRITIC, "critic"),
    Entry(
        DRIVER_STATE,
        "the driver's state, see DriverState",
        "training/run/checkpoint_contents.py: save_driver_state",
        "training/run/checkpoint_contents.py: load_driver_state",
    ),
    Entry(
        IN_FLIGHT,
        "NNN.pt: steps that were generated ahead and not trained on yet, in order",
        "training/run/checkpoint_contents.py: save_in_flight",
        "training/run/checkpoint_contents.py: load_in_flight",
    ),
    Entry(
        MANIFEST,
        "size and CRC-32 of every other file",
        "training/run/checkpoint_manifest.py: write_manifest",
        "training/run/checkpoint_manifest.py: damage",
    ),
)


@dataclass(frozen=True, kw_only=True)
class DriverState:
    """Lists the entries of `data.pt`: numbers, strings, tensors, and lists and dicts of them.

    `RayPPOTrainer.driver_state` writes them, `load_driver_state` reads them; `AgentTrainer` adds
    the suite. An entry that an older checkpoint lacks keeps its default, and starts anew.

    Attributes:
        global_steps: steps that were trained.
        epoch, rows_done: the data position behind them.
        sampled_tokens: that were sampled for them, discarded ones included.
        kl_coef: the KL controller's coefficient.
        observers: what each observer remembers of the steps before, by its name.
        estimator: what the advantage estimator keeps over the run.
        sampler: what a user's sampler of the training rows has a checkpoint keep.
        suite: the mix of environments; None in a run on prompts.
    """

    global_steps: int
    epoch: int = 0
    rows_done: int = 0
    sampled_tokens: int = 0
    kl_coef: float = 0.0
    observers: dict[str, Any] = field(default_factory=dict)
    estimator: dict[str, Any] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)
    suite: dict[str, Any] | None = None

    @property
    def position(self) -> DataPosition:
        """Returns the data position behind the steps that were trained."""
        return DataPosition(self.epoch, self.rows_done)


@dataclass(frozen=True)
class DriverSnapshot:
    """Holds the driver as it is at the end of a step: what a checkpoint of that step keeps of it.

    Attributes:
        state: the entries of `data.pt`.
        in_flight: steps that are generated ahead, or are still being generated; those that are
            whole when the checkpoint is written go with it.
    """

    state: DriverState
    in_flight: tuple[Future[GeneratedStep], ...] = ()


def save_driver_state(folder: Path, state: DriverState) -> None:
    """Writes `data.pt`.

    Raises:
        OSError: the disk is full, say.
        CannotSave: an entry holds what `load_driver_state` would not read.
    """
    entries = {item.name: getattr(state, item.name) for item in fields(state)}
    kept = {
        name: kept_state(value, f"the run's state {name!r}")
        for name, value in entries.items()
        if value is not None
    }
    # On a full disk torch itself would raise RuntimeError.
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    (folder / DRIVER_STATE).write_bytes(buffer.getvalue())


def load_driver_state(folder: Path) -> DriverState:
    """Reads `data.pt` without running code from it.

    Raises:
        ValueError: it is no driver's state, or holds more than tensors and numbers.
    """
    path = folder / DRIVER_STATE
    with reading_plainly(path):
        entries: Mapping[str, Any] = torch.load(path, weights_only=True)
    if not isinstance(entries, Mapping) or "global_steps" not in entries:
        raise ValueError(f"{path} is no state of a run: it has no number of steps")
    if OLDER_OBSERVER in entries:
        entries = {**entries, "observers": {OLDER_OBSERVER: entries[OLDER_OBSERVER]}}
    known = {item.name: entries[item.name] for item in fields(DriverState) if item.name in entries}
    for name, value in known.items():
        if not isinstance(value, ENTRY_TYPES[name]):
            raise ValueError(f"{path} is no state of a run: its {name} is a {type(value).__name__}")
    return DriverState(**known)


def save_in_flight(folder: Path, steps: Iterable[Future[GeneratedStep]]) -> None:
    """Writes the steps that are generated whole, up to the first that is not.

    That one and the rest are generated again.
    """
    for number, step in enumerate(steps):
        if not step.done() or step.exception() is not None:
            return
        generated = step.result()
        (folder / IN_FLIGHT).mkdir(exist_ok=True)
        position = (generated.position.epoch, generated.position.rows_done)
        meta_info = generated.batch.meta_info | {IN_FLIGHT: [generated.metrics, position]}
        batch = replace(generated.batch, meta_info=meta_info)
        batch.save_to_disk(folder / IN_FLIGHT / f"{number:03d}.pt")


def load_in_flight(folder: Path) -> list[GeneratedStep]:
    """Reads the steps in flight of a checkpoint, in order; an empty list where it has none."""
    steps = []
    for path in sorted(folder.glob(f"{IN_FLIGHT}/*.pt")):
        batch = DataProto.load_from_disk(path)
        metrics, (epoch, rows_done) = batch.meta_info.pop(IN_FLIGHT)
        steps.append(GeneratedStep(batch, metrics, DataPosition(epoch, rows_done)))
    return steps
