"""Tools of MCP servers beside an agent's own: mcp.servers."""

from features.mcp.settings import McpSettings
from training.features import Feature

FEATURE = Feature(
    section=McpSettings,
    moved_keys={"agent.mcp_servers": "mcp.servers"},
    moved_modules={
        "custom.tools.mcp_session": "features.mcp.mcp_session",
        "custom.tools.mcp_tools": "features.mcp.mcp_tools",
        "training.config.schema.mcp_servers": "features.mcp.settings",
        "contrib.mcp_guard": "features.mcp.mcp_guard",
    },
    tools="features.mcp.mcp_server:servers",
)
