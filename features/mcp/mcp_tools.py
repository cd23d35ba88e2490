"""Tools of MCP servers beside an agent's own: the model sees no difference.

Invariant: a tool's name is its own where no other has it, else SERVER_NAME; whatever a server
answers is text, or the error of that call.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from custom.env import Task
from custom.tools.definition import Tool, ToolDefinition, ToolError
from custom.tools.registry import ToolRegistry
from features.mcp.mcp_server import McpServer
from features.mcp.mcp_session import McpSession
from features.mcp.settings import require_mcp

# So much of a description is shown to the model.
MAX_DESCRIPTION_CHARS = 4_000


class McpTool(Tool):
    """Calls a tool of a server.

    Args:
        session: with the server; shared by its tools.
        name: what the model calls it.
        listed: the tool as the server lists it.
    """

    def __init__(self, session: McpSession, name: str, listed: Any) -> None:
        self.session = session
        self.name_there = str(listed.name)
        self.definition = ToolDefinition(
            name=name,
            description=(listed.description or "")[:MAX_DESCRIPTION_CHARS],
            parameters=dict(listed.input_schema),
        )

    def begin_episode(self, task: Task) -> None:
        """Lets the server forget the episode before."""
        self.session.begin_episode()

    def execute(self, **arguments: Any) -> str:
        """Calls the tool; raises ToolError or TimeoutError where it fails."""
        result = self.session.call(self.name_there, arguments)
        text = text_of(result)
        if result.is_error:
            raise ToolError(text or "the tool failed and says no more")
        return text

    def close(self) -> None:
        """Ends the connection, and with it a server that is a process."""
        self.session.close()


def add_mcp_tools(registry: ToolRegistry, servers: Iterable[McpServer]) -> None:
    """Starts the servers and adds their tools to a registry.

    Raises:
        ValueError: a server does not start, or its tools cannot be offered.
    """
    require_mcp()
    listed: list[tuple[McpSession, Any]] = []
    sessions = [McpSession(server) for server in servers]
    try:
        for session in sessions:
            listed += [(session, tool) for tool in _offered(session)]
        counts = Counter([*registry.tools, *(str(tool.name) for _, tool in listed)])
        for session, tool in listed:
            name = str(tool.name)
            if counts[name] > 1:
                name = f"{session.server.name}_{name}"
            _register(registry, session, name, tool)
    except BaseException:
        for session in sessions:
            session.close()
        raise


def _offered(session: McpSession) -> list[Any]:
    """Lists a server's tools that the model is to be offered."""
    tools = session.tools()
    wanted = session.server.tools
    names = [str(tool.name) for tool in tools]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(
            f"mcp.servers.{session.server.name}.tools: the server has no "
            f"{', '.join(missing)}; it has: {', '.join(names)}"
        )
    return [tool for tool in tools if not wanted or tool.name in wanted]


def _register(registry: ToolRegistry, session: McpSession, name: str, tool: Any) -> None:
    try:
        registry.register(McpTool(session, name, tool))
    except ValueError as error:
        raise ValueError(f"MCP server {session.server.name}: {error}") from None


def text_of(result: Any) -> str:
    """Returns a result as text: its texts, what else it holds by kind, or its data as JSON."""
    parts = [_part(block) for block in result.content]
    text = "\n".join(part for part in parts if part)
    if not text and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return text


def _part(block: Any) -> str:
    """Returns a block of a result as text."""
    if block.type == "text":
        return str(block.text)
    if block.type in ("image", "audio"):
        return f"[{block.type}, {block.mime_type}: not shown]"
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    if block.type == "resource":
        resource = block.resource
        return str(getattr(resource, "text", f"[{resource.uri}: not shown]"))
    return f"[{block.type}: not shown]"
