"""Runs the user's reward function and brings what it returns into one form.

Invariant: rewards are finite float32 of shape (batch, response_len) and lie only on tokens that the
policy sampled (response_mask 1), whatever form the reward function answers in. Example, with P0
the prompt, A the policy's tokens and E the environment's:

    responses     = A0 A0 E0 A1 A1 E1 pad
    response_mask =  1  1  0  1  1  0   0
    outcome 0.5   =  0  0  0  0 .5  0   0      on the last sampled token, not the last one
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from custom.env import BadRewardFunction
from custom.env_calls import shown, takes_keyword
from custom.reward_manager import NaiveRewardManager, get_reward_manager_cls
from custom.reward_managers.unscored import UNSCORED
from data.loading import load_extern_object
from data.outcome_rewards import move_to_sampled_tokens, place_outcome_rewards
from data.own_names import keep_own
from data.own_process import one_process
from data.protocol import DataProto
from data.texts import printable
from training.batch.episode_rows import real_rows
from training.config import PPOConfig
from training.config.resources.rewards import registers_manager_alone
from training.config.side_services import side_services

RewardFunction = Callable[..., Any]
RewardInfos = dict[str, list[Any]]


def get_custom_reward_fn(config: PPOConfig) -> RewardFunction | None:
    """Loads the function that `custom_reward_function` names and binds its reward_kwargs.

    Returns None where no path is set, or the file there has a reward manager alone.
    """
    settings = config.custom_reward_function
    if settings.path is None or registers_manager_alone(config):
        return None
    function = load_extern_object(settings.path, settings.name)
    if settings.reward_kwargs:
        return partial(function, **settings.reward_kwargs)
    return function


def load_reward_manager(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, num_examine: int, **kwargs: Any
) -> RewardFunction:
    """Makes the reward manager that the config names, around the user's function or built-in rules.

    `kwargs` go to the manager beside reward_model.reward_kwargs and win over them.
    """
    settings = config.reward_model
    for service in side_services(config):
        service.set_up()
    # First, as its file may register the manager.
    compute_score = get_custom_reward_fn(config)
    manager_class = get_reward_manager_cls(settings.reward_manager)
    arguments: dict[str, Any] = {
        "compute_score": compute_score,
        "reward_fn_key": config.data.reward_fn_key,
    }
    if issubclass(manager_class, NaiveRewardManager):
        arguments["overlong_buffer_cfg"] = settings.overlong_buffer
        arguments["max_resp_len"] = config.data.max_response_length
    arguments.update(settings.reward_kwargs)
    arguments.update(kwargs)
    return manager_class(tokenizer, num_examine, **arguments)


def lend_tokenizer(reward_fn: RewardFunction, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives the tokenizer to a reward function that has an empty place for one."""
    if getattr(reward_fn, "tokenizer", tokenizer) is None:
        reward_fn.tokenizer = tokenizer  # type: ignore[attr-defined]


def compute_reward(data: DataProto, reward_fn: RewardFunction) -> tuple[Tensor, RewardInfos]:
    """Scores a batch by the reward function.

    Args:
        data: a batch with `response_mask` (batch, response_len).
        reward_fn: called as f(data, return_dict=True) where it takes return_dict, else as f(data).
            It returns a tensor, array or list, on any device, of shape (batch,), one score per row
            that lands on its last sampled token, or (batch, response_len); or a dict with that as
            "reward_tensor" and "reward_extra_info": name -> one value per row.
    Returns:
        rewards (batch, response_len) float32 on the batch's device, and extra infos as lists of
        length batch, under their own names; in validation one named "reward" is "own_reward",
        beside the trainer's.
    Raises:
        ValueError: another shape, or NaN or infinite rewards; it names the rows.
    """
    data.require("response_mask", by="compute_reward")
    is_real = real_rows(data)
    if not is_real.all():
        return compute_reward_of_rows(data, reward_fn, is_real)
    with one_process("the reward function"):
        if takes_keyword(reward_fn, "return_dict"):
            result = reward_fn(data, return_dict=True)
        else:
            result = reward_fn(data)
    if not isinstance(result, Mapping):
        result = {"reward_tensor": result}
    if "reward_tensor" not in result:
        raise ValueError(
            f"the reward function's dict has {sorted(result)}; 'reward_tensor' is missing"
        )
    mask = data.batch["response_mask"]
    infos = _check_infos(result.get("reward_extra_info", {}), len(mask))
    marks = infos.get(UNSCORED, [])
    # Else they are values of a user's, not marks of rows without a score.
    if not all(mark is None or isinstance(mark, bool) for mark in marks):
        infos = keep_own(infos, (UNSCORED,), "what the reward function gives beside a score")
    rewards = _as_tensor(result["reward_tensor"], mask)
    if rewards.dim() == 1:
        return place_outcome_rewards(rewards, mask), infos
    return move_to_sampled_tokens(rewards, mask), infos


