"""A text adventure: find the key somewhere in a house, then open the door.

The house differs with the seed.
"""

import random
from typing import Any

from custom.env import BaseEnvironment

ROOMS = ("hall", "kitchen", "cellar", "attic", "library")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}


class TextAdventure(BaseEnvironment):
    """Understands `go north`, `take key`, `open door`.

    The key is worth 0.2, the open door 1; a turn costs nothing.
    """

    def reset(self, seed: int | None = None) -> str:
        """Builds a house and starts in the hall, where the door is."""
        draw = random.Random(seed)
        self.exits: dict[str, dict[str, str]] = {room: {} for room in ROOMS}
        # Each room leads to an earlier one, so all can be reached.
        for number, room in enumerate(ROOMS[1:], start=1):
            free_ways = []
            for other in ROOMS[:number]:
                for way in OPPOSITE:
                    if way not in self.exits[other]:
                        free_ways.append((other, way))
            other, way = draw.choice(free_ways)
            self.exits[other][way] = room
            self.exits[room][OPPOSITE[way]] = other
        self.key_room: str | None = draw.choice(ROOMS[1:])
        self.room = ROOMS[0]
        return (
            f"Find the key and open the door in the hall. Commands: go, take, open.\n{self._look()}"
        )

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Carries out the command, if it is one."""
        match action.lower().strip(" .!").split():
            case ["go", way] if way in self.exits[self.room]:
                self.room = self.exits[self.room][way]
                return self._look(), 0.0, False, {}
            case ["take", "key"] if self.key_room == self.room:
                self.key_room = None
                return "You have the key.", 0.2, False, {}
            case ["open", "door"] if self.room == "hall" and self.key_room is None:
                self._done = True
                return "The door opens. You are free!", 1.0, True, {}
        return f"You cannot do that here. {self._look()}", 0.0, False, {}

    def _look(self) -> str:
        seen = ""
        if self.key_room == self.room:
            seen = " There is a key."
        elif self.room == "hall":
            seen = " There is a door."
        return f"You are in the {self.room}.{seen} You can go {', '.join(self.exits[self.room])}."
