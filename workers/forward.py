"""The forward pass over packed rows: log-probs, entropies and values of the sampled tokens, and of no others.

Rows that share a prompt form a tree: the prompt once, then every response as a branch that sees the prompt and itself (plan in
training/batching.py). A row alone is a tree with one branch, so there is one path for all.

    rows       P0 P1 A0 A1 | P0 P1 B0        tree   P0 P1 A0 A1 B0
    segments                                         0  0  1  1  2        position_ids  0 1 2 3 2

A micro-batch of trees is a rectangle with a mask; one of rows alone is, where the model allows it, a line without padding (workers/attention.py).

A token's log-prob comes from the hidden state before it: the last prompt token's predicts A0 and B0. The head runs on those states only;
where their logits would be large they are computed in chunks that are made again in the backward pass, so whole logits never exist.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from data.protocol import DataProto
from training.batching import MicroBatch, Tree, plan_micro_batches, roundup_divisible
from training.config import MicroBatching
from training.torch_functional import log_probs_and_entropy
from workers.attention import NAME, Sequences
from workers.distributed import SumOfParts, max_over_ranks

EntropyMode = Literal["none", "value", "grad"]
"""Whether the entropy is computed, and whether gradients flow through it."""

LOGITS_CHUNK_BYTES = 1 << 28  # logits of one chunk, at two bytes each; under this nothing is recomputed
MAX_TREE_TOKENS = 4096  # a tree's mask is dense: its cost grows with the square


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """How a module is run: compute type, device and the use of shared prompts."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    strip_padding: bool = True
    share_prompts: bool = True
    pack_rows: bool = False  # rows alone lie in one line: for models that `use_own_attention`
    sequence_group: dist.ProcessGroup | None = None  # the ranks that share each sequence, with the same rows

    @property
    def sequence_ranks(self) -> int:
        return 1 if self.sequence_group is None else self.sequence_group.size()

    def autocast(self) -> AbstractContextManager[None]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


@dataclass(kw_only=True)
class TreeBatch:
    """One micro-batch on the device. T trees of at most L tokens, N sampled tokens; packed rows are T = 1 line of L tokens."""

    input_ids: Tensor  # (T, L)
    position_ids: Tensor  # (T, L)
    attention_mask: Tensor | None  # trees (T, 1, L, L) bool; padded rows (T, L); None: causal, padding on the right
    source: Tensor  # (N,) in T * L: the state that predicts each sampled token
    labels: Tensor  # (N,) the sampled token
    rows: Tensor  # (N,) the row of the batch it belongs to
    columns: Tensor  # (N,) its column among the responses
    sequences: Sequences | None = None  # of packed rows, or of ranks that share a sequence

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of a transformers model."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "position_ids": self.position_ids}
        return {**inputs, "use_cache": False, **({} if self.sequences is None else {"sequences": self.sequences})}

    def to(self, device: torch.device) -> TreeBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return TreeBatch(**{k: v if v is None else v.to(device, non_blocking=True) for k, v in values.items()})


class SampledTokens(NamedTuple):
    """Per sampled token of a micro-batch, each (N,); `entropy` where it was asked for. A tuple, so that FSDP finds its tensors."""

    log_probs: Tensor
    entropy: Tensor | None


def plan_batch(data: DataProto, settings: ForwardSettings, limits: MicroBatching) -> list[MicroBatch]:
    """Micro-batches over the rows of `data` (prompts, responses, attention_mask), as training/batching.py plans them."""
    width = data.batch["prompts"].shape[1]
    mask = data.batch["attention_mask"]
    prompt_lengths = mask[:, :width].sum(dim=1).tolist()
    response_lengths = mask[:, width:].sum(dim=1).tolist()
    prompts = data.batch["prompts"].numpy()
    keys = [(n, row.tobytes()) for n, row in zip(prompt_lengths, prompts, strict=True)]
    return plan_micro_batches(
        keys,
        prompt_lengths,
        response_lengths,
        max_token_len=limits.max_token_len,
        micro_batch_size=limits.micro_batch_size,
        share_prompts=settings.share_prompts and settings.strip_padding,
        max_tree_tokens=MAX_TREE_TOKENS,
        pack_rows=settings.pack_rows,
    )


