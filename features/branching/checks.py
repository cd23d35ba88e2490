"""Checks branching against the rest of a config."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from features.branching.judging_words import JUDGED
from features.branching.settings import NEVER, BranchingSettings

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig

log = logging.getLogger(__name__)
# What an estimator reads that compares turns with continuations.
RETURNS = "branch_returns"


def config_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what continuations cannot be had with, and that an estimator lacks them."""
    settings = config.section(BranchingSettings)
    reads = RETURNS in config.estimator_needs
    if not settings.is_on:
        if reads:
            yield (
                f"algorithm.adv_estimator={config.algorithm.adv_estimator} reads {RETURNS}, what "
                f"continuations of turns earned, and branching.at={NEVER} samples none: set "
                "branching.at=every, say"
            )
        return
    is_judging = config.algorithm.adv_estimator.startswith(JUDGED)
    if not reads and not is_judging:
        log.warning(
            "branching.at=%s: continuations are sampled and measured, and "
            "algorithm.adv_estimator=%s does not read them",
            settings.places,
            config.algorithm.adv_estimator,
        )
    _warn_of_turns_beyond(config, settings)
    yield from _player_problems(config, settings.places)
    yield from _run_problems(config, settings.places)


def _warn_of_turns_beyond(config: PPOConfig, settings: BranchingSettings) -> None:
    """Logs that no turn of those that are named is ever played."""
    turns = [choice.max_turn or config.agent.max_turn for choice in config.environments]
    if settings.numbered and turns and min(settings.numbered) >= max(turns):
        log.warning(
            "branching.at=%s: with agent.max_turn=%d an episode has the turns 0 to %d, so that no "
            "continuation begins (only summaries and answers of policy_calls make them more)",
            settings.places,
            max(turns),
            max(turns) - 1,
        )


def _player_problems(config: PPOConfig, at: str) -> Iterator[str]:
    """Yields that what plays has no states that are continued from."""
    if not config.environments:
        yield (
            f"branching.at={at} continues from states of environments, and there is none: set "
            "agent.environment, or branching.at=never"
        )
    if any(choice.plays_by_itself for choice in config.environments):
        yield (
            f"branching.at={at}: a program plays by itself and has no step, so that no state of "
            "its can be had again: take an environment, or set branching.at=never"
        )
    if config.plays_dataset_rows or config.reward_model.enable:
        yield (
            f"branching.at={at}: continuations are paid by their environment alone, and here "
            "a reward function of rows or a reward model pays: have the environment pay, or set "
            "branching.at=never"
        )


def _run_problems(config: PPOConfig, at: str) -> Iterator[str]:
    """Yields that weights may change between an episode and its continuations."""
    if config.trainer.async_level:
        yield (
            f"branching.at={at} with trainer.async_level={config.trainer.async_level}: new weights "
            "may come between an episode and its continuations, which would measure another "
            "policy: set trainer.async_level=0, or branching.at=never"
        )
