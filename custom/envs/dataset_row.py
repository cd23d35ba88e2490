"""Plays a dataset's row as an episode: its conversation, tools, and a last answer without a call.

It is what a run acts in that has `agent.tools` and prompts, but names no environment. Invariant: it
pays nothing; rewards are the reward manager's, which sees the rows as it sees those of prompts.
"""

from typing import Any

from custom.env import BaseEnvironment, Message
from data.prompt_messages import text_messages


class DatasetRowEnvironment(BaseEnvironment):
    """Shows the row's messages; the first answer that calls no tool ends the episode.

    Args:
        prompt_key: the column with the messages, or with one user message as text.
    """

    def __init__(self, prompt_key: str = "prompt") -> None:
        super().__init__()
        self.prompt_key = prompt_key

    def reset(self, seed: int | None = None, **row: Any) -> list[Message]:
        """Returns the row's messages; ValueError where it has none."""
        if self.prompt_key not in row:
            raise ValueError(
                f"the row has no column {self.prompt_key!r}; it has: {', '.join(sorted(row))}; "
                "set data.prompt_key"
            )
        return [dict(message) for message in text_messages(row[self.prompt_key])]

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Ends the episode."""
        return "", 0.0, True, {}
