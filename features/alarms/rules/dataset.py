"""Watches whether what a dataset says of a prompt goes along with it, and no prompt comes twice.

A reward function reads `reward_model`, `extra_info` and `data_source` beside the answer. Members of
a group are answers to one row, so that they have the same; and what was said of a prompt in one
epoch is said of it in the next. Where that does not hold from the beginning, as of a dataset with
several truths of a prompt, it is not watched.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from data.learning_sampler import TASK_INDEX
from data.protocol import DataProto
from features.alarms.finding import Finding, Place
from features.alarms.rule import RulesWithMemory, rule
from features.alarms.seen_step import SeenStep
from training.observers import ObservedRun

# Columns that belong to a row of the dataset.
COLUMNS = ("reward_model", "extra_info", "data_source", "ability")
# Prompts that are remembered, and of how many it must have held before one that differs is a fault.
MOST_PROMPTS = 65536
FEWEST_PROMPTS = 4
# The share of a step's prompts that differ, or come twice, from which on it is no accident.
MOST = 0.5
FEWEST_GROUPS = 4


class DatasetRules(RulesWithMemory):
    """Compares the rows of a step with each other, and with those of earlier ones."""

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        # The answers to each prompt.
        self.said: OrderedDict[bytes, bytes] = OrderedDict()
        # How many prompts were answered alike again, and whether one was not.
        self.kept = 0
        self.varies = False
        # Groups of earlier steps, and those of them whose prompt another one of the step had.
        self.groups = 0
        self.doubled = 0

    @rule(
        "truth_differs",
        advice=(
            "what orders or joins the dataset's columns: reward_model and extra_info belong to the "
            "prompt of their row"
        ),
        view="sort=-reward",
        order=75,
    )
    def other_truths(self, seen: SeenStep) -> Iterator[Finding]:
        """Finds prompts of which something else is said than before, or within their group."""
        batch = seen.batch
        names = [name for name in COLUMNS if name in batch.non_tensor_batch]
        if "reward_model" not in names:
            return
        again = 0
        other = 0
        for uid, rows in seen.episodes.first_by_group.items():
            said = {column_digest(batch, names, row) for row in rows}
            if len(said) > 1:
                yield Finding(
                    "truth_differs",
                    f"members of group {uid} have different {' or '.join(names)}",
                    Place(group=uid),
                )
                return
            before = self._say(prompt_key(batch, rows[0]), said.pop())
            again += before is not None
            other += before is False
        is_fault = other > MOST * again and self.kept >= FEWEST_PROMPTS and not self.varies
        if is_fault and not seen.config.environments:
            yield Finding(
                "truth_differs",
                f"of {other} of {again} prompts that came before something else was said then in "
                f"{' or '.join(names)}",
            )
        else:
            self.varies |= other > 0
            self.kept += again - other

    def _say(self, prompt: bytes, said: bytes) -> bool | None:
        """Remembers what is said of a prompt; returns whether it was so before, None: it is new."""
        before = self.said.get(prompt)
        self.said[prompt] = said
        self.said.move_to_end(prompt)
        if len(self.said) > MOST_PROMPTS:
            self.said.popitem(last=False)
        return None if before is None else before == said

    @rule("tasks_repeat", order=100)
    def doubled_prompts(self, seen: SeenStep) -> Iterator[Finding]:
        """Finds steps in which most prompts come twice, where none did before."""
        batch = seen.batch
        # An environment may begin all of its tasks with the same words; a sampler that learns gives
        # tasks more than once.
        columns = batch.non_tensor_batch
        if "env_seed" in columns or TASK_INDEX in columns:
            return
        keys = [prompt_key(batch, rows[0]) for rows in seen.episodes.first_by_group.values()]
        doubled = len(keys) - len(set(keys))
        none_before = self.groups >= FEWEST_GROUPS and self.doubled == 0
        if none_before and len(keys) >= FEWEST_GROUPS and 2 * doubled > MOST * len(keys):
            yield Finding(
                "tasks_repeat",
                f"{doubled} of {len(keys)} prompts come twice in the step; none of {self.groups} "
                "did before",
            )
            return
        self.groups += len(keys)
        self.doubled += doubled


def prompt_key(batch: DataProto, row: int) -> bytes:
    """Returns what stands for a row's prompt, however far it is padded."""
    prompt = batch.batch["prompts"][row].numpy()
    ids = prompt[batch.batch["attention_mask"][row, : len(prompt)].bool().numpy()]
    return hashlib.blake2b(ids.astype(np.int64).tobytes(), digest_size=16).digest()


def column_digest(batch: DataProto, names: list[str], row: int) -> bytes:
    """Returns what stands for a row's values of the columns."""
    said = repr([batch.non_tensor_batch[name][row] for name in names])
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
