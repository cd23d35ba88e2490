"""Holds the settings of `actor_rollout_ref.actor`: the policy's update and its loss.

A setting of a loss is a field here. Policy losses read it as `config.NAME`
(training/core_algos/policy_losses.py), and so does `micro_loss` (workers/dp_actor.py), where
entropy and KL are. Its type holds its bound, as those of training/config/section.py do.
"""

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from training.config.schema.optim import OptimConfig
from training.config.schema.update import (
    CheckpointConfig,
    FSDPConfig,
    LossAggMode,
    UpdateConfig,
)
from training.config.section import (
    AboveOne,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
)

PlainKL = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLKind = Literal[PlainKL, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]


class PolicyLossChoice(Section):
    """Which policy loss."""

    #: name registered with register_policy_loss; docs/algorithms.md lists them
    loss_mode: str = "vanilla"
    #: clip_cov: share of tokens whose gradient is stopped
    clip_cov_ratio: PositiveFraction = 0.0002
    clip_cov_lb: float = 1.0  #: clip_cov: they are drawn among those of a covariance above it
    clip_cov_ub: float = 5.0  #: clip_cov: and below it
    #: kl_cov: share of tokens that are held near the old policy
    kl_cov_ratio: PositiveFraction = 0.0002
    ppo_kl_coef: NonNegativeFloat = 0.1  #: kl_cov: weight of that
    dro_beta: PositiveFloat | None = None  #: dro: weight of the square; needed there
    custom_kwargs: dict[str, Any] = field(default_factory=dict)  #: settings of a loss of your own


class ActorConfig(UpdateConfig):
    """The policy update."""

    #: how several ranks share the weights; both mean FSDP2
    strategy: Literal["fsdp2", "fsdp"] = "fsdp2"
    #: prompts per optimiser step, over all ranks; null = whole step
    ppo_mini_batch_size: PositiveInt | None = None
    clip_ratio: NonNegativeFloat = 0.2  #: PPO's clip range
    #: lower clip range; null = clip_ratio; 1 or more = no lower bound
    clip_ratio_low: NonNegativeFloat | None = None
    clip_ratio_high: NonNegativeFloat | None = None  #: upper clip range; null = clip_ratio
    #: dual clip: bound of the ratio where the advantage is negative
    clip_ratio_c: AboveOne = 3.0
    tau_pos: PositiveFloat = 1.0  #: sapo: steepness of the gate where the advantage is positive
    tau_neg: PositiveFloat = 1.05  #: sapo: where it is not
    #: divisor of seq-mean-token-sum-norm; null = the response length
    loss_scale_factor: PositiveInt | None = None
    #: what seq-mean-* counts once: an episode of any number of rows, or each row, as verl does
    loss_agg_counts: Literal["episodes", "rows"] = "episodes"
    entropy_coeff: float = 0.0  #: weight of the entropy bonus
    use_kl_loss: bool = False  #: add the KL to the reference policy to the loss (GRPO's way)
    kl_loss_coef: NonNegativeFloat = 0.001  #: weight of that KL
    kl_loss_type: KLKind = "low_var_kl"  #: its estimator; + = straight-through gradient of k2
    ppo_epochs: PositiveInt = 1  #: passes over a step's batch
    #: consecutive ranks that share each sequence; divides the attention heads
    ulysses_sequence_parallel_size: PositiveInt = 1
    policy_loss: PolicyLossChoice = PolicyLossChoice()
    optim: OptimConfig = OptimConfig()
    fsdp_config: FSDPConfig = FSDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def aggregation(self) -> LossAggMode:
        """Returns how token losses become one number: where nothing is set, as the loss's paper.

        That is by token, and for gspo, whose ratio is a sequence's, by sequence.
        """
        if self.loss_agg_mode is None and self.policy_loss.loss_mode == "gspo":
            return "seq-mean-token-mean"
        return super().aggregation

    def warnings(self) -> Iterator[str]:
        """Yields that the aggregation is not the loss's."""
        by_token = self.loss_agg_mode in ("token-mean", "token-sum")
        if self.policy_loss.loss_mode == "gspo" and by_token:
            yield (
                f"actor_rollout_ref.actor.loss_agg_mode={self.loss_agg_mode}: the paper of "
                "policy_loss.loss_mode=gspo, and verl whatever is set, take means of sequences; "
                "leave it null, or set seq-mean-token-mean"
            )