def build_trees(data: DataProto, micro_batch: MicroBatch, settings: ForwardSettings) -> TreeBatch:
    """Lays the trees of one micro-batch out; `strip_padding` false keeps each row's padding and masks it.

    Of ranks that share sequences each gets its own part of the positions, with the sampled tokens that are predicted there.
    """
    prompts, responses = data.batch["prompts"], data.batch["responses"]
    width = prompts.shape[1]
    prompt_mask = data.batch["attention_mask"][:, :width].bool()
    response_valid = data.batch["attention_mask"][:, width:].bool()
    sampled = data.batch["response_mask"].bool() & response_valid
    if not settings.strip_padding:
        prompt_mask, response_valid = torch.ones_like(prompt_mask), torch.ones_like(response_valid)

    laid = [_lay_tree(tree, prompts, responses, prompt_mask, response_valid, sampled) for tree in micro_batch]
    packed = settings.pack_rows and all(len(tree) == 1 for tree in micro_batch)
    batch = (_line if packed else _rectangle)(laid, settings.sequence_ranks)
    if not settings.strip_padding:
        mask = torch.stack([data.batch["attention_mask"][tree[0]] for tree in micro_batch])  # (T, P + R)
        return replace(batch, attention_mask=mask, position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0))
    return batch if settings.sequence_group is None else _own_part(batch, settings.sequence_group)


def _line(laid: list[_LaidTree], multiple_of: int) -> TreeBatch:
    """Rows alone, one after another: input_ids (1, total); what makes the total a multiple is a sequence of its own."""
    lengths = [len(t.ids) for t in laid]
    missing = -sum(lengths) % multiple_of
    return TreeBatch(
        input_ids=torch.cat([*(t.ids for t in laid), torch.zeros(missing, dtype=torch.long)])[None],
        position_ids=torch.cat([*(t.positions for t in laid), torch.arange(missing)])[None],
        attention_mask=None,
        **_sampled_tokens(laid, accumulate(lengths, initial=0)),
        sequences=Sequences.of([*lengths, missing] if missing else lengths),
    )


def _rectangle(laid: list[_LaidTree], multiple_of: int) -> TreeBatch:
    """Trees one below the other, padded on the right; the mask of branches, or none where no tree has two."""
    length = roundup_divisible(max(len(t.ids) for t in laid), multiple_of)
    ids = torch.zeros(len(laid), length, dtype=torch.long)
    segments = torch.full((len(laid), length), -1, dtype=torch.long)
    # Padding continues the positions: numbers that start again would be read as packed sequences.
    positions = torch.arange(length).repeat(len(laid), 1)
    for i, tree in enumerate(laid):
        ids[i, : len(tree.ids)], segments[i, : len(tree.ids)], positions[i, : len(tree.ids)] = (
            tree.ids,
            tree.segments,
            tree.positions,
        )
    return TreeBatch(
        input_ids=ids,
        position_ids=positions,
        attention_mask=_tree_mask(segments) if segments.max() > 1 else None,
        **_sampled_tokens(laid, range(0, len(laid) * length, length)),
    )


def _sampled_tokens(laid: list[_LaidTree], starts: Iterable[int]) -> dict[str, Tensor]:
    """`TreeBatch`'s fields of the sampled tokens; `starts` says where each tree begins."""
    return {
        "source": torch.cat([start + t.source for start, t in zip(starts, laid, strict=False)]),
        "labels": torch.cat([t.labels for t in laid]),
        "rows": torch.cat([t.rows for t in laid]),
        "columns": torch.cat([t.columns for t in laid]),
    }


def _own_part(whole: TreeBatch, group: dist.ProcessGroup) -> TreeBatch:
    """This rank's part of every line; the mask, or the sequences, stay whole, as the attention sees all positions."""
    width = whole.input_ids.shape[1] // group.size()
    own = slice(group.rank() * width, (group.rank() + 1) * width)
    line, place = whole.source // whole.input_ids.shape[1], whole.source % whole.input_ids.shape[1]
    mine = (place >= own.start) & (place < own.stop)
    return TreeBatch(
        input_ids=whole.input_ids[:, own],
        position_ids=whole.position_ids[:, own],
        attention_mask=whole.attention_mask,
        source=(line * width + place - own.start)[mine],
        labels=whole.labels[mine],
        rows=whole.rows[mine],
        columns=whole.columns[mine],
        sequences=replace(whole.sequences or Sequences(), group=group),
    )


