"""Trains: `python main.py CONFIG.yaml key=value ...`.

`--explain` shows the values that were given and what follows from them, `--explain-all` every
value, where it came from and what reads it. Features bring options that do something in place of
training, such as `--plan` and `--eval MODEL` (training/modes.py). What is wrong before the first
step ends the run with one line, as lack of memory does; `--debug` shows the traceback.
"""

import atexit
import io
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from training.features import FeatureError

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

try:
    from data.own_process import exits_told
    from data.texts import text_of
    from data.watchdog import WATCHDOG, watching
    from training.config import PPOConfig
    from training.config.explain import explain_run, explain_values
    from training.config.loader import ConfigError, load_config
    from training.modes import chosen_mode, describe_missing_mode, run_mode, starters
    from training.run.exit_codes import MEND, OUT_OF_MEMORY
    from training.run.out_of_memory import MemoryKills, ran_out_of_memory
    from training.run.signals import (
        EndingSignals,
        end_at_signals,
        ended_by_a_closed_pipe,
        ignore_late_signals,
    )
except ModuleNotFoundError as missing:
    sys.exit(
        f"{missing} in {sys.executable}: `make setup` makes .venv, with which "
        "`.venv/bin/python main.py ...` runs, or `source .venv/bin/activate` before it"
    )
except FeatureError as error:
    print(error, file=sys.stderr)
    sys.exit(2)

if TYPE_CHECKING:
    from training.ray_trainer import RayPPOTrainer

# So much of an error's text stands in the line that a user reads.
MAX_ERROR_CHARS = 300
# Functions of the trainer's in which a step is made, or generated ahead.
STEP_FUNCTIONS = ("train_step", "_generate_batch")
# An option of this file alone; the others are the loader's and the modes'.
DEBUG = "--debug"


def main(argv: list[str]) -> int:
    """Runs the command line; returns the process's exit code."""
    signals = EndingSignals()
    signals.install()
    try:
        with exits_told():
            return run(argv, signals)
    except FeatureError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # As a shell reports it.
        return 128 + signals.received


def run(argv: list[str], signals: EndingSignals) -> int:
    """Does as a mode says, or reads the config and explains it or trains; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal has not must not end a run.
        sys.stdout.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # A line for each request; the addresses of programs' requests are secret.
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)
    mode = chosen_mode(argv)
    if mode is not None:
        words = [word for word in argv if word != DEBUG]
        return run_in_mode(mode, words, signals, debug=DEBUG in argv)
    missing = describe_missing_mode(argv)
    if missing is not None:
        print(missing, file=sys.stderr)
        return 2
    try:
        with ended_by_a_closed_pipe():
            loaded = load_config([word for word in argv if word != DEBUG], ask_engine=False)
            if loaded.explain:
                print(explain_run(loaded), flush=True)
        if not loaded.explain:
            try_before_heavy_imports(loaded.config)
    except ConfigError as error:
        print_config_error(error)
        if not argv:
            print("start a file's run by: python main.py CONFIG.yaml (see --help)", file=sys.stderr)
        return 2
    if loaded.explain:
        return 0
    for starter in starters():
        code = starter(loaded.config, Path(__file__), argv)
        if code is not None:
            return code
    return run_training(loaded.config, signals, debug=DEBUG in argv)


def run_in_mode(mode: str, words: list[str], signals: EndingSignals, *, debug: bool) -> int:
    """Does what stands in `training.modes` in place of training; returns the exit code.

    What a user's own code raises keeps its traceback, as in a step.
    """
    try:
        return run_mode(mode, words, signals)
    except ConfigError as error:
        print_config_error(error)
        return 2
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        # They import torch, which what is refused at once does not wait for.
        from training.run.abort_policy import EnvironmentsFail
        from training.run.named_model import CannotUse

        if isinstance(error, CannotUse | EnvironmentsFail):
            print(error, file=sys.stderr)
            return MEND
        if debug or not isinstance(error, ValueError | OSError | ImportError):
            raise
        print(f"{type(error).__name__}: {text_of(error)}; --debug shows where", file=sys.stderr)
        return 1


def print_config_error(error: ConfigError) -> None:
    """Prints what is wrong with the config; with --explain the values, most wanted then."""
    if error.loaded is not None and error.loaded.explain:
        print(explain_values(error.loaded))
    print(error, file=sys.stderr)


def run_training(config: PPOConfig, signals: EndingSignals, *, debug: bool) -> int:
    """Trains and prints the report, or why the run ended in one line; returns the exit code."""
    from custom.env import BadContext, BadRewardFunction
    from data.plain_state import CannotSave
    from training.observers import RunStopped
    from training.run.abort_policy import EnvironmentsFail
    from training.run.checkpoint_folders import CannotResume

    kills = MemoryKills()
    try:
        save_error = train(config, signals)
    except ConfigError as error:
        # Found by trying: environments that do not start.
        print(cause_of(error), file=sys.stderr)
        return 2
    except RunStopped as stop:
        print(stop, file=sys.stderr)
        return stop.exit_code
    except (CannotResume, CannotSave, EnvironmentsFail) as error:
        print(cause_of(error), file=sys.stderr)
        return MEND
    except (BadContext, BadRewardFunction) as error:
        if debug:
            raise
        # It may be a server's that did not answer, so that the run may be started again.
        cause = cause_of(error)
        print(cause, *getattr(error, "__notes__", ()), sep="; ", file=sys.stderr)
        return OUT_OF_MEMORY if ran_out_of_memory(str(cause)) else 1
    except Exception as error:
        exit_code = report_error(error, config, kills, debug=debug)
        if exit_code is None:
            raise
        return exit_code
    if save_error is not None:
        print(save_error, file=sys.stderr)
        return 1
    return 0


def try_before_heavy_imports(config: PPOConfig) -> None:
    """Makes the run's environments, and only then asks the engine, which imports torch.

    So a class of the user's that cannot be made is told in seconds. Raises ConfigError.
    """
    from training.config.resources.engines import ask_engine_class
    from training.making_trial import try_making
    from training.run.leftovers import ends_leftovers

    stalls = Path(config.trainer.run_dir).absolute() / "stalls"
    with ends_leftovers(), watching(config.trainer.stall_timeout_s, stalls, "driver"):
        try_making(config)
    problems = list(ask_engine_class(config))
    if problems:
        raise ConfigError(problems)


def cause_of(error: BaseException) -> BaseException:
    """Returns a rank's own error: as Ray hands it on, it has its traceback for a text."""
    return getattr(error, "cause", None) or error


