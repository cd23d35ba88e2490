"""The registry of reward managers, by the names that `reward_model.reward_manager` may have.

Invariant: a name belongs to one class; another class under it is refused.
"""

from collections.abc import Callable

from data.names import registered, registering

REWARD_MANAGER_REGISTRY: dict[str, type] = {}


def register_reward_manager(name: str) -> Callable[[type], type]:
    """Makes a class available as `reward_model.reward_manager=name`; a class decorator."""
    return registering(REWARD_MANAGER_REGISTRY, "reward manager", name)


def get_reward_manager_cls(name: str) -> type:
    """Returns the class registered under `name`; ValueError with the names there are."""
    return registered(REWARD_MANAGER_REGISTRY, "reward_model.reward_manager", name)
