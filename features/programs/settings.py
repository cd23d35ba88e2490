"""The settings of programs that play, and of verifiers' environments that verifiers plays."""

from pathlib import Path
from typing import Any, Literal

from training.config.section import Command, InputPath, ObjectName, PositiveFloat, Section

# What is run in verifiers' interpreter.
DRIVER = Path(__file__).resolve().with_name("with_verifiers") / "verifiers_driver.py"
PREFIX = "verifiers:"
# As a command's first word: the interpreter that the run itself has.
OWN_PYTHON = ("python", "python3")
# By this name programs ask for the policy, as by any that is no name of a side service.
POLICY = "policy"


class VerifiersConfig(Section):
    """How environments named verifiers:NAME are played where verifiers has its own interpreter."""

    #: interpreter that has verifiers 0.4, as `make verifiers-env` makes; null = this one
    python: InputPath | None = None
    #: how agents ask the policy: token_in by ids, chat by whatever protocol a harness speaks
    client: Literal["token_in", "chat"] = "token_in"
    #: agents that are trained; empty = those that the environment lets be trained
    trained: tuple[str, ...] = ()
    #: a renderer of verifiers' own, such as {name: qwen3}; null = by the run's chat template
    renderer: dict[str, Any] | None = None


class ProgramsSettings(Section):
    """A program that plays by itself, and asks the policy for its turns over HTTP."""

    #: a program that plays: words, or one text, such as "python my_agent.py"
    command: Command = ()
    #: FILE.py:NAME of `async def NAME(task, client) -> reward`, in place of a command
    function: ObjectName | None = None
    #: modules of the command's interpreter, from whose import programs are forked
    preload: tuple[str, ...] = ()
    #: what pays a command: its last line of output, or its exit code
    reward: Literal["stdout", "exit_code"] = "stdout"
    #: a program's own temperature and the like: sampled as the run does, or refused
    client_sampling: Literal["override", "refuse"] = "override"
    #: answers whose thinking a client drops: read as it sends them, or with their thinking again
    dropped_thinking: Literal["as_sent", "recalled"] = "as_sent"
    #: models by whose names a program asks for answers that are trained, as gpt-*; empty = all
    train_models: tuple[str, ...] = ()
    #: patterns of system texts whose answers are not trained: a client's own helpers, as titles
    helper_prompts: tuple[str, ...] = ()
    #: where programs find the policy: on their own machine alone, or at the node's address (Ray)
    host: Literal["loopback", "node"] = "loopback"
    #: seconds for which a program's request waits; null = for ever
    request_timeout_s: PositiveFloat | None = None
    #: seconds of its own that a program has behind the episode's last turn, before it is ended
    grace_s: PositiveFloat = 5.0
    verifiers: VerifiersConfig = VerifiersConfig()

    @property
    def is_set(self) -> bool:
        """Returns whether a program is named, which then plays all episodes."""
        return bool(self.command) or self.function is not None
