"""Checks names and URLs of servers that settings of several sections give."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

# Names of models and servers stand in metrics, file names and names of tools.
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")


def url_problems(key: str, url: str, example: str) -> Iterator[str]:
    """Yields why a setting is no URL of a server; a password in it would be written to records."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        has_password = parts.username is not None or parts.password is not None
        # An error where it is no number.
        _ = parts.port
    except ValueError:
        is_url = has_password = False
    if not is_url:
        yield f"{key}={url} is no URL of a server; it is written as in {example}"
    elif has_password:
        yield (
            f"{key} has a user or password in it, which the run's records would show: give the "
            "key in an environment variable"
        )
