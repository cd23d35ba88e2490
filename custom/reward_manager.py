"""Reward managers: from a batch of responses to scores, by what sees only text.

A manager is built once per run and called with each batch; `reward_model.reward_manager` chooses it
by its registered name:

    naive, dapo    a function scores row by row                  reward_managers/naive.py
    batch          a function scores all rows in one call        reward_managers/batch.py
    prime          a function scores rows in processes           reward_managers/prime.py
    custom         the rows' environment scores                  reward_managers/environment.py

For one of your own subclass NaiveRewardManager, or write a class with its `__init__` and
`__call__`, and register it:

    @register_reward_manager("mine")
    class MyRewardManager(NaiveRewardManager): ...

Such a class may have `check_config(config)`, which lists what the config lacks. Invariant: all
managers are registered when this module is imported.
"""

from custom.reward_managers.batch import BatchRewardManager
from custom.reward_managers.decoding import decode_prompt, decode_sampled
from custom.reward_managers.environment import (
    ConfiguredRewardManager,
    CustomRewardManager,
    EnvironmentRewardWrapper,
)
from custom.reward_managers.naive import NaiveRewardManager
from custom.reward_managers.prime import PrimeRewardManager
from custom.reward_managers.registry import (
    REWARD_MANAGER_REGISTRY,
    get_reward_manager_cls,
    register_reward_manager,
)

# verl's names.
register = register_reward_manager
DAPORewardManager = NaiveRewardManager

__all__ = [
    "REWARD_MANAGER_REGISTRY",
    "BatchRewardManager",
    "ConfiguredRewardManager",
    "CustomRewardManager",
    "DAPORewardManager",
    "EnvironmentRewardWrapper",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "decode_prompt",
    "decode_sampled",
    "get_reward_manager_cls",
    "register",
    "register_reward_manager",
]
