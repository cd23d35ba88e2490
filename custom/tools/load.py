"""The way from the names in `agent.tools` to a registry of tools.

Invariant: every registry gets tools of its own, so that no two agents share one's state.
"""

import copy
from collections.abc import Iterable
from typing import Any

from custom.tools.registry import ToolRegistry
from custom.tools.tool import Tool
from custom.tools.verl_tool import read_tool_config
from data.loading import load_object

BUILTIN_TOOLS = {
    "calculator": "custom.tools.builtin:CalculatorTool",
    "python": "custom.tools.builtin:PythonTool",
    "environment_step": "custom.tools:EnvironmentStepTool",
}


def load_tools(sources: Iterable[str | Tool]) -> ToolRegistry:
    """Makes a registry of new tools, one or several from each source; ValueError says what is no tool.

    Args:
        sources: "calculator", "python", "environment_step", "/path/file.py:name" or "module:name", whose object is a
            Tool class, a function that returns a Tool or several, or a Tool; or a .yaml of verl's form (verl_tool); or
            a Tool itself, of which the registry gets a copy.
    """
    registry = ToolRegistry()
    for source in sources:
        if isinstance(source, Tool):
            made: Any = copy.deepcopy(source)
        else:
            made = read_tool_config(source) if source.endswith((".yaml", ".yml")) else _made_by(source)
        for tool in made if isinstance(made, Iterable) else [made]:
            if not isinstance(tool, Tool):
                given = f"agent.tools: {source!r} is a {type(tool).__name__}"
                raise ValueError(f"{given}; allowed: a Tool, or what makes one")
            registry.register(tool)
    return registry


def _made_by(source: str) -> Any:
    """Returns what the name stands for, or what that makes when it is called."""
    place = BUILTIN_TOOLS.get(source, source)
    if not all(place.rpartition(":")):
        allowed = ", ".join([*BUILTIN_TOOLS, "/path/to/file.py:name", "module:name", "tools.yaml"])
        raise ValueError(f"agent.tools: {source!r} is unknown; allowed: {allowed}")
    found = load_object(place, "agent.tools:")
    return copy.deepcopy(found) if isinstance(found, Tool) or not callable(found) else found()
