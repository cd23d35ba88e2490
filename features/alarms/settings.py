"""The alarms' settings."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from data.names import did_you_mean
from training.config.section import Section

if TYPE_CHECKING:
    from training.config import PPOConfig


class AlarmSettings(Section):
    """What an alarm does."""

    #: one line in the log | ends the run too | nothing is watched
    mode: Literal["warn", "stop", "off"] = "warn"
    #: names of alarms that are not to ring, such as [reward_differs] where that is meant
    ignore: tuple[str, ...] = ()


def config_problems(config: "PPOConfig") -> Iterator[str]:
    """Yields the names in alarms.ignore that no alarm has."""
    ignored = config.section(AlarmSettings).ignore
    if not ignored:
        return
    # Late: the rules import torch.
    from features.alarms.catalogue import ADVICE

    for name in ignored:
        if name not in ADVICE:
            yield (
                f"alarms.ignore has {name!r}, which is no alarm: take one of "
                f"features/alarms/README.md.{did_you_mean(name, ADVICE)}"
            )
