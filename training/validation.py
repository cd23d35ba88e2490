"""Validates: the same prompts every time, answered and scored, never trained on."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from data.own_names import keep_own
from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows, episode_facts
from training.config.side_services import side_names
from training.run.dumps import dump, readable_rows
from training.run.metrics.model_metrics import take_model_metrics
from training.run.metrics.validation_metrics import (
    flatten_validation_metrics,
    process_validation_metrics,
    reward_intervals,
)

logger = logging.getLogger(__name__)


@dataclass
class ValidationSamples:
    """Holds what a validation's episodes got, an entry an episode, a task's samples side by side.

    Attributes:
        sources: the data source, or environment.
        uids: the task's.
        endings: how the episode ended.
        tokens: that the policy sampled.
        infos: variable -> values, None where an episode has none; `reward` is one of them.
        observed: metrics that observers add.
    """

    sources: list[str] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    infos: dict[str, list[Any]] = field(default_factory=dict)
    observed: dict[str, float] = field(default_factory=dict)

    @property
    def rewards(self) -> list[float]:
        """Returns the episodes' rewards; none where nothing was played."""
        return self.infos.get("reward", [])

    def add(self, batch: DataProto, values: Mapping[str, list[Any]], source_key: str) -> None:
        """Adds a batch with one row an episode, and the values of those."""
        size = len(batch)
        columns = batch.non_tensor_batch
        # A source may have entries that others have not.
        for name in self.infos.keys() | values.keys():
            column = self.infos.setdefault(name, [None] * len(self.uids))
            column.extend(values.get(name, [None] * size))
        self.sources += [str(name) for name in columns.get(source_key, np.full(size, "unknown"))]
        self.endings += [str(ending) for ending in columns.get("ending", np.full(size, "unknown"))]
        self.uids += list(columns["uid"])

    def metrics(self, seed: int) -> dict[str, float]:
        """Computes a validation's metrics, as `val-core/SOURCE/reward/mean@N`."""
        nested = process_validation_metrics(self.sources, self.uids, self.infos, seed=seed)
        metrics = flatten_validation_metrics(nested)
        metrics |= reward_intervals(self.sources, self.uids, self.rewards)
        return metrics | {f"val-aux/{name}": value for name, value in self.observed.items()}


def validate(trainer: Any) -> dict[str, float]:
    """Scores the validation prompts, `val_kwargs.n` answers each.

    Returns: metrics, as `val-core/SOURCE/REWARD/mean@N`; none without a validation set.
    """
    if trainer.val_dataloader is None:
        return {}
    metrics = play_validation(trainer).metrics(trainer.seed)
    asked = take_model_metrics(side_names(trainer.config))
    return metrics | {f"val-aux/{name}": value for name, value in asked.items()}


def play_validation(trainer: Any) -> ValidationSamples:
    """Answers and scores the validation prompts, or plays the validation's episodes."""
    samples = ValidationSamples()
    trainer.val_generations = []
    n = trainer.config.actor_rollout_ref.rollout.val_kwargs.n
    trainer.observers.validation_begins(trainer.global_steps)
    facts: list[Mapping[str, Any]] = []
    for rows in trainer.val_dataloader:
        # Tasks so far, whatever was played of them: the seeds of those to come follow from it.
        first_group = len(set(samples.uids))
        batch, values, tokens = _validate_batch(trainer, rows, n, first_group)
        samples.add(batch, values, trainer.config.data.reward_fn_key)
        samples.tokens += tokens
        facts += episode_facts(batch)
    samples.observed = trainer.observers.validation_made(facts)
    return samples


def _validate_batch(
    trainer: Any, rows: dict[str, Any], n: int, first_group: int
) -> tuple[DataProto, dict[str, list[Any]], list[int]]:
    """Answers and scores some prompts.

    Returns: one row an episode; its values by name; the tokens that it sampled.
    """
    settings = trainer.config.trainer
    prompts = trainer.prompt_batch(rows, n, first_group, validate=True)
    with trainer.observers.generating(trainer.global_steps, validate=True):
        batch = trainer.play(prompts)
    scores, infos = trainer.score(batch, trainer.val_reward_fn)
    batch.batch["token_level_scores"] = scores
    trainer.observers.scored(batch, scores)
    dump(
        batch,
        settings.validation_data_dir,
        trainer.global_steps,
        trainer.tokenizer,
        anew=first_group == 0,
    )
    trainer.on_batch(batch)
    left_to_log = settings.log_val_generations - first_group * n
    trainer.val_generations += _log_generations(trainer, batch, most=left_to_log)
    episodes = EpisodeRows(batch, by_conversation=False)
    values = {}
    own_infos = keep_own(infos, ("reward",), "what the reward function gives beside a score")
    for name, row_values in own_infos.items():
        values[name] = [row_values[row] for row in episodes.last]
    values["reward"] = episode_rewards(batch, episodes, scores)
    return batch.select_idxs(episodes.first), values, episodes.lengths.tolist()


def episode_rewards(batch: DataProto, episodes: EpisodeRows, scores: Tensor) -> list[float]:
    """Sums each episode's scores (B, R) over its rows: (E,).

    Where several agents speak, an episode's reward is the mean of its conversations' rewards, each
    of which is an episode's in training; but for what its environment asked (`row_aside`).
    """
    conversations = EpisodeRows(batch)
    rewards = conversations.join(scores).sum(dim=1)  # (conversations,)
    if len(conversations.rows) == len(episodes.rows):
        return rewards.tolist()
    rewards_of_rows = conversations.of_rows(rewards)  # (B,)
    first = set(conversations.first.tolist())
    aside = batch.non_tensor_batch.get("row_aside", np.zeros(len(batch), dtype=bool))
    means = []
    for rows in episodes.rows:
        begins = [row for row in rows if row in first and not aside[row]]
        means.append(rewards_of_rows[begins].mean().item())
    return means


def _log_generations(trainer: Any, batch: DataProto, most: int) -> list[dict[str, Any]]:
    """Logs the first rows as text, and returns them."""
    shown = batch.slice(0, max(0, min(most, len(batch))))
    rows = list(readable_rows(shown, trainer.tokenizer))
    for row in rows:
        logger.info(
            "validation, reward %.3f\n%s\n--> %s", row["score"], row["input"], row["output"]
        )
    return rows
