"""Finds groups that are not what they should be, and what comes twice: tasks, prompts, answers.

Two answers may agree by chance. How likely that is their own log-probs say, and only what is
unlikelier than one in 10^10 is named. A batch of a user's own that lacks a column is not judged by
it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from data.learning_sampler import TASK_INDEX
from data.protocol import DataProto
from features.alarms.finding import Finding, Place, owner_name, place_of
from features.alarms.rule import RulesWithMemory, rule
from features.alarms.seen_step import SeenStep
from training.observers import ObservedRun

# Nats by which it must be unlikely that samples agree by chance: one in 10^10.
UNLIKELY = 23.0
# One of so many tasks may come twice by chance: seeds have 31 bits.
TASKS_A_REPEAT = 256
# Steps whose seeds are remembered, and the share of a step's that may be those of one of them.
REMEMBERED_STEPS = 20
MOST_OF_A_STEP = 0.5
FEWEST_GROUPS = 4


@rule(
    "equal_answers",
    advice="the sampling seeds of a group's members, and rollout.temperature",
    view="sort=tokens",
    order=60,
)
def equal_answers(seen: SeenStep) -> Iterator[Finding]:
    """Finds groups whose members say the same more often than independent draws would.

    Compared are the answers of all turns, of all members, that follow on the same tokens: each
    equals one of those before it with the sum of their probabilities. The number that do is
    compared with the sum of these.
    """
    batch = seen.batch
    fields = batch.batch
    log_probs = fields.get("rollout_log_probs", fields.get("old_log_probs"))
    if log_probs is None:
        return
    uids = batch.non_tensor_batch.get("uid", np.arange(len(batch)))
    # By group and by what stands before a turn: the answers so far, with their probabilities.
    drawn: dict[tuple[str, bytes], dict[bytes, float]] = defaultdict(dict)
    equal = 0
    chances: list[float] = []
    example = ""
    for row in seen.episodes.real.nonzero().flatten().tolist():
        uid = str(uids[row])
        for turn in turns_of(batch, row, log_probs):
            earlier = drawn[uid, turn.context]
            if earlier:
                chances.append(min(sum(earlier.values()), 1.0))
            if turn.answer in earlier:
                equal += 1
                example = example or uid
            else:
                earlier[turn.answer] = math.exp(min(turn.log_prob, 0.0))
    if nats_of_count(equal, np.array(chances)) > UNLIKELY:
        yield Finding(
            "equal_answers",
            f"{equal} answers equal one that another member of their group gave there, "
            f"{sum(chances):.2g} would by chance; as in group {example}",
            Place(group=example),
        )


class SaidTurn(NamedTuple):
    """Holds what the policy said in one turn of a row.

    Attributes:
        context: stands for all tokens before it.
        answer: its tokens, as bytes.
        log_prob: of all of them.
    """

    context: bytes
    answer: bytes
    log_prob: float


def turns_of(batch: DataProto, row: int, log_probs: Tensor) -> Iterator[SaidTurn]:
    """Yields a row's turns that are trained on, in order.

    Args:
        log_probs: (B, R) of the sampled tokens.
    """
    fields = batch.batch
    mask = fields["response_mask"][row].bool().numpy()  # (R,)
    ids = fields["responses"][row].numpy()  # (R,)
    nats = log_probs[row].double().numpy()  # (R,)
    # Without turns the whole answer is one.
    turns = np.where(mask, 0, -1)
    if "turn_ids" in fields:
        turns = np.where(mask, fields["turn_ids"][row].numpy(), -1)
    read = hashlib.blake2b(fields["prompts"][row].numpy().tobytes())
    begins = np.flatnonzero(np.diff(turns, prepend=-2, append=-2))
    for start, end in itertools.pairwise(begins.tolist()):
        tokens = ids[start:end].tobytes()
        if turns[start] >= 0:
            yield SaidTurn(read.digest(), tokens, float(nats[start:end].sum()))
        read.update(tokens)


@rule(
    "prompt_differs",
    advice="what orders the rows: tensors and columns of a row belong together",
    order=70,
)
def other_prompts(seen: SeenStep) -> Iterator[Finding]:
    """Finds rows whose prompt is not the one that the dataset gave them."""
    batch = seen.batch
    of_dataset = batch.non_tensor_batch.get("raw_prompt_ids")
    if of_dataset is None:
        return
    prompts = batch.batch["prompts"].numpy()
    for rows in seen.episodes.first_by_group.values():
        ids = list(of_dataset[rows[0]])
        if ids and prompts[rows[0], -len(ids) :].tolist() != ids:
            yield Finding(
                "prompt_differs",
                f"{owner_name(batch, rows[0])} answers another prompt than its own",
                place_of(batch, rows[0]),
            )
            return


@rule(
    "groups_mixed",
    advice="uid of the rows: answers to different prompts are compared",
    order=80,
)
def mixed_groups(seen: SeenStep) -> Iterator[Finding]:
    """Finds groups that mix prompts."""
    batch = seen.batch
    config = seen.config
    # Whether members begin with the same prompt, and the same seed of their environments.
    same_tasks = not (config.environments and config.agent.allow_different_tasks)
    compared = []
    seeds = batch.non_tensor_batch.get("env_seed")
    # What an agent hears first may be another's answer.
    if same_tasks and not has_several_agents(batch):
        compared.append(batch.batch["prompts"].numpy())
    if same_tasks and seeds is not None:
        compared.append(seeds)
    tasks = batch.non_tensor_batch.get("group_index")
    if tasks is not None:
        compared.append(tasks)
    groups = seen.episodes.first_by_group
    sizes = [len(rows) for rows in groups.values()]
    members = np.array([row for rows in groups.values() for row in rows], dtype=np.int64)
    leaders = np.repeat(np.array([rows[0] for rows in groups.values()], dtype=np.int64), sizes)
    differs = np.zeros(len(members), dtype=bool)
    for values in compared:
        differs |= (values[members] != values[leaders]).reshape(len(members), -1).any(axis=1)
    uids = np.repeat(list(groups), sizes)
    mixed = list(dict.fromkeys(uids[differs].tolist()))
    if mixed:
        yield Finding(
            "groups_mixed",
            f"{len(mixed)} of {len(groups)} groups have episodes of different prompts or tasks, "
            f"as {mixed[0]}",
            Place(group=str(mixed[0])),
        )


def has_several_agents(batch: DataProto) -> bool:
    """Checks whether an environment's episodes have more agents than one."""
    columns = batch.non_tensor_batch
    if "agent_role" not in columns:
        return False
    return len(set(columns["agent_role"])) > len(set(columns["data_source"]))


