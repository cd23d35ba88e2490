"""Single-turn training on an environment's prompts and rewards.

From Python, from YAML, and what a config of it lacks.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from custom.env import BaseEnvironment
from custom.env_dataset import CustomEnvDataset
from custom.reward_manager import CustomRewardManager
from data.rl_dataset import normalise_row
from main import run
from tests.conftest import PROJECT
from tests.e2e.test_training import read_steps, tiny_config
from training.agent_trainer import AgentTrainer
from training.config.loader import ConfigError, load_config
from training.ray_trainer import RayPPOTrainer

BETWEEN = """
class Between:
    def reset(self, seed=None):
        self.above = seed % 9
        return f"above {self.above} below {self.above + 2}"

    def step(self, action):
        found = action == f"guess {self.above + 1}"
        return "correct", float(found), True, {}
"""
MANAGER = "reward_model.reward_manager=custom"
NO_FUNCTION = "custom_reward_function.path=null"


class Between(BaseEnvironment):
    """Asks for a number between two others; its rewards are of the task it was reset to last."""

    def reset(self, seed: int | None = None) -> str:
        self.above = (seed or 0) % 9
        return f"above {self.above} below {self.above + 2}"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        found, self.above = action == f"guess {self.above + 1}", -1
        return "correct", float(found), True, {}


@pytest.fixture(scope="module")
def tokenizer(tiny_task: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_task / "model")


def fit(trainer: RayPPOTrainer) -> None:
    trainer.init_workers()
    trainer.fit()
    trainer.shutdown()


def check_scores(folder: Path, rows: int) -> None:
    """Checks that every row has the score its own prompt and answer deserve; some are right."""
    dumped = [
        json.loads(line)
        for step in (1, 2)
        for line in (folder / f"{step}.jsonl").read_text().splitlines()
    ]
    assert len(dumped) == rows
    for row in dumped:
        above = re.search(r"above (\d+) below", row["input"])
        assert above is not None
        answer = row["output"].replace("<|im_end|>", "").strip()
        assert row["score"] == float(answer == f"guess {int(above.group(1)) + 1}"), row
    assert len({row["score"] for row in dumped}) == 2


def test_text_rows_and_a_manager_without_a_tokenizer_train_from_python(
    tiny_task, tmp_path, tokenizer
) -> None:
    env = Between()
    config = tiny_config(
        tiny_task, tmp_path, f"trainer.rollout_data_dir={tmp_path}/dump", "data.train_batch_size=32"
    )
    dataset, reward_fn = CustomEnvDataset(env), CustomRewardManager(env)
    assert "input_ids" not in dataset[0]
    val = CustomEnvDataset(env, num_rows=9, first_seed=1000)
    fit(
        RayPPOTrainer(
            config, tokenizer, train_dataset=dataset, reward_fn=reward_fn, val_dataset=val
        )
    )
    check_scores(tmp_path / "dump", 64)
    assert "val-core/Between/reward/mean@1" in read_steps(tmp_path)[2]


def test_the_trainer_tokenises_text_as_the_dataset_does(tiny_task, tmp_path, tokenizer) -> None:
    class Questions(Dataset):
        """Any Dataset of texts, under a key of its own; every other row has ids already."""

        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> dict[str, Any]:
            ids = [1, 5, 8, 16]
            return (
                {"question": "above 3 below 5"}
                if i % 2
                else {"input_ids": ids, "attention_mask": [1] * 4}
            )

    settings = ["data.shuffle=false", "data.apply_chat_template_kwargs.add_generation_prompt=false"]
    for dataset, key in (
        (CustomEnvDataset(Between(), num_rows=16), "prompt"),
        (Questions(), "question"),
    ):
        config = tiny_config(tiny_task, tmp_path, *settings)
        # The files that it names have another key.
        config = replace(config, data=replace(config.data, prompt_key=key))
        trainer = RayPPOTrainer(
            config, tokenizer, train_dataset=dataset, reward_fn=CustomRewardManager(Between())
        )
        batch = next(iter(trainer.train_dataloader))
        template = {"add_generation_prompt": False}
        own = CustomEnvDataset(Between(), tokenizer, tokenizer_kwargs=template)[3]
        limits = {"max_prompt_length": config.data.max_prompt_length, "truncation": "error"}
        row = normalise_row(own, pad_token_id=tokenizer.pad_token_id, **limits)
        for name in ("input_ids", "attention_mask", "position_ids"):
            assert torch.equal(batch[name][3], row[name])
        assert tokenizer.decode(batch["raw_prompt_ids"][3]).endswith("below 5 <|im_end|>")
    assert batch["raw_prompt_ids"][2] == [1, 5, 8, 16]
    with pytest.raises(ValueError, match="tokenizer_kwargs without a tokenizer have no effect"):
        CustomEnvDataset(Between(), tokenizer_kwargs=template)


def test_a_row_without_ids_and_text_says_what_it_needs(tiny_task, tmp_path, tokenizer) -> None:
    class Nothing(CustomEnvDataset):
        def __getitem__(self, item: int) -> dict[str, Any]:
            return {"seed": item}

    config = tiny_config(tiny_task, tmp_path)
    trainer = RayPPOTrainer(
        config, tokenizer, train_dataset=Nothing(Between()), reward_fn=CustomRewardManager()
    )
    with pytest.raises(
        ValueError, match=r"need input_ids and attention_mask, or a text under data\.prompt_key"
    ):
        next(iter(trainer.train_dataloader))


def yaml_of(tiny_task: Path, folder: Path, more: str) -> Path:
    """A config file as a user writes it, beside between.py and task.json."""
    (folder / "between.py").write_text(BETWEEN)
    file = folder / "train.yaml"
    file.write_text(
        f"""extends: {PROJECT}/configs/tiny_prompts.yaml
