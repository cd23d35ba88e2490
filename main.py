"""Trains: `python main.py CONFIG.yaml key=value ...`; `--explain` shows every value, where it came from, what reads it.

`--plan` says how much memory the run would take, phase by phase, and loads no model. What is wrong before the first
step ends the run with one line, as lack of memory does; `--debug` shows the traceback.
"""

import logging
import os
import signal
import sys
import traceback
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from data.texts import say
from data.watch import ATTEMPT, WATCH, watching
from training.config import PPOConfig
from training.config.checks import check_config
from training.config.loader import ConfigError, bias_line, explain, load_config, sizes
from training.run import process

# How the allocators of torch (CUDA, CPU) and vLLM say that memory ran out.
MEMORY_RAN_OUT = (
    "OutOfMemoryError",
    "out of memory",
    "can't allocate memory",
    "No available memory",
)


def main(argv: list[str]) -> int:
    """Runs the command line; returns the process's exit code."""
    signals = process.EndingSignals()
    signals.install()
    try:
        return run(argv, signals)
    # As a shell reports it.
    except KeyboardInterrupt:
        return 128 + signals.received


def run(argv: list[str], signals: process.EndingSignals) -> int:
    """Reads the config, trains, and prints the report."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    debug, planning = "--debug" in argv, "--plan" in argv
    # As with other programs, `| head` ends what is printed here.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        loaded = load_config(
            [word for word in argv if word not in ("--debug", "--plan")], check=not planning
        )
        if loaded.explain:
            print(
                explain(loaded),
                sizes(loaded.config),
                bias_line(loaded.config),
                sep="\n",
                flush=True,
            )
        if planning or loaded.explain:
            return plan(loaded.config) if planning else 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    from training.run.alarms import AlarmStop
    from training.run.metric_utils import EnvironmentsFail

    if loaded.config.trainer.max_restarts and ATTEMPT not in os.environ:
        return process.Supervisor(loaded.config, Path(__file__), argv).run()
    trainer, run_dir = loaded.config.trainer, Path(loaded.config.trainer.run_dir).absolute()
    try:
        unsaved = train(loaded.config, signals)
    # The first is found by trying: environments that do not start.
    except (ConfigError, AlarmStop, EnvironmentsFail) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else process.MEND
    except Exception as error:
        line = in_one_line(error, loaded.config)
        if debug or line is None:
            raise
        print(f"{line}; --debug shows where", file=sys.stderr)
        return process.OUT_OF_MEMORY if ran_out_of_memory(line) else 1
    if "file" in trainer.logger and not trainer.val_only:
        print_report(run_dir)
    if unsaved is not None:
        print(unsaved, file=sys.stderr)
    return 0 if unsaved is None else 1


def plan(config: PPOConfig) -> int:
    """Prints what memory the run would take."""
    from training.run.plan import Planner

    for problem in check_config(config, ask_hub=False):
        print(f"it would not start here: {problem}", file=sys.stderr)
    try:
        print(Planner(config).tell(), sizes(config), sep="\n")
    # A model's own code may ask for numbers, of which there are none.
    except (ValueError, OSError, RuntimeError, LookupError, ArithmeticError) as error:
        raise ConfigError([f"no plan can be made: {error}"]) from error
    return 0


def train(config: PPOConfig, signals: process.EndingSignals) -> OSError | None:
    """Trains; returns why the run's last checkpoint is missing, where it is."""
    from training.building import build_trainer
    from training.run.checkpoint import CheckpointError

    trainer, unsaved = build_trainer(config), None
    trainer.signals, signals.postpone = signals, lambda: trainer.in_step
    process.say_busy_cores()
    name = "driver" if config.trainer.use_ray else "rank_0"
    with watching(config.trainer.stall_timeout_s, trainer.run_dir / "stalls", name):
        try:
            trainer.fit()
        except CheckpointError as error:
            unsaved = error
        except SystemExit as error:
            raise RuntimeError("code of yours called sys.exit()") from error
        except Exception as error:
            # A rank's says its own.
            if not getattr(error, "__notes__", ()):
                error.add_note(f"{name}, {WATCH.where}")
            raise
        finally:
            signals.close()
            try:
                trainer.shutdown()
            # Whatever ended the run stands.
            except Exception:
                logging.exception("the workers did not end well")
    return unsaved


def in_one_line(error: Exception, config: PPOConfig) -> str | None:
    """Says what a user can mend in a line, with advice where memory ran out; None for what only a traceback explains.

    That is all that comes of a step, where users' own code runs.
    """
    # A rank's error, as Ray hands it on, has its traceback for a text.
    cause = getattr(error, "cause", None) or error
    text = "; ".join(
        [*getattr(error, "__notes__", ()), " ".join(f"{type(cause).__name__}: {cause}".split())]
    )
    if isinstance(error, MemoryError) or ran_out_of_memory(text):
        budget = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        return say("out_of_memory", what=text[:300], budget=budget)
    in_step = any(frame.name == "train_step" for frame in traceback.extract_tb(error.__traceback__))
    return text if isinstance(error, ValueError | OSError | ImportError) and not in_step else None


def ran_out_of_memory(text: str) -> bool:
    """Says whether an error's text says so."""
    return any(words in text for words in MEMORY_RAN_OUT)


def print_report(run_dir: Path) -> None:
    """Prints the run's table and draws its curves; a run that has none, or no room for it, ended well all the same."""
    from training.run.report import write_report

    try:
        print(write_report(run_dir))
        print(f"reward curve: {run_dir / 'report.png'}")
    except (OSError, ValueError) as error:
        print(f"no report of {run_dir}: {error}", file=sys.stderr)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    process.give_signals_back()
    sys.exit(code)
