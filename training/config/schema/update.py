"""Holds what the updates of policy and critic have in common: batches, sharding, checkpoints."""

from collections.abc import Iterator
from typing import Literal

from training.config.batch_plan import MicroBatching, choose_micro_batching
from training.config.section import PositiveFloat, PositiveInt, Section

CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]
LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class FSDPConfig(Section):
    """Sharding of one model over the ranks."""

    param_offload: bool = False  #: keep parameters in CPU memory while unused
    optimizer_offload: bool = False  #: keep optimiser state in CPU memory while unused
    reshard_after_forward: bool = True  #: free gathered parameters after the forward pass

    def unused(self, key: str, num_ranks: int) -> Iterator[str]:
        """Yields what has no effect where nothing is sharded; `key` is the model's section."""
        if not self.reshard_after_forward and num_ranks == 1:
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
