"""Trains: `python main.py CONFIG.yaml key=value ...`; `--explain` shows every value and where it came from.

What is wrong before the first step ends the run with one line, as lack of memory does; `--debug` shows the traceback.
"""

import logging
import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from training.config import PPOConfig
from training.config.bias import bias_line
from training.config.checks import load_custom_algorithm
from training.config.loader import ConfigError, explain, load_config
from training.config.texts import say
from training.run.process import EndingSignals, closed_pipe_is_no_error, give_signals_back, ray_cluster, say_busy_cores
from training.run.records import held

# How the allocators of torch (CUDA, CPU) and vLLM say that memory ran out.
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "No available memory")


# Not annotated, as the heavy imports come after the config's checks.
def build_trainer(config: PPOConfig):  # type: ignore[no-untyped-def]
    """Builds the trainer of this config, with its datasets, reward functions and workers' classes, but no model yet."""
    import transformers

    from data.loading import load_extern_object
    from data.rl_dataset import create_dataset
    from training.ray_trainer import RayPPOTrainer
    from training.reward import load_reward_manager
    from workers.ranks.memory import limit_caches, settle_heap

    limit_caches()
    settle_heap()
    if config.custom_algorithm:
        load_custom_algorithm(config.custom_algorithm)
    model = config.actor_rollout_ref.model
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    if config.environments:
        from training.agent_trainer import AgentTrainer

        return AgentTrainer(config, tokenizer)
    data = config.data
    train = create_dataset(data.train_files, data, tokenizer, max_samples=data.train_max_samples)
    val = create_dataset(data.val_files, data, tokenizer, max_samples=data.val_max_samples) if data.val_files else None
    own = data.sampler
    sampler = load_extern_object(own.class_path, str(own.class_name))(train, data) if own.class_path else None
    datasets = {"train_dataset": train, "val_dataset": val, "train_sampler": sampler}
    reward_fn, val_reward_fn = (load_reward_manager(config, tokenizer, num_examine=shown) for shown in (0, 1))
    return RayPPOTrainer(config, tokenizer, reward_fn=reward_fn, val_reward_fn=val_reward_fn, **datasets)


def main(argv: list[str]) -> int:
    """Runs the command line; returns the process's exit code."""
    signals = EndingSignals()
    signals.install()
    try:
        return run(argv, signals)
    # As a shell reports it.
    except KeyboardInterrupt:
        return 128 + signals.received


def run(argv: list[str], signals: EndingSignals) -> int:
    """Reads the config, trains, and prints the report."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    debug = "--debug" in argv
    try:
        with closed_pipe_is_no_error():
            loaded = load_config([word for word in argv if word != "--debug"])
            if loaded.explain:
                print(explain(loaded), bias_line(loaded.config), sep="\n")
                return 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    from training.run.alarms import AlarmStop
    from training.run.episodes import EnvironmentsFail

    trainer = loaded.config.trainer
    run_dir = Path(trainer.run_dir).absolute()
    try:
        unsaved = train(loaded.config, signals)
    # The first is found by trying: environments that do not start.
    except (ConfigError, AlarmStop, EnvironmentsFail) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except Exception as error:
        line = in_one_line(error, loaded.config)
        if debug or line is None:
            raise
        print(f"{line}; --debug shows where", file=sys.stderr)
        return 1
    if "file" in trainer.logger and not trainer.val_only:
        print_report(run_dir)
    if unsaved is not None:
        print(unsaved, file=sys.stderr)
    return 0 if unsaved is None else 1


def train(config: PPOConfig, signals: EndingSignals) -> OSError | None:
    """Trains; returns why the run's last checkpoint is missing, where it is."""
    from training.run.checkpoint import CheckpointError

    trainer, unsaved = build_trainer(config), None
    say_busy_cores()
    signals.postpone = lambda: trainer.in_step
    trainer.asked_to_end = lambda: bool(signals.received)
    with held(trainer.run_dir), ray_cluster(config, signals):
        try:
            trainer.init_workers()
            trainer.fit()
        except CheckpointError as error:
            unsaved = error
        finally:
            signals.close()
            trainer.shutdown()
    return unsaved


def in_one_line(error: Exception, config: PPOConfig) -> str | None:
    """Says what a user can mend in a line, with advice where memory ran out; None for what only a traceback explains.

    That is all that comes of a step, where users' own code runs.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, MemoryError) or any(words in text for words in OUT_OF_MEMORY):
        budget = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        return say("out_of_memory", what=text[:300], budget=budget)
    in_step = any(frame.name == "train_step" for frame in traceback.extract_tb(error.__traceback__))
    return text if isinstance(error, ValueError | OSError | ImportError) and not in_step else None


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
    give_signals_back()
    sys.exit(code)
