"""Tests the bounds and checks of generation, whatever the engine."""

from __future__ import annotations

import pytest

from tests.unit.config.helpers import ROLLOUT, assert_refused, checked, warned


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [f"{ROLLOUT}.max_model_len=1000"],
            f"{ROLLOUT}.max_model_len=1000 is shorter than data.max_prompt_length + "
            "data.max_response_length = 1024",
        ),
        (
            [f"{ROLLOUT}.val_kwargs.n=4"],
            f"{ROLLOUT}.val_kwargs.n=4 with do_sample=false repeats one greedy answer: set "
            "do_sample=true or n=1",
        ),
        (
            [f"{ROLLOUT}.val_kwargs.do_sample=true"],
            f"{ROLLOUT}.val_kwargs.do_sample=true needs {ROLLOUT}.val_kwargs.temperature above 0",
        ),
        (
            [f"{ROLLOUT}.response_length=64"],
            f"{ROLLOUT}.response_length=64 contradicts data.max_response_length=512: leave the "
            "first null",
        ),
        (
            [f"{ROLLOUT}.temperature=0"],
            f"{ROLLOUT}.temperature=0.0: training samples; set it above 0",
        ),
        (
            [f"{ROLLOUT}.temperature=-1"],
            f"{ROLLOUT}.temperature='-1' (command line): must be 0 or more",
        ),
        ([f"{ROLLOUT}.top_p=1.5"], f"{ROLLOUT}.top_p='1.5' (command line): must be at most 1"),
        ([f"{ROLLOUT}.top_p=0"], f"{ROLLOUT}.top_p='0' (command line): must be above 0"),
        ([f"{ROLLOUT}.top_k=0"], f"{ROLLOUT}.top_k='0' (command line): must be -1, or 1 or more"),
        ([f"{ROLLOUT}.n=0"], f"{ROLLOUT}.n='0' (command line): must be above 0"),
        ([f"{ROLLOUT}.top_k=-2"], f"{ROLLOUT}.top_k='-2' (command line): must be -1 or more"),
        (
            [
                f"{ROLLOUT}.tensor_model_parallel_size=4",
                "trainer.n_gpus_per_node=2",
                "trainer.nnodes=2",
            ],
            f"{ROLLOUT}.tensor_model_parallel_size=4 does not divide trainer.n_gpus_per_node=2: "
            "an engine's ranks share a machine",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=0"],
            f"{ROLLOUT}.tensor_model_parallel_size='0' (command line): must be above 0",
        ),
        (
            [f"{ROLLOUT}.engine_kwargs.hf=4"],
            f"{ROLLOUT}.engine_kwargs.hf=4 (command line): must be a mapping, as in {{key: value}}",
        ),
    ],
)
def test_what_no_engine_generates_is_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


def test_several_validation_answers_are_sampled_or_come_of_an_environment(
    runnable: list[str],
) -> None:
    several = f"{ROLLOUT}.val_kwargs.n=4"
    sampled = [f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.temperature=1"]
    assert checked(runnable, several, *sampled) == []
    environment = "agent.environment.name=custom.envs.guess_number:GuessNumber"
    assert checked(runnable, several, environment) == []


def test_settings_of_another_engine_are_a_warning(
    runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert warned(caplog, runnable, f"{ROLLOUT}.engine_kwargs.vllm.seed=1") == [
        f"{ROLLOUT}.engine_kwargs.vllm has no effect with rollout.name=hf"
    ]
    assert warned(caplog, runnable, f"{ROLLOUT}.engine_kwargs.hf.seed=1") == []