@dataclass
class _LaidTree:
    ids: Tensor
    segments: Tensor
    positions: Tensor
    source: Tensor
    labels: Tensor
    rows: Tensor
    columns: Tensor


def _lay_tree(
    tree: Tree, prompts: Tensor, responses: Tensor, prompt_mask: Tensor, response_valid: Tensor, sampled: Tensor
) -> _LaidTree:
    prompt = prompts[tree[0]][prompt_mask[tree[0]]]
    start = n_prompt = len(prompt)
    pieces, segments, positions = [prompt], [torch.zeros(n_prompt, dtype=torch.long)], [torch.arange(n_prompt)]
    source, labels, rows, columns = [], [], [], []
    for branch, row in enumerate(tree, start=1):
        valid = response_valid[row].nonzero().squeeze(1)
        pieces.append(responses[row, valid])
        segments.append(torch.full((len(valid),), branch))
        positions.append(torch.arange(n_prompt, n_prompt + len(valid)))
        offsets = sampled[row, valid].nonzero().squeeze(1)  # within this branch
        source.append(torch.where(offsets == 0, n_prompt - 1, start + offsets - 1))
        labels.append(responses[row, valid[offsets]])
        rows.append(torch.full((len(offsets),), row))
        columns.append(valid[offsets])
        start += len(valid)
    cat = torch.cat
    return _LaidTree(cat(pieces), cat(segments), cat(positions), cat(source), cat(labels), cat(rows), cat(columns))


