"""The forward pass of a micro-batch: log-probs, entropies and values of the sampled tokens, and of no others.

It also says how a model can be run (`forward_settings`), and checks that it gives what the model itself would.
Invariant: the head runs on the states that predict sampled tokens only. Where their logits would be large they are
computed in chunks that are made again in the backward pass, so that whole logits never exist. How rows are laid out:
packing.py.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from training.batch.torch_functional import log_probs_and_entropy
from training.config import CriticModelConfig, ModelConfig
from workers.model.attention import NAME, Sequences, check_shared_sequences, use_own_attention
from workers.model.builder import torch_dtype
from workers.model.packing import ForwardBatch, ForwardSettings
from workers.ranks.distributed import rank_group

logger = logging.getLogger(__name__)

EntropyMode = Literal["none", "value", "grad"]

# Logits of one chunk, at two bytes each; under this nothing is recomputed.
LOGITS_CHUNK_BYTES = 1 << 28


class SampledTokens(NamedTuple):
    """Holds what is known of each sampled token of a micro-batch, each (N,); `entropy` where it was asked for.

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
    """Computes logits (n, vocab) of hidden states (n, hidden), with what some models do to them behind the head."""
    logits = lm.get_output_embeddings()(states)
    settings = lm.config.get_text_config().to_dict()
    # Granite.
    if scaling := settings.get("logits_scaling"):
        logits = logits / scaling
    # Cohere.
    if scale := settings.get("logit_scale"):
        logits = logits * scale
    # Gemma 2.
    if cap := settings.get("final_logit_softcapping"):
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def check_forward(lm: nn.Module) -> None:
    """Compares the packed forward pass with the model's own on a few tokens, on the rank that holds its weights.

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
    # The tokens a second time, packed behind the first.
    if lm.config.get_text_config()._attn_implementation == NAME:
        inputs |= {"input_ids": ids.repeat(1, 2), "position_ids": positions.repeat(1, 2)}
        inputs |= {"sequences": Sequences.of([8, 8]).to(lm.device)}
    states = lm.base_model(**inputs).last_hidden_state[0, -8:]
    difference = (own - head_logits(lm, states).float()).abs().max().item()
    lm.train(training)
    if difference > 1e-2 * max(1.0, own.abs().max().item()):
        raise ValueError(
            f"model type '{kind}' changes its logits behind the head in a way that is not known here (difference "
            f"{difference:.3g}); add it to head_logits in workers/model/forward.py"
        )


def can_share_prompts(lm: nn.Module) -> bool:
    """Says whether the mask of a shared-prefix group is all that this model's attention needs.

    It is where every layer has sdpa over the full context.
    """
    config = lm.config.get_text_config()
    settings = config.to_dict()
    layers = set(settings.get("layer_types") or ["full_attention"])
    windowed = (
        settings.get("sliding_window") and settings.get("use_sliding_window", True) and not settings.get("layer_types")
    )
    return config._attn_implementation in ("sdpa", NAME) and layers == {"full_attention"} and not windowed


def forward_settings(
    model: ModelConfig | CriticModelConfig,
    share_prompts: bool,
    module: nn.Module,
    device: torch.device,
    sequence_ranks: int = 1,
) -> ForwardSettings:
    """Says how this model is run, and has it attend through attention.py where its rows are to be packed.

    Prompts are shared where `share_prompts` asks for it, and rows packed, if the model's attention allows it.

    Raises:
        ValueError: it does not allow a sequence-parallel group of `sequence_ranks` ranks.
    """
    plain = can_share_prompts(module)
    if share_prompts and not plain:
        logger.info(
            "%s has windowed or other than sdpa attention: a group's prompt is computed for each row", model.path
        )
    packs = model.use_remove_padding and plain and use_own_attention(module)
    if sequence_ranks > 1:
        check_shared_sequences(module, sequence_ranks)
    return ForwardSettings(
        device=device,
        dtype=torch_dtype(model.dtype),
        strip_padding=model.use_remove_padding,
        share_prompts=share_prompts and plain,
        pack_rows=packs,
        sequence_group=rank_group(sequence_ranks),
    )


def _token_stats(
    head: Callable[[Tensor], Tensor], states: Tensor, labels: Tensor, temperature: float, entropy: EntropyMode
) -> tuple[Tensor, Tensor | None]:
    """Computes log-prob and entropy (n,) of the tokens after `states` (n, hidden), in float32."""
    log_probs, entropies = log_probs_and_entropy(head(states), labels, temperature)
    if entropy == "none":
        return log_probs, None
    return log_probs, entropies if entropy == "grad" else entropies.detach()


class ValueModel(nn.Module):
    """Is a transformer with one output a token: the value (N,) of the state before each sampled token."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Computes the values, (N,) float32."""
        values = self.transformer(**batch.model_inputs()).logits  # (T, L, 1)
        return values.float().flatten()[batch.logit_positions]
