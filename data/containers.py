"""What DataProto does with its dicts and arrays, and where a reward lies among a row's tokens.

Invariant: every function is pure; its arguments stay as they are. Rewards lie only on tokens that the policy sampled
(response_mask 1), and a row's sum stays the same. With A the policy's tokens and E the environment's:

    responses     = A0 A0 E0 A1 A1 E1 pad
    response_mask =  1  1  0  1  1  0   0
    outcome 0.5   =  0  0  0  0 .5  0   0      on the last sampled token, although an environment's token is last
"""

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

# Positions of rows, which may repeat, or a mask over all of them.
RowIndex: TypeAlias = Sequence[int] | Sequence[bool] | np.ndarray | Tensor


# Names of fields; None: all of them.
Keys: TypeAlias = Sequence[str] | None


def object_array(values: Sequence[Any]) -> np.ndarray:
    """Makes a 1-D object array, also of lists of one length, which numpy itself would make a matrix."""
    return np.fromiter(values, dtype=object, count=len(values))


def pick(part: dict[str, Any], keys: Keys, name: str) -> dict[str, Any]:
    """Returns the named entries, all of them for None; KeyError lists what `name` has."""
    if missing := [key for key in keys or [] if key not in part]:
        raise KeyError(
            f"{missing} not in {name}, which has: {', '.join(sorted(part)) or 'nothing'}"
        )
    return dict(part) if keys is None else {key: part[key] for key in keys}


