"""A connection to an MCP server: opened when it is first needed, bounded in all that it takes.

The official client (the package `mcp`) speaks the protocol, in the process's thread for servers;
a server that is a process runs behind features/mcp/mcp_guard.py. Invariant: a call returns a
result, or raises ToolError or TimeoutError, within its deadline, whatever the server does.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from custom.env_calls import cut_middle
from custom.loop_thread import LOOP_THREAD
from custom.tools.definition import ToolError
from features.mcp.mcp_server import McpServer as McpServer

# Bytes of one HTTP response.
MAX_RESPONSE_BYTES = 16 * 2**20
# Tools of one server, and pages of its list.
MAX_TOOLS = 200
# Seconds for a connection to be closed.
CLOSE_S = 5.0
MAX_ERROR_CHARS = 300
# The program that runs a server: behind it ROOT, the server's name and its command.
GUARD = """
import sys
sys.path.insert(0, sys.argv[1])
from features.mcp.mcp_guard import main
main(sys.argv[2], sys.argv[3:])
"""
ROOT = Path(__file__).resolve().parents[2]


class McpSession:
    """Connects to a server; one thread calls at a time."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        # Belongs to the connection that is open, if one is.
        self._session: Any = None
        self._owner: asyncio.Task[None] | None = None
        self._leave: asyncio.Event | None = None
        self._is_used = False
        self._has_ended = False

    # For callers

    def tools(self) -> list[Any]:
        """Lists the server's tools, as the protocol has them. Raises ValueError where it cannot."""
        try:
            return LOOP_THREAD.run(self._list_tools())
        except (ToolError, TimeoutError) as error:
            raise ValueError(str(error)) from None

    def begin_episode(self) -> None:
        """Gives the episode a new connection, unless the one there is was not used."""
        is_over = self._has_ended or (self.server.session == "episode" and self._is_used)
        if is_over:
            self.close()

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a tool and returns the protocol's result; a call that fails raises."""
        return LOOP_THREAD.run(self._call(name, dict(arguments)))

    def close(self) -> None:
        """Closes the connection, if one is open; a server that is a process ends."""
        self._is_used = False
        self._has_ended = False
        if self._owner is not None:
            LOOP_THREAD.run(self._close())

    # In the loop

    async def _list_tools(self) -> list[Any]:
        import mcp_types

        await self._open()
        tools: list[Any] = []
        cursor = None
        async with self._deadline(self.server.start_timeout_s, "list its tools"):
            with self._as_tool_error():
                while len(tools) <= MAX_TOOLS:
                    params = mcp_types.PaginatedRequestParams(cursor=cursor)
                    page = await self._session.list_tools(params=params)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return tools
        raise ToolError(f"MCP server {self.server.name} lists more than {MAX_TOOLS} tools")

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._has_ended:
            raise ToolError(f"MCP server {self.server.name} has ended in this episode")
        await self._open()
        self._is_used = True
        async with self._deadline(self.server.timeout_s, f"answer {name}"):
            with self._as_tool_error():
                return await self._session.call_tool(name, arguments)

    @asynccontextmanager
    async def _deadline(self, seconds: float, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise TimeoutError(
                f"MCP server {self.server.name} did not {what} within {seconds:g} s"
            ) from None

    @contextlib.contextmanager
    def _as_tool_error(self) -> Any:
        """Makes whatever the client raises the error of a call, and notices a server's end."""
        try:
            yield
        except (TimeoutError, ToolError):
            raise
        except Exception as error:
            if self._owner is None or self._owner.done() or _says_closed(error):
                self._has_ended = True
            raise ToolError(f"MCP server {self.server.name}: {_described(error)}") from None

    async def _open(self) -> None:
        """Opens the connection where none is open. Raises ToolError or TimeoutError."""
        if self._owner is not None:
            return
        is_ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        # The client's contexts have to be left in the task that entered them.
        self._owner = asyncio.create_task(self._hold(is_ready, self._leave))
        try:
            async with self._deadline(self.server.start_timeout_s, "start"):
                self._session = await is_ready
        except BaseException:
            # It waits for the server, and not for `leave`.
            self._owner.cancel()
            await self._close()
            raise

    async def _hold(self, is_ready: asyncio.Future[Any], leave: asyncio.Event) -> None:
        """Holds the connection open until `leave` is set."""
        from mcp.client.session import ClientSession

        try:
            async with AsyncExitStack() as stack:
                transport = await stack.enter_async_context(_transport(self.server))
                session = await stack.enter_async_context(ClientSession(*transport))
                await session.initialize()
                is_ready.set_result(session)
                await leave.wait()
        # A group of the client's tasks raises whatever one of them does.
        except Exception as error:
            if not is_ready.done():
                is_ready.set_exception(
                    ToolError(f"MCP server {self.server.name} does not start: {_described(error)}")
                )
            elif not leave.is_set():
                self._has_ended = True

    async def _close(self) -> None:
        owner = self._owner
        self._owner = None
        self._session = None
        if owner is None or self._leave is None:
            return
        self._leave.set()
        await asyncio.wait([owner], timeout=CLOSE_S)
        if not owner.done():
            owner.cancel()
            await asyncio.wait([owner], timeout=CLOSE_S)


@asynccontextmanager
async def _transport(server: McpServer) -> AsyncIterator[Any]:
    """Connects to a server; yields the streams of its messages."""
    from mcp.client.stdio import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    # Lines of a server that are no message would be logged, a traceback each. The client's
    # session has no name of its own.
    for name in ("mcp.client.stdio", "mcp.client.streamable_http", "client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if server.command is not None:
        words = [server.name, server.command, *server.args]
        handed_on = {name: os.environ[name] for name in server.env_from if name in os.environ}
        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-c", GUARD, str(ROOT), *words],
            env=handed_on | dict(server.env),
        )
        async with _standard_error() as errors, stdio_client(parameters, errors) as streams:
            yield streams
        return
    assert server.url is not None
    async with (
        _http_client(server) as client,
        streamable_http_client(server.url, http_client=client) as streams,
    ):
        yield streams


@asynccontextmanager
async def _standard_error() -> AsyncIterator[Any]:
    """Yields the process's standard error; nothing where it has none, as in some notebooks."""
    if sys.__stderr__ is not None:
        yield sys.__stderr__
        return
    with open(os.devnull, "w") as nothing:
        yield nothing


def _http_client(server: McpServer) -> Any:
    """Makes an HTTP client with the server's headers, whose responses are bounded."""
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = MAX_RESPONSE_BYTES
            async for part in self.stream:
                left -= len(part)
                if left < 0:
                    raise httpx2.ReadError(f"a response of more than {MAX_RESPONSE_BYTES:,} bytes")
                yield part

        async def aclose(self) -> None:
            await self.stream.aclose()

    class BoundedTransport(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            response = await super().handle_async_request(request)
            response.stream = Bounded(response.stream)
            return response

    # A text that nobody unpacks is as long as it looks.
    headers = {"Accept-Encoding": "identity"}
    for header, name in server.headers_env.items():
        headers[header] = os.environ.get(name, "")
    timeout = httpx2.Timeout(server.start_timeout_s, read=None)
    return httpx2.AsyncClient(headers=headers, timeout=timeout, transport=BoundedTransport())


def _says_closed(error: Exception) -> bool:
    return "closed" in f"{type(error).__name__} {error}".lower()


def _described(error: BaseException) -> str:
    """Describes an error in a line; of a group its first one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return cut_middle(text, MAX_ERROR_CHARS)
