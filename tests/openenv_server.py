"""A server of OpenEnv, written with its package: run by an interpreter that has it.

python openenv_server.py PORT          # guess a number, by text
python openenv_server.py PORT moves    # an action of two fields
"""

from __future__ import annotations

import random
import sys
from typing import Any, Literal

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

MOST_SESSIONS = 8


class Said(Observation):
    text: str = ""


class Guess(Action):
    guess: str


class Move(Action):
    direction: Literal["left", "right"]
    steps: int


class Game(Environment):
    """Pays 1 for the number from 1 to 3 that the seed chose, and ends."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.place = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, hint: str = "", **_: Any
    ) -> Said:
        self.number = random.Random(seed).randint(1, 3)
        self.place = 0
        return Said(text=f"Guess a number.{hint}")

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Said:
        if isinstance(action, Move):
            self.place += action.steps * (1 if action.direction == "right" else -1)
            done = self.place >= 3
            return Said(text=f"You are at {self.place}.", reward=float(done), done=done)
        if action.guess == "crash":
            raise RuntimeError("out of order")
        right = action.guess.strip() == str(self.number)
        return Said(text="Right." if right else "Wrong.", reward=float(right), done=right)

    @property
    def state(self) -> State:
        return State(episode_id="x", step_count=0)


if __name__ == "__main__":
    action = Move if "moves" in sys.argv else Guess
    app = create_fastapi_app(Game, action, Said, max_concurrent_envs=MOST_SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
