"""Reads the last line of a program's output: its reward, and numbers.

    0.5
    {"reward": 0.5, "metrics": {"steps": 3}}
    {"conversations": {"a": {"reward": 1.0}, "b": {"reward": 0.0, "trained": false}}}

Invariant: what is no report is told as such; nothing is guessed.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from custom.env_calls import check_reward
from features.programs.exchange import Earned

# So much of a line that is no report is shown in an error.
MAX_LINE_CHARS = 200
# Metrics of one program that are kept.
MAX_METRICS = 100
# Some shells begin their output with it.
BYTE_ORDER_MARK = "\ufeff"
HINT = 'a number, {"reward": 1.0} or {"conversations": {NAME: {"reward": 1.0}}} is'


class NoReward(ValueError):
    """Reports that a program's output ends with no reward."""


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """Holds what a program says of itself.

    Attributes:
        reward: of the whole episode, put on its last turn; None: none, or one for each
            conversation.
        earned: what each conversation earned, by the name that the program gives it.
        metrics: numbers, by name.
    """

    reward: float | None = None
    earned: Mapping[str, Earned] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


NOTHING = ProgramReport()


def report_of_output(output: str) -> ProgramReport:
    """Reads the report in the last line.

    Raises:
        NoReward: the last line is something else, or there is none.
    """
    # Not where else Python ends lines: a text in JSON may have U+2028 as it is.
    lines = re.split(r"[\r\n]+", output.strip())
    if not lines[-1]:
        raise NoReward(
            'the program wrote nothing: its last line of output is its reward, such as {"reward": '
            "1.0}; programs.reward=exit_code pays exit code 0"
        )
    line = lines[-1].removeprefix(BYTE_ORDER_MARK).strip()
    try:
        return _read(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NoReward(
            f"the program's last line of output is no reward: {line[:MAX_LINE_CHARS]!r} "
            f"({type(error).__name__}); {HINT}"
        ) from None


def _read(value: Any) -> ProgramReport:
    """Reads a report's JSON."""
    if not isinstance(value, Mapping):
        return ProgramReport(reward=check_reward(value, "the program"))
    metrics = _metrics(value.get("metrics") or {})
    if "conversations" not in value:
        return ProgramReport(reward=check_reward(value["reward"], "the program"), metrics=metrics)
    earned = {}
    for name, said in value["conversations"].items():
        reward = said.get("reward")
        if reward is not None:
            reward = check_reward(reward, "the program")
        earned[name] = Earned(reward=reward, trained=bool(said.get("trained", True)))
    return ProgramReport(earned=earned, metrics=metrics)


def _metrics(said: Mapping[str, Any]) -> dict[str, float]:
    """Takes the finite numbers."""
    metrics = {}
    for name, value in list(said.items())[:MAX_METRICS]:
        if isinstance(value, int | float) and math.isfinite(value):
            metrics[str(name)] = float(value)
    return metrics
