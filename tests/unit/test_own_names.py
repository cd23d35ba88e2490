"""Names of a user's that are the trainer's, too: neither replaces the other, and none is lost."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from custom.agent import Agent
from custom.env import StepResult
from custom.tools import Tool, ToolDefinition, ToolRegistry
from data.array_ops import object_array
from data.own_names import keep_own
from data.protocol import DataProto
from tests.unit.test_validation import batch_of, validated
from training import core_algos as algos
from training.advantage import compute_advantage
from training.batch.episode_rows import REWARD_INFO
from training.episode_batches import add_row_columns
from training.run.metric_names import TABLE
from training.run.metrics_file import as_record
from workers.model.update_metrics import STEP_SECTIONS, StepNames
from workers.rollout.episode_facts import program_numbers


def test_a_taken_name_gives_way_and_a_free_one_stays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kept = keep_own({"a": 1, "b": 2, "own_a": 3}, {"a"}, "a test's mapping")
    assert kept == {"own_own_a": 1, "b": 2, "own_a": 3}
    assert "a test's mapping has 'a'" in caplog.text


def test_a_reward_functions_reward_stands_beside_the_trainers_in_validation() -> None:
    answers = [("t", "a", 0, 0, 0.25), ("t", "b", 0, 0, 0.75)]
    samples = validated([batch_of(answers)], 2, reward=[7.0, 9.0], score=[3.0, 4.0])
    assert samples.infos["reward"] == samples.rewards == [0.25, 0.75]
    assert samples.infos["own_reward"] == [7.0, 9.0] and samples.infos["score"] == [3.0, 4.0]
    names = samples.metrics(1)
    assert names["val-core/unknown/reward/mean@2"] == 0.5
    assert names["val-aux/unknown/own_reward/mean@2"] == 8.0


def test_what_a_reward_function_gives_replaces_no_column_of_the_trainers() -> None:
    """An info `uid` or `agent_role` would group rows otherwise; one like a dataset's column may."""
    seen: dict[str, Any] = {}

    @algos.register_adv_est("test_own_names_estimator")
    def estimate(
        token_level_rewards: Any, response_mask: Any, non_tensor_batch: Any, role: Any, **_: Any
    ) -> Any:
        seen.update(non_tensor_batch, role_argument=role)
        return token_level_rewards * response_mask, token_level_rewards * response_mask

    mask = torch.ones(2, 2)
    columns = {"uid": ["g", "g"], "data_source": ["d", "d"], "acc": [5, 5]}
    infos = {"uid": ["x", "y"], "agent_role": ["p", "q"], "role": ["r", "s"], "acc": [0, 1]}
    columns |= {REWARD_INFO + name: values for name, values in infos.items()}
    batch = DataProto.from_dict(
        tensors={"response_mask": mask, "token_level_rewards": mask.clone()},
        non_tensors={name: object_array(values) for name, values in columns.items()},
    )
    compute_advantage(batch, "test_own_names_estimator", 1.0, 1.0, 2, True, SimpleNamespace(), {})
    assert seen["uid"].tolist() == ["g", "g"] and seen["own_uid"].tolist() == ["x", "y"]
    assert list(seen["role_argument"]) == ["d", "d"]
    assert seen["own_agent_role"].tolist() == ["p", "q"]
    assert seen["acc"].tolist() == [0, 1]


def test_a_rows_columns_replace_none_of_an_episodes() -> None:
    task = {"uid": "mine", "ending": "happy", "topic": "sums", "data_source": "of the row"}
    described = DataProto.from_dict(
        tensors={"agent": torch.zeros(1)},
        non_tensors={
            "uid": object_array(["g"]),
            "data_source": object_array(["environment"]),
            "task": object_array([task]),
        },
    )
    add_row_columns(described)
    columns = {name: list(values) for name, values in described.non_tensor_batch.items()}
    assert columns["uid"] == ["g"] and columns["own_uid"] == ["mine"]
    assert "ending" not in columns and columns["own_ending"] == ["happy"]
    assert columns["topic"] == ["sums"] and columns["data_source"] == ["of the row"]


class Chatty:
    """Ends at once, with numbers of its own in its info."""

    def reset(self, seed: int) -> str:
        return "begin"

    def step(self, action: str) -> StepResult:
        return StepResult("end", 0.5, True, {"environment_reward": 3, "moves": 1})


def test_an_environments_info_stands_beside_the_agents() -> None:
    agent = Agent(Chatty(), reward_fn=lambda trajectory: 1.0)
    agent.reset(0)
    info = agent.step("go").info
    assert info == {"own_environment_reward": 3, "moves": 1, "environment_reward": 0.5}


def test_a_programs_metrics_stand_beside_what_is_counted_of_it() -> None:
    program = {"counts": {"requests": 4}, "metrics": {"program_requests": 9.0, "steps": 2.0}}
    episode: Any = SimpleNamespace(program=program)
    numbers = program_numbers(episode, {})
    assert numbers == {"program_requests": 4.0, "own_program_requests": 9.0, "steps": 2.0}


def test_a_metric_named_step_does_not_number_the_line() -> None:
    assert as_record({"step": 9.0, "mine": 1.0}, 3) == {"step": 3, "own_step": 9.0, "mine": 1.0}


def test_a_loss_measures_under_names_that_no_step_has() -> None:
    """The sections that a loss may use are its own, and those of built-in losses."""
    free = ("actor", "rollout_corr", "MODEL")
    table = yaml.safe_load(Path(TABLE).read_text())
    for name in [name for entries in table.values() for name in entries]:
        if name.partition("/")[0] not in free:
            assert name in StepNames() and name.startswith(STEP_SECTIONS), name
    for name in ("actor/pg_loss", "actor/grad_norm", "timing_s/step", "step"):
        assert name in StepNames()
    for name in ("actor/pg_clipfrac", "actor/ppo_kl", "mine/x", "steps"):
        assert name not in StepNames()


class Unknown(Tool):
    """Has the name under which calls of no tool are counted."""

    definition = ToolDefinition(name="unknown", description="", parameters={"type": "object"})

    def execute(self) -> str:
        return ""


def test_no_tool_is_named_as_calls_of_none_are_counted() -> None:
    with pytest.raises(ValueError, match="cannot be named 'unknown'"):
        ToolRegistry([Unknown()])
