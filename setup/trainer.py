"""The small API's trainer: config, environment or dataset, and reward function become a run.

Invariant: it only builds `training.ray_trainer.RayPPOTrainer`, or `AgentTrainer`, and calls it; an
iteration is one of its steps. docs/python.md has the keys of `metrics_history`.
"""

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from tqdm.auto import tqdm

from custom.agent import AgentSpec
from custom.reward_manager import EnvironmentRewardWrapper
from custom.tools import MultiTurnManager
from setup.config_store import ConfigStore
from setup.metrics_history import HISTORY, epoch_entry, recorded_steps
from setup.multi_turn import MultiTurnInferenceEngine, with_tools
from setup.rollout_data import RolloutData
from training.agent_trainer import AgentTrainer
from training.building import build_trainer
from training.config.loader import ConfigError
from training.ray_trainer import RayPPOTrainer as CoreTrainer

__all__ = ["CustomRayPPOTrainer", "RayPPOTrainer", "create_trainer"]

logger = logging.getLogger(__name__)
# Trainers of this process that hold a run's folder, which a cell that is run again leaves behind.
_HOLDERS: WeakValueDictionary[Path, "RayPPOTrainer"] = WeakValueDictionary()


class RayPPOTrainer(AbstractContextManager["RayPPOTrainer"]):
    """Trains a policy on episodes in an environment, or on the prompts of a dataset.

    Args:
        config: a ConfigStore; also a config of the trainer's (an OmegaConf, a mapping, a
            PPOConfig).
        environment: an instance, which every episode gets a copy of, a class, or a function that
            makes one.
        reward_fn: `reward_fn(trajectory, environment)` or `reward_fn(trajectory)`, in place of the
            environment's rewards; for a dataset without environment also an object that is called
            with a DataProto.
        dataset: rows of prompts (texts, messages or dicts with them under "prompt"); with an
            environment its tasks, which `reset(seed, **row)` is given.
        tokenizer: None: the model's.
        tool_manager: a MultiTurnManager, whose tools and parser the agents get.
        multi_turn_engine: lends its tools, parser, system prompt and max_turns; what generates is
            what is trained.

    Attributes:
        metrics_history: an entry an epoch, see `setup.metrics_history`; also of epochs that the run
            made before it was gone on with.
        core: the trainer that does the work; None until it is needed, and after `cleanup`.

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
        self.environment = environment
        self.reward_fn = reward_fn
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.config.bind_objects(self._objects())
        spec = AgentSpec(environment=None)
        if multi_turn_engine is not None:
            spec = multi_turn_engine.agent_spec()
        self.agent_spec = with_tools(spec, tool_manager)
        self.metrics_history: list[dict[str, Any]] = []
        self.core: CoreTrainer | None = None
        # The metrics of the steps of the epoch under way, and how many make it full.
        self._steps: list[dict[str, float]] = []
        self._steps_per_epoch = 0
        self._progress = tqdm(disable=True)

    # Training and checkpoints

    def fit(
        self, num_epochs: int | None = None, num_iters_per_epoch: int | None = None
    ) -> list[dict[str, Any]]:
        """Trains for so many epochs, or the config's number; returns `metrics_history`.

        A run that was cut off goes on from its last checkpoint in `checkpoint.output_dir`, up to
        that number; a second call goes on for as many epochs again.
        """
        if num_epochs is not None:
            self.config.training.num_epochs = num_epochs
        if num_epochs or num_iters_per_epoch:
            # A loaded config's, which would win.
            self.config.overrides.pop("trainer.total_training_steps", None)
        if self.core is None:
            core = self._start(num_iters_per_epoch)
        else:
            core = self._start()
            self._steps_per_epoch = num_iters_per_epoch or self._steps_per_epoch
            further_steps = self.config.training.num_epochs * self._steps_per_epoch
            core.total_training_steps = core.global_steps + further_steps
        if core.global_steps >= core.last_step:
            self._say_nothing_to_train(core)
        with tqdm(total=core.total_training_steps, unit="step", dynamic_ncols=True) as progress:
            self._progress = progress
            core.fit()
        return self.metrics_history

    def rollout(self) -> RolloutData:
        """Plays, or answers, one batch and scores it."""
        core = self._start()
        rows = core.row_stream.draw(core.global_steps + 1)
        core.global_steps += 1
        batch, _ = core.generate(rows)
        core.position = core.row_stream.position
        if "token_level_scores" not in batch.batch:
            scores, infos = core.score(batch, core.reward_fn)
            batch = core.phases.add_rewards(batch, scores, infos)
        facts: list[dict[str, Any]] = []
        if isinstance(core, AgentTrainer):
            facts = core.multi_turn_rollout.take_facts()
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
        """Ends environments and workers and frees their memory.

        The trainer may be used again, and then goes on from its checkpoint.
        """
        core = self.core
        self.core = None
        self._steps = []
        if core is not None:
            core.shutdown()

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    # The trainer behind it

    def _objects(self) -> dict[str, Any]:
        """Returns those of environment, reward_fn and dataset that were given."""
        objects = {
            "environment": self.environment,
            "reward_fn": self.reward_fn,
            "dataset": self.dataset,
        }
        return {name: thing for name, thing in objects.items() if thing is not None}

    def _start(self, iterations: int | None = None) -> CoreTrainer:
        """Returns the trainer; builds it and its workers at the first use.

        Args:
            iterations: steps of an epoch; None: the dataset's rows once, or as the config says.
        """
        # The config may be of several trainers.
        self.config.bind_objects(self._objects())
        if self.core is None:
            try:
                self._build_core(iterations)
            except ConfigError as error:
                self.cleanup()
                problems = [self.config.with_field_names(text) for text in error.problems]
                raise ConfigError(problems) from None
            except BaseException:
                self.cleanup()
                raise
        assert self.core is not None
        return self.core

    def _build_core(self, iterations: int | None) -> None:
        if self.config.inference.multi_turn and not self.config.plays_episodes():
            raise ConfigError(
                [
                    "config.inference.multi_turn=True has nothing to play in: give environment=, "
                    "or leave it at None, which answers the dataset's prompts"
                ]
            )
        rows = self._rows()
        if iterations is None and self.dataset is not None:
            iterations = max(len(self.dataset) // self.config.training.batch_size, 1)
        self._steps_per_epoch = iterations or self.config.training.iterations_per_epoch
        acts = self.environment is not None
        self.core = build_trainer(
            self.config.settings(self._steps_per_epoch),
            self.tokenizer,
            train_dataset=rows,
            specs=self._agent_specs() if acts else None,
            reward_fn=None if acts else self._batch_reward_fn(),
        )
        self.core.on_step = self._on_step  # type: ignore[method-assign]
        self._take_folder(self.core.run_dir)
        self.core.init_workers()
        self.core.load_checkpoint()
        self._read_history(self.core)

    def _take_folder(self, run_dir: Path) -> None:
        """Ends an earlier trainer of this process in the same folder: a cell was run again."""
        earlier = _HOLDERS.get(run_dir)
        if earlier is not None and earlier is not self and earlier.core is not None:
            logger.warning("an earlier trainer of this process held %s: it was cleaned up", run_dir)
            earlier.cleanup()
        _HOLDERS[run_dir] = self

    def _read_history(self, core: CoreTrainer) -> None:
        """Fills in the epochs that a run has made already, where its folder has their metrics."""
        steps = recorded_steps(core.run_dir, core.global_steps)
        if len(steps) < core.global_steps:
            return
        size = self._steps_per_epoch
        whole = len(steps) // size
        self.metrics_history = []
        for number in range(whole):
            of_epoch = steps[number * size : (number + 1) * size]
            self.metrics_history.append(epoch_entry(number + 1, of_epoch))
        self._steps = steps[whole * size :]

    def _say_nothing_to_train(self, core: CoreTrainer) -> None:
        """Warns that the run has come to its end before, and how it goes on or begins anew."""
        epochs = math.ceil(core.global_steps / self._steps_per_epoch)
        logger.warning(
            "the run in %s has made its %d epochs already: fit(num_epochs=%d) goes on; "
            "config.overrides['trainer.resume_mode'] = 'disable', or another "
            "config.checkpoint.output_dir, begins anew",
            core.run_dir,
            epochs,
            epochs + self.config.training.num_epochs,
        )

    def _rows(self) -> Any:
        """Returns the dataset as the trainer takes it; in a list every row becomes a mapping.

        Raises:
            ValueError: it is the name of a file.
        """
        dataset = self.dataset
        if isinstance(dataset, str | Path):
            raise ValueError(
                f"dataset={dataset!r} is no rows; "
                "for files set config.overrides['data.train_files']"
            )
        if not isinstance(dataset, Sequence):
            return dataset
        return [row if isinstance(row, Mapping) else {"prompt": row} for row in dataset]

    def _batch_reward_fn(self) -> Any:
        """Returns the reward function for prompts: a function of trajectories is wrapped for it."""
        if inspect.isroutine(self.reward_fn) or isinstance(self.reward_fn, partial):
            return EnvironmentRewardWrapper(None, self.reward_fn)
        return self.reward_fn

    def _agent_specs(self) -> list[AgentSpec]:
        """Describes the agents: environment, reward function, and what an engine lends."""
        source = self.environment
        if isinstance(source, type) and "config" in inspect.signature(source).parameters:
            source = partial(source, self.config.environment)
        return [replace(self.agent_spec, environment=source, reward_fn=self.reward_fn)]

    def _on_step(self, metrics: dict[str, float]) -> None:
        """Shows a step's metrics, and adds an entry to the history where an epoch is full."""
        self._steps.append(metrics)
        step = int(metrics["training/global_step"])
        reward = metrics.get(HISTORY["reward"], float("nan"))
        self._progress.n = step
        self._progress.set_postfix(reward=f"{reward:.3f}")
        is_last = self.core is not None and step == self.core.last_step
        if is_last or len(self._steps) >= self._steps_per_epoch:
            epoch = math.ceil(step / self._steps_per_epoch)
            self.metrics_history.append(epoch_entry(epoch, self._steps))
            self._steps = []


class CustomRayPPOTrainer(RayPPOTrainer):
    """Takes tokenizer and multi_turn_engine right behind the reward_fn; see `RayPPOTrainer`."""

    def __init__(
        self,
        config: Any,
        environment: Any,
        reward_fn: Any = None,
        tokenizer: Any = None,
        multi_turn_engine: MultiTurnInferenceEngine | None = None,
        *,
        dataset: Any = None,
        tool_manager: MultiTurnManager | None = None,
    ) -> None:
        super().__init__(
            config,
            environment,
            reward_fn,
            dataset,
            tokenizer=tokenizer,
            tool_manager=tool_manager,
            multi_turn_engine=multi_turn_engine,
        )


def create_trainer(
    config: Any = None, environment: Any = None, **arguments: Any
) -> CustomRayPPOTrainer:
    """Makes a CustomRayPPOTrainer of its arguments."""
    return CustomRayPPOTrainer(config, environment, **arguments)
