"""The way from the names in `agent.tools` to a registry of tools, also of tools written for verl.

Those have verl's base class, under its name. A file of `actor_rollout_ref.rollout.multi_turn.tool_config_path` is an
entry of `agent.tools` like any other:

    tools:
      - class_name: package.module.Class      # or /path/to/file.py:Class
        config: {}
        tool_schema: {type: function, function: {name: search, description: …, parameters: {…}}}

Invariant: every registry gets tools of its own, so that no two agents share one's state.
"""

import asyncio
import copy
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from custom.tools.registry import Tool, ToolDefinition, ToolRegistry
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
            Tool class, a function that returns a Tool or several, or a Tool; or a .yaml of verl's form (above); or
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


# --- Tools written for verl ---


@dataclass
class ToolResponse:
    """Holds what a tool of verl's answers; only text is shown to the model."""

    text: str | None = None
    image: Any = None
    video: Any = None


class BaseTool:
    """Is the base class of verl's tools: `execute` is a coroutine, between `create` and `release`."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema["function"]["name"]

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begins an instance."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, float, dict]:
        """Answers a call: (response, reward, metrics), of which the response counts here."""
        raise NotImplementedError(f"{type(self).__name__}.execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Returns the instance's reward; not asked for here."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends an instance."""


class VerlTool(Tool):
    """Answers calls by a tool of verl's, each in an instance of its own."""

    def __init__(self, tool: Any, schema: dict[str, Any]) -> None:
        self.tool, function = tool, schema["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        self.definition = ToolDefinition(function["name"], function.get("description") or "", parameters)

    def execute(self, **arguments: Any) -> Any:
        """Runs the call to its end."""
        return asyncio.run(self._call(arguments))

    async def _call(self, arguments: dict[str, Any]) -> Any:
        created = await self.tool.create(str(uuid.uuid4()))
        instance = created[0] if isinstance(created, tuple) else created
        try:
            answer = await self.tool.execute(instance, arguments)
        finally:
            await self.tool.release(instance)
        response = answer[0] if isinstance(answer, tuple) else answer
        return response if isinstance(response, str) else response.text


def read_tool_config(path: str) -> Iterator[Tool]:
    """Makes the tools that a file of verl's form describes."""
    for entry in OmegaConf.load(path).tools:
        module, _, name = entry.class_name.rpartition("." if ":" not in entry.class_name else ":")
        made = load_object(f"{module}:{name}", f"{path}:")
        config, schema = (OmegaConf.to_container(entry.get(k) or OmegaConf.create()) for k in ("config", "tool_schema"))
        yield made() if issubclass(made, Tool) else VerlTool(made(config, entry.tool_schema), schema)
