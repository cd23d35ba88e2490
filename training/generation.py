"""Generates a step's batch of its rows: samples, greedy baselines, dynamic sampling.

Invariant: what is sampled follows from (run seed, step, group, sample); further rows that dynamic
sampling draws are further groups of the same step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from custom.reward_managers.unscored import UNSCORED
from data.protocol import DataProto
from training.batch.dynamic_sampling import collect_varied_groups
from training.batch.episode_rows import EpisodeRows, group_keys
from training.run.data_position import Rows

if TYPE_CHECKING:
    from training.ray_trainer import PPOTrainer

Metrics = dict[str, float]


class StepGenerator:
    """Generates a step's batch by the trainer's own rollout, `_generate_multi_turn_sequences`.

    Args:
        trainer: describes prompts or episodes, plays and scores them.
    """

    def __init__(self, trainer: PPOTrainer) -> None:
        self.trainer = trainer
        self.config = trainer.config

    def generate(self, rows: Rows, step: int | None) -> tuple[DataProto, Metrics]:
        """Answers the rows' prompts for a step, None: the current one; returns batch and metrics.

        With `filter_groups` the batch is scored, and has further rows' prompts where a group's
        rewards do not differ.
        """
        number = self.trainer.global_steps if step is None else step
        with self.trainer.observers.generating(number, validate=False):
            return self._generate(rows, step)

    def _generate(self, rows: Rows, step: int | None) -> tuple[DataProto, Metrics]:
        settings = self.config.algorithm.filter_groups
        if not settings.enable:
            return self._answers(rows, 0, step), {}
        scored_batches = self._scored_batches(rows, step)
        return collect_varied_groups(scored_batches, settings, self.config.prompts_per_step)

    def _scored_batches(self, rows: Rows, step: int | None) -> Iterator[DataProto]:
        """Yields the rows' prompts answered and scored, then those of further rows as asked for."""
        trainer = self.trainer
        for number in itertools.count():
            batch = self._answers(rows, number * self.config.prompts_per_step, step)
            scores, infos = trainer.score(batch, trainer.reward_fn)
            scored = trainer.phases.add_rewards(batch, scores, infos)
            trainer.observers.scored(scored, scores)
            yield scored
            rows = trainer.row_stream.draw()

    def _answers(self, rows: Rows, first_group: int, step: int | None) -> DataProto:
        """Answers the rows' prompts `rollout.n` times each.

        Where the estimator reads that, they are answered once more greedily, for
        `reward_baselines`.
        """
        trainer = self.trainer
        samples = self.config.actor_rollout_ref.rollout.n
        prompts = trainer.prompt_batch(rows, samples, first_group, step=step)
        batch = trainer.play(prompts)
        if "reward_baselines" in self.config.estimator_needs:
            greedy_prompts = trainer.prompt_batch(rows, 1, first_group, step=step)
            greedy_prompts.meta_info["do_sample"] = False
            baseline_of_group = self._rewards_by_group(greedy_prompts)
            baselines = torch.tensor([baseline_of_group[key] for key in group_keys(batch)])  # (B,)
            is_unscored = baselines.isnan()
            if is_unscored.any() and self.config.agent.on_failure != "zero":
                kept = (~is_unscored)[:, None]
                batch.batch["response_mask"] = batch.batch["response_mask"] * kept
            batch.batch["reward_baselines"] = baselines.nan_to_num(0.0)
        return batch

    def _rewards_by_group(self, prompts: DataProto) -> dict[str, float]:
        """Answers prompts, of which each is a group, and returns their rewards by group.

        The reward is NaN where a model beside the policy did not judge the answer.
        """
        batch = self.trainer.play(prompts)
        scores, infos = self.trainer.score(batch, self.trainer.reward_fn)
        episodes = EpisodeRows(batch)
        rewards = episodes.join(scores).sum(dim=1).tolist()
        if UNSCORED in infos:
            for number, rows in enumerate(episodes.rows):
                if any(infos[UNSCORED][row] for row in rows):
                    rewards[number] = float("nan")
        keys = group_keys(batch)[episodes.first]
        return dict(zip(keys, rewards, strict=True))
