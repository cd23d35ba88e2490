"""Validates: the same prompts every time, answered and scored, never trained on."""

import logging
from typing import Any

import numpy as np

from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows
from training.run.episode_files import dump, readable_rows
from training.run.metrics.model_metrics import take_model_metrics
from training.run.metrics.validation_metrics import (
    flatten_validation_metrics,
    process_validation_metrics,
)

logger = logging.getLogger(__name__)


def validate(trainer: Any) -> dict[str, float]:
    """Scores the validation prompts, `val_kwargs.n` answers each.

    Returns: metrics, as `val-core/SOURCE/REWARD/mean@N`; none without a validation set.
    """
    if trainer.val_dataloader is None:
        return {}
    sources: list[str] = []
    uids: list[str] = []
    infos: dict[str, list[Any]] = {}
    n = trainer.config.actor_rollout_ref.rollout.val_kwargs.n
    source_key = trainer.config.data.reward_fn_key
    for rows in trainer.val_dataloader:
        batch, scored = _validate_batch(trainer, rows, n, first_group=len(uids) // n)
        size = len(batch)
        names = batch.non_tensor_batch.get(source_key, np.full(size, "unknown"))
        # A source may have entries that others have not.
        for name in infos.keys() | scored.keys():
            values = infos.setdefault(name, [None] * len(uids))
            values.extend(scored.get(name, [None] * size))
        sources += [str(name) for name in names]
        uids += list(batch.non_tensor_batch["uid"])
    nested = process_validation_metrics(sources, uids, infos, seed=trainer.seed)
    asked = take_model_metrics(trainer.config.agent.models)
    return flatten_validation_metrics(nested) | {
        f"val-aux/{name}": value for name, value in asked.items()
    }


def _validate_batch(
    trainer: Any, rows: dict[str, Any], n: int, first_group: int
) -> tuple[DataProto, dict[str, list[Any]]]:
    """Answers and scores some prompts; returns one row an episode, and its values by name."""
    settings = trainer.config.trainer
    prompts = trainer.prompt_batch(rows, n, first_group, validate=True)
    batch = trainer._generate_multi_turn_sequences(prompts)
    scores, infos = trainer.score(batch, trainer.val_reward_fn)
    batch.batch["token_level_scores"] = scores
    dump(
        batch,
        settings.validation_data_dir,
        trainer.global_steps,
        trainer.tokenizer,
        anew=first_group == 0,
    )
    trainer.on_batch(batch)
    left_to_log = settings.log_val_generations - first_group * n
    _log_generations(trainer, batch, most=left_to_log)
    episodes = EpisodeRows(batch)
    values = {}
    for name, row_values in infos.items():
        values[name] = [row_values[row] for row in episodes.first]
    values["reward"] = episodes.join(scores).sum(dim=1).tolist()
    return batch.select_idxs(episodes.first), values


def _log_generations(trainer: Any, batch: DataProto, most: int) -> None:
    """Logs the first rows as text."""
    shown = batch.slice(0, max(0, min(most, len(batch))))
    for row in readable_rows(shown, trainer.tokenizer):
        logger.info(
            "validation, reward %.3f\n%s\n--> %s", row["score"], row["input"], row["output"]
        )
