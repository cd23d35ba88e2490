"""Programs that are functions: `async def solve(task, client) -> reward`, called where environments
live.

The client is OpenAI's, connected to the same server that commands speak to; beside it a function
may take `seed`, `task_dir` and what services beside the policy offer, such as `models`. Invariant:
a function that is given up ends, wherever it waits: its thread wakes up often.
"""

import asyncio
import functools
import inspect
import json
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from custom.env import BadEnvironment
from custom.env_calls import check_reward, located, takes_keyword
from custom.side_services import SideService, service_arguments, set_up_services
from data.loading import load_extern_object

# How often a thread that only waits runs a line of Python, in which it can be stopped.
WAKE_S = 0.2
# OpenAI's SDK imports half of itself with its first request.
CLIENT = (
    "openai",
    "openai.resources.chat.completions.completions",
    "httpx",
    "httpcore",
    "anyio._backends._asyncio",
)


@dataclass(frozen=True)
class FunctionSpec:
    """Describes a function in a file; it is loaded where it then runs."""

    path: str
    name: str
    services: tuple[SideService, ...] = ()

    @property
    def libraries(self) -> tuple[str, ...]:
        """Returns what is imported ahead for it: the client, and what its first request imports."""
        return CLIENT

    @property
    def source(self) -> str:
        """Returns what messages call it."""
        return f"{self.path}:{self.name}"

    @staticmethod
    def of(source: str, services: tuple[SideService, ...]) -> "FunctionSpec":
        """Reads FILE.py:NAME."""
        path, _, name = source.rpartition(":")
        return FunctionSpec(path, name, services)

    def build(self) -> "FunctionProgram":
        """Loads the function, beside the services that it may ask."""
        set_up_services(self.services)
        function = load_extern_object(self.path, self.name)
        return FunctionProgram(function, service_arguments(self.services))


class FunctionProgram:
    """Calls a function with its task and a client, in an event loop of its own."""

    tool_schemas: None = None

    def __init__(
        self, function: Callable[..., Any], beside: Mapping[str, Any] | None = None
    ) -> None:
        self.function = function
        # What it may take of services, by the arguments' names.
        self.beside = dict(beside or {})
        self.where = located(function, "programs.function")
        if not inspect.iscoroutinefunction(function):
            raise BadEnvironment(
                f"{self.where} is no `async def`; write async def solve(task, client)"
            )

    def run(
        self, task: str, seed: int, base_url: str, token: str, task_dir: str = ""
    ) -> float | None:
        """Returns what the function does; None, of a function that pays by its requests alone.

        Args:
            task: as JSON text.
            base_url, token: of the server, with the protocol's `/v1`.
            task_dir: a folder of its own.
        """
        offered = {"task": json.loads(task), "seed": seed, "task_dir": task_dir}
        reward = asyncio.run(self._solve(offered, base_url, token))
        return None if reward is None else check_reward(reward, self.where)

    async def _solve(self, given: Mapping[str, Any], base_url: str, token: str) -> Any:
        import openai

        # Not through a proxy of the machine's, which the environment may name.
        http = openai.DefaultAsyncHttpxClient(verify=certificates(), trust_env=False)
        waking = asyncio.ensure_future(wake_often())
        try:
            async with openai.AsyncOpenAI(
                base_url=base_url, api_key=token, http_client=http
            ) as client:
                offered = {**given, "client": client, **self.beside}
                arguments = {
                    name: value
                    for name, value in offered.items()
                    if takes_keyword(self.function, name)
                }
                return await self.function(**arguments)
        finally:
            waking.cancel()

    def close(self) -> None:
        """Has nothing to close."""


@functools.cache
def certificates() -> ssl.SSLContext:
    """Returns the web's certificates, which all clients share: to read them takes 17 ms."""
    import httpx

    return httpx.create_ssl_context()


async def wake_often() -> None:
    """Runs a line of Python now and then."""
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(WAKE_S)
