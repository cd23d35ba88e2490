"""Checks the policy inside against the rest of a config."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from features.policy_calls.settings import PolicyCallsSettings

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig

log = logging.getLogger(__name__)
# Turns are numbered in 16 bits.
MOST_TURNS = 32_767


def config_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what is wrong with the bounds, and that nothing is there that could ask."""
    settings = config.section(PolicyCallsSettings)
    if not settings.enable:
        _warn_of_unread(settings)
        return
    if not config.environments:
        yield (
            "policy_calls.enable=true lets an episode's environment, tools or reward_fn ask the "
            "policy, and there is no environment: set agent.environment, or policy_calls.enable="
            "false"
        )
    turns = config.agent.max_turn + settings.max_calls
    if turns > MOST_TURNS:
        yield (
            f"policy_calls.max_calls={settings.max_calls} and agent.max_turn="
            f"{config.agent.max_turn} are {turns} turns of an episode, and turns are numbered up "
            f"to {MOST_TURNS}: make one of them smaller"
        )
    if config.agent.observation_loss_coef:
        log.warning(
            "agent.observation_loss_coef=%s learns all that has mask 0, and replies of train=False "
            "are among it",
            config.agent.observation_loss_coef,
        )


def _warn_of_unread(settings: PolicyCallsSettings) -> None:
    """Logs settings that nothing reads, as nothing is answered."""
    default = PolicyCallsSettings()
    for setting in fields(PolicyCallsSettings):
        if settings[setting.name] != default[setting.name]:
            log.warning(
                "policy_calls.%s is read by nothing: set policy_calls.enable=true", setting.name
            )
