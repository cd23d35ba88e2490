"""What the policy earns when it answers greedily: the baseline that ReMax compares with."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from custom.reward_managers.unscored import UNSCORED
from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows, group_keys
from training.batch.row_groups import rows_by_key
from training.run.data_position import Rows

if TYPE_CHECKING:
    from training.ray_trainer import PPOTrainer


def add_greedy_baselines(
    trainer: PPOTrainer, batch: DataProto, rows: Rows, first_group: int, step: int | None
) -> None:
    """Answers the rows once more, greedily, and adds what that earned as `reward_baselines`, (B,).

    Rows without a baseline are not trained on, unless `agent.on_failure` is zero.

    Args:
        batch: the answers to the rows, whose groups count from `first_group` on.
        step: that they are of; None: the current one.
    """
    prompts = trainer.prompt_batch(rows, 1, first_group, step=step)
    prompts.meta_info["do_sample"] = False
    baseline_of_group = rewards_by_group(trainer, prompts)
    # A role that did not speak in the greedy episode has no baseline.
    found = [baseline_of_group.get(key, math.nan) for key in group_keys(batch)]
    baselines = torch.tensor(found)  # (B,)
    is_unscored = baselines.isnan()
    if is_unscored.any() and trainer.config.agent.on_failure != "zero":
        kept = (~is_unscored)[:, None]
        batch.batch["response_mask"] = batch.batch["response_mask"] * kept
    batch.batch["reward_baselines"] = baselines.nan_to_num(0.0)


def rewards_by_group(trainer: PPOTrainer, prompts: DataProto) -> dict[str, float]:
    """Answers prompts, of which each is a group, and returns their rewards by group.

    The reward is NaN where a model beside the policy did not judge the answer, and a mean where an
    agent has several conversations.
    """
    batch = trainer.play(prompts)
    scores, infos = trainer.score(batch, trainer.reward_fn)
    episodes = EpisodeRows(batch)
    rewards = episodes.join(scores).sum(dim=1).tolist()
    if UNSCORED in infos:
        for number, rows in enumerate(episodes.rows):
            if any(infos[UNSCORED][row] for row in rows):
                rewards[number] = float("nan")
    keys = group_keys(batch)[episodes.first].tolist()
    groups = rows_by_key(keys).items()
    return {key: fmean(rewards[member] for member in members) for key, members in groups}
