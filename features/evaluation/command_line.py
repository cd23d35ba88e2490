"""Checks what an evaluation is asked for, and hands it to features/evaluation/command.py.

Invariant: nothing here imports torch before it is known that there is something to evaluate on.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from features.evaluation.config import require_tasks, with_samples
from features.evaluation.words import read_words
from training.config.explain import explain_run
from training.config.found_config import require_no_code
from training.config.loader import load_config
from training.run.files import from_here
from training.run.signals import EndingSignals


def evaluate_command(argv: Sequence[str], signals: EndingSignals) -> int:
    """Evaluates one model, or two on the same tasks; prints a table, returns the exit code.

    Raises:
        ConfigError, CannotUse, EnvironmentsFail: it cannot be done; says what to do.
    """
    wanted = read_words(argv)
    loaded = load_config(list(wanted.words), check=False)
    if wanted.is_found:
        file = from_here(Path(wanted.words[0]))
        require_no_code(loaded, file, shlex.join(["python", "main.py", file, *argv]))
    config = with_samples(loaded.config, wanted.n, loaded.sources)
    if loaded.explain:
        print(explain_run(loaded), flush=True)
        return 0
    require_tasks(config)
    # Imports torch: late.
    from features.evaluation.command import evaluate

    return evaluate(config, wanted, signals)
