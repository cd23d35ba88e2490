"""TODO"""

from custom.tools.manager import UNKNOWN, CallRecord, MultiTurnManager, ToolTurn
from custom.tools.parsers import (
    PARSERS,
    ActionParser,
    ErrorKind,
    FunctionCallingParser,
    JSONActionParser,
    ReActActionParser,
    ToolCall,
    get_parser,
)
from custom.tools.registry import BUILTIN_TOOLS, ToolRegistry, load_tools
from custom.tools.tool import EnvironmentStepTool, Tool, ToolDefinition, ToolError
