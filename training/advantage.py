"""The driver's maths of a step: KL in the reward, then advantages by the estimator that the config names.

Invariant: estimators see episodes, each in one row, and what they return goes back to the rows of the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.containers import row_blocks
from data.protocol import FIELDS, DataProto
from data.texts import say
from training.batch.batching import REWARD_INFO, EpisodeRows
from training.batch.torch_functional import at_least_float32, masked_whiten
from training.core_algos import AdaptiveKLController, FixedKLController, call_adv_estimator, estimator_needs, kl_penalty
from training.core_algos.registry import ESTIMATOR_SPANS, get_adv_estimator_fn, taken

KLController = AdaptiveKLController | FixedKLController


def compute_response_mask(data: DataProto) -> Tensor:
    """Cuts the attention mask over the responses, (B, R); for batches whose every response token was sampled."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty_kind: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Sets token_level_rewards = token_level_scores - coefficient x KL per token, and shows the controller the mean KL.

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
    state: dict[str, Any] | None = None,
) -> DataProto:
    """Adds `advantages` and `returns` (B, R) by the estimator of that name.

    It is handed `token_level_rewards`, `response_mask` and what it asks for (algorithm_settings.yaml); `state` is its
    own. Raises ValueError where it returns another shape or numbers that are not finite.
    """
    # What is made up for a batch of prompts, or is there with a correction alone.
    optional = ("turn_ids", "anchors", "rollout_is_weights")
    needed = [name for name in estimator_needs(adv_estimator) if name in FIELDS and name not in optional]
    data.require("token_level_rewards", "response_mask", *needed, by=f"estimator {adv_estimator}")
    settings = {"gamma": gamma, "lam": lam, "num_repeat": num_repeat, "config": config}
    settings |= {"norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo, "state": {} if state is None else state}
    episodes = EpisodeRows(data)
    whole = episodes.one_row_each or ESTIMATOR_SPANS.get(adv_estimator, "batch") == "batch"
    found = _estimate(data, adv_estimator, settings) if whole else _in_parts(data, episodes, adv_estimator, settings)
    shape = tuple(data.batch["response_mask"].shape)
    for name, tensor in zip(("advantages", "returns"), found, strict=True):
        finite = all(tensor[rows].isfinite().all() for rows in row_blocks(tensor))
        if tensor.shape != shape or not finite:
            given, wrong = tuple(tensor.shape), int((~tensor.isfinite()).sum())
            raise ValueError(say("advantages", by=adv_estimator, name=name, shape=shape, given=given, wrong=wrong))
        data.batch[name] = tensor
    return data


def _in_parts(
    data: DataProto, episodes: EpisodeRows, adv_estimator: str, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Computes advantages and returns (B, R) of episodes of several rows in memory that is in proportion to tokens."""
    fn, span, mask = get_adv_estimator_fn(adv_estimator), ESTIMATOR_SPANS[adv_estimator], data.batch["response_mask"]
    settings, whiten = {**settings, "whiten": False}, bool(taken(fn, {"whiten": True}))
    (advantages,) = at_least_float32(torch.zeros_like(mask, dtype=data.batch["token_level_rewards"].dtype))
    if span == "scores":
        of_rows = episodes.of_rows(_estimate(episodes.as_scores(), adv_estimator, settings)[0])
        for rows in row_blocks(mask):
            advantages[rows] = torch.where(mask[rows].bool(), of_rows[rows].to(advantages.dtype), 0)
        advantages = masked_whiten(advantages, mask) if whiten else advantages
        return advantages, advantages
    returns = torch.zeros_like(advantages)
    seen = data.select(batch_keys=sorted({"token_level_rewards", "response_mask", *taken(fn, dict(data.batch))}))
    keys = range(len(episodes.rows)) if span == "episodes" else data.non_tensor_batch["uid"][episodes.first].tolist()
    for part in episodes.parts(keys):
        advantages[part], returns[part] = _estimate(seen.select_idxs(part), adv_estimator, settings)
    return masked_whiten(advantages, mask) if whiten else advantages, returns


def _estimate(data: DataProto, adv_estimator: str, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Hands an estimator each episode in one row: (B, R) twice, what it returns in the rows of the batch."""
    episodes, width = EpisodeRows(data), data.batch["response_mask"].shape[1]
    fields = {
        name: episodes.join(tensor)
        for name, tensor in data.batch.items()
        if episodes.takes(tensor, width) and name not in ("prompts", "attention_mask", "position_ids", "input_ids")
    }
    fields.setdefault("turn_ids", torch.zeros_like(fields["response_mask"]))
    columns = {name: values[episodes.first] for name, values in data.non_tensor_batch.items()}
    # verl's estimators know what the reward function gives by its plain name.
    columns |= {name.removeprefix(REWARD_INFO): values for name, values in columns.items()}
    given = {**fields, **settings, "batch": fields, "non_tensor_batch": columns, "index": columns["uid"]}
    given["episode_id"] = columns.get("episode_id", episodes.first)
    given["role"] = columns.get("role", columns.get("data_source", np.full(len(episodes.first), "policy")))
    given["anchors"] = columns.get("anchors", [[str(uid)] for uid in columns["uid"]])
    advantages, returns = call_adv_estimator(adv_estimator, **given)
    joined = episodes.split(advantages)
    return joined, joined if returns is advantages else episodes.split(returns)
