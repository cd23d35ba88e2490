"""Looks for a policy that ends its episodes early, since every further turn costs.

A game that takes a little for each turn and pays at its end may teach that an episode which is
given up at once loses least. Invariant: a policy that wins as before, in fewer turns, has learnt
what was meant, and rings nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from features.alarms.finding import Finding
from features.alarms.rule import RulesWithMemory, rule
from features.alarms.seen_step import SeenStep
from training.observers import ObservedRun

FEWEST_EPISODES = 8
# Such a share of the episodes of several turns paid for one; such a share of all ended itself.
MOST_PAY = 0.5
MOST_ENDED = 0.7
# Turns, and the share of episodes that won something at their end, fell to such a part.
FALLEN = 0.5
# A share of episodes that won, below which it may have been chance.
LEAST_WON = 0.03


class TurnCostRules(RulesWithMemory):
    """Watches turns, what they cost, and what is won behind them.

    Attributes:
        most_turns, most_won: the largest mean of turns in a step so far, and the largest share of
            episodes that won something with their last turn.
        pay: in the last step with enough of them, the share of episodes of several turns that lost
            something before their last turn.
    """

    name = "turn_costs"

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self.most_turns = 0.0
        self.most_won = 0.0
        self.pay = 0.0

    @rule(
        "turns_cost",
        advice=(
            "the reward: what a turn costs must be less than what is likely to be won behind it; a "
            "smaller cost, a loss for giving up, or a part of the reward on the way"
        ),
        waits=True,
        view="sort=turns",
        order=125,
    )
    def early_ends(self, seen: SeenStep) -> Iterator[Finding]:
        """Finds episodes that end early and win less than before, where turns cost."""
        turns = []
        paying = []
        won = 0
        ended = 0
        for rows, facts in seen.played_episodes():
            before, last = _rewards(seen, rows)
            turns.append(facts["turns"])
            won += last > 0
            ended += facts["ending"] == "done"
            if facts["turns"] > 1:
                paying.append(before < 0)
        if len(turns) < FEWEST_EPISODES:
            return
        mean_turns = sum(turns) / len(turns)
        won_share = won / len(turns)
        if len(paying) >= FEWEST_EPISODES:
            self.pay = sum(paying) / len(paying)
        fewer = mean_turns <= FALLEN * self.most_turns
        wins_less = self.most_won > LEAST_WON and won_share <= FALLEN * self.most_won
        if fewer and wins_less and self.pay >= MOST_PAY and ended >= MOST_ENDED * len(turns):
            yield Finding(
                "turns_cost",
                f"episodes end after {mean_turns:.2g} turns, {self.most_turns:.2g} was the most, "
                f"and {won_share:.0%} of them win something at their end, once {self.most_won:.0%} "
                "did: turns cost, and the policy ends before it wins",
            )
        self.most_turns = max(self.most_turns, mean_turns)
        self.most_won = max(self.most_won, won_share)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"most_turns": self.most_turns, "most_won": self.most_won, "pay": self.pay}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.most_turns = state["most_turns"]
        self.most_won = state["most_won"]
        self.pay = state["pay"]


def _rewards(seen: SeenStep, rows: list[int]) -> tuple[float, float]:
    """Sums what an episode was paid before its last sampled token, and on it."""
    fields = seen.batch.batch
    name = "environment_rewards" if "environment_rewards" in fields else "token_level_scores"
    paid = fields[name][rows]  # (rows, R)
    mask = fields["response_mask"][rows].bool()
    sampled_rows = [row for row in range(len(rows)) if bool(mask[row].any())]
    if not sampled_rows:
        return 0.0, 0.0
    row = sampled_rows[-1]
    place = int(torch.nonzero(mask[row])[-1])
    last = float(paid[row, place])
    return float(paid.sum()) - last, last
