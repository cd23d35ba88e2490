"""LoRA in whole runs: engines have the policy, in both forms; the reference is the base.

Resume is exact; it learns.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from data.protocol import DataProto
from examples.prepare_tiny_prompts import make_model, make_tokenizer, warm_up
from tests.e2e.test_resume import tensors
from tests.e2e.test_training import read_steps, tiny_config
from training.building import build_trainer
from training.ray_trainer import RayPPOTrainer
from workers.dp_actor import DataParallelPPOActor

pytest.importorskip("peft")
LORA = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.lora_alpha=8",
    "algorithm.adv_estimator=grpo",
)
LORA += ("actor_rollout_ref.rollout.n=4", "data.val_files=null", "trainer.deterministic=true")
FORMS: list[Any] = [("hf", False)]
FORMS += [pytest.param(("vllm", adapter), marks=pytest.mark.vllm) for adapter in (False, True)]


def train(config: Any) -> tuple[RayPPOTrainer, list[DataProto]]:
    """Runs; returns the trainer and each step's batch."""
    trainer, batches = build_trainer(config), list[DataProto]()
    trainer.on_batch = batches.append  # type: ignore[method-assign]
    trainer.init_workers()
    trainer.fit()
    return trainer, batches


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_engine_and_trainer_agree_and_the_reference_is_the_base(
    tiny_task: Path, tmp_path: Path, form: Any
) -> None:
    engine, adapter = form
    if engine == "vllm":
        pytest.importorskip("vllm")
    own = (
        *LORA,
        f"actor_rollout_ref.rollout.name={engine}",
        f"actor_rollout_ref.rollout.lora_as_adapter={adapter}",
    )
    own += ("trainer.total_training_steps=3", "actor_rollout_ref.actor.use_kl_loss=true")
    trainer, batches = train(tiny_config(tiny_task, tmp_path, *own))
    worker: Any = trainer.actor_rollout_wg.worker
    assert worker.ref.actor_module is worker.actor.actor_module, "no second copy in memory"
    for step in read_steps(tmp_path):
        assert step["training/rollout_probs_diff_max"] < 1e-4
        assert step["canary/difference"] < 1e-4 and step["canary/lag"] < 1e-4
        assert min(step["canary/engine_moved"], step["canary/actor_moved"]) > 1e-3
    assert [step["actor/kl_loss"] > 1e-6 for step in read_steps(tmp_path)][1:] == [True, True]
    base = AutoModelForCausalLM.from_pretrained(tiny_task / "model", dtype=torch.float32).eval()
    reader = DataParallelPPOActor(worker.policy.actor, base)
    for batch in batches:
        expected, _ = reader.compute_log_prob(batch.select(meta_info_keys=[]))
        torch.testing.assert_close(batch.batch["ref_log_prob"], expected, atol=1e-5, rtol=0)
    held, weights = dict(worker.module.state_dict()), base.state_dict()
    for name in weights:
        own_name = name if name in held else name.replace(".weight", ".base_layer.weight")
        assert torch.equal(held[own_name], weights[name])
    if adapter:
        assert worker.rollout.engine.list_loras() == {4}, (
            "one of its own for the start and each of three steps"
        )


def test_a_run_goes_on_bitwise_and_exports_both_forms(tiny_task: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    common = (
        *LORA,
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "algorithm.use_kl_in_reward=true",
    )
    common += ("actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",)
    trainer, _ = train(tiny_config(tiny_task, tmp_path / "whole", *common))
    last = tmp_path / "whole/global_step_3/actor"
    again = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/whole/global_step_2",
    )
    train(tiny_config(tiny_task, tmp_path / "again", *common, *again))
    for part in ("model", "optimizer"):
        one, other = tensors(last / part), tensors(tmp_path / "again/global_step_3/actor" / part)
        assert one.keys() == other.keys() and all(".ppo_core." in name for name in one)
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    ids = torch.tensor([[1, 5, 8, 16, 9, 20, 2, 1, 6]])
    base = AutoModelForCausalLM.from_pretrained(tiny_task / "model", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(last / "huggingface", dtype=torch.float32)
    with torch.no_grad():
        plain = base(ids).logits
        expected = trainer.actor_rollout_wg.worker.module.eval()(ids).logits
        assert torch.equal(PeftModel.from_pretrained(base, last / "adapter")(ids).logits, expected)
        torch.testing.assert_close(
            merged(ids).logits, expected, atol=0.1, rtol=0.05
        )  # bfloat16 weights
        assert (plain - expected).abs().max() > 0.05


@pytest.fixture(scope="module")
def warm_task(tiny_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny task with a model that knows its words.

    With head and embedding frozen no other learns it so soon.
    """
    folder = tmp_path_factory.mktemp("warm")
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, tokenizer, random.Random(0))
    for made in (model, tokenizer):
        made.save_pretrained(folder / "model")
    for name in ("train", "val"):
        (folder / f"{name}.parquet").symlink_to(tiny_task / f"{name}.parquet")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("shares", [False, True])
def test_adapters_learn_the_task(warm_task: Path, tmp_path: Path, shares: bool) -> None:
    own = (
        "actor_rollout_ref.model.lora_rank=8",
        f"critic.share_backbone={shares}",
        "data.val_files=null",
    )
    own += (
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "data.seed=2",
    )
    own += ("actor_rollout_ref.actor.optim.lr=5e-3", "trainer.total_training_steps=18")
    train(tiny_config(warm_task, tmp_path, *own))
    scores = [step["critic/score/mean"] for step in read_steps(tmp_path)]
    assert sum(scores[-6:]) / 6 > scores[0] + 0.1, scores
