"""Rewards programs by a reward function; report.py reads what programs say themselves.

Invariant: what is no reward is told as such; nothing is guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from custom.env import BadRewardFunction
from custom.env_calls import check_reward, located, takes_keyword
from custom.model_errors import ModelError
from custom.side_services import SideService, service_arguments, set_up_services
from data.loading import load_extern_object


@dataclass(frozen=True)
class RewardSpec:
    """Describes a reward function of programs; it is built where it then runs."""

    path: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    services: tuple[SideService, ...] = ()

    @property
    def libraries(self) -> tuple[str, ...]:
        """Returns what is imported ahead for it: nothing."""
        return ()

    @property
    def source(self) -> str:
        """Returns what messages call it."""
        return f"{self.path}:{self.name}"

    def build(self) -> "ProgramReward":
        """Loads the function, beside the services that it may ask."""
        set_up_services(self.services)
        function = load_extern_object(self.path, self.name)
        whole = partial(function, **self.kwargs) if self.kwargs else function
        return ProgramReward(whole, service_arguments(self.services))


class ProgramReward:
    """Calls a reward function with what a program did."""

    tool_schemas: None = None

    def __init__(self, function: Any, beside: Mapping[str, Any] | None = None) -> None:
        self.function = function
        # What it may take of services, by the arguments' names.
        self.beside = dict(beside or {})

    def run(
        self,
        task: Any,
        output: str,
        conversations: list[list[dict[str, Any]]],
        task_dir: str = "",
    ) -> float:
        """Returns the reward; BadRewardFunction where the function gives none.

        That a model beside the policy did not answer it (ModelError) fails the episode alone.

        Args:
            conversations: of each row the messages, as the program sent and got them.
            task_dir: the folder in which the program worked, with what it left there.
        """
        where = located(getattr(self.function, "func", self.function), "reward_fn")
        offered = {
            "task": task,
            "output": output,
            "conversations": conversations,
            "task_dir": task_dir,
            **self.beside,
        }
        # Arguments that the config gives stay.
        given = self.function.keywords if isinstance(self.function, partial) else {}
        arguments = {
            name: value
            for name, value in offered.items()
            if name not in given and takes_keyword(self.function, name)
        }
        try:
            return check_reward(self.function(**arguments), where)
        except ModelError:
            raise
        except Exception as error:
            raise BadRewardFunction(f"{where}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Has nothing to close."""
