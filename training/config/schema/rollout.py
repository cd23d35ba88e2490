"""Holds the settings of `actor_rollout_ref.rollout`: the generation engine and its sampling."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any

from training.config.schema.common import Dtype
from training.config.section import (
    NonNegativeFloat,
    PositiveFraction,
    PositiveInt,
    PositiveOrMinusOne,
    Section,
)


class ValKwargs(Section):
    """Sampling in validation."""

    temperature: NonNegativeFloat = 0.0  #: used when do_sample is true
    n: PositiveInt = 1  #: answers per validation prompt
    do_sample: bool = False  #: false = greedy
    top_k: PositiveOrMinusOne = -1  #: sample among the k likeliest tokens; -1 = all
    top_p: PositiveFraction = 1.0  #: sample among the likeliest tokens of this total probability

    def problems(self) -> Iterator[str]:
        """Yields what keeps validation from sampling."""
        if self.do_sample and self.temperature == 0:
            yield (
                "actor_rollout_ref.rollout.val_kwargs.do_sample=true needs "
                "actor_rollout_ref.rollout.val_kwargs.temperature above 0"
            )


class RolloutConfig(Section):
    """The generation engine and its sampling."""

    #: engine: vllm, sglang, hf (plain transformers, slow but needs nothing), or one that the file
    #: of custom_algorithm registers
    name: str = "vllm"
    n: PositiveInt = 1  #: responses per prompt: the size of a group
    #: of sampling; log-probs are taken at the same temperature
    temperature: NonNegativeFloat = 1.0
    top_k: PositiveOrMinusOne = -1  #: sample among the k likeliest tokens; -1 = all
    top_p: PositiveFraction = 1.0  #: sample among the likeliest tokens of this total probability
    #: token ids that are never sampled, beside the placeholders of a model that also sees or hears;
    #: log-probs are those over the others
    banned_token_ids: list[int] = field(default_factory=list)
    dtype: Dtype = "bfloat16"  #: the engine's weights
    #: part of the GPU's memory the engine may take
    gpu_memory_utilization: PositiveFraction = 0.5
    enforce_eager: bool = False  #: do without CUDA graphs
    free_cache_engine: bool = True  #: release the engine's memory during training
    #: ranks that share one engine; divides trainer.n_gpus_per_node
    tensor_model_parallel_size: PositiveInt = 1
    max_num_batched_tokens: PositiveInt = 8192  #: tokens per engine step
    max_num_seqs: PositiveInt = 1024  #: sequences the engine runs at once
    response_length: int | None = None  #: tokens; null = data.max_response_length
    #: longest prompt + response; null = data's two lengths together
    max_model_len: PositiveInt | None = None
    enable_chunked_prefill: bool = True  #: mix parts of long prompts with generation
    enable_prefix_caching: bool = True  #: compute shared prefixes once
    #: keep the engine's own log-probs, to watch how they differ from the trainer's
    calculate_log_probs: bool = True
    #: keep the engine's choices of experts; actor.router_replay.mode=R3 sets it
    enable_rollout_routing_replay: bool = False
    #: rows of an old-log-prob pass; null = the actor's
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    #: cut by token budget; null = unless a micro batch size is given
    log_prob_use_dynamic_bsz: bool | None = None
    #: tokens per old-log-prob forward; null = the actor's
    log_prob_max_token_len_per_gpu: PositiveInt | None = None
    #: vllm: send LoRA's adapters alone, and generate with them; false = merge them
    lora_as_adapter: bool = False
    ignore_eos: bool = False  #: go on to max_response_length (for timing)
    #: with trainer.async_level: new weights reach running episodes;
    #: false = those are finished first
    update_in_flight: bool = True
    val_kwargs: ValKwargs = ValKwargs()
    #: per engine, passed on: engine_kwargs.vllm.KEY=VALUE
    engine_kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """Yields that nothing would be sampled."""
        if self.temperature == 0:
            yield "actor_rollout_ref.rollout.temperature=0.0: training samples; set it above 0"

    def warnings(self) -> Iterator[str]:
        """Yields which settings are for other engines."""
        for engine, kwargs in self.engine_kwargs.items():
            if kwargs and engine != self.name:
                yield (
                    f"actor_rollout_ref.rollout.engine_kwargs.{engine} has no effect with "
                    f"rollout.name={self.name}"
                )
