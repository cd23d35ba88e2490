"""Episodes with continuations, as the turn loop leaves them, and the batch that is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.array_ops import object_array
from data.protocol import DataProto
from features.branching.proof import Proved
from features.branching.sampling import BranchSampling
from features.branching.settings import BranchingSettings
from training.config import PPOConfig
from workers.agent_rollout import list_training_rows, reward_matrix
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.begin import Begin
from workers.rollout.branches import branch_columns
from workers.rollout.engine import Completion
from workers.rollout.episode import Episode, Row, Span, Turn

PROMPT_WIDTH = 4
# (ids that the policy sampled, ids of what answered, reward)
Played = tuple[Sequence[int], Sequence[int], float]


def episode_of(
    prompt: Sequence[int],
    turns: Sequence[Played],
    *,
    group: int = 0,
    sample: int = 0,
    begin: int | None = None,
    word: str = "",
    ending: str = "done",
) -> Episode:
    """An episode of one row; with `begin` a continuation from that turn on."""
    row = Row(prompt_ids=list(prompt))
    episode = Episode(group=group, sample=sample, rows=[row], ending=ending)
    for number, (sampled, answer, reward) in enumerate(turns):
        start = len(row.ids)
        row.append_tokens(list(sampled), [-1.0] * len(sampled))
        row.spans.append(Span(start, len(row.ids), number))
        row.append_tokens(list(answer))
        row.reward_at[row.spans[-1].end - 1] = reward
        episode.turns.append(Turn(text="", finish_reason="stop", tokens=len(sampled)))
    if begin is not None:
        taken = [
            Completion(request_id="", token_ids=list(ids), log_probs=[], finish_reason="stop")
            for ids, _, _ in turns[:begin]
        ]
        episode.begin = Begin(prefix=taken, replies=[], word=word or f"{begin}.0")
    return episode


def rule_of(config: PPOConfig, settings: BranchingSettings) -> BranchSampling:
    rule = BranchSampling(config, settings, [], None)
    rule.proved[0] = Proved("replay", {})
    return rule


def batch_of(
    episodes: Sequence[Episode], rule: BranchSampling, width: int, dtype: torch.dtype
) -> DataProto:
    """What a worker makes of episodes, as far as training reads it."""
    listed = list_training_rows(episodes)
    rows = [each.row for each in listed]
    engine: Any = SimpleNamespace(
        response_length=width,
        pad_token_id=0,
        config=SimpleNamespace(calculate_log_probs=True),
        records_versions=False,
        routers=None,
    )
    batch = BaseRollout.build_batch(engine, rows, PROMPT_WIDTH)
    rewards: Tensor = torch.from_numpy(reward_matrix(rows, width)).to(dtype)
    batch.batch["environment_rewards"] = rewards
    numbers = np.array([each.description for each in listed], dtype=np.int64)
    columns = {
        "uid": object_array([f"g{each.episode.group}" for each in listed]),
        "episode_id": object_array(
            [f"g{each.episode.group}.{each.episode.sample}" for each in listed]
        ),
        "episode_row": np.array([each.number for each in listed], dtype=np.int64),
        "episode_facts": object_array([None] * len(listed)),
    }
    batch.non_tensor_batch = columns | branch_columns(rule, episodes, numbers)
    batch.meta_info = {"global_steps": 1, "seed": 0, "validate": False}
    return batch
