"""Tools of an agent: what a model may call, how calls are read out of a text, what comes of them.

    definition         what a tool is: Tool, ToolDefinition, ToolError
    environment_step   the environment's step as a tool
    calculator         the tool that comes along; `python` is features/sandbox
    parsers            from a text to calls; json_values decodes what they find
    calls, execution   a call, its record; arguments checked and a tool's code run
    registry, turns    single calls, and whole turns of them
    loading            from the names in `agent.tools` to a registry
    verl_tools         tools written for verl (verl_schemas: the models of their schemas)

Invariant: whatever a model writes and a tool does, the episode goes on with an observation; only
the environment's own failures are raised.
"""

from custom.tools.calls import UNKNOWN, CallRecord, ToolCall
from custom.tools.definition import Tool, ToolDefinition, ToolError, ToolSource
from custom.tools.environment_step import EnvironmentStepTool
from custom.tools.families import (
    FAMILIES,
    DeepSeekParser,
    FamilyParser,
    GemmaParser,
    GLMParser,
    HarmonyParser,
    HermesParser,
    JSONFenceParser,
    KimiParser,
    Llama3JSONParser,
    LlamaFunctionParser,
    MiniMaxParser,
    MistralParser,
    PythonicParser,
    QwenXMLParser,
    said_in,
)
from custom.tools.loading import BUILTIN_TOOLS, load_tools
from custom.tools.parsers import (
    ActionParser,
    FunctionCallingParser,
    JSONActionParser,
    ReActActionParser,
    get_parser,
)
from custom.tools.registry import ToolRegistry
from custom.tools.turns import EpisodeSummary, MultiTurnManager, ToolTurn
from custom.tools.verl_schemas import OpenAIFunctionToolSchema, ToolResponse
from custom.tools.verl_tools import BaseTool, initialize_tools_from_config

__all__ = [
    "BUILTIN_TOOLS",
    "UNKNOWN",
    "ActionParser",
    "BaseTool",
    "CallRecord",
    "EnvironmentStepTool",
    "EpisodeSummary",
    "FunctionCallingParser",
    "JSONActionParser",
    "MultiTurnManager",
    "OpenAIFunctionToolSchema",
    "ReActActionParser",
    "Tool",
    "ToolCall",
    "ToolDefinition",
    "ToolError",
    "ToolRegistry",
    "ToolResponse",
    "ToolSource",
    "ToolTurn",
    "get_parser",
    "initialize_tools_from_config",
    "load_tools",
]
