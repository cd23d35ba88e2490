"""Turns scores into rewards (KL in the reward), and rewards into advantages by an estimator.

Invariant: estimators see episodes, each in one row, and what they return goes back to the rows of
the batch, finite and of shape (batch, response_len).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.array_ops import row_blocks
from data.own_names import keep_own
from data.protocol import FIELDS, DataProto
from training import core_algos as algos
from training.batch.episode_rows import REWARD_INFO, EpisodeRows, group_keys
from training.core_algos.built_in import BUILT_IN_ESTIMATORS
from training.core_algos.masked_ops import at_least_float32, masked_whiten

# Fields an estimator may read that not every batch has: turns and anchors are made up for prompts,
# importance weights come with a correction alone.
OPTIONAL_FIELDS = ("turn_ids", "anchors", "turn_weights", "rollout_is_weights")
# Columns of continuations, which are there where they were sampled.
BRANCH_COLUMNS = ("branch_returns", "turn_weights")
# Fields that no estimator reads, although they have the width of a response.
# Columns by which an estimator tells agents apart.
ROLES = {"role", "agent_role", "agent_conversation"}
TOKEN_FIELDS = ("prompts", "attention_mask", "position_ids", "input_ids")


def compute_response_mask(data: DataProto) -> Tensor:
    """Cuts the attention mask over the responses, (B, R).

    This is for batches in which every response token was sampled.
    """
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def apply_kl_penalty(
    data: DataProto,
    kl_ctrl: algos.AdaptiveKLController | algos.FixedKLController,
    kl_penalty: str = "kl",
) -> tuple[DataProto, dict[str, float]]:
    """Sets token_level_rewards = token_level_scores - coefficient x KL per token.

    It shows the controller the mean KL: over sampled tokens of each row, then over rows that have
    any (nats per token).
    """
    data.require("token_level_scores", "old_log_probs", "ref_log_prob", by="apply_kl_penalty")
    fields = data.batch
    mask = fields["response_mask"]
    kl = algos.kl_penalty(fields["old_log_probs"], fields["ref_log_prob"], kl_penalty)
    kl = kl * mask  # (B, R)
    coefficient = kl_ctrl.value
    fields["token_level_rewards"] = fields["token_level_scores"] - coefficient * kl
    lengths = mask.sum(dim=1)
    rows = int((lengths > 0).sum())
    mean_of_rows = kl.sum(dim=1) / lengths.clamp(min=1)
    mean = mean_of_rows.sum().item() / max(rows, 1)
    kl_ctrl.update(current_kl=mean, n_steps=rows)
    metrics = {
        "actor/reward_kl_penalty": mean,
        "actor/reward_kl_penalty_coeff": float(coefficient),
    }
    return data, metrics


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

    The estimator is handed `token_level_rewards`, `response_mask` and what it asks for
    (training/core_algos/built_in.py); `state` is its own.

    Raises:
        KeyError: the batch lacks a field that the estimator reads.
        ValueError: the estimator returns another shape, or numbers that are not finite.
    """
    required = []
    for name in algos.estimator_needs(adv_estimator):
        if name in FIELDS and name not in OPTIONAL_FIELDS:
            required.append(name)
    data.require("token_level_rewards", "response_mask", *required, by=f"estimator {adv_estimator}")
    settings = {
        "gamma": gamma,
        "lam": lam,
        "num_repeat": num_repeat,
        "config": config,
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
        "state": {} if state is None else state,
    }
    episodes = EpisodeRows(data)
    span = algos.estimator_span(adv_estimator)
    if episodes.one_row_each or span == "batch":
        advantages, returns = _estimate(data, adv_estimator, settings)
    else:
        advantages, returns = _estimate_in_parts(data, episodes, adv_estimator, settings)
    shape = tuple(data.batch["response_mask"].shape)
    data.batch["advantages"] = _checked(advantages, "advantages", adv_estimator, shape)
    data.batch["returns"] = _checked(returns, "returns", adv_estimator, shape)
    return data


