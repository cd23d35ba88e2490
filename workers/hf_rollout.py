"""The rollout engine of plain transformers: needs no other package, runs its pending requests as one batch.

It keeps a copy of the policy in `rollout.dtype` for itself, as every engine does. Rows are sampled with the Gumbel-max
trick, from a generator of their own. Invariant: the same seed and logits give the same token, in whatever batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, TopKLogitsWarper, TopPLogitsWarper

from training.config import RolloutConfig
from workers.model.builder import ModelSpec, torch_dtype
from workers.rollout.base import BaseRollout
from workers.rollout.engine import Completion, FinishReason, NamedTensors, Sampling
from workers.rollout.weight_sync import as_announced, check_manifest, weight_manifest


@dataclass
class _Row:
    """Holds a request while it is generated."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Is the stop reason; None while the row runs."""
        if self.token_ids and self.token_ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.sampling.max_tokens else None

    def completion(self) -> Completion:
        """Returns what was sampled."""
        sampled: dict[str, Any] = {"token_ids": self.token_ids, "log_probs": self.log_probs}
        return Completion(
            request_id=self.request_id, finish_reason=self.finish_reason or "abort", **sampled
        )


class HFRollout(BaseRollout):
    """Generates with transformers; `step` completes everything that is pending."""

    completes_batches = updates_in_flight = True

    def __init__(
        self, config: RolloutConfig, model_config: ModelSpec, device_mesh: object = None
    ) -> None:
        super().__init__(
            config, eos_token_ids=model_config.eos_token_ids, pad_token_id=model_config.pad_token_id
        )
        self.device = model_config.device
        self.module = model_config.empty_causal_lm(torch_dtype(config.dtype)).to(self.device).eval()
        self.pending: dict[str, _Row] = {}

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queues one request."""
        generator = torch.Generator(device=self.device).manual_seed(sampling.seed)
        self.pending[request_id] = _Row(request_id, prompt_ids, sampling, generator)

    def step(self) -> list[Completion]:
        """Completes the pending requests, in batches that share temperature, top-k and top-p.

        A batch has at most `max_num_seqs` requests.
        """
        done: list[Completion] = []
        while self.pending:
            kind = _sampling_kind(next(iter(self.pending.values())).sampling)
            rows = [row for row in self.pending.values() if _sampling_kind(row.sampling) == kind]
            rows = rows[: self.config.max_num_seqs]
            self._generate(rows, kind)
            done += [self.pending.pop(row.request_id).completion() for row in rows]
        return done

    def update_weights(self, weights: NamedTensors, manifest: dict[str, torch.Size]) -> None:
        """Copies the weights over the engine's own."""
        check_manifest(manifest, weight_manifest(self.module))
        targets = self.module.state_dict()
        for name, tensor in as_announced(weights, manifest):
            targets[name].copy_(tensor)

    @torch.no_grad()
    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Scores sequences of one length in a single pass."""
        ids = torch.tensor(sequences, device=self.device)
        log_probs = self.module(ids, use_cache=False).logits[:, :-1].float().log_softmax(dim=-1)
        return log_probs.gather(2, ids[:, 1:, None]).squeeze(2).tolist()

    @torch.no_grad()
    def _generate(self, rows: list[_Row], kind: Sampling) -> None:
        """Prefills, then samples one token a step for the rows that still run.

        Finished rows leave the batch once they are half of it.
        """
        batch, cache = rows, DynamicCache()
        ids = _left_pad([row.prompt_ids for row in rows], self.pad_token_id).to(
            self.device
        )  # (B, L)
        mask = _left_pad([[1] * len(row.prompt_ids) for row in rows], 0).to(self.device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        while alive := [row for row in batch if not row.finish_reason]:
            if 2 * len(alive) <= len(batch):
                keep = torch.tensor(
                    [i for i, row in enumerate(batch) if not row.finish_reason], device=self.device
                )
                cache.batch_select_indices(keep)
                ids, mask, positions, batch = ids[keep], mask[keep], positions[keep], alive
            inputs = {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": positions,
                "past_key_values": cache,
            }
            logits = (
                self.module(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].float()
            )  # (B, vocab)
            tokens, log_probs = sample_tokens(logits, kind, [row.generator for row in batch])
            for row, token, log_prob in zip(
                batch, tokens.tolist(), log_probs.tolist(), strict=True
            ):
                if not row.finish_reason:
                    row.token_ids.append(token)
                    row.log_probs.append(log_prob)
            positions, ids = positions[:, -1:] + 1, tokens[:, None]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)


def _sampling_kind(sampling: Sampling) -> Sampling:
    """Keeps what must be equal for requests to be sampled as one batch."""
    return replace(sampling, seed=0, max_tokens=0, stop_token_ids=())


def sample_tokens(
    logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Samples one token a row and returns (tokens, log_probs), both (batch,), of the distribution that was sampled.

    Greedy (temperature 0) reports log-probs at temperature 1. `logits` is (batch, vocab) float32.
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=-1)
        return tokens, logits.log_softmax(dim=-1).gather(1, tokens[:, None]).squeeze(1)
    logits = logits / sampling.temperature
    if sampling.top_k > 0:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    log_probs = logits.log_softmax(dim=-1)
    # argmax(log p - log E) with E ~ Exp(1) is a draw from p.
    noise = torch.empty_like(logits)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    tokens = (log_probs - noise.log()).argmax(dim=-1)
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)


def _left_pad(rows: list[list[int]], filler: int) -> Tensor:
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], True, filler, "left")
