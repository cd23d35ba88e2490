"""Environments and programs of one run, as one pool: each episode is played where its spec says.

Invariant: both put what they have to say into one queue, so that the turn loop waits for both at
once.
"""

import queue
from collections.abc import Callable, Sequence
from typing import Any

from custom.agent import AgentSpec
from features.programs.exchange import Answer, Json
from features.programs.pool import ProgramPool, Replies, take_new
from features.programs.spec import ProgramSpec
from workers.environments.pool import EnvironmentPool


class MixedPool:
    """Joins an environment pool and a pool of programs.

    Args:
        specs: of all; an episode names its own by its index.
        make_environments, make_programs: make the two, of those specs that are theirs.
    """

    def __init__(
        self,
        specs: Sequence[AgentSpec | ProgramSpec],
        make_environments: Callable[[list[AgentSpec], Replies], EnvironmentPool],
        make_programs: Callable[[dict[int, ProgramSpec], Replies], ProgramPool],
    ) -> None:
        self._replies: Replies = queue.SimpleQueue()
        agents = [spec for spec in specs if isinstance(spec, AgentSpec)]
        # The number of a spec among those of the environment pool.
        self._number: dict[int, int] = {}
        programs: dict[int, ProgramSpec] = {}
        for index, spec in enumerate(specs):
            if isinstance(spec, ProgramSpec):
                programs[index] = spec
            else:
                self._number[index] = len(self._number)
        self._size = len(specs)
        self._programs = make_programs(programs, self._replies)
        self._environments = make_environments(agents, self._replies) if agents else None
        self._pool_of: dict[int, Any] = {}

    @property
    def tool_schemas(self) -> list[list[Json] | None]:
        """Lists each spec's tools; a program brings its own with each request."""
        schemas: list[list[Json] | None] = [None] * self._size
        if self._environments is not None:
            built = self._environments.tool_schemas
            for index, number in self._number.items():
                schemas[index] = built[number]
        return schemas

    def reset(self, key: int, spec_index: int, seed: int, task: Json | None = None) -> None:
        """Starts an episode."""
        number = self._number.get(spec_index)
        if number is None:
            self._pool_of[key] = self._programs
            self._programs.reset(key, spec_index, seed, task)
            return
        assert self._environments is not None
        self._pool_of[key] = self._environments
        self._environments.reset(key, number, seed, task)

    def step(self, key: int, text: str) -> None:
        """Sends the policy's response to an environment."""
        self._pool_of[key].step(key, text)

    def answer(self, key: int, number: int, answer: Answer) -> None:
        """Answers a request of a program."""
        self._programs.answer(key, number, answer)

    def finish(self, key: int, ending: str) -> None:
        """Ends an episode."""
        self._pool_of.pop(key).finish(key, ending)

    def poll(self, timeout: float) -> list[tuple[Any, Any]]:
        """Returns what is new; waits for the first at most `timeout` seconds."""
        return take_new(self._replies, timeout)

    def shutdown(self) -> None:
        """Ends both."""
        self._programs.shutdown()
        if self._environments is not None:
            self._environments.shutdown()
