"""The maths of PPO and its relatives: advantages, policy and value losses, KL, and the registries of a user's own."""

from training.config.settings import KLControlConfig, LossAggMode
from training.core_algos.advantages import (
    AdvantageEstimator,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
    discounted_returns,
    gae_advantage_return_unwhitened,
)
from training.core_algos.aggregation import LOSS_AGG_MODES, GlobalBatchInfo, agg_loss, denominators, token_fraction
from training.core_algos.kl_and_values import (
    AdaptiveKLController,
    FixedKLController,
    compute_value_loss,
    get_kl_controller,
    kl_penalty,
)
from training.core_algos.policy_losses import PolicyLossConfig, compute_policy_loss_vanilla
from training.core_algos.registry import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    PolicyLossFn,
    call_adv_estimator,
    estimator_needs,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)
from training.core_algos.verl_names import (
    compute_entropy_loss,
    compute_grpo_vectorized_outcome_advantage,
    compute_kl_penalty,
    compute_policy_loss,
    compute_ppo_loss,
    compute_rewards,
    compute_rloo_vectorized_outcome_advantage,
    estimate_advantages,
)