def _two_tensors(result: Any, adv_estimator: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns an estimator's two results; raises ValueError for anything else."""
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    if is_pair and all(isinstance(tensor, Tensor) and tensor.shape == shape for tensor in result):
        advantages, returns = result
        return advantages, returns
    if isinstance(result, tuple | list):
        kinds = ", ".join(_kind_of(value) for value in result)
        got = f"{len(result)} values ({kinds})"
    else:
        got = _kind_of(result)
    raise ValueError(
        f"estimator '{adv_estimator}' returned {got}; allowed: advantages and returns, two tensors "
        f"of shape (batch, response_len) = {shape}"
    )


def _kind_of(value: Any) -> str:
    """Describes what was returned in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _checked(result: Tensor, name: str, adv_estimator: str, shape: tuple[int, ...]) -> Tensor:
    """Returns an estimator's result; raises ValueError for a wrong shape or what is not finite."""
    is_finite = all(result[rows].isfinite().all() for rows in row_blocks(result))
    if result.shape == shape and is_finite:
        return result
    raise ValueError(
        f"estimator '{adv_estimator}': {name} must be finite and of shape (batch, response_len) = "
        f"{shape}; got {tuple(result.shape)}, {int((~result.isfinite()).sum())} of them not finite"
    )


def _estimate_in_parts(
    data: DataProto, episodes: EpisodeRows, adv_estimator: str, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Computes advantages and returns (B, R) of episodes of several rows.

    Part by part, so that memory is in proportion to tokens: lines as long as the longest episode
    are made of episodes of a similar length alone. An estimator that whitens over the whole
    batch does so at the end.
    """
    span = algos.estimator_span(adv_estimator)
    mask = data.batch["response_mask"]
    estimator = algos.get_adv_estimator_fn(adv_estimator)
    whitens = algos.estimator_whitens_batch(adv_estimator)
    settings = {**settings, "whiten": False}
    (advantages,) = at_least_float32(
        torch.zeros_like(mask, dtype=data.batch["token_level_rewards"].dtype)
    )
    if span == "scores":
        per_episode, _ = _estimate(episodes.as_scores(), adv_estimator, settings)
        of_rows = episodes.of_rows(per_episode).to(advantages.dtype)
        advantages = torch.where(mask.bool(), of_rows, 0)
        if whitens:
            advantages = masked_whiten(advantages, mask)
        return advantages, advantages
    returns = torch.zeros_like(advantages)
    # What the built-in ones take as **kwargs, for verl's sake, they do not read.
    reads_all = adv_estimator not in BUILT_IN_ESTIMATORS
    fields_read = algos.accepted_arguments(estimator, dict(data.batch), reads_all=reads_all)
    read = {"token_level_rewards", "response_mask", *fields_read}
    if "turn_ids" in data.batch:
        # An episode's line stands in the order of its turns, whatever the estimator reads.
        read.add("turn_ids")
    selected = data.select(batch_keys=sorted(read))
    keys: Sequence[Any] = range(len(episodes.rows))
    if span != "episodes":
        keys = data.non_tensor_batch["uid"][episodes.first].tolist()
    for rows in episodes.parts_of_similar_length(keys):
        part_advantages, part_returns = _estimate(
            selected.select_idxs(rows), adv_estimator, settings
        )
        advantages[rows] = part_advantages
        returns[rows] = part_returns
    if whitens:
        advantages = masked_whiten(advantages, mask)
    return advantages, returns


def _estimate(
    data: DataProto, adv_estimator: str, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Hands an estimator each episode in one row, and lays what it returns out in rows: (B, R)."""
    episodes = EpisodeRows(data)
    width = data.batch["response_mask"].shape[1]
    fields = {}
    for name, tensor in data.batch.items():
        if name not in TOKEN_FIELDS and episodes.can_join(tensor, width):
            fields[name] = episodes.join(tensor)
    fields.setdefault("turn_ids", torch.zeros_like(fields["response_mask"]))
    columns = {name: episodes.column(name) for name in data.non_tensor_batch}
    # verl's estimators know what the reward function gives by its plain name.
    infos = {}
    for name, values in columns.items():
        if name.startswith(REWARD_INFO):
            infos[name.removeprefix(REWARD_INFO)] = values
    # But for what the trainer knows by that name.
    taken = ROLES | (columns.keys() & FIELDS.keys())
    columns |= keep_own(infos, taken, "what the reward function gives beside a score")
    everyone = np.full(len(episodes.first), "policy")
    role = columns.get("role", columns.get("data_source", everyone))
    available = {
        **fields,
        **settings,
        "batch": fields,
        "non_tensor_batch": columns,
        "index": group_keys(data)[episodes.first],
        "episode_id": columns.get("episode_id", episodes.first),
        "role": columns.get("agent_role", role),
        "anchors": columns.get("anchors", [[str(uid)] for uid in columns["uid"]]),
    }
    available |= {name: columns[name] for name in BRANCH_COLUMNS if name in columns}
    result = algos.call_adv_estimator(adv_estimator, **available)
    shape = tuple(fields["response_mask"].shape)
    advantages, returns = _two_tensors(result, adv_estimator, shape)
    rows_of_advantages = episodes.split(advantages)
    if returns is advantages:
        return rows_of_advantages, rows_of_advantages
    return rows_of_advantages, episodes.split(returns)
