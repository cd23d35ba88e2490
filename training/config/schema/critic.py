"""Holds the settings of `critic`: the value function."""

from collections.abc import Iterator

from training.config.schema.model import CriticModelConfig
from training.config.schema.optim import OptimConfig
from training.config.schema.update import (
    CheckpointConfig,
    FSDPConfig,
    UpdateConfig,
)
from training.config.section import NonNegativeFloat, PositiveFloat, PositiveInt


# What is read of the critic's section where its values come from the actor's model.
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

    def problems(self) -> Iterator[str]:
        """Yields what of a checkpoint is not written for the critic."""
        if "hf_model" in self.checkpoint.save_contents:
            yield (
                "critic.checkpoint.save_contents has hf_model: only the actor is exported; "
                "take it out"
            )

    def warnings(self) -> Iterator[str]:
        """Yields what nothing reads of a critic whose backbone is shared."""
        defaults = CriticConfig()
        changed = [name for name, value in vars(self).items() if value != defaults[name]]
        unread = [name for name in changed if name not in SETTINGS_OF_A_SHARED_BACKBONE]
        if self.share_backbone and unread:
            yield (
                "critic.share_backbone=true: one model has one optimiser, the actor's; the "
                f"critic's {', '.join(unread)} have no effect"
            )
