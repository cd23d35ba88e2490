"""What estimators may ask for beside rewards and mask, and what each asks for: one table that config and trainer read.

Invariant: it knows names only, so that a config is judged without torch. `register_adv_est` enters a user's own.
"""

# docs/algorithms.md says what each is.
OFFERED = (
    *("values", "index", "episode_id", "turn_ids", "anchors", "role", "old_log_probs", "rollout_log_probs", "state"),
    *("rollout_is_weights", "ref_log_prob", "sum_pi_squared", "reward_baselines", "batch", "non_tensor_batch"),
)
_GROUPS = (
    *("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline"),
    *("opo", "gpg", "maxrl"),
)
ESTIMATOR_NEEDS: dict[str, tuple[str, ...]] = {
    "gae": ("values",),
    "reinforce_plus_plus": (),
    **dict.fromkeys(_GROUPS, ("index",)),
    "gdpo": ("index", "non_tensor_batch"),
    "remax": ("reward_baselines",),
    "optimal_token_baseline": ("index", "old_log_probs", "sum_pi_squared"),
    "tir_optimal_token_baseline": ("index", "old_log_probs", "sum_pi_squared"),
    "rae": ("role", "state"),
    "turn_gae": ("values", "turn_ids"),
    "turn_return": ("index", "turn_ids"),
    "gigpo": ("index", "turn_ids", "anchors"),
    "on_policy_distillation": ("old_log_probs", "ref_log_prob"),
}


def estimator_needs(name: str) -> tuple[str, ...]:
    """Lists what the estimator reads besides rewards and mask; nothing of one that is not known."""
    return ESTIMATOR_NEEDS.get(name, ())
