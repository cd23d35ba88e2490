"""Nine errands, then the door: a game in which luck hides the one turn that matters.

    errand red                        the policy: box2     any box: it adds luck of +sigma or -sigma
    …                                             box4     nine times
    door red                                      door1    1 where it is the cue's door
    (luck and door are paid together, at the end)

The cue says which door is right, and is seen at every turn. The luck in a box is of the task, the
turn and the box, and is not told: its mean over tasks is 0, so that no way to open boxes is better
than another. Success, the right door alone, is `won` of the last step's info. Invariant: the whole
state is in `snapshot()`; equal seeds give equal tasks and luck.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import Any

from custom.env import BaseEnvironment, EnvironmentConfig

CUES = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")
BOXES = ("box1", "box2", "box3", "box4")
DOORS = ("door1", "door2", "door3", "door4")
RIGHT_DOOR = {cue: DOORS[number % len(DOORS)] for number, cue in enumerate(CUES)}


@dataclass
class ErrandsConfig(EnvironmentConfig):
    """Sets how much luck there is, how many turns, and at which of them the door is taken.

    Attributes:
        sigma: the luck in a box is this, or minus this.
        turns: of an episode.
        decision: the number of the turn at which the door is taken; -1: the last.
    """

    sigma: float = 8.0
    turns: int = 10
    decision: int = -1


@dataclass
class ErrandsState:
    """Holds all that a game is: what is seen, what was collected, and the seed of luck to come.

    Attributes:
        cue: one of CUES.
        luck_seed: of the luck in the boxes.
        turn: the number of the turn that comes next.
        luck: collected so far.
        door: that was taken, or what was said in its place; None before.
    """

    cue: str
    luck_seed: int
    turn: int = 0
    luck: float = 0.0
    door: str | None = None


class Errands(BaseEnvironment):
    """Asks for a box at every turn but one, where it asks for a door.

    An answer that names no box, or no door, opens nothing, and the game goes on.
    """

    config_cls = ErrandsConfig

    @property
    def max_turns(self) -> int:  # type: ignore[override]
        """Returns the turns of an episode, which never has fewer."""
        return int(self.config.turns)

    def reset(self, seed: int | None = None) -> str:
        """Draws the cue and the seed of luck."""
        draw = random.Random(seed)
        self.state = ErrandsState(cue=draw.choice(CUES), luck_seed=draw.getrandbits(32))
        return self._observation()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Opens a box or takes a door; pays at the end."""
        state = self.state
        said = action.strip()
        if self._asks_for_door:
            state.door = said
        elif said in BOXES:
            state.luck += self._luck_in(said)
        state.turn += 1
        if state.turn < self.config.turns:
            return self._observation(), 0.0, False, {}
        is_right = state.door == RIGHT_DOOR[state.cue]
        return "", state.luck + float(is_right), True, {"won": is_right}

    def snapshot(self) -> bytes:
        """Returns the whole state, that of the luck to come included."""
        return json.dumps(asdict(self.state)).encode()

    def restore(self, state: bytes) -> None:
        """Goes on from a state of `snapshot`, of this game or another one of the same settings.

        Raises:
            ValueError: the bytes are no state of this game.
        """
        try:
            self.state = ErrandsState(**json.loads(state))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"these {len(state)} bytes are no state of Errands: give what snapshot() returned"
            ) from error

    def reseed(self, seed: int) -> None:
        """Draws the luck to come anew; what has been collected stays."""
        self.state.luck_seed = seed

    def anchor(self) -> str:
        """Names what is known of the state: turn, cue and door, and nothing of the luck."""
        return f"{self.state.turn} {self.state.cue} {self.state.door}"

    def sample_action(self, generator: random.Random) -> str:
        """Draws a box, or a door where one is asked for."""
        return generator.choice(DOORS if self._asks_for_door else BOXES)

    @property
    def _asks_for_door(self) -> bool:
        return self.state.turn == self.config.decision % self.config.turns

    def _observation(self) -> str:
        """Returns what the policy reads: what is asked for, and the cue."""
        return f"{'door' if self._asks_for_door else 'errand'} {self.state.cue}"

    def _luck_in(self, box: str) -> float:
        """Draws the luck in a box at this turn."""
        draw = random.Random(f"{self.state.luck_seed} {self.state.turn} {box}")
        return float(draw.choice((-1, 1)) * self.config.sigma)
