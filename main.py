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
from training.config_checks import load_custom_algorithm
from training.config_loader import ConfigError, explain, load_config, to_yaml
from workers.memory import limit_caches, return_large_blocks


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


@contextmanager
def ray_cluster(config: PPOConfig) -> Iterator[None]:
    """Ray for the block, where the config asks for it: the cluster of `ray_kwargs.ray_init.address`, or one of its own on loopback."""
    if not config.trainer.use_ray:
        yield
        return
    import ray

    settings = dict(config.ray_kwargs.ray_init)
    if "address" not in settings:
        # Logical CPUs only count ranks; how many threads a rank has is set with its process.
        settings = {
            "_node_ip_address": "127.0.0.1",
            "include_dashboard": False,
            "num_cpus": config.trainer.num_ranks,
        } | settings
    ray.init(**settings)
    try:
        yield
    finally:
        ray.shutdown()


def main(argv: list[str]) -> int:
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # leave through `finally`, as Ctrl-C does
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        loaded = load_config(argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if loaded.explain:
        print(explain(loaded))
        return 0
    from training.report import write_report

    trainer = build_trainer(loaded.config)
    run_dir = Path(loaded.config.trainer.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    if not loaded.config.trainer.val_only:
        (run_dir / "config.yaml").write_text(to_yaml(loaded.config))
    with ray_cluster(loaded.config):
        try:
            trainer.init_workers()
            trainer.fit()
        finally:
            trainer.shutdown()
    if "file" in loaded.config.trainer.logger and not loaded.config.trainer.val_only:
        print(write_report(run_dir))
        print(f"reward curve: {run_dir / 'report.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
