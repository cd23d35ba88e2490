"""Holds the section `actor_rollout_ref`: the policy as it learns, generates and is referred to."""

from training.config.batch_plan import MicroBatching, choose_micro_batching
from training.config.schema.actor import ActorConfig
from training.config.schema.model import ModelConfig
from training.config.schema.rollout import RolloutConfig
from training.config.schema.update import FSDPConfig
from training.config.section import InputPath, PositiveInt, Section


class RefModelConfig(Section):
    """The reference policy's own weights: a teacher."""

    #: model folder or hub name, of the actor's vocabulary; null = the actor's
    path: InputPath | None = None


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
