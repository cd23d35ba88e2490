"""The kernel for packed rows against blocks on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.model.attention import packed_attention
from workers.model.sequences import Sequences, to_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (70, 1, 129, 300, 12)
# The second and the last segment read the first one's keys before their own; the third those of
# both.
PATHS = [torch.arange(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])) for i in range(len(LENGTHS))]
PATHS[2] = torch.cat(PATHS[:3])
PATHS[1], PATHS[4] = torch.cat(PATHS[:2]), torch.cat([PATHS[0], PATHS[4]])
SEQUENCES = {"packed": Sequences.of(LENGTHS), "shared": Sequences.of(LENGTHS, PATHS)}


def made(query_heads: int, key_heads: int) -> list[Tensor]:
    """Query, key, value and the output's gradient, in bf16 numbers."""
    generator = torch.Generator().manual_seed(0)
    heads = (query_heads, key_heads, key_heads, query_heads)
    return [torch.randn(1, n, sum(LENGTHS), 64, generator=generator).bfloat16() for n in heads]


def with_gradients(output: Tensor, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    return [x.float().cpu() for x in (output, *torch.autograd.grad(output, inputs, upstream))]


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("layout", SEQUENCES)
def test_the_kernel_agrees_with_blocks(layout: str, heads: tuple[int, int]) -> None:
    sequences = SEQUENCES[layout]
    *inputs, upstream = made(*heads)
    exact = [x.float().requires_grad_() for x in inputs]
    expected = with_gradients(packed_attention(*exact, sequences, 0.125), exact, upstream.float())
    on_gpu = [x.cuda().requires_grad_() for x in inputs]
    output = packed_attention(*on_gpu, to_device(sequences, torch.device("cuda")), 0.125)
    got = with_gradients(output, on_gpu, upstream.cuda())
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() < 1e-2 * b.norm()
        assert (a - b).abs().max() < 3e-2 * b.abs().max()
