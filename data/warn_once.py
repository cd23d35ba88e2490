"""Logs a warning once in a process, however often its cause is met."""

import logging
from functools import cache


@cache
def warn_once(logger: str, text: str) -> None:
    """Logs a warning, the first time that it is given in this process.

    Args:
        logger: name of the logger, which is the module's `__name__`.
        text: the warning; another text is another warning.
    """
    logging.getLogger(logger).warning(text)
