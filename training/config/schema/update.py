"""Holds what the updates of policy and critic have in common: batches, sharding, checkpoints."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from training.config.batch_plan import MicroBatching, choose_micro_batching
from training.config.section import PositiveFloat, PositiveInt, Section
from training.core_algos.loss_settings import LossAggMode as LossAggMode

if TYPE_CHECKING:
    from training.config.schema.actor import ActorConfig
    from training.config.schema.critic import CriticConfig
    from training.config.schema.ppo import PPOConfig

CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]


class FSDPConfig(Section):
    """Sharding of one model over the ranks."""

    param_offload: bool = False  #: keep parameters in CPU memory while unused
    optimizer_offload: bool = False  #: keep optimiser state in CPU memory while unused
    reshard_after_forward: bool = True  #: free gathered parameters after the forward pass

    def unused(self, key: str, config: "PPOConfig") -> Iterator[str]:
        """Yields what has no effect where nothing is sharded; `key` is the model's section."""
        if not self.reshard_after_forward and config.trainer.num_ranks == 1:
            yield (
                f"{key}.fsdp_config.reshard_after_forward=false has no effect on one rank, which "
                "holds all parameters"
            )


class CheckpointConfig(Section):
    """What a checkpoint holds; extra = place in the schedule, hf_model = a Hugging Face folder."""

    save_contents: tuple[CheckpointPart, ...] = ("model", "optimizer", "extra")  #: parts to write
    #: saved parts to read on resume
    load_contents: tuple[CheckpointPart, ...] = ("model", "optimizer", "extra")

    def resume_problems(self, key: str) -> Iterator[str]:
        """Yields what keeps a run from going on with the weights of this section, called `key`."""
        readable = set(self.save_contents) - {"hf_model"}
        reads_the_weights = "model" in self.load_contents
        if not reads_the_weights or not set(self.load_contents) <= readable:
            yield (
                f"{key}.load_contents=[{', '.join(self.load_contents)}] must have model, and "
                f"nothing but what {key}.save_contents=[{', '.join(self.save_contents)}] has, "
                "hf_model apart, which is written for others; or set trainer.resume_mode=disable"
            )


class UpdateConfig(Section):
    """What the updates of policy and critic have in common."""

    #: rows per forward/backward on a rank
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    #: cut by token budget; null = unless a micro batch size is given
    use_dynamic_bsz: bool | None = None
    #: that budget: tokens per forward/backward on a rank
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    #: how token losses become one number; null = token-mean, for the loss gspo seq-mean-token-mean
    loss_agg_mode: LossAggMode | None = None
    shuffle: bool = False  #: permute the prompt groups before each pass
    grad_clip: PositiveFloat = 1.0  #: bound of the gradient's global norm
    use_prefix_grouper: bool = True  #: compute what rows begin with alike once, where it pays

    @property
    def aggregation(self) -> LossAggMode:
        """Returns how token losses become one number, also where the setting is null."""
        return self.loss_agg_mode or "token-mean"

    @property
    def micro_batching(self) -> MicroBatching:
        """Returns how a mini-batch, or the critic's value pass, is cut on one rank."""
        return choose_micro_batching(
            self.use_dynamic_bsz,
            self.ppo_micro_batch_size_per_gpu,
            self.ppo_max_token_len_per_gpu,
        )


def update_problems(
    key: str, model: "ActorConfig | CriticConfig", config: "PPOConfig"
) -> Iterator[str]:
    """Yields what keeps a model, whose section is called `key`, from being updated and resumed.

    Args:
        model: the actor's section, or the critic's with what it takes over from the actor.
    """
    yield from _mini_batch_problems(key, model, config)
    yield from model.micro_batching.problems_of_pass(f"{key}.ppo", config.data.row_length)
    if config.trainer.resume_mode != "disable":
        yield from model.checkpoint.resume_problems(f"{key}.checkpoint")


def _mini_batch_problems(
    key: str, model: "ActorConfig | CriticConfig", config: "PPOConfig"
) -> Iterator[str]:
    """Requires that a step divides into mini-batches, those over ranks and into micro-batches."""
    n = config.actor_rollout_ref.rollout.n
    prompts = config.prompts_per_step
    # Where ranks do not divide there is no group of them, which is reported too.
    groups_of_ranks = max(config.data_parallel_size, 1)
    ranks_per_sequence = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    among = f"{groups_of_ranks} ranks"
    if ranks_per_sequence > 1:
        among = f"{groups_of_ranks} groups of {ranks_per_sequence} ranks that share sequences"

    step_setting = f"data.train_batch_size={config.data.train_batch_size}"
    if config.environments and config.agent.agent_length:
        step_setting = f"agent.agent_length={config.agent.agent_length}"
    mini_batch = prompts
    mini_batch_setting = step_setting
    if model.ppo_mini_batch_size is not None:
        mini_batch = model.ppo_mini_batch_size
        mini_batch_setting = f"{key}.ppo_mini_batch_size={mini_batch}"

    if prompts % mini_batch:
        yield (
            f"{step_setting} must be a multiple of {mini_batch_setting}: a step is cut into equal "
            "mini-batches"
        )
    rows_per_rank, rest = divmod(mini_batch * n, groups_of_ranks)
    micro_batch = model.micro_batching.micro_batch_size
    if rest:
        yield (
            f"{mini_batch_setting} x rollout.n={n} = {mini_batch * n} rows do not divide among "
            f"{among}"
        )
    elif micro_batch and rows_per_rank % micro_batch:
        yield (
            f"{key}.ppo_micro_batch_size_per_gpu={micro_batch} does not divide the "
            f"{rows_per_rank} rows of a mini-batch on a rank ({mini_batch_setting} x "
            f"rollout.n={n} / {among})"
        )
