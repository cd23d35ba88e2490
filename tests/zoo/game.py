"""The quickstart's game with a reward that a random model's answers differ in."""

from __future__ import annotations

from typing import Any

from examples.quickstart_game import TerseGuessNumber


class ZooGame(TerseGuessNumber):
    """Pays for what the answer is spelt like, and goes on whatever it is."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Answers `higher`, and pays up to one."""
        _, _, _, info = super().step(action)
        return "higher", sum(map(ord, action)) % 7 / 7, False, info
