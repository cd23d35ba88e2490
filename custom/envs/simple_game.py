"""The smallest game: take what is there, then leave. It is a model for an environment of your own."""

import random
from typing import Any

from custom.env import BaseEnvironment

ITEMS = ("lamp", "key", "rope", "coin")


class SimpleGameEnvironment(BaseEnvironment):
    """Plays in a room with two items: 1 point for taking each, -0.1 for what is not understood; leaving ends it."""

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
        taken = next((item for item in self.here if "take" in words and item in words), None)
        self._done = "leave" in words
        if taken:
            self.here.remove(taken)
            self.inventory.append(taken)
        reward = 1.0 if taken else 0.0 if self._done else -0.1
        self.score += reward
        answer = (
            f"You have the {taken}."
            if taken
            else "You leave."
            if self._done
            else "Nothing happens."
        )
        return answer, reward, self._done, {}

    def get_state_description(self) -> str:
        """Returns the score and what was taken."""
        return f"Score: {self.score:.1f}, inventory: {', '.join(self.inventory) or 'empty'}"

    def get_prompt_prefix(self) -> str:
        """Returns the rules."""
        return "You play a text game. Answer with one command, such as: take lamp"
