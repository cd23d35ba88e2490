"""Environments, rewards and tools of test_side_models.py, which ask a judge."""

from __future__ import annotations

from typing import Any

from custom.env import BaseEnvironment, Trajectory
from custom.tools import Tool, ToolDefinition
from features.judges import models

judge = models["judge"]


def score(text: str) -> float:
    return float(len(text) % 3)


class Judged(BaseEnvironment):
    """Pays what the judge's words are worth, in one turn."""

    def reset(self, seed: int | None = None) -> str:
        self.seed = seed
        return "guess"

    def step(self, action: str) -> tuple[Any, ...]:
        said = judge.ask(f"{self.seed}: {action}", max_tokens=4)
        return said, score(action), True, {}


def judged_trajectory(trajectory: Trajectory) -> float:
    judge.ask(f"{trajectory.seed}: {trajectory.actions}")
    return score("".join(trajectory.actions))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    judge.ask(f"{ground_truth}: {solution_str}")
    return score(solution_str)


def compute_scores(
    data_sources: list[str],
    solution_strs: list[str],
    ground_truths: list[Any],
    extra_infos: list[dict[str, Any]],
) -> list[float]:
    judge.ask_all([f"{text}" for text in solution_strs], temperature=1.0)
    return [score(text) for text in solution_strs]


class Oracle(Tool):
    definition = ToolDefinition(name="oracle", description="Knows.")

    def execute(self) -> str:
        return judge.ask("what is it?", temperature=1.0)
