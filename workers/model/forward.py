"""The forward pass of a micro-batch: log-probs, entropies and values of the sampled tokens, and of no others.

It also says how a model can be run (`forward_settings`), and checks that it gives what the model itself would.
Invariant: the head runs on the states that predict sampled tokens only. Where their logits would be large they are
computed in chunks that are made again in the backward pass, so that whole logits never exist. How rows are laid out:
packing.py.
"""

import inspect
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig

from data.texts import say
from training.batch.torch_functional import EntropyMode, LogitForm, head_log_probs
from training.config import CriticModelConfig, ModelConfig
from workers.model.attention import NAME, Sequences, check_shared_sequences, use_own_attention, varies_with_length
from workers.model.builder import torch_dtype
from workers.model.packing import ForwardBatch, ForwardSettings
from workers.ranks.distributed import max_over_ranks, rank_group

logger = logging.getLogger(__name__)

# What an H100 computes while it moves a byte, in bfloat16 at 40 % of its peak; fewer on other devices.
FLOPS_PER_BYTE = 120
# Queries that a kernel takes at a time.
BLOCK = 128
# Logits that exist at a time, at two bytes each; under this nothing is recomputed.
LOGITS_CHUNK_BYTES = 1 << 28


class SampledTokens(NamedTuple):
    """Holds what is known of each sampled token of a micro-batch, each (N,); `entropy` where it was asked for.

    With the mode "squares" that is (2, N): the entropy, and the sum of the vocabulary's squared probabilities.
    It is a tuple, so that FSDP finds its tensors.
    """

    log_probs: Tensor
    entropy: Tensor | None


class PolicyModel(nn.Module):
    """Is a causal language model whose forward returns what PPO needs of sampled tokens, never a batch's logits."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: ForwardBatch, temperature: float = 1.0, entropy: EntropyMode = "none") -> SampledTokens:
        """Computes log-probs and, unless `entropy` is "none", entropies; with "grad" they carry a gradient."""
        hidden = self.lm.base_model(**batch.model_inputs()).last_hidden_state  # (T, L, hidden)
        states = hidden.flatten(0, 1)[batch.logit_positions]  # (N, hidden)
        head, form = self.lm.get_output_embeddings(), logit_form(self.lm, temperature)
        sampled = head_log_probs(states, head.weight, head.bias, batch.labels, form, entropy, LOGITS_CHUNK_BYTES // 2)
        return SampledTokens(*sampled)


def logit_form(lm: nn.Module, temperature: float = 1.0) -> LogitForm:
    """Says what this model does to its head's products, with its logits divided by a temperature."""
    settings = lm.config.get_text_config().to_dict()
    # Granite divides, Cohere multiplies.
    divisor = temperature * (settings.get("logits_scaling") or 1) / (settings.get("logit_scale") or 1)
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
        raise ValueError(f"model type '{kind}' takes no position_ids; only decoder-only models can be trained here")
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
    if not (attends_fully(lm) and use_own_attention(lm)):
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
    packed = Sequences.of([8] * copies).to(lm.device).model_inputs() if copies > 1 else {}
    return {"input_ids": ids, "position_ids": positions, "use_cache": False, **packed}


def _states(lm: nn.Module, copies: int) -> Tensor:
    """Computes the last hidden states (8, hidden) of a few tokens, or of the last of several copies."""
    return lm.base_model(**_few_tokens(lm, copies)).last_hidden_state[0, -8:]


def _differ(expected: Tensor, seen: Tensor) -> bool:
    difference = (expected.float() - seen.float()).abs().max().item()
    return not difference <= 1e-2 * max(1.0, expected.abs().max().item())


def attends_fully(lm: nn.Module) -> bool:
    """Says whether every layer of this model has plain sdpa over the full context, which attention.py can do."""
    config = lm.config.get_text_config()
    settings = config.to_dict()
    windowed = settings.get("sliding_window") and settings.get("use_sliding_window", True)
    layers = settings.get("layer_types") or ["sliding_attention" if windowed else "full_attention"]
    return config._attn_implementation in ("sdpa", NAME) and set(layers) == {"full_attention"}


def forward_settings(
    model: ModelConfig | CriticModelConfig, share_prompts: bool, module: nn.Module, device: torch.device, ranks: int = 1
) -> ForwardSettings:
    """Says how this model is run, and has it attend through attention.py where its rows are to be packed.

    They are packed where its attention allows it, and then share what they begin with, if `share_prompts` asks for it.

    Raises:
        ValueError: it does not allow a sequence-parallel group of `ranks` ranks.
    """
    packs = model.use_remove_padding and pack_rows(module)
    if share_prompts and not packs:
        logger.info("%s: its rows are padded, and a group's prompt is computed for each of them", model.path)
    if varies_with_length(module):
        logger.warning(say("longest_row_turns", path=model.path))
    if ranks > 1:
        check_shared_sequences(module, ranks)
    cost = key_cost(module.config.get_text_config()) if share_prompts and packs else None
    layout: dict[str, Any] = {"strip_padding": model.use_remove_padding, "pack_rows": packs, "key_cost": cost}
    return ForwardSettings(device=device, dtype=torch_dtype(model.dtype), sequence_group=rank_group(ranks), **layout)


def key_cost(config: PretrainedConfig) -> float:
    """Returns what a key costs that a segment reads in a copy, in tokens computed, in each layer, forward and backward.

    A token costs about 72 h^2 floating-point operations: 12 h^2 weights, six each. A copy of key and value, each w
    numbers, moves about 24 w bytes (read, written, and the same for a gradient that is added up in float32), each worth
    FLOPS_PER_BYTE operations. And one more segment leaves half a block of BLOCK queries empty, 12 h operations for each
    of its keys.
    """
    settings = config.to_dict()
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = (settings.get("num_key_value_heads") or heads) * (settings.get("head_dim") or hidden // heads)
    return (24 * width * FLOPS_PER_BYTE + BLOCK / 2 * 12 * hidden) / (72 * hidden**2)


class ValueModel(nn.Module):
    """Is a transformer with one output a token: the value (N,) of the state before each sampled token."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Computes the values, (N,) float32."""
        values = self.transformer(**batch.model_inputs()).logits  # (T, L, 1)
        return values.float().flatten()[batch.logit_positions]
