"""`--plan` against what a run takes, for families that differ in structure, made wide.

They are wide enough that weights, states and activations are more than what batches take. With
`long` answers an engine's cache is a good part of its memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.features.memory_plan.measured_run import measure
from tests.zoo.families import FAMILIES, Family, WholeFamily
from tests.zoo.proofs import PLAN_TOLERANCE
from training.config.loader import load_config

pytest.importorskip("features.memory_plan.planner")

ACTOR = "actor_rollout_ref.actor"
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "max_position_embeddings": 4096,
    "head_dim": 64,
    "global_head_dim": 128,
    "mamba_d_head": 128,
    "mamba_d_ssm": 512,
    "conv_dim": 256,
    "conv_dim_out": 256,
    "block_dim": 256,
    "block_ff_dim": 704,
}
# These grow as the hidden size does.
TIMES_FOUR = (
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_expert_intermediate_size",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_head_dim",
    "mamba_head_dim",
    "hidden_size_per_layer_input",
    "kv_lora_rank",
    "q_lora_rank",
    "v_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
)
# Where the intermediate size is an expert's.
OF_EXPERTS = {"gpt_oss": 128, "granite4": 128, "minimax_m2": 128}
LENGTHS = {"short": 16, "long": 192}


def widened(family: Family) -> Family:
    """Returns a family in sizes whose memory is told from a batch's."""
    if isinstance(family, WholeFamily):
        return replace(family, part=widened(family.part))
    settings = dict(family.settings)
    for name, size in WIDE.items():
        if name in settings:
            settings[name] = size
    for name in TIMES_FOUR:
        if name in settings:
            settings[name] *= 4
    if family.name in OF_EXPERTS:
        settings["intermediate_size"] = OF_EXPERTS[family.name]
    if settings.get("sliding_window"):
        settings["sliding_window"] = 32
    return replace(family, settings=settings)


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize(
    ("name", "length"),
    [
        # Dense and tied; windows; experts; all heads' keys of a latent; a delta net; Mamba beside
        # experts and beside attention; sinks; the language part of a model that also sees.
        ("qwen3", "short"),
        ("gemma3", "short"),
        ("qwen3_moe", "short"),
        ("deepseek_v3", "short"),
        ("deepseek_v3", "long"),
        ("qwen3_5", "short"),
        ("granite4", "short"),
        ("falcon_h1", "short"),
        ("gpt_oss", "short"),
        ("gemma3_vision", "short"),
    ],
)
def test_the_plan_is_within_a_tenth_of_what_a_run_takes(
    name: str, length: str, tmp_path: Path
) -> None:
    from features.memory_plan.planner import Planner

    config = load_config(
        [
            f"actor_rollout_ref.model.path={widened(FAMILIES[name]).make(tmp_path / 'model')}",
            "actor_rollout_ref.model.dtype=float32",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.ignore_eos=true",
            "data.train_batch_size=4",
            "data.max_prompt_length=64",
            f"data.max_response_length={LENGTHS[length]}",
            f"{ACTOR}.ppo_mini_batch_size=2",
            f"{ACTOR}.ppo_max_token_len_per_gpu=512",
            "algorithm.adv_estimator=grpo",
            "trainer.device=cpu",
            "trainer.total_training_steps=2",
            "data.dataloader_num_workers=0",
            "trainer.logger=file",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ],
        check=False,
    ).config
    planned = {phase: terms.total() for phase, terms in Planner(config).phases(0).items()}
    measured = measure(config)
    assert measured.keys() == planned.keys()
    ratios = {phase: round(planned[phase] / measured[phase], 3) for phase in planned}
    assert all(abs(ratio - 1) <= PLAN_TOLERANCE for ratio in ratios.values()), ratios
