"""Tests verl's trainer methods: each is called in its phase, and changes nothing by itself."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import training.building
from data.protocol import DataProto
from features.verl import trainer as verl_trainer
from features.verl.verl_modules import place_of
from tests.e2e.test_training import tiny_config
from training.building import build_trainer
from training.config import PPOConfig

CALLED = (
    "_balance_batch",
    "_compute_old_log_prob",
    "_compute_or_extract_reward",
    "_compute_ref_log_prob",
    "_compute_values",
    "_create_dataloader",
    "_dump_generations",
    "_get_gen_batch",
    "_load_checkpoint",
    "_log_rollout_data",
    "_maybe_log_val_generations",
    "_save_checkpoint",
    "_start_profiling",
    "_stop_profiling",
    "_update_actor",
    "_update_critic",
    "_validate",
)
PROPERTIES = ("use_critic", "use_reference_policy", "use_rm")
WITH_ALL_MODELS = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
)


def fit(trainer_class: type, config: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains by a class of trainers; returns it and its last metrics."""
    monkeypatch.setattr(training.building, "RayPPOTrainer", trainer_class)
    trainer = build_trainer(config)
    try:
        return trainer, trainer.fit()
    finally:
        trainer.shutdown()


def counting(base: type) -> tuple[type, dict[str, int]]:
    """Makes a subclass that overrides every method and counts its calls."""
    counts = dict.fromkeys((*CALLED, *PROPERTIES), 0)

    def override(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return getattr(super(subclass, self), name)(*args, **kwargs)

        return method

    def override_property(name: str) -> Any:
        def get(self: Any) -> Any:
            counts[name] += 1
            return getattr(super(subclass, self), name)

        return property(get)

    members = {name: override(name) for name in CALLED}
    members |= {name: override_property(name) for name in PROPERTIES}
    subclass = type("Counting", (base,), members)
    return subclass, counts


def without_times(metrics: dict[str, Any]) -> dict[str, Any]:
    words = ("timing", "perf", "seconds", "memory", "mfu", "cpu")
    return {name: value for name, value in metrics.items() if not any(w in name for w in words)}


@pytest.mark.seconds
def test_every_method_is_called_in_its_phase_and_the_numbers_stay(
    tiny_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = "trainer.rollout_data_dir={}/dump"
    ours = training.building.RayPPOTrainer
    config = tiny_config(tiny_task, tmp_path / "a", *WITH_ALL_MODELS, dump.format(tmp_path / "a"))
    _, expected = fit(ours, config, monkeypatch)
    subclass, counts = counting(verl_trainer.RayPPOTrainer)
    config = tiny_config(tiny_task, tmp_path / "b", *WITH_ALL_MODELS, dump.format(tmp_path / "b"))
    _, metrics = fit(subclass, config, monkeypatch)
    assert without_times(metrics) == without_times(expected)
    assert not [name for name, count in counts.items() if not count]
    assert counts["_update_actor"] == counts["_update_critic"] == counts["_balance_batch"] == 2


@pytest.mark.seconds
def test_what_a_method_returns_is_what_counts(
    tiny_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(verl_trainer.RayPPOTrainer):
        @property
        def use_critic(self) -> bool:
            return False

        def _compute_old_log_prob(self, batch: DataProto) -> Any:
            # Newer versions of verl return their speed, too.
            return super()._compute_old_log_prob(batch), 0.5

        def _balance_batch(self, batch: DataProto, metrics: dict[str, Any]) -> DataProto | None:
            metrics["mine/rows"] = len(batch)
            return super()._balance_batch(batch, metrics)

        def _update_actor(self, batch: DataProto) -> Any:
            updated = super()._update_actor(batch)
            return DataProto(meta_info={"metrics": updated | {"mine/updates": 1.0}})

        def _compute_or_extract_reward(self, batch: DataProto, reward_fn: Any = None) -> Any:
            scores, infos = super()._compute_or_extract_reward(batch, reward_fn)
            return scores * 0, infos

    words = ["algorithm.adv_estimator=grpo", "trainer.total_training_steps=1"]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    trainer, metrics = fit(Own, tiny_config(tiny_task, tmp_path, *words), monkeypatch)
    assert (metrics["mine/rows"] > 0, metrics["mine/updates"]) == (True, 1.0)
    assert metrics["critic/score/mean"] == 0.0
    assert trainer.critic_wg is None and trainer.hybrid_engine


def test_groups_that_are_trained_on_as_they_end_are_refused_before_a_model_is_loaded(
    tiny_task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training.building, "RayPPOTrainer", verl_trainer.RayPPOTrainer)
    words = ["trainer.train_finished_groups=true", "trainer.deterministic=false"]
    words += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_epochs=1"]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=null"]
    config = tiny_config(tiny_task, tmp_path, *words)
    with pytest.raises(ValueError, match=r"trainer\.train_finished_groups=true groups are"):
        build_trainer(config)


def test_the_imports_of_verls_trainer_lead_here() -> None:
    assert place_of("verl.trainer.ppo.ray_trainer", "RayPPOTrainer") == "features.verl.trainer"
    assert verl_trainer.compute_advantage is training.ray_trainer.compute_advantage
    assert issubclass(verl_trainer.AgentTrainer, verl_trainer.VerlMethods)
    for name in CALLED:
        assert inspect.isfunction(getattr(verl_trainer.AgentTrainer, name))
