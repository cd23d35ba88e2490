"""Checks branching against the rest of a config."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from features.branching.judging_words import JUDGED
from features.branching.settings import NEVER, BranchingSettings
from training.config.row_readers import row_reader_sentences

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig

log = logging.getLogger(__name__)
# What an estimator reads that compares turns with continuations.
RETURNS = "branch_returns"
# The estimators that take continuations as rows of their own.
TRAINING = ("vine", "tree_grpo")


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
    yield from _turn_problems(config, settings)
    yield from _player_problems(config, settings.places)
    yield from _run_problems(config, settings.places)
    if settings.train:
        yield from _training_problems(config, settings)


def _turn_problems(config: PPOConfig, settings: BranchingSettings) -> Iterator[str]:
    """Yields that no episode has the turns that are continued from."""
    most = max(
        [choice.max_turn or config.agent.max_turn for choice in config.environments],
        default=config.agent.max_turn,
    )
    # Summaries are turns beside those of the episode.
    makes_more = config.agent.context != "keep"
    if settings.numbered and min(settings.numbered) >= most and not makes_more:
        yield (
            f"branching.at={settings.places}: turns count from 0, and agent.max_turn={most} allows "
            f"none above {most - 1}: name turns that are played"
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


def _training_problems(config: PPOConfig, settings: BranchingSettings) -> Iterator[str]:
    """Yields what keeps continuations from being trained on without a bias."""
    on = "branching.train=true"
    estimator = config.algorithm.adv_estimator
    if estimator not in TRAINING:
        yield (
            f"{on} with algorithm.adv_estimator={estimator}: continuations are trained on with "
            f"{' and '.join(TRAINING)}, which judge them by the others of their state: take one of "
            "these, or set branching.train=false"
        )
    elif settings.random_numbers == "common":
        yield (
            f"{on} with branching.random_numbers=common: later turns of a continuation have the "
            "episode's seeds, and are no samples of their own: set branching.random_numbers=fresh"
        )
    if not settings.numbered and settings.at != ("every",):
        yield (
            f"{on} with branching.at={settings.places}: where continuations begin depends on the "
            "episode, and so would their weights: set branching.at=every, or numbers of turns, as "
            "[0,9]"
        )
    yield from row_reader_sentences(config, f"{on} gives episodes several rows")
    yield from _unweighted_problems(config, on)


def _unweighted_problems(config: PPOConfig, on: str) -> Iterator[str]:
    """Yields settings that would count the tokens of continuations as the episodes' own."""
    actor = config.actor_rollout_ref.actor
    key = "actor_rollout_ref.actor"
    if actor.loss_agg_counts == "rows":
        yield (
            f"{on} with {key}.loss_agg_counts=rows: each continuation would count as an episode: "
            "set it to episodes"
        )
    unweighted = {
        f"{key}.use_kl_loss=true": actor.use_kl_loss,
        "algorithm.use_kl_in_reward=true": config.algorithm.use_kl_in_reward,
        "algorithm.rollout_correction": config.algorithm.rollout_correction.corrects,
        f"{key}.router_replay.mode={actor.router_replay.mode}": (
            actor.router_replay.mode != "disabled"
        ),
    }
    for setting, is_set in unweighted.items():
        if is_set:
            yield (
                f"{on} with {setting}: it reads the tokens of episodes alone, or would weigh those "
                "of continuations as much: take one of the two out"
            )
    if config.trainer.train_finished_groups:
        yield (
            f"{on} with trainer.train_finished_groups=true: groups are trained on before their "
            "continuations' rows are added: set one of the two to false"
        )
