"""The environment's step as a tool, for games whose actions are to be calls."""

import copy
from typing import Any, Self

from custom.env import StepResult
from custom.env_calls import step_environment
from custom.tools.definition import Tool, ToolDefinition, ToolError


class EnvironmentStepTool(Tool):
    """Steps the environment as a tool call: its reward and its end count as the turn's.

    A MultiTurnManager with an environment steps that one, so that a copy of the tool never plays
    another episode's game; `environment` serves calls outside of it. The tool has no deadline of
    its own: the episode's count. A subclass with a definition of its own translates its arguments
    into an action in `action_text`.
    """

    definition = ToolDefinition(
        name="environment_step",
        description="Takes an action in the environment and returns what is then observed.",
        parameters={
            "type": "object",
            "properties": {"action": {"type": "string", "description": "The action to take."}},
            "required": ["action"],
        },
    )

    def __init__(self, environment: Any = None) -> None:
        self.environment = environment

    def execute(self, **arguments: Any) -> StepResult:
        """Takes one step in `self.environment`."""
        if self.environment is None:
            raise ToolError("there is no environment to act in")
        return step_environment(self.environment, self.action_text(**arguments))

    def __deepcopy__(self, memo: object) -> Self:
        # A copy of the tool acts in the same environment, not in a copy of that.
        return copy.copy(self)

    def action_text(self, action: str) -> str:
        """Returns the environment's action for the model's arguments."""
        return action
