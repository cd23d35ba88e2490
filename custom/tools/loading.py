"""From the names in `agent.tools` to a registry.

Invariant: every registry gets tools of its own, so that no two agents share one's state.
"""

import copy
from collections.abc import Iterable
from typing import Any

from custom.tools.definition import Tool, ToolSource
from custom.tools.registry import ToolRegistry
from custom.tools.verl_tools import read_tool_config
from data.loading import load_object
from data.names import did_you_mean

BUILTIN_TOOLS = {
    "calculator": "custom.tools.calculator:CalculatorTool",
    "python": "custom.tools.builtin:PythonTool",
    "environment_step": "custom.tools.environment_step:EnvironmentStepTool",
}


def load_tools(sources: Iterable[str | Tool | ToolSource]) -> ToolRegistry:
    """Makes a registry of new tools, one or several from each source.

    Args:
        sources: "calculator", "python", "environment_step", "/path/file.py:name" or "module:name",
            whose object is a Tool class, a function that returns a Tool or several, or a Tool; or
            a .yaml or .json of verl's form (verl_tools.py); or a Tool itself, of which the registry
            gets a copy; or a ToolSource, whose tools come after all others.
    Raises:
        ValueError: a source is unknown, or what it names is no tool.
    """
    registry = ToolRegistry()
    later: dict[str, list[ToolSource]] = {}
    for source in sources:
        if isinstance(source, ToolSource):
            later.setdefault(source.added_by, []).append(source)
            continue
        for tool in _make_tools(source):
            if not isinstance(tool, Tool):
                raise ValueError(
                    f"agent.tools: {source!r} is a {type(tool).__name__}; "
                    "allowed: a Tool, or what makes one"
                )
            registry.register(tool)
    for place, of_kind in later.items():
        load_object(place, "agent.tools:")(registry, of_kind)
    return registry


def _make_tools(source: str | Tool) -> Iterable[Any]:
    """Makes what a source names; nothing says yet that these are tools."""
    if isinstance(source, Tool):
        made: Any = _copy_tool(source)
    elif source.endswith((".yaml", ".yml", ".json")):
        made = read_tool_config(source)
    else:
        made = _make_by_name(source)
    if isinstance(made, Iterable):
        return made
    return [made]


def _make_by_name(source: str) -> Any:
    """Returns a copy of the object that the name stands for, or what that returns when called."""
    place = BUILTIN_TOOLS.get(source, source)
    module, _, name = place.rpartition(":")
    if not module or not name:
        raise ValueError(
            f"agent.tools: {source!r} is unknown; allowed: {', '.join(BUILTIN_TOOLS)}, "
            "/path/to/file.py:name, module:name, tools.yaml."
            f"{did_you_mean(source, BUILTIN_TOOLS)}"
        )
    loaded = load_object(place, "agent.tools:")
    if isinstance(loaded, Tool):
        return _copy_tool(loaded)
    if not callable(loaded):
        return copy.deepcopy(loaded)
    return loaded()


def _copy_tool(tool: Tool) -> Tool:
    """Copies a tool, not the environment that it was used in: the copy gets another."""
    kept = tool.environment
    return copy.deepcopy(tool, {id(kept): kept})
