"""Shared fixtures: the tiny tasks (tokenizer, model, prompts) and the tiny game (tokenizer, model), made once."""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.prepare_quickstart import warm_up as warm_up_game
from examples.prepare_tiny_prompts import make_model, make_tokenizer, warm_up, write_prompts

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ (untied), train.parquet and val.parquet, after a very short warm-up."""
    folder = tmp_path_factory.mktemp("task")
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, tokenizer, rng, steps=60)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_prompts(folder / "train.parquet", 64, rng)
    write_prompts(folder / "val.parquet", 16, rng)
    return folder


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with tied embeddings, random weights."""
    folder = tmp_path_factory.mktemp("tied")
    torch.manual_seed(1)
    tokenizer = make_tokenizer()
    config = LlamaConfig.from_dict(
        make_model(tokenizer).config.to_dict() | {"tie_word_embeddings": True}
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, which knows the form of the quickstart's game after a very short warm-up."""
    folder = tmp_path_factory.mktemp("game")
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up_game(model, tokenizer, random.Random(0), steps=40)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder
