"""Holds the settings of `actor_rollout_ref.actor`: the policy's update and its loss.

A setting of a loss is a field of training/core_algos/loss_settings.py, which the sections here
inherit. Its type holds its bound, as those of training/config/section.py do.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from training.config.schema.optim import OptimConfig
from training.config.schema.update import (
    CheckpointConfig,
    FSDPConfig,
    LossAggMode,
    UpdateConfig,
    update_problems,
)
from training.config.section import PositiveInt, Section
from training.core_algos.kl_settings import KLKind as KLKind
from training.core_algos.loss_settings import LossSettings, PolicyLossSettings, aggregation_of

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig


class PolicyLossChoice(PolicyLossSettings, Section):
    """Which policy loss."""

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what the chosen loss lacks."""
        key = "actor_rollout_ref.actor.policy_loss"
        bypasses = config.algorithm.rollout_correction.bypass_mode
        if config.loss_mode == "dro" and self.dro_beta is None:
            yield f"{key}.dro_beta=null: loss_mode=dro needs it, above 0"
        if self.loss_mode == "bypass_mode" and not bypasses:
            yield (
                f"{key}.loss_mode=bypass_mode: set algorithm.rollout_correction.bypass_mode=true "
                "instead"
            )
        if bypasses and self.loss_mode not in ("vanilla", "bypass_mode"):
            yield (
                "algorithm.rollout_correction.bypass_mode has losses of its own (loss_type): "
                f"loss_mode={self.loss_mode} is not read; leave it at vanilla"
            )


class PolicyUpdateConfig(UpdateConfig):
    """How the policy is shared among ranks, and a step cut; listed before the loss's settings."""

    #: how several ranks share the weights; both mean FSDP2
    strategy: Literal["fsdp2", "fsdp"] = "fsdp2"
    #: prompts per optimiser step, over all ranks; null = whole step
    ppo_mini_batch_size: PositiveInt | None = None


class ActorConfig(LossSettings, PolicyUpdateConfig):
    """The policy update."""

    ppo_epochs: PositiveInt = 1  #: passes over a step's batch
    #: consecutive ranks that share each sequence; divides the attention heads
    ulysses_sequence_parallel_size: PositiveInt = 1
    policy_loss: PolicyLossChoice = PolicyLossChoice()
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = FSDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def aggregation(self) -> LossAggMode:
        """Returns how token losses become one number: where nothing is set, as the loss's paper."""
        return aggregation_of(self.policy_loss.loss_mode, self.loss_agg_mode)

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what keeps the policy from being updated on these ranks."""
        if config.trainer.num_ranks % self.ulysses_sequence_parallel_size:
            yield (
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size="
                f"{self.ulysses_sequence_parallel_size} does not divide trainer.nnodes x "
                f"trainer.n_gpus_per_node = {config.trainer.num_ranks} ranks: take one of its "
                "divisors"
            )
        yield from update_problems("actor_rollout_ref.actor", self, config)

    def warnings(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what of the sharding has no effect, and an aggregation that is not the loss's."""
        yield from self.fsdp_config.unused("actor_rollout_ref.actor", config)
        by_token = self.loss_agg_mode in ("token-mean", "token-sum")
        if self.policy_loss.loss_mode == "gspo" and by_token:
            yield (
                f"actor_rollout_ref.actor.loss_agg_mode={self.loss_agg_mode}: the paper of "
                "policy_loss.loss_mode=gspo, and verl whatever is set, take means of sequences; "
                "leave it null, or set seq-mean-token-mean"
            )
