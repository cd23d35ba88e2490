"""Tools of an agent: what a model may call, how its calls are read out of a text, and what comes of them.

`parsers` reads calls, `tool` says what a tool is, `registry` executes single calls, `manager` plays whole turns, `load`
finds the tools that a config names. Invariant: whatever a model writes and a tool does, the episode goes on with an
observation; only the environment's own failures are raised.
"""

from custom.tools.load import BUILTIN_TOOLS, load_tools
from custom.tools.manager import EpisodeSummary, MultiTurnManager, ToolTurn, tool_statistics
from custom.tools.parsers import (
    ActionParser,
    FunctionCallingParser,
    JSONActionParser,
    ReActActionParser,
    ToolCall,
    get_parser,
)
from custom.tools.registry import UNKNOWN, CallRecord, ToolRegistry
from custom.tools.tool import EnvironmentStepTool, Tool, ToolDefinition, ToolError
from custom.tools.verl_tool import BaseTool, ToolResponse
