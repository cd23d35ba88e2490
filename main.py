"""Trains: `python main.py CONFIG.yaml key=value ...`; `--explain` shows every value and where it came from."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from training.config import PPOConfig
from training.config.checks import load_custom_algorithm
from training.config.loader import ConfigError, explain, load_config, to_yaml
from workers.ranks.memory import limit_caches, return_large_blocks

OWN_CLUSTER = {  # of Ray's environment
    # What keeps it on loopback, on any system; a `_node_ip_address` of 127.0.0.1 is replaced by one that others can reach.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",  # for which a run whose cluster was killed hangs
}
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 5.0  # for Ray's processes to end by themselves


def build_trainer(config: PPOConfig):  # type: ignore[no-untyped-def]  # the heavy imports come after the config's checks
    """The trainer of this config, with its datasets, reward functions and workers' classes; no model is loaded yet."""
    import transformers

    from data.loading import load_extern_object
    from data.rl_dataset import create_dataset
    from training.ray_trainer import RayPPOTrainer
    from training.reward import load_reward_manager

    limit_caches()
    return_large_blocks()
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
    sampler = None
    if data.sampler.class_path:
        sampler = load_extern_object(data.sampler.class_path, str(data.sampler.class_name))(train, data)
    return RayPPOTrainer(
        config,
        tokenizer,
        reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
        val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1),
        train_dataset=train,
        val_dataset=val,
        train_sampler=sampler,
    )


class EndingSignals:
    """Ctrl-C, SIGTERM and SIGHUP end the run through its `finally` blocks, as KeyboardInterrupt; a signal that is ignored already (nohup) stays so.

    Only the first does: what comes after it, or after `close`, is ignored, since the clean-up takes but seconds and must be whole.
    """

    def __init__(self) -> None:
        self.received, self.open = 0, True

    def install(self) -> None:
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._end)

    def close(self) -> None:
        self.open = False

    def _end(self, number: int, frame: object) -> None:
        if self.open:
            self.open, self.received = False, number
            # Not print: the signal may have come in the midst of one.
            os.write(2, f"\n{signal.Signals(number).name}: ending the run, which takes a few seconds\n".encode())
            raise KeyboardInterrupt


@contextmanager
def closed_pipe_is_no_error() -> Iterator[None]:
    """What the block prints may be cut short by its reader, as with `| head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at the end goes there
        raise SystemExit(0) from None


@contextmanager
def ray_cluster(config: PPOConfig, signals: EndingSignals) -> Iterator[None]:
    """Ray for the block, where the config asks for it: the cluster of `ray_kwargs.ray_init.address`, or one of its own on loopback."""
    if not config.trainer.use_ray:
        yield
        return
    settings = dict(config.ray_kwargs.ray_init)
    if settings.get("address") in (None, "local"):
        # Logical CPUs only count ranks; how many threads a rank has is set with its process. Without "local" a cluster that `ray start` or
        # RAY_ADDRESS left here would be taken.
        settings = {"include_dashboard": False, "num_cpus": config.trainer.num_ranks} | settings | {"address": "local"}
        for name, value in OWN_CLUSTER.items():
            os.environ.setdefault(name, value)
    import psutil
    import ray

    try:
        ray.init(**settings)
        signals.install()  # again: Ray has put a handler of its own
        yield
    finally:
        signals.close()
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        for process in psutil.wait_procs(started, timeout=GRACE_S)[1]:
            process.kill()


def main(argv: list[str]) -> int:
    """Runs the command line; the process's exit code."""
    signals = EndingSignals()
    signals.install()
    try:
        return run(argv, signals)
    except KeyboardInterrupt:
        return 128 + signals.received  # as a shell reports it


def run(argv: list[str], signals: EndingSignals) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        with closed_pipe_is_no_error():
            loaded = load_config(argv)
            if loaded.explain:
                print(explain(loaded))
                return 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    trainer = loaded.config.trainer
    unsaved = train(loaded.config, signals)
    if "file" in trainer.logger and not trainer.val_only:
        print_report(Path(trainer.run_dir))
    if unsaved is not None:
        print(unsaved, file=sys.stderr)
    return 0 if unsaved is None else 1


def train(config: PPOConfig, signals: EndingSignals) -> OSError | None:
    """The run itself; returns why its last checkpoint is missing, where it is."""
    from training.run.checkpoint import CheckpointError  # imports torch: late

    trainer, unsaved = build_trainer(config), None
    run_dir = Path(config.trainer.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    if not config.trainer.val_only:
        (run_dir / "config.yaml").write_text(to_yaml(config))
    with ray_cluster(config, signals):
        try:
            trainer.init_workers()
            trainer.fit()
        except CheckpointError as error:
            unsaved = error
        finally:
            signals.close()
            trainer.shutdown()
    return unsaved


def print_report(run_dir: Path) -> None:
    """The table of the run, and its curves in report.png; a run that has none, or no room for it, has ended well all the same."""
    from training.run.report import write_report

    try:
        print(write_report(run_dir))
        print(f"reward curve: {run_dir / 'report.png'}")
    except (OSError, ValueError) as error:
        print(f"no report of {run_dir}: {error}", file=sys.stderr)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    for number in ENDING:  # what a user's own threads still hold up can be ended now
        signal.signal(number, signal.SIG_DFL)
    sys.exit(code)
