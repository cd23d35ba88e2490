"""What a section hands on: each argument of phases and workers is the setting of its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from tests.unit.config.helpers import load
from training import advantage, step_phases
from training.config import PPOConfig
from training.core_algos import get_kl_controller
from training.step_phases import StepPhases
from workers import critic_worker, fsdp_workers, training_worker
from workers.fsdp_workers import ActorRolloutRefWorker
from workers.training_worker import TrainingWorker

ACTOR = "actor_rollout_ref.actor"


def spy(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, answer: Any = None) -> list[Any]:
    """Puts a function in the place of another that notes how it is called."""
    calls: list[Any] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return answer

    monkeypatch.setattr(place, name, called)
    return calls


def phases_of(config: PPOConfig) -> StepPhases:
    return StepPhases(config, None, None)  # type: ignore[arg-type]


def batch() -> DataProto:
    mask = torch.ones(2, 2)
    tensors = {
        "response_mask": mask,
        "token_level_scores": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        "old_log_probs": torch.full((2, 2), -1.0),
        "ref_log_prob": torch.full((2, 2), -1.5),
    }
    uids = np.array(["a", "a"], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


# The driver's phases


def test_add_advantages_hands_on_gamma_lam_n_and_the_section(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load(
        "algorithm.adv_estimator=rloo",
        "algorithm.gamma=0.9",
        "algorithm.lam=0.8",
        "algorithm.norm_adv_by_std_in_grpo=false",
        "actor_rollout_ref.rollout.n=3",
    )
    phases = phases_of(config)
    phases.estimator_state = {"kept": 1}
    calls = spy(monkeypatch, step_phases, "compute_advantage")
    phases.add_advantages(batch())
    ((_, name), arguments) = calls[0]
    assert name == "rloo"
    assert arguments == {
        "gamma": 0.9,
        "lam": 0.8,
        "num_repeat": 3,
        "norm_adv_by_std_in_grpo": False,
        "config": config.algorithm,
        "state": {"kept": 1},
    }


def test_compute_advantage_hands_each_setting_to_the_estimator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ones = torch.ones(2, 2)
    calls = spy(monkeypatch, advantage.algos, "call_adv_estimator", (ones, ones))
    data = batch()
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    section = object()
    advantage.compute_advantage(
        data,
        "grpo",
        gamma=0.9,
        lam=0.8,
        num_repeat=3,
        norm_adv_by_std_in_grpo=False,
        config=section,
        state={"kept": 1},
    )
    ((_, given),) = calls
    assert (given["gamma"], given["lam"], given["num_repeat"]) == (0.9, 0.8, 3)
    assert given["norm_adv_by_std_in_grpo"] is False and given["config"] is section
    assert given["state"] == {"kept": 1} and given["index"].tolist() == ["a", "a"]


@pytest.mark.parametrize(("kind", "kl"), [("kl", 0.5), ("mse", 0.125)])
def test_use_kl_in_reward_takes_kl_coef_times_the_kl_of_its_kind_off(kind: str, kl: float) -> None:
    config = load(
        "algorithm.use_kl_in_reward=true",
        f"algorithm.kl_penalty={kind}",
        "algorithm.kl_ctrl.kl_coef=0.2",
    )
    data = batch()
    metrics = phases_of(config).apply_kl_penalty(data)
    expected = data.batch["token_level_scores"] - 0.2 * kl
    torch.testing.assert_close(data.batch["token_level_rewards"], expected)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.2
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(kl)


def test_a_token_that_the_policy_prefers_to_its_reference_costs_and_is_never_rewarded() -> None:
    data = DataProto.from_dict(
        tensors={
            "token_level_scores": torch.tensor([[0.0, 1.0, 0.0]]),
            "old_log_probs": torch.tensor([[-0.5, -1.0, -0.1]]),
            "ref_log_prob": torch.tensor([[-1.5, -0.5, -9.0]]),
            # The last token was not sampled.
            "response_mask": torch.tensor([[1, 1, 0]]),
        }
    )
    settings = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5")
    metrics = phases_of(load(*settings)).apply_kl_penalty(data)
    # The KL of the tokens is 1 and -0.5.
    assert data.batch["token_level_rewards"].tolist() == [[-0.5, 1.25, 0.0]]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.25)


def test_kl_ctrl_moves_towards_target_kl_over_its_horizon() -> None:
    config = load(
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.2",
        "algorithm.kl_ctrl.target_kl=0.5",
        "algorithm.kl_ctrl.horizon=100",
    )
    controller = get_kl_controller(config.algorithm.kl_ctrl)
    controller.update(current_kl=0.55, n_steps=10)
    assert controller.value == pytest.approx(0.2 * (1 + 0.1 * 10 / 100))


def test_pf_ppo_hands_on_its_method_and_power(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(
        "algorithm.use_pf_ppo=true",
        "algorithm.pf_ppo.reweight_method=max_min",
        "algorithm.pf_ppo.weight_pow=3.5",
    )
    calls = spy(monkeypatch, step_phases, "compute_pf_ppo_reweight_data")
    phases_of(config).resample(batch(), step=4)
    ((arguments, _),) = calls
    assert arguments[1:3] == ("max_min", 3.5)


# The workers


def test_init_actor_hands_on_sections_correction_and_coefficients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load(
        "agent.observation_loss_coef=0.3",
        "algorithm.rollout_correction.rollout_is=token",
        "critic.value_loss_coef=0.7",
        f"{ACTOR}.entropy_coeff=0.2",
    )
    calls = spy(monkeypatch, fsdp_workers, "DataParallelPPOActor")
    monkeypatch.setattr(fsdp_workers.model_state, "try_settings", lambda *_: None)
    worker: Any = SimpleNamespace(
        config=config,
        policy=config.actor_rollout_ref,
        spec=SimpleNamespace(tokenizer=None),
        optimizer="optimizer",
        probes="probes",
        actor_class=fsdp_workers.DataParallelPPOActor,
        load_policy=lambda *_, **__: (SimpleNamespace(trained="part"), "settings"),
        _make_trainable=lambda *_, **__: None,
    )
    ActorRolloutRefWorker._init_actor(worker, 10)
    ((arguments, named),) = calls
    assert arguments[0] is config.actor_rollout_ref.actor and arguments[2] == "optimizer"
    assert named["correction"] is config.algorithm.rollout_correction
    assert named["observation_loss_coef"] == 0.3
    assert named["critic"].value_loss_coef == 0.7
    assert (named["forward"], named["probes"]) == ("settings", "probes")


def test_log_probs_and_updates_are_at_the_temperature_of_sampling() -> None:
    config = load("actor_rollout_ref.rollout.temperature=0.6")
    worker: Any = SimpleNamespace(policy=config.actor_rollout_ref)
    data = DataProto(meta_info={"seed": 1})
    assert ActorRolloutRefWorker._with_temperature(worker, data).meta_info == {
        "seed": 1,
        "temperature": 0.6,
    }


def test_optimiser_and_schedule_are_of_the_models_own_section(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load(f"{ACTOR}.optim.lr=0.1", "critic.optim.lr=0.2")
    made = spy(monkeypatch, training_worker, "build_optimizer", "optimizer")
    scheduled = spy(monkeypatch, training_worker, "build_scheduler")
    for name in ("UpdateProbes", "open_probes", "CheckpointWriter"):
        spy(monkeypatch, training_worker, name)
    spy(monkeypatch, training_worker.offload, "offload")
    worker: Any = SimpleNamespace(config=config)
    for section in (config.actor_rollout_ref.actor, config.critic):
        TrainingWorker._make_trainable(worker, "model", "part", section, 10, role="any")  # type: ignore[arg-type]
        assert made.pop() == (("part", section.optim), {})
        assert scheduled.pop() == (("optimizer", section.optim, 10), {})


def test_an_update_steps_the_schedule_once_and_shows_the_rate_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []
    worker: Any = SimpleNamespace(
        config=load(),
        device=torch.device("cpu"),
        writer=SimpleNamespace(wait_until_copied=lambda: None),
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.25}]),
        scheduler=SimpleNamespace(step=lambda: steps.append(1)),
        companions={},
        _on_device=lambda optimizer: torch.no_grad(),
    )
    assert TrainingWorker._update(worker, "actor", dict) == {"actor/lr": 0.25}
    assert steps == [1]


def test_the_critic_is_given_its_own_resolved_section(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("critic.cliprange_value=0.7", f"{ACTOR}.ppo_epochs=3")
    calls = spy(monkeypatch, critic_worker, "DataParallelPPOCritic")
    spy(monkeypatch, critic_worker, "forward_settings", SimpleNamespace(dtype=torch.float32))
    for name in ("check_training", "ValueModel"):
        spy(monkeypatch, critic_worker, name)
    spy(monkeypatch, critic_worker.sharding, "shard_model")
    spy(monkeypatch, critic_worker.worker_process, "start_worker")
    spec = SimpleNamespace(value_model=lambda: None)
    spy(monkeypatch, critic_worker, "ModelSpec", spec)
    worker: Any = SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        ranks_per_sequence=lambda: 1,
        _make_trainable=lambda *_, **__: None,
        optimizer="optimizer",
        probes="probes",
    )
    critic_worker.CriticWorker.init_model(worker, 10, SimpleNamespace(critic="plan"))  # type: ignore[arg-type]
    ((arguments, _),) = calls
    section = arguments[0]
    assert section.cliprange_value == 0.7 and section.ppo_epochs == 3
    assert worker.plan == "plan"
