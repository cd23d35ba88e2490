"""The alarms' settings."""

from typing import Literal

from training.config.section import Section


class AlarmSettings(Section):
    """What an alarm does."""

    #: one line in the log | ends the run too | nothing is watched
    mode: Literal["warn", "stop", "off"] = "warn"
