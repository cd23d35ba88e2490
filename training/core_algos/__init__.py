"""The maths of PPO and its relatives: advantages, policy and value losses, KL, and registries.

    registry            what is known by which name; the decorators for a user's own, and what an
                        estimator says of itself (built_in: names, for those without torch)
    token_advantages    GAE, REINFORCE++, ReMax, distillation (and optimal_token_baseline)
    turn_advantages     turn_gae, turn_return, gigpo
    branch_advantages   vine, vine_redraw, tree_grpo: turns beside continuations, and their weights
    group_advantages    GRPO, RLOO and what else compares the scores of a group (groups: statistics)
    policy_losses       PPO's clipped loss and its relatives (covariance_losses; loss_inputs: what
                        they are computed from; loss_draws: what they draw at random)
    aggregation         how token losses become one number, and the denominators
    kl, value_loss      the KL and its coefficient; the critic's loss
    rollout_correction  weights and masks where engine and trainer differ (offpolicy_metrics)
    pf_ppo              which responses are trained on how often
    masked_ops          sums, means and whitening over a mask
    *_settings          what formulas read of a configuration, with neither torch nor the config
    verl_form           losses and estimators as verl calls them; agg_loss
    verl_names          names of verl and older guides

It imports torch, numpy, itself, and of `data` the files names, array_ops and warn_once. A name of
the package is looked up at its first use, so that reading settings alone loads no torch.

Invariant: every function is pure but where its docstring names the state that it moves; masked
tokens change nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.batch.entropy_loss import (
        compute_entropy_loss,
    )
    from training.batch.policy_filtration import (
        compute_pf_ppo_reweight_data,
    )
    from training.core_algos.aggregation import (
        LOSS_AGG_MODES,
        GlobalBatchInfo,
        aggregate,
        mean_of_tokens,
    )
    from training.core_algos.branch_advantages import (
        Branches,
        BranchReturns,
        compute_tree_grpo_advantage,
        compute_vine_advantage,
        compute_vine_redraw_advantage,
        drawn_turn_weights,
        trained_continuation_weights,
        tree_weights,
    )
    from training.core_algos.built_in import (
        BUILT_IN_ESTIMATORS,
        ESTIMATOR_NEEDS,
        estimator_needs,
    )
    from training.core_algos.correction_settings import (
        RolloutCorrectionSettings,
    )
    from training.core_algos.covariance_losses import (
        compute_policy_loss_clip_cov,
        compute_policy_loss_kl_cov,
    )
    from training.core_algos.estimator_settings import (
        EstimatorSettings,
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
    from training.core_algos.groups import (
        Groups,
        ScoredGroups,
    )
    from training.core_algos.kl import (
        KL_KINDS,
        MAX_LOG_RATIO,
        AdaptiveKLController,
        FixedKLController,
        get_kl_controller,
        kl_penalty,
    )
    from training.core_algos.kl_settings import (
        KLControlSettings,
        KLKind,
    )
    from training.core_algos.loss_draws import (
        draw_order,
        seeded_draws,
    )
    from training.core_algos.loss_inputs import (
        Formula,
        Loss,
        LossInputs,
    )
    from training.core_algos.loss_settings import (
        LossAggMode,
        LossSettings,
        PolicyLossConfig,
        PolicyLossSettings,
        aggregation_of,
    )
    from training.core_algos.offpolicy_metrics import (
        compute_offpolicy_metrics,
    )
    from training.core_algos.optimal_token_baseline import (
        compute_multi_turn_optimal_token_baseline_advantage,
        compute_optimal_token_baseline_advantage,
    )
    from training.core_algos.pf_ppo import (
        draw_rows_by_score,
    )
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
        ESTIMATOR_FACTS,
        POLICY_LOSS_REGISTRY,
        AdvantageEstimator,
        Advantages,
        AdvEstimatorFn,
        EstimatorFacts,
        PolicyLossFn,
        Span,
        estimator_facts,
        estimator_span,
        estimator_whitens_batch,
        get_adv_estimator_fn,
        get_policy_loss_fn,
        load_built_in,
        register_adv_est,
        register_policy_loss,
    )
    from training.core_algos.rollout_correction import (
        compute_rollout_correction_weights,
        compute_rollout_rejection_mask,
        correct_as,
        rejection_limits,
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
    from training.core_algos.value_loss import (
        compute_value_loss,
    )
    from training.core_algos.verl_form import (
        accepted_arguments,
        agg_loss,
        call_adv_estimator,
        call_policy_loss,
        denominators,
        of_formula,
        policy_loss,
        policy_loss_formula,
        token_fraction,
    )
    from training.core_algos.verl_names import (
        advantage_estimation,
        compute_grpo_vectorized_outcome_advantage,
        compute_kl_penalty,
        compute_policy_loss,
        compute_ppo_loss,
        compute_rewards,
        compute_rloo_vectorized_outcome_advantage,
        estimate_advantages,
        kl_penalty_forward,
    )

# The names that the package offers, by the file that each is in.
_NAMES: dict[str, tuple[str, ...]] = {
    "aggregation": (
        "GlobalBatchInfo",
        "LOSS_AGG_MODES",
        "aggregate",
        "mean_of_tokens",
    ),
    "branch_advantages": (
        "BranchReturns",
        "Branches",
        "compute_tree_grpo_advantage",
        "compute_vine_advantage",
        "compute_vine_redraw_advantage",
        "drawn_turn_weights",
        "trained_continuation_weights",
        "tree_weights",
    ),
    "built_in": (
        "BUILT_IN_ESTIMATORS",
        "ESTIMATOR_NEEDS",
        "estimator_needs",
    ),
    "correction_settings": ("RolloutCorrectionSettings",),
    "covariance_losses": (
        "compute_policy_loss_clip_cov",
        "compute_policy_loss_kl_cov",
    ),
    "estimator_settings": ("EstimatorSettings",),
    "group_advantages": (
        "compute_gdpo_outcome_advantage",
        "compute_gpg_outcome_advantage",
        "compute_grpo_outcome_advantage",
        "compute_grpo_passk_outcome_advantage",
        "compute_maxrl_outcome_advantage",
        "compute_opo_outcome_advantage",
        "compute_rae_outcome_advantage",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        "compute_rloo_outcome_advantage",
    ),
    "groups": (
        "Groups",
        "ScoredGroups",
    ),
    "kl": (
        "AdaptiveKLController",
        "FixedKLController",
        "KL_KINDS",
        "MAX_LOG_RATIO",
        "get_kl_controller",
        "kl_penalty",
    ),
    "kl_settings": (
        "KLControlSettings",
        "KLKind",
    ),
    "loss_draws": (
        "draw_order",
        "seeded_draws",
    ),
    "loss_inputs": (
        "Formula",
        "Loss",
        "LossInputs",
    ),
    "loss_settings": (
        "LossAggMode",
        "LossSettings",
        "PolicyLossConfig",
        "PolicyLossSettings",
        "aggregation_of",
    ),
    "offpolicy_metrics": ("compute_offpolicy_metrics",),
    "optimal_token_baseline": (
        "compute_multi_turn_optimal_token_baseline_advantage",
        "compute_optimal_token_baseline_advantage",
    ),
    "pf_ppo": ("draw_rows_by_score",),
    "policy_losses": (
        "compute_policy_loss_bypass_mode",
        "compute_policy_loss_cispo",
        "compute_policy_loss_dppo_kl",
        "compute_policy_loss_dppo_tv",
        "compute_policy_loss_dro",
        "compute_policy_loss_geo_mean",
        "compute_policy_loss_gpg",
        "compute_policy_loss_gspo",
        "compute_policy_loss_reinforce",
        "compute_policy_loss_sapo",
        "compute_policy_loss_vanilla",
    ),
    "registry": (
        "ADV_ESTIMATOR_REGISTRY",
        "AdvEstimatorFn",
        "AdvantageEstimator",
        "Advantages",
        "ESTIMATOR_FACTS",
        "EstimatorFacts",
        "POLICY_LOSS_REGISTRY",
        "PolicyLossFn",
        "Span",
        "estimator_facts",
        "estimator_span",
        "estimator_whitens_batch",
        "get_adv_estimator_fn",
        "get_policy_loss_fn",
        "load_built_in",
        "register_adv_est",
        "register_policy_loss",
    ),
    "rollout_correction": (
        "compute_rollout_correction_weights",
        "compute_rollout_rejection_mask",
        "correct_as",
        "rejection_limits",
    ),
    "token_advantages": (
        "compute_gae_advantage_return",
        "compute_on_policy_distillation_advantage",
        "compute_reinforce_plus_plus_outcome_advantage",
        "compute_remax_outcome_advantage",
        "discounted_returns",
        "gae_scan",
    ),
    "turn_advantages": (
        "Turns",
        "compute_gigpo_advantage",
        "compute_turn_gae_advantage_return",
        "compute_turn_return_advantage",
    ),
    "value_loss": ("compute_value_loss",),
    "verl_form": (
        "accepted_arguments",
        "agg_loss",
        "call_adv_estimator",
        "call_policy_loss",
        "denominators",
        "of_formula",
        "policy_loss",
        "policy_loss_formula",
        "token_fraction",
    ),
    "verl_names": (
        "advantage_estimation",
        "compute_grpo_vectorized_outcome_advantage",
        "compute_kl_penalty",
        "compute_policy_loss",
        "compute_ppo_loss",
        "compute_rewards",
        "compute_rloo_vectorized_outcome_advantage",
        "estimate_advantages",
        "kl_penalty_forward",
    ),
}
# verl has these in its core_algos; as they read a batch, or logits, they stand elsewhere.
_ELSEWHERE = {
    "compute_entropy_loss": "training.batch.entropy_loss",
    "compute_pf_ppo_reweight_data": "training.batch.policy_filtration",
}
_PLACES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
_PLACES |= _ELSEWHERE
# They are full once the formulas are loaded.
_REGISTRIES = ("ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY", "ESTIMATOR_FACTS")

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    """Imports the file that has the name, and returns what it names."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_PLACES[name])
    if name in _REGISTRIES:
        module.load_built_in()
        return getattr(module, name)
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the names that the package offers, beside those that are there."""
    return sorted({*globals(), *_PLACES})
