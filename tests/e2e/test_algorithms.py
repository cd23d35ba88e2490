"""Every estimator, policy loss and correction, chosen by the config, in a game on a tiny model."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from data.protocol import DataProto
from tests.cases import fast_and_long
from tests.e2e.test_agents import ACTOR, ROLLOUT, assert_finite, fit, game_config
from tests.e2e.test_agents import forgetful_game as forgetful_game
from tests.e2e.test_resume import tensors
from tests.e2e.test_training import read_steps, tiny_config
from training import core_algos as algos
from training.config.loader import ConfigError
from training.core_algos.built_in import ESTIMATOR_NEEDS
from training.core_algos.masked_ops import masked_mean
from workers.dp_actor import DataParallelPPOActor

PLAIN = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4")
SETTINGS = {
    "gdpo": ("algorithm.gdpo_reward_keys=[hit,form]",),
    "on_policy_distillation": ("algorithm.distillation_task=grpo",),
}


def run(task: Path, folder: Path, *overrides: str) -> tuple[Any, list[dict[str, Any]]]:
    trainer, batches = fit(game_config(task, folder, *PLAIN, *overrides))
    steps = read_steps(folder)
    assert_finite(trainer, steps)
    assert not trainer.observers.named["alarms"].broken_rules
    assert all(
        not batch.batch["advantages"][batch.batch["response_mask"] == 0].any() for batch in batches
    )
    return batches, steps


# What runs sample; continuations are not among it.
FROM_THE_CONFIG = {name for name, needs in ESTIMATOR_NEEDS.items() if "branch_returns" not in needs}


# Two have two names; gdpo wants kinds of reward.
@pytest.mark.parametrize(
    "name",
    fast_and_long(
        sorted(FROM_THE_CONFIG - {"gdpo", "grpo_vectorized", "rloo_vectorized"}),
        fast=["gae", "gigpo", "grpo", "on_policy_distillation", "remax", "rloo", "turn_gae"],
    ),
)
def test_every_estimator_runs_from_the_config(tiny_game: Path, tmp_path: Path, name: str) -> None:
    batches, steps = run(
        tiny_game, tmp_path, f"algorithm.adv_estimator={name}", *SETTINGS.get(name, ())
    )
    assert ("critic/vf_loss" in steps[-1]) == (name in ("gae", "turn_gae")), (
        "a critic follows from what is read"
    )
    assert any(batch.batch["advantages"].any() for batch in batches)


@pytest.mark.parametrize(
    "name",
    fast_and_long(
        sorted(algos.POLICY_LOSS_REGISTRY), fast=["vanilla", "gspo", "cispo", "bypass_mode"]
    ),
)
def test_every_loss_runs_from_the_config(tiny_game: Path, tmp_path: Path, name: str) -> None:
    chosen = [f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.policy_loss.dro_beta=0.1"]
    if name == "bypass_mode":
        chosen = [
            "algorithm.rollout_correction.bypass_mode=true",
            "algorithm.rollout_correction.loss_type=reinforce",
        ]
        chosen += ["algorithm.rollout_correction.rollout_is=token"]
    _, steps = run(
        tiny_game, tmp_path, *chosen, f"{ACTOR}.ppo_epochs=2", "trainer.total_training_steps=1"
    )
    assert max(step["actor/grad_norm"] for step in steps) > 0
    assert all(math.isfinite(step["actor/ppo_kl"]) for step in steps)
    # The engine's log-probs differ by right from later updates' policies.
    assert all(step["training/rollout_probs_diff_mean"] < 1e-4 for step in steps)
    assert not any("alarms/log_probs_differ" in step for step in steps)


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    "rejection",
    [(), (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=1.001")],
)
@pytest.mark.parametrize("level", fast_and_long(["token", "sequence"], fast=["sequence"]))
def test_corrections_weigh_and_reject_in_a_run(
    tiny_game: Path, tmp_path: Path, level: str, rejection: tuple
) -> None:
    noisy = (f"{ROLLOUT}.dtype=bfloat16", f"{CORRECTION}.rollout_is={level}", *rejection)
    noisy += (f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=1")
    batches, steps = run(tiny_game, tmp_path, *noisy)
    for step, batch in zip(steps, batches, strict=True):
        weights, mask = batch.batch.get("rollout_is_weights"), batch.batch["response_mask"]
        assert 0.9 < step["rollout_corr/rollout_is_mean"] < 1.1
        # Weights alone are the update's own.
        assert (weights is None) == (not rejection) and (
            weights is None or (weights[mask > 0] > 0).all()
        )
        assert step["training/rollout_ess"] == pytest.approx(1.0, abs=0.05)
        sampled = (batch.batch["turn_ids"] >= 0).sum().item()
        left_out = 1 - mask.sum().item() / sampled
        assert left_out == pytest.approx(
            step.get("rollout_corr/rollout_rs_masked_fraction", 0.0), abs=1e-4
        )
        assert (left_out > 0) == bool(rejection)
        scores = batch.batch["token_level_scores"]
        kept = mask.sum(1) > 0
        assert torch.equal(scores.sum(1)[kept], batch.batch["environment_rewards"].sum(1)[kept]), (
            "rewards stay"
        )
        assert not scores[mask == 0].any()
        assert 0.9 < step["training/rollout_ess"] <= 1
        assert (
            step["training/rollout_ratio_p01"]
            <= step["training/rollout_ratio_p50"]
            <= step["training/rollout_ratio_p99"]
        )


def test_what_engine_and_trainer_disagree_in_is_measured_in_every_step(
    tiny_game: Path, tmp_path: Path
) -> None:
    """A step of a single update measures it in the update, in parts that add up to the same."""
    once = (f"{ACTOR}.ppo_epochs=1", f"{ACTOR}.ppo_mini_batch_size=8", f"{ROLLOUT}.dtype=bfloat16")
    once += ("trainer.deterministic=true",)
    seen = {}
    for name, more in {"update": (), "pass": ("algorithm.use_kl_in_reward=true",)}.items():
        _, steps = run(tiny_game, tmp_path / name, *once, *more, "trainer.total_training_steps=1")
        assert ("actor/old_entropy" in steps[-1]) == (name == "pass")
        seen[name] = {
            key: value for key, value in steps[-1].items() if key.startswith("training/rollout_")
        }
    assert seen["update"] == pytest.approx(seen["pass"], rel=1e-3, abs=1e-6)
    assert len(seen["update"]) == 11


@pytest.mark.long
def test_a_teacher_of_the_same_vocabulary_is_distilled(tiny_game: Path, tmp_path: Path) -> None:
    chosen = ("algorithm.adv_estimator=on_policy_distillation", f"{ACTOR}.ppo_mini_batch_size=8")
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_game / "model", teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    model.save_pretrained(teacher)
    more = (
        f"actor_rollout_ref.ref.model.path={teacher}",
        f"{ACTOR}.optim.lr=1e-3",
        "trainer.total_training_steps=12",
    )
    batches, _ = run(
        tiny_game,
        tmp_path / "run",
        *chosen,
        *more,
        "data.train_batch_size=32",
        f"{ROLLOUT}.max_num_seqs=128",
    )
    distance = [
        masked_mean(
            batch.batch["old_log_probs"] - batch.batch["ref_log_prob"], batch.batch["response_mask"]
        ).item()
        for batch in batches
    ]
    assert sum(distance[-3:]) < 0.1 * sum(distance[:3]), distance
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(teacher)
    with pytest.raises(ValueError, match="has another vocabulary"):
        run(tiny_game, tmp_path / "other", *chosen, *more)


def test_predicting_observations_is_learnt_beside_the_policy(
    tiny_game: Path, tmp_path: Path
) -> None:
    coef = (
        "agent.observation_loss_coef=1.0",
        f"{ACTOR}.optim.lr=1e-2",
        "trainer.total_training_steps=6",
    )
    batches, steps = run(tiny_game, tmp_path, *coef)
    losses = [step["actor/observation_loss"] for step in steps]
    assert losses[-1] < 0.7 * losses[0], losses
    batch = batches[0].batch
    width = batch["responses"].shape[1]
    inside = batch["attention_mask"][:, -width:].bool()
    assert torch.equal(batch["observation_mask"].bool(), inside & (batch["response_mask"] == 0))


@pytest.mark.parametrize("counts", fast_and_long(["episodes", "rows"], fast=["episodes"]))
@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_episodes_of_several_rows_count_once(
    forgetful_game: Path, tmp_path: Path, mode: str, counts: str
) -> None:
    more = (
        f"{ACTOR}.loss_agg_mode={mode}",
        f"{ACTOR}.loss_agg_counts={counts}",
        "data.max_prompt_length=40",
    )
    batches, _ = run(forgetful_game, tmp_path, *more)
    for batch in batches:
        real = batch.drop_dummies()
        assert ("episode_share" in real.batch) == (counts == "episodes")
        if counts == "episodes":
            names = real.non_tensor_batch["episode_id"]
            whole = [real.batch["episode_share"][names == name].sum().item() for name in set(names)]
            assert whole == pytest.approx([1.0] * len(whole))


def test_gdpo_takes_the_kinds_of_reward_that_the_function_gives(
    tiny_task: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    length = float(len(solution_str))\n"
        "    return {'score': 1.0, 'hit': length % 2, 'form': length}\n"
    )
    kinds = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[hit,form]")
    function = (f"custom_reward_function.path={tmp_path}/mine.py", "trainer.val_before_train=false")
    _, batches = fit(tiny_config(tiny_task, tmp_path / "run", *PLAIN, *kinds, *function))
    for batch in batches:
        varied = len(set(batch.non_tensor_batch["reward_info/form"])) > 1
        assert bool(batch.batch["advantages"].any()) == varied, "the score itself never differs"
    with pytest.raises(ConfigError, match=r"gdpo needs algorithm\.gdpo_reward_keys"):
        tiny_config(tiny_task, tmp_path / "run", *PLAIN, kinds[0])


def test_an_estimators_state_goes_on_after_a_resume(tiny_game: Path, tmp_path: Path) -> None:
    chosen = ("algorithm.adv_estimator=rae", "trainer.deterministic=true", "trainer.save_freq=2")
    chosen += ("trainer.total_training_steps=4",)
    whole, _ = run(tiny_game, tmp_path / "whole", *chosen)
    from_there = f"trainer.resume_from_path={tmp_path}/whole/global_step_2"
    rest, steps_after = run(
        tiny_game, tmp_path / "rest", *chosen, "trainer.resume_mode=resume_path", from_there
    )
    assert [step["step"] for step in steps_after if step["step"] > 2] == [3, 4] and len(rest) == 2
    for before, after in zip(whole[2:], rest, strict=True):
        assert torch.equal(before.batch["advantages"], after.batch["advantages"])
    # Without the means of the first two steps they would differ by these.
    mask, scores = (
        whole[2].batch["response_mask"],
        whole[2].batch["token_level_scores"].sum(1, keepdim=True),
    )
    assert not torch.equal(whole[2].batch["advantages"], (scores * mask).float())


def test_what_clip_cov_draws_goes_on_bitwise_after_a_resume(
    tiny_game: Path, tmp_path: Path
) -> None:
    choice = f"{ACTOR}.policy_loss"
    chosen = (
        "algorithm.adv_estimator=grpo",
        f"{choice}.loss_mode=clip_cov",
        f"{choice}.clip_cov_ratio=0.1",
        f"{choice}.clip_cov_lb=-10",
        "trainer.deterministic=true",
        "trainer.save_freq=1",
        "trainer.total_training_steps=3",
    )
    _, whole = run(tiny_game, tmp_path / "whole", *chosen)
    torch.rand(5)  # The global generator is somewhere else.
    from_there = f"trainer.resume_from_path={tmp_path}/whole/global_step_1"
    _, rest = run(
        tiny_game, tmp_path / "rest", *chosen, "trainer.resume_mode=resume_path", from_there
    )
    names = [name for name in whole[-1] if name.startswith("actor/")]
    assert len(names) > 5 and whole[-1]["actor/pg_clipfrac"] > 0
    for name in names:
        assert rest[-1][name] == whole[-1][name], name
    expected = tensors(tmp_path / "whole/global_step_3/actor/model")
    resumed = tensors(tmp_path / "rest/global_step_3/actor/model")
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


@pytest.mark.parametrize("method", fast_and_long(["pow", "max_random"], fast=["pow"]))
def test_policy_filtration_draws_rows_by_their_scores(
    tiny_game: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt, update = [], DataParallelPPOActor.update_policy

    def seen(actor: DataParallelPPOActor, data: DataProto, plan: Any = None) -> dict[str, float]:
        learnt.append(data)
        return update(actor, data, plan)

    monkeypatch.setattr(DataParallelPPOActor, "update_policy", seen)
    more = (
        "algorithm.use_pf_ppo=true",
        f"algorithm.pf_ppo.reweight_method={method}",
        "data.train_batch_size=32",
    )
    batches, steps = run(tiny_game, tmp_path, *more)
    for batch, drawn in zip(batches, learnt, strict=True):
        scores = batch.batch["token_level_scores"].sum(1)
        rows = [row.numpy().tobytes() for row in batch.batch["responses"]]
        taken = [rows.index(row.numpy().tobytes()) for row in drawn.batch["responses"]]
        assert (
            len(batch) == len(drawn) == 128
            and len(set(batch.non_tensor_batch["episode_id"])) == 128
        )
        assert len(set(taken)) < len(set(map(rows.index, rows)))
        if method == "pow" and scores.any():
            assert (scores[taken] > 0).all(), "nothing that scored 0 is drawn"
    # Rows that are drawn twice are no longer episodes.
    assert not any(name.startswith("alarms/group") for step in steps for name in step)


@pytest.fixture
def reward_model(tiny_game: Path, tmp_path: Path) -> LlamaForSequenceClassification:
    """A tiny one with random weights, saved as `tmp_path/scorer` with the policy's tokenizer."""
    torch.manual_seed(3)
    config = LlamaConfig.from_pretrained(tiny_game / "model", num_labels=1)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "scorer")
    AutoTokenizer.from_pretrained(tiny_game / "model").save_pretrained(tmp_path / "scorer")
    return model


