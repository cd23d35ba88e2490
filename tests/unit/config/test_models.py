"""Tests the checks of models: that they are there, and that rows and ranks fit them."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.unit.config.helpers import (
    ROLLOUT,
    ULYSSES,
    assert_refused,
    checked,
    load,
    warned,
)
from training.config.checks import check_config
from training.config.resources import models
from training.config.resources.hub import hub_refusal


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["actor_rollout_ref.model.dtype=float16"],
            "actor_rollout_ref.model.dtype=float16 would train without loss scaling, which small "
            f"gradients need in float16: use bfloat16 or float32; {ROLLOUT}.dtype may be float16",
        ),
        (
            [f"{ROLLOUT}.max_model_len=4096"],
            f"{ROLLOUT}.max_model_len=4096 tokens, but actor_rollout_ref.model.path={{model}} "
            "reads at most 2048",
        ),
        (
            ["actor_rollout_ref.model.path=null", "algorithm.adv_estimator=grpo"],
            "actor_rollout_ref.model.path is missing: give a model folder or a hub name (org/name)",
        ),
        (
            ["data.max_response_length=2000"],
            "data.max_prompt_length + data.max_response_length = 2512 tokens, but "
            "actor_rollout_ref.model.path={model} reads at most 2048",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


def test_a_config_with_a_larger_context_by_override_fits(runnable: list[str]) -> None:
    override = "actor_rollout_ref.model.override_config.max_position_embeddings=4096"
    assert checked(runnable, "data.max_response_length=2000", override) == []


def test_a_missing_model_is_named(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (problem,) = checked(runnable, "actor_rollout_ref.model.path=empty")
    assert problem == (
        "actor_rollout_ref.model.path=empty: holds no config.json with settings; is it a Hugging "
        "Face model folder?"
    )
    (problem,) = checked(runnable, "critic.model.path=./gone/model")
    assert (
        problem
        == f"critic.model.path=./gone/model is not a folder (seen from {tmp_path}) and cannot be "
        "a hub name"
    )
    # No hub is asked for what is misspelt in a folder that is there.
    (problem,) = checked(runnable, "critic.model.path=empty/modle")
    assert (
        problem
        == f"critic.model.path=empty/modle is not a folder (seen from {tmp_path}) and cannot be "
        "a hub name"
    )
    (tmp_path / "empty/model").mkdir()
    (problem,) = checked(runnable, "critic.model.path=empty/modle")
    assert problem.endswith("cannot be a hub name; did you mean 'empty/model'?")


def test_a_game_without_its_model_is_told_what_makes_one(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = "actor_rollout_ref.model.path"
    game = "agent.environment.name=guess_number"
    problems = checked(runnable, f"{key}=outputs/luck/model", game)
    assert any("`python examples/prepare_game.py CONFIG.yaml` makes" in each for each in problems)
    problems = checked(runnable, f"{key}=outputs/luck/model")
    assert not any("prepare_game" in each for each in problems)


def test_a_name_that_the_hub_lacks_is_first_of_all_no_folder(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a path of one slash is meant, nobody thinks of a hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets/tiny").mkdir(parents=True)

    monkeypatch.setattr(models, "hub_refusal", lambda name: f"404: there is no {name}")
    (problem,) = checked(runnable, "critic.model.path=net/tiny")
    assert problem == (
        f"critic.model.path=net/tiny is not a folder (seen from {tmp_path}), nor is it found on "
        "the hub (404: there is no net/tiny); did you mean 'nets/tiny'?"
    )


def test_a_hub_model_is_asked_for_its_context_and_its_failure_is_a_problem(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(*runnable, "actor_rollout_ref.model.path=org/name", "critic.model.path=org/other")
    asked = []

    def read(path: str) -> dict[str, Any]:
        asked.append(path)
        if path == "org/other":
            raise OSError("no connection\nand more")
        return {"text_config": {"max_position_embeddings": 512}}

    monkeypatch.setattr(models, "read_model_config", read)
    assert check_config(config) == [
        "data.max_prompt_length + data.max_response_length = 1024 tokens, but "
        "actor_rollout_ref.model.path=org/name reads at most 512",
        f"critic.model.path=org/other is not a folder (seen from {Path.cwd()}), nor is it found on "
        "the hub (no connection)",
    ]
    assert asked == ["org/name", "org/other"]


@pytest.mark.parametrize("content", ["{}", "[1, 2]", '"text"', "{", "\xff"])
def test_a_config_json_without_settings_is_a_problem(content: str, runnable: list[str]) -> None:
    model = runnable[0].split("=")[1]
    (Path(model) / "config.json").write_text(content, encoding="latin-1")
    (problem,) = checked(runnable)
    assert problem.startswith(f"actor_rollout_ref.model.path={model}: ")
    assert "config.json with settings" in problem or "not a valid JSON file" in problem


def test_a_model_folder_without_a_tokenizer_is_a_problem(runnable: list[str]) -> None:
    model = Path(runnable[0].split("=")[1])
    (model / "tokenizer.json").unlink()
    assert checked(runnable) == [
        f"actor_rollout_ref.model.path={model}: the folder holds no tokenizer; save it there"
    ]


@pytest.mark.parametrize("nested", [False, True])
def test_ranks_that_share_sequences_divide_the_models_heads(
    runnable: list[str], nested: bool
) -> None:
    pytest.importorskip("ray")
    model = Path(runnable[0].split("=")[1])
    entries = {"num_attention_heads": 6, "max_position_embeddings": 2048}
    (model / "config.json").write_text(json.dumps({"text_config": entries} if nested else entries))
    ranks = ["trainer.n_gpus_per_node=4"]
    assert checked(runnable, *ranks, f"{ULYSSES}=2") == []
    assert checked(runnable, *ranks, f"{ULYSSES}=4") == [
        f"{ULYSSES}=4 does not divide the 6 attention heads of "
        f"actor_rollout_ref.model.path={model}: take one of their divisors"
    ]


@pytest.mark.parametrize("nested", [False, True])
def test_a_misspelt_entry_of_a_models_config_is_a_warning(
    nested: bool, runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    key = "actor_rollout_ref.model.override_config"
    entries: dict[str, Any] = {"hidden_size": 8}
    if nested:
        entries = {"text_config": entries}
    (Path(runnable[0].split("=")[1]) / "config.json").write_text(json.dumps(entries))
    assert warned(caplog, runnable, f"{key}.hiden_size=4") == [
        f"{key}.hiden_size has no effect: config.json has no hiden_size. Did you mean "
        "'hidden_size'?"
    ]
    # A config.json leaves out what is at its default.
    assert warned(caplog, runnable, f"{key}.attention_dropout=0.1", f"{key}.hidden_size=4") == []


def test_a_hub_out_of_reach_is_told_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Nobody listens there.
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        began = time.monotonic()
        refusal = hub_refusal("org/name")
    assert refusal is not None and "refused" in refusal.lower()
    assert time.monotonic() - began < 10
