"""Opens what `agent.context` names, on the engine's rank."""

from __future__ import annotations

from collections.abc import Callable

from data.turn_tokens import TurnTokens
from features.context.cuts import ContextCut, DropThinking, DropToolResults, LastTurns
from features.context.own import OwnRule
from features.context.settings import ContextSettings
from features.context.summary import Summarise
from training.config import PPOConfig
from workers.rollout.history import HistoryFault, HistoryRule

# A cut turn may be ended by so many tokens of the template's.
SLACK = 8
CUTS: dict[str, Callable[[ContextSettings, str], ContextCut]] = {
    "last_turns": LastTurns,
    "drop_tool_results": DropToolResults,
    "drop_thinking": DropThinking,
}


def open_history(config: PPOConfig, tokens: TurnTokens) -> HistoryRule:
    """Opens a mode, or the user's class.

    Raises:
        HistoryFault: the class cannot be made, or rows are too short for summaries.
    """
    settings = config.section(ContextSettings)
    context = config.agent.context
    if context in CUTS:
        return CUTS[context](settings, context)
    if context == "summarise":
        return _open_summarise(config, settings, tokens)
    return OwnRule(context, settings.kwargs, config.data.max_response_length)


def _open_summarise(
    config: PPOConfig, settings: ContextSettings, tokens: TurnTokens
) -> HistoryRule:
    """Opens summaries, for whose request and tokens each row keeps room.

    Raises:
        HistoryFault: these leave no room for turns.
    """
    request = len(tokens.prompt([{"role": "user", "content": settings.request}]))
    reserved = request + settings.summary_tokens + SLACK
    if reserved >= config.data.max_response_length:
        raise HistoryFault(
            f"agent.context=summarise keeps {reserved} tokens of each context free, {request} for "
            f"context.request and {settings.summary_tokens} for the summary "
            "(context.summary_tokens), which leaves none of "
            f"data.max_response_length={config.data.max_response_length} for turns: make that "
            "larger, or one of these smaller"
        )
    return Summarise(settings, reserved)
