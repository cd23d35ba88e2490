"""Restarts a run that fails: a process of its own runs the command line, again and again.

So no way to end, a segmentation fault and the system's lack of memory included, takes the run with
it. Invariant: what descends from an attempt is gone before the next begins, wherever it has gone
to; a signal reaches an attempt once.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from custom.confine import adopt_orphans, die_with_parent
from data.own_process import ENDED_EARLY
from data.watchdog import ATTEMPT, STALLED, end_children
from features.supervisor.settings import SupervisorSettings
from training.config import PPOConfig
from training.features import features
from training.run.exit_codes import MEND, OUT_OF_MEMORY
from training.run.out_of_memory import MemoryKills
from training.run.run_lock import was_left
from training.run.signals import ENDING_SIGNALS, set_handlers

logger = logging.getLogger(__name__)
# Nothing is gained by another attempt, or it was told to end.
FINAL_CODES = (0, 2, MEND, *(128 + number for number in ENDING_SIGNALS))
HOW_IT_ENDED = {STALLED: "stalled", OUT_OF_MEMORY: "ran out of memory"}
# The feature that records what happens to a run.
PAGE = "run_page"


def supervise(config: PPOConfig, program: Path, argv: list[str]) -> int | None:
    """Runs the command line to its end, as often as it takes; returns the last exit code.

    Returns None where the run is not to be supervised, or is an attempt of a supervisor itself.
    """
    if not config.section(SupervisorSettings).max_restarts or ATTEMPT in os.environ:
        return None
    return Supervisor(config, program, argv).run()


class Supervisor:
    """Runs `python PROGRAM argv` as often as it fails and `supervisor.max_restarts` allows.

    The first attempt resumes as the config says, the others from what the run itself has saved, if
    it has.
    """

    def __init__(self, config: PPOConfig, program: Path, argv: list[str]) -> None:
        # Imports torch: late.
        from training.run.checkpoint_contents import LATEST

        self.config = config
        self.command = [sys.executable, str(program), *argv]
        self.began = time.time()
        self.run_dir = Path(config.trainer.run_dir).absolute()
        self.latest = self.run_dir / LATEST
        self.saved_before = self._last_save()
        self.received = 0
        self.child: subprocess.Popen[bytes] | None = None
        # Settings that an attempt's end has changed, by key.
        self.changed_settings: dict[str, str | int] = {}

    def run(self) -> int:
        """Runs to the end; returns the exit code of the last attempt."""
        adopt_orphans()
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                set_handlers({number: self._pass_on})
        most = self.config.section(SupervisorSettings).max_restarts
        attempt = 1
        while True:
            code = self._attempt(attempt)
            if self.received or code in FINAL_CODES or attempt > most:
                self._record_end(code)
                return code
            if self._last_save() not in (0, self.saved_before):
                self.changed_settings["trainer.resume_mode"] = "auto"
            if code == OUT_OF_MEMORY:
                self._halve_budgets()
            self._warn_of_restart(attempt, code)
            attempt += 1

    def _attempt(self, number: int) -> int:
        """Runs the command line once, until nothing of it is left.

        Returns its exit code, as a shell would give it; OUT_OF_MEMORY where the system killed it
        for want of memory, and ENDED_EARLY where it ended with 0 and still held the run's folder.
        """
        kills = MemoryKills()
        # A session of its own: a terminal's signals then come here alone, and go on from here.
        self.child = subprocess.Popen(
            [*self.command, *self._overrides()],
            env=os.environ | {ATTEMPT: str(number)},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        if self.received:
            self.child.send_signal(self.received)
        code = self.child.wait()
        end_children()
        if code == -signal.SIGKILL and kills.any_since():
            logger.warning("the system killed the run: memory ran out")
            return OUT_OF_MEMORY
        if code < 0:
            return 128 - code
        if code == 0 and was_left(self.run_dir):
            # Nothing in the process could tell it: code in C has ended it, say.
            logger.warning("the run's process ended with exit code 0 before the run's end")
            return ENDED_EARLY
        return code

    def _overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.changed_settings.items()]

    def _warn_of_restart(self, number: int, code: int) -> None:
        how = HOW_IT_ENDED.get(code, "failed")
        start = "where it began"
        if "trainer.resume_mode" in self.changed_settings:
            start = f"step {self.latest.read_text()}"
        most = self.config.section(SupervisorSettings).max_restarts
        settings = " ".join(self._overrides()) or "the same settings"
        sentence = (
            f"restart {number} of {most}: the run {how} (exit code {code}, docs/failures.md); it "
            f"goes on from {start}, with {settings}"
        )
        logger.warning("%s", sentence)
        self._record(sentence, name=how, code=code)

    def _record(self, text: str, **parts: Any) -> None:
        """Adds a restart to the run's record, where the run has one."""
        if PAGE not in features():
            return
        from features.run_page.feature import add_event

        add_event(self.run_dir, "restart", text=text, **parts)

    def _record_end(self, code: int) -> None:
        """Adds how the run ended, where its last attempt could not; and has the page say so."""
        if code == 0 or PAGE not in features():
            return
        from features.run_page.feature import add_end

        how = HOW_IT_ENDED.get(code, "failed")
        text = f"the run {how} without a word (exit code {code}, docs/failures.md)"
        add_end(self.run_dir, self.began, name=how, text=text, code=code)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Hands a signal on to the attempt."""
        self.received = number
        if self.child is not None:
            self.child.send_signal(number)

    def _last_save(self) -> int:
        """Returns when the latest checkpoint was named, in nanoseconds; 0: there is none."""
        if not self.latest.exists():
            return 0
        return self.latest.stat().st_mtime_ns

    def _halve_budgets(self) -> None:
        """Halves the token budgets of updates, which several ranks cannot do while they run.

        A row must fit.
        """
        sections = {
            "actor_rollout_ref.actor": self.config.actor_rollout_ref.actor,
            "critic": self.config.critic,
        }
        for section, model in sections.items():
            key = f"{section}.ppo_max_token_len_per_gpu"
            before = int(self.changed_settings.get(key, model.ppo_max_token_len_per_gpu))
            self.changed_settings[key] = max(before // 2, self.config.data.row_length)
