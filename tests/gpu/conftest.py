"""What the tests of CUDA paths share: a device, its cleaning between tests, and small models.

They are marked `gpu`, are skipped where there is no CUDA device, and load nothing from a hub.

GPU_TESTS_DEVICE=cpu runs every body on the CPU instead: a dry run, which shows that the code runs,
and which fails for the same reasons except those that only a GPU has. What asserts on device memory
is skipped then. Without the variable the device is `cuda`.

Invariant: a test here compares with the CPU, with another setting on the same device, or with
numbers worked by hand; none records figures.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from examples.prepare_tiny_prompts import make_tokenizer
from workers.model.attention import use_packed_attention

KIND = os.environ.get("GPU_TESTS_DEVICE", "cuda")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Runs before any fixture, so that nothing is built for a test that is skipped."""
    if KIND == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device; GPU_TESTS_DEVICE=cpu makes a dry run")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(KIND, torch.cuda.current_device()) if KIND == "cuda" else torch.device(KIND)


@pytest.fixture
def cuda_memory(device: torch.device) -> torch.device:
    """Returns the device, for tests that assert on its memory; they have no dry run."""
    if device.type != "cuda":
        pytest.skip("asserts on device memory")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return device


@pytest.fixture(autouse=True)
def exact_and_clean() -> Iterator[None]:
    """Keeps float32 exact (no TF32); undoes what a deterministic run switches on."""
    assert not torch.backends.cuda.matmul.allow_tf32
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def cpu_lm(tiny_task: Path) -> nn.Module:
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    assert use_packed_attention(lm)
    return lm


@pytest.fixture(scope="session")
def lm(cpu_lm: nn.Module, device: torch.device) -> nn.Module:
    """Returns the same model on the device."""
    return copy.deepcopy(cpu_lm).to(device)


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with a tied Qwen2 of random weights whose heads are as wide as real ones.

    Attention kernels refuse narrower ones.
    """
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(2)
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
