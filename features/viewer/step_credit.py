"""Computes a step's advantages again from what was recorded, by the estimators of training.

Invariant: what is computed here never replaces what was recorded; the two are shown beside each
other, and where they differ the page says by how much.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.array_ops import object_array
from data.protocol import FIELDS, DataProto
from features.viewer.update_columns import UpdateColumns
from training import core_algos as algos
from training.advantage import compute_advantage
from training.batch.episode_rows import EpisodeRows
from training.batch.masked_ops import masked_mean, masked_var
from training.config import AlgorithmConfig
from training.config.loader import ConfigError, load_config
from training.core_algos.groups import ScoredGroups
from training.run.recorded_config import config_of_step

# Nothing is computed again for a step with more places than this, rows times the longest.
MOST_PLACES = 1 << 26
# An estimator that reads one of these, which are not recorded, cannot be called again.
NOT_RECORDED = ("sum_pi_squared", "state", "batch", "non_tensor_batch")


def read_algorithm(run_dir: Path, meta: Mapping[str, Any]) -> AlgorithmConfig:
    """Returns the section `algorithm` that a step was made with.

    What the step itself recorded counts; the rest is from the settings that the run had then, and
    has its defaults where those are not there.

    Args:
        meta: of the step's arrays.
    """
    step = meta.get("step")
    path = config_of_step(run_dir, step if isinstance(step, int) else None)
    section = None
    if path.is_file():
        section = _algorithm_in(path, path.stat().st_mtime_ns)
    section = section or AlgorithmConfig()
    return replace(
        section,
        adv_estimator=str(meta.get("adv_estimator", section.adv_estimator)),
        gamma=float(meta.get("gamma", section.gamma)),
        lam=float(meta.get("lam", section.lam)),
        norm_adv_by_std_in_grpo=bool(
            meta.get("norm_adv_by_std_in_grpo", section.norm_adv_by_std_in_grpo)
        ),
    )


@lru_cache(maxsize=8)
def _algorithm_in(config: Path, changed: int) -> AlgorithmConfig | None:
    """Returns the section of a config that was changed last then; None: it cannot be read.

    All steps of a run ask for the same.
    """
    try:
        return load_config([str(config)], check=False).config.algorithm
    except (ConfigError, OSError, ValueError):
        return None


@dataclass(frozen=True)
class StepCredit:
    """Holds a step's batch as far as estimators read it, and what follows from it.

    Attributes:
        estimator: its name.
        algorithm: the settings.
        columns: as recorded.
        batch: the rows, padded on the right; None: nothing could be computed, see `why_not`.
        why_not: a sentence where nothing, or not the advantages, could be computed again.
        anchors: by episode the states its turns began in, where they are recorded.
    """

    estimator: str
    algorithm: AlgorithmConfig
    columns: UpdateColumns
    batch: DataProto | None
    why_not: str
    anchors: Mapping[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        columns: UpdateColumns,
        algorithm: AlgorithmConfig,
        turn_ids: Mapping[int, np.ndarray],
        anchors: Mapping[str, list[str]],
    ) -> "StepCredit":
        """Pads the columns to a batch.

        Args:
            turn_ids: by number of a row of `columns` its tokens' turns, as recorded.
            anchors: by episode the states its turns began in, where they are recorded.
        """
        estimator = str(columns.meta.get("adv_estimator", algorithm.adv_estimator))
        lengths = np.diff(columns.offsets)
        size, width = len(lengths), int(lengths.max(initial=0))
        if size * width > MOST_PLACES:
            why = f"{size} rows of up to {width} tokens are too many to be computed again here"
            return cls(estimator, algorithm, columns, None, why)
        needed = {"token_level_rewards", "response_mask"}
        if not needed <= columns.tokens.keys():
            return cls(estimator, algorithm, columns, None, "the rewards were not recorded")
        wanted = [*needed, *algos.estimator_needs(estimator)]
        tensors = {
            name: torch.from_numpy(_pad(columns.tokens[name], columns.offsets, width))
            for name in wanted
            if name in columns.tokens
        }
        tensors["response_mask"] = tensors["response_mask"].to(torch.int8)
        turns = [turn_ids.get(row, np.zeros(0, np.int16)) for row in range(size)]
        tensors["turn_ids"] = torch.from_numpy(_pad_list(turns, width))
        if "reward_baselines" in columns.rows:
            tensors["reward_baselines"] = torch.from_numpy(columns.rows["reward_baselines"].copy())
        ids = [str(name) for name in columns.rows["episode_id"].tolist()]
        uids = columns.rows.get("uid", columns.rows["episode_id"]).tolist()
        non_tensors = {
            "uid": object_array([str(uid) for uid in uids]),
            "episode_id": object_array(ids),
            "episode_row": columns.rows["episode_row"].astype(np.int64),
        }
        if "role" in columns.rows:
            non_tensors["role"] = object_array(columns.rows["role"].tolist())
        if anchors:
            non_tensors["anchors"] = object_array([anchors.get(name, []) for name in ids])
        batch = DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)
        why_not = _what_is_missing(estimator, batch)
        return cls(estimator, algorithm, columns, batch, why_not, anchors)

    @cached_property
    def facts(self) -> algos.EstimatorFacts:
        """Returns what the estimator says of itself; nothing is known of a user's own."""
        return algos.estimator_facts(self.estimator)

    @cached_property
    def advantages(self) -> np.ndarray | None:
        """Computes the advantages again: (all tokens of responses,); None where that is not to be.

        That `why_not` is empty does not mean that it goes well: whatever an estimator says against
        the recorded numbers is in `failure`.
        """
        return self._computed[0]

    @property
    def failure(self) -> str:
        """Returns what kept the advantages from being computed; empty where nothing did."""
        return self._computed[1]

    @cached_property
    def _computed(self) -> tuple[np.ndarray | None, str]:
        if self.batch is None or self.why_not:
            return None, self.why_not
        meta = self.columns.meta
        batch = DataProto(self.batch.batch.clone(), dict(self.batch.non_tensor_batch))
        try:
            compute_advantage(
                batch,
                self.estimator,
                gamma=self.algorithm.gamma,
                lam=self.algorithm.lam,
                num_repeat=1,
                norm_adv_by_std_in_grpo=bool(meta.get("norm_adv_by_std_in_grpo", True)),
                config=self.algorithm,
                state={},
            )
        except (ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
            return None, f"the estimator {self.estimator!r} cannot be called again: {error}"
        lengths = torch.from_numpy(np.diff(self.columns.offsets))
        advantages = batch.batch["advantages"]
        is_token = torch.arange(advantages.shape[1]) < lengths[:, None]
        return advantages[is_token].numpy(), ""

    @cached_property
    def episodes(self) -> EpisodeRows | None:
        """Groups the rows by their episodes."""
        return None if self.batch is None else EpisodeRows(self.batch)

    @cached_property
    def groups(self) -> ScoredGroups | None:
        """Scores the episodes and groups them as the estimators do; an entry an episode."""
        if self.batch is None or self.episodes is None:
            return None
        rewards = self.batch.batch["token_level_rewards"]
        uids = self.batch.non_tensor_batch["uid"][self.episodes.first]
        return ScoredGroups.from_rewards(
            self.episodes.totals(rewards)[:, None],
            self.episodes.lengths[:, None],
            uids,
        )

    @cached_property
    def place_of_episode(self) -> dict[str, int]:
        """Returns the place of each episode among `episodes` and in `groups`."""
        if self.batch is None or self.episodes is None:
            return {}
        ids = self.batch.non_tensor_batch["episode_id"][self.episodes.first]
        return {name: place for place, name in enumerate(ids.tolist())}

    @cached_property
    def members(self) -> dict[str, list[int]]:
        """Returns by group (uid) the places of its episodes."""
        if self.batch is None or self.episodes is None:
            return {}
        members: dict[str, list[int]] = {}
        uids = self.batch.non_tensor_batch["uid"][self.episodes.first].tolist()
        for place, uid in enumerate(uids):
            members.setdefault(uid, []).append(place)
        return members

    def members_beside(self, place: int) -> list[int]:
        """Returns the places of an episode's group, its own included."""
        if self.batch is None or self.episodes is None:
            return []
        return self.members[str(self.batch.non_tensor_batch["uid"][self.episodes.first[place]])]

    def name_of_episode(self, place: int) -> str:
        """Returns the id of the episode at a place."""
        assert self.batch is not None and self.episodes is not None
        return str(self.batch.non_tensor_batch["episode_id"][self.episodes.first[place]])

    @cached_property
    def group_numbers(self) -> list[tuple[float, bool, float, float]]:
        """Returns of each episode its group's size, whether it counts there, mean and spread."""
        groups = self.groups
        assert groups is not None
        return list(
            zip(
                groups.size.tolist(),
                groups.valid.tolist(),
                groups.mean(groups.scores).tolist(),
                groups.score_std().tolist(),
                strict=True,
            )
        )

    @cached_property
    def member_rows(self) -> list[dict[str, Any]]:
        """Returns of each episode what it is among the members of its group."""
        assert self.groups is not None
        return [
            {
                "episode_id": self.name_of_episode(place),
                "score": score,
                "tokens": tokens,
                "deviation": deviation,
                "counts": counts,
                "advantage": self.mean_advantage(place),
            }
            for place, (score, tokens, deviation, counts) in enumerate(
                zip(
                    self.groups.scores.tolist(),
                    self.episode_lengths.tolist(),
                    self.groups.deviations.tolist(),
                    self.groups.valid.tolist(),
                    strict=True,
                )
            )
        ]

    @cached_property
    def episode_lengths(self) -> Tensor:
        """Counts each episode's sampled tokens: (E,) int64."""
        assert self.episodes is not None
        return self.episodes.lengths

    def mean_advantage(self, place: int) -> float:
        """Averages the recorded advantages of an episode; NaN where no token is sampled."""
        assert self.episodes is not None
        offsets = self.columns.offsets
        total, tokens = 0.0, 0
        for row in self.episodes.rows[place]:
            part = slice(int(offsets[row]), int(offsets[row + 1]))
            sampled = self.columns.tokens["response_mask"][part] > 0
            total += float(self.columns.tokens["advantages"][part][sampled].sum(dtype=np.float64))
            tokens += int(sampled.sum())
        return total / tokens if tokens else float("nan")

    @cached_property
    def batch_whitening(self) -> tuple[float, float]:
        """Returns mean and standard deviation of raw advantages over the batch's sampled tokens."""
        returns, values = self.padded("returns"), self.padded("values")
        if self.batch is None or returns is None or values is None:
            return float("nan"), float("nan")
        mask = self.batch.batch["response_mask"]
        raw = returns - values
        return float(masked_mean(raw, mask)), float(masked_var(raw, mask).sqrt())

    @cached_property
    def total_policy_weight(self) -> float:
        """Sums the absolute policy weights of all the step's tokens."""
        column = self.columns.tokens["policy_weight"]
        return float(np.abs(column).sum(dtype=np.float64))

    @cached_property
    def _lines(self) -> tuple[Tensor, Tensor] | None:
        """Lays each episode's recorded returns and turns out in a line: (E, T); -1 is no turn.

        None where nothing was recorded.
        """
        returns = self.padded("returns")
        if self.batch is None or self.episodes is None or returns is None:
            return None
        mask = self.episodes.join(self.batch.batch["response_mask"]).bool()
        turns = self.episodes.join(self.batch.batch["turn_ids"])
        return self.episodes.join(returns), torch.where(mask, turns, -1)

    def return_of_turn(self, place: int, turn: int) -> float | None:
        """Returns what was recorded as the return at a turn's first token; None without the turn.

        Args:
            place: the episode's, in `episodes`.
        """
        if self._lines is None:
            return None
        returns, turns = self._lines
        tokens = (turns[place] == turn).nonzero()
        if not len(tokens):
            return None
        return float(returns[place, int(tokens[0])])

    def padded(self, name: str) -> Tensor | None:
        """Pads a recorded token column: (B, R); None where it was not recorded."""
        if self.batch is None or name not in self.columns.tokens:
            return None
        width = self.batch.batch["response_mask"].shape[1]
        return torch.from_numpy(_pad(self.columns.tokens[name], self.columns.offsets, width))


def _pad(column: np.ndarray, offsets: np.ndarray, width: int) -> np.ndarray:
    """Lays a column of tokens out in rows: (B, width), 0 behind each row's end."""
    padded = np.zeros((len(offsets) - 1, width), dtype=column.dtype)
    is_token = np.arange(width) < np.diff(offsets)[:, None]
    padded[is_token] = column
    return padded


def _pad_list(rows: list[np.ndarray], width: int) -> np.ndarray:
    """Lays turns of tokens out in rows: (B, width) int16, -1 where there are none."""
    padded = np.full((len(rows), width), -1, dtype=np.int16)
    for number, row in enumerate(rows):
        padded[number, : min(len(row), width)] = row[:width]
    return padded


def _what_is_missing(estimator: str, batch: DataProto) -> str:
    """Says what keeps the estimator from being called again; empty where nothing does."""
    if estimator not in algos.ADV_ESTIMATOR_REGISTRY:
        return f"the estimator {estimator!r} is not of this project: only its results are recorded"
    missing = []
    for name in algos.estimator_needs(estimator):
        is_field = name in FIELDS and name not in batch.batch and name not in batch.non_tensor_batch
        if name in NOT_RECORDED or (is_field and name != "turn_ids"):
            missing.append(name)
    if missing:
        return f"{estimator} also reads {', '.join(missing)}, which is not recorded"
    return ""


def state_deltas(
    rewards: np.ndarray, values: np.ndarray, sampled: np.ndarray, gamma: float
) -> np.ndarray:
    """Computes GAE's errors r_t + gamma V_{t+1} - V_t of sampled tokens: (T,), NaN elsewhere."""
    deltas = np.full(len(rewards), np.nan, dtype=np.float32)
    own = values[sampled].astype(np.float64)
    following = np.append(own[1:], 0.0)
    deltas[sampled] = rewards[sampled] + gamma * following - own
    return deltas
