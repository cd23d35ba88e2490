"""Holds the settings of verifiers' environments that verifiers itself plays."""

from pathlib import Path
from typing import Any, Literal

from training.config.section import InputPath, Section

# The program in verifiers' interpreter.
PROJECT = Path(__file__).resolve().parents[3]
DRIVER = PROJECT / "features/programs/with_verifiers/verifiers_driver.py"
PREFIX = "verifiers:"


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
