"""Logs connections that clients of the programs' server break.

A program may drop a stream, or send what is no HTTP, as often as it likes, for each of which
aiohttp logs a traceback. Invariant: such a fault has one line a server at most, and is counted;
an error of the server's own keeps its traceback.
"""

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any

from aiohttp import ClientError, web_exceptions
from aiohttp.http_exceptions import HttpProcessingError

from data.texts import text_of

# A client brings these about: aiohttp's own classes, and those of the connection.
CLIENTS_FAULTS = (
    ConnectionError,
    asyncio.IncompleteReadError,
    ClientError,
    HttpProcessingError,
    web_exceptions.HTTPException,
)


class ConnectionLog(logging.LoggerAdapter[logging.Logger]):
    """Logs what aiohttp's server does; the first fault of a client's as a line, later ones not.

    Attributes:
        faults: how often clients broke a connection.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self.faults = 0

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Leaves a record as it is."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Logs, or counts where the record is of a client's fault."""
        error = kwargs.get("exc_info")
        if level < logging.ERROR or not isinstance(error, CLIENTS_FAULTS):
            super().log(level, msg, *args, **kwargs)
            return
        self.faults += 1
        if self.faults == 1:
            text = " ".join(f"{type(error).__name__}: {text_of(error)}".split())[:200]
            super().log(
                logging.WARNING,
                "a program broke its connection (%s); further ones are counted, not told",
                text,
            )

    def tell_count(self) -> None:
        """Logs how many faults there were, where there was more than the one that was told."""
        if self.faults > 1:
            self.logger.warning("programs broke %d connections in all", self.faults)
        self.faults = 0
