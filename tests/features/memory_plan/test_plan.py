"""The plan of a run's memory, worked by hand for a small model; and what a config says of a step.

That is a step's sizes in words, and the file that reads each setting.
"""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from features.memory_plan.live_memory import LiveMemory
from features.memory_plan.planner import Planner
from features.memory_plan.table import write_table
from features.memory_plan.terms import GIB, MemoryTerms
from main import main
from tests.conftest import PROJECT
from training.config import PPOConfig
from training.config.explain import attribute_reads, reader, sizes
from training.config.leaves import leaves
from training.config.loader import load_config
from workers.model.builder import ModelSpec

ACTOR = "actor_rollout_ref.actor"
# Embedding and head 2 x 96 x 32; a layer has q and o 2 x 32 x 32, k and v 2 x 32 x 16, gate, up,
# down 3 x 32 x 64 and two norms of 32; a last norm of 32.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 64
PARAMETERS = 2 * 96 * 32 + 2 * LAYER + 32
# Rotary frequencies, which are not trained: 4 heads of 8 have 4.
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A folder that holds a config.json and nothing else."""
    LlamaConfig(**SHAPE).save_pretrained(tmp_path / "shape")
    return tmp_path / "shape"


def planner(shape: Path, *overrides: str) -> Planner:
    """Plans a run on a CPU with 4 prompts a step, each answered twice, of 8 + 8 tokens."""
    settings = [
        f"actor_rollout_ref.model.path={shape}",
        "actor_rollout_ref.rollout.name=hf",
        "trainer.device=cpu",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
    ]
    return Planner(load_config([*settings, *overrides], check=False).config)


def test_bytes_are_counted_once_and_until_they_are_freed() -> None:
    module = nn.Linear(4, 6, bias=False)
    with LiveMemory(module, vocabulary=6) as memory:
        x = torch.zeros(10, 4)
        # The weight's own memory is no new one, and a view has none.
        module.weight.t(), x[2:].view(-1)
        assert memory.now == {"activations": 160}
        y = module(x)
        assert memory.now["logits"] == 240
        del x, y
        torch.zeros(2, 2, 2)
        assert not memory.now.total()
    assert memory.peak.total() == 400


@pytest.mark.seconds
def test_weights_moments_gradients_and_copies_are_those_of_the_parameters(shape: Path) -> None:
    plan = planner(shape, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")
    phases = plan.phases(0)
    assert sorted(phases) == [
        "actor update",
        "checkpoint",
        "generation",
        "log-probs",
        "reference",
        "weight sync",
    ]
    # The actor's float32, and the reference's and the engine's bfloat16.
    assert {terms.weights for terms in phases.values()} == {(4 + 2 + 2) * PARAMETERS}
    assert {terms.optimiser for terms in phases.values()} == {8 * PARAMETERS}
    assert phases["actor update"].gradients == 4 * PARAMETERS
    assert phases["checkpoint"].copies == 12 * PARAMETERS
    assert all(phases[name].gradients == 0 for name in phases if name != "actor update")


@pytest.mark.seconds
def test_a_full_micro_batch_is_planned_whatever_the_number_of_rows(shape: Path) -> None:
    def update(*overrides: str) -> int:
        plan = planner(shape, f"{ACTOR}.use_prefix_grouper=false", *overrides)
        return plan.phases(0)["actor update"].activations

    budget = f"{ACTOR}.ppo_max_token_len_per_gpu=64"
    assert update(budget, "data.train_batch_size=8") == update(budget, "data.train_batch_size=64")
    assert update(budget) < update(f"{ACTOR}.ppo_max_token_len_per_gpu=128")
    long = ["data.max_response_length=504", f"{ACTOR}.ppo_max_token_len_per_gpu=2048"]
    whole = update(*long, "actor_rollout_ref.model.enable_gradient_checkpointing=false")
    # One of two layers is held at a time.
    assert 1.5 * update(*long) < whole


@pytest.mark.seconds
def test_logits_of_a_wide_vocabulary_are_seen(tmp_path: Path) -> None:
    LlamaConfig(**SHAPE | {"vocab_size": 50000}).save_pretrained(tmp_path)
    plan = planner(tmp_path, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")
    # 4 rows of 8 sampled tokens in bfloat16, and what a block of rows takes in float32.
    logits = 4 * 8 * 50000 * 2
    assert logits <= plan.phases(0)["log-probs"].logits <= logits + 4 * (1 << 20) * 4


@pytest.mark.seconds
def test_the_cache_of_the_hf_engine_holds_every_row(shape: Path) -> None:
    # 8 rows of 507 tokens (the last one sampled is not read), keys and values of 2 heads of 8
    # numbers, two layers; and a layer's copies, for its 4 queries' heads.
    cache = 8 * 507 * 2 * 2 * 8 * 2 * 2
    planned = planner(shape, "data.max_response_length=500").phases(0)["generation"].kv_cache
    assert cache <= planned <= 2.6 * cache


@pytest.mark.seconds
def test_an_engine_on_cuda_takes_its_part_of_the_device_and_sleeps(shape: Path) -> None:
    vllm = ["actor_rollout_ref.rollout.name=vllm", "trainer.device=cuda"]
    quarter = planner(shape, *vllm, "actor_rollout_ref.rollout.gpu_memory_utilization=0.25")
    phases = quarter.phases(80 * GIB)
    engine = 2 * PARAMETERS
    assert phases["generation"].kv_cache == 20 * GIB - engine
    assert phases["generation"].weights == phases["weight sync"].weights == 4 * PARAMETERS + engine
    assert phases["actor update"].weights == 4 * PARAMETERS
    assert not phases["actor update"].kv_cache
    assert not phases["checkpoint"].copies
    awake = planner(shape, *vllm, "actor_rollout_ref.rollout.free_cache_engine=false")
    assert awake.phases(80 * GIB)["actor update"].kv_cache == 40 * GIB - engine


@pytest.mark.seconds
def test_what_is_offloaded_is_on_the_device_only_where_it_is_used(shape: Path) -> None:
    cuda = ["trainer.device=cuda", "actor_rollout_ref.rollout.name=vllm"]
    offload = [f"{ACTOR}.fsdp_config.{what}_offload=true" for what in ("param", "optimizer")]
    phases = planner(shape, *cuda, *offload, "algorithm.adv_estimator=gae").phases(80 * GIB)
    critic = 4 * (PARAMETERS - 96 * 32 + 32 + 1)
    assert phases["values"].weights == critic
    assert phases["log-probs"].weights == phases["actor update"].weights == critic + 4 * PARAMETERS
    assert phases["values"].optimiser == phases["log-probs"].optimiser == 2 * critic
    assert phases["actor update"].optimiser == 2 * critic + 8 * PARAMETERS


@pytest.mark.seconds
def test_several_ranks_share_weights_and_gather_blocks(shape: Path) -> None:
    two_ranks = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.name=vllm"]
    phases = planner(shape, *two_ranks).phases(0)
    assert phases["checkpoint"].optimiser == phases["log-probs"].optimiser == 8 * PARAMETERS // 2
    assert phases["actor update"].gradients == 4 * PARAMETERS // 2
    # A norm counts with the blocks.
    outer = 2 * 96 * 32
    block = LAYER + 16
    assert phases["log-probs"].copies == 2 * (outer + 2 * block)
    assert phases["actor update"].copies == 2 * (outer + 2 * block) + 2 * (outer + 3 * block)


@pytest.mark.seconds
def test_ranks_that_share_sequences_share_activations(shape: Path) -> None:
    four_ranks = [
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.name=vllm",
        "data.train_batch_size=64",
        f"{ACTOR}.ppo_max_token_len_per_gpu=128",
    ]
    alone = planner(shape, *four_ranks).phases(0)
    in_pairs = planner(shape, *four_ranks, f"{ACTOR}.ulysses_sequence_parallel_size=2").phases(0)
    for phase in ("log-probs", "actor update"):
        assert in_pairs[phase].activations == alone[phase].activations // 2
        assert in_pairs[phase].copies == alone[phase].copies


@pytest.mark.seconds
def test_a_reward_model_counts(shape: Path, tmp_path: Path) -> None:
    LlamaConfig(**SHAPE, num_labels=1).save_pretrained(tmp_path / "scorer")
    scorer = ["reward_model.enable=true", f"reward_model.model.path={tmp_path / 'scorer'}"]
    without = planner(shape).phases(0)["log-probs"].weights
    added = planner(shape, *scorer).phases(0)["log-probs"].weights - without
    assert 0 <= added - 2 * (PARAMETERS - 96 * 32 + 32) <= 4


@pytest.mark.seconds
def test_critic_and_reference_that_are_offloaded_are_planned(shape: Path) -> None:
    settings = [
        "trainer.device=cuda",
        "actor_rollout_ref.rollout.name=vllm",
        "algorithm.adv_estimator=gae",
    ]
    for model in (ACTOR, "critic"):
        settings.append(f"{model}.fsdp_config.param_offload=true")
        settings.append(f"{model}.fsdp_config.optimizer_offload=true")
    phases = planner(shape, *settings).phases(80 * GIB)
    assert phases["critic update"].weights == 4 * (PARAMETERS - 96 * 32 + 32 + 1)
    assert phases["checkpoint"].weights == phases["checkpoint"].optimiser == 0


@pytest.mark.seconds
def test_of_adapters_alone_there_are_gradients_and_moments(shape: Path) -> None:
    lora = "actor_rollout_ref.model.lora_rank=2"
    phases = planner(shape, lora, f"{ACTOR}.use_kl_loss=true").phases(0)
    # Rank 2 for q, k, v, o, gate, up and down of two layers; in and out of each count.
    adapters = 2 * 2 * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 64) * 3)
    assert "reference" not in phases
    engine = 2 * PARAMETERS
    weights = {terms.weights for terms in phases.values()}
    assert weights == {2 * PARAMETERS + 4 * adapters + engine}
    assert phases["actor update"].optimiser == 8 * adapters
    assert phases["actor update"].gradients == 4 * adapters
    assert phases["checkpoint"].copies == 12 * adapters
    two_ranks = planner(shape, lora, "trainer.n_gpus_per_node=2").phases(0)
    assert two_ranks["actor update"].optimiser == 4 * adapters


@pytest.mark.seconds
def test_engines_with_ranks_of_their_own_have_generation_to_themselves(shape: Path) -> None:
    apart = [
        "trainer.rollout_n_gpus=2",
        "trainer.device=cuda",
        "actor_rollout_ref.rollout.name=vllm",
    ]
    phases = planner(shape, *apart).phases(80 * GIB)
    engine = 2 * PARAMETERS
    assert phases["generation"] == MemoryTerms(weights=engine, kv_cache=40 * GIB - engine)
    assert phases["weight sync"].weights == phases["actor update"].weights == 4 * PARAMETERS
    assert not any(phases[name].kv_cache for name in phases if name != "generation")


@pytest.mark.seconds
def test_values_of_the_policys_own_model_are_planned_with_it(shape: Path) -> None:
    phases = planner(shape, "algorithm.adv_estimator=gae", "critic.share_backbone=true").phases(0)
    assert "values" not in phases
    assert phases["actor update"].optimiser == 8 * (PARAMETERS + 32)


@pytest.mark.long
def test_a_7b_model_is_planned_in_seconds_without_its_memory_or_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    }
    LlamaConfig(**SHAPE | wide).save_pretrained(tmp_path)
    settings = [
        f"actor_rollout_ref.model.path={tmp_path}",
        "trainer.device=cuda",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.25",
        "data.train_files=none.parquet",
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    assert main([*settings, "--plan"]) == 0
    assert time.process_time() - start < 40
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20
    printed = capsys.readouterr().out
    # Weights, gradients and AdamW take 16 bytes a parameter.
    update = next(line for line in printed.splitlines() if "actor update" in line).split()
    assert sum(map(float, update[2:5])) == pytest.approx(16 * 6.738e9 / GIB, rel=1e-3)
    assert "96 GiB: NO, 141 GiB: yes" in printed and "less with" in printed
    assert "a step: 1,024 prompts x 1 = 1,024 rows of at most 1,024 tokens" in printed


@pytest.mark.seconds
def test_a_tiny_models_plan_is_in_mebibytes(shape: Path) -> None:
    plan = planner(shape)
    phases = {80: plan.phases(80 * GIB)}
    printed = write_table(phases, model_path="tiny", num_ranks=1).splitlines()
    assert printed[0] == "tiny: MiB on each of 1 rank(s), of 80 GiB"
    largest = max(terms.total() for terms in phases[80].values())
    assert f", {largest / 2**20:.2f} MiB; does it fit? 80 GiB: yes" in printed[-1]
    assert largest / 2**20 > 0.1


def test_what_cannot_be_planned_is_said(shape: Path, capsys: pytest.CaptureFixture[str]) -> None:
    indivisible = ["data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=4"]
    assert main([f"actor_rollout_ref.model.path={shape}", *indivisible, "--plan"]) == 2
    assert "no plan can be made: a batch of 6 rows" in capsys.readouterr().err
    assert main(["data.sed=3", "--plan"]) == 2
    assert "there is no such key" in capsys.readouterr().err


@pytest.mark.seconds
def test_fake_tensors_leave_a_spec_as_it_was(shape: Path) -> None:
    """The planner's models are fake while it builds them alone."""
    model = planner(shape).config.actor_rollout_ref.model
    spec = ModelSpec(model, str(shape), torch.device("cpu"))
    lm = spec.empty_causal_lm(torch.float32)
    assert type(next(lm.parameters()).data) is torch.Tensor