actor_rollout_ref: {{model: {{path: {tiny_task}/model}}, actor: {{ppo_mini_batch_size: 16}}}}
custom_reward_function: {{path: null}}
trainer:
  default_local_dir: {folder}/run
  rollout_data_dir: {folder}/dump
  total_training_steps: 2
  logger: file
  test_freq: -1
  val_before_train: false
{more}"""
    )
    return file


def test_both_train_from_yaml_where_rows_name_their_environment(tiny_task, tmp_path) -> None:
    task = {"environment": f"{tmp_path}/between.py:Between", "num_rows": 64}
    (tmp_path / "task.json").write_text(json.dumps(task))
    more = f"""data:
  train_files: {tmp_path}/task.json
  val_files: null
  train_batch_size: 32
  custom_cls: {{path: custom/env_dataset.py, name: CustomEnvDataset}}
reward_model: {{reward_manager: custom}}
"""
    load_config([str(yaml_of(tiny_task, tmp_path, more))])
    trainer_of_main(tmp_path)
    check_scores(tmp_path / "dump", 64)


def trainer_of_main(folder: Path) -> None:
    """What `python main.py train.yaml` does, without the report and the signals."""
    from training.building import build_trainer

    fit(build_trainer(load_config([str(folder / "train.yaml")]).config))


CUSTOM_CLS = ("data.custom_cls.path=custom/env_dataset.py", "data.custom_cls.name=CustomEnvDataset")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [NO_FUNCTION],
            r"reward_manager=custom has no environment to ask; take rows that name theirs",
        ),
        ([*CUSTOM_CLS], r"leave custom_reward_function\.path out"),
    ],
)
def test_the_config_check_names_what_is_missing(tiny_task, tmp_path, overrides, problem) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        tiny_config(tiny_task, tmp_path, MANAGER, *overrides)
    assert len(caught.value.problems) == 1


def test_the_command_line_ends_with_the_problems(tiny_task, tmp_path, capsys) -> None:
    yaml_of(tiny_task, tmp_path, "reward_model: {reward_manager: custom}\n")
    assert run([str(tmp_path / "train.yaml")], signals=None) == 2  # type: ignore[arg-type]
    assert "has no environment to ask" in capsys.readouterr().err


class Untouchable(BaseEnvironment):
    def reset(self, seed: int | None = None) -> str:
        raise AssertionError("the rollout has played already")

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        raise AssertionError("the rollout has played already")


def test_rewards_that_the_rollout_gave_win_over_the_manager(tiny_task, tmp_path, tokenizer) -> None:
    (tmp_path / "between.py").write_text(BETWEEN)
    config = tiny_config(
        tiny_task,
        tmp_path,
        "data.train_files=null",
        "data.val_files=null",
        NO_FUNCTION,
        f"agent.environment.path={tmp_path}/between.py",
        "agent.environment.cls=Between",
        "agent.max_turn=1",
        f"records.folder={tmp_path}/episodes",
        "trainer.total_training_steps=1",
    )
    fit(AgentTrainer(config, tokenizer, reward_fn=CustomRewardManager(Untouchable())))
    episodes = [
        json.loads(line) for line in (tmp_path / "episodes/1.jsonl").read_text().splitlines()
    ]
    given = sum(turn["reward"] for episode in episodes for turn in episode["turns"]) / len(episodes)
    assert read_steps(tmp_path)[-1]["critic/score/mean"] == pytest.approx(given)
