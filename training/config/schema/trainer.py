"""Holds the settings of `trainer` and `ray_kwargs`: how long, where, what is written."""

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

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
from training.core_algos.built_in import ESTIMATORS_WITHIN_GROUPS, LOSSES_SUMMED_OVER_TOKENS

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig


class TrainerConfig(Section):
    """The run: how long, where, what is written."""

    total_epochs: PositiveInt = 30  #: passes over the training rows
    total_training_steps: PositiveInt | None = None  #: steps; null = total_epochs passes
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

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what keeps the run from starting, or from going on as it should."""
        if self.resume_mode == "resume_path" and self.resume_from_path is None:
            yield (
                "trainer.resume_mode=resume_path needs trainer.resume_from_path: a global_step_N "
                "folder"
            )
        if self.critic_warmup > 0 and not config.need_critic:
            yield (
                f"trainer.critic_warmup={self.critic_warmup}: there is no critic to warm up; set "
                "it to 0, or critic.enable=true and no critic.share_backbone"
            )
        last_step = self.total_training_steps
        if config.need_critic and last_step is not None and last_step <= self.critic_warmup:
            yield (
                f"trainer.critic_warmup={self.critic_warmup} leaves no step to the actor: "
                f"trainer.total_training_steps={last_step}; lower the first or raise the second"
            )
        if self.async_level > 0 and not self.rollout_n_gpus:
            yield (
                f"trainer.async_level={self.async_level} lets generation go on while training "
                "runs, which needs engines with ranks of their own: set trainer.rollout_n_gpus, "
                "or trainer.async_level=0"
            )
        yield from self._rank_problems(config)
        if self.train_finished_groups:
            yield from self._finished_groups_problems(config)

    def warnings(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what has no effect: a checkpoint only named, groups that are waited for."""
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

    def _rank_problems(self, config: "PPOConfig") -> Iterator[str]:
        """Requires that the launcher can start the ranks, and that those of engines fill nodes."""
        ranks_per_engine = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        if self.launcher == "local" and self.all_ranks > 1:
            yield (
                f"trainer.nnodes={self.nnodes} x trainer.n_gpus_per_node={self.n_gpus_per_node}: "
                "trainer.launcher=local has one rank; use trainer.launcher=ray"
            )
        if self.use_ray and self.nnodes > 1 and not config.ray_kwargs.joins_a_cluster:
            yield (
                f"trainer.nnodes={self.nnodes} needs ray_kwargs.ray_init.address: run `ray start "
                "--head` on the first machine, `ray start --address=HOST:6379` on the others, and "
                "set ray_kwargs.ray_init.address=auto; for ranks on this machine alone set "
                "trainer.n_gpus_per_node"
            )
        if self.rollout_n_gpus:
            ranks_on_a_node = min(self.rollout_n_gpus, self.n_gpus_per_node)
            fills_engines = self.rollout_n_gpus % ranks_per_engine == 0
            fills_nodes = self.rollout_n_gpus % ranks_on_a_node == 0
            if not (fills_engines and fills_nodes):
                yield (
                    f"trainer.rollout_n_gpus={self.rollout_n_gpus} must be a multiple of "
                    "actor_rollout_ref.rollout.tensor_model_parallel_size="
                    f"{ranks_per_engine}, and at most "
                    f"trainer.n_gpus_per_node={self.n_gpus_per_node} or a multiple of it: whole "
                    "nodes"
                )

    def _finished_groups_problems(self, config: "PPOConfig") -> Iterator[str]:
        """Requires, to train on groups one by one, that no number but the last is of the batch."""
        algorithm = config.algorithm
        actor = config.actor_rollout_ref.actor
        correction = config.with_correction.algorithm.rollout_correction
        correction_key = "algorithm.rollout_correction"
        must_be_off = {
            f"{correction_key}.rollout_is": correction.rollout_is,
            f"{correction_key}.rollout_rs": correction.rollout_rs,
            f"{correction_key}.rollout_token_veto_threshold": (
                correction.rollout_token_veto_threshold
            ),
            f"{correction_key}.bypass_mode": correction.bypass_mode,
            "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
            "algorithm.use_pf_ppo": algorithm.use_pf_ppo,
            "algorithm.filter_groups.enable": algorithm.filter_groups.enable,
            "agent.observation_loss_coef": config.agent.observation_loss_coef,
            "critic.enable": config.critic.enable,
            "trainer.async_level": self.async_level,
            "actor_rollout_ref.actor.fsdp_config.param_offload": actor.fsdp_config.param_offload,
        }
        contradictions = {key: value for key, value in must_be_off.items() if value}
        if algorithm.adv_estimator not in ESTIMATORS_WITHIN_GROUPS:
            contradictions["algorithm.adv_estimator"] = algorithm.adv_estimator
        if config.loss_mode not in LOSSES_SUMMED_OVER_TOKENS:
            loss_key = "actor_rollout_ref.actor.policy_loss.loss_mode"
            contradictions[loss_key] = actor.policy_loss.loss_mode
        if actor.ppo_epochs > 1:
            contradictions["actor_rollout_ref.actor.ppo_epochs"] = actor.ppo_epochs
        if actor.ppo_mini_batch_size not in (None, config.prompts_per_step):
            batch_key = "actor_rollout_ref.actor.ppo_mini_batch_size"
            contradictions[batch_key] = actor.ppo_mini_batch_size

        if contradictions:
            settings = ", ".join(f"{key}={value}" for key, value in contradictions.items())
            yield (
                "trainer.train_finished_groups=true makes a step's one update group by group, "
                f"which {settings} cannot do. It needs actor_rollout_ref.actor.ppo_epochs=1 and "
                "ppo_mini_batch_size=null, algorithm.adv_estimator one of "
                f"{', '.join(ESTIMATORS_WITHIN_GROUPS)}, policy_loss.loss_mode one of "
                f"{', '.join(LOSSES_SUMMED_OVER_TOKENS)}, trainer.async_level=0, and does without "
                "a critic, algorithm.use_kl_in_reward, use_pf_ppo, filter_groups, "
                "rollout_correction (rollout_is=off), agent.observation_loss_coef and "
                "param_offload"
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

    def warnings(self, config: "PPOConfig") -> Iterator[str]:
        """Yields that Ray is set up and not used."""
        if _says_something(self.ray_init) and not config.trainer.use_ray:
            yield (
                "ray_kwargs.ray_init has no effect: the one rank runs in this process, without "
                "Ray; set trainer.launcher=ray where it is to run in the cluster"
            )
