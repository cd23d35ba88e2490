"""Restarts: with `trainer.max_restarts` a process of its own runs the command line, and runs it again where it fails.

So no way to end, a segmentation fault and the system's lack of memory included, takes the run with it. Invariant: what
descends from an attempt is gone before the next begins, wherever it has gone to; a signal reaches an attempt once.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from custom.confine import adopt_orphans, die_with_parent
from data.texts import say
from data.watch import ATTEMPT, end_children
from training.config import PPOConfig
from training.run.checkpoint import LATEST
from training.run.process import ENDING, handle, logger

# Exit codes of a run: what is to be mended by its user (beside 2, settings), and that memory ran out.
MEND, OUT_OF_MEMORY = 3, 4
# Nothing is gained by another attempt, or it was told to end.
FINAL = (0, 2, MEND, *(128 + number for number in ENDING))


class Supervisor:
    """Runs `python PROGRAM argv` as often as it fails and `trainer.max_restarts` allows.

    The first attempt resumes as the config says, the others from what the run itself has saved, if it has.
    """

    def __init__(self, config: PPOConfig, program: Path, argv: list[str]) -> None:
        self.config, self.argv = config, [sys.executable, str(program), *argv]
        self.latest = Path(config.trainer.run_dir).absolute() / LATEST
        self.before = self._written()
        self.received = 0
        self.child: subprocess.Popen[bytes] | None = None
        # Settings that an attempt's end has changed.
        self.own: dict[str, str | int] = {}

    def run(self) -> int:
        """Runs to the end; returns the exit code of the last attempt."""
        adopt_orphans()
        handle({number: self._pass_on for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN})
        most = self.config.trainer.max_restarts
        for number in range(1, most + 2):
            code = self._attempt(number)
            if self.received or code in FINAL or number > most:
                break
            if self._written() not in (0, self.before):
                self.own["trainer.resume_mode"] = "auto"
            if code == OUT_OF_MEMORY:
                self._halve_budgets()
            start = f"step {self.latest.read_text()}" if "trainer.resume_mode" in self.own else "where it began"
            logger.warning(
                say("restarts", number=number, most=most, code=code, start=start, own=self.own or "no change")
            )
        return code

    def _attempt(self, number: int) -> int:
        """Runs the command line once, until nothing of it is left; returns its exit code, as a shell would say it."""
        # A session of its own: a terminal's signals then come here alone, and go on from here.
        self.child = subprocess.Popen(
            [*self.argv, *(f"{key}={value}" for key, value in self.own.items())],
            env=os.environ | {ATTEMPT: str(number)},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        if self.received:
            self.child.send_signal(self.received)
        code = self.child.wait()
        end_children()
        return 128 - code if code < 0 else code

    def _pass_on(self, number: int, frame: object) -> None:
        self.received = number
        if self.child is not None:
            self.child.send_signal(number)

    def _written(self) -> int:
        return self.latest.stat().st_mtime_ns if self.latest.exists() else 0

    def _halve_budgets(self) -> None:
        """Halves the token budgets of updates, which several ranks cannot do while they run; a row must fit."""
        sections = {"actor_rollout_ref.actor": self.config.actor_rollout_ref.actor, "critic": self.config.critic}
        for section, model in sections.items():
            key = f"{section}.ppo_max_token_len_per_gpu"
            before = int(self.own.get(key, model.ppo_max_token_len_per_gpu))
            self.own[key] = max(before // 2, self.config.data.row_length)
