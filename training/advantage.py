"""The driver's maths of a step: KL in the reward, then advantages by the estimator that the config names."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.protocol import DUMMY_UID, DataProto
from training.core_algos import (
    AdaptiveKLController,
    FixedKLController,
    call_adv_estimator,
    estimator_needs,
    kl_penalty,
)

KLController = AdaptiveKLController | FixedKLController


class EpisodeLines:
    """A batch's rows as lines, one for each episode: the responses of an episode's rows, one behind the other.

    Estimators see lines, so that an episode counts once in its group, and its rewards reach back over all its rows:

        rows   e0: [a a . .]   e1: [b b b .]   e0: [c c e c]     ->     lines   [a a . . c c e c]   [b b b . . . . .]
    """

    def __init__(self, batch: DataProto) -> None:
        rows_of: dict[Hashable, list[int]] = {}
        columns = batch.non_tensor_batch
        ids = columns.get("episode_id", np.arange(len(batch)))
        order = columns.get("episode_row", np.zeros(len(batch), dtype=np.int64))
        for row in np.argsort(order, kind="stable").tolist():
            dummy = columns["uid"][row] == DUMMY_UID if "uid" in columns else False
            rows_of.setdefault(row if dummy else str(ids[row]), []).append(row)
        self.rows = sorted(rows_of.values())
        self.first = np.array([rows[0] for rows in self.rows], dtype=np.int64)  # (lines,): an episode's first row
        self.plain = all(rows == [i] for i, rows in enumerate(self.rows))

    def join(self, tensor: Tensor) -> Tensor:
        """(B, R) -> (lines, the most rows x R), zeros behind an episode's last row; (B,) -> each episode's first."""
        if self.plain:
            return tensor
        if tensor.dim() == 1:
            return tensor[torch.from_numpy(self.first)]
        width = tensor.shape[1]
        lines = tensor.new_zeros(len(self.rows), max(map(len, self.rows)) * width)
        for line, rows in zip(lines, self.rows, strict=True):
            line[: len(rows) * width] = tensor[rows].flatten()
        return lines

    def split(self, lines: Tensor) -> Tensor:
        """The inverse of `join` for (lines, width): (B, R)."""
        if self.plain:
            return lines
        width = lines.shape[1] // max(map(len, self.rows))
        out = lines.new_empty(sum(map(len, self.rows)), width)
        for line, rows in zip(lines, self.rows, strict=True):
            out[rows] = line[: len(rows) * width].view(len(rows), width)
        return out


def compute_response_mask(data: DataProto) -> Tensor:
    """(B, R): the attention mask over the responses; for batches whose every response token was sampled."""
    width = data.batch["responses"].shape[1]
    return data.batch["attention_mask"][:, -width:]


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty_kind: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """token_level_rewards = token_level_scores - coefficient x KL per token; then the controller sees the mean KL.

    The mean is over sampled tokens of each row, then over rows that have any (nats per token).
    """
    data.require("token_level_scores", "old_log_probs", "ref_log_prob", by="apply_kl_penalty")
    mask = data.batch["response_mask"]
    kl = kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty_kind) * mask  # (B, R)
    coefficient = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - coefficient * kl
    lengths = mask.sum(dim=1)
    rows = int((lengths > 0).sum())
    mean = (kl.sum(dim=1) / lengths.clamp(min=1)).sum().item() / max(rows, 1)
    kl_ctrl.update(current_kl=mean, n_steps=rows)
    return data, {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": float(coefficient)}


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Adds `advantages` and `returns` (B, R) by the estimator of that name, from `token_level_rewards` and what it asks for."""
    data.require("token_level_rewards", "response_mask", *_tensor_needs(adv_estimator), by=f"estimator {adv_estimator}")
    lines, width = EpisodeLines(data), data.batch["response_mask"].shape[1]
    fields = {name: tensor for name, tensor in data.batch.items() if tensor.shape[1:] in ((), (width,)) or lines.plain}
    advantages, returns = call_adv_estimator(
        adv_estimator,
        **{name: lines.join(tensor) for name, tensor in fields.items()},
        index=data.non_tensor_batch["uid"][lines.first],
        gamma=gamma,
        lam=lam,
        num_repeat=num_repeat,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        config=config,
    )
    for name, line in (("advantages", advantages), ("returns", returns)):
        tensor = lines.split(line)
        if tensor.shape != data.batch["response_mask"].shape or not torch.isfinite(tensor).all():
            raise ValueError(
                f"estimator '{adv_estimator}': {name} must be finite and of shape (batch, response_len) = "
                f"{tuple(data.batch['response_mask'].shape)}; got {tuple(tensor.shape)}, {int((~torch.isfinite(tensor)).sum())} of them not finite"
            )
        data.batch[name] = tensor
    return data


def _tensor_needs(adv_estimator: str) -> list[str]:
    return [name for name in estimator_needs(adv_estimator) if name in ("values", "old_log_probs", "reward_baselines")]
