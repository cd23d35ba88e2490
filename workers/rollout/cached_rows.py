"""Rows that go through a transformers model token by token, with its cache; and a trial of that.

The model makes the cache, so that every layer has its kind: keys and values, a window of them, a
state (linear attention, Mamba, convolutions), an indexer's keys. Rows of unequal length are padded
on the left.
Invariant: a row's logits are those of a pass over the row alone, whatever lies beside it and
whichever rows have left. `may_pad_rows` tries that on the weights that are there.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

logger = logging.getLogger(__name__)

# Tokens of the prompts that are tried, and of what follows each.
PROMPTS = (1, 6, 9, 3)
# The same, where no row is padded.
EQUAL_PROMPTS = (6, 6, 6, 6)
STEPS = 3
# Those that stay behind the first step.
STAYING = (1, 2)
# Nats that the log-prob of a token is off on average, sampled from a row's own pass, in float32.
TOLERANCE = 1e-4
# The same in a type of two bytes, which rounds, and where experts may then be others.
TOLERANCE_OF_TWO_BYTES = 0.5
# How many times more than alone a row may differ beside others where a layer keeps a state.
TIMES_ALONE = 2.0


class CachedRows:
    """Holds what was computed of a batch of rows.

    Args:
        prompts: token ids, padded on the left with `filler` to the longest of them.
    """

    def __init__(self, module: nn.Module, prompts: Sequence[Sequence[int]], filler: int) -> None:
        self.module = module
        self.cache: Cache | None = None
        device = next(module.parameters()).device
        self.ids = _left_padded(prompts, filler).to(device)  # (B, L)
        self.mask = _left_padded([[1] * len(prompt) for prompt in prompts], 0).to(device)
        self.positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)  # (B, L)

    def next_logits(self) -> Tensor:
        """Computes the logits behind each row's last token: (B, vocab) float32."""
        output = self.module(
            input_ids=self.ids,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache = output.past_key_values
        return output.logits[:, -1].float()

    def append(self, tokens: Tensor) -> None:
        """Adds a token (B,) to each row, which the next call computes."""
        self.ids = tokens[:, None]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.positions = self.positions[:, -1:] + 1

    def keep(self, rows: Sequence[int]) -> None:
        """Takes all other rows out."""
        kept = torch.tensor(rows, device=self.ids.device)
        if self.cache is not None:
            _select_rows(self.cache, kept)
        self.ids = self.ids[kept]
        self.mask = self.mask[kept]
        self.positions = self.positions[kept]

    @property
    def keeps_state(self) -> bool:
        """Returns whether a layer's cache is more than keys and values."""
        assert self.cache is not None
        attends = all(_holds_keys_alone(layer) for layer in self.cache.layers)
        return not attends or _selects_by_itself(self.cache)


def _left_padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Pads rows on the left: (B, longest) int64."""
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=filler, padding_side="left")


def _holds_keys_alone(layer: object) -> bool:
    """Checks whether a layer's cache is keys and values, and no state beside them."""
    is_attention = isinstance(layer, CacheLayerMixin)
    return is_attention and not isinstance(layer, LinearAttentionCacheLayerMixin)


def _selects_by_itself(cache: Cache) -> bool:
    """Checks whether a model's own kind of cache has its own way of taking rows out."""
    return type(cache).batch_select_indices is not Cache.batch_select_indices


def _select_rows(cache: Cache, kept: Tensor) -> None:
    """Keeps these rows of every layer.

    Layers that keep a state have no `batch_select_indices`, but every kind can be reordered.
    """
    if _selects_by_itself(cache):
        cache.batch_select_indices(kept)
    else:
        cache.reorder_cache(kept)


@torch.no_grad()
def may_pad_rows(module: nn.Module) -> bool:
    """Tries rows alone and beside each other, some of which leave, on the module's own weights.

    Returns: whether rows of unequal length may be padded; false where padding reaches a layer's
        state, such as through the bias of a projection before it.

    Raises:
        ValueError: the cache gives other log-probs than a pass without it, even where no row is
            padded.
    """
    kind = module.config.model_type
    two_bytes = next(module.parameters()).dtype.itemsize == 2
    tolerance = TOLERANCE_OF_TWO_BYTES if two_bytes else TOLERANCE
    alone = 0.0
    try:
        for length in (*PROMPTS, *_lengths_behind_an_indexer(module)):
            difference, keeps_state = _try_rows(module, (length,))
            alone = max(alone, difference)
        if not alone <= tolerance:
            raise ValueError(f"a row by itself is {alone:.1e} nats off")
        beside, _ = _try_rows(module, PROMPTS)
        bound = max(TOLERANCE, TIMES_ALONE * alone) if keeps_state else tolerance
        if beside <= bound:
            return True
        equal, _ = _try_rows(module, EQUAL_PROMPTS)
        if not (keeps_state and equal <= tolerance):
            raise ValueError(f"a row beside others is {max(beside, equal):.1e} nats off")
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"rollout.name=hf cannot play model type '{kind}', whose cache must give the log-probs "
            f"of a pass without it: {error}; what is sampled would be of another distribution than "
            "what is trained, so take another engine, such as rollout.name=vllm"
        ) from error
    logger.warning(
        "model type '%s': padding on the left reaches the state of its layers (log-probs differ by "
        "%.1e), so rollout.name=hf samples prompts of one length together, and others one after "
        "another",
        kind,
        beside,
    )
    return False


def _lengths_behind_an_indexer(module: nn.Module) -> tuple[int, ...]:
    """Lists a length at which a sparse indexer leaves keys out; shorter rows do not show it."""
    most_keys = module.config.get_text_config().to_dict().get("index_topk")
    return (most_keys + max(PROMPTS),) if most_keys else ()


def _try_rows(module: nn.Module, prompts: Sequence[int]) -> tuple[float, bool]:
    """Runs rows with these many tokens before the first step; returns how far they are off.

    Returns: by how many nats at most (mean over the distribution) a step differs from that of a
        row's own pass; whether a layer keeps a state.
    """
    vocabulary = module.config.get_text_config().vocab_size
    rows = []
    for number, length in enumerate(prompts):
        # Neighbouring tokens differ, and so do the rows.
        rows.append([(11 + 7 * number + 13 * i) % vocabulary for i in range(length + STEPS)])
    device = next(module.parameters()).device
    expected = []
    for row in rows:
        ids = torch.tensor([row], device=device)
        expected.append(module(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1))
    starts = [row[:length] for row, length in zip(rows, prompts, strict=True)]
    cached = CachedRows(module, starts, filler=0)
    here = list(range(len(rows)))
    worst = 0.0
    for step in range(STEPS + 1):
        log_probs = cached.next_logits().log_softmax(-1)  # (B, vocab)
        for place, number in enumerate(here):
            own = expected[number][prompts[number] - 1 + step]
            worst = _larger(worst, float((own.exp() * (log_probs[place] - own).abs()).sum()))
        if step == 0 and len(rows) > len(STAYING):
            cached.keep(STAYING)
            here = list(STAYING)
        if step < STEPS:
            tokens = [rows[number][prompts[number] + step] for number in here]
            cached.append(torch.tensor(tokens, device=device))
    return worst, cached.keeps_state


def _larger(one: float, other: float) -> float:
    """Returns the larger number; one that is none is larger than all."""
    return other if not other <= one else one
