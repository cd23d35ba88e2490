"""Brings a prompt into rows of equal length, and rows into columns.

Invariant: whatever Dataset a prompt comes from, `normalise_row` gives it its `input_ids`,
`attention_mask` and `position_ids` (max_prompt_length,) int64, padded on the left:

    tokens 7 8 9, length 5     input_ids [0 0 7 8 9]
                               attention_mask [0 0 1 1 1]
                               position_ids [0 0 0 1 2]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.array_ops import object_array
from data.chat_templates import Tokenizer, pad_token_id
from data.names import unknown_name
from data.prompt_messages import encode_prompt, text_messages

TRUNCATIONS = ("left", "right", "middle", "error")


def normalise_row(
    row: Mapping[str, Any],
    *,
    max_prompt_length: int,
    pad_token_id: int,
    truncation: str,
    where: str = "a row",
) -> dict[str, Any]:
    """Pads a row's prompt on the left to max_prompt_length tokens; other keys travel unchanged.

    Args:
        row: `input_ids` and `attention_mask`, 1-D tensors or lists of any length, padded on any
            side. Ids are integers from 0; what the mask hides may be anything. That they are below
            the vocabulary's size is not seen.
        truncation: "left" keeps the end, "right" the start, "middle" both ends, "error" raises.
        where: names the row in errors.
    Returns:
        the row with `input_ids`, `attention_mask`, `position_ids` (max_prompt_length,) int64, and
        `raw_prompt_ids`, the same tokens as a list without padding.
    Raises:
        ValueError: a row lacks the two, has other shapes, no tokens, or numbers that are no ids.
    """
    token_ids = truncate(_real_tokens(row, where), max_prompt_length, truncation, where)
    missing = max_prompt_length - len(token_ids)
    positions = torch.arange(-missing, len(token_ids))
    return {
        **row,
        "input_ids": torch.tensor([pad_token_id] * missing + token_ids),
        "raw_prompt_ids": token_ids,
        "attention_mask": (positions >= 0).long(),
        "position_ids": positions.clamp(min=0),
    }


def _real_tokens(row: Mapping[str, Any], where: str) -> list[int]:
    """Lists a row's tokens without padding; raises ValueError as `normalise_row` does."""
    missing = {"input_ids", "attention_mask"} - row.keys()
    if missing:
        raise ValueError(
            f"{where} lacks {sorted(missing)}; a Dataset's rows need input_ids and "
            "attention_mask, or a text under data.prompt_key"
        )
    input_ids = torch.as_tensor(row["input_ids"])
    mask = torch.as_tensor(row["attention_mask"])
    if input_ids.ndim == 2 and len(input_ids) == 1 and mask.shape == input_ids.shape:
        # As tokenizers return it with return_tensors="pt".
        input_ids, mask = input_ids[0], mask[0]
    if input_ids.ndim != 1 or input_ids.shape != mask.shape:
        raise ValueError(
            f"{where}: input_ids and attention_mask must be 1-D and of one length; their shapes: "
            f"{tuple(input_ids.shape)} and {tuple(mask.shape)}"
        )
    if not mask.any():
        raise ValueError(f"{where}: the prompt has no tokens; its attention_mask is all zero")
    is_integer = not input_ids.is_floating_point() and input_ids.dtype != torch.bool
    if not is_integer:
        raise ValueError(
            f"{where}: input_ids are {input_ids.dtype}; allowed: integers, as tokenizer.encode "
            "gives them"
        )
    token_ids: list[int] = input_ids.long()[mask.bool()].tolist()
    lowest = min(token_ids)
    if lowest < 0:
        raise ValueError(
            f"{where}: input_ids has {lowest}; token ids start at 0, padding needs attention_mask 0"
        )
    return token_ids


def truncate(token_ids: list[int], max_length: int, truncation: str, where: str) -> list[int]:
    """Cuts the tokens to max_length where they are more; see `normalise_row`."""
    excess = len(token_ids) - max_length
    if excess <= 0:
        return token_ids
    if truncation not in TRUNCATIONS:
        raise unknown_name("data.truncation", truncation, TRUNCATIONS)
    if truncation == "error":
        raise overlong_error(where, len(token_ids), max_length)
    kept_ahead = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    return token_ids[:kept_ahead] + token_ids[kept_ahead + excess :]


def overlong_error(where: str, length: int, limit: int, others: int = 0) -> ValueError:
    """Makes the error for a prompt that is too long, as so many others of its files are."""
    count = f" ({others} more prompts are too long)" if others else ""
    return ValueError(
        f"{where}: the prompt has {length} tokens, data.max_prompt_length is {limit}{count}; raise "
        "it, set data.filter_overlong_prompts=true, or data.truncation to left, right or middle"
    )


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | np.ndarray]:
    """Turns rows into columns.

    Tensors are stacked to (B, …), all else becomes an object array (B,).

    A key that some rows lack is None there.

    Raises:
        ValueError: a tensor is lacking or of another shape; names key and row.
    """
    # In the order in which they first appear.
    keys = dict.fromkeys(key for row in data_list for key in row)
    columns: dict[str, Tensor | np.ndarray] = {}
    for key in keys:
        entries = [row.get(key) for row in data_list]
        if any(isinstance(entry, Tensor) for entry in entries):
            columns[key] = _stack(key, entries)
        else:
            columns[key] = object_array(entries)
    return columns


def _stack(key: str, entries: list[Any]) -> Tensor:
    """Stacks the tensors of a column; raises ValueError as `collate_fn` does."""
    forms = [_form_of(entry) for entry in entries]
    for row, form in enumerate(forms):
        if form != forms[0]:
            raise ValueError(
                f"{key!r} cannot be stacked: it is {forms[0]} in row 0 of the batch and {form} in "
                f"row {row}. The Dataset must give every row a tensor of one shape (pad it), or "
                "lists, which are kept as they are"
            )
    return torch.stack(entries)


def _form_of(entry: Any) -> str:
    """Describes an entry: a tensor by its shape, anything else by its type."""
    if isinstance(entry, Tensor):
        return str(tuple(entry.shape))
    return type(entry).__name__


@dataclass(frozen=True)
class PromptCollator:
    """Collates rows of any torch Dataset, which `normalise_row` brings into one form.

    A row without `input_ids` is tokenised here: `raw_prompt`, or `data.prompt_key`, holds chat
    messages, or one user message as a string.

    Args:
        config: the `DataConfig`.
        collate: makes columns of normalised rows.
    """

    config: Any
    tokenizer: Tokenizer
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]] = collate_fn

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Makes columns of the rows; lists become object arrays."""
        columns = self.collate([self._normalised(row) for row in rows])
        for key, column in columns.items():
            if isinstance(column, list):
                columns[key] = object_array(column)
        return columns

    def _normalised(self, row: dict[str, Any]) -> dict[str, Any]:
        prompt_key = "raw_prompt" if "raw_prompt" in row else self.config.prompt_key
        if "input_ids" not in row and prompt_key in row:
            variables = self.config.apply_chat_template_kwargs
            try:
                messages = text_messages(row[prompt_key])
            except ValueError as error:
                raise ValueError(f"a row {error}") from error
            token_ids = encode_prompt(self.tokenizer, messages, "a row", **variables)
            row = {**row, "input_ids": token_ids, "attention_mask": [1] * len(token_ids)}
        return normalise_row(
            row,
            max_prompt_length=self.config.max_prompt_length,
            pad_token_id=pad_token_id(self.tokenizer),
            truncation=self.config.truncation,
        )
