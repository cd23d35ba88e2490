"""Policy and values in one model: trained, saved, resumed, sent to the engine and exported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.test_resume import tensors
from tests.e2e.test_training import ENGINES, read_steps, tiny_config, train

SHARED = (
    "algorithm.adv_estimator=gae",
    "critic.share_backbone=true",
    "trainer.val_before_train=false",
)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_model_trains_both_goes_on_bitwise_and_gives_the_engine_its_policy(
    tiny_task, tmp_path, engine
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    common = (
        *SHARED,
        f"actor_rollout_ref.rollout.name={engine}",
        "trainer.deterministic=true",
        "data.val_files=null",
    )
    common += ("trainer.total_training_steps=3", "trainer.save_freq=1")
    common += ("actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",)
    trainer = train(tiny_config(tiny_task, tmp_path / "whole", *common))
    assert trainer.critic_wg is None and [*trainer.saver.groups] == ["actor"]
    steps = read_steps(tmp_path / "whole")
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4, (
            "the engine has the policy as it was updated"
        )
        assert step["actor/first_update_diff"] < 1e-5
        assert {
            "critic/vf_loss",
            "critic/vpred_mean",
            "critic/values/mean",
            "critic/vf_explained_var",
        } <= step.keys()
        assert (
            not {"critic/lr", "critic/grad_norm", "timing_s/values", "timing_s/update_critic"}
            & step.keys()
        )
    assert steps[0]["critic/values/max"] == steps[0]["critic/values/min"] == 0, (
        "a head begins at zero"
    )
    assert abs(steps[2]["critic/values/mean"]) > 1e-3

    last = tmp_path / "whole/global_step_3/actor"
    again = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/whole/global_step_2",
    )
    train(tiny_config(tiny_task, tmp_path / "again", *common, *again))
    for part in ("model", "optimizer"):
        one, other = tensors(last / part), tensors(tmp_path / "again/global_step_3/actor" / part)
        assert one.keys() == other.keys() and any("value_head.weight" in name for name in one)
        assert [name for name in one if not torch.equal(one[name], other[name])] == []

    exported, info = AutoModelForCausalLM.from_pretrained(
        last / "huggingface", dtype=torch.float32, output_loading_info=True
    )
    assert not (info["missing_keys"] or info["unexpected_keys"])
    ids = torch.tensor([[1, 5, 8, 16, 9, 20, 2, 1, 6]])
    with torch.no_grad():
        expected = trainer.actor_rollout_wg.worker.module.lm.eval()(ids).logits
        torch.testing.assert_close(
            exported(ids).logits, expected, atol=0.1, rtol=0.05
        )  # bfloat16 weights


@pytest.mark.parametrize("correction", ["none", "bypass"])
def test_a_pass_that_would_be_left_out_is_made_for_its_values(
    tiny_task: Path, tmp_path: Path, correction: str
) -> None:
    one_update = (
        "actor_rollout_ref.actor.ppo_epochs=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    )
    bypass = (
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.rollout_is=token",
    )
    own = (*SHARED, *one_update, "data.val_files=null", *(bypass if correction == "bypass" else ()))
    trainer = train(tiny_config(tiny_task, tmp_path / "run", *own))
    assert trainer.phases.needs_old_log_probs()
    for step in read_steps(tmp_path / "run"):
        assert step["timing_s/old_log_prob"] > 0 and step["critic/vf_loss"] > 0


@pytest.mark.long
def test_one_model_learns_the_task_and_what_answers_are_worth(
    tiny_task: Path, tmp_path: Path
) -> None:
    own = (
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "data.val_files=null",
    )
    train(
        tiny_config(
            tiny_task,
            tmp_path / "run",
            *SHARED,
            *own,
            "trainer.total_training_steps=32",
            "data.seed=2",
        )
    )
    steps = read_steps(tmp_path / "run")
    for name, more in (("critic/score/mean", 0.1), ("critic/vf_explained_var", 0.1)):
        first, last = (sum(step[name] for step in some) / 8 for some in (steps[:8], steps[-8:]))
        assert last > first + more, (name, first, last)
