"""Holds the settings of `trainer` and `ray_kwargs`: how long, where, what is written."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from training.config.section import (
    InputPath,
    NonNegativeInt,
    ObjectName,
    OutputPath,
    PositiveFloat,
    PositiveInt,
    PositiveOrMinusOne,
    Section,
)
from training.features import folder_without


class TrainerConfig(Section):
    """The run: how long, where, what is written."""

    total_epochs: PositiveInt = 30  #: passes over the training rows
    total_training_steps: PositiveInt | None = None  #: steps; null = total_epochs passes
    #: the run ends behind the first step with which it has sampled so many tokens, those that are
    #: discarded included (docs/runs.md); null = by its steps alone
    total_sampled_tokens: PositiveInt | None = None
    project_name: str = "ppo_core"  #: groups runs in trackers and folders
    experiment_name: str = "default"  #: name of this run
    #: where metrics go (features/trackers/README.md)
    logger: tuple[
        Literal[
            "console",
            "file",
            "json",
            "tensorboard",
            "wandb",
            "mlflow",
            "swanlab",
            "trackio",
            "clearml",
        ],
        ...,
    ] = ("console", "file")
    #: how a long generation is shown: auto = a bar in terminals and notebooks, else lines
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    nnodes: PositiveInt = 1  #: machines
    n_gpus_per_node: PositiveInt = 1  #: ranks per machine; on a CPU machine too
    #: ranks, beside those, of which each has an engine; 0 = they share theirs
    rollout_n_gpus: NonNegativeInt = 0
    #: with rollout_n_gpus: how many updates old a sampled token may be; above 0 generation goes
    #: on while training runs
    async_level: NonNegativeInt = 0
    #: train on groups whose episodes have ended while others play; deterministic=true waits
    #: (docs/asynchronous.md)
    train_finished_groups: bool = False
    device: Literal["cuda", "cpu"] | None = None  #: null = cuda where there is one
    balance_batch: bool = True  #: give each rank about the same number of tokens
    #: observers of your own, FILE.py:CLASS or PACKAGE.MODULE:CLASS (docs/observers.md)
    observers: tuple[ObjectName, ...] = ()
    #: steps between checkpoints; null = every ten minutes and at the end, the last two are kept;
    #: -1 = on Ctrl-C alone
    save_freq: PositiveOrMinusOne | None = None
    #: steps between validations; -1 = only before training and at the end
    test_freq: PositiveOrMinusOne = -1
    val_before_train: bool = True  #: validate before the first step
    val_only: bool = False  #: validate and stop
    critic_warmup: NonNegativeInt = 0  #: steps in which only the critic learns
    #: auto = from the latest checkpoint, if any
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    #: a global_step_N folder, for resume_mode=resume_path
    resume_from_path: InputPath | None = None
    #: how often a Slurm job is started again without a new checkpoint in between, then it fails
    max_requeues: NonNegativeInt = 3
    #: resume though the checkpoint lacks a part, as a critic, which starts anew
    resume_with_changes: bool = False
    #: folder of the run; null = checkpoints/PROJECT/EXPERIMENT
    default_local_dir: OutputPath | None = None
    #: older ones are deleted; null = keep all of save_freq's
    max_actor_ckpt_to_keep: PositiveInt | None = None
    #: older ones are deleted; null = keep all of save_freq's
    max_critic_ckpt_to_keep: PositiveInt | None = None
    #: write every step's prompts, responses and scores here
    rollout_data_dir: OutputPath | None = None
    validation_data_dir: OutputPath | None = None  #: write every validation's here
    #: validation answers to show in the log and, as a table, in trackers
    log_val_generations: NonNegativeInt = 0
    #: local = one process; null = ray for more than one rank
    launcher: Literal["local", "ray"] | None = None
    #: seconds in which nothing at all moves after which a run ends (docs/failures.md); null =
    #: waits for ever
    stall_timeout_s: PositiveFloat | None = 3600.0
    #: turns in lockstep, deterministic operations, exact resume; somewhat slower
    deterministic: bool = False

    @property
    def num_ranks(self) -> int:
        """Counts the processes over all machines."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def all_ranks(self) -> int:
        """Counts those of the engines too, where they have their own."""
        return self.num_ranks + self.rollout_n_gpus

    @property
    def use_ray(self) -> bool:
        """Returns whether Ray places the workers; otherwise they live in this process."""
        return self.launcher == "ray" or (self.launcher is None and self.all_ranks > 1)

    @property
    def run_dir(self) -> str:
        """Returns the folder of checkpoints, metrics and the saved config."""
        return self.default_local_dir or f"checkpoints/{self.project_name}/{self.experiment_name}"

    def problems(self) -> Iterator[str]:
        """Yields what keeps the run from starting, or from going on as it should."""
        if self.logger != TrainerConfig.logger:
            yield from self._loggers_without_folder()
        if self.resume_mode == "resume_path" and self.resume_from_path is None:
            yield (
                "trainer.resume_mode=resume_path needs trainer.resume_from_path: a global_step_N "
                "folder"
            )
        if self.async_level > 0 and not self.rollout_n_gpus:
            yield (
                f"trainer.async_level={self.async_level} lets generation go on while training "
                "runs, which needs engines with ranks of their own: set trainer.rollout_n_gpus, "
                "or trainer.async_level=0"
            )
        if self.launcher == "local" and self.all_ranks > 1:
            yield (
                f"trainer.nnodes={self.nnodes} x trainer.n_gpus_per_node={self.n_gpus_per_node}: "
                "trainer.launcher=local has one rank; use trainer.launcher=ray"
            )

    def warnings(self) -> Iterator[str]:
        """Yields what has no effect: a checkpoint only named, groups that are waited for."""
        if self.logger == TrainerConfig.logger:
            yield from self._loggers_without_folder()
        if self.train_finished_groups and self.deterministic:
            yield (
                "trainer.train_finished_groups=true has no effect with trainer.deterministic=true, "
                "which waits for all groups of a step, as the order in which they end differs from "
                "run to run: take one of the two out"
            )
        if self.resume_from_path is not None and self.resume_mode != "resume_path":
            yield (
                f"trainer.resume_from_path={self.resume_from_path} has no effect with "
                f"trainer.resume_mode={self.resume_mode}: set it to resume_path"
            )

    def _loggers_without_folder(self) -> Iterator[str]:
        """Yields the loggers that nobody writes to, as their folder is gone."""
        for name in self.logger:
            folder = folder_without("loggers", name)
            if folder is not None:
                yield (
                    f"trainer.logger has {name}, which {folder} writes, and that is not here: put "
                    f"the folder back, or take {name} out"
                )


def _says_something(value: Any) -> bool:
    """Returns whether a value, or one in a mapping, is given and not null."""
    if isinstance(value, dict):
        return any(map(_says_something, value.values()))
    return value is not None


class RayKwargs(Section):
    """Settings for Ray itself."""

    #: arguments of ray.init: num_cpus, address, ...
    ray_init: dict[str, Any] = field(default_factory=dict)

    @property
    def joins_a_cluster(self) -> bool:
        """Returns whether the run joins a cluster that runs, instead of starting Ray here."""
        return self.ray_init.get("address") not in (None, "local")

    @property
    def says_something(self) -> bool:
        """Returns whether an argument of ray.init is given."""
        return _says_something(self.ray_init)
