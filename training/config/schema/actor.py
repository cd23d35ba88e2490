"""Holds the settings of `actor_rollout_ref.actor`: the policy's update and its loss.

A setting of a loss is a field of training/core_algos/loss_settings.py, which the sections here
inherit. Its type holds its bound, as those of training/config/section.py do.
"""

from collections.abc import Iterator
from typing import Literal

from training.config.schema.optim import OptimConfig
from training.config.schema.update import (
    CheckpointConfig,
    FSDPConfig,
    LossAggMode,
    UpdateConfig,
)
from training.config.section import PositiveInt, Section
from training.core_algos.kl_settings import KLKind as KLKind
from training.core_algos.loss_settings import LossSettings, PolicyLossSettings, aggregation_of


class PolicyLossChoice(PolicyLossSettings, Section):
    """Which policy loss."""


class RouterReplayConfig(Section):
    """Which experts a mixture-of-experts policy computes with, in log-prob passes and updates."""

    #: R3: those that the engine's routers chose, kept with each row; disabled: its own routers'
    mode: Literal["disabled", "R3"] = "disabled"


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
    router_replay: RouterReplayConfig = RouterReplayConfig()
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = FSDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def aggregation(self) -> LossAggMode:
        """Returns how token losses become one number: where nothing is set, as the loss's paper."""
        return aggregation_of(self.policy_loss.loss_mode, self.loss_agg_mode)

    def warnings(self) -> Iterator[str]:
        """Yields that the aggregation is not the loss's."""
        by_token = self.loss_agg_mode in ("token-mean", "token-sum")
        if self.policy_loss.loss_mode == "gspo" and by_token:
            yield (
                f"actor_rollout_ref.actor.loss_agg_mode={self.loss_agg_mode}: the paper of "
                "policy_loss.loss_mode=gspo, and verl whatever is set, take means of sequences; "
                "leave it null, or set seq-mean-token-mean"
            )