def expected_score(model: LlamaForSequenceClassification, ids: list[int]) -> float:
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([ids])).last_hidden_state
        return model.score(states)[0, -1, 0].item()


SCORER = (
    "reward_model.enable=true",
    "reward_model.model.dtype=float32",
    "reward_model.micro_batch_size_per_gpu=3",
)


def test_a_reward_model_adds_to_what_the_environment_gives(
    tiny_game: Path, tmp_path: Path, reward_model: LlamaForSequenceClassification
) -> None:
    batches, _ = run(
        tiny_game, tmp_path / "run", *SCORER, f"reward_model.model.path={tmp_path}/scorer"
    )
    batch = batches[0].drop_dummies()
    width = batch.batch["prompts"].shape[1]
    for row in range(8):
        ids = torch.cat([batch.batch["prompts"][row], batch.batch["responses"][row]])
        own = expected_score(reward_model, ids[batch.batch["attention_mask"][row].bool()].tolist())
        given = batch.batch["environment_rewards"][row].sum().item()
        assert batch.batch["token_level_scores"][row].sum().item() == pytest.approx(
            own + given, abs=1e-4
        )
        last = batch.batch["response_mask"][row].nonzero().max().item()
        assert batch.batch["token_level_scores"][row, last] != 0 and width > 0


