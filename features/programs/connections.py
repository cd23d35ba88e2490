"""The connections of the programs' server: how many there may be, and which of them are closed.

    a connection that                           is closed
    sends no request                            after HEADERS_S, or where room is needed
    waits between two requests                  after IDLE_S, where its episode has too many, where
                                                room is needed, and when its episode has ended
    is being answered                           never; one too many of its episode hears 429

Invariant: no episode takes more than a quarter of all, and a new connection finds room as long as
any is idle: what one program holds open shuts no other out.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from features.programs.protocols import ProtocolError

# Connections that may be open, and how many of them an episode may have.
MAX_CONNECTIONS = 4096
MAX_OF_EPISODE = 512
# The longest that a connection may take to send its first request's headers, in seconds.
HEADERS_S = 30.0
# The longest that a connection waits between two requests; clients' own limits are shorter.
IDLE_S = 75.0
# A connection has begun so many seconds after it was accepted.
BEGINS_S = 5.0
# So many are kept before those that are closed are looked for.
SWEEP_FROM = 64


@dataclass(eq=False)
class Connection:
    """Holds a connection.

    Attributes:
        since: when it was accepted, in seconds of the event loop.
        token: of the episode that it asked for last; "": of none.
        is_busy: a request of it is being answered.
        deadline: closes it where no request comes; None: one has come.
    """

    handler: web.RequestHandler
    since: float
    token: str = ""
    is_busy: bool = False
    deadline: asyncio.TimerHandle | None = None

    @property
    def can_be_closed(self) -> bool:
        """Returns whether it is open, and nothing of it is being answered."""
        return self.handler.transport is not None and not self.is_busy

    def is_lost(self, now: float) -> bool:
        """Returns whether it is closed; one that was just accepted has no transport either."""
        return self.handler.transport is None and now > self.since + BEGINS_S


class Connections:
    """Keeps the connections of a server, which belongs to the running event loop.

    Args:
        make_handler: makes what handles a new connection.
    """

    def __init__(self, make_handler: Callable[[], web.RequestHandler]) -> None:
        self._make_handler = make_handler
        self._loop = asyncio.get_running_loop()
        # In the order in which they were used last; those that clients closed are among them till
        # they are swept out.
        self._kept: dict[web.RequestHandler, Connection] = {}
        self._held: Counter[str] = Counter()
        self._swept_at = SWEEP_FROM

    def accept(self) -> asyncio.BaseProtocol:
        """Makes what handles a new connection; one for which there is no room is closed."""
        most = most_connections()
        if len(self._kept) >= min(self._swept_at, most):
            self._sweep()
        if len(self._kept) >= most and not self._make_room():
            return ClosesAtOnce()
        handler = self._make_handler()
        connection = Connection(handler, self._loop.time())
        connection.deadline = self._loop.call_later(HEADERS_S, self._close, connection)
        self._keep(connection)
        return handler

    @contextmanager
    def answering(self, handler: web.RequestHandler) -> Iterator[Connection]:
        """Keeps a connection open while a request of it is being answered."""
        connection = self._kept.get(handler) or Connection(handler, self._loop.time())
        self._forget(connection)
        connection.is_busy = True
        self._keep(connection)
        try:
            yield connection
        finally:
            self._forget(connection)
            connection.is_busy = False
            if handler.transport is not None:
                # The last one to be closed of those that are idle.
                self._keep(connection)

    def assign(self, connection: Connection, token: str) -> None:
        """Counts a connection among those of an episode.

        Raises:
            ProtocolError: the episode has too many, and none of them is idle; it is none of them.
        """
        self._count(connection, -1)
        connection.token = token
        self._count(connection, 1)
        most = most_of_episode()
        if self._held[token] <= most:
            return
        self._sweep()
        idle = [other for other in self._of(token) if other.can_be_closed]
        if idle:
            self._close(idle[0])
        elif self._held[token] > most:
            self._count(connection, -1)
            connection.token = ""
            self._count(connection, 1)
            raise ProtocolError(
                f"this episode has {most} requests on their way, as many as it may: send fewer at "
                "once",
                "too_many_requests",
                429,
            )

    def close_idle(self, token: str) -> None:
        """Closes what an episode that has ended holds open."""
        if self._held[token]:
            for connection in self._of(token):
                if connection.can_be_closed:
                    self._close(connection)

    def _of(self, token: str) -> list[Connection]:
        """Lists an episode's connections, the one first that was used least recently."""
        return [connection for connection in self._kept.values() if connection.token == token]

    def _keep(self, connection: Connection) -> None:
        self._kept[connection.handler] = connection
        self._count(connection, 1)

    def _forget(self, connection: Connection) -> None:
        if connection.deadline is not None:
            connection.deadline.cancel()
            connection.deadline = None
        if self._kept.pop(connection.handler, None) is not None:
            self._count(connection, -1)

    def _count(self, connection: Connection, change: int) -> None:
        self._held[connection.token] += change
        if not self._held[connection.token]:
            del self._held[connection.token]

    def _close(self, connection: Connection) -> None:
        """Closes a connection; what was written to it is still sent."""
        self._forget(connection)
        connection.handler.force_close()

    def _sweep(self) -> None:
        """Forgets the connections that are closed."""
        now = self._loop.time()
        for connection in list(self._kept.values()):
            if connection.is_lost(now):
                self._forget(connection)
        self._swept_at = max(SWEEP_FROM, 2 * len(self._kept))

    def _make_room(self) -> bool:
        """Closes one that is idle, of the episode that has most; returns whether there was one."""
        idle = [connection for connection in self._kept.values() if connection.can_be_closed]
        if not idle:
            return False
        # The first of equals was used least recently.
        self._close(max(idle, key=lambda connection: self._held[connection.token]))
        return True


class ClosesAtOnce(asyncio.Protocol):
    """Closes its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes it."""
        transport.close()


def most_connections() -> int:
    """Returns how many connections may be open: of the files of this process half are for others.

    A program that leaks connections would take from the rest what starts their processes.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)


def most_of_episode() -> int:
    """Returns how many connections an episode may have."""
    return min(MAX_OF_EPISODE, max(most_connections() // 4, 1))
