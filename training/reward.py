"""From a batch of responses to rewards and advantages: the user's reward function, KL, the estimator.

Invariant: rewards are finite float32 of shape (batch, response_len) and lie only on tokens that the policy sampled
(response_mask 1), whatever form the reward function answers in; estimators see episodes, each in one row, and what they
return goes back to the rows of the batch. Example, with P0 the prompt, A the policy's tokens and E the environment's:

    responses     = A0 A0 E0 A1 A1 E1 pad
    response_mask =  1  1  0  1  1  0   0
    outcome 0.5   =  0  0  0  0 .5  0   0      on the last sampled token, although an environment's token is last
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from custom.env import takes_keyword
from custom.reward_manager import NaiveRewardManager, get_reward_manager_cls
from data.containers import move_to_sampled_tokens, place_outcome_rewards, row_blocks
from data.loading import load_extern_object
from data.protocol import FIELDS, DataProto
from data.texts import say
from training import core_algos as algos
from training.batch.batching import REWARD_INFO, EpisodeRows, real_rows
from training.batch.torch_functional import at_least_float32, masked_whiten
from training.config import PPOConfig

RewardFunction = Callable[..., Any]
RewardInfos = dict[str, list[Any]]


def get_custom_reward_fn(config: PPOConfig) -> RewardFunction | None:
    """Loads the function that `custom_reward_function` names and binds its reward_kwargs; None where no path is set."""
    custom = config.custom_reward_function
    if custom.path is None:
        return None
    function = load_extern_object(custom.path, custom.name)
    return partial(function, **custom.reward_kwargs) if custom.reward_kwargs else function


def load_reward_manager(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, num_examine: int, **kwargs: Any
) -> RewardFunction:
    """Makes the reward manager that the config names, around the user's scoring function or the built-in rules.

    `kwargs` go to the manager beside reward_model.reward_kwargs and win over them.
    """
    settings, manager = (
        config.reward_model,
        get_reward_manager_cls(config.reward_model.reward_manager),
    )
    own: dict[str, Any] = {
        "compute_score": get_custom_reward_fn(config),
        "reward_fn_key": config.data.reward_fn_key,
    }
    if issubclass(manager, NaiveRewardManager):
        own |= {
            "overlong_buffer_cfg": settings.overlong_buffer,
            "max_resp_len": config.data.max_response_length,
        }
    return manager(tokenizer, num_examine, **own | settings.reward_kwargs | kwargs)


def compute_reward(data: DataProto, reward_fn: RewardFunction) -> tuple[Tensor, RewardInfos]:
    """Runs the reward function and brings what it returns into one form.

    Args:
        data: a batch with `response_mask` (batch, response_len).
        reward_fn: called as f(data, return_dict=True) where it takes return_dict, else as f(data). It returns a tensor,
            array or list, on any device, of shape (batch,), one score per row that lands on its last sampled token, or
            (batch, response_len); or a dict with that as "reward_tensor" and "reward_extra_info": name -> one value per
            row.
    Returns:
        rewards (batch, response_len) float32 on the batch's device, extra infos as lists of length batch, under their
        own names; in validation an info named "reward" gives way to the trainer's own.
    Raises ValueError for another shape, and for NaN or infinite rewards, with the rows.
    """
    data.require("response_mask", by="compute_reward")
    real = real_rows(data)
    if not real.all():
        return _among_dummies(*compute_reward(data.select_idxs(real), reward_fn), real)
    result = (
        reward_fn(data, return_dict=True)
        if takes_keyword(reward_fn, "return_dict")
        else reward_fn(data)
    )
    told = result if isinstance(result, Mapping) else {"reward_tensor": result}
    if "reward_tensor" not in told:
        raise ValueError(
            f"the reward function's dict has {sorted(told)}; 'reward_tensor' is missing"
        )
    mask = data.batch["response_mask"]
    rewards = _as_tensor(told["reward_tensor"], mask)
    place = place_outcome_rewards if rewards.dim() == 1 else move_to_sampled_tokens
    return place(rewards, mask), _check_infos(told.get("reward_extra_info", {}), len(mask))


def _among_dummies(rewards: Tensor, infos: RewardInfos, real: Tensor) -> tuple[Tensor, RewardInfos]:
    """Puts what real rows got in their places; dummy rows get nothing, and no infos (None)."""
    whole = rewards.new_zeros(len(real), rewards.shape[1])
    whole[real] = rewards
    told = {name: iter(values) for name, values in infos.items()}
    return whole, {
        name: [next(told[name]) if kept else None for kept in real.tolist()] for name in infos
    }


def compute_reward_async(
    data: DataProto, reward_fn: RewardFunction
) -> Future[tuple[Tensor, RewardInfos]]:
    """Runs `compute_reward` in a thread of its own; `.result()` gives its answer or raises its error.

    The thread sees the batch as it is now: fields that are added to it meanwhile do not disturb it.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
    future = executor.submit(compute_reward, data.select(), reward_fn)
    executor.shutdown(wait=False)
    return future


