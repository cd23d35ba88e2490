"""Credit of turns, measured by continuations: branching.*, --judge-credit CHECKPOINT.

What other programs ask of branches stands here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from features.branching.settings import BranchingSettings
from training.features import Feature

if TYPE_CHECKING:
    from features.branching.continuing import Continuations
    from training.config import PPOConfig
    from workers.rollout.kinds import EpisodeSpec

FEATURE = Feature(
    section=BranchingSettings,
    # The section by which other programs call it.
    moved_keys={"agent.branch": "branching"},
    checks="features.branching.checks:config_problems",
    branches="features.branching.sampling:open_branches",
    keeper="features.branching.counts:open_keeper",
    record_entries="features.branching.recorded:open_entries",
    turn_notes="features.branching.notes:open_notes",
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


def open_continuations(
    config: PPOConfig, specs: Sequence[EpisodeSpec], turn: int, times: int
) -> Continuations:
    """Opens what continues episodes, outside of training, from the state before a turn.

    Args:
        turn: the first is 0. times: how often each episode is continued.
    """
    from features.branching.continuing import Continuations

    return Continuations(config, specs, turn, times)
