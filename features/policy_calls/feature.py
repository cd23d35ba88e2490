"""The policy inside environments, tools and rewards: policy_calls.enable."""

from features.policy_calls.settings import PolicyCallsSettings
from training.features import Feature

FEATURE = Feature(
    section=PolicyCallsSettings,
    checks="features.policy_calls.checks:config_problems",
    questions="features.policy_calls.answering:open_questions",
    services="features.policy_calls.service:services",
    keeper="features.policy_calls.counts:open_keeper",
    observer="features.policy_calls.counts:open_observer",
    # Before the records, which keep a step's metrics.
    observer_order=17,
    metrics="metric_names.yaml",
)
