"""The settings of MCP servers, whose tools stand beside `agent.tools`."""

import importlib.metadata
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from training.config.names_and_urls import NAME, url_problems
from training.config.section import PositiveFloat, Section

if TYPE_CHECKING:
    pass

# The major version of the package whose names are used here.
MCP_VERSION = "2"


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


class McpSettings(Section):
    """Tools that other programs serve by the Model Context Protocol."""

    #: servers by name, whose tools stand beside agent.tools: command, args, … or url
    #: (features/mcp/README.md)
    servers: dict[str, McpServerChoice] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with a server's settings, or that the package is missing."""
        yield from mcp_server_problems(self.servers)
        if self.servers:
            try:
                require_mcp()
            except ValueError as error:
                yield str(error)


def mcp_server_problems(servers: Mapping[str, McpServerChoice]) -> Iterator[str]:
    """Yields what is wrong with `mcp.servers`; none of them is started."""
    for name, server in servers.items():
        key = f"mcp.servers.{name}"
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


def require_mcp() -> None:
    """Raises ValueError where the package is missing, or another major version is there."""
    try:
        version = importlib.metadata.version("mcp")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"mcp.servers needs the package: pip install 'mcp>={MCP_VERSION},<3'"
        ) from None
    if version.partition(".")[0] != MCP_VERSION:
        raise ValueError(
            f"mcp.servers needs mcp {MCP_VERSION}.x, and {version} is installed: "
            f"pip install 'mcp>={MCP_VERSION},<3'"
        )
