"""The forward pass of a micro-batch: log-probs, entropies and values of the sampled tokens, and of no others.

It also says how a model can be run (`forward_settings`), and checks that it gives what the model itself would.
Invariant: the head runs on the states that predict sampled tokens only. Where their logits would be large they are
computed in chunks that are made again in the backward pass, so that whole logits never exist.

Rows are packed, where what several begin with alike is computed once, or padded on the right. Packed rows lie in
segments one behind the other, without padding or mask (which, and how they attend: attention.py):

    rows    P0 P1 A0 A1 | P0 P1 B0        packed    P0 P1 | A0 A1 | B0        position_ids  0 1 2 3 2

A token's log-prob comes from the hidden state before it, at its logit position: P1's state predicts both A0 and B0.
"""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PretrainedConfig

from data.protocol import DataProto
from data.texts import say
from data.watch import beat
from training.batch.batching import plan_padded
from training.batch.torch_functional import EntropyMode, LogitForm, head_log_probs
from training.config import CriticModelConfig, MicroBatching, ModelConfig
from workers.model import attention
from workers.model.attention import (
    MicroBatch,
    Sequences,
    cut_segments,
    order_rows,
    plan_packed,
    to_device,
)
from workers.model.builder import torch_dtype
from workers.ranks.distributed import max_over_ranks, rank_group, sum_of_parts

# What a forward pass reads of a batch.
FORWARD_FIELDS = ("prompts", "responses", "response_mask", "attention_mask")


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """Says how a module is run: compute type, device, and how rows are laid out."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    strip_padding: bool = True
    # Rows lie one behind the other: for models that `use_own_attention`.
    pack_rows: bool = False
    # What packed rows share costs so much (`order_rows`); None: they share nothing.
    key_cost: float | None = None
    # The sequence-parallel group of this rank: ranks that share each sequence, with the same rows.
    sequence_group: dist.ProcessGroup | None = None

    @property
    def sequence_ranks(self) -> int:
        """Returns the size of the sequence-parallel group."""
        return 1 if self.sequence_group is None else self.sequence_group.size()

    def autocast(self) -> AbstractContextManager[None]:
        """Computes in `dtype` within the block."""
        return (
            nullcontext()
            if self.dtype == torch.float32
            else torch.autocast(self.device.type, dtype=self.dtype)
        )


@dataclass(kw_only=True)
class ForwardBatch:
    """Holds one micro-batch on the device: T rows of at most L tokens, or one of packed rows; N tokens were sampled.

    Attributes:
        input_ids, position_ids: (T, L).
        attention_mask: (T, L), of rows with padding on both sides; None: causal, with padding on the right.
        logit_positions: (N,) in T * L, the state that predicts each sampled token.
        labels: (N,) the sampled token.
        rows, columns: (N,) the row of the batch it belongs to, and its column among the responses.
        sequences: of packed rows, or of a sequence-parallel group.
        temperature: of the distribution that the tokens were sampled from.
    """

    input_ids: Tensor
    position_ids: Tensor
    logit_positions: Tensor
    labels: Tensor
    rows: Tensor
    columns: Tensor
    attention_mask: Tensor | None = None
    sequences: Sequences | None = None
    temperature: float = 1.0

    def model_inputs(self) -> dict[str, Any]:
        """Returns the keyword arguments of a transformers model."""
        inputs = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "use_cache": False,
        }
        if self.sequences is None:
            return inputs | {"attention_mask": self.attention_mask}
        return inputs | self.sequences.model_inputs()


class RowTokens(NamedTuple):
    """Holds one row's tokens, (n,) int64, the places of those that were sampled, and their columns in `responses`."""

    ids: Tensor
    sampled: Tensor
    columns: Tensor


def row_tokens(data: DataProto, strip_padding: bool) -> list[RowTokens]:
    """Takes the rows of `data` apart; without `strip_padding` a row's padding is a part of it."""
    width = data.batch["prompts"].shape[1]
    ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1).long()  # (B, P + R)
    real = data.batch["attention_mask"].bool()
    sampled = torch.zeros_like(real)
    sampled[:, width:] = data.batch["response_mask"].bool() & real[:, width:]
    if "observation_mask" in data.batch:
        sampled[:, width:] |= data.batch["observation_mask"].bool()
    real = real | (not strip_padding)
    if not (prompted := real[:, :width].any(dim=1)).all():
        raise ValueError(say("no_prompt", rows=(~prompted).nonzero().flatten().tolist()[:8]))
    return [
        RowTokens(row[kept], own[kept].nonzero().squeeze(1), own.nonzero().squeeze(1) - width)
        for row, kept, own in zip(ids, real, sampled, strict=True)
    ]


