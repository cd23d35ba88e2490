"""Holds the settings of `critic`: the value function."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from training.config.schema.model import CriticModelConfig
from training.config.schema.optim import OptimConfig
from training.config.schema.update import (
    CheckpointConfig,
    FSDPConfig,
    UpdateConfig,
    update_problems,
)
from training.config.section import NonNegativeFloat, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig


# These of the critic's settings are read where its values come from the actor's model.
SETTINGS_OF_A_SHARED_BACKBONE = (
    "enable",
    "share_backbone",
    "value_loss_coef",
    "cliprange_value",
    "loss_agg_mode",
)


class CriticConfig(UpdateConfig):
    """The value function, where the estimator needs one."""

    enable: bool | None = None  #: null = where the estimator reads values
    #: values come from a head on the actor's transformer, one pass and one update for both;
    #: false = a model of its own
    share_backbone: bool = False
    #: weight of the values' loss beside the policy's, with share_backbone
    value_loss_coef: NonNegativeFloat = 0.5
    model: CriticModelConfig = CriticModelConfig()
    optim: OptimConfig = OptimConfig(lr=1e-5)
    #: prompts per optimiser step, over all ranks; null = the actor's
    ppo_mini_batch_size: PositiveInt | None = None
    #: that budget: tokens per forward/backward on a rank
    ppo_max_token_len_per_gpu: PositiveInt = 32768
    ppo_epochs: PositiveInt | None = None  #: passes over a step's batch; null = the actor's
    #: how far a value may move from its old one before the loss is clipped
    cliprange_value: PositiveFloat = 0.5
    #: consecutive ranks that share each sequence; null = the actor's
    ulysses_sequence_parallel_size: PositiveInt | None = None
    fsdp_config: FSDPConfig = FSDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what keeps values from being learnt beside the policy."""
        yield from self._backbone_problems(config)
        if "hf_model" in self.checkpoint.save_contents:
            yield (
                "critic.checkpoint.save_contents has hf_model: only the actor is exported; "
                "take it out"
            )
        if config.need_critic:
            yield from self._separate_model_problems(config)

    def warnings(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what nothing reads: with a shared backbone, and on one rank."""
        defaults = CriticConfig()
        changed = [name for name, value in vars(self).items() if value != defaults[name]]
        unread = [name for name in changed if name not in SETTINGS_OF_A_SHARED_BACKBONE]
        if self.share_backbone and unread:
            yield (
                "critic.share_backbone=true: one model has one optimiser, the actor's; the "
                f"critic's {', '.join(unread)} have no effect"
            )
        if config.need_critic:
            yield from self.fsdp_config.unused("critic", config)

    def _backbone_problems(self, config: "PPOConfig") -> Iterator[str]:
        """Requires, of a model that is shared with the actor, that its values are read."""
        if self.share_backbone and not config.need_values:
            yield (
                "critic.share_backbone=true: "
                f"algorithm.adv_estimator={config.algorithm.adv_estimator} reads no values; take "
                "it out, or set critic.enable=true"
            )
        path_of_actor = config.actor_rollout_ref.model.path
        if self.share_backbone and self.model.path not in (None, path_of_actor):
            yield (
                f"critic.share_backbone=true: critic.model.path={self.model.path} is not the "
                "actor's; take one of the two out"
            )

    def _separate_model_problems(self, config: "PPOConfig") -> Iterator[str]:
        """Requires that a model of its own can be trained on the batches that the actor's is."""
        actor = config.actor_rollout_ref.actor
        critic = config.resolved_critic
        ranks_per_sequence = actor.ulysses_sequence_parallel_size
        if self.ulysses_sequence_parallel_size not in (None, ranks_per_sequence):
            yield (
                "critic.ulysses_sequence_parallel_size="
                f"{self.ulysses_sequence_parallel_size} differs from the actor's "
                f"{ranks_per_sequence}: both read a step's rows in one order; leave it null"
            )
        actor_batch = actor.ppo_mini_batch_size or config.prompts_per_step
        critic_batch = critic.ppo_mini_batch_size or config.prompts_per_step
        if max(actor_batch, critic_batch) % min(actor_batch, critic_batch):
            yield (
                f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} and "
                f"critic.ppo_mini_batch_size={critic.ppo_mini_batch_size} do not nest: a step is "
                "cut once for both, so one must be a multiple of the other"
            )
        yield from self.model.training_problems("critic.model", ranks_per_sequence)
        yield from update_problems("critic", critic, config)
