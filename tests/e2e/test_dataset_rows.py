"""Rows with tools and no environment, in verl's form: prompts, tools_kwargs, compute_score."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from custom.agent import Agent
from custom.envs.dataset_row import DatasetRowEnvironment
from custom.tools import get_parser, load_tools
from data.chat_templates import encode_chat
from data.protocol import DataProto
from training.building import build_trainer
from training.config import PPOConfig
from training.config.loader import ConfigError, load_config

ROLLOUT = "actor_rollout_ref.rollout"
TOOL = '''
from custom.tools import BaseTool, ToolResponse


class Checker(BaseTool):
    """Written as verl's: what the row knows comes by `create`."""

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth")
        self.truth = ground_truth
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        right = parameters["answer"] == self.truth
        return ToolResponse(text=f"{self.config['word']} {right}"), 0.0, {}


class Strict(Checker):
    async def create(self, instance_id=None, *, ground_truth):
        self.truth = ground_truth
        return instance_id
'''
SCHEMA = """
      type: function
      function:
        name: check
        description: Checks an answer.
        parameters:
          type: object
          properties: {answer: {type: string}}
          required: [answer]
"""
SCORES = """
seen = []


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    seen.append((data_source, ground_truth, extra_info["index"], extra_info["num_turns"]))
    return {"score": len(solution_str) / 100, "length": len(solution_str)}
"""


def tool_file(folder: Path, name: str = "Checker") -> Path:
    (folder / "checker.py").write_text(TOOL)
    path = folder / f"{name}.yaml"
    path.write_text(
        f"tools:\n  - class_name: {folder}/checker.py:{name}\n    config: {{word: Right?}}\n"
        f"    tool_schema:{SCHEMA}"
    )
    return path


def row(index: int) -> dict:
    return {
        "data_source": "sums" if index % 2 else "counts",
        "prompt": [{"role": "user", "content": f"{index} + 1 = ?"}],
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {
            "index": index,
            "need_tools_kwargs": True,
            "tools_kwargs": {"check": {"create_kwargs": {"ground_truth": str(index + 1)}}},
        },
    }


def config_of(task: Path, folder: Path, *overrides: str) -> PPOConfig:
    for name in ("train", "val"):
        (folder / f"{name}.json").write_text(json.dumps([row(i) for i in range(8)]))
    (folder / "scores.py").write_text(SCORES)
    argv = [
        f"data.train_files={folder}/train.json",
        f"data.val_files={folder}/val.json",
        "data.train_batch_size=4",
        "data.max_prompt_length=192",
        "data.max_response_length=64",
        f"actor_rollout_ref.model.path={task}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.multi_turn.enable=true",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
        f"{ROLLOUT}.multi_turn.tool_config_path={tool_file(folder)}",
        f"custom_reward_function.path={folder}/scores.py",
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=2",
        "trainer.launcher=local",
        "trainer.logger=file",
        f"trainer.default_local_dir={folder}/run",
        *overrides,
    ]
    return load_config(argv).config


@pytest.mark.parametrize("tool_class", ["Checker", "Strict"])
def test_a_row_is_played_with_its_tools_until_an_answer_calls_none(
    tmp_path: Path, tool_class: str
) -> None:
    tools = load_tools([str(tool_file(tmp_path, tool_class))])
    agent = Agent(DatasetRowEnvironment(), tools=tools, parser=get_parser("function"))
    for index in (3, 5):
        assert agent.reset(0, row(index)) == row(index)["prompt"]
        for answer in ("4", "6"):
            call = json.dumps({"name": "check", "arguments": {"answer": answer}})
            messages, reward, done, info = agent.step(f"<tool_call>{call}</tool_call>")
            assert info["tool_calls"][0]["ok"]
            assert messages[0]["content"] == f"Right? {answer == str(index + 1)}"
            assert (reward, done) == (0.0, False)
        assert agent.step("It is 4.")[1:3] == (0.0, True)


def test_it_trains_on_scores_of_the_reward_manager(tiny_task: Path, tmp_path: Path) -> None:
    config = config_of(tiny_task, tmp_path)
    assert config.plays_dataset_rows
    trainer = build_trainer(config)
    batches: list[DataProto] = []
    trainer.on_batch = batches.append
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()
    trained = [batch for batch in batches if not batch.meta_info["validate"]]
    assert len(trained) == 2
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert "val-core/sums/reward/mean@1" in json.loads(lines[-1])
    for batch in trained:
        columns = batch.non_tensor_batch
        lengths = columns["reward_info/length"]
        scores = batch.batch["token_level_scores"].sum(-1)
        assert [round(float(score), 4) for score in scores] == [n / 100 for n in lengths]
        truths = [entry["ground_truth"] for entry in columns["reward_model"]]
        assert truths == [str(entry["index"] + 1) for entry in columns["extra_info"]]
        assert set(columns["data_source"]) <= {"sums", "counts"}


def length_beside_tools(task: Path, folder: Path, index: int) -> int:
    """Counts the tokens of a row's first prompt, the tools' schemas among them."""
    schemas = load_tools([str(tool_file(folder))]).schemas()
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    return len(encode_chat(tokenizer, row(index)["prompt"], tools=schemas))


def task_that_shows_tools(task: Path, folder: Path) -> Path:
    """Copies the tiny model, with a template that writes the tools' schemas."""
    shutil.copytree(task / "model", folder / "model")
    template = folder / "model/chat_template.jinja"
    shown = "{% if tools %}<|im_start|> system {{ tools | tojson }} <|im_end|> {% endif %}"
    template.write_text(shown + template.read_text())
    return folder


def test_rows_that_do_not_fit_beside_the_tools_are_dropped(
    tiny_task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = task_that_shows_tools(tiny_task, tmp_path)
    limit = length_beside_tools(task, tmp_path, 1)
    long_row = {**row(0), "prompt": [{"role": "user", "content": "0 + 1 + 0 = ?"}]}
    rows = [row(1), long_row, row(2), long_row] * 2
    settings = (f"data.max_prompt_length={limit}", "data.filter_overlong_prompts=true")
    config = config_of(task, tmp_path, *settings)
    for name in ("train", "val"):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    with caplog.at_level("INFO"):
        trainer = build_trainer(config)
    kept = [entry["prompt"] for entry in trainer.train_dataloader.dataset]
    assert kept == [row(1)["prompt"], row(2)["prompt"]] * 2
    assert caplog.text.count(f"dropped 4 of 8 prompts longer than {limit} tokens") == 2

    (tmp_path / "train.json").write_text(json.dumps(rows))
    told = r"row 1 of .*train.json: the prompt has \d+ tokens, .*\(3 more prompts are"
    with pytest.raises(ValueError, match=told):
        build_trainer(replace(config, data=replace(config.data, filter_overlong_prompts=False)))


def test_tools_without_rows_are_refused(tiny_task: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.tools and data\.train_files"):
        config_of(tiny_task, tmp_path, "data.train_files=[]")


def test_a_score_function_that_fails_is_told_before_a_model_is_loaded(
    tiny_task: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_task, tmp_path)
    (tmp_path / "wrong.py").write_text(SCORES.replace("len(solution_str) / 100", "None"))
    function = replace(config.custom_reward_function, path=str(tmp_path / "wrong.py"))
    with pytest.raises(ConfigError, match=r"wrong\.py:5.*None"):
        build_trainer(replace(config, custom_reward_function=function))


def test_a_long_prompt_of_a_row_is_not_cut(tmp_path: Path) -> None:
    agent = Agent(DatasetRowEnvironment(), max_observation_chars=100)
    long = row(1) | {"prompt": [{"role": "user", "content": "word " * 8000}]}
    assert agent.reset(0, long) == long["prompt"]


def test_arguments_for_a_tool_that_there_is_not_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tools = load_tools([str(tool_file(tmp_path))])
    agent = Agent(DatasetRowEnvironment(), tools=tools, parser=get_parser("function"))
    misspelt = row(1)
    misspelt["extra_info"]["tools_kwargs"] = {"chekc": {}, "check": {}}
    for _ in range(2):
        agent.reset(0, misspelt)
    agent.reset(0, row(1))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "tools_kwargs of the rows are for chekc, and no tool is called so; the tools are: check"
    ]
