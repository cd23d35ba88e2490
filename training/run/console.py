"""Prints a line a step: what matters most, and what is amiss.

Validation's answers stand in the log already, where they are made.
"""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from training.observers import ObservedRun, Observer
from training.run.validation_names import is_validation_reward, short_name

# The console's line of a step shows these, in this order: label -> metric, format.
CONSOLE_COLUMNS = {
    "reward": ("critic/score/mean", "7.4f"),
    "length": ("response_length/mean", "7.1f"),
    "sft loss": ("actor/sft_loss", "7.4f"),
    "held-out loss": ("sft/val_loss", "7.4f"),
    "entropy": ("actor/entropy", "6.3f"),
    "kl": ("actor/ppo_kl", "9.2e"),
    "kl to teacher": ("teacher/kl", "7.4f"),
    "clip": ("actor/pg_clipfrac", "6.4f"),
    "grad": ("actor/grad_norm", "7.3f"),
    "vf_loss": ("critic/vf_loss", "7.4f"),
    "tok/s": ("perf/throughput", "7.0f"),
    "s/step": ("perf/time_per_step", "6.1f"),
}
SEPARATOR = " | "
# In front of what does not fit into a terminal's line.
INDENT = "    "
# It shows these only where something is amiss: label -> count, total.
CONSOLE_COUNTS = {
    "failed": ("agent/failed", "agent/episodes"),
    "masked": ("agent/masked", "agent/episodes"),
    "overflow": ("agent/ending/overflow", "agent/episodes"),
    "retries": ("agent/retries", None),
    "cut turns": ("agent/cut_turns", None),
    "questions refused": ("policy_calls/refused", None),
    "summaries unused": ("context/faults", None),
    "branches left out": ("branching/left_out", None),
}


class ConsoleLine(Observer):
    """Prints a line per step, its columns aligned.

    As in `step   3/60 | reward  0.4219 | … | left 0:01:12`.
    """

    def __init__(self, run: ObservedRun) -> None:
        self.run = run
        self.first_step = run.step
        self.start = time.monotonic()

    def run_started(self, step: int, in_flight: Sequence[int]) -> None:
        """Begins to measure how long steps take."""
        self.first_step = step
        self.start = time.monotonic()

    def step_logged(self, metrics: Mapping[str, float]) -> None:
        """Prints the step's line, and how long the rest of the run will take."""
        step = self.run.step
        total_steps = self.run.total_steps
        line = format_line(metrics, step, total_steps)
        if total_steps and self.first_step < step < total_steps:
            seconds_per_step = (time.monotonic() - self.start) / (step - self.first_step)
            seconds_left = round(seconds_per_step * (total_steps - step))
            line += f" | left {timedelta(seconds=seconds_left)}"
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(wrapped(line, width), flush=True)


def wrapped(line: str, width: int | None) -> str:
    """Breaks a step's line between its columns where it is wider than a terminal.

    Args:
        width: of the terminal, in characters; None: it goes into a file, where it stays one line.
    """
    if width is None or len(line) <= width:
        return line
    lines = [""]
    for cell in line.split(SEPARATOR):
        longer = f"{lines[-1]}{SEPARATOR}{cell}" if lines[-1] else cell
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(INDENT + cell)
    return "\n".join(lines)


def format_line(data: Mapping[str, float], step: int, total_steps: int | None = None) -> str:
    """Formats the console's line of a step.

    The columns that the step has come first, then what was amiss, then its validation rewards.
    """
    cells = [f"step {step:5d}"]
    if total_steps:
        cells[0] += f"/{total_steps}"
    for label, (key, number_format) in CONSOLE_COLUMNS.items():
        if key in data:
            cells.append(f"{label} {data[key]:{number_format}}")
    for label, (key, whole) in CONSOLE_COUNTS.items():
        if data.get(key):
            cell = f"{label} {data[key]:.0f}"
            if whole is not None:
                cell += f" of {data[whole]:.0f}"
            cells.append(cell)
    cells += [format_validation(key, data) for key in data if is_validation_reward(key)]
    return SEPARATOR.join(cells)


def format_validation(key: str, data: Mapping[str, float]) -> str:
    """Formats a reward of validation, with its interval where it has one."""
    cell = f"{short_name(key)} {data[key]:.4f}"
    if f"{key}/ci_low" in data:
        cell += f" [{data[f'{key}/ci_low']:.3f}, {data[f'{key}/ci_high']:.3f}]"
    return cell
