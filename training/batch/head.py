"""Computes log-probs and entropies of a language model's head without holding all of its logits.

Invariant: log-probs and entropies, in nats, are computed in float32 whatever the logits' dtype:
bfloat16 has 8 bits of mantissa.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import cross_entropy, embedding, linear
from torch.utils.checkpoint import checkpoint

from training.core_algos.masked_ops import at_least_float32

logger = logging.getLogger(__name__)

# "value" is not differentiable, "grad" is; with "squares" the entropy comes with the sum of squared
# probabilities, as a second row.
EntropyMode = Literal["none", "value", "grad", "squares"]
# Logits in a block on a CPU. Its float32 copies stay in the cache, and are too small to be mapped
# anew each time (workers/ranks/memory.py).
BLOCK_ENTRIES = 1 << 18
# What is added to a logit whose token is never sampled: its probability is 0, and that times the
# logit, or its square, is 0 in float32.
BANNED = -1e15
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled_on(device_type: str) -> Callable[[Function], Function]:
    """Makes a decorator that compiles a function for tensors on such a device, at its first call.

    The device is that of the first argument. Elsewhere the function runs as it is written; so it
    does, with a warning, where it cannot be compiled.
    """

    def decorate(function: Function) -> Function:
        chosen: Callable[..., Any] | None = None

        @wraps(function)
        def run(tensor: Tensor, *others: Any) -> Any:
            nonlocal chosen
            if tensor.device.type != device_type:
                return function(tensor, *others)
            if chosen is None:
                chosen = torch.compile(function)
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
    """Describes how logits z come from a head's products x.

    z = x / divisor, or with a cap z = cap * tanh(x / divisor / cap).
    """

    divisor: float = 1.0
    cap: float | None = None

    def logits(self, products: Tensor) -> Tensor:
        """Computes z, a copy of at least float32."""
        dtype = torch.promote_types(products.dtype, torch.float32)
        z = products.to(dtype, copy=True)
        if self.divisor != 1:
            z.div_(self.divisor)
        if self.cap is not None:
            z.div_(self.cap).tanh_().mul_(self.cap)
        return z


@compiled_on("cuda")
def _row_stats(
    products: Tensor,
    labels: Tensor,
    form: LogitForm,
    entropy: EntropyMode,
    penalty: Tensor | None = None,
) -> Tensor:
    """Computes what forward keeps of each row of products (n, vocabulary): (2 to 4, n).

    The rows are: log-probs of the labels, log-denominators of the softmax and, where `entropy`
    asks for them, entropies and sums of squared probabilities.
    """
    z = form.logits(products)  # (n, vocabulary)
    if penalty is not None:
        z.add_(penalty)
    log_sums = z.logsumexp(-1, keepdim=True)
    stats = [z.gather(1, labels[:, None]) - log_sums, log_sums]
    if entropy != "none":
        log_p = z.sub_(log_sums)
        p = log_p.exp()
        squares = []
        if entropy == "squares":
            squares = [p.square().sum(-1, keepdim=True)]
        entropies = -p.mul_(log_p).sum(-1, keepdim=True)
        stats += [entropies, *squares]
    return torch.cat(stats, 1).T


@compiled_on("cuda")
def _make_gradient(
    products: Tensor,
    labels: Tensor,
    rows: Tensor,
    form: LogitForm,
    penalty: Tensor | None = None,
) -> None:
    """Replaces products (n, words) by the loss's gradient.

    Args:
        labels: (n,) counted from the first word; they may lie outside.
        rows: (2 or 4, n): log-denominators, the gradient of log-probs and, if entropies have a
            gradient, entropies and that.
        penalty: (words,) as of `head_log_probs`.
    """
    inside = (labels >= 0) & (labels < products.shape[1])
    places = labels.clamp(0, products.shape[1] - 1)[:, None]
    rows = rows[..., None]
    of_places = None
    if penalty is not None:
        of_places = penalty[places]
        # No weight moves the logit of a token that is never sampled.
        inside = inside & (of_places[:, 0] == 0)
    # A label's entry is rounded when it is whole: 1 - p is a small difference.
    onehot = torch.where(inside[:, None], rows[1], 0)
    of_labels = _slopes(products.gather(1, places), rows, form, of_places, onehot)
    products.copy_(_slopes(products, rows, form, penalty)).scatter_(
        1, places, of_labels.to(products.dtype)
    )


def _slopes(
    products: Tensor,
    rows: Tensor,
    form: LogitForm,
    penalty: Tensor | None,
    onehot: Tensor | None = None,
) -> Tensor:
    """Computes d loss / d products.

    With d log p(y) / d z = onehot(y) - p, and d H / d z = -p * (log p + H).
    """
    log_sums, weight, *of_entropy = rows
    z = form.logits(products)
    if penalty is not None:
        z.add_(penalty)
    # With a cap z is needed again below.
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
    if form.divisor != 1:
        slopes.div_(form.divisor)
    return slopes


class _HeadLogProbs(torch.autograd.Function):
    """Computes log-probs and entropies from the head's input, `chunk` logits at a time.

    Forward takes some rows at a time, with the whole vocabulary. Backward takes some words at a
    time, with all rows: so a word's weights get their gradient from one matrix product. It makes
    logits again, unless forward made them in one chunk, and turns them into their gradient in
    place.
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
        penalty: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(states.dtype, torch.float32)
        num_stats = {"none": 2, "value": 3, "grad": 3, "squares": 4}[entropy]
        stats = states.new_empty(num_stats, len(states), dtype=dtype)
        chunks = _slices(len(states), chunk // len(weight))
        for some_rows in chunks:
            products = linear(states[some_rows], weight, bias)  # (n, vocabulary)
            stats_of_chunk = stats[:, some_rows]
            labels_of_chunk = labels[some_rows]
            for block in _row_blocks(products):
                stats_of_chunk[:, block] = _row_stats(
                    products[block], labels_of_chunk[block], form, entropy, penalty
                )
        ctx.save_for_backward(states, weight, bias, labels, stats)
        fits_in_one_chunk = len(chunks) == 1 and len(states) * len(weight) <= chunk
        ctx.products = products if fits_in_one_chunk else None
        ctx.form = form
        ctx.with_entropy = entropy == "grad"
        ctx.chunk = chunk
        ctx.penalty = penalty
        # Copies, as FSDP warns of views.
        log_probs = stats[0].clone()
        if entropy == "none":
            return log_probs, None
        entropies = stats[2:4].clone() if entropy == "squares" else stats[2].clone()
        if entropy != "grad":
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, labels, stats = ctx.saved_tensors
        row_values = [stats[1], gradients[0]]
        if ctx.with_entropy:
            row_values += [stats[2], gradients[1]]
        rows = torch.stack(row_values)
        grad_states = torch.zeros_like(states, dtype=stats.dtype)
        grad_weight = torch.empty_like(weight)
        grad_bias = None if bias is None else torch.empty_like(bias)
        for words in _slices(len(weight), ctx.chunk // max(1, len(states))):
            if ctx.products is None:
                bias_of_words = None if bias is None else bias[words]
                products = linear(states, weight[words], bias_of_words)
            else:
                products = ctx.products
                ctx.products = None
            penalty = None if ctx.penalty is None else ctx.penalty[words]
            for block in _row_blocks(products):
                _make_gradient(
                    products[block],
                    labels[block] - words.start,
                    rows[:, block],
                    ctx.form,
                    penalty,
                )
            grad_states += products @ weight[words]
            torch.mm(products.T, states, out=grad_weight[words])
            if grad_bias is not None:
                grad_bias[words] = products.sum(0)
        return grad_states.to(states.dtype), grad_weight, grad_bias, None, None, None, None, None


def _slices(total: int, size: int) -> list[slice]:
    """Cuts range(total) into slices of `size`, one at least."""
    step = max(1, size)
    return [slice(start, start + step) for start in range(0, total, step)]


def _row_blocks(matrix: Tensor) -> list[slice]:
    """Cuts rows on a CPU into blocks of BLOCK_ENTRIES; elsewhere a kernel takes them all.

    Where only memory is planned, one block shows what each takes.
    """
    rows = len(matrix)
    if matrix.device.type == "cpu":
        rows = BLOCK_ENTRIES // matrix.shape[1]
    blocks = _slices(len(matrix), rows)
    if isinstance(matrix, FakeTensor):
        return blocks[:1]
    return blocks


def head_log_probs(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    form: LogitForm,
    entropy: EntropyMode = "none",
    chunk: int = 1 << 27,
    penalty: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes labels' log-probs and, unless `entropy` is "none", entropies.

    Both are (tokens,) float32. With "squares" the second is (2, tokens): entropies, and sums of the
    vocabulary's squared probabilities. Log-probs are differentiable, entropies with "grad" only.
    Nothing here waits for the device.

    Args:
        states: (tokens, hidden), what a language model's head gets; matrix products are in
            autocast's type, where it is on.
        weight, bias: (vocabulary, hidden) and (vocabulary,) of the head; its products are finite.
        labels: (tokens,) int64.
        chunk: how many logits exist at a time; if all of them are no more, backward does not make
            them again.
        penalty: (vocabulary,) float32, 0, or BANNED for tokens that are never sampled; None: every
            token may be. The distribution is that over the others; a banned label's log-prob is
            about BANNED, and has no gradient.
    """
    states, weight, bias = in_compute_type(states, weight, bias)
    return _HeadLogProbs.apply(states, weight, bias, labels, form, entropy, chunk, penalty)


class LabelLogProbs(NamedTuple):
    """Holds labels (tokens,) int64 and their log-probs (tokens,) of `head_log_probs`."""

    labels: Tensor
    log_probs: Tensor


def candidate_log_probs(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    known: LabelLogProbs,
    candidates: Tensor,
    form: LogitForm,
    penalty: Tensor | None = None,
    chunk: int = 1 << 27,
) -> Tensor:
    """Computes log-probs of further words as continuations of the same states: (tokens, K) float32.

    No logits but those of the words are made: the softmax's denominator is known from the labels,

        log p(word) = z(word) - z(label) + log p(label),

    which is differentiable in all three. Some rows are computed at a time, and once more in the
    backward pass.

    Args:
        states, weight, bias, form, penalty: as of `head_log_probs`.
        candidates: (tokens, K) int64, the words.
        chunk: how many numbers of words' weights exist at a time.
    """
    states, weight, bias = in_compute_type(states, weight, bias)
    ids = torch.cat([known.labels[:, None], candidates], dim=1)  # (tokens, 1 + K)
    rows = max(1, chunk // (ids.shape[1] * weight.shape[1]))
    parts = []
    for start in range(0, max(len(ids), 1), rows):
        some = slice(start, start + rows)
        arguments = (states[some], weight, bias, ids[some], form, penalty)
        parts.append(checkpoint(_logits_of_words, *arguments, use_reentrant=False))
    logits = torch.cat(parts)
    return logits[:, 1:] - logits[:, :1] + known.log_probs[:, None]


@torch.no_grad()
def top_log_probs(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: LogitForm,
    k: int,
    penalty: Tensor | None = None,
    chunk: int = 1 << 27,
) -> tuple[Tensor, Tensor]:
    """Finds the likeliest words of each state: log-probs (tokens, k) float32, and ids, int64.

    The likeliest comes first. All words come where the vocabulary has no more than k. Arguments are
    those of `head_log_probs`.
    """
    states, weight, bias = in_compute_type(states, weight, bias)
    kept = min(k, len(weight))
    found = []
    ids = []
    for rows in _slices(len(states), chunk // len(weight)):
        logits = form.logits(linear(states[rows], weight, bias))
        if penalty is not None:
            logits.add_(penalty)
        top = logits.topk(kept, dim=-1)
        found.append(top.values - logits.logsumexp(-1, keepdim=True))
        ids.append(top.indices)
    if not found:
        nothing = torch.zeros(0, kept, device=states.device)
        return nothing, nothing.long()
    return torch.cat(found), torch.cat(ids)


def _logits_of_words(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    form: LogitForm,
    penalty: Tensor | None,
) -> Tensor:
    """Computes the logits of words (tokens, words of each): the same shape, at least float32."""
    products = torch.einsum("th,twh->tw", states, embedding(ids, weight))
    if bias is not None:
        products = products + bias[ids]
    logits = products.to(torch.promote_types(products.dtype, torch.float32)) / form.divisor
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    return logits if penalty is None else logits + penalty[ids]


def in_compute_type(*tensors: Any) -> tuple[Any, ...]:
    """Casts tensors to autocast's type, where it is on; None stays."""
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the log-probability of each label.

    Args:
        logits: (..., vocabulary), any float dtype.
        labels: (...) int64.
    Returns: (...) float32 (float64 for float64 logits).
    """
    flat = at_least_float32(logits)[0].flatten(0, -2)  # (tokens, vocabulary)
    return -cross_entropy(flat, labels.flatten(), reduction="none").view(labels.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Computes the softmax's entropy: (..., vocabulary) -> (...) float32.

    Tokens of logit -inf cannot be sampled.
    """
    log_probs = torch.log_softmax(at_least_float32(logits)[0], dim=-1)
    # 0 * log 0 is 0, and 0 * -inf would be NaN.
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
    return -(log_probs.exp() * finite).sum(-1)
