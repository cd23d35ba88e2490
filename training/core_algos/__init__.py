"""The maths of PPO and its relatives: advantages, policy and value losses, KL, and registries.

    registry            what is known by which name; the decorators for a user's own
    token_advantages    GAE, REINFORCE++, ReMax, distillation (and optimal_token_baseline)
    turn_advantages     turn_gae, turn_return, gigpo
    group_advantages    GRPO, RLOO and what else compares the scores of a group (groups: statistics)
    policy_losses       PPO's clipped loss and its relatives (covariance_losses, loss_inputs;
                        loss_draws: what they draw at random)
    aggregation         how token losses become one number, and the denominators
    kl, value_loss      the KL and its coefficient; the critic's loss
    pf_ppo              which responses are trained on how often
    verl_names          names of verl and older guides

Invariant: every function is pure but where its docstring names the state that it moves; masked
tokens change nothing.
"""

from training.core_algos.aggregation import (
    LOSS_AGG_MODES,
    GlobalBatchInfo,
    LossAggMode,
    agg_loss,
    denominators,
    token_fraction,
)
from training.core_algos.covariance_losses import (
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
)
from training.core_algos.group_advantages import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_maxrl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_rae_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from training.core_algos.groups import Groups, ScoredGroups
from training.core_algos.kl import (
    KL_KINDS,
    MAX_LOG_RATIO,
    AdaptiveKLController,
    FixedKLController,
    get_kl_controller,
    kl_penalty,
)
from training.core_algos.loss_draws import draw_order, seeded_draws
from training.core_algos.loss_inputs import Loss, LossInputs, PolicyLossConfig, policy_loss
from training.core_algos.optimal_token_baseline import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)
from training.core_algos.pf_ppo import compute_pf_ppo_reweight_data
from training.core_algos.policy_losses import (
    compute_policy_loss_bypass_mode,
    compute_policy_loss_cispo,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_dro,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gpg,
    compute_policy_loss_gspo,
    compute_policy_loss_reinforce,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
)
from training.core_algos.registry import (
    ADV_ESTIMATOR_REGISTRY,
    ESTIMATOR_NEEDS,
    ESTIMATOR_SPANS,
    POLICY_LOSS_REGISTRY,
    AdvantageEstimator,
    Advantages,
    AdvEstimatorFn,
    PolicyLossFn,
    Span,
    accepted_arguments,
    call_adv_estimator,
    estimator_needs,
    estimator_span,
    estimator_whitens_batch,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)
from training.core_algos.token_advantages import (
    compute_gae_advantage_return,
    compute_on_policy_distillation_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    discounted_returns,
    gae_scan,
)
from training.core_algos.turn_advantages import (
    Turns,
    compute_gigpo_advantage,
    compute_turn_gae_advantage_return,
    compute_turn_return_advantage,
)
from training.core_algos.value_loss import compute_value_loss
from training.core_algos.verl_names import (
    advantage_estimation,
    compute_entropy_loss,
    compute_grpo_vectorized_outcome_advantage,
    compute_kl_penalty,
    compute_policy_loss,
    compute_ppo_loss,
    compute_rewards,
    compute_rloo_vectorized_outcome_advantage,
    estimate_advantages,
    kl_penalty_forward,
)
