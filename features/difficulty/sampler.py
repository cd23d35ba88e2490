"""The sampler `difficulty`: draws the tasks of a step by what came of earlier ones.

Invariant: a draw follows from what is remembered, from what is drawn and not told of yet, and from
(run seed, epoch, place), so that a resumed run draws what it would have drawn. It lives on the
driver alone, which hands every rank its rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data.learning_sampler import OUTCOMES, GroupOutcome, LearningSampler
from data.protocol import DataProto
from data.seeds import seed_beside, seed_for
from features.difficulty.drawing import draw_tasks
from features.difficulty.memory import APT, NEW, POOLS, TaskMemory
from features.difficulty.settings import DifficultySettings
from features.difficulty.tasks import TaskSet
from training.config import PPOConfig
from training.run.checkpoint_folders import CannotResume

FORGET = "begin with an empty memory (difficulty.forget=true)"


@dataclass(frozen=True)
class TaskNumbers:
    """Says how a task stands.

    Attributes:
        solve_rate, spread: None: not known yet.
    """

    task: str
    pool: str
    solve_rate: float | None
    spread: float | None
    groups: int
    failed: int
    tokens: int
    last_step: int


def open_sampler(config: PPOConfig, rows: Any) -> DifficultySampler:
    """Opens the sampler of a run.

    Args:
        rows: the training rows; a range where there are none.
    """
    return DifficultySampler(
        TaskSet(config, rows),
        config.section(DifficultySettings),
        run_seed=config.data.run_seed,
        per_step=config.prompts_per_step,
    )


class DifficultySampler(LearningSampler):
    """Draws tasks that are apt or new, and some of the others.

    Args:
        tasks: those that there are.
        settings: of `difficulty`.
        run_seed: `data.seed` in force.
        per_step: groups of a step; as many are drawn at once.

    Attributes:
        memory: what came of each task.
        step_metrics: of the step that was told of last.
    """

    def __init__(
        self, tasks: TaskSet, settings: DifficultySettings, *, run_seed: int, per_step: int
    ) -> None:
        self.task_set = tasks
        # What the rows are already needs no other dataset.
        self.tasks = None if tasks.are_rows else tasks
        self.settings = settings
        self.run_seed = run_seed
        self.per_step = per_step
        self.memory = TaskMemory(len(tasks), settings)
        # What was drawn for steps that are not made yet, by step.
        self.pending: dict[int, list[int]] = {}
        self.step_metrics: dict[str, float] = {}
        self._made_marks: dict[str, str] | None = None
        self.epoch = 0
        self.place = 0
        self._step = 0
        self._so_far: list[GroupOutcome] = []
        # Dynamic sampling draws in the thread that generates ahead, while a step is told of.
        self._lock = threading.Lock()

    # Drawing

    def __len__(self) -> int:
        """Counts the tasks of an epoch: as many as there are, in whole steps."""
        return max(len(self.task_set) // self.per_step, 1) * self.per_step

    def start(self, epoch: int, skip: int) -> None:
        """Makes the next iteration begin in this epoch, behind its first `skip` tasks."""
        self.epoch = epoch
        self.place = skip

    def __iter__(self) -> Iterator[int]:
        while self.place + self.per_step <= len(self):
            place = self.place
            self.place += self.per_step
            yield from self._draw(place)

    def _draw(self, place: int) -> list[int]:
        """Draws as many tasks as a step has groups."""
        seed = seed_beside(seed_for(self.run_seed, self.epoch, place), "difficulty")
        with self._lock:
            memory = self.memory.after(self._so_far) if self._so_far else self.memory
            times = np.zeros(len(self.task_set), dtype=np.int64)
            for tasks in self.pending.values():
                np.add.at(times, tasks, 1)
            drawn = draw_tasks(
                memory.pools(),
                self.per_step,
                self.settings.explore,
                times,
                np.random.default_rng(seed),
                may_repeat=self.task_set.have_fresh_seeds,
            )
            self.pending.setdefault(self._step, []).extend(drawn)
        return drawn

    def begin_draw(self, step: int, so_far: Sequence[GroupOutcome]) -> None:
        """Sees for which step it draws next, and what came of that step's groups so far."""
        with self._lock:
            self._step = step
            self._so_far = list(so_far)
            if not so_far:
                # A step that is generated anew is drawn anew.
                self.pending[step] = []

    def take_back(self, step: int, tasks: Sequence[int]) -> None:
        """Counts the tasks of a step in flight of a checkpoint as drawn."""
        with self._lock:
            self.pending[step] = list(tasks)

    # Learning

    def update(self, batch: DataProto) -> None:
        """Learns what came of a step's groups, those that were left out among them."""
        outcomes: list[GroupOutcome] = batch.meta_info[OUTCOMES]
        made = int(batch.meta_info["global_steps"])
        with self._lock:
            pools = self.memory.pools()
            self.memory.learn(outcomes, made)
            for step in [step for step in self.pending if step <= made]:
                del self.pending[step]
            self.step_metrics = self._metrics(outcomes, pools)

    def _metrics(self, outcomes: Sequence[GroupOutcome], before: np.ndarray) -> dict[str, float]:
        """Counts the pools, and what the step's tokens were spent on.

        Args:
            before: (tasks,) pools as they were before the step was told of.
        """
        sizes = np.bincount(self.memory.pools(), minlength=len(POOLS))
        metrics = {
            f"difficulty/pool/{name}": float(sizes[number]) for number, name in enumerate(POOLS)
        }
        tokens = sum(outcome.tokens for outcome in outcomes)
        flat = sum(outcome.tokens for outcome in outcomes if not outcome.has_spread)
        explored = sum(before[outcome.task] not in (APT, NEW) for outcome in outcomes)
        metrics["difficulty/tokens_without_spread"] = flat / max(tokens, 1)
        metrics["difficulty/explored"] = explored / max(len(outcomes), 1)
        return metrics

    def numbers(self, most: int) -> list[TaskNumbers]:
        """Says how the tasks stand that took the most tokens, at most so many."""
        memory = self.memory
        with self._lock:
            order = np.argsort(-memory.tokens, kind="stable")[:most]
            pools = memory.pools()
            rates = memory.solve_rates()
            spreads = memory.spreads()
            return [
                TaskNumbers(
                    task=self.task_set.name(task),
                    pool=POOLS[pools[task]],
                    solve_rate=_known(rates[task]),
                    spread=_known(spreads[task]),
                    groups=int(memory.groups[task]),
                    failed=int(memory.failed[task]),
                    tokens=int(memory.tokens[task]),
                    last_step=int(memory.last_step[task]),
                )
                for task in order.tolist()
                if memory.tokens[task] or memory.groups[task]
            ]

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: the memory, and what tells its tasks from others."""
        with self._lock:
            memory = self.memory.state_dict()
        return {"kind": self.task_set.kind, "marks": self._marks, "memory": memory}

    @property
    def _marks(self) -> dict[str, str]:
        """Returns the tasks' marks, which are made once."""
        if self._made_marks is None:
            self._made_marks = self.task_set.marks()
        return self._made_marks

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's memory.

        Raises:
            CannotResume: it is of other tasks, or of another sampler.
        """
        if self.settings.forget:
            return
        problem = self._difference(state)
        if problem is not None:
            raise CannotResume(
                f"the checkpoint's memory of tasks is not of this run's data: {problem}. Go on "
                f"with the data that it is of, or {FORGET}"
            )
        with self._lock:
            self.memory.load_state_dict(state["memory"])

    def _difference(self, state: Mapping[str, Any]) -> str | None:
        """Says how a checkpoint's tasks differ from these; None: they do not."""
        memory = state.get("memory")
        tensors = dict(memory) if isinstance(memory, Mapping) else {}
        is_whole = tensors.keys() == self.memory.state_dict().keys()
        if not is_whole or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
            return "it was kept by another sampler"
        then, now = state["kind"], self.task_set.kind
        if then != now or any(len(each) != len(self.task_set) for each in tensors.values()):
            return f"it is of {then}, and there are {now}"
        marks: Mapping[str, str] = state["marks"]
        others = [name for name, mark in self._marks.items() if marks.get(name, mark) != mark]
        if not others:
            return None
        if "levels" in others:
            return "the environments or their settings are others"
        return f"row {others[0]} is another one, as {len(others)} of {len(self._marks)} compared"


def _known(value: float) -> float | None:
    """Returns a number; None where it is NaN."""
    return None if np.isnan(value) else float(value)
