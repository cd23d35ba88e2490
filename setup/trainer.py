"""The small API's trainer: a ConfigStore, an environment or a dataset, and a reward function become a run.

Invariant: it only builds `training.ray_trainer.RayPPOTrainer`, or `AgentTrainer`, and calls it; an iteration is one of
its steps. docs/python.md has the keys of `metrics_history`.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from custom.agent import AgentSpec
from custom.tools import MultiTurnManager
from setup.env import ConfigStore, EnvironmentRewardWrapper, RolloutData
from setup.inference import MultiTurnInferenceEngine, tools_of
from training.agent_trainer import AgentTrainer
from training.building import build_trainer
from training.config.loader import ConfigError
from training.ray_trainer import RayPPOTrainer as CoreTrainer

__all__ = ["CustomRayPPOTrainer", "RayPPOTrainer", "create_trainer"]

# Of a step's metrics, under the names of `metrics_history`.
HISTORY = {
    "policy_loss": "actor/pg_loss",
    "value_loss": "critic/vf_loss",
    "entropy": "actor/entropy",
}
HISTORY |= {
    "kl": "actor/ppo_kl",
    "clip_fraction": "actor/pg_clipfrac",
    "reward": "critic/score/mean",
}
HISTORY |= {
    "response_length": "response_length/mean",
    "learning_rate": "actor/lr",
    "seconds": "timing_s/step",
}


class RayPPOTrainer(AbstractContextManager["RayPPOTrainer"]):
    """Trains a policy on episodes in an environment, or on the prompts of a dataset.

    Args:
        config: a ConfigStore; also a config of the trainer's (an OmegaConf, a mapping, a PPOConfig).
        environment: an instance, which every episode gets a copy of, a class, or a function that makes one.
        reward_fn: `reward_fn(trajectory, environment)` or `reward_fn(trajectory)`, in place of the environment's
            rewards; for a dataset without environment also an object that is called with a DataProto.
        dataset: rows of prompts (texts, messages or dicts with them under "prompt"); with an environment its tasks,
            which `reset(seed, **row)` is given.
        tokenizer: None: the model's.
        tool_manager: a MultiTurnManager, whose tools and parser the agents get.
        multi_turn_engine: lends its tools, parser, system prompt and max_turns; what generates is what is trained.

    Raises:
        ConfigError: at the first use, with all that is wrong with the config, in its fields' names.
    """

    def __init__(
        self,
        config: Any = None,
        environment: Any = None,
        reward_fn: Any = None,
        dataset: Any = None,
        *,
        tokenizer: Any = None,
        tool_manager: MultiTurnManager | None = None,
        multi_turn_engine: MultiTurnInferenceEngine | None = None,
    ) -> None:
        self.config = config if isinstance(config, ConfigStore) else ConfigStore.of(config or {})
        self.environment, self.reward_fn, self.dataset = environment, reward_fn, dataset
        given = {"environment": environment, "reward_fn": reward_fn, "dataset": dataset}
        self._objects = self.config._objects = {
            name: thing for name, thing in given.items() if thing is not None
        }
        self.tokenizer, self.lent = (
            tokenizer,
            {} if multi_turn_engine is None else multi_turn_engine.lent(),
        )
        self.lent |= tools_of(tool_manager)
        self.metrics_history: list[dict[str, Any]] = []
        self.core: CoreTrainer | None = None
        # The epoch under way: its steps' metrics, and how many make it full.
        self._steps: list[dict[str, float]] = []
        self._per_epoch, self._progress = 0, tqdm(disable=True)

    def fit(
        self, num_epochs: int | None = None, num_iters_per_epoch: int | None = None
    ) -> list[dict[str, Any]]:
        """Trains for so many epochs, or the config's number; returns `metrics_history`.

        A run that was cut off goes on from its last checkpoint in `checkpoint.output_dir`, up to that number; a second
        call goes on for as many epochs again.
        """
        if num_epochs is not None:
            self.config.training.num_epochs = num_epochs
        if num_epochs or num_iters_per_epoch:
            # A loaded config's, which would win.
            self.config.overrides.pop("trainer.total_training_steps", None)
        fresh = self.core is None
        core = self._start(num_iters_per_epoch)
        self._per_epoch = num_iters_per_epoch or self._per_epoch
        if not fresh:
            core.total_training_steps = (
                core.global_steps + self.config.training.num_epochs * self._per_epoch
            )
        with tqdm(
            total=core.total_training_steps, unit="step", dynamic_ncols=True
        ) as self._progress:
            core.fit()
        return self.metrics_history

    def rollout(self) -> RolloutData:
        """Plays, or answers, one batch and scores it."""
        core = self._start()
        rows = core.row_stream.draw()
        core.global_steps += 1
        batch, _ = core.generate(rows)
        core.position = core.row_stream.position
        if "token_level_scores" not in batch.batch:
            scores, infos = core.score(batch, core.reward_fn)
            batch = core.phases.add_rewards(batch, scores, infos)
        facts = core.multi_turn_rollout.take_facts() if isinstance(core, AgentTrainer) else []
        return RolloutData.of(batch, core.tokenizer, facts)

    def train_step(self, rollout: RolloutData) -> dict[str, float]:
        """Trains on exactly these episodes; returns the trainer's metrics."""
        core = self._start()
        if isinstance(core, AgentTrainer):
            core.multi_turn_rollout.facts[False, core.global_steps] = list(rollout.facts)
        # A copy, to which the step adds its own.
        metrics = core.learn(rollout.batch.select())
        core.in_step = False
        self._on_step(metrics)
        return metrics

    def save_checkpoint(self, path: str | Path) -> Path:
        """Writes the whole state of the run to the folder, and returns when it is there."""
        core = self._start()
        return core.saver.save_to(Path(path), core.take_snapshot())

    def load_checkpoint(self, path: str | Path) -> None:
        """Goes on from a folder of `save_checkpoint`'s, or a global_step_N of a run."""
        self._start().load_checkpoint(Path(path))

    def cleanup(self) -> None:
        """Ends environments and workers and frees their memory; the trainer may be used again, from its checkpoint."""
        core, self.core, self._steps = self.core, None, []
        if core is not None:
            core.shutdown()

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    def _start(self, iterations: int | None = None) -> CoreTrainer:
        """Builds trainer and workers at the first use."""
        # The config may be of several trainers.
        self.config._objects = self._objects
        if self.core is None:
            given = self._given()
            if iterations is None and self.dataset is not None:
                iterations = max(len(self.dataset) // self.config.training.batch_size, 1)
            self._per_epoch = iterations or self.config.training.iterations_per_epoch
            try:
                self.core = build_trainer(
                    self.config.settings(self._per_epoch), self.tokenizer, **given
                )
                self.core.on_step = self._on_step  # type: ignore[method-assign]
                self.core.init_workers()
                self.core.load_checkpoint()
            except BaseException as error:
                self.cleanup()
                if isinstance(error, ConfigError):
                    raise ConfigError(list(map(self.config.in_our_words, error.problems))) from None
                raise
        return self.core

    def _given(self) -> dict[str, Any]:
        """Returns the arguments of the trainer's that the objects are."""
        rows, source, reward_fn = self.dataset, self.environment, self.reward_fn
        if isinstance(rows, str | Path):
            raise ValueError(
                f"dataset={rows!r} is no rows; for files set config.overrides['data.train_files']"
            )
        if isinstance(rows, Sequence):
            rows = [row if isinstance(row, Mapping) else {"prompt": row} for row in rows]
        if source is None:
            if inspect.isroutine(reward_fn) or isinstance(reward_fn, partial):
                reward_fn = EnvironmentRewardWrapper(None, reward_fn)
            return {"train_dataset": rows, "reward_fn": reward_fn}
        if isinstance(source, type) and "config" in inspect.signature(source).parameters:
            source = partial(source, self.config.environment)
        return {
            "train_dataset": rows,
            "specs": [AgentSpec(environment=source, reward_fn=reward_fn, **self.lent)],
        }

    def _on_step(self, metrics: dict[str, float]) -> None:
        self._steps.append(metrics)
        self._progress.n = int(metrics["training/global_step"])
        self._progress.set_postfix(reward=f"{metrics.get(HISTORY['reward'], float('nan')):.3f}")
        if len(self._steps) >= self._per_epoch or (
            self.core and self._progress.n == self.core.total_training_steps
        ):
            names = dict.fromkeys(name for step in self._steps for name in step)
            every = {
                name: float(np.mean([step[name] for step in self._steps if name in step]))
                for name in names
            }
            told = {name: every.get(key) for name, key in HISTORY.items()}
            epoch = -(-self._progress.n // self._per_epoch)
            self.metrics_history.append(
                {"epoch": epoch, "iterations": len(self._steps), **told, "all": every}
            )
            self._steps = []


class CustomRayPPOTrainer(RayPPOTrainer):
    """Is the trainer, with tokenizer and multi_turn_engine behind the reward_fn; see `RayPPOTrainer`."""

    def __init__(
        self, config: Any, environment: Any, reward_fn: Any = None, *behind: Any, **given: Any
    ) -> None:
        given |= zip(("tokenizer", "multi_turn_engine"), behind, strict=False)
        super().__init__(config, environment, reward_fn, **given)


def create_trainer(
    config: Any = None, environment: Any = None, **given: Any
) -> CustomRayPPOTrainer:
    """Makes a CustomRayPPOTrainer."""
    return CustomRayPPOTrainer(config, environment, **given)
