"""Tests what follows from the settings of several sections."""

from __future__ import annotations

from tests.unit.config.helpers import ACTOR, ROLLOUT, load
from training.config import PPOConfig


def test_the_critic_takes_over_from_the_actor_what_it_leaves_open() -> None:
    config = load(
        "actor_rollout_ref.model.path=m", f"{ACTOR}.ppo_mini_batch_size=32", f"{ACTOR}.ppo_epochs=3"
    )
    critic = config.resolved_critic
    assert (critic.model.path, critic.ppo_mini_batch_size, critic.ppo_epochs) == ("m", 32, 3)
    own = load(
        "critic.model.path=c", "critic.ppo_mini_batch_size=8", "critic.ppo_epochs=2"
    ).resolved_critic
    assert (own.model.path, own.ppo_mini_batch_size, own.ppo_epochs) == ("c", 8, 2)


def test_the_estimator_decides_about_the_critic_unless_it_is_set() -> None:
    assert load().need_critic
    assert not load("algorithm.adv_estimator=grpo").need_critic
    assert load("algorithm.adv_estimator=mine", "critic.enable=true").need_critic
    assert not load("critic.enable=false").need_critic


def test_derived_values_of_the_run() -> None:
    config = load(
        "data.max_prompt_length=3", "data.max_response_length=4", "trainer.experiment_name=e"
    )
    rollout = config.resolved_rollout
    assert (rollout.response_length, rollout.max_model_len) == (4, 7)
    assert (config.max_model_len, config.data.run_seed, config.trainer.run_dir) == (
        7,
        1,
        "checkpoints/ppo_core/e",
    )
    config = load(
        f"{ROLLOUT}.max_model_len=9",
        "data.seed=0",
        "trainer.default_local_dir=/x",
        "trainer.launcher=ray",
    )
    assert (config.max_model_len, config.data.run_seed, config.trainer.run_dir) == (9, 0, "/x")
    assert config.trainer.use_ray and not PPOConfig().trainer.use_ray
