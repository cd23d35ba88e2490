"""What a tool is: its definition, which the model reads, and `execute`.

Invariant: a tool knows nothing of parsers, counts or turns; it gets arguments by name, and returns or raises.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from custom.env import StepResult, step_environment


class ToolError(Exception):
    """Fails a call with exactly this text; raised by a tool."""


@dataclass(frozen=True)
class ToolDefinition:
    """Says what the model is told of a tool.

    Args:
        name: letters, digits, `_`, `-` and `.`, at most 64.
        description: for the model.
        parameters: a JSON schema of an object; arguments are checked against it before the tool sees them.
        timeout_s: seconds after which a call counts as failed; None: the tool sees to it itself.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    timeout_s: float | None = None

    def schema(self) -> dict[str, Any]:
        """Returns the function schema as OpenAI writes it, which chat templates take as `tools=`."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def definition_of(name: str, **fields: str) -> ToolDefinition:
    """Returns the definition of a tool that comes along, as definitions.yaml has it, its description filled in."""
    told = yaml.safe_load(Path(__file__).with_name("definitions.yaml").read_text(encoding="utf-8"))[name]
    return ToolDefinition(name, told["description"].format(**fields), told["parameters"])


class Tool(ABC):
    """Answers calls of the model: it has a `definition`, and `execute` gets the arguments by name.

    class Echo(Tool):
        definition = ToolDefinition("echo", "Echoes.", {"type": "object", "properties": {"text": {"type": "string"}}})

        def execute(self, text: str = "") -> str:
            return text
    """

    definition: ToolDefinition

    @abstractmethod
    def execute(self, *args: Any, **arguments: Any) -> Any:
        """Gets the arguments by name and returns the observation: text, or anything that JSON can show.

        A StepResult instead brings a reward and may end the episode. Raising is fine: the model sees the message. A
        TimeoutError counts as a timeout.
        """


class EnvironmentStepTool(Tool):
    """Steps the environment as a tool call: its reward and its end count as the turn's.

    In a MultiTurnManager with an environment it is that one which is stepped, so that a copy of the tool never plays
    another episode's game; `environment` serves calls outside of it. It has no deadline of its own: the episode's
    count. A subclass with a definition of its own says in `action_text` which action its arguments stand for.
    """

    definition = definition_of("environment_step")

    def __init__(self, environment: Any = None) -> None:
        self.environment = environment

    def execute(self, **arguments: Any) -> StepResult:
        """Takes one step in its own environment."""
        if self.environment is None:
            raise ToolError("there is no environment to act in")
        return step_environment(self.environment, self.action_text(**arguments))

    def __deepcopy__(self, memo: object) -> EnvironmentStepTool:
        return copy.copy(self)

    def action_text(self, action: str) -> str:
        """Returns the environment's action for the model's arguments."""
        return action
