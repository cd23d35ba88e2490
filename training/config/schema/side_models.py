"""Holds the settings of models beside the policy: judges, simulated users, opponents."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Literal
from urllib.parse import urlsplit

from training.config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

# Names of models and servers stand in metrics, file names and names of tools.
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")


class SideModel(Section):
    """A model that environments, tools and rewards ask, behind an OpenAI-compatible server."""

    base_url: str = ""  #: such as http://127.0.0.1:8000/v1
    model: str = ""  #: its name on the server
    #: environment variable that holds its key; null = it wants none
    key_env: str | None = None
    #: seconds for a question whose turn has come, retries included
    timeout_s: PositiveFloat = 60.0
    max_retries: NonNegativeInt = 4  #: after no connection, 408, 425, 429 or 5xx
    #: requests at once, over all processes of a machine
    max_concurrency: PositiveInt = 16
    #: where answers at temperature 0 are kept: never, in each process, in the run's folder too
    cache: Literal["never", "memory", "disk"] = "memory"
    price_in: NonNegativeFloat = 0.0  #: of a million tokens of questions, for agent/models/…/cost
    price_out: NonNegativeFloat = 0.0  #: of a million tokens of answers
    body: dict[str, Any] = field(default_factory=dict)  #: further fields of every request
    trial: bool = True  #: send a small request before the run, so that a mistake shows


def side_model_problems(models: Mapping[str, SideModel]) -> Iterator[str]:
    """Yields what is wrong with `agent.models`."""
    for name, model in models.items():
        key = f"agent.models.{name}"
        if not NAME.fullmatch(name):
            yield f"{key}: a name has up to 40 letters, digits, _ or -, and begins with a letter"
        if not model.model:
            yield f"{key}.model is empty: give the model's name on the server"
        yield from url_problems(f"{key}.base_url", model.base_url, "http://127.0.0.1:8000/v1")
        if model.base_url.rstrip("/").endswith("/chat/completions"):
            yield f"{key}.base_url={model.base_url}: leave /chat/completions out"
        if model.key_env is not None and not os.environ.get(model.key_env):
            yield (
                f"{key}.key_env={model.key_env} is the name of an environment variable that is "
                "not set here: set it to the key"
            )
        reserved = sorted(model.body.keys() & {"messages", "model", "stream", "n"})
        if reserved:
            yield f"{key}.body: {', '.join(reserved)} cannot be set there"


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
