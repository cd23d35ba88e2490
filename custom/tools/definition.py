"""Defines a tool: a definition that the model reads, and a method that answers its calls.

Invariant: a tool knows nothing of parsers, counts or turns. It gets arguments by name, and returns
or raises.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from custom.env import Task


class ToolError(Exception):
    """Fails a call with exactly this text; raised by a tool."""


@runtime_checkable
class ToolSource(Protocol):
    """Says by name what makes tools that are not known before an agent is built.

    Attributes:
        added_by: "module:function", (registry, the agent's sources of this kind) -> None.
    """

    added_by: ClassVar[str]


@dataclass(frozen=True)
class ToolDefinition:
    """Describes a tool to the model.

    Args:
        name: unlike all others'.
        description: for the model.
        parameters: a JSON schema of an object; arguments are checked against it before the tool
            sees them.
        timeout_s: seconds after which a call counts as failed; None: the tool sees to it itself.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    timeout_s: float | None = None

    def schema(self) -> dict[str, Any]:
        """Returns OpenAI's function schema, which chat templates take as `tools=`."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


class Tool(ABC):
    """Answers calls of the model; write `definition` and `execute`.

    The smallest one:

        class Echo(Tool):
            definition = ToolDefinition(
                name="echo",
                description="Echoes.",
                parameters={"type": "object", "properties": {"text": {"type": "string"}}},
            )

            def execute(self, text: str = "") -> str:
                return text

    `self.environment` is the episode's: whatever its `reset` made can be asked there, as in
    `self.environment.database`. It is None where nobody acts in one.
    """

    definition: ToolDefinition
    environment: Any = None

    def begin_episode(self, task: Task) -> None:  # noqa: B027
        """Is called before an episode's first turn, and before `reset`; made to be overridden.

        Args:
            task: the dataset's row that the episode plays, by column; empty without a dataset.
        """

    def close(self) -> None:  # noqa: B027
        """Frees what the tool holds, when its agent is closed; made to be overridden."""

    @abstractmethod
    def execute(self, *args: Any, **arguments: Any) -> Any:
        """Gets the arguments by name and returns the observation: text, or what JSON can show.

        A StepResult instead brings a reward and may end the episode. Raising is fine: the model
        sees the message. A TimeoutError counts as a timeout. It may be an `async def`.
        """
