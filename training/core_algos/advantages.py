"""SHIM: token_advantages, optimal_token_baseline and turn_advantages hold these names now."""

from training.core_algos.optimal_token_baseline import (
    compute_multi_turn_optimal_token_baseline_advantage as compute_multi_turn_optimal_token_baseline_advantage,  # noqa: E501
)
from training.core_algos.optimal_token_baseline import (
    compute_optimal_token_baseline_advantage as compute_optimal_token_baseline_advantage,
)
from training.core_algos.token_advantages import (
    SCAN_ENTRIES as SCAN_ENTRIES,
)
from training.core_algos.token_advantages import (
    compute_gae_advantage_return as compute_gae_advantage_return,
)
from training.core_algos.token_advantages import (
    compute_on_policy_distillation_advantage as compute_on_policy_distillation_advantage,
)
from training.core_algos.token_advantages import (
    compute_reinforce_plus_plus_outcome_advantage as compute_reinforce_plus_plus_outcome_advantage,
)
from training.core_algos.token_advantages import (
    compute_remax_outcome_advantage as compute_remax_outcome_advantage,
)
from training.core_algos.token_advantages import discounted_returns as discounted_returns
from training.core_algos.token_advantages import gae_scan as gae_scan
from training.core_algos.turn_advantages import Turns as Turns
from training.core_algos.turn_advantages import compute_gigpo_advantage as compute_gigpo_advantage
from training.core_algos.turn_advantages import (
    compute_turn_gae_advantage_return as compute_turn_gae_advantage_return,
)
from training.core_algos.turn_advantages import (
    compute_turn_return_advantage as compute_turn_return_advantage,
)
