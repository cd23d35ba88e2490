"""A pass over the largest micro-batch of full rows: the peak of what it makes.

Invariant: rows are laid out, and run forward and backward, by the run's own code; the tensors of
the model are fake, those of the rows are not.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from data.protocol import DataProto
from features.memory_plan.live_memory import LiveMemory
from features.memory_plan.models import ModelPass, PlannedModel
from features.memory_plan.planned_run import PlannedRun
from features.memory_plan.terms import MemoryTerms
from training.core_algos import GlobalBatchInfo
from workers.model.micro_batches import iter_micro_batches
from workers.model.packing import ForwardBatch
from workers.model.update_loop import UpdateLoop

# A loss reads these beside the rows themselves: (rows, response_len) each.
LOSS_INPUTS = (
    "advantages",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_prob",
    "values",
    "returns",
    "response_mask",
)
# Losses divide by these: any numbers do.
COUNTS = GlobalBatchInfo(dp_size=1, batch_num_tokens=1, global_batch_size=1)

# A gradient is float32, as the weight it is of.
GRADIENT_BYTES = 4


def peak_of_pass(
    model: PlannedModel, model_pass: ModelPass, run: PlannedRun, mode: FakeTensorMode
) -> MemoryTerms:
    """Runs the largest micro-batch forward, and backward in an update.

    Returns: on a rank, activations and logits at their peak, and gradients.
    """
    loop = model.loop
    rows = make_full_rows(count_rows(model_pass, run), run)
    micro_batches = list(iter_micro_batches(rows, loop.settings, model_pass.limits))
    # All rows are full, so that the first is as large as any.
    _, micro, inputs = micro_batches[0]
    if run.on_cuda:
        inputs = as_cuda_attends(inputs)
    trained = []
    if model_pass.updates:
        trained = [p for p in loop.module.parameters() if p.requires_grad]
    # The later ones of several micro-batches find gradients there, and on several ranks FSDP2 has
    # taken a block's away before the next are made.
    has_gradients = len(micro_batches) > 1 or run.num_ranks > 1
    if has_gradients:
        make_gradients(trained)

    peak = run_micro_batch(loop, micro, inputs, model_pass, vocabulary=run.vocab_size, mode=mode)
    gradients = GRADIENT_BYTES * sum(p.numel() for p in trained) // run.num_ranks
    activations = share_of_rank(peak["activations"], run)
    if not has_gradients:
        # Those that the backward pass has made were counted with what lives.
        activations = max(activations - gradients, 0)
    return MemoryTerms(
        activations=activations,
        logits=share_of_rank(peak["logits"], run),
        gradients=gradients,
    )


def run_micro_batch(
    loop: UpdateLoop,
    micro: DataProto,
    inputs: ForwardBatch,
    model_pass: ModelPass,
    *,
    vocabulary: int,
    mode: FakeTensorMode,
) -> Counter[str]:
    """Runs a micro-batch forward, and backward in an update; returns `LiveMemory.peak`."""
    loop.module.train(model_pass.updates)
    memory = LiveMemory(loop.module, vocabulary)
    with mode, memory, torch.set_grad_enabled(model_pass.updates):
        if model_pass.updates:
            loop.micro_loss(micro, inputs, COUNTS).loss.backward()
        elif model_pass.entropy_mode is None:
            loop.micro_forward(micro, inputs)
        else:
            loop.micro_forward(micro, inputs, model_pass.entropy_mode)
    return memory.peak


def count_rows(model_pass: ModelPass, run: PlannedRun) -> int:
    """Counts the rows that one rank is to lay out.

    They are those of its mini-batch, but no more than surely fill a micro-batch twice.
    """
    limits = model_pass.limits
    rows_of_rank = run.rows_per_step // run.batch_plan.ranks // model_pass.num_mini_batches
    most_in_micro_batch = limits.micro_batch_size
    if not most_in_micro_batch:
        # Rows of a group share their prompt, and have their responses to themselves.
        max_tokens = limits.max_token_len or 0
        most_in_micro_batch = max_tokens // run.config.data.max_response_length + 1
    return min(rows_of_rank, 2 * most_in_micro_batch)


def make_full_rows(count: int, run: PlannedRun) -> DataProto:
    """Makes rows of full length, whose groups share a prompt; no two responses begin alike."""
    prompt_width = run.config.data.max_prompt_length
    response_width = run.config.data.max_response_length
    numbers = torch.arange(count)[:, None]
    groups = numbers // run.rollout.n
    attended = torch.ones(count, prompt_width + response_width)
    tensors = dict.fromkeys(LOSS_INPUTS, attended[:, prompt_width:])
    tensors["attention_mask"] = attended
    tensors["prompts"] = groups.expand(count, prompt_width)
    tensors["responses"] = numbers.expand(count, response_width)
    return DataProto.from_dict(tensors=tensors)


def as_cuda_attends(inputs: ForwardBatch) -> ForwardBatch:
    """Lays packed rows out as one sequence.

    Its attention takes as much memory as CUDA's kernels do for packed rows; those run on no CPU.
    """
    if inputs.sequences is None:
        return inputs
    position_ids = torch.arange(inputs.input_ids.shape[1])[None]
    return replace(inputs, sequences=None, position_ids=position_ids)


def make_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Gives parameters gradients, as an earlier micro-batch leaves them."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)


def share_of_rank(size: int, run: PlannedRun) -> int:
    """Divides what a pass makes among the ranks that share each sequence."""
    return size * run.batch_plan.ranks // run.num_ranks
