"""Holds the settings of MCP servers, whose tools stand beside `agent.tools`."""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Literal

from training.config.schema.side_models import NAME, url_problems
from training.config.section import PositiveFloat, Section


class McpServerChoice(Section):
    """An MCP server. Give `command`, of a process, or `url`, of streamable HTTP."""

    command: str | None = None  #: program that speaks MCP over its standard input and output
    args: tuple[str, ...] = ()  #: its arguments
    #: environment variables for it, as values that the run's records show
    env: dict[str, str] = field(default_factory=dict)
    #: names of this process's environment variables that it is handed as they are
    env_from: tuple[str, ...] = ()
    url: str | None = None  #: such as http://127.0.0.1:8000/mcp
    #: header: the name of the environment variable that holds it
    headers_env: dict[str, str] = field(default_factory=dict)
    #: episode: each episode begins with a new connection, or process; slot: it stays open
    session: Literal["episode", "slot"] = "episode"
    tools: tuple[str, ...] = ()  #: those that the model is offered; empty = all
    timeout_s: PositiveFloat = 30.0  #: seconds for a call
    start_timeout_s: PositiveFloat = 60.0  #: seconds until its tools are listed


def mcp_server_problems(servers: Mapping[str, McpServerChoice]) -> Iterator[str]:
    """Yields what is wrong with `agent.mcp_servers`; none of them is started."""
    for name, server in servers.items():
        key = f"agent.mcp_servers.{name}"
        if not NAME.fullmatch(name):
            yield f"{key}: a name has up to 40 letters, digits, _ or -, and begins with a letter"
        if (server.command is None) == (server.url is None):
            yield f"{key}: give command, of a process, or url, of a server that runs"
        if server.url is not None:
            yield from url_problems(f"{key}.url", server.url, "http://127.0.0.1:8000/mcp")
        if server.command is not None and shutil.which(server.command) is None:
            yield f"{key}.command={server.command}: there is no such program here"
        for variable in (*server.env_from, *server.headers_env.values()):
            if not os.environ.get(variable):
                yield (
                    f"{key}: {variable} is to be the name of an environment variable, and none "
                    "of that name is set here"
                )
