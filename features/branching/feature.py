"""Credit of turns, measured by continuations: branching.*, --judge-credit CHECKPOINT."""

from features.branching.settings import BranchingSettings
from training.features import Feature

FEATURE = Feature(
    section=BranchingSettings,
    # The section by which other programs call it.
    moved_keys={"agent.branch": "branching"},
    checks="features.branching.checks:config_problems",
    branches="features.branching.sampling:open_branches",
    keeper="features.branching.counts:open_keeper",
    observer="features.branching.counts:open_observer",
    step_addition="features.branching.training_rows:open_addition",
    # Before the records, which keep a step's metrics.
    observer_order=18,
    metrics="metric_names.yaml",
    modes={"--judge-credit": "features.branching.judging_command:judge_command"},
    model_options=("--judge-credit",),
    usage=(
        "--judge-credit CHECKPOINT [--episodes 64] [--samples 4] [--estimators grpo,turn_gae,…]\n"
        "             measure the credit of turns by continuations, and judge estimators by it"
    ),
)
