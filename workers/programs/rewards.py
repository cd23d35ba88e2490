"""What a program earned: by the last line of its output, by its exit code, or by a function.

Invariant: what is no reward is told as such; nothing is guessed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from custom.env import BadRewardFunction
from custom.env_calls import check_reward, located, takes_keyword
from data.loading import load_extern_object

# Of a line that is no reward, in an error.
MAX_LINE_CHARS = 200


class NoReward(ValueError):
    """Reports that a program's output ends with no reward."""


def reward_of_output(output: str) -> float:
    """Reads the reward from the last line: a number, or a JSON object with `reward`.

    Raises:
        NoReward: the last line is something else, or there is none.
    """
    lines = output.strip().splitlines()
    if not lines:
        raise NoReward(
            'the program wrote nothing: its last line of output is its reward, such as {"reward": '
            "1.0}; agent.program_reward=exit_code pays exit code 0"
        )
    line = lines[-1].strip()
    try:
        value = json.loads(line)
        if isinstance(value, Mapping):
            value = value["reward"]
        return check_reward(value, "the program")
    except (ValueError, KeyError, RecursionError) as error:
        raise NoReward(
            f"the program's last line of output is no reward: {line[:MAX_LINE_CHARS]!r} "
            f'({type(error).__name__}); a number or {{"reward": 1.0}} is'
        ) from None


@dataclass(frozen=True)
class RewardSpec:
    """Describes a reward function of programs; it is built where it then runs."""

    path: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> None:
        """Returns what libraries are imported ahead for: nothing."""
        return

    @property
    def source(self) -> str:
        """Returns what messages call it."""
        return f"{self.path}:{self.name}"

    def build(self) -> "ProgramReward":
        """Loads the function."""
        function = load_extern_object(self.path, self.name)
        return ProgramReward(partial(function, **self.kwargs) if self.kwargs else function)


class ProgramReward:
    """Calls a reward function with what a program did."""

    tool_schemas: None = None

    def __init__(self, function: Any) -> None:
        self.function = function

    def run(self, task: Any, output: str, conversations: list[list[dict[str, Any]]]) -> float:
        """Returns the reward; BadRewardFunction where the function gives none.

        Args:
            conversations: of each row the messages, as the program sent and got them.
        """
        where = located(getattr(self.function, "func", self.function), "reward_fn")
        offered = {"task": task, "output": output, "conversations": conversations}
        arguments = {
            name: value for name, value in offered.items() if takes_keyword(self.function, name)
        }
        try:
            return check_reward(self.function(**arguments), where)
        except Exception as error:
            raise BadRewardFunction(f"{where}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Has nothing to close."""