def plan_batch(
    rows: Sequence[RowTokens], settings: ForwardSettings, limits: MicroBatching
) -> list[MicroBatch]:
    """Plans micro-batches over the rows."""
    lengths = [len(row.ids) for row in rows]
    if settings.pack_rows:
        return plan_packed(
            order_rows([row.ids.numpy() for row in rows], settings.key_cost), lengths, limits
        )
    return [[(row, 0) for row in micro_batch] for micro_batch in plan_padded(lengths, limits)]


def build_forward_batch(
    rows: Sequence[RowTokens],
    shared: Sequence[int],
    settings: ForwardSettings,
    attention_mask: Tensor,
) -> ForwardBatch:
    """Lays the rows of one micro-batch out, each of which begins with `shared` tokens of the row before it.

    Where padding is not stripped, `attention_mask` (rows, P + R) masks it. In a sequence-parallel group each rank gets
    its part of the positions, with the sampled tokens predicted there.
    """
    if settings.pack_rows:
        batch = _packed(rows, shared, settings.sequence_ranks)
        return (
            batch
            if settings.sequence_group is None
            else _sequence_shard(batch, settings.sequence_group)
        )
    batch, mask = _padded(rows), attention_mask.long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return (
        batch
        if settings.strip_padding
        else replace(batch, attention_mask=mask, position_ids=positions)
    )


def _packed(rows: Sequence[RowTokens], shared: Sequence[int], multiple_of: int) -> ForwardBatch:
    """Puts the rows' segments one behind the other: input_ids (1, total).

    What makes the total a multiple is a segment of its own.
    """
    segments = cut_segments(list(enumerate(shared)), [len(row.ids) for row in rows])
    ids = [rows[row].ids[start : start + n] for row, start, n in segments.parts]
    positions = [torch.arange(start, start + n) for _, start, n in segments.parts]
    lengths, keys = (
        [n for _, _, n in segments.parts],
        [torch.from_numpy(places) for places in segments.keys],
    )
    total = sum(lengths)
    if missing := -total % multiple_of:
        ids, positions = (
            [*ids, torch.zeros(missing, dtype=torch.long)],
            [*positions, torch.arange(missing)],
        )
        lengths, keys = [*lengths, missing], [*keys, torch.arange(total, total + missing)]
    sampled = _sampled_tokens(rows, [torch.from_numpy(places) for places in segments.places])
    tokens = {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat(positions)[None],
        **sampled,
    }
    return ForwardBatch(**tokens, sequences=Sequences.of(lengths, keys if any(shared) else None))


def _padded(rows: Sequence[RowTokens]) -> ForwardBatch:
    """Puts rows one below the other, padded on the right."""
    ids = pad_sequence([row.ids for row in rows], batch_first=True)
    places = torch.arange(ids.numel()).view_as(ids)
    # Padding continues the positions: numbers that start again would be read as packed sequences.
    positions = places[:1].repeat(len(rows), 1)
    return ForwardBatch(
        input_ids=ids, position_ids=positions, **_sampled_tokens(rows, list(places))
    )


def _sampled_tokens(rows: Sequence[RowTokens], places: Sequence[Tensor]) -> dict[str, Tensor]:
    """Makes `ForwardBatch`'s fields of the sampled tokens; `places` says where each row's tokens lie."""
    return {
        "logit_positions": torch.cat(
            [place[row.sampled - 1] for row, place in zip(rows, places, strict=True)]
        ),
        "labels": torch.cat([row.ids[row.sampled] for row in rows]),
        "rows": torch.cat([torch.full((len(row.sampled),), i) for i, row in enumerate(rows)]),
        "columns": torch.cat([row.columns for row in rows]),
    }


