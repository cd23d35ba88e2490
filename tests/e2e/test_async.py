"""Engines with ranks of their own: at level 0 they give the colocated numbers.

Above it: what is sampled ahead, its age, and what a run that is cut off goes on with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data.protocol import DataProto
from tests.e2e.test_agents import GRPO, fit, game_config, playing
from tests.e2e.test_ray import assert_same_step, numbers
from tests.e2e.test_resume import tensors
from tests.unit.test_rollout import build_engine, encode, model_spec, perturb
from training.config.loader import ConfigError
from workers.rollout.engine import Sampling
from workers.weight_sync.manifest import iter_weights, weight_manifest

pytest.importorskip("ray")
HF = ("actor_rollout_ref.rollout.name=hf", "trainer.launcher=ray")
SPLIT = ("actor_rollout_ref.rollout.name=hf", "trainer.rollout_n_gpus=1")
FIXED = (*GRPO, "trainer.deterministic=true")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in step.items() if "seconds" not in name}
        for step in numbers(run_dir)
    ]


def cut(trainer: Any) -> None:
    """Has the trainer fail at the end of its third step."""

    def stop(told: dict[str, float]) -> None:
        if told["training/global_step"] == 3:
            trainer.saver.poll(wait=True)
            raise RuntimeError("cut off")

    trainer.on_step = stop


@pytest.mark.long
def test_engines_of_their_own_give_the_numbers_of_colocated_ones(
    cluster: None,
    tiny_game: Path,
    tmp_path: Path,
) -> None:
    three = (*FIXED, "trainer.total_training_steps=3")
    fit(game_config(tiny_game, tmp_path / "one", *three, *HF))
    fit(game_config(tiny_game, tmp_path / "two", *three, *SPLIT))
    # They have half the threads each, which sum in another order.
    for one, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert_same_step(one, other)


@pytest.mark.long
def test_a_run_one_step_ahead_that_was_cut_off_ends_bitwise_as_one_that_was_not(
    cluster: None,
    tiny_game: Path,
    tmp_path: Path,
) -> None:
    own = (
        *FIXED,
        *SPLIT,
        "trainer.async_level=1",
        "trainer.save_freq=2",
        "trainer.total_training_steps=4",
    )
    _, whole = fit(game_config(tiny_game, tmp_path / "whole", *own))

    with pytest.raises(RuntimeError, match="cut off"):
        fit(game_config(tiny_game, tmp_path / "cut", *own), cut)
    # Step 3 was generated with the weights of step 1, which no checkpoint holds any more: it goes
    # with the checkpoint.
    held = [*(tmp_path / "cut/global_step_2/in_flight").glob("*.pt")]
    assert len(held) == 1 and DataProto.load_from_disk(held[0]).batch["weight_versions"].max() == 1
    _, resumed = fit(game_config(tiny_game, tmp_path / "cut", *own))
    assert [batch.meta_info["global_steps"] for batch in resumed] == [3, 4]
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    for step, batch in zip(whole[2:], resumed, strict=True):
        assert torch.equal(step.batch["responses"], batch.batch["responses"])
        assert torch.equal(step.batch["advantages"], batch.batch["advantages"])
    for part in ("model", "optimizer"):
        one, other = (
            tensors(tmp_path / name / "global_step_4/actor" / part) for name in ("whole", "cut")
        )
        assert one.keys() == other.keys() and all(
            torch.equal(one[name], other[name]) for name in one
        )


@pytest.mark.long
@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_token_is_older_than_the_bound_and_no_row_is_lost_or_comes_twice(
    cluster: None,
    tiny_game: Path,
    tmp_path: Path,
    level: int,
) -> None:
    own = (*GRPO, *SPLIT, f"trainer.async_level={level}", "trainer.total_training_steps=5")
    own += ("actor_rollout_ref.actor.ppo_mini_batch_size=8",)
    trainer, batches = fit(game_config(tiny_game, tmp_path, *own))
    assert trainer.config.algorithm.rollout_correction.rollout_is == "token"
    for step, batch in enumerate(batches, start=1):
        mask, versions = batch.batch["response_mask"].bool(), batch.batch["weight_versions"]
        age = (step - 1 - versions)[mask]
        assert (
            age.min() >= 0 and age.max() <= min(level, step - 1) and (versions[~mask] == -1).all()
        )
        assert {uid.split(".")[0] for uid in batch.non_tensor_batch["uid"]} == {str(step)}
        assert "old_log_probs" not in batch.batch and len(set(batch.non_tensor_batch["uid"])) == 8
    steps = metrics(tmp_path)
    assert [step["agent/episodes"] for step in steps] == [32] * 5
    assert max(step["async/staleness_max"] for step in steps) >= 1
    assert all(
        step["async/dropped_groups"] == 0 and step["canary/difference"] < 1e-4 for step in steps
    )
    assert all(step["rollout_corr/rollout_is_mean"] > 0.5 for step in steps)


@pytest.mark.slow
def test_groups_older_than_the_bound_are_masked_and_counted(
    cluster: None,
    tiny_game: Path,
    tmp_path: Path,
) -> None:
    """A run at level 2 goes on at level 0: what it had sampled ahead is too old by then."""
    own = (*FIXED, *SPLIT, "trainer.save_freq=2")
    steps = ("trainer.async_level=2", "trainer.total_training_steps=6")

    with pytest.raises(RuntimeError, match="cut off"):
        fit(game_config(tiny_game, tmp_path, *own, *steps), cut)
    _, batches = fit(
        game_config(
            tiny_game, tmp_path, *own, "trainer.async_level=1", "trainer.total_training_steps=5"
        )
    )
    masked = [not batch.batch["response_mask"].any() for batch in batches]
    dropped = [step["async/dropped_groups"] for step in metrics(tmp_path)[2:]]
    assert dropped[0] == 8 and masked[0] and dropped[-1] == 0 and not masked[-1]


@pytest.mark.vllm
def test_running_requests_go_on_with_new_weights_and_say_which_sampled_each_token(
    tiny_game: Path,
) -> None:
    pytest.importorskip("vllm")
    spec = model_spec(tiny_game / "model")
    engine, lm = build_engine("vllm", spec), spec.causal_lm(trainable=True).eval()
    old = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    prompts = encode(spec)
    for number, ids in enumerate(prompts):
        engine.submit(str(number), ids, Sampling(max_tokens=12, seed=number))
    done = [completion for _ in range(4) for completion in engine.step()]
    assert not done
    perturb(lm, 3)
    engine.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
    engine.set_version(7)
    # Scoring in between loses no answer.
    engine.score([[1, 2, 3]])
    while len(done) < len(prompts):
        done += engine.step()
    for completion in done:
        (first, start, switch), (second, _, end) = completion.versions
        assert (first, second, start, end) == (0, 7, 0, 12) and 0 < switch < 12
        ids = torch.tensor([prompts[int(completion.request_id)] + completion.token_ids])
        expected = []
        for weights, span in ((old, slice(0, switch)), (lm.state_dict(), slice(switch, end))):
            reader = spec.causal_lm(trainable=True).eval()
            reader.load_state_dict(weights)
            logits = reader(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[-12:, 0]
            expected += logits[span].tolist()
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.long
def test_episodes_are_finished_first_where_weights_may_not_reach_them(
    cluster: None,
    tiny_game: Path,
    tmp_path: Path,
) -> None:
    own = (
        *GRPO,
        *SPLIT,
        "trainer.async_level=1",
        "actor_rollout_ref.rollout.update_in_flight=false",
    )
    _, batches = fit(
        game_config(tiny_game, tmp_path, *own, *playing("Steady"), "trainer.total_training_steps=4")
    )
    for batch in batches:
        for versions, mask in zip(
            batch.batch["weight_versions"], batch.batch["response_mask"].bool(), strict=True
        ):
            assert len(set(versions[mask].tolist())) <= 1


def test_settings_that_cannot_be_are_refused(tiny_game: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.async_level=1 .* set trainer\.rollout_n_gpus"):
        game_config(tiny_game, tmp_path, *GRPO, "trainer.async_level=1")
    with pytest.raises(ConfigError, match=r"trainer\.rollout_n_gpus=3 must be a multiple"):
        game_config(
            tiny_game, tmp_path, *GRPO, "trainer.n_gpus_per_node=2", "trainer.rollout_n_gpus=3"
        )
    with pytest.raises(ConfigError, match=r"trainer\.launcher=local"):
        game_config(
            tiny_game, tmp_path, *GRPO, "trainer.launcher=local", "trainer.rollout_n_gpus=1"
        )