def compute_reward_of_rows(
    data: DataProto, reward_fn: RewardFunction, chosen: Tensor
) -> tuple[Tensor, RewardInfos]:
    """Scores the chosen rows, (batch,) bool, as `compute_reward` does.

    Returns: rewards and infos of all rows; those that are not chosen get nothing, and None.
    """
    if chosen.all():
        return compute_reward(data, reward_fn)
    rewards, infos = compute_reward(data.select_idxs(chosen), reward_fn)
    all_rewards = rewards.new_zeros(len(chosen), rewards.shape[1])
    all_rewards[chosen] = rewards
    all_infos = {}
    for name, values in infos.items():
        remaining = iter(values)
        all_infos[name] = [next(remaining) if is_chosen else None for is_chosen in chosen.tolist()]
    return all_rewards, all_infos


def compute_reward_async(
    data: DataProto, reward_fn: RewardFunction
) -> Future[tuple[Tensor, RewardInfos]]:
    """Runs `compute_reward` in a thread; `.result()` gives its answer or raises its error.

    The thread sees the batch as it is now: fields that are added to it meanwhile do not disturb it.
    """
    return run_beside(partial(compute_reward, data.select(), reward_fn))


def run_beside(score: Callable[[], tuple[Tensor, RewardInfos]]) -> Future[Any]:
    """Runs it in a thread of its own; `.result()` gives its answer or raises its error."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
    future = executor.submit(score)
    executor.shutdown(wait=False)
    return future


def _as_tensor(result: Any, response_mask: Tensor) -> Tensor:
    """Makes float32 on the mask's device.

    Raises:
        ValueError: what is no number, has a wrong shape or is not finite.
    """
    allowed = f"allowed: ({len(response_mask)},) or {tuple(response_mask.shape)}"
    try:
        rewards = torch.as_tensor(result).detach().to(response_mask.device, torch.float32)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"the reward function returned {type(result).__name__}, not numbers; {allowed}"
        ) from error
    if rewards.shape not in (response_mask.shape[:1], response_mask.shape):
        raise ValueError(f"the reward function returned shape {tuple(rewards.shape)}; {allowed}")
    not_finite = ~rewards.reshape(len(rewards), -1).isfinite()
    bad_rows = not_finite.any(dim=1).nonzero().flatten().tolist()
    if bad_rows:
        raise ValueError(
            f"the reward function returned NaN or infinity in {len(bad_rows)} rows: {bad_rows[:10]}"
        )
    return rewards


def _check_infos(infos: Mapping[str, Any], batch_size: int) -> RewardInfos:
    """Makes a list of each info; raises ValueError where it has not one value a row, or no name."""
    lists = {}
    for given_name, values in infos.items():
        if not isinstance(given_name, str):
            raise BadRewardFunction(
                f"the reward function's reward_extra_info has the key {shown(given_name)}; "
                "allowed: a text, which names the values"
            )
        name = printable(given_name)
        if isinstance(values, Tensor | np.ndarray):
            lists[name] = values.tolist()
        else:
            lists[name] = list(values)
    for name, values in lists.items():
        if len(values) != batch_size:
            raise ValueError(
                f"reward_extra_info[{name!r}] has {len(values)} values; "
                f"allowed: one a row, {batch_size}"
            )
    return lists