def report_error(
    error: Exception, config: PPOConfig, kills: MemoryKills, *, debug: bool
) -> int | None:
    """Prints what ended the run in one line and returns the exit code; None: it is to be raised."""
    why = kills.explain(error)
    if why:
        error.add_note(why)
    line = in_one_line(error, config)
    out_of_memory = line is not None and ran_out_of_memory(line)
    if line is None or (debug and not out_of_memory):
        return None
    if debug:
        traceback.print_exc()
    print(f"{line}; --debug shows where", file=sys.stderr)
    return OUT_OF_MEMORY if out_of_memory else 1


def train(config: PPOConfig, signals: EndingSignals) -> OSError | None:
    """Trains; returns why the run's last checkpoint is missing, where it is."""
    from training.building import build_trainer
    from training.run.leftovers import ends_leftovers
    from training.run.ray_cluster import warn_of_busy_cores

    name = "driver" if config.trainer.use_ray else "rank_0"
    stalls = Path(config.trainer.run_dir).absolute() / "stalls"
    # Building runs code of users', too: their environments' trial, their reward function.
    with ends_leftovers(), watching(config.trainer.stall_timeout_s, stalls, name):
        try:
            trainer = build_trainer(config)
        except SystemExit as error:
            raise RuntimeError("code of yours called sys.exit()") from error
        trainer.signals = signals
        signals.postpone = lambda: trainer.in_step
        warn_of_busy_cores()
        save_error = fit(trainer, signals, name)
        for text in trainer.observers.summaries():
            print(text)
        return save_error


def fit(trainer: "RayPPOTrainer", signals: EndingSignals, name: str) -> OSError | None:
    """Trains with a trainer and shuts it down; returns why the last checkpoint is missing.

    Args:
        name: of this process, in errors.
    """
    from training.run.checkpoint import CheckpointError

    save_error = None
    try:
        trainer.fit()
    except CheckpointError as error:
        save_error = error
    except SystemExit as error:
        raise RuntimeError("code of yours called sys.exit()") from error
    except KeyboardInterrupt as error:
        if signals.received:
            raise
        # No signal has come.
        raise RuntimeError("code of yours raised KeyboardInterrupt") from error
    except Exception as error:
        # An error of a rank has its notes from there.
        if not getattr(error, "__notes__", ()):
            error.add_note(f"{name}, {WATCHDOG.where}")
        raise
    finally:
        signals.close()
        try:
            trainer.shutdown()
        except Exception:
            # Whatever ended the run is what is raised or returned.
            logging.exception("the workers did not end well")
    return save_error


def in_one_line(error: Exception, config: PPOConfig) -> str | None:
    """Describes an error in one line, with advice where memory ran out.

    Returns None for what only a traceback explains: all that comes of a step, where users' own
    code runs.
    """
    cause = cause_of(error)
    kind = "MemoryError" if isinstance(cause, MemoryError) else type(cause).__name__
    message = " ".join(f"{kind}: {text_of(cause)}".split())
    text = "; ".join([*getattr(error, "__notes__", ()), message])
    if ran_out_of_memory(text):
        budget = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        return (
            f"{text[:MAX_ERROR_CHARS]}. Memory ran out: lower ppo_max_token_len_per_gpu "
            f"(the actor's is {budget}), the like of log_prob and critic, "
            "rollout.gpu_memory_utilization and max_num_seqs; or set "
            "model.enable_gradient_checkpointing, fsdp_config.param_offload and optimizer_offload "
            "to true"
        )
    frames = traceback.extract_tb(error.__traceback__)
    in_step = any(frame.name in STEP_FUNCTIONS for frame in frames)
    if in_step or not isinstance(error, ValueError | OSError | ImportError):
        return None
    return text


if __name__ == "__main__":
    # What is registered first runs last.
    atexit.register(ignore_late_signals)
    code = 1
    try:
        code = main(sys.argv[1:])
    except SystemExit as end:
        # `--help` ends here.
        code = end.code if isinstance(end.code, int) else 1
    finally:
        end_at_signals(code)
    sys.exit(code)
