"""The quickstart's game with states that can be had again, or cannot, each in another way."""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
import time
from typing import Any

from examples.quickstart_game import TerseGuessNumber

MEGABYTE = 1 << 20
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


class Hanging(Held):
    """Hangs where it is to be restored, for as long as a test waits."""

    def restore(self, state: bytes) -> None:
        time.sleep(2)


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


class Global(Held):
    """Keeps its number where all games of a process find it."""

    number = 0

    def reset(self, seed: int | None = None) -> str:
        said = super().reset(seed)
        Global.number = self.__dict__.pop("number")
        return said

    def restore(self, state: bytes) -> None:
        super().restore(state)
        Global.number = self.__dict__.pop("number")


class Filed(Plain):
    """Keeps the turns that are left in a file, of which a copy has the name."""

    def reset(self, seed: int | None = None) -> str:
        said = super().reset(seed)
        handle, self.path = tempfile.mkstemp()
        os.write(handle, str(self.turns_left).encode())
        os.close(handle)
        return said

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        with open(self.path) as file:
            self.turns_left = int(file.read())
        said, reward, done, info = super().step(action)
        with open(self.path, "w") as file:
            file.write(str(self.turns_left))
        return f"{said} {self.turns_left}", reward, done, info


class Drawn(Held):
    """Draws another number at each reset, whatever the seed."""

    def reset(self, seed: int | None = None) -> str:
        return super().reset(random.SystemRandom().randrange(1 << 30))


class Empty(Held):
    """Returns no snapshot."""

    def snapshot(self) -> Any:
        return None


class LateHeavy(Held):
    """Has states of 100 megabytes, from the third turn of play on, once the trial is over."""

    def snapshot(self) -> bytes:
        taken = int(os.environ["TAKEN"]) + 1
        os.environ["TAKEN"] = str(taken)
        heavy = taken > 2 * TRIED and self.turns_left < 4
        return super().snapshot() + b" " * (100 * MEGABYTE * heavy)


class OnceOnly(Held):
    """Raises in whatever goes on from a restored state."""

    restored = False

    def reset(self, seed: int | None = None) -> str:
        self.restored = False
        return super().reset(seed)

    def restore(self, state: bytes) -> None:
        super().restore(state)
        restores = int(os.environ["RESTORES"]) + 1
        os.environ["RESTORES"] = str(restores)
        self.restored = restores > TRIED

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if self.restored:
            raise RuntimeError("it goes on only once")
        return super().step(action)


class Endless(Held):
    """Goes on for ever once it was restored, and says a word a turn."""

    def restore(self, state: bytes) -> None:
        super().restore(state)
        restores = int(os.environ["RESTORES"]) + 1
        os.environ["RESTORES"] = str(restores)
        self.endless = restores > TRIED

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if getattr(self, "endless", False):
            return "lower", 0.0, False, {"won": False}
        return super().step(action)


class Even(Held):
    """Pays every game the same."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        said, _, done, info = super().step(action)
        return said, float(done), done, info


class Short(Held):
    """Ends with its first turn."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        said, reward, _, info = super().step(action)
        return said, reward + 0.1 * self.luck, True, info


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


class Crashing(Held):
    """Raises in every nineteenth step of a process."""

    steps = 0

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        Crashing.steps += 1
        if Crashing.steps % 19 == 0:
            raise RuntimeError("now and then")
        return super().step(action)


class GlobalLuck(Plain):
    """Draws what it pays from the generator that all of a process share, seeded at the reset."""

    def reset(self, seed: int | None = None) -> str:
        random.seed(seed)
        return super().reset(seed)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        said, reward, done, info = super().step(action)
        return said, reward + random.random(), done, info
