"""Names the settings with which a run went on, where they may be the cause of an alarm.

A run that goes on with another learning rate may learn too much in a step, and ring what comes of
that. Invariant: a change counts for as many steps as alarms remember, from the step on behind which
the run went on; later alarms have other causes.
"""

from collections.abc import Mapping
from typing import Any

from features.alarms.rule import Alarm
from features.alarms.seen_step import MEMORY
from training.config.values import as_text
from training.observers import ObservedRun
from training.run.recorded_config import changes_before_step

# So many changed settings are named.
MOST_NAMED = 3


class ChangedSettings:
    """Watches with which settings a run goes on.

    Args:
        run: the run, whose `changes` are those of this process.
    """

    def __init__(self, run: ObservedRun) -> None:
        self.run = run
        # The step behind which other settings count: key -> (before, after).
        self.step = 0
        self.changed: Mapping[str, tuple[Any, Any]] = {}

    def begin(self, step: int) -> None:
        """Notes that the run begins (0), or goes on behind a step."""
        self.step = step
        self.changed = self.run.changes
        if step > 0 and not self.changed:
            # The process before may have brought a change, and been killed.
            earlier = changes_before_step(self.run.run_dir, None)
            self.step = max(earlier, default=step)
            self.changed = earlier.get(self.step, {})

    def behind(self, alarm: Alarm, step: int) -> str:
        """Says which changes may have caused an alarm of a step; "": none."""
        if not self.step < step <= self.step + MEMORY:
            return ""
        told = []
        for key, (before, after) in self.changed.items():
            if key.endswith(alarm.settings):
                told.append(f"{key}={as_text(after)} in place of {as_text(before)}")
        if not told:
            return ""
        left_out = len(told) - MOST_NAMED
        more = [f"{left_out} more"] if left_out > 0 else []
        return f"behind step {self.step} the run went on with " + ", ".join(
            [*told[:MOST_NAMED], *more]
        )
