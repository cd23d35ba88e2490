"""The memory of the rollout engine: its weights, its cache, its computations.

An engine says itself what it reserves, and whether it gives it back while the trainer works
(`Engine.plan_memory`). Invariant: nothing here knows an engine's name.
"""

import logging
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import Cache

from features.memory_plan.live_memory import LiveMemory
from features.memory_plan.planned_run import PlannedRun
from features.memory_plan.terms import MemoryTerms, PartMemory
from workers.model.builder import torch_dtype
from workers.rollout.engine import PlannedMemory
from workers.rollout.engine_registry import load_engine_class
from workers.rollout.kv_cache import kv_cache_bytes

logger = logging.getLogger(__name__)

# Sampling a token takes so many bytes for each of the vocabulary: logits of 16 bits, and in float32
# the logits, the scaled ones, log-probs, noise, its logarithm, and the difference of the last two.
SAMPLING_BYTES = 2 + 6 * 4
# No tensor is as wide: logits count as activations.
NO_VOCABULARY = 0


class EnginePlan:
    """Plans the engine of a rank; its model is built here, inside `without_numbers`."""

    def __init__(self, run: PlannedRun, mode: FakeTensorMode) -> None:
        self.run = run
        self.mode = mode
        self.module = run.spec.empty_causal_lm(torch_dtype(run.rollout.dtype)).eval()
        size = sum(p.nbytes for p in self.module.parameters())
        self.weight_bytes = size // run.rollout.tensor_model_parallel_size

    def plan(self, capacity: int) -> PartMemory:
        """Plans what the engine takes where a device has so many bytes.

        On ranks of its own it is planned for generation alone, which no other phase is beside.
        """
        engine_class = load_engine_class(self.run.rollout.name)
        planned = engine_class.plan_memory(
            self.run.spec,
            self.run.rollout,
            weight_bytes=self.weight_bytes,
            device_bytes=capacity if self.run.on_cuda else None,
        )
        generation = self.generation(planned)
        if self.run.num_engine_ranks:
            return PartMemory(at_rest=MemoryTerms(), phases={"generation": generation})
        at_rest = self.at_rest(planned)
        # Where the engine sleeps, its weights are there to be written.
        weight_sync = replace(at_rest, weights=self.weight_bytes)
        return PartMemory(
            at_rest=at_rest, phases={"generation": generation, "weight sync": weight_sync}
        )

    def generation(self, planned: PlannedMemory) -> MemoryTerms:
        """Plans generation: with the cache that the engine reserves, or with that of a batch."""
        weights = MemoryTerms(weights=self.weight_bytes)
        if planned.kv_cache is None:
            return weights + self._growing_batch
        return weights + MemoryTerms(kv_cache=max(planned.kv_cache, 0))

    def at_rest(self, planned: PlannedMemory) -> MemoryTerms:
        """Plans what the engine keeps while the trainer works."""
        if planned.kv_cache is None:
            # Its cache was the batch's.
            return MemoryTerms(weights=self.weight_bytes)
        if planned.sleeps:
            return MemoryTerms()
        return self.generation(planned)

    @cached_property
    def _growing_batch(self) -> MemoryTerms:
        """Plans a batch of full rows whose cache grows as it is generated: its last step, or first.

        The first step computes the prompts; the last has the whole cache, and samples with it.
        """
        data = self.run.config.data
        num_rows = self._rows_in_batch()
        try:
            cache, peak = self._last_step(num_rows)
        # What a model's own code raises where its tensors have no numbers.
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            logger.warning("the engine's cache is planned by the configuration alone: %s", error)
            # As many tokens for each row as there are, not whole blocks of them.
            one_row = replace(self.run.rollout, max_num_seqs=1)
            row_cache = kv_cache_bytes(self.run.spec, one_row, data.row_length, block=1)
            cache = peak = num_rows * row_cache
        # The first step has the prompts' part of the cache. All terms are of one moment, so that
        # what it lacks of the whole cache is taken off what it computes with.
        missing_cache = cache * data.max_response_length // data.row_length
        first_step = self._peak_of_prompts(num_rows) - missing_cache
        last_step = max(SAMPLING_BYTES * num_rows * self.run.vocab_size, peak - cache)
        return MemoryTerms(kv_cache=cache, activations=max(first_step, last_step))

    def _rows_in_batch(self) -> int:
        """Counts the rows that an engine generates at a time."""
        num_engines = self.run.num_engine_ranks or self.run.num_ranks
        return min(self.run.rows_per_step // num_engines, self.run.rollout.max_num_seqs)

    def _last_step(self, num_rows: int) -> tuple[int, int]:
        """Runs the last step; returns the bytes of the whole cache, and the peak with them.

        The model makes the cache, whatever its layers keep: keys and values, of all heads or a
        window, or a state. A step makes a layer's anew, beside the old ones.
        """
        length = self.run.config.data.row_length
        ids = torch.zeros(num_rows, length - 1, dtype=torch.long)
        with self.mode, torch.no_grad():
            cache = self.module(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
            with LiveMemory(self.module, NO_VOCABULARY) as memory:
                for tensor in tensors_of(cache):
                    memory.count(tensor)
                self.module(
                    input_ids=ids[:, :1],
                    position_ids=torch.full((num_rows, 1), length - 1),
                    past_key_values=cache,
                    use_cache=True,
                )
        return sum(tensor.nbytes for tensor in tensors_of(cache)), memory.peak.total()

    def _peak_of_prompts(self, num_rows: int) -> int:
        """Runs the first step, all prompts at their full length; returns the bytes at its peak."""
        ids = torch.zeros(num_rows, self.run.config.data.max_prompt_length, dtype=torch.long)
        with self.mode, LiveMemory(self.module, NO_VOCABULARY) as memory, torch.no_grad():
            self.module(input_ids=ids, use_cache=False, logits_to_keep=1)
        return memory.peak.total()


def tensors_of(cache: Cache) -> list[Tensor]:
    """Lists the tensors that the layers of a cache hold, in whatever they hold them."""
    found: list[Tensor] = []
    for layer in getattr(cache, "layers", [cache]):
        found += [leaf for leaf in tree_leaves(vars(layer)) if isinstance(leaf, Tensor)]
    return found
