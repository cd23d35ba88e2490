"""Lists the estimators and losses of this project: their files, and what a config knows of them.

These are names alone, so that a configuration is judged without torch. `register_adv_est`
(registry.py) enters a user's own estimator into ESTIMATOR_NEEDS; docs/custom_algorithm.md tells
what each input is. All else that others must know of an estimator stands where it is registered.
"""

# The files whose estimators and losses register themselves when they are imported.
FORMULA_MODULES = (
    "token_advantages",
    "turn_advantages",
    "branch_advantages",
    "group_advantages",
    "optimal_token_baseline",
    "policy_losses",
    "covariance_losses",
)

# What an estimator may ask for beside rewards and mask.
ESTIMATOR_INPUTS = (
    "values",
    "index",
    "episode_id",
    "turn_ids",
    "anchors",
    "branch_returns",
    "turn_weights",
    "role",
    "old_log_probs",
    "rollout_log_probs",
    "state",
    "rollout_is_weights",
    "ref_log_prob",
    "sum_pi_squared",
    "reward_baselines",
    "batch",
    "non_tensor_batch",
)

# The inputs that each asks for.
ESTIMATOR_NEEDS: dict[str, tuple[str, ...]] = {
    "gae": ("values",),
    "reinforce_plus_plus": (),
    "grpo": ("index",),
    "grpo_vectorized": ("index",),
    "grpo_passk": ("index",),
    "rloo": ("index",),
    "rloo_vectorized": ("index",),
    "reinforce_plus_plus_baseline": ("index",),
    "opo": ("index",),
    "gpg": ("index",),
    "maxrl": ("index",),
    "gdpo": ("index", "non_tensor_batch"),
    "remax": ("reward_baselines",),
    "optimal_token_baseline": ("index", "old_log_probs", "sum_pi_squared"),
    "tir_optimal_token_baseline": ("index", "old_log_probs", "sum_pi_squared"),
    "rae": ("role", "state"),
    "turn_gae": ("values", "turn_ids"),
    "turn_return": ("index", "turn_ids"),
    "gigpo": ("index", "turn_ids", "anchors"),
    "vine": ("index", "turn_ids", "branch_returns"),
    "vine_redraw": ("turn_ids", "branch_returns"),
    "tree_grpo": ("index", "turn_ids", "branch_returns"),
    "on_policy_distillation": ("old_log_probs", "ref_log_prob"),
}

# Those of this project: names that are there before a user's file registers others.
BUILT_IN_ESTIMATORS = frozenset(ESTIMATOR_NEEDS)

# Estimators whose advantages of a group do not depend on other groups.
ESTIMATORS_WITHIN_GROUPS = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "maxrl",
    "turn_return",
    "gigpo",
)

# Losses that add up over tokens and divide as `loss_agg_mode` says, whatever else is in their
# micro-batch.
LOSSES_SUMMED_OVER_TOKENS = (
    "vanilla",
    "gspo",
    "gpg",
    "reinforce",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "dro",
)


def estimator_needs(name: str) -> tuple[str, ...]:
    """Lists what the estimator reads besides rewards and mask; nothing of one that is not known."""
    return ESTIMATOR_NEEDS.get(name, ())
