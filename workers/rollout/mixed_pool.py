"""Several kinds of episodes in one run, as one pool: each is played where its spec says.

Invariant: all pools put what they have to say into one queue, so that the turn loop waits for all
of them at once.
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data.turn_tokens import Tools
from workers.environments.reply import Heard

Replies = queue.SimpleQueue[tuple[Any, Any]]


@dataclass(frozen=True)
class PoolPart:
    """Holds the pool of one kind of episodes.

    Attributes:
        specs: the numbers, among all specs, of those that are its own, in its order.
    """

    pool: Any
    specs: Sequence[int]


class MixedPool:
    """Joins the pools of several kinds of episodes.

    Args:
        makers: of each kind, the numbers of its specs, and what makes its pool of a queue for what
            it says.
    """

    def __init__(self, makers: Sequence[tuple[Sequence[int], Callable[[Replies], Any]]]) -> None:
        self._replies: Replies = queue.SimpleQueue()
        self._parts: list[PoolPart] = []
        try:
            for numbers, make_pool in makers:
                self._parts.append(PoolPart(make_pool(self._replies), numbers))
        except BaseException:
            self.shutdown()
            raise
        # Each spec's pool and its number there.
        self._places: dict[int, tuple[Any, int]] = {}
        for part in self._parts:
            for number_there, number in enumerate(part.specs):
                self._places[number] = (part.pool, number_there)
        # By the key of an episode.
        self._pool_of: dict[int, Any] = {}

    @property
    def tool_schemas(self) -> list[Tools]:
        """Lists each spec's tools."""
        schemas: list[Tools] = [None] * len(self._places)
        for part in self._parts:
            for number, tools in zip(part.specs, part.pool.tool_schemas, strict=True):
                schemas[number] = tools
        return schemas

    def reset(self, key: int, spec_index: int, seed: int, task: Any = None) -> None:
        """Starts an episode."""
        pool, number = self._places[spec_index]
        self._pool_of[key] = pool
        pool.reset(key, number, seed, task)

    def restore(self, key: int, spec_index: int, place: str, *args: Any) -> None:
        """Starts an episode in its midst."""
        pool, number = self._places[spec_index]
        self._pool_of[key] = pool
        pool.restore(key, number, place, *args)

    def finish(self, key: int, ending: str) -> None:
        """Ends an episode."""
        self._pool_of.pop(key).finish(key, ending)

    def __getattr__(self, call: str) -> Callable[..., None]:
        """Returns a call by its name, such as `step`, which goes to the pool of its episode."""
        if call.startswith("_"):
            raise AttributeError(call)

        def forward(key: int, *arguments: Any) -> None:
            getattr(self._pool_of[key], call)(key, *arguments)

        return forward

    def poll(self, timeout: float) -> list[tuple[int, Heard]]:
        """Returns what is new; waits for the first at most `timeout` seconds."""
        return take_new(self._replies, timeout)

    def shutdown(self) -> None:
        """Ends all pools."""
        for part in self._parts:
            part.pool.shutdown()


def take_new(replies: Replies, timeout: float) -> list[tuple[Any, Any]]:
    """Returns what is new in a queue; waits for the first at most `timeout` seconds."""
    new: list[tuple[Any, Any]] = []
    try:
        while True:
            block = timeout > 0 and not new
            new.append(replies.get(block, timeout))
    except queue.Empty:
        return new
