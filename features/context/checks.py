"""Checks contexts against the rest of a config."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from custom.env_calls import parameters_of
from features.context.settings import ContextSettings
from training.config.resources.user_code import loading_failure
from workers.rollout.history import KEEP

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig

log = logging.getLogger(__name__)
MODES = (KEEP, "last_turns", "drop_tool_results", "drop_thinking", "summarise")
# Turns are numbered in 16 bits, and each may have a summary behind it.
MOST_TURNS_WITH_SUMMARIES = 16_383


def is_class(context: str) -> bool:
    """Returns whether `agent.context` names a class of the user's."""
    return ".py:" in context


def config_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what is wrong with `agent.context`, and with the sizes that contexts need."""
    context = config.agent.context
    settings = config.section(ContextSettings)
    if is_class(context):
        yield from _class_problems(context, settings.kwargs)
    elif context not in MODES:
        yield (
            f"agent.context={context} must be one of {', '.join(MODES)}, or FILE.py:CLASS of a "
            "class of yours"
        )
    if context == "summarise":
        yield from _summary_problems(config, settings)
    if context == KEEP:
        _warn_of_unread(settings)


def _class_problems(context: str, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yields that a class cannot be loaded or made, or decides nothing."""
    from data.loading import load_object

    setting = f"agent.context={context}"
    failures = list(loading_failure(setting, load_object, context, "context"))
    yield from failures
    if failures:
        return
    made = load_object(context, "context")
    if not callable(getattr(made, "next_context", None)):
        yield (
            f"{setting} has no method next_context(self, standing): write it; it returns None to "
            "go on, or the messages of the new context (features/context/README.md)"
        )
    try:
        signature = parameters_of(made)
    except (TypeError, ValueError):
        # It says itself what it takes once it is called.
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in kwargs.items()) or "nothing"
        yield f"{setting} takes {signature}, and context.kwargs gives {given}: {error}"


def _summary_problems(config: PPOConfig, settings: ContextSettings) -> Iterator[str]:
    """Yields that a summary has no room."""
    data = config.data
    summary = f"context.summary_tokens={settings.summary_tokens}"
    if settings.summary_tokens >= data.max_prompt_length:
        yield (
            f"{summary} leaves no room for the task: the next context begins with both, in "
            f"data.max_prompt_length={data.max_prompt_length}; make the one smaller or the other "
            "larger"
        )
    if settings.summary_tokens >= data.max_response_length:
        yield (
            f"{summary} leaves no room for turns: each context has both, in "
            f"data.max_response_length={data.max_response_length}; make the one smaller or the "
            "other larger"
        )
    learns_observations = bool(config.agent.observation_loss_coef)
    if learns_observations and not settings.train_summaries:
        yield (
            f"agent.observation_loss_coef={config.agent.observation_loss_coef} learns all that has "
            "mask 0, and with context.train_summaries=false the summaries are among it: train "
            "them, or set the coefficient to 0"
        )
    if config.agent.max_turn > MOST_TURNS_WITH_SUMMARIES:
        yield (
            f"agent.max_turn={config.agent.max_turn} is above {MOST_TURNS_WITH_SUMMARIES}, the "
            "most with agent.context=summarise: turns and summaries are numbered together in 16 "
            "bits; make it smaller"
        )


def _warn_of_unread(settings: ContextSettings) -> None:
    """Logs settings that nothing reads, as every context goes on."""
    default = ContextSettings()
    for setting in fields(ContextSettings):
        if settings[setting.name] != default[setting.name]:
            log.warning(
                "context.%s is read by nothing with agent.context=keep: set agent.context to one "
                "of %s",
                setting.name,
                ", ".join(MODES[1:]),
            )
