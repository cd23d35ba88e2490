"""The quickstart's game, whose steps ask the policy: a masked hint, and critics side by side."""

from __future__ import annotations

from typing import Any

from examples.quickstart_game import TerseGuessNumber
from features.policy_calls import policy


class GuessWithHelp(TerseGuessNumber):
    """Asks in each step; a critic that names the number is paid, every other step."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Plays the guess, and tells what a hint says."""
        observation, reward, done, info = super().step(action)
        policy.ask("higher", train=False, name="hint")
        critics = policy.ask_all([f"number is {observation}", "guess"], name="critic")
        if self.turns_left % 2:
            for critic in critics:
                critic.reward = float(str(self.number) in critic.text.split())
        return observation, reward, done, info


def judged(trajectory: Any, environment: Any) -> float:
    """Adds to the rewards what the policy says of the episode's end."""
    verdict = policy.ask("correct", name="judge")
    return sum(trajectory.rewards) + 0.1 * (verdict.text.strip() == "correct")
