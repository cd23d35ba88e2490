"""Logs a warning once in a process, however often its cause is met."""

import logging
from functools import cache
from threading import Event


@cache
def warn_once(logger: str, text: str) -> None:
    """Logs a warning, the first time that it is given in this process.

    Args:
        logger: name of the logger, which is the module's `__name__`.
        text: the warning; another text is another warning.
    """
    logging.getLogger(logger).warning(text)


def warn_first(logger: str, subject: str, text: str) -> None:
    """Logs a warning, the first time that there is one of this subject in this process.

    Args:
        subject: what it is about; further texts about it are not logged.
    """
    was_told = _was_told(logger, subject)
    if not was_told.is_set():
        was_told.set()
        logging.getLogger(logger).warning("%s", text)


@cache
def _was_told(logger: str, subject: str) -> Event:
    """Returns what is set once a subject was warned of."""
    return Event()
