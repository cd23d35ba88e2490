"""Validation: the same prompts every time, answered and scored, and what is shown and written of the answers.

Invariant: nothing here changes the run; a batch of it is never trained on.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.protocol import DataProto
from training.batch.batching import EpisodeRows
from training.run.metric_utils import flatten_validation_metrics, process_validation_metrics, readable_rows

if TYPE_CHECKING:
    from training.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)


def validate(trainer: RayPPOTrainer) -> dict[str, float]:
    """Scores the validation prompts, `val_kwargs.n` answers each; metrics as `val-core/SOURCE/REWARD/mean@N`."""
    if trainer.val_dataloader is None:
        return {}
    sources: list[str] = []
    uids: list[str] = []
    infos: dict[str, list[Any]] = {}
    n = trainer.config.actor_rollout_ref.rollout.val_kwargs.n
    for rows in trainer.val_dataloader:
        batch, scored = _validate_batch(trainer, rows, n, first_group=len(uids) // n)
        names = batch.non_tensor_batch.get(trainer.config.data.reward_fn_key, np.full(len(batch), "unknown"))
        sources += [str(name) for name in names]
        uids += list(batch.non_tensor_batch["uid"])
        before = len(uids) - len(batch)
        # A source may have entries that others have not.
        for name in infos.keys() | scored.keys():
            infos.setdefault(name, [None] * before).extend(scored.get(name, [None] * len(batch)))
    return flatten_validation_metrics(process_validation_metrics(sources, uids, infos, seed=trainer.seed))


def _validate_batch(
    trainer: RayPPOTrainer, rows: dict[str, Any], n: int, first_group: int
) -> tuple[DataProto, dict[str, list[Any]]]:
    batch = trainer._generate_multi_turn_sequences(trainer.prompt_batch(rows, n, first_group, validate=True))
    scores, infos = trainer.score(batch, trainer.val_reward_fn)
    batch.batch["token_level_scores"] = scores
    settings = trainer.config.trainer
    dump(batch, settings.validation_data_dir, trainer.global_steps, trainer.tokenizer, anew=first_group == 0)
    trainer.on_batch(batch)
    shown = settings.log_val_generations - first_group * n
    for row in readable_rows(batch.slice(0, max(0, min(shown, len(batch)))), trainer.tokenizer):
        logger.info("validation, reward %.3f\n%s\n--> %s", row["score"], row["input"], row["output"])
    episodes = EpisodeRows(batch)
    infos = {name: [values[i] for i in episodes.first] for name, values in infos.items()}
    return batch.select_idxs(episodes.first), {**infos, "reward": episodes.join(scores).sum(dim=1).tolist()}


def dump(batch: DataProto, folder: str | None, step: int, tokenizer: Any, anew: bool = True) -> None:
    """Writes the batch's text and scores to FOLDER/STEP.jsonl, or adds them to what is there."""
    if folder is None:
        return
    path = Path(folder) / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if anew else "a") as file:
        for row in readable_rows(batch, tokenizer):
            file.write(json.dumps({"step": step, **row}) + "\n")
