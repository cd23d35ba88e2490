"""An MCP server as agents are handed it: a source of tools."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from features.mcp.settings import McpSettings


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """Describes an MCP server: a command, or the URL of one that runs.

    Attributes:
        name: what the config calls it.
        command, args, env: of a process; `env_from` names variables that it is handed as they are.
        url: of a server by streamable HTTP; `headers_env` maps its headers to the environment
            variables that hold them.
        session: episode: every episode begins with a new connection, which for a command is a new
            process; slot: a place for episodes keeps its connection.
        tools: those that the model is offered; empty: all.
        timeout_s: of a call, in seconds; start_timeout_s: until the tools are listed.
    """

    # Sources of one kind are added together, after the agent's other tools.
    added_by: ClassVar[str] = "features.mcp.mcp_tools:add_mcp_tools"

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    env_from: tuple[str, ...] = ()
    url: str | None = None
    headers_env: Mapping[str, str] = field(default_factory=dict)
    session: Literal["episode", "slot"] = "episode"
    tools: tuple[str, ...] = ()
    timeout_s: float = 30.0
    start_timeout_s: float = 60.0


def servers(config: Any) -> list[McpServer]:
    """Returns the config's servers, as sources of tools."""
    chosen = config.section(McpSettings).servers
    return [McpServer(name=name, **vars(server)) for name, server in chosen.items()]