def union_dicts(mine: dict[str, Any], others: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the entries of both; ValueError where a shared one differs."""
    for key in mine.keys() & others.keys():
        if not same(mine[key], others[key]):
            raise ValueError(
                f"union: {name}[{key!r}] differs between the two; pop or rename it in one of them"
            )
    return mine | others


def merge_meta_info(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the meta_info of concatenated parts: `metrics` are gathered into lists, all else must agree.

    A part's metrics are a dict, name -> number or list, or a list of such dicts.
    """
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for key, value in (fact for meta_info in parts for fact in meta_info.items()):
        if key == "metrics":
            for entry in value if isinstance(value, list) else [value]:
                for name, number in entry.items():
                    metrics.setdefault(name, []).extend(
                        number if isinstance(number, list) else [number]
                    )
        elif key in merged and not same(merged[key], value):
            raise ValueError(
                f"concat: meta_info[{key!r}] differs between the parts: {merged[key]!r}, {value!r}"
            )
        else:
            merged[key] = value
    return merged | {"metrics": metrics} if metrics else merged


def same(a: Any, b: Any) -> bool:
    """Returns whether two values are equal, tensors and arrays also in shape and dtype; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, Tensor | np.ndarray) and isinstance(b, type(a)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype == object:
            return same(a.tolist(), b.tolist())
        b = b.to(a.device) if isinstance(b, Tensor) else b
        return bool((a == b).all() or ((a == b) | ((a != a) & (b != b))).all())
    # Plain Python first, it is fast; arrays inside have no truth value, so that is not the last word.
    with contextlib.suppress(ValueError, RuntimeError):
        if a == b:
            return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, float) and a != a and b != b


def row_blocks(matrix: Tensor, entries: int = 1 << 19) -> list[slice]:
    """Cuts rows so that what is computed of a block of them has about `entries` entries, and not the matrix's.

    By default 2 MiB of float32, which go back to the system when freed (workers/ranks/distributed.py).
    """
    size = max(1, entries // max(1, matrix[:1].numel()))
    return [slice(start, start + size) for start in range(0, max(1, len(matrix)), size)]


def row_sums(matrix: Tensor) -> Tensor:
    """Sums each row, of integers as int64, of which there is no copy of the matrix: (B,)."""
    return torch.cat([matrix[rows].sum(-1) for rows in row_blocks(matrix)])


# What is left out of a packed matrix, (before, behind, starts, ends): row i holds `before` up to `starts[i]`, and
# `behind` from `ends[i]`.
Runs: TypeAlias = tuple[int, int, np.ndarray, np.ndarray]
Packed: TypeAlias = tuple[np.ndarray, torch.dtype, tuple[int, ...], Runs | None]


def to_bytes(tensor: Tensor) -> Packed:
    """Packs a tensor, a matrix without the padding at both ends of its rows where that saves a fifth or more.

    Padding is the most frequent value of the first column, and of the last. As integers, because numpy has no bfloat16,
    and equal floats may have other bits: `from_bytes` gives back every bit.
    """
    flat = tensor.detach().cpu().contiguous().flatten()
    # Bytes where no integer is as wide.
    whole = flat.view(getattr(torch, f"int{8 * flat.element_size()}", torch.uint8))
    bits, shape, runs = whole.numpy(), tuple(tensor.shape), None
    if tensor.dim() == 2 and bits.size == tensor.numel() > 0:
        matrix = bits.reshape(shape)
        before, behind = whole.view(shape)[:, [0, -1]].mode(dim=0).values.tolist()
        starts = _repeats(matrix, before)
        ends = np.maximum(shape[1] - _repeats(matrix[:, ::-1], behind), starts)
        if (ends - starts).sum() <= 0.8 * bits.size:
            bits = np.concatenate(
                [row[start:end] for row, start, end in zip(matrix, starts, ends, strict=True)]
            )
            runs = before, behind, starts, ends
    return bits, tensor.dtype, shape, runs


def from_bytes(
    bits: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], runs: Runs | None
) -> Tensor:
    """Unpacks what `to_bytes` packed, on the CPU."""
    if runs is None:
        # Ray hands out read-only memory, and torch has no read-only tensors.
        return (
            torch.from_numpy(bits if bits.flags.writeable else bits.copy()).view(dtype).view(shape)
        )
    matrix, place, (before, behind, starts, ends) = np.empty(shape, bits.dtype), 0, runs
    for row, start, end in zip(matrix, starts, ends, strict=True):
        row[:start], row[start:end], row[end:] = before, bits[place : place + end - start], behind
        place += end - start
    return torch.from_numpy(matrix).view(dtype)


def _repeats(matrix: np.ndarray, value: int) -> np.ndarray:
    """Counts how often each row begins with the value."""
    other = matrix != value
    return np.where(other.any(axis=1), other.argmax(axis=1), matrix.shape[1])


def place_outcome_rewards(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Places scores (batch,) on each row's last sampled token, none in a row without one: (batch, response_len)."""
    rewards = torch.zeros(response_mask.shape, dtype=torch.float32, device=response_mask.device)
    rewards[:, -1] = scores.to(rewards)
    return move_to_sampled_tokens(rewards, response_mask)


def move_to_sampled_tokens(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Moves every reward to the last sampled token at or before it, to the first one where none is; sums stay the same.

    Masked advantages would silently drop a reward on an environment's token; it belongs to the action it answers.
    A row without sampled tokens gets zeros. Where nothing is to be moved the rewards themselves are returned.
    """
    sampled, blocks = response_mask.bool(), row_blocks(rewards)
    if not any(rewards[rows].masked_fill(sampled[rows], 0).any() for rows in blocks):
        return rewards
    return torch.cat([_moved(rewards[rows], sampled[rows]) for rows in blocks])


def _moved(rewards: Tensor, sampled: Tensor) -> Tensor:
    positions = torch.arange(sampled.shape[1], device=sampled.device)
    last = torch.where(sampled, positions, -1).cummax(dim=1).values  # (batch, response_len)
    first = sampled.int().argmax(
        dim=1, keepdim=True
    )  # (batch, 1), 0 in a row without sampled tokens
    return (
        torch.zeros_like(rewards).scatter_add(1, torch.where(last < 0, first, last), rewards)
        * sampled
    )


def sample_ids(
    groups: range, samples: int, *, step: int, validate: bool = False
) -> dict[str, np.ndarray]:
    """Makes the columns of groups x samples rows, a group's samples side by side.

    Returns: uid and episode_id, objects; group_index and sample_index, int64, which seed sampling; each (rows,).
    """
    prefix = "val." if validate else ""
    rows = [(group, sample) for group in groups for sample in range(samples)]
    return {
        "uid": object_array([f"{prefix}{step}.{group}" for group, _ in rows]),
        "episode_id": object_array([f"{prefix}{step}.{group}.{sample}" for group, sample in rows]),
        "group_index": np.array([group for group, _ in rows], dtype=np.int64),
        "sample_index": np.array([sample for _, sample in rows], dtype=np.int64),
    }


def step_info(
    *, step: int, seed: int, seeded: bool = False, validate: bool = False
) -> dict[str, Any]:
    """Makes the meta_info of a batch that is to be generated.

    Args:
        seed: of the run.
        seeded: turns go in lockstep, so that the same seeds give the same batches.
    """
    return {"global_steps": step, "seed": seed, "seeded": seeded, "validate": validate}


def seed_for(
    run: int, step: int, group: int, sample: int | None = None, turn: int | None = None
) -> int:
    """Derives a seed in [0, 2**31), the same in every process, on every machine and in every Python version.

    Args:
        run: the run's own seed (`data.seed`).
        step: the training step.
        group: the prompt group within the step, counted in data order.
        sample: the sample within the group; left out, all samples of the group share the seed.
        turn: the turn within the episode.

    The environment is reset with `seed_for(run, step, group)`, so that a group's samples face the same task;
    the sampler of a turn uses `seed_for(run, step, group, sample, turn)`, so that they answer it differently.
    """
    name = "/".join(
        "-" if part is None else str(int(part)) for part in (run, step, group, sample, turn)
    )
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 2**31
