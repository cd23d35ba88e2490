"""Holds the section `actor_rollout_ref`: the policy as it learns, generates and is referred to."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from training.config.batch_plan import MicroBatching, choose_micro_batching
from training.config.schema.actor import ActorConfig
from training.config.schema.model import ModelConfig
from training.config.schema.rollout import RolloutConfig
from training.config.schema.update import FSDPConfig
from training.config.section import InputPath, PositiveInt, Section

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig


class RefModelConfig(Section):
    """The reference policy's own weights: a teacher."""

    #: model folder or hub name, of the actor's vocabulary; null = the actor's
    path: InputPath | None = None

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields that nothing reads the log-probs of the teacher."""
        if self.path is not None and not config.need_reference:
            yield (
                f"actor_rollout_ref.ref.model.path={self.path} is not read: set "
                "actor_rollout_ref.actor.use_kl_loss=true, algorithm.use_kl_in_reward=true or "
                "algorithm.adv_estimator=on_policy_distillation, or take it out"
            )


class RefConfig(Section):
    """The frozen reference policy."""

    model: RefModelConfig = RefModelConfig()
    #: rows per forward on a rank; null = the actor's
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    #: cut by token budget; null = unless a micro batch size is given
    log_prob_use_dynamic_bsz: bool | None = None
    #: tokens per forward on a rank; null = the actor's
    log_prob_max_token_len_per_gpu: PositiveInt | None = None
    fsdp_config: FSDPConfig = FSDPConfig()

    def warnings(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what of the sharding has no effect."""
        yield from self.fsdp_config.unused("actor_rollout_ref.ref", config)


def _log_prob_micro_batching(
    settings: RefConfig | RolloutConfig, actor: ActorConfig
) -> MicroBatching:
    """Returns how a log-prob pass is cut; what its section leaves open is taken from the actor."""
    rows = settings.log_prob_micro_batch_size_per_gpu
    use_dynamic_bsz = settings.log_prob_use_dynamic_bsz
    if rows is None and use_dynamic_bsz is None:
        use_dynamic_bsz = actor.use_dynamic_bsz
    return choose_micro_batching(
        use_dynamic_bsz,
        rows or actor.ppo_micro_batch_size_per_gpu,
        settings.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
    )


class ActorRolloutRefConfig(Section):
    """The policy in its three uses."""

    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()

    @property
    def ref_micro_batching(self) -> MicroBatching:
        """Returns how the reference's log-prob pass is cut on one rank."""
        return _log_prob_micro_batching(self.ref, self.actor)

    @property
    def log_prob_micro_batching(self) -> MicroBatching:
        """Returns how the actor's old-log-prob pass is cut on one rank."""
        return _log_prob_micro_batching(self.rollout, self.actor)

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what keeps the log-prob passes of actor and reference from being cut."""
        row_length = config.data.row_length
        yield from self.log_prob_micro_batching.problems_of_pass(
            "actor_rollout_ref.rollout.log_prob", row_length
        )
        if config.need_reference:
            yield from self.ref_micro_batching.problems_of_pass(
                "actor_rollout_ref.ref.log_prob", row_length
            )