def _as_tensor(result: Any, response_mask: Tensor) -> Tensor:
    """Makes float32 on the mask's device; ValueError for what is no number, has a wrong shape or is not finite."""
    allowed = f"allowed: ({len(response_mask)},) or {tuple(response_mask.shape)}"
    try:
        rewards = torch.as_tensor(result).detach().to(response_mask.device, torch.float32)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"the reward function returned {type(result).__name__}, not numbers; {allowed}"
        ) from error
    if rewards.shape not in (response_mask.shape[:1], response_mask.shape):
        raise ValueError(f"the reward function returned shape {tuple(rewards.shape)}; {allowed}")
    if (
        bad := (~rewards.reshape(len(rewards), -1).isfinite())
        .any(dim=1)
        .nonzero()
        .flatten()
        .tolist()
    ):
        raise ValueError(
            f"the reward function returned NaN or infinity in {len(bad)} rows: {bad[:10]}"
        )
    return rewards


def _check_infos(infos: Mapping[str, Any], batch_size: int) -> RewardInfos:
    lists = {
        name: v.tolist() if isinstance(v, Tensor | np.ndarray) else list(v)
        for name, v in infos.items()
    }
    for name, values in lists.items():
        if len(values) != batch_size:
            raise ValueError(
                f"reward_extra_info[{name!r}] has {len(values)} values; allowed: one a row, {batch_size}"
            )
    return lists


# KL in the reward, and advantages


