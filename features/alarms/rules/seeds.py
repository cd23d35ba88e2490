"""Watches whether environments do as their seeds say.

Members of a group have one seed, so that equal first answers are answered equally (or the config
allows different tasks). Episodes with the same prompt and the same first answer are compared by
what the environment replied:

    group   seed   first answer   came of it
    a       11     5              higher
    a       11     5              lower         within a group: the seed does not decide
    b       12     5              lower         in another group: another task may well differ

Invariant: nothing is known of any environment. One that has a single task is silent: what it
answers never depended on the seed.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from data.protocol import DataProto
from features.alarms.finding import Finding, Place
from features.alarms.rule import RulesWithMemory, rule
from features.alarms.rules.groups import has_several_agents, nats_of_count
from features.alarms.seen_step import SeenStep
from training.observers import ObservedRun

# Steps whose comparisons are summed up, at most.
SUMMED_STEPS = 16
# Members of a group may differ by so much of what groups differ by, as an environment's noise has
# it; that they differ by more must be unlikely, by nats.
NOISE_SHARE = 0.25
UNLIKELY_DIFFERENCE = 11.5
# Nats by which it must be unlikely that all groups face one task by chance: one in 10^10.
UNLIKELY = 23.0
# First answers, with their prompts, that are remembered.
MOST_CONTEXTS = 4096
# Endings behind which the environment's last word is known.
PLAYED = ("done", "max_turns", "overflow")


class FirstTurn(NamedTuple):
    """Holds what an episode's policy said first, and what came of it.

    Attributes:
        group: its uid.
        context: stands for the prompt and the answer.
        outcome: stands for the words and the reward that followed.
    """

    group: str
    context: int
    outcome: int


class Comparisons(NamedTuple):
    """Counts equal first answers, and those of them with another outcome.

    Attributes:
        within: members of groups that are compared with the first of their group.
        between: groups that are compared, by their first members.
        example: a group whose members differ.
    """

    within: int = 0
    within_differing: int = 0
    between: int = 0
    between_differing: int = 0
    example: str = ""


class SeedRules(RulesWithMemory):
    """Watches what comes of equal first answers, within groups and between them."""

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self.steps: deque[Comparisons] = deque(maxlen=SUMMED_STEPS)
        # What came of a first answer in steps in which groups differed, a count for each group.
        self.outcomes: OrderedDict[int, Counter[int]] = OrderedDict()
        # How unlikely it is that no group has differed since then.
        self.nats = 0.0

    @rule(
        "seed_ignored",
        advice=(
            "the environment's reset: its seed decides all that is drawn, and nothing else does; "
            "agent.allow_different_tasks=true lets the members of a group differ"
        ),
        view="sort=-reward",
        order=95,
    )
    def ignored_seeds(self, seen: SeenStep) -> Iterator[Finding]:
        """Looks at the first turns of a step."""
        if "env_seed" not in seen.batch.non_tensor_batch or has_several_agents(seen.batch):
            return
        by_context: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for turn in first_turns(seen):
            by_context[turn.context][turn.group].append(turn.outcome)
        self.steps.append(compare(by_context))
        if not seen.config.agent.allow_different_tasks:
            yield from differing_members(self.steps)
        yield from self._equal_groups(by_context)

    def _equal_groups(self, by_context: Mapping[int, Mapping[str, list[int]]]) -> Iterator[Finding]:
        """Finds groups that no longer differ where they did."""
        leaders = {}
        for context, groups in by_context.items():
            leaders[context] = [outcomes[0] for outcomes in groups.values()]
        if any(len(set(outcomes)) > 1 for outcomes in leaders.values()):
            self.nats = 0.0
            self._remember(leaders)
            return
        for context, outcomes in leaders.items():
            past = self.outcomes.get(context)
            if past is not None and len(past) > 1:
                commonest = (max(past.values()) + 1) / (past.total() + 1)
                self.nats -= (len(outcomes) - 1) * math.log(commonest)
        if self.nats > UNLIKELY:
            yield Finding(
                "seed_ignored",
                "all groups face one task: equal first answers have one outcome in all of them, "
                f"and had several before (one in 10^{self.nats / math.log(10):.0f} by chance)",
            )

    def _remember(self, leaders: Mapping[int, list[int]]) -> None:
        """Adds what came of first answers."""
        for context, outcomes in leaders.items():
            self.outcomes.setdefault(context, Counter()).update(outcomes)
            self.outcomes.move_to_end(context)
        while len(self.outcomes) > MOST_CONTEXTS:
            self.outcomes.popitem(last=False)


def compare(by_context: Mapping[int, Mapping[str, list[int]]]) -> Comparisons:
    """Compares members with the first of their group, and these with that of the first group.

    Args:
        by_context: by context and group, the outcomes.
    """
    within = 0
    within_differing = 0
    between = 0
    between_differing = 0
    example = ""
    for groups in by_context.values():
        firsts = [outcomes[0] for outcomes in groups.values()]
        between += len(firsts) - 1
        between_differing += sum(outcome != firsts[0] for outcome in firsts)
        for group, outcomes in groups.items():
            within += len(outcomes) - 1
            number = sum(outcome != outcomes[0] for outcome in outcomes)
            within_differing += number
            if number:
                example = example or group
    return Comparisons(within, within_differing, between, between_differing, example)


def differing_members(steps: Sequence[Comparisons]) -> Iterator[Finding]:
    """Finds members of groups that differ nearly as groups do, in the last steps of `steps`."""
    within = 0
    within_differing = 0
    between = 0
    between_differing = 0
    for step in reversed(steps):
        within += step.within
        within_differing += step.within_differing
        between += step.between
        between_differing += step.between_differing
        noise = NOISE_SHARE * (between_differing + 1) / (between + 1)
        nats = nats_of_count(within_differing, np.full(within, noise))
        if between and nats > UNLIKELY_DIFFERENCE:
            yield Finding(
                "seed_ignored",
                f"{within_differing} of {within} equal first answers had another outcome than that "
                "of another member of their group, which has the same seed; between groups "
                f"{between_differing} of {between} had",
                Place(group=steps[-1].example),
            )
            return


def first_turns(seen: SeenStep) -> Iterator[FirstTurn]:
    """Yields the first turns that an environment answered, of episodes with one agent."""
    batch = seen.batch
    for rows, facts in seen.played_episodes():
        by_itself = any(name.startswith("program_") for name in facts["info"])
        if facts["ending"] in PLAYED and not by_itself:
            turn = first_turn(batch, rows[0], turns=facts["turns"])
            if turn is not None:
                yield turn


def first_turn(batch: DataProto, row: int, *, turns: int) -> FirstTurn | None:
    """Reads a row's first turn; None where what came of it is not in this row.

    Args:
        turns: of the episode.
    """
    fields = batch.batch
    turn_ids = fields["turn_ids"][row].numpy()  # (R,)
    said = np.flatnonzero(turn_ids == 0)
    later = np.flatnonzero(turn_ids == 1)
    if not len(said) or (turns > 1 and not len(later)):
        return None
    ids = fields["responses"][row].numpy()
    heard = b""
    if len(later):
        heard = ids[said[-1] + 1 : later[0]].tobytes()
    reward = 0.0
    if "environment_rewards" in fields:
        reward = round(float(fields["environment_rewards"][row].numpy()[said].sum()), 6)
    columns = batch.non_tensor_batch
    player = int(columns["agent_index"][row]) if "agent_index" in columns else 0
    prompt = fields["prompts"][row].numpy().tobytes()
    return FirstTurn(
        group=str(columns["uid"][row]),
        context=hash((player, prompt, ids[said].tobytes())),
        outcome=hash((heard, reward)),
    )