def _sequence_shard(whole: ForwardBatch, group: dist.ProcessGroup) -> ForwardBatch:
    """Takes this rank's part of packed rows; the sequences stay whole, as the attention sees all positions."""
    assert whole.sequences is not None
    width = whole.input_ids.shape[1] // group.size()
    start = group.rank() * width
    own = slice(start, start + width)
    mine = (whole.logit_positions >= start) & (whole.logit_positions < own.stop)
    parts = {name: getattr(whole, name)[:, own] for name in ("input_ids", "position_ids")}
    parts |= {name: getattr(whole, name)[mine] for name in ("labels", "rows", "columns")}
    parts["logit_positions"] = whole.logit_positions[mine] - start
    return replace(whole, **parts, sequences=replace(whole.sequences, group=group))


def iter_micro_batches(
    data: DataProto, settings: ForwardSettings, limits: MicroBatching
) -> Iterator[tuple[Tensor, DataProto, ForwardBatch]]:
    """Yields (rows, data[rows], their layout on the device); every row of `data` comes exactly once.

    Log-probs are taken at meta_info `temperature`, or 1. With several ranks all get the same number of micro-batches,
    since each runs collectives: one that has fewer repeats its last one's first row with nothing sampled in it.
    """
    tokens = row_tokens(data, settings.strip_padding)
    plan = plan_batch(tokens, settings, limits)
    missing = int(max_over_ranks(torch.tensor(len(plan)))) - len(plan)
    for number, micro_batch in enumerate([*plan, *[plan[-1][:1]] * missing]):
        rows = torch.tensor([row for row, _ in micro_batch])
        micro, own = data.select_idxs(rows), [tokens[row] for row, _ in micro_batch]
        if number >= len(plan):
            rows, own = (
                rows[:0],
                [own[0]._replace(sampled=own[0].sampled[:0], columns=own[0].columns[:0])],
            )
            micro.batch["response_mask"] = torch.zeros_like(micro.batch["response_mask"])
        shared = [shared for _, shared in micro_batch]
        laid_out = build_forward_batch(own, shared, settings, micro.batch["attention_mask"])
        inputs = to_device(laid_out, settings.device)
        inputs.temperature = data.meta_info.get("temperature", 1.0)
        yield rows, micro, inputs
        beat("a micro-batch was read or learnt from")


def loss_fields(micro: DataProto, device: torch.device) -> dict[str, Tensor]:
    """Copies to the device what a loss reads of a micro-batch: all but what its layout was made of."""
    layout = {*FORWARD_FIELDS} - {"response_mask"}
    return {
        name: to_device(tensor, device)
        for name, tensor in micro.batch.items()
        if name not in layout
    }


def scatter_tokens(values: Tensor, inputs: ForwardBatch, shape: Sequence[int]) -> Tensor:
    """Scatters per-token values (N,) to their places among zeros (rows, response_len); differentiable.

    The ranks of a sequence-parallel group all get the whole, and must all compute the same loss from it.
    """
    scattered = values.new_zeros(tuple(shape)).index_put((inputs.rows, inputs.columns), values)
    group = None if inputs.sequences is None else inputs.sequences.group
    return scattered if group is None else sum_of_parts(scattered, group)


