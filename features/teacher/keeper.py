"""Keeps of each episode what a teacher may be told of it, on the engine's rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from data.turn_tokens import TurnTokens
from features.teacher.settings import TeacherSettings
from training.config import PPOConfig
from workers.rollout.episode import Episode
from workers.rollout.keepers import EpisodeKeeper

# The name of the episode's facts.
TOLD = "teacher"


def open_keeper(config: PPOConfig, tokens: TurnTokens) -> TeacherKeeper | None:
    """Opens the keeper, where there is a teacher with a context."""
    settings = config.section(TeacherSettings)
    if settings.model is None or settings.context is None:
        return None
    return TeacherKeeper()


class TeacherKeeper(EpisodeKeeper):
    """Puts the messages of prompts, hints and feedback among an episode's facts."""

    def after_policy(self, episode: Episode, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns them as plain data."""
        replies = [turn.reply for turn in episode.turns if turn.reply is not None]
        texts = dict(episode.reset_texts)
        for reply in replies:
            texts |= reply.texts
        feedback = ""
        if replies:
            feedback = "\n".join(message["content"] for message in replies[-1].messages)
        sources = [None if row.source is None else row.source._asdict() for row in episode.rows]
        return {TOLD: {"sources": sources, "texts": texts, "feedback": feedback}}