def compute_response_mask(data: DataProto) -> Tensor:
    """Cuts the attention mask over the responses, (B, R); for batches whose every response token was sampled."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def apply_kl_penalty(
    data: DataProto,
    kl_ctrl: algos.AdaptiveKLController | algos.FixedKLController,
    kl_penalty_kind: str = "kl",
) -> tuple[DataProto, dict[str, float]]:
    """Sets token_level_rewards = token_level_scores - coefficient x KL per token, and shows the controller the mean KL.

    The mean is over sampled tokens of each row, then over rows that have any (nats per token).
    """
    data.require("token_level_scores", "old_log_probs", "ref_log_prob", by="apply_kl_penalty")
    mask = data.batch["response_mask"]
    kl = (
        algos.kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty_kind)
        * mask
    )  # (B, R)
    coefficient = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - coefficient * kl
    lengths = mask.sum(dim=1)
    rows = int((lengths > 0).sum())
    mean = (kl.sum(dim=1) / lengths.clamp(min=1)).sum().item() / max(rows, 1)
    kl_ctrl.update(current_kl=mean, n_steps=rows)
    return data, {
        "actor/reward_kl_penalty": mean,
        "actor/reward_kl_penalty_coeff": float(coefficient),
    }


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
    needed = [
        name
        for name in algos.estimator_needs(adv_estimator)
        if name in FIELDS and name not in optional
    ]
    data.require("token_level_rewards", "response_mask", *needed, by=f"estimator {adv_estimator}")
    settings = {"gamma": gamma, "lam": lam, "num_repeat": num_repeat, "config": config}
    settings |= {
        "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo,
        "state": {} if state is None else state,
    }
    episodes = EpisodeRows(data)
    whole = episodes.one_row_each or algos.ESTIMATOR_SPANS.get(adv_estimator, "batch") == "batch"
    found = (
        _estimate(data, adv_estimator, settings)
        if whole
        else _in_parts(data, episodes, adv_estimator, settings)
    )
    shape = tuple(data.batch["response_mask"].shape)
    for name, tensor in zip(("advantages", "returns"), found, strict=True):
        finite = all(tensor[rows].isfinite().all() for rows in row_blocks(tensor))
        if tensor.shape != shape or not finite:
            given, wrong = tuple(tensor.shape), int((~tensor.isfinite()).sum())
            raise ValueError(
                say(
                    "advantages", by=adv_estimator, name=name, shape=shape, given=given, wrong=wrong
                )
            )
        data.batch[name] = tensor
    return data


def _in_parts(
    data: DataProto, episodes: EpisodeRows, adv_estimator: str, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Computes advantages and returns (B, R) of episodes of several rows in memory that is in proportion to tokens."""
    span, mask = algos.ESTIMATOR_SPANS[adv_estimator], data.batch["response_mask"]
    fn = algos.get_adv_estimator_fn(adv_estimator)
    settings, whiten = {**settings, "whiten": False}, bool(algos.taken(fn, {"whiten": True}))
    (advantages,) = at_least_float32(
        torch.zeros_like(mask, dtype=data.batch["token_level_rewards"].dtype)
    )
    if span == "scores":
        of_rows = episodes.of_rows(_estimate(episodes.as_scores(), adv_estimator, settings)[0])
        advantages = torch.where(mask.bool(), of_rows.to(advantages.dtype), 0)
        advantages = masked_whiten(advantages, mask) if whiten else advantages
        return advantages, advantages
    returns = torch.zeros_like(advantages)
    seen = data.select(
        batch_keys=sorted(
            {"token_level_rewards", "response_mask", *algos.taken(fn, dict(data.batch))}
        )
    )
    keys = (
        range(len(episodes.rows))
        if span == "episodes"
        else data.non_tensor_batch["uid"][episodes.first].tolist()
    )
    for part in episodes.parts(keys):
        advantages[part], returns[part] = _estimate(seen.select_idxs(part), adv_estimator, settings)
    return masked_whiten(advantages, mask) if whiten else advantages, returns


def _estimate(
    data: DataProto, adv_estimator: str, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Hands an estimator each episode in one row: (B, R) twice, what it returns in the rows of the batch."""
    episodes, width = EpisodeRows(data), data.batch["response_mask"].shape[1]
    fields = {
        name: episodes.join(tensor)
        for name, tensor in data.batch.items()
        if episodes.takes(tensor, width)
        and name not in ("prompts", "attention_mask", "position_ids", "input_ids")
    }
    fields.setdefault("turn_ids", torch.zeros_like(fields["response_mask"]))
    columns = {name: values[episodes.first] for name, values in data.non_tensor_batch.items()}
    # verl's estimators know what the reward function gives by its plain name.
    columns |= {name.removeprefix(REWARD_INFO): values for name, values in columns.items()}
    given = {
        **fields,
        **settings,
        "batch": fields,
        "non_tensor_batch": columns,
        "index": columns["uid"],
    }
    given["episode_id"] = columns.get("episode_id", episodes.first)
    given["role"] = columns.get(
        "role", columns.get("data_source", np.full(len(episodes.first), "policy"))
    )
    given["anchors"] = columns.get("anchors", [[str(uid)] for uid in columns["uid"]])
    advantages, returns = algos.call_adv_estimator(adv_estimator, **given)
    joined = episodes.split(advantages)
    return joined, joined if returns is advantages else episodes.split(returns)
