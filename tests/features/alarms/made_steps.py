"""Makes what rules are given: a step of a run that nobody played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data.protocol import DataProto
from features.alarms.seen_step import History, SeenStep
from training.batch.episode_rows import EpisodeRows
from training.config import PPOConfig
from training.observers import ObservedRun


def made_run(config: PPOConfig | None = None, textless_ids: Sequence[int] = ()) -> ObservedRun:
    return ObservedRun(
        config=config or PPOConfig(), run_dir=Path(), textless_ids=textless_ids, total_steps=40
    )


def changed(section: Any, key: str, value: Any) -> Any:
    """Returns a section, or a config, with one setting changed."""
    name, _, rest = key.partition(".")
    if rest:
        value = changed(getattr(section, name), rest, value)
    return replace(section, **{name: value})


def empty_batch(rows: int = 1) -> DataProto:
    return DataProto.from_dict(tensors={"response_mask": torch.zeros(rows, 1)})


def seen_step(
    batch: DataProto | None = None,
    metrics: Mapping[str, float] | None = None,
    *,
    config: PPOConfig | None = None,
    **others: Any,
) -> SeenStep:
    batch = batch or empty_batch()
    return SeenStep(
        run=made_run(config),
        step=1,
        batch=batch,
        updated=batch,
        episodes=EpisodeRows(batch),
        metrics=metrics or {},
        history=History(),
        **others,
    )
