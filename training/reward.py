"""From a batch of responses to a reward per token, whatever form the user's reward function answers in.

Invariant: rewards are finite float32 of shape (batch, response_len) and lie only on tokens that the policy sampled
(response_mask 1). Example, with P0 the prompt, A the policy's tokens and E the environment's:

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
from data.containers import move_to_sampled_tokens, place_outcome_rewards
from data.loading import load_extern_object
from data.protocol import DataProto
from training.batch.batching import real_rows
from training.config import PPOConfig

RewardFunction = Callable[..., Any]
RewardInfos = dict[str, list[Any]]


def get_custom_reward_fn(config: PPOConfig) -> RewardFunction | None:
    """Loads the function that `custom_reward_function` names and binds its reward_kwargs; None where no path is set."""
    custom = config.custom_reward_function
    if custom.path is None:
        return None
    function = load_extern_object(custom.path, custom.name)
    if not callable(function):
        raise ValueError(f"{custom.path}: {custom.name} is a {type(function).__name__}; it must be a function")
    return partial(function, **custom.reward_kwargs) if custom.reward_kwargs else function


def load_reward_manager(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, num_examine: int, **kwargs: Any
) -> RewardFunction:
    """Makes the reward manager that the config names, around the user's scoring function or the built-in rules.

    `kwargs` go to the manager beside reward_model.reward_kwargs and win over them.
    """
    settings, manager = config.reward_model, get_reward_manager_cls(config.reward_model.reward_manager)
    own: dict[str, Any] = {"compute_score": get_custom_reward_fn(config), "reward_fn_key": config.data.reward_fn_key}
    if issubclass(manager, NaiveRewardManager):
        own |= {"overlong_buffer_cfg": settings.overlong_buffer, "max_resp_len": config.data.max_response_length}
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
    result = reward_fn(data, return_dict=True) if takes_keyword(reward_fn, "return_dict") else reward_fn(data)
    told = result if isinstance(result, Mapping) else {"reward_tensor": result}
    if "reward_tensor" not in told:
        raise ValueError(f"the reward function's dict has {sorted(told)}; 'reward_tensor' is missing")
    mask = data.batch["response_mask"]
    rewards = _as_tensor(told["reward_tensor"], mask)
    place = place_outcome_rewards if rewards.dim() == 1 else move_to_sampled_tokens
    return place(rewards, mask), _check_infos(told.get("reward_extra_info", {}), len(mask))


def _among_dummies(rewards: Tensor, infos: RewardInfos, real: Tensor) -> tuple[Tensor, RewardInfos]:
    """Puts what real rows got in their places; dummy rows get nothing, and no infos (None)."""
    whole = rewards.new_zeros(len(real), rewards.shape[1])
    whole[real] = rewards
    told = {name: iter(values) for name, values in infos.items()}
    return whole, {name: [next(told[name]) if kept else None for kept in real.tolist()] for name in infos}


def compute_reward_async(data: DataProto, reward_fn: RewardFunction) -> Future[tuple[Tensor, RewardInfos]]:
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
        raise ValueError(f"the reward function returned {type(result).__name__}, not numbers; {allowed}") from error
    if rewards.shape not in (response_mask.shape[:1], response_mask.shape):
        raise ValueError(f"the reward function returned shape {tuple(rewards.shape)}; {allowed}")
    if bad := (~rewards.reshape(len(rewards), -1).isfinite()).any(dim=1).nonzero().flatten().tolist():
        raise ValueError(f"the reward function returned NaN or infinity in {len(bad)} rows: {bad[:10]}")
    return rewards


def _check_infos(infos: Mapping[str, Any], batch_size: int) -> RewardInfos:
    lists = {name: v.tolist() if isinstance(v, Tensor | np.ndarray) else list(v) for name, v in infos.items()}
    for name, values in lists.items():
        if len(values) != batch_size:
            raise ValueError(f"reward_extra_info[{name!r}] has {len(values)} values; allowed: one a row, {batch_size}")
    return lists
