"""Pads and cuts token sequences to a length, and finds where a response ends."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Returns 1 up to and including the first end token, 0 after it: (batch, response_len)."""
    end_tokens = torch.as_tensor(eos_token, device=response_id.device)
    is_end = torch.isin(response_id, end_tokens)
    ends_before = is_end.cumsum(-1) - is_end.long()
    return (ends_before == 0).to(dtype)


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Pads the last dimension up to `max_seq_len`; longer ones stay as they are."""
    missing = max(max_seq_len - tensors.shape[-1], 0)
    left_and_right = (missing, 0) if left_pad else (0, missing)
    return pad(tensors, left_and_right, value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Pads lists of token ids on the right to the longest, or to a longer `max_length`.

    Returns: (batch, length) int64.
    """
    length = max([max_length or 0, *map(len, response)])
    rows = []
    for tokens in response:
        padding = [pad_token_id] * (length - len(tokens))
        rows.append([*tokens, *padding])
    return torch.tensor(rows, dtype=torch.int64)


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
    Returns:
        input_ids, attention_mask: (batch, max_length).
    Raises:
        ValueError: a sequence is longer and truncation is "error".
    """
    # Imports transformers: late.
    from data.rl_dataset import truncate

    length = input_ids.shape[-1]
    if length <= max_length:
        padded_ids = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
        padded_mask = pad_sequence_to_length(attention_mask, max_length, 0, left_pad)
        return padded_ids, padded_mask
    kept = truncate(list(range(length)), max_length, truncation, "postprocess_data")
    return input_ids[..., kept], attention_mask[..., kept]
