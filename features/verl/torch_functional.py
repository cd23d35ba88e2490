"""Functions of verl's torch_functional that training.batch computes under other names, or not.

Invariant: logits are (…, width, vocabulary), and results float32 of the shape before the vocabulary
unless a docstring says otherwise.
"""

from typing import Any

import torch
from torch import Tensor

from training.batch import torch_functional
from training.batch.head import entropy_from_logits, logprobs_from_logits

logprobs_from_logits_naive = logprobs_from_logits
logprobs_from_logits_v2 = logprobs_from_logits


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Computes the entropy in nats of (rows, vocabulary), `chunk_size` rows at a time."""
    return torch.cat([entropy_from_logits(chunk) for chunk in logits.split(chunk_size)])


def gather_from_labels(data: Tensor, label: Tensor) -> Tensor:
    """Takes of each (…, vocabulary) the entry that `label` (…) names."""
    return data.gather(-1, label.unsqueeze(-1)).squeeze(-1)


def log_probs_from_logits_response(
    input_ids: Tensor, logits: Tensor, response_length: int
) -> Tensor:
    """Computes the log-probs of the last `response_length` tokens: (batch, response_length)."""
    before = logits[:, -response_length - 1 : -1]
    return logprobs_from_logits(before, input_ids[:, -response_length:])


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Sums the squares of the probabilities over the vocabulary."""
    return logits.softmax(dim=-1, dtype=torch.float32).square().sum(-1)


def __getattr__(name: str) -> Any:
    """Returns what training.batch.torch_functional has."""
    return getattr(torch_functional, name)
