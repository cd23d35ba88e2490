"""The rollout engine of plain transformers: runs its pending requests as one batch.

It needs no other package, and is the engine to read first. It keeps a copy of the policy in
`rollout.dtype` for itself, as every engine does. Rows are sampled with the Gumbel-max trick, from a
generator of their own. Invariant: the same seed and logits give the same token, in whatever batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from data.play_counts import PLAYED
from training.config import RolloutConfig
from workers.model.banned_tokens import banned_token_ids
from workers.model.builder import ModelSpec, torch_dtype
from workers.model.router_replay import RouterPass, open_routers, routed
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.cached_rows import CachedRows, may_pad_rows
from workers.rollout.engine import Completion, FinishReason, NamedTensors, Sampling
from workers.weight_sync.manifest import as_announced, check_manifest, weight_manifest


@dataclass
class PendingRequest:
    """Holds a request while it is generated."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    # (tokens, layers, experts of a token), of each pass.
    experts: list[np.ndarray] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Returns why generation ends; None while it goes on."""
        if self.token_ids and self.token_ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        if len(self.token_ids) >= self.sampling.max_tokens:
            return "length"
        return None

    def completion(self) -> Completion:
        """Returns what was sampled."""
        return Completion(
            request_id=self.request_id,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=self.finish_reason or "abort",
            routed_experts=np.concatenate(self.experts) if self.experts else None,
        )


class HFRollout(BaseRollout):
    """Generates with transformers; `step` completes everything that is pending."""

    completes_batches = True
    updates_in_flight = True
    casts_weights = True
    counts_tokens = True
    bans_tokens = True
    tells_experts = True

    def __init__(
        self, config: RolloutConfig, model_config: ModelSpec, device_mesh: object = None
    ) -> None:
        super().__init__(
            config, eos_token_ids=model_config.eos_token_ids, pad_token_id=model_config.pad_token_id
        )
        self.device = model_config.device
        self.module = model_config.empty_causal_lm(torch_dtype(config.dtype)).to(self.device).eval()
        self.banned_token_ids = list(banned_token_ids(config, model_config))
        if config.enable_rollout_routing_replay:
            self.routers = open_routers(self.module)
        self.pending: dict[str, PendingRequest] = {}
        # Whether rows of unequal length may lie side by side; None: no weights have come yet.
        self.pads_rows: bool | None = None

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        """Queues one request."""
        generator = torch.Generator(device=self.device).manual_seed(sampling.seed)
        self.pending[request_id] = PendingRequest(request_id, prompt_ids, sampling, generator)

    def step(self) -> list[Completion]:
        """Completes the pending requests, in batches that share temperature, top-k and top-p.

        A batch has at most `max_num_seqs` requests, and prompts of one length where padding would
        change what a row samples (`may_pad_rows`).
        """
        done: list[Completion] = []
        while self.pending:
            first = next(iter(self.pending.values()))
            distribution = shared_settings(first.sampling)
            batch = [
                request
                for request in self.pending.values()
                if shared_settings(request.sampling) == distribution
            ]
            if self.pads_rows is False:
                length = len(first.prompt_ids)
                batch = [request for request in batch if len(request.prompt_ids) == length]
            batch = batch[: self.config.max_num_seqs]
            self._generate(batch, distribution)
            for request in batch:
                del self.pending[request.request_id]
                done.append(request.completion())
        return done

    def abort(self, request_id: str) -> None:
        """Takes the request out of those that are pending."""
        self.pending.pop(request_id, None)

    def update_weights(self, weights: NamedTensors, manifest: dict[str, torch.Size]) -> None:
        """Copies the weights over the engine's own; the first ones are tried.

        Raises:
            ValueError: the manifest does not fit, or the model's cache gives other log-probs than a
                pass without it.
        """
        check_manifest(manifest, weight_manifest(self.module))
        targets = self.module.state_dict()
        for name, tensor in as_announced(weights, manifest):
            targets[name].copy_(tensor)
        if self.pads_rows is None:
            self.pads_rows = may_pad_rows(self.module)

    @torch.no_grad()
    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Scores sequences of one length in a single pass."""
        ids = torch.tensor(sequences, device=self.device)  # (B, L)
        logits = self.module(ids, use_cache=False).logits[:, :-1]  # (B, L - 1, vocab)
        log_probs = self._without_banned(logits.float()).log_softmax(dim=-1)
        return log_probs.gather(2, ids[:, 1:, None]).squeeze(2).tolist()

    @torch.no_grad()
    def _generate(self, requests: list[PendingRequest], sampling: Sampling) -> None:
        """Prefills, then samples one token a step for the requests that still run.

        Finished requests leave the batch once they are half of it.
        """
        batch = requests
        prompts = [request.prompt_ids for request in batch]
        rows = CachedRows(self.module, prompts, self.pad_token_id)
        while True:
            running = [i for i, request in enumerate(batch) if request.finish_reason is None]
            if not running:
                return
            if 2 * len(running) <= len(batch):
                rows.keep(running)
                batch = [batch[i] for i in running]
            router_pass = None if self.routers is None else RouterPass()
            with routed(router_pass):
                logits = self._without_banned(rows.next_logits())  # (B, vocab)
            if self.routers is not None and router_pass is not None:
                append_experts(batch, rows, router_pass.all_chosen().to(self.routers.dtype))
            generators = [request.generator for request in batch]
            tokens, log_probs = sample_tokens(logits, sampling, generators)
            append_tokens(batch, tokens, log_probs)
            PLAYED.tokens += len(running)
            rows.append(tokens)

    def _without_banned(self, logits: Tensor) -> Tensor:
        """Gives ids that are never sampled no probability, in place; `logits` is (..., vocab)."""
        if self.banned_token_ids:
            logits[..., self.banned_token_ids] = -torch.inf
        return logits


def append_tokens(batch: Sequence[PendingRequest], tokens: Tensor, log_probs: Tensor) -> None:
    """Adds a sampled token, and its log-prob, to each request that still runs."""
    for request, token, log_prob in zip(batch, tokens.tolist(), log_probs.tolist(), strict=True):
        if request.finish_reason is None:
            request.token_ids.append(token)
            request.log_probs.append(log_prob)


def append_experts(batch: Sequence[PendingRequest], rows: CachedRows, experts: Tensor) -> None:
    """Adds what the last pass over the rows chose to each request that still runs.

    Args:
        experts: (tokens of the pass, layers, experts of a token), padding's too.
    """
    width = rows.ids.shape[1]
    by_row = experts.unflatten(0, (len(batch), width)).cpu()  # (B, width, layers, k)
    is_real = rows.mask[:, -width:].bool().cpu()
    for request, row, kept in zip(batch, by_row, is_real, strict=True):
        if request.finish_reason is None:
            request.experts.append(row[kept].numpy())


def shared_settings(sampling: Sampling) -> Sampling:
    """Keeps what must be equal for requests to be sampled as one batch."""
    return replace(sampling, seed=0, max_tokens=0, stop_token_ids=())


def sample_tokens(
    logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> tuple[Tensor, Tensor]:
    """Samples one token a row; `logits` is (batch, vocab) float32.

    Returns:
        tokens, log_probs: (batch,), of the distribution that was sampled. Greedy (temperature 0)
        reports log-probs at temperature 1.
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
