"""Describes a program, in the place of a spec that builds an agent."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from custom.side_services import SideService
from custom.tools.parsers import ActionParser

RewardSource = Literal["stdout", "exit_code"]


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """Describes a program that plays episodes: a command, or a function in a file.

    With neither somebody starts programs by hand, and says when an episode has ended.

    Attributes:
        name: what messages and metrics call it; "": as its file.
        command: the words of a command; empty where `function` is given.
        function: FILE.py:NAME of `async def NAME(task, client) -> reward`.
        variables: further environment variables, also of the process that preloads.
        preload: modules that a process of the command's interpreter has imported, from which
            programs are then forked.
        reward: where a command's reward comes from; a reward function has the last word.
        parser: how tool calls are written in the model's text: a name, or what reads them.
        request_timeout_s: the longest that a request waits for its answer; None: for ever.
        client_sampling: what becomes of a request that asks for another sampling than the run's.
        dropped_thinking: how an answer reads whose thinking a client does not send back.
        train_models, helper_prompts: which requests are trained; see helper_requests.py.
        token: by which attempts are known; None: each has one of its own.
        has_folder: each attempt has a folder of its own to work in.
        memory_gb: GiB that each of its processes may take; None: any.
        reward_path, reward_name, reward_kwargs: of a reward function.
        max_turn, max_turn_tokens: limits of its own, in place of the config's.
        services: beside the policy, which it may ask.
    """

    name: str = ""
    command: tuple[str, ...] = ()
    function: str | None = None
    variables: tuple[tuple[str, str], ...] = ()
    preload: tuple[str, ...] = ()
    reward: RewardSource = "stdout"
    parser: str | ActionParser = "function"
    request_timeout_s: float | None = None
    client_sampling: Literal["override", "refuse"] = "override"
    dropped_thinking: Literal["as_sent", "recalled"] = "as_sent"
    train_models: tuple[str, ...] = ()
    helper_prompts: tuple[str, ...] = ()
    token: str | None = None
    has_folder: bool = True
    memory_gb: float | None = None
    reward_path: str | None = None
    reward_name: str = "reward_fn"
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_turn: int | None = None
    max_turn_tokens: int | None = None
    services: tuple[SideService, ...] = ()

    # Who plays its episodes; see workers/rollout/kinds.py.
    kind: ClassVar[str] = "features.programs.kind:PROGRAM"

    @property
    def is_by_hand(self) -> bool:
        """Returns whether nothing is started here."""
        return not self.command and self.function is None

    @property
    def source(self) -> str:
        """Returns what messages and metrics are named after: the program's file, or its command."""
        if self.name:
            return self.name
        if self.function is not None:
            return self.function
        if self.is_by_hand:
            return "by hand"
        files = [word for word in self.command if word.endswith(".py")]
        return (files or list(self.command))[0].rpartition("/")[2]
