"""Tensor maths that knows nothing of reinforcement learning: log-probs with entropy, and masked reductions.

Invariant: a masked reduction over nothing is zero, never NaN, and what is masked out may hold anything, NaN included.
Log-probs and entropies, in nats, are computed in float32 whatever the logits' dtype: bfloat16 has 8 bits of mantissa.
What verl's users know of batches stands behind it: dynamic batches, padding, schedules (transformers' own).
"""

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import linear

from data.containers import row_blocks

logger = logging.getLogger(__name__)

# Of "squares" the entropy comes with the sum of squared probabilities, as a second row.
EntropyMode = Literal["none", "value", "grad", "squares"]
# Of a block of logits on a CPU. Its float32 copies stay in the cache, and are too small to be mapped anew each time
# (workers/ranks/distributed.py).
BLOCK_ENTRIES = 1 << 18
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled_on(device_type: str) -> Callable[[Function], Function]:
    """Makes a decorator: a function whose first argument is a tensor on such a device is compiled at its first call.

    Elsewhere it runs as it is written; so it does, with a word, where it cannot be compiled.
    """

    def decorate(function: Function) -> Function:
        chosen: Callable[..., Any] | None = None

        @wraps(function)
        def run(tensor: Tensor, *others: Any) -> Any:
            nonlocal chosen
            if tensor.device.type != device_type:
                return function(tensor, *others)
            chosen = chosen or torch.compile(function)
            try:
                return chosen(tensor, *others)
            except torch._dynamo.exc.TorchDynamoException as error:
                chosen = function
                logger.warning(
                    "%s runs slower, because it cannot be compiled: %s", function.__name__, error
                )
                return function(tensor, *others)

        return run  # type: ignore[return-value]

    return decorate


class LogitForm(NamedTuple):
    """Says how logits z come from a head's products x: z = x / divisor, or z = cap * tanh(x / divisor / cap)."""

    divisor: float = 1.0
    cap: float | None = None

    def logits(self, products: Tensor) -> Tensor:
        """Computes z, a copy of at least float32."""
        z = products.to(torch.promote_types(products.dtype, torch.float32), copy=True)
        if self.divisor != 1:
            z.div_(self.divisor)
        return z if self.cap is None else z.div_(self.cap).tanh_().mul_(self.cap)


@compiled_on("cuda")
def _row_stats(products: Tensor, labels: Tensor, form: LogitForm, entropy: EntropyMode) -> Tensor:
    """Computes log-probs, log-denominators of the softmax and, where asked for, entropies, squares: (2 to 4, n)."""
    z = form.logits(products)  # (n, vocabulary)
    log_sums = z.logsumexp(-1, keepdim=True)
    stats = [z.gather(1, labels[:, None]) - log_sums, log_sums]
    if entropy != "none":
        log_p = z.sub_(log_sums)
        p = log_p.exp()
        squares = [p.square().sum(-1, keepdim=True)] if entropy == "squares" else []
        stats += [-p.mul_(log_p).sum(-1, keepdim=True), *squares]
    return torch.cat(stats, 1).T


@compiled_on("cuda")
def _make_gradient(products: Tensor, labels: Tensor, rows: Tensor, form: LogitForm) -> None:
    """Replaces products (n, words) by the loss's gradient; labels count from the first word, and may lie outside.

    `rows` (2 or 4, n) are log-denominators, the gradient of log-probs and, if they have one, entropies and theirs.
    """
    inside = (labels >= 0) & (labels < products.shape[1])
    places = labels.clamp(0, products.shape[1] - 1)[:, None]
    rows = rows[..., None]
    # What belongs to a label is rounded when it is whole: 1 - p is a small difference.
    own = _slopes(products.gather(1, places), rows, form, torch.where(inside[:, None], rows[1], 0))
    products.copy_(_slopes(products, rows, form)).scatter_(1, places, own.to(products.dtype))


def _slopes(
    products: Tensor, rows: Tensor, form: LogitForm, onehot: Tensor | None = None
) -> Tensor:
    """Computes d loss / d products, from d log p(y) / d z = onehot(y) - p and d H / d z = -p * (log p + H)."""
    log_sums, weight, *of_entropy = rows
    z = form.logits(products)
    log_p = z.sub_(log_sums) if form.cap is None else z - log_sums
    if of_entropy:
        entropy, entropy_weight = of_entropy
        slopes = log_p.exp().mul_(weight.neg() - entropy_weight * (log_p + entropy))
    else:
        slopes = log_p.exp_().mul_(weight.neg())
    if onehot is not None:
        slopes += onehot
    if form.cap is not None:
        slopes *= 1 - (z / form.cap) ** 2
    return slopes if form.divisor == 1 else slopes.div_(form.divisor)