@pytest.mark.parametrize("retold", [False, True])
def test_a_reward_model_scores_prompts_alone(
    tiny_task: Path, tmp_path: Path, reward_model: LlamaForSequenceClassification, retold: bool
) -> None:
    """With `input_tokenizer` it reads prompt and answer in its own chat template."""
    more = [*SCORER, f"reward_model.model.path={tmp_path}/scorer", "data.return_raw_chat=true"]
    more += [f"reward_model.model.input_tokenizer={tmp_path}/scorer"] if retold else []
    if retold:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "scorer")
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}+{% endfor %}"
        tokenizer.save_pretrained(tmp_path / "scorer")
    trainer, (batch, *_) = fit(
        tiny_config(tiny_task, tmp_path / "run", *more, *PLAIN, "trainer.val_before_train=false")
    )
    policy = trainer.tokenizer
    for row in range(8):
        ids = torch.cat([batch.batch["prompts"][row], batch.batch["responses"][row]])
        own = ids[batch.batch["attention_mask"][row].bool()].tolist()
        if retold:
            answer = policy.decode(
                batch.batch["responses"][row][batch.batch["response_mask"][row] > 0],
                skip_special_tokens=True,
            )
            prompt = "".join(
                f"{message['content']}+" for message in batch.non_tensor_batch["raw_prompt"][row]
            )
            own = policy.encode(f"{prompt}{answer}+", add_special_tokens=False)
        score = batch.batch["token_level_scores"][row].sum().item()
        assert score == pytest.approx(expected_score(reward_model, own), abs=1e-4)


def test_a_reward_model_scores_an_episode_of_several_rows_once(
    forgetful_game: Path,
    tmp_path: Path,
    reward_model: LlamaForSequenceClassification,
) -> None:
    more = (*SCORER, f"reward_model.model.path={tmp_path}/scorer", "data.max_prompt_length=40")
    batches, _ = run(forgetful_game, tmp_path / "run", *more)
    batch = batches[0].drop_dummies()
    modelled = (batch.batch["token_level_scores"] - batch.batch["environment_rewards"]).sum(1)
    names = batch.non_tensor_batch["episode_id"]
    several = [name for name in set(names) if (names == name).sum() > 1]
    assert several and all((modelled[names == name].abs() > 1e-6).sum() == 1 for name in set(names))
