"""Prints what memory a run would take: `python main.py CONFIG.yaml --plan key=value ...`.

Invariant: no model is loaded, and what would keep the run from starting here keeps no plan from
being made.
"""

import sys
from collections.abc import Sequence

from features.memory_plan.planner import Planner
from training.config import PPOConfig
from training.config.checks import check_config
from training.config.explain import explain_run, sizes
from training.config.loader import ConfigError, load_config
from training.run.signals import EndingSignals, ended_by_a_closed_pipe

OPTION = "--plan"


def plan_command(argv: Sequence[str], signals: EndingSignals) -> int:
    """Prints the plan, with --explain the values before it; returns the exit code.

    Raises:
        ConfigError: no plan can be made.
    """
    loaded = load_config([word for word in argv if word != OPTION], check=False)
    with ended_by_a_closed_pipe():
        if loaded.explain:
            print(explain_run(loaded), flush=True)
        print_plan(loaded.config)
    return 0


def print_plan(config: PPOConfig) -> None:
    """Prints what memory the run would take, and, to stderr, why it would not start here.

    Raises:
        ConfigError: no plan can be made.
    """
    for problem in check_config(config, ask_hub=False):
        print(f"it would not start here: {problem}", file=sys.stderr)
    try:
        print(Planner(config).tell())
        print(sizes(config))
    # A model's own code may ask for numbers, of which there are none.
    except (ValueError, OSError, RuntimeError, LookupError, ArithmeticError) as error:
        raise ConfigError([f"no plan can be made: {error}"]) from error
