"""verl's core_algos: estimators that take arguments which they do not read, and the registries.

All other names are those of training.core_algos. Invariant: results are those of that package.
"""

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from training import core_algos
from training.core_algos import registry
from training.core_algos.registry import Advantages
from training.core_algos.verl_form import accepted_arguments

REGISTRIES = ("ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY")


def _lenient(estimator: Callable[..., Advantages]) -> Callable[..., Advantages]:
    """Makes an estimator leave out keyword arguments that it does not know."""

    @wraps(estimator)
    def estimate(*args: Any, **kwargs: Any) -> Advantages:
        return estimator(*args, **accepted_arguments(estimator, kwargs))

    return estimate


compute_gdpo_outcome_advantage = _lenient(core_algos.compute_gdpo_outcome_advantage)
compute_gpg_outcome_advantage = _lenient(core_algos.compute_gpg_outcome_advantage)
compute_grpo_passk_outcome_advantage = _lenient(core_algos.compute_grpo_passk_outcome_advantage)
compute_opo_outcome_advantage = _lenient(core_algos.compute_opo_outcome_advantage)
compute_reinforce_plus_plus_outcome_advantage = _lenient(
    core_algos.compute_reinforce_plus_plus_outcome_advantage
)
compute_reinforce_plus_plus_baseline_outcome_advantage = _lenient(
    core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
)
compute_remax_outcome_advantage = _lenient(core_algos.compute_remax_outcome_advantage)
compute_rloo_outcome_advantage = _lenient(core_algos.compute_rloo_outcome_advantage)
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage
compute_optimal_token_baseline_advantage = _lenient(
    core_algos.compute_optimal_token_baseline_advantage
)
compute_multi_turn_optimal_token_baseline_advantage = _lenient(
    core_algos.compute_multi_turn_optimal_token_baseline_advantage
)


class _CoreAlgos(ModuleType):
    """Makes `core_algos.ADV_ESTIMATOR_REGISTRY = {…}` change the registry that is looked into."""

    def __getattr__(self, name: str) -> Any:
        if name in REGISTRIES:
            registry.load_built_in()
            return getattr(registry, name)
        return getattr(core_algos, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in REGISTRIES:
            # Before, so that nothing of this project enters the user's own.
            registry.load_built_in()
            setattr(registry, name, value)
        else:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _CoreAlgos
