"""Uncut trees by hand beside the core's update of any cut of them, and how far they are apart."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.cut_updates import Models, Updated, make_models, update
from tests.uncut_gradients import (
    ESTIMATORS,
    KNOBS,
    LOSSES,
    Line,
    Reading,
    Tokens,
    engine_log_probs,
    flat,
    gradient,
    lines_of,
    one_number,
    read_policy,
    read_values,
)
from tests.uncut_trees import (
    RESPONSE_WIDTH,
    Cut,
    Episode,
    batch_of,
    draw_episodes,
    in_one_row,
    random_rows,
)

# Of gradients, relative to the one by hand.
CLOSE = 1e-5
SEED = 9


class ByHand:
    """Uncut trees, with what the models make of them."""

    def __init__(self, models: Models, episodes: list[Episode]) -> None:
        self.models = models
        self.plain = models.in_float64()
        self.episodes = episodes
        with torch.no_grad():
            self.old = read_policy(self.plain.old, self.episodes)
            self.ref = read_policy(self.plain.ref, self.episodes).log_probs
            self.old_values = read_values(self.plain.old_critic, self.episodes)
        self.new: Reading = read_policy(self.plain.policy, self.episodes)
        self.values = read_values(self.plain.critic, self.episodes)
        self.engine, self.engine_by_turn = engine_log_probs(self.old.log_probs, self.episodes)
        self.all = torch.ones(len(self.engine), dtype=torch.bool)

    def lines(self) -> list[Line]:
        return lines_of(
            self.episodes,
            old=self.old.log_probs,
            ref=self.ref,
            values=self.old_values,
            squares=self.old.squares,
        )

    def tokens(self, advantages: Tensor, *, on_policy: bool = False) -> Tokens:
        new = self.new.log_probs
        old = new.detach() if on_policy else self.old.log_probs
        return Tokens(new=new, old=old, advantages=advantages, engine=self.engine)

    def loss(
        self,
        estimator: str,
        mode: str,
        loss: str = "vanilla",
        *,
        on_policy: bool = False,
        weights: Tensor | float = 1.0,
    ) -> Tensor:
        lines = self.lines()
        advantages = flat(ESTIMATORS[estimator](lines), 0)
        per_token = LOSSES[loss](self.tokens(advantages, on_policy=on_policy)) * weights
        return one_number(per_token, lines, mode, self.all, RESPONSE_WIDTH)

    def actor(self, *arguments: Any, **settings: Any) -> Tensor:
        """The gradient of the policy's weights."""
        return gradient(self.loss(*arguments, **settings), self.plain.policy)

    def critic(self, estimator: str, mode: str) -> Tensor:
        """The gradient of the critic's weights."""
        lines = self.lines()
        returns = flat(ESTIMATORS[estimator](lines), 1)
        clipped = torch.minimum(
            torch.maximum(self.values, self.old_values - 0.5), self.old_values + 0.5
        )
        errors = torch.maximum((self.values - returns) ** 2, (clipped - returns) ** 2)
        loss = 0.5 * one_number(errors, lines, mode, self.all, RESPONSE_WIDTH)
        return gradient(loss, self.plain.critic)

    def cut(self, cuts: list[Cut], config: Any, seed: int = 0, **settings: Any) -> Updated:
        """Makes the core's update of the episodes in these rows."""
        batch = batch_of(self.episodes, cuts, self.engine_by_turn, seed)
        given = {"state": KNOBS.role_means, **settings}
        return update(self.models, batch, self.episodes, config, **given)

    def random_cut(self, seed: int) -> list[Cut]:
        rng = np.random.default_rng(seed)
        return [random_rows(episode, rng) for episode in self.episodes]


@cache
def by_hand(*, in_rows: bool = False) -> ByHand:
    """The trees of the tests; with `in_rows` their turns are one conversation each."""
    episodes = draw_episodes(SEED)
    if in_rows:
        episodes = [in_one_row(episode) for episode in episodes]
    return ByHand(make_models(), episodes)


def distance(found: Tensor, expected: Tensor) -> float:
    assert expected.norm() > 1e-3
    return float((found - expected).norm() / expected.norm())