def test_sizes_are_told_in_words() -> None:
    settings = [
        "data.train_batch_size=64",
        "actor_rollout_ref.rollout.n=8",
        f"{ACTOR}.ppo_mini_batch_size=16",
        "data.max_response_length=1024",
        "trainer.n_gpus_per_node=8",
        "algorithm.adv_estimator=grpo",
    ]
    assert sizes(load_config(settings, check=False).config) == (
        "a step: 64 prompts x 8 = 512 rows of at most 1,536 tokens (786,432 tokens)\n"
        "policy: 4 update(s) a step, of 128 rows each; of these 16 on each of 8 rank(s)"
    )
    with_critic = [*settings, "algorithm.adv_estimator=gae", "critic.ppo_epochs=2"]
    lines = sizes(load_config(with_critic, check=False).config).splitlines()
    assert lines[2].startswith("critic: 8 update(s) a step, of 128")


@pytest.mark.seconds
def test_the_reader_of_every_setting_names_it() -> None:
    reads = attribute_reads()
    for key, _ in leaves(PPOConfig()):
        assert re.search(
            rf"\b{key.split('.')[-1]}\b", (PROJECT / reader(key, reads)).read_text()
        ), key
    expected = {
        "algorithm.kl_ctrl.horizon": "training/core_algos/kl.py",
        f"{ACTOR}.entropy_coeff": "workers/dp_actor.py",
        f"{ACTOR}.loss_agg_mode": "training/core_algos/loss_inputs.py",
        "critic.fsdp_config.param_offload": "workers/ranks/offload.py",
        "data.truncation": "data/prompt_rows.py",
        "reward_model.overlong_buffer.log": "custom/reward_managers/naive.py",
        "trainer.save_freq": "training/run/checkpoint.py",
    }
    assert {key: reader(key, reads) for key in expected} == expected
