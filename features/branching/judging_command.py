"""Checks what a court is asked for, and hands it to features/branching/judging.py.

Invariant: nothing here imports torch before it is known that there is something to judge.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from features.branching.judging_words import read_words, with_estimators
from training.config.explain import explain_run
from training.config.found_config import require_no_code
from training.config.loader import ConfigError, load_config
from training.run.files import from_here
from training.run.signals import EndingSignals


def judge_command(argv: Sequence[str], signals: EndingSignals) -> int:
    """Judges estimators by continuations; prints a table and a sentence, returns the exit code.

    Raises:
        ConfigError, CannotUse: it cannot be done; says what to do.
    """
    wanted = read_words(argv)
    loaded = load_config(list(wanted.words), check=False)
    if wanted.is_found:
        file = from_here(Path(wanted.words[0]))
        require_no_code(loaded, file, shlex.join(["python", "main.py", file, *argv]))
    if loaded.explain:
        print(explain_run(loaded), flush=True)
        return 0
    if not loaded.config.environments:
        raise ConfigError(
            ["--judge-credit continues from states of environments: set agent.environment"]
        )
    # Imports torch: late.
    from features.branching.judging import judge_credit

    return judge_credit(loaded.config, with_estimators(loaded.config, wanted), signals)
