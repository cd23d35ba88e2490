"""Tests that the values of verl's launch scripts load, one by one, and some scripts as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.helpers import ACTOR, ROLLOUT, load
from training.config import MicroBatching
from training.config.loader import ConfigError

# Values that launch scripts of several versions of verl set, beside sizes, paths and its defaults.
PAIRS = (Path(__file__).parent / "verl_scripts.txt").read_text().splitlines()


@pytest.mark.seconds
def test_every_value_that_verls_scripts_set_loads() -> None:
    refused = []
    for pair in PAIRS:
        try:
            load(pair)
        except ConfigError as error:
            refused += error.problems
    assert len(PAIRS) > 100 and refused == []


GSM8K = [
    *("data.train_files=/data/gsm8k/train.parquet", "data.val_files=/data/gsm8k/test.parquet"),
    *("data.train_batch_size=1024", "data.max_prompt_length=512", "data.max_response_length=1024"),
    *("data.filter_overlong_prompts=True", "data.truncation='error'"),
    *(
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    ),
    *(
        f"{ACTOR}.optim.lr=1e-6",
        f"{ACTOR}.ppo_mini_batch_size=256",
        f"{ACTOR}.fsdp_config.param_offload=False",
    ),
    *(
        f"{ACTOR}.fsdp_config.optimizer_offload=False",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ),
    *(
        f"{ROLLOUT}.gpu_memory_utilization=0.6",
        "trainer.critic_warmup=0",
        'trainer.logger=["console","wandb"]',
    ),
    *(
        "trainer.n_gpus_per_node=8",
        "trainer.nnodes=1",
        "trainer.save_freq=20",
        "trainer.test_freq=5",
    ),
    *("trainer.total_epochs=15", "trainer.project_name='gsm8k'", "trainer.experiment_name='run_1'"),
]


KL_LOSS = [
    *(
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.001",
        f"{ACTOR}.kl_loss_type=low_var_kl",
    ),
    *(f"{ACTOR}.entropy_coeff=0", "actor_rollout_ref.ref.fsdp_config.param_offload=True"),
]


def test_verl_script_grpo_on_gsm8k_loads() -> None:
    config = load(
        *GSM8K,
        *KL_LOSS,
        *(
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct",
            f"{ROLLOUT}.n=5",
        ),
        *(
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=32",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
        ),
        *(
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
            "algorithm.use_kl_in_reward=False",
        ),
    )
    policy = config.actor_rollout_ref
    assert (
        policy.actor.micro_batching
        == policy.ref_micro_batching
        == MicroBatching(micro_batch_size=32)
    )
    assert (config.need_critic, config.need_reference, config.trainer.num_ranks) == (False, True, 8)
    assert config.trainer.use_ray


def test_verl_script_grpo_with_dynamic_batches_loads() -> None:
    config = load(
        *GSM8K,
        *KL_LOSS,
        *(
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct",
            f"{ROLLOUT}.n=5",
        ),
        *(
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ACTOR}.ppo_max_token_len_per_gpu=24000",
            "data.return_raw_chat=True",
        ),
        *(
            "actor_rollout_ref.hybrid_engine=True",
            f"{ACTOR}.use_torch_compile=False",
            "trainer.val_before_train=False",
        ),
        f"{ACTOR}.ppo_micro_batch_size=128",
    )
    assert config.actor_rollout_ref.log_prob_micro_batching == MicroBatching(max_token_len=24000)
    assert config.data.return_raw_chat


def test_verl_script_ppo_with_a_critic_loads() -> None:
    config = load(
        *GSM8K,
        *(
            "algorithm.adv_estimator=gae",
            "actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat",
        ),
        *(
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32",
        ),
        *(
            "critic.optim.lr=1e-5",
            "critic.model.use_remove_padding=True",
            "critic.ppo_micro_batch_size_per_gpu=32",
        ),
        *(
            "critic.model.path=deepseek-ai/deepseek-llm-7b-chat",
            "critic.model.enable_gradient_checkpointing=True",
        ),
        *(
            "critic.model.fsdp_config.param_offload=False",
            "critic.model.fsdp_config.optimizer_offload=False",
        ),
        *("trainer.use_legacy_worker_impl=False", "trainer.total_training_steps=2"),
    )
    assert (config.need_critic, config.need_reference) == (True, False)
    assert config.critic.micro_batching == MicroBatching(micro_batch_size=32)


def test_verl_script_ppo_with_kl_in_the_reward_and_sequence_balance_loads() -> None:
    config = load(
        *GSM8K,
        *(
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=True",
            "algorithm.kl_penalty=kl",
        ),
        *(
            "algorithm.kl_ctrl.kl_coef=0.001",
            "algorithm.kl_ctrl.type=adaptive",
            "trainer.balance_batch=True",
        ),
        *("actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct", f"{ACTOR}.use_dynamic_bsz=True"),
        *("critic.model.path=Qwen/Qwen2-7B-Instruct", "critic.ppo_max_token_len_per_gpu=98304"),
        *(
            "critic.forward_max_token_len_per_gpu=98304",
            "critic.use_dynamic_bsz=True",
            "data.val_batch_size=1312",
        ),
        *(
            "+trainer.val_before_train=False",
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=65536",
        ),
    )
    assert config.need_reference
    assert config.actor_rollout_ref.ref_micro_batching == MicroBatching(max_token_len=65536)
    assert config.critic.micro_batching == MicroBatching(max_token_len=98304)
    assert not config.trainer.val_before_train


def test_verl_script_grpo_with_several_files_and_trackers_loads() -> None:
    config = load(
        *GSM8K,
        *KL_LOSS,
        "data.train_files=['/data/gsm8k/train.parquet', '/data/math/train.parquet']",
        "data.val_files=['/data/gsm8k/test.parquet', '/data/math/test.parquet']",
        *(
            "algorithm.adv_estimator=grpo",
            "trainer.logger=['console','wandb','tensorboard']",
            f"{ACTOR}.strategy=fsdp",
        ),
        *(
            "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B",
            f"{ROLLOUT}.mode=sync",
            f"{ACTOR}.clip_ratio_high=0.28",
        ),
        *(
            f"{ROLLOUT}.val_kwargs.do_sample=True",
            f"{ROLLOUT}.val_kwargs.n=16",
            f"{ROLLOUT}.val_kwargs.top_p=0.7",
        ),
        *(
            f"{ROLLOUT}.val_kwargs.temperature=1.0",
            f"{ROLLOUT}.load_format=safetensors",
            f"{ROLLOUT}.n=8",
        ),
        *(
            f"{ROLLOUT}.layered_summon=True",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
            "trainer.device=cuda",
        ),
        *(f"{ACTOR}.checkpoint.save_contents=['model','hf_model']", "trainer.resume_mode=disable"),
    )
    assert len(config.data.val_files) == 2
    assert config.actor_rollout_ref.rollout.val_kwargs.n == 16
    assert config.actor_rollout_ref.actor.checkpoint.save_contents == ("model", "hf_model")


@pytest.mark.parametrize(
    ("override", "word"),
    [
        (f"{ACTOR}.tis_imp_ratio_cap=2.0", "rollout_correction.rollout_is=token"),
        ("actor_rollout_ref.model.freeze_vision_tower=True", "models read text alone"),
        (f"{ACTOR}.veomni.param_offload=True", "models run with FSDP2 alone"),
        (f"{ACTOR}.torchtitan.tensor_parallel_size=2", "models run with FSDP2 alone"),
        ("reward_model.sandbox_fusion.url=http://host", "ask yours in your reward function"),
    ],
)
def test_a_key_of_a_script_that_means_nothing_here_is_refused_with_our_word(
    override: str, word: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(override)
    [problem] = refused.value.problems
    assert word in problem and "Did you mean" not in problem and "no such key" not in problem


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.tis_imp_ratio_cap=-1",
        f"{ACTOR}.veomni.param_offload=False",
        "trainer.profile_steps=[1,2]",
        f"{ROLLOUT}.tp_size_check=False",
        "model_path=Qwen/Qwen2.5-3B",
    ],
)
def test_a_key_of_a_script_that_changes_nothing_or_has_another_name_loads(override: str) -> None:
    load(override)