@rule(
    "group_size",
    advice="uid of the rows, and what drops or adds them: a group has rollout.n episodes",
    order=90,
)
def uneven_groups(seen: SeenStep) -> Iterator[Finding]:
    """Finds groups of another number of episodes than `rollout.n`."""
    batch = seen.batch
    size = seen.config.actor_rollout_ref.rollout.n
    groups = seen.episodes.first_by_group
    # An agent may have several conversations in an episode.
    ids = batch.non_tensor_batch.get("episode_id", np.arange(len(batch)))
    sizes = {uid: len({ids[row] for row in rows}) for uid, rows in groups.items()}
    uneven = [uid for uid, number in sizes.items() if number != size]
    if uneven:
        yield Finding(
            "group_size",
            f"{len(uneven)} of {len(groups)} groups have not {size} episodes, as {uneven[0]} with "
            f"{sizes[uneven[0]]}",
            Place(group=str(uneven[0])),
        )


class RepeatRules(RulesWithMemory):
    """Compares a step's tasks and answers with each other, and with those of the step before."""

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self.past_seeds: deque[set[int]] = deque(maxlen=REMEMBERED_STEPS)
        self.last_prompts = b""
        # The prompt and the first answer of each sample, by its group's number and its own.
        self.last_answers: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    @rule(
        "tasks_repeat",
        advice="what env_seed or the prompts are made of: run, step and group",
        order=100,
    )
    def repeated_seeds(self, seen: SeenStep) -> Iterator[Finding]:
        """Compares the seeds of the environments: each group has one of its own."""
        batch = seen.batch
        groups = seen.episodes.first_by_group
        seeds = batch.non_tensor_batch.get("env_seed")
        # A sampler that learns gives tasks more than once.
        if seeds is None or TASK_INDEX in batch.non_tensor_batch:
            return
        of_groups = [int(seeds[rows[0]]) for rows in groups.values()]
        allowed = len(groups) / TASKS_A_REPEAT
        doubled = len(of_groups) - len(set(of_groups))
        again_of_steps = [len(seeds.intersection(of_groups)) for seeds in self.past_seeds]
        again = again_of_steps[-1] if again_of_steps else 0
        earlier = max(again_of_steps, default=0)
        self.past_seeds.append(set(of_groups))
        if doubled > allowed:
            yield Finding(
                "tasks_repeat", f"{doubled} of {len(groups)} groups have another group's env_seed"
            )
        if again > allowed:
            yield Finding(
                "tasks_repeat", f"{again} of {len(groups)} env_seeds are those of the step before"
            )
        elif earlier > MOST_OF_A_STEP * len(groups) and len(groups) >= FEWEST_GROUPS:
            steps_ago = len(again_of_steps) - again_of_steps.index(earlier)
            yield Finding(
                "tasks_repeat",
                f"{earlier} of {len(groups)} env_seeds are those of {steps_ago} steps before",
            )

    @rule("tasks_repeat", order=100)
    def repeated_prompts(self, seen: SeenStep) -> Iterator[Finding]:
        """Compares the prompts, in their order, where a dataset gives them."""
        batch = seen.batch
        groups = seen.episodes.first_by_group
        prompts = batch.batch["prompts"].numpy()[[rows[0] for rows in groups.values()]]
        key = prompts.tobytes()
        is_same = key == self.last_prompts
        self.last_prompts = key
        vary = len(np.unique(prompts, axis=0)) > 1
        epoch = self.run.steps_per_epoch
        new_ones_are_due = epoch is not None and epoch > 1
        if is_same and vary and new_ones_are_due and "env_seed" not in batch.non_tensor_batch:
            yield Finding(
                "tasks_repeat",
                f"all prompts are those of the step before, in epochs of {epoch} steps",
            )

    @rule(
        "answers_repeat",
        advice="the sampling seeds: they are of run, step, group, sample and turn",
        view="sort=tokens",
        order=100,
    )
    def repeated_answers(self, seen: SeenStep) -> Iterator[Finding]:
        """Compares first answers with those that the same sample gave the step before.

        Where both had the same prompt, a sample equals the one before it with its own probability.
        """
        batch = seen.batch
        groups = seen.episodes.first_by_group
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


@rule(
    "groups_copied",
    advice="what repeats, refills or collects groups: one is trained on twice",
    order=105,
)
def copied_groups(seen: SeenStep) -> Iterator[Finding]:
    """Finds two groups whose members all have the same tokens."""
    batch = seen.batch
    groups = seen.episodes.first_by_group
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


def nats_of_count(count: int, chances: np.ndarray) -> float:
    """Returns the nats by which chance hardly makes so many events happen, by Chernoff's bound.

    Args:
        chances: (N,) of each event, given those before it.
    """
    if count <= chances.sum():
        return 0.0
    exponents = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    bounds = [
        exponent * count - np.log1p(chances * math.expm1(exponent)).sum() for exponent in exponents
    ]
    # The best of several bounds holds by their number less.
    return float(max(bounds)) - math.log(len(bounds))


def unlikely_excess(count: int, expected: float) -> bool:
    """Judges whether a count is above chance's, by Chernoff's bound for a Poisson number."""
    if count <= expected:
        return False
    nats = count * math.log(count / max(expected, 1e-300)) - count + expected
    return nats > UNLIKELY
