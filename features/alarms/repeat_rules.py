"""Finds what comes twice and should not: tasks, prompts, answers, whole groups.

Two answers may agree by chance. How likely that is their own log-probs say, and only what is
unlikelier than one in 10^10 is named.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from data.protocol import DataProto
from features.alarms.batch_rules import UNLIKELY, unlikely_excess
from features.alarms.catalogue import Finding, Place
from training.batch.episode_rows import EpisodeRows

# One of so many tasks may come twice by chance: seeds have 31 bits.
TASKS_A_REPEAT = 256


class RepeatRules:
    """Compares a step's tasks and answers with each other, and with those of the step before.

    Args:
        steps_per_epoch: after how many steps prompts come again; None: not known.
    """

    def __init__(self, steps_per_epoch: int | None) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.last_seeds: set[int] = set()
        self.last_prompts = b""
        # The prompt and the first answer of each sample, by its group's number and its own.
        self.last_answers: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def check(self, batch: DataProto, episodes: EpisodeRows) -> Iterator[Finding]:
        """Looks at a step's batch."""
        groups = episodes.first_by_group
        yield from self._check_seeds(batch, groups)
        yield from self._check_prompts(batch, groups)
        yield from self._check_answers(batch, groups)
        yield from copied_groups(batch, groups)

    def _check_seeds(self, batch: DataProto, groups: dict[str, list[int]]) -> Iterator[Finding]:
        """Compares the seeds of the environments: each group has one of its own."""
        seeds = batch.non_tensor_batch.get("env_seed")
        if seeds is None:
            return
        of_groups = [int(seeds[rows[0]]) for rows in groups.values()]
        allowed = len(groups) / TASKS_A_REPEAT
        doubled = len(of_groups) - len(set(of_groups))
        again = len(self.last_seeds.intersection(of_groups))
        self.last_seeds = set(of_groups)
        if doubled > allowed:
            yield Finding(
                "tasks_repeat", f"{doubled} of {len(groups)} groups have another group's env_seed"
            )
        if again > allowed:
            yield Finding(
                "tasks_repeat", f"{again} of {len(groups)} env_seeds are those of the step before"
            )

    def _check_prompts(self, batch: DataProto, groups: dict[str, list[int]]) -> Iterator[Finding]:
        """Compares the prompts, in their order, where a dataset gives them."""
        prompts = batch.batch["prompts"].numpy()[[rows[0] for rows in groups.values()]]
        key = prompts.tobytes()
        is_same = key == self.last_prompts
        self.last_prompts = key
        vary = len(np.unique(prompts, axis=0)) > 1
        new_ones_are_due = self.steps_per_epoch is not None and self.steps_per_epoch > 1
        if is_same and vary and new_ones_are_due and "env_seed" not in batch.non_tensor_batch:
            yield Finding(
                "tasks_repeat",
                f"all prompts are those of the step before, in epochs of {self.steps_per_epoch} "
                "steps",
            )

    def _check_answers(self, batch: DataProto, groups: dict[str, list[int]]) -> Iterator[Finding]:
        """Compares first answers with those that the same sample gave the step before.

        Where both had the same prompt, a sample equals the one before it with its own probability.
        """
        columns = batch.non_tensor_batch
        log_probs = batch.batch.get("rollout_log_probs")
        if log_probs is None or "group_index" not in columns or "sample_index" not in columns:
            return
        in_answer = first_answers(batch)
        ids = batch.batch["responses"].numpy()
        prompts = batch.batch["prompts"].numpy()
        nats = np.where(in_answer, log_probs.numpy(), 0).sum(1, dtype=np.float64)
        answers: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        equal = 0
        expected = 0.0
        for rows in groups.values():
            for row in rows:
                place = (int(columns["group_index"][row]), int(columns["sample_index"][row]))
                answer = ids[row][in_answer[row]].tobytes()
                answers[place] = (prompts[row].tobytes(), answer)
                before = self.last_answers.get(place)
                if not answer or before is None or before[0] != answers[place][0]:
                    continue
                equal += before[1] == answer
                expected += math.exp(min(nats[row], 0.0))
        self.last_answers = answers
        if unlikely_excess(equal, expected):
            yield Finding(
                "answers_repeat",
                f"{equal} first answers are those that the same sample gave to the same prompt the "
                f"step before, {expected:.2g} would be by chance",
            )


def copied_groups(batch: DataProto, groups: dict[str, list[int]]) -> Iterator[Finding]:
    """Finds two groups whose members all have the same tokens."""
    log_probs = batch.batch.get("rollout_log_probs")
    if log_probs is None:
        return
    mask = batch.batch["response_mask"].numpy().astype(bool)
    nats = -np.where(mask, log_probs.numpy(), 0).sum(1, dtype=np.float64)
    ids = np.where(mask, batch.batch["responses"].numpy(), -1)
    by_content: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for uid, rows in groups.items():
        by_content[tuple(sorted(ids[row].tobytes() for row in rows))].append(uid)
    # Any two of the groups may agree.
    unlikely = UNLIKELY + 2 * math.log(max(len(groups), 1))
    for uids in by_content.values():
        if len(uids) > 1 and nats[groups[uids[0]]].sum() > unlikely:
            yield Finding(
                "groups_copied",
                f"groups {uids[0]} and {uids[1]} have the same answers throughout",
                Place(group=uids[0]),
            )
            return


def first_answers(batch: DataProto) -> np.ndarray:
    """Marks the tokens of first turns that are trained on, (B, R) bool."""
    in_answer = batch.batch["response_mask"].numpy().astype(bool)
    if "turn_ids" in batch.batch:
        in_answer = in_answer & (batch.batch["turn_ids"].numpy() == 0)
    return in_answer