def read_rows(read: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Puts micro-batches' (rows, values (rows, R)) in the order of the rows, on the CPU: only here the host waits."""
    rows, values = (
        torch.cat([rows for rows, _ in read]),
        torch.cat([values[: len(rows)] for rows, values in read]),
    )
    ordered = values.new_empty(values.shape, device="cpu")
    ordered[rows] = values.cpu()
    return ordered


logger = logging.getLogger(__name__)

# What an H100 computes while it moves a byte, in bfloat16 at 40 % of its peak; fewer on other devices.
FLOPS_PER_BYTE = 120
# Queries that a kernel takes at a time.
BLOCK = 128
# Logits that exist at a time, at two bytes each; under this nothing is recomputed.
LOGITS_CHUNK_BYTES = 1 << 28


class PolicyValueModel(nn.Module):
    """Is a causal language model, `lm`, with a value head: one output a state, zero at first.

    It trains as it is in place of a language model (`critic.share_backbone`); `lm.generate` samples from it.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        self.value_head = nn.Linear(
            lm.config.get_text_config().hidden_size, 1, bias=False, device=lm.device
        )
        nn.init.zeros_(self.value_head.weight)

    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> Self:
        """Loads a language model by folder or hub name, in float32; `options` are those of transformers."""
        return cls(AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32} | options))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes logits (B, L, vocabulary) and the values of the states (B, L), both float32, from ids (B, L).

        Positions count the tokens of `attention_mask` (B, L), wherever the padding is, unless they are given.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        places = (mask.cumsum(dim=1) - 1).clamp(min=0) if position_ids is None else position_ids
        inputs = {
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": places,
            "use_cache": False,
        }
        output = self.lm(**inputs, output_hidden_states=True)
        return output.logits.float(), self.value_head(output.hidden_states[-1]).float().squeeze(-1)


class PolicyModel(nn.Module):
    """Is a policy whose forward returns what PPO needs of sampled tokens, never a batch's logits.

    It is made of a causal language model, or of a `PolicyValueModel`, whose values come from the same pass.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm.lm if isinstance(lm, PolicyValueModel) else lm
        self.value_head: nn.Module | None = (
            lm.value_head if isinstance(lm, PolicyValueModel) else None
        )

    def forward(self, batch: ForwardBatch, entropy: EntropyMode = "none") -> list[Tensor]:
        """Computes log-probs and, unless `entropy` is "none", entropies, (N,) each; with "grad" these have a gradient.

        With "squares" sums of the vocabulary's squared probabilities come third; the values, if there are any, last.
        """
        hidden = self.lm.base_model(**batch.model_inputs()).last_hidden_state  # (T, L, hidden)
        states = hidden.flatten(0, 1)[batch.logit_positions]  # (N, hidden)
        head, form = self.lm.get_output_embeddings(), logit_form(self.lm, batch.temperature)
        own = head.weight, head.bias, batch.labels, form, entropy, LOGITS_CHUNK_BYTES // 2
        log_probs, entropies = head_log_probs(states, *own)
        values = [] if self.value_head is None else [self.value_head(states).float().squeeze(-1)]
        return [log_probs, *([] if entropies is None else torch.atleast_2d(entropies)), *values]


def logit_form(lm: nn.Module, temperature: float = 1.0) -> LogitForm:
    """Says what this model does to its head's products, with its logits divided by a temperature."""
    settings = lm.config.get_text_config().to_dict()
    # Granite divides, Cohere multiplies.
    divisor = (
        temperature * (settings.get("logits_scaling") or 1) / (settings.get("logit_scale") or 1)
    )
    # Gemma 2.
    cap = settings.get("final_logit_softcapping")
    return LogitForm(divisor, cap / temperature if cap else None)


@torch.no_grad()
def check_forward(lm: nn.Module) -> None:
    """Compares the forward pass with the model's own on a few tokens, on the rank that holds its weights.

    Raises:
        ValueError: the model's logits are not its head's of its last hidden states, or it takes no positions.
    """
    if next(lm.parameters()).is_meta:
        return
    kind = lm.config.model_type
    if "position_ids" not in inspect.signature(lm.base_model.forward).parameters:
        raise ValueError(
            f"model type '{kind}' takes no position_ids; only decoder-only models can be trained here"
        )
    training = lm.training
    lm.eval()
    # Its own choice of positions, too, is compared.
    own = lm(input_ids=_few_tokens(lm)["input_ids"], use_cache=False).logits[0]
    head = lm.get_output_embeddings()
    logits = logit_form(lm).logits(linear(_states(lm, copies=1), head.weight, head.bias))
    if _differ(own, logits):
        raise ValueError(say("other_logits", kind=kind))
    lm.train(training)


@torch.no_grad()
def pack_rows(lm: nn.Module) -> bool:
    """Has a model attend through attention.py, if a row behind another then has the states that it has alone.

    It may not hand its sequences on, or mix positions outside its attention. The rank that holds the weights tries it.
    """
    if not (attends_fully(lm) and attention.use_own_attention(lm)):
        return False
    training, differ = lm.training, False
    lm.eval()
    if not next(lm.parameters()).is_meta:
        try:
            differ = _differ(_states(lm, copies=1), _states(lm, copies=2))
        except (TypeError, ValueError) as error:
            differ = True
            logger.info("model type '%s': %s", lm.config.model_type, error)
    lm.train(training)
    if differ := bool(max_over_ranks(torch.tensor([float(differ)]))):
        lm.set_attn_implementation("sdpa")
    return not differ


def _few_tokens(lm: nn.Module, copies: int = 1) -> dict[str, Any]:
    """Makes a model's inputs: one row of eight tokens, or several copies of it, packed."""
    positions = torch.arange(8, device=lm.device).repeat(1, copies)
    ids = positions % lm.config.get_text_config().vocab_size
    packed = to_device(Sequences.of([8] * copies), lm.device).model_inputs() if copies > 1 else {}
    return {"input_ids": ids, "position_ids": positions, "use_cache": False, **packed}


def _states(lm: nn.Module, copies: int) -> Tensor:
    """Computes the last hidden states (8, hidden) of a few tokens, or of the last of several copies."""
    return lm.base_model(**_few_tokens(lm, copies)).last_hidden_state[0, -8:]


def _differ(expected: Tensor, seen: Tensor) -> bool:
    # Of what is wrong nearly all differs; many layers in bfloat16 round to 3 percent.
    bound = max(1e-2, 12 * torch.finfo(seen.dtype).eps) * expected.abs().max().clamp(min=1)
    # Where memory is planned there are no numbers.
    return not isinstance(seen, FakeTensor) and not bool(
        (expected.float() - seen.float()).abs().max() <= bound
    )


def attends_fully(lm: nn.Module) -> bool:
    """Says whether every layer of this model has plain sdpa over the full context, which attention.py can do."""
    config = lm.config.get_text_config()
    settings = config.to_dict()
    windowed = settings.get("sliding_window") and settings.get("use_sliding_window", True)
    layers = settings.get("layer_types") or ["sliding_attention" if windowed else "full_attention"]
    return config._attn_implementation in ("sdpa", attention.NAME) and set(layers) == {
        "full_attention"
    }


def forward_settings(
    model: ModelConfig | CriticModelConfig,
    share_prompts: bool,
    module: nn.Module,
    device: torch.device,
    ranks: int = 1,
) -> ForwardSettings:
    """Says how this model is run, and has it attend through attention.py where its rows are to be packed.

    They are packed where its attention allows it, and then share what they begin with, if `share_prompts` asks for it.

    Raises:
        ValueError: it does not allow a sequence-parallel group of `ranks` ranks.
    """
    packs = model.use_remove_padding and pack_rows(module)
    if share_prompts and not packs:
        logger.info(
            "%s: its rows are padded, and a group's prompt is computed for each of them", model.path
        )
    if attention.varies_with_length(module):
        logger.warning(say("longest_row_turns", path=model.path))
    if ranks > 1:
        attention.check_shared_sequences(module, ranks)
    cost = key_cost(module.config.get_text_config()) if share_prompts and packs else None
    layout: dict[str, Any] = {
        "strip_padding": model.use_remove_padding,
        "pack_rows": packs,
        "key_cost": cost,
    }
    return ForwardSettings(
        device=device, dtype=torch_dtype(model.dtype), sequence_group=rank_group(ranks), **layout
    )


def key_cost(config: PretrainedConfig) -> float:
    """Returns what a key costs that a segment reads in a copy, in tokens computed, in each layer, forward and backward.

    A token costs about 72 h^2 floating-point operations: 12 h^2 weights, six each. A copy of key and value, each w
    numbers, moves about 24 w bytes (read, written, and the same for a gradient that is added up in float32), each worth
    FLOPS_PER_BYTE operations. And one more segment leaves half a block of BLOCK queries empty, 12 h operations for each
    of its keys.
    """
    settings = config.to_dict()
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = (settings.get("num_key_value_heads") or heads) * (
        settings.get("head_dim") or hidden // heads
    )
    return (24 * width * FLOPS_PER_BYTE + BLOCK / 2 * 12 * hidden) / (72 * hidden**2)


class ValueModel(nn.Module):
    """Is a transformer with one output a token: the value of the state before each sampled token."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, batch: ForwardBatch) -> list[Tensor]:
        """Computes the values alone, (N,) float32."""
        values = self.transformer(**batch.model_inputs()).logits  # (T, L, 1)
        return [values.float().flatten()[batch.logit_positions]]
