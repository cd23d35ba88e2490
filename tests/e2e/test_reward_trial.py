"""Every form of reward function is called on a made-up answer before a model is loaded."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import main
from setup import RayPPOTrainer
from tests.e2e.setup_parts import make_config
from tests.e2e.test_training import tiny_argv, tiny_config
from training.building import build_trainer
from training.config.loader import ConfigError
from training.run.signals import EndingSignals
from workers import fsdp_workers

SOURCE = """import random, signal

def raises(data_source, solution_str, ground_truth, extra_info):
    return 1.0 / len(extra_info["absent"])

def nothing(data_source, solution_str, ground_truth, extra_info):
    if solution_str == ground_truth:
        return 1.0

def infinite(data_source, solution_str, ground_truth, extra_info):
    return float("nan")

def short(data_sources, solution_strs, ground_truths, extra_infos):
    return [0.0]

def swapped(prompt, answer):
    return 0.0

def alarms(data_source, solution_str, ground_truth, extra_info):
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    return 0.0

def draws(data_source, solution_str, ground_truth, extra_info):
    return random.random()
"""


ALGORITHM = """from training.core_algos import agg_loss, register_adv_est, register_policy_loss

@register_adv_est("nothing")
def nothing(token_level_rewards, response_mask):
    pass

@register_policy_loss("detached")
def detached(log_prob, advantages, response_mask, loss_agg_mode):
    return agg_loss(-advantages * log_prob.detach(), response_mask, loss_agg_mode), {}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no model be loaded."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(fsdp_workers.ActorRolloutRefWorker, "init_model", load)


@pytest.mark.parametrize(
    ("name", "manager", "words"),
    [
        ("raises", "naive", r"raises \(\S+mine.py:3\) failed with KeyError: 'absent' in \S+:4 on"),
        ("raises", "prime", r"raises \(\S+mine.py:3\) failed with KeyError\('absent'\) on row 0"),
        ("nothing", "dapo", r"nothing \(\S+mine.py:6\) returned None"),
        ("infinite", "naive", r"infinite \(\S+mine.py:10\) returned nan"),
        ("short", "batch", r"short \(\S+mine.py:13\) returned 1 results; allowed: one per row, 2"),
        (
            "swapped",
            "naive",
            r"swapped \(\S+mine.py:16\) takes \(prompt, answer\); \S+naive calls it with "
            "data_source, solution_str, ground_truth, extra_info by name",
        ),
    ],
)
def test_a_wrong_reward_function_is_told_before_a_model_is_loaded(
    tiny_task: Path,
    tmp_path: Path,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    manager: str,
    words: str,
) -> None:
    argv = tiny_argv(
        tiny_task,
        tmp_path / "run",
        f"custom_reward_function.path={file}",
        f"custom_reward_function.name={name}",
        f"reward_model.reward_manager={manager}",
    )
    assert main.run(argv, EndingSignals()) == 2
    said = capsys.readouterr().err
    assert re.search(words, said), said
    # This tokenizer has no word for 42.
    answer = re.search(r"made-up answer '(.+)'", said)
    assert bool(answer) == (name != "swapped")
    if answer and " on row 0" in said:
        assert f"response: '{answer[1]}'" in said
    assert "Traceback" not in said and said.startswith("1 problem")


def test_a_function_is_tried_in_the_kind_of_thread_that_the_run_calls_it_in(
    tiny_task: Path, tmp_path: Path, file: Path
) -> None:
    """Signals come to the main thread alone, as timeouts by `signal.alarm` find out."""
    words = (f"custom_reward_function.path={file}", "custom_reward_function.name=alarms")
    build_trainer(tiny_config(tiny_task, tmp_path / "run", *words))
    beside = (*words, "reward_model.launch_reward_fn_async=true")
    with pytest.raises(
        ConfigError, match=r"alarms \(\S+mine.py:19\) .*signal only works in main.*"
    ):
        build_trainer(tiny_config(tiny_task, tmp_path / "run", *beside))


def test_a_wrong_estimator_and_a_wrong_loss_are_told_before_a_model_is_loaded(
    tiny_task: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    registries_as_they_were: None,
) -> None:
    (tmp_path / "algorithm.py").write_text(ALGORITHM)
    argv = tiny_argv(
        tiny_task,
        tmp_path / "run",
        f"custom_algorithm={tmp_path}/algorithm.py",
        "algorithm.adv_estimator=nothing",
        "actor_rollout_ref.actor.policy_loss.loss_mode=detached",
    )
    assert main.run(argv, EndingSignals()) == 2
    said = capsys.readouterr().err
    assert said.startswith("2 problem") and "Traceback" not in said
    assert re.search(r"nothing \(\S+algorithm.py:3\): estimator 'nothing' returned None", said)
    assert re.search(r"detached \(\S+algorithm.py:7\): .*without a gradient by log_prob", said)


def test_the_trial_leaves_the_global_generators_alone(
    tiny_task: Path, tmp_path: Path, file: Path
) -> None:
    config = tiny_config(
        tiny_task,
        tmp_path / "run",
        f"custom_reward_function.path={file}",
        "custom_reward_function.name=draws",
    )
    build_trainer(config)
    before = random.getstate(), torch.get_rng_state()
    build_trainer(config)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def of_two(data: Any, weight: float) -> Any:
    return torch.zeros(len(data))


@pytest.mark.parametrize(
    ("reward_fn", "words"),
    [
        (lambda trajectory: None, "returned the reward None"),
        (lambda prompt, answer, truth: 1.0, "missing 1 required"),
        (lambda trajectory: trajectory.nothing, "raised AttributeError"),
    ],
)
def test_the_small_apis_reward_functions_of_prompts_too(
    tiny_game: Path, tmp_path: Path, reward_fn: Any, words: str
) -> None:
    config = make_config(tiny_game, tmp_path)
    trainer = RayPPOTrainer(config, reward_fn=reward_fn, dataset=["3 5", "4 4"])
    with pytest.raises(ConfigError, match=rf"\(\S+test_reward_trial.py:\d+\).*{words}"):
        trainer.fit()


def test_a_function_of_the_whole_batch_too(tiny_task: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_task, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"test_reward_trial.py:\d+\): TypeError: of_two\(\)"):
        build_trainer(config, reward_fn=of_two)
    with pytest.raises(ConfigError, match=r"test_reward_trial.py:\d+\): .*returned shape \(3,\)"):
        build_trainer(config, reward_fn=lambda data: torch.zeros(3))
    build_trainer(config, reward_fn=partial(of_two, weight=1.0))
