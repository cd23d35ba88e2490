"""The plan of a run's memory against what the run takes: with the real trainer and workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.prepare_tiny_prompts import make_tokenizer
from features.memory_plan.planner import Planner
from tests.features.memory_plan.measured_run import measure
from training.config.loader import load_config


def model(folder: Path, **shape: Any) -> Path:
    tokenizer = make_tokenizer()
    ids = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    defaults = {"max_position_embeddings": 4096, "tie_word_embeddings": False}
    config = LlamaConfig(**(defaults | ids | shape))
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


ACTOR = "actor_rollout_ref.actor"
WIDTH = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "deep": (
        WIDTH | {"num_hidden_layers": 6, "vocab_size": 512},
        [
            "data.max_prompt_length=64",
            "data.max_response_length=16",
            f"{ACTOR}.ppo_max_token_len_per_gpu=512",
        ],
    ),
    "wide vocabulary": (
        WIDTH | {"num_hidden_layers": 2, "vocab_size": 20000},
        [
            "data.max_prompt_length=64",
            "data.max_response_length=32",
            f"{ACTOR}.ppo_max_token_len_per_gpu=1024",
        ],
    ),
    "long sequences": (
        WIDTH | {"num_hidden_layers": 3, "vocab_size": 512},
        [
            "data.max_prompt_length=512",
            "data.max_response_length=16",
            f"{ACTOR}.ppo_max_token_len_per_gpu=1024",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        ],
    ),
    "critic and reference": (
        WIDTH | {"num_hidden_layers": 3, "vocab_size": 4096, "tie_word_embeddings": True},
        [
            "data.max_prompt_length=32",
            "data.max_response_length=16",
            "algorithm.adv_estimator=gae",
            f"{ACTOR}.use_kl_loss=true",
            f"{ACTOR}.ppo_max_token_len_per_gpu=256",
            "critic.ppo_max_token_len_per_gpu=256",
        ],
    ),
}


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("long sequences", marks=pytest.mark.slow),
        *sorted({*SHAPES} - {"long sequences"}),
    ],
)
def test_the_plan_is_within_15_percent_of_what_the_run_takes(shape: str, tmp_path: Path) -> None:
    sizes, settings = SHAPES[shape]
    config = load_config(
        [
            f"actor_rollout_ref.model.path={model(tmp_path / 'model', **sizes)}",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.ignore_eos=true",
            "data.train_batch_size=4",
            f"{ACTOR}.ppo_mini_batch_size=2",
            "algorithm.adv_estimator=grpo",
            "trainer.device=cpu",
            "trainer.total_training_steps=2",
            "data.dataloader_num_workers=0",
            "trainer.logger=file",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            *settings,
        ],
        check=False,
    ).config
    planned = {phase: terms.total() for phase, terms in Planner(config).phases(0).items()}
    measured = measure(config)
    assert measured.keys() == planned.keys()
    ratios = {phase: round(planned[phase] / measured[phase], 3) for phase in planned}
    assert all(abs(ratio - 1) <= 0.15 for ratio in ratios.values()), ratios
    assert abs(max(planned.values()) / max(measured.values()) - 1) <= 0.15