class _HeadLogProbs(torch.autograd.Function):
    """Computes log-probs and entropies from the head's input, with at most `chunk` logits at a time.

    Forward takes some rows at a time, with the whole vocabulary. Backward takes some words at a time, with all rows: so
    a word's weights get their gradient from one matrix product. It makes logits again, unless forward made them in one
    chunk, and turns them into their gradient in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        form: LogitForm,
        entropy: EntropyMode,
        chunk: int,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(states.dtype, torch.float32)
        rows = {"none": 2, "squares": 4}.get(entropy, 3)
        stats = states.new_empty(rows, len(states), dtype=dtype)
        chunks = _slices(len(states), chunk // len(weight))
        for some in chunks:
            products = linear(states[some], weight, bias)  # (n, vocabulary)
            for block in _row_blocks(products):
                stats[:, some][:, block] = _row_stats(
                    products[block], labels[some][block], form, entropy
                )
        ctx.save_for_backward(states, weight, bias, labels, stats)
        ctx.products = products if len(chunks) == 1 and len(states) * len(weight) <= chunk else None
        ctx.form, ctx.with_entropy, ctx.chunk = form, entropy == "grad", chunk
        # Copies, as FSDP warns of views.
        log_probs, entropies = (
            stats[0].clone(),
            None if rows == 2 else stats[2 if rows == 3 else slice(2, 4)].clone(),
        )
        if entropy in ("value", "squares"):
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, labels, stats = ctx.saved_tensors
        rows = torch.stack(
            [stats[1], gradients[0], *((stats[2], gradients[1]) if ctx.with_entropy else ())]
        )
        of_states = torch.zeros_like(states, dtype=stats.dtype)
        of_weight, of_bias = (
            torch.empty_like(weight),
            None if bias is None else torch.empty_like(bias),
        )
        for words in _slices(len(weight), ctx.chunk // max(1, len(states))):
            some = bias if bias is None else bias[words]
            products = linear(states, weight[words], some) if ctx.products is None else ctx.products
            ctx.products = None
            for block in _row_blocks(products):
                _make_gradient(
                    products[block], labels[block] - words.start, rows[:, block], ctx.form
                )
            of_states += products @ weight[words]
            torch.mm(products.T, states, out=of_weight[words])
            if of_bias is not None:
                of_bias[words] = products.sum(0)
        return of_states.to(states.dtype), of_weight, of_bias, None, None, None, None


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, start + max(1, size)) for start in range(0, total, max(1, size))]


def _row_blocks(matrix: Tensor) -> list[slice]:
    """Cuts rows on a CPU into blocks of BLOCK_ENTRIES; elsewhere a kernel takes them all.

    Where only memory is planned, one block shows what each takes.
    """
    blocks = _slices(
        len(matrix),
        BLOCK_ENTRIES // matrix.shape[1] if matrix.device.type == "cpu" else len(matrix),
    )
    return blocks[:1] if isinstance(matrix, FakeTensor) else blocks


def head_log_probs(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    form: LogitForm,
    entropy: EntropyMode = "none",
    chunk: int = 1 << 27,
) -> tuple[Tensor, Tensor | None]:
    """Computes labels' log-probs and, unless `entropy` is "none", entropies, (tokens,) float32 each.

    With "squares" the second is (2, tokens): entropies, and sums of the vocabulary's squared probabilities. Both are
    differentiable, entropies with "grad" only. Nothing here waits for the device.

    Args:
        states: (tokens, hidden), what a language model's head gets; matrix products are in autocast's type, where it
            is on.
        weight, bias: (vocabulary, hidden) and (vocabulary,) of the head; its products are finite.
        labels: (tokens,) int64.
        chunk: how many logits exist at a time; if all of them are no more, backward does not make them again.
    """
    return _HeadLogProbs.apply(*in_compute_type(states, weight, bias), labels, form, entropy, chunk)


def in_compute_type(*tensors: Any) -> tuple[Any, ...]:
    """Casts tensors to autocast's type, where it is on; None stays."""
    device = tensors[0].device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return tuple(
        x.to(torch.get_autocast_dtype(device)) if on and x is not None else x for x in tensors
    )


# Masked reductions


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Clamps elementwise between two tensors."""
    return torch.minimum(torch.maximum(x, tensor_min), tensor_max)


def at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Widens halves and integers to float32; float64 stays."""
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Averages the values where the mask is not zero; 0 over an empty mask."""
    # A whole batch's is summed over blocks of rows, without float64 copies of it all.
    whole = axis is None and values.shape == mask.shape
    blocks = _blocks(values) if whole else [...]
    total = sum(
        torch.where(mask[rows].bool(), values[rows], 0).sum(axis, dtype=torch.float64)
        for rows in blocks
    )
    count = _count(mask) if axis is None else mask.bool().sum(axis)
    return (total / count.clamp(min=1)).to(values.dtype)


def masked_var(
    values: Tensor, mask: Tensor, unbiased: bool = True, mean: Tensor | None = None
) -> Tensor:
    """Computes the variance of the values where the mask is not zero, 0-dim; 0 where there are fewer than two.

    Args:
        mean: of the values, where it is known.
    """
    mask = mask.expand_as(values)
    mean, count = masked_mean(values, mask) if mean is None else mean, _count(mask)
    squares = (
        torch.where(mask[rows].bool(), (values[rows] - mean) ** 2, 0) for rows in _blocks(values)
    )
    square = (sum(block.sum(dtype=torch.float64) for block in squares) / count.clamp(min=1)).to(
        values.dtype
    )
    return square * count / (count - 1).clamp(min=1) if unbiased else square


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales values to unit variance over the mask and, with `shift_mean`, moves them to mean zero.

    Returns: the inputs' shape, zero outside the mask, and zero everywhere where the mask holds fewer than two.
    """
    mask = mask.bool()
    mean = masked_mean(values, mask)
    scale = torch.rsqrt(masked_var(values, mask, mean=mean) + 1e-8)
    several, left = _count(mask) > 1, 0 if shift_mean else mean
    return torch.where(mask & several, (values - mean) * scale + left, 0)


def sampled_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Sums each row where the mask is not zero: (batch,) float64."""
    sums = [
        torch.where(mask[rows].bool(), values[rows], 0).sum(-1, dtype=torch.float64)
        for rows in row_blocks(mask)
    ]
    return torch.cat(sums)


def _count(mask: Tensor) -> Tensor:
    """Counts what is not zero, 0-dim; in blocks, which is three times as fast."""
    return torch.stack([mask[rows].count_nonzero() for rows in _blocks(mask)]).sum()


def _blocks(values: Tensor) -> list[Any]:
    """Cuts rows into blocks, of which there are no copies as large as the whole."""
    return row_blocks(values) if values.dim() else [...]


# Log-probs and entropy, in nats and float32


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the log-probability of each label.

    Args:
        logits: (..., vocabulary), any float dtype.
        labels: (...) int64.
    Returns: (...) float32 (float64 for float64 logits).
    """
    flat = at_least_float32(logits)[0].flatten(0, -2)  # (tokens, vocabulary)
    return -nnf.cross_entropy(flat, labels.flatten(), reduction="none").view(labels.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Computes the softmax's entropy: (..., vocabulary) -> (...) float32. Tokens of logit -inf cannot be sampled."""
    log_probs = torch.log_softmax(at_least_float32(logits)[0], dim=-1)
    # 0 * log 0 is 0, and 0 * -inf would be NaN.
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


# Masks and padding


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sums the values where the mask is not zero, over `axis` (None: over all); accumulates in float64."""
    return torch.where(mask.bool(), values, 0).sum(axis, dtype=torch.float64).to(values.dtype)


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Returns 1 up to and including the first end token, 0 after it: (batch, response_len) of `dtype`."""
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device))
    return (ends.cumsum(-1) - ends.long() == 0).to(dtype)


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Pads the last dimension up to `max_seq_len`; longer ones stay as they are."""
    missing = max(max_seq_len - tensors.shape[-1], 0)
    return nnf.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Pads lists of token ids on the right to the longest, or to a longer `max_length`: (batch, length) int64."""
    length = max([max_length or 0, *map(len, response)])
    return torch.tensor(
        [[*row, *[pad_token_id] * (length - len(row))] for row in response], dtype=torch.int64
    )


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Literal["left", "right", "middle", "error"] = "error",
) -> tuple[Tensor, Tensor]:
    """Brings sequences to exactly `max_length` tokens.

    Args:
        input_ids, attention_mask: (batch, length) int64.
        truncation: which part of a longer sequence is lost: left, right, middle; or error.
    Returns: input_ids, attention_mask: (batch, max_length).
    """
    from data.rl_dataset import truncate

    length = input_ids.shape[-1]
    if length <= max_length:
        ids = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
        return ids, pad_sequence_to_length(attention_mask, max_length, 0, left_pad)
    kept = truncate(list(range(length)), max_length, truncation, "postprocess_data")
    return input_ids[..., kept], attention_mask[..., kept]


# Learning-rate schedules: factors of the optimizer's own rate, after a linear warm-up


def get_constant_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int | None = None,
    last_epoch: int = -1,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Keeps the full rate after the warm-up. `num_training_steps` is unused: all schedules are called alike."""
    import transformers

    return transformers.get_constant_schedule_with_warmup(optimizer, num_warmup_steps, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Lowers the rate by a cosine to `min_lr_ratio` of it; half a cycle by default, reached at `num_training_steps`.

    Steps beyond those follow the cosine on, so that the rate rises again.
    """
    import transformers

    return transformers.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer,
        num_warmup_steps,
        num_training_steps,
        num_cycles,
        last_epoch,
        min_lr_rate=min_lr_ratio,
    )


def get_wsd_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warms up, keeps the full rate for `stable_ratio` of the rest (whole steps), then decays (arXiv:2404.06395).

    The warm-up starts at `min_lr_ratio` of the rate, not at zero; the decay is a cosine down to that ratio, which holds
    from `num_training_steps` on.
    """
    import transformers

    stable = int(stable_ratio * (num_training_steps - num_warmup_steps))
    decay = num_training_steps - num_warmup_steps - stable
    shape = {"min_lr_ratio": min_lr_ratio, "num_cycles": num_cycles, "last_epoch": last_epoch}
    return transformers.get_wsd_schedule(
        optimizer, num_warmup_steps, decay, num_stable_steps=stable, **shape
    )