def _tree_mask(segments: Tensor) -> Tensor:
    """(T, 1, L, L): causal, and within the prompt (segment 0) or one's own branch; padding (-1) sees itself, so no row is empty."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    key = segments[:, None, :]
    return (causal & ((key == 0) | (key == segments[:, :, None])))[:, None]


class PolicyModel(nn.Module):
    """A causal language model whose forward returns what PPO needs of the sampled tokens, never the logits of a batch."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: TreeBatch, temperature: float = 1.0, entropy: EntropyMode = "none") -> SampledTokens:
        hidden = self.lm.base_model(**batch.model_inputs()).last_hidden_state  # (T, L, hidden)
        states = hidden.flatten(0, 1)[batch.source]  # (N, hidden)
        chunk = max(1, LOGITS_CHUNK_BYTES // (2 * self.lm.config.get_text_config().vocab_size))
        head = partial(head_logits, self.lm)
        if len(states) <= chunk:
            return SampledTokens(*_token_stats(head, states, batch.labels, temperature, entropy))
        parts = [
            checkpoint(_token_stats, head, s, y, temperature, entropy, use_reentrant=False)
            for s, y in zip(states.split(chunk), batch.labels.split(chunk), strict=True)
        ]
        entropies = None if entropy == "none" else torch.cat([part[1] for part in parts])
        return SampledTokens(torch.cat([part[0] for part in parts]), entropies)


def head_logits(lm: nn.Module, states: Tensor) -> Tensor:
    """Logits (n, vocab) of hidden states (n, hidden), with what some models do to them behind the head."""
    logits = lm.get_output_embeddings()(states)
    settings = lm.config.get_text_config().to_dict()
    if scaling := settings.get("logits_scaling"):  # Granite
        logits = logits / scaling
    if scale := settings.get("logit_scale"):  # Cohere
        logits = logits * scale
    if cap := settings.get("final_logit_softcapping"):  # Gemma 2
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def check_forward(lm: nn.Module) -> None:
    """Compares the packed forward pass with the model's own on a few tokens, before anything is trained; on the rank that holds its weights.

    Raises:
        ValueError: the model's logits are not its head's of its last hidden states, or it takes no positions.
    """
    if next(lm.parameters()).is_meta:
        return
    ids = torch.arange(8, device=lm.device)[None] % lm.config.get_text_config().vocab_size
    kind = lm.config.model_type
    if "position_ids" not in inspect.signature(lm.base_model.forward).parameters:
        raise ValueError(
            f"model type '{kind}' takes no position_ids; only decoder-only transformers can be trained here"
        )
    training = lm.training
    lm.eval()
    positions = torch.arange(8, device=lm.device)[None]
    own = lm(input_ids=ids, use_cache=False).logits[0].float()
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    if lm.config.get_text_config()._attn_implementation == NAME:  # the tokens a second time, packed behind the first
        inputs |= {"input_ids": ids.repeat(1, 2), "position_ids": positions.repeat(1, 2)}
        inputs |= {"sequences": Sequences.of([8, 8]).to(lm.device)}
    states = lm.base_model(**inputs).last_hidden_state[0, -8:]
    difference = (own - head_logits(lm, states).float()).abs().max().item()
    lm.train(training)
    if difference > 1e-2 * max(1.0, own.abs().max().item()):
        raise ValueError(
            f"model type '{kind}' changes its logits behind the head in a way that is not known here (difference {difference:.3g}); "
            "add it to head_logits in workers/forward.py"
        )


def can_share_prompts(lm: nn.Module) -> bool:
    """Whether a tree's attention mask is all the attention this model has: sdpa over the full context in every layer."""
    config = lm.config.get_text_config()
    settings = config.to_dict()
    layers = set(settings.get("layer_types") or ["full_attention"])
    windowed = (
        settings.get("sliding_window") and settings.get("use_sliding_window", True) and not settings.get("layer_types")
    )
    return config._attn_implementation in ("sdpa", NAME) and layers == {"full_attention"} and not windowed


def _token_stats(
    head: Callable[[Tensor], Tensor], states: Tensor, labels: Tensor, temperature: float, entropy: EntropyMode
) -> tuple[Tensor, Tensor | None]:
    """Log-prob and entropy (n,) of the tokens after `states` (n, hidden), in float32."""
    log_probs, entropies = log_probs_and_entropy(head(states), labels, temperature)
    if entropy == "none":
        return log_probs, None
    return log_probs, entropies if entropy == "grad" else entropies.detach()


class ValueModel(nn.Module):
    """A transformer with one output a token; forward returns the value (N,) of the state before each sampled token."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, batch: TreeBatch) -> Tensor:
        values = self.transformer(**batch.model_inputs()).logits  # (T, L, 1)
        return values.float().flatten()[batch.source]


def iter_micro_batches(
    data: DataProto, settings: ForwardSettings, limits: MicroBatching
) -> Iterator[tuple[Tensor, DataProto, TreeBatch]]:
    """Yields (rows, data[rows], their trees on the device); every row of `data` comes exactly once.

    With several ranks all get the same number of micro-batches, since each runs collectives: one that has fewer repeats its last one's
    first row with nothing sampled in it.
    """
    plan = plan_batch(data, settings, limits)
    missing = int(max_over_ranks(torch.tensor(len(plan)))) - len(plan)
    for micro_batch in plan:
        rows = torch.tensor([row for tree in micro_batch for row in tree])
        micro = data.select_idxs(rows)
        numbers = iter(range(len(rows)))
        local = [[next(numbers) for _ in tree] for tree in micro_batch]
        yield rows, micro, build_trees(micro, local, settings).to(settings.device)
    for _ in range(missing):
        micro = data.select_idxs(torch.tensor([plan[-1][0][0]]))
        micro.batch["response_mask"] = torch.zeros_like(micro.batch["response_mask"])
        trees = build_trees(micro, [[0]], settings).to(settings.device)
        yield torch.empty(0, dtype=torch.long), micro, trees


def on_grid(values: Tensor, trees: TreeBatch, shape: Sequence[int]) -> Tensor:
    """Puts per-token values (N,) at their places in a (rows, response_len) grid of zeros; differentiable.

    Ranks that share sequences all get the whole grid, and must all compute the same loss from it.
    """
    grid = values.new_zeros(tuple(shape)).index_put((trees.rows, trees.columns), values)
    group = None if trees.sequences is None else trees.sequences.group
    return grid if group is None else SumOfParts.apply(grid, group)
