"""The policy inside: environments, tools and rewards of episodes ask the policy that is trained.

    from features.policy_calls import policy

    reply = policy.ask("Is this right? ...")     # in a reset, a step, a tool, a reward_fn
    reply = await policy.chat([{"role": "user", "content": ...}], train=False)

    handle      `policy`, what users' code has, wherever it runs
    answering   answers questions beside the engine: rows of the episode, seeds, limits
    service     sets `policy` up in the processes of environments
    counts      facts of episodes, and a step's metrics
    checks      what the settings contradict

The way from one to the other is the core's: custom/asking.py, workers/environments,
workers/rollout/questions.py. Names are loaded when first used, so that reading a config loads
nothing of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from features.policy_calls.handle import (
        Policy,
        PolicyError,
        PolicyReply,
        PolicyUnavailable,
        policy,
    )

__all__ = ["Policy", "PolicyError", "PolicyReply", "PolicyUnavailable", "policy"]


def __getattr__(name: str) -> Any:
    """Loads a name of this package when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no {name}")
    return getattr(importlib.import_module("features.policy_calls.handle"), name)
