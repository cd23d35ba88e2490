"""The smallest game: take what is there, then leave.

It is a model for an environment of your own.
"""

import random
from typing import Any

from custom.env import BaseEnvironment

ITEMS = ("lamp", "key", "rope", "coin")


class SimpleGameEnvironment(BaseEnvironment):
    """Plays in a room with two items: 1 point for taking each; leaving ends the game.

    What is not understood costs 0.1.
    """

    def reset(self, seed: int | None = None) -> str:
        """Puts two items into the room."""
        self.here = random.Random(seed).sample(ITEMS, 2)
        self.inventory: list[str] = []
        self.score = 0.0
        return (
            f"You are in a room. You see: {', '.join(self.here)}. You can take something, or leave."
        )

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Understands `take ITEM` and `leave`."""
        words = action.lower().split()
        self._done = "leave" in words
        item = self._item_to_take(words)
        if item is not None:
            self.here.remove(item)
            self.inventory.append(item)
            answer = f"You have the {item}."
            reward = 1.0
        elif self._done:
            answer = "You leave."
            reward = 0.0
        else:
            answer = "Nothing happens."
            reward = -0.1
        self.score += reward
        return answer, reward, self._done, {}

    def _item_to_take(self, words: list[str]) -> str | None:
        if "take" in words:
            for item in self.here:
                if item in words:
                    return item
        return None

    def get_state_description(self) -> str:
        """Returns the score and what was taken."""
        return f"Score: {self.score:.1f}, inventory: {', '.join(self.inventory) or 'empty'}"

    def get_prompt_prefix(self) -> str:
        """Returns the rules."""
        return "You play a text game. Answer with one command, such as: take lamp"
