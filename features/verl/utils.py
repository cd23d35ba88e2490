"""Small helpers of verl's utils package: tokenizers, masks, dicts, statistics of groups."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.array_ops import BatchError

logger = logging.getLogger(__name__)


def set_pad_token_id(tokenizer: Any) -> None:
    """Pads with the end token where a tokenizer has no token for padding."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
        logger.warning("the tokenizer has no padding token: its end token takes that place")


def hf_tokenizer(
    name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> Any:
    """Loads a tokenizer of transformers, by the name or folder of its model.

    Args:
        correct_pad_token: see `set_pad_token_id`.
        correct_gemma2: end Gemma 2's turns with its end-of-turn token, which its tokenizer lacks.
        kwargs: of transformers' `from_pretrained`.
    """
    from transformers import AutoTokenizer

    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):
        kwargs["eos_token"] = "<end_of_turn>"
        kwargs["eos_token_id"] = 107
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return tokenizer


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Loads the processor of a model that sees images; None where the model has none."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError) as error:
        logger.warning("%s has no processor: %s", name_or_path, error)
        return None
    # For a model of text transformers returns its tokenizer.
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """Draws an attention mask for tests, by numpy's global generator.

    Args:
        input_ids: (batch, width).
        max_ratio_of_valid_token, min_ratio_of_valid_token: the share of a row that is real.
        max_ratio_of_left_padding: the share of it that is padding on the left, at most.
    Returns: (batch, width) int64, in each row zeros, at least one 1, zeros.
    """
    rows, width = input_ids.shape
    most_padding = int(width * max_ratio_of_left_padding)
    most = int(width * max_ratio_of_valid_token)
    fewest = max(1, int(width * min_ratio_of_valid_token))
    if not fewest <= most <= width - most_padding:
        raise ValueError(
            f"rows of {width} tokens cannot have {fewest} to {most} real ones behind up to "
            f"{most_padding} of padding: lower the ratios"
        )
    starts = torch.from_numpy(np.random.randint(0, most_padding + 1, size=(rows, 1)))
    lengths = torch.from_numpy(np.random.randint(fewest, most + 1, size=(rows, 1)))
    places = torch.arange(width)
    mask = (places >= starts) & (places < starts + lengths)
    return mask.long().to(input_ids.device)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Numbers the real tokens of each row from 0; what lies before the first has 0 too."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def append_to_dict(
    data: dict[str, list[Any]], new_data: Mapping[str, Any], prefix: str = ""
) -> None:
    """Appends each entry of the second to the first's list of its name, in place."""
    for key, value in new_data.items():
        data.setdefault(f"{prefix}{key}", []).append(value)


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the second's entries to the first and returns it.

    Raises:
        BatchError: a shared entry differs; it is an AssertionError too.
    """
    for key, value in dict2.items():
        if key in dict1 and dict1[key] != value:
            raise BatchError(f"both have {key!r}, and differ: {dict1[key]!r}, {value!r}")
        dict1[key] = value
    return dict1


def as_torch_index(index: Any, device: Any = None) -> Tensor:
    """Makes numbers of groups: integers as they are, other names numbered in order: (batch,)."""
    names = np.asarray(index.cpu() if isinstance(index, Tensor) else index).reshape(-1)
    numbers = names
    if names.dtype.kind not in "biu":
        _, numbers = np.unique(names.astype(str), return_inverse=True)
    return torch.as_tensor(numbers.astype(np.int64), device=device)


@torch.no_grad()
def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the statistics of groups.

    Args:
        scores: (batch,).
        gidx: (batch,) the number of each row's group.
    Returns: mean, standard deviation (of a sample) and count, each (groups,); a group of one row
        has mean 0 and deviation 1, so that its score stays as it is.
    """
    scores = scores.reshape(-1).to(device=device, dtype=torch.float32)
    gidx = gidx.reshape(-1).to(scores.device)
    groups = int(gidx.max()) + 1 if gidx.numel() else 0
    count = torch.zeros(groups, device=scores.device).index_add_(0, gidx, torch.ones_like(scores))
    total = torch.zeros_like(count).index_add_(0, gidx, scores)
    mean = total / count.clamp(min=1)
    squares = torch.zeros_like(count).index_add_(0, gidx, (scores - mean[gidx]) ** 2)
    std = (squares / (count - 1).clamp(min=1)).clamp(min=eps).sqrt()
    is_alone = count <= 1
    return mean.masked_fill(is_alone, 0), std.masked_fill(is_alone, 1), count
