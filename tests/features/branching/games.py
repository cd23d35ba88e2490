"""The quickstart's game with states that can be had again, or cannot, each in another way."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from typing import Any

from examples.quickstart_game import TerseGuessNumber

# The most states that a trial of two episodes restores.
TRIED = 6


class Held(TerseGuessNumber):
    """Pays a hidden number at the end, beside the game's own reward, and holds all its state."""

    def reset(self, seed: int | None = None) -> str:
        said = super().reset(seed)
        self.luck = (seed or 0) % 7
        return said

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        said, reward, done, info = super().step(action)
        self.luck = self.luck * 3 % 7
        return said, reward + 0.5 * self.luck * done, done, info

    def snapshot(self) -> bytes:
        return json.dumps([self.number, self.turns_left, self.luck]).encode()

    def restore(self, state: bytes) -> None:
        self.number, self.turns_left, self.luck = json.loads(state)

    def reseed(self, seed: int) -> None:
        self.luck = seed % 7


class Plain(TerseGuessNumber):
    """Offers nothing, and can be copied."""


class Liar(Held):
    """Forgets in its snapshot what is paid at the end; what is seen is right."""

    def restore(self, state: bytes) -> None:
        super().restore(state)
        self.luck = 5

    def __reduce__(self) -> Any:
        raise TypeError("this environment cannot be copied")


class Uncopied(TerseGuessNumber):
    """Can neither be copied nor saved."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.lock = threading.Lock()


class Clocked(Uncopied):
    """Pays what the clock says."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        said, reward, done, info = super().step(action)
        return said, reward + time.time() % 1 * done, done, info


class Heavy(Held):
    """Has states of two megabytes."""

    def snapshot(self) -> bytes:
        return super().snapshot() + b" " * (2 << 20)


class Text(Held):
    """Returns a snapshot that is no bytes."""

    def snapshot(self) -> Any:
        return "state"


class BadRestore(Held):
    """Raises where it is to be restored."""

    def restore(self, state: bytes) -> None:
        raise RuntimeError("no way back")


class LateFaults(Held):
    """Fails in every fourth restore, once the trial is over: raises, or hangs."""

    def restore(self, state: bytes) -> None:
        super().restore(state)
        restores = int(os.environ["RESTORES"]) + 1
        os.environ["RESTORES"] = str(restores)
        fails = restores > TRIED and restores % 4 == 0
        if fails and os.environ["FAULT"] == "raise":
            raise RuntimeError("no way back")
        self.hangs = fails and os.environ["FAULT"] == "hang"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        while getattr(self, "hangs", False):
            time.sleep(0.01)
        return super().step(action)

    def reset(self, seed: int | None = None) -> str:
        self.hangs = False
        return super().reset(seed)


class Wordy(Held):
    """Says at every turn, of which there are three, as many words as its seed draws."""

    WORDS = 1200

    def reset(self, seed: int | None = None) -> str:
        super().reset(seed)
        self.turns_left = 3
        return self._said()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.turns_left -= 1
        won = action.strip() == str(self.number)
        return self._said(), float(won), self.turns_left == 0, {"won": won}

    def _said(self) -> str:
        draw = random.Random(f"{self.number} {self.luck} {self.turns_left}")
        return " ".join(str(draw.randint(1, 10)) for _ in range(self.WORDS))
