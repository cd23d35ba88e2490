"""The kernels for packed rows against the loop on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.model.attention import Sequences, flash_kernel, loop_attention, packed_attention, torch_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = (70, 1, 129, 300, 12)
KERNELS = {"flash_attn": flash_kernel, "torch": torch_kernel}


def made(query_heads: int, key_heads: int) -> list[Tensor]:
    """Query, key, value and the output's gradient, in bf16 numbers."""
    generator = torch.Generator().manual_seed(0)
    heads = (query_heads, key_heads, key_heads, query_heads)
    return [torch.randn(1, n, sum(LENGTHS), 64, generator=generator).bfloat16() for n in heads]


def with_gradients(output: Tensor, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    return [x.float().cpu() for x in (output, *torch.autograd.grad(output, inputs, upstream))]


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("name", [*KERNELS, "chosen"])
def test_kernels_agree_with_the_loop(name: str, heads: tuple[int, int]) -> None:
    if name == "flash_attn":
        pytest.importorskip("flash_attn")
    sequences = Sequences.of(LENGTHS).to(torch.device("cuda"))
    *inputs, upstream = made(*heads)
    exact = [x.float().requires_grad_() for x in inputs]
    expected = with_gradients(loop_attention(*exact, LENGTHS, 0.125), exact, upstream.float())
    on_gpu = [x.cuda().requires_grad_() for x in inputs]
    if name == "chosen":
        output = packed_attention(*on_gpu, sequences, 0.125)
    else:
        q, k, v = (x[0].transpose(0, 1) for x in on_gpu)
        output = KERNELS[name](q, k, v, sequences.boundaries, max(LENGTHS), 0.125).transpose(0, 1)[None]
    got = with_gradients(output, on_gpu, upstream.cuda())
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() < 1e-2 * b.norm()
        assert (a - b).abs().max() < 3e-2 * b.abs().max()
