"""Tests single-turn prompts and rewards from an environment.

They are made from Python, and from a file that a config names; both are trained.
"""

import copy
import json
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from custom.agent import Agent
from custom.env import BadEnvironment, BaseEnvironment
from custom.env_dataset import CustomEnvDataset
from custom.envs.guess_number import GuessNumber
from custom.envs.tool_arithmetic import ToolArithmetic
from custom.reward_manager import CustomRewardManager, EnvironmentRewardWrapper
from data.protocol import DataProto
from data.rl_dataset import RLHFDataset, collate_fn, create_dataset, normalise_row
from examples.prepare_quickstart import make_tokenizer
from tests.e2e.test_training import tiny_config
from training.config import DataConfig
from training.config.schema.common import CustomClassConfig
from training.observers import Observer
from training.ray_trainer import RayPPOTrainer
from training.reward import compute_reward, load_reward_manager
from training.run.validation_names import is_validation_reward


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


class Between(BaseEnvironment):
    """Plays the task of configs/tiny_prompts.yaml, name a number between two others, with hooks."""

    def __len__(self):
        return 9

    def get_state(self, idx):
        return {"above": idx, "below": idx + 2}

    def get_action(self, idx):
        return f"guess {idx + 1}"

    def compute_reward(self, state, action):
        return float(action == f"guess {state['above'] + 1}")

    def reset(self, seed=None):
        raise AssertionError("the hooks are there to be used")

    def step(self, action):
        raise AssertionError("the hooks are there to be used")


class BetweenDataset(CustomEnvDataset):
    def state_to_text(self, state):
        return f"above {state['above']} below {state['below']}"


class Plain(BaseEnvironment):
    """Plays the same without hooks; the seed is the lower bound."""

    def reset(self, seed=None):
        self.above = seed % 9
        return f"above {self.above} below {self.above + 2}"

    def step(self, action):
        return "", float(action == f"guess {self.above + 1}"), True, {}


# The dataset


def test_hooks_give_state_action_and_length(tokenizer):
    dataset = BetweenDataset(Between(), tokenizer, num_rows=500)
    row = dataset[3]
    assert len(dataset) == 9 and isinstance(dataset, RLHFDataset)
    assert row["state"] == {"above": 3, "below": 5} and row["expected_action"] == "guess 4"
    assert row["prompt"] == [{"role": "user", "content": "above 3 below 5"}]
    assert (
        tokenizer.decode(row["input_ids"])
        == "<|im_start|> user above 3 below 5 <|im_end|> <|im_start|> assistant"
    )
    assert row["attention_mask"].tolist() == [1] * 9
    assert (row["index"], row["seed"], row["data_source"]) == (3, 3, "Between")
    with pytest.raises(IndexError, match="row 9 of 9"):
        dataset[9]
    assert len(list(dataset)) == 9


def test_a_plain_environment_gives_the_first_messages_of_its_agent():
    dataset = CustomEnvDataset(ToolArithmetic(), num_rows=5, first_seed=100)
    for number, row in enumerate(dataset):
        assert row["prompt"] == Agent(ToolArithmetic()).reset(100 + number)
        assert (row["state"], row["expected_action"], row["seed"]) == (
            row["prompt"][1]["content"],
            None,
            100 + number,
        )
        # Without a tokenizer a row holds text only.
        assert "input_ids" not in row
    assert dataset[2]["prompt"] == dataset[2]["prompt"] != dataset[3]["prompt"]


def test_state_to_text_and_template_variables_shape_the_prompt_of_a_plain_environment(tokenizer):
    class Shouting(CustomEnvDataset):
        def state_to_text(self, state):
            return state.replace("above", "higher")

    row = Shouting(Plain(), tokenizer, tokenizer_kwargs={"add_generation_prompt": False})[4]
    assert row["state"] == "above 4 below 6"
    assert tokenizer.decode(row["input_ids"]) == "<|im_start|> user higher 4 below 6 <|im_end|>"


def test_arguments_of_the_tokenizer_reach_it(tokenizer):
    whole = CustomEnvDataset(Plain(), tokenizer)[4]["input_ids"]
    for side, kept in (("right", whole[:5]), ("left", whole[-5:])):
        cutting = copy.deepcopy(tokenizer)
        cutting.truncation_side = side
        options = {"truncation": True, "max_length": 5, "return_tensors": "pt"}
        assert torch.equal(
            CustomEnvDataset(Plain(), cutting, tokenizer_kwargs=options)[4]["input_ids"], kept
        )

    class Padded(CustomEnvDataset):
        tokenizer_kwargs = MappingProxyType({"padding": "max_length", "max_length": len(whole) + 3})

    row = Padded(Plain(), tokenizer)[4]
    assert len(row["input_ids"]) == len(whole) + 3 and torch.equal(
        row["input_ids"][row["attention_mask"] == 1], whole
    )


def test_after_collation_states_are_objects_beside_the_tensors(tokenizer):
    class Tensors(Between):
        def get_state(self, idx):
            return torch.tensor([idx, idx + 2])

    def collate(rows):
        return collate_fn(
            [
                normalise_row(row, max_prompt_length=12, pad_token_id=0, truncation="error")
                for row in rows
            ]
        )

    for dataset, second in (
        (BetweenDataset(Between(), tokenizer), {"above": 1, "below": 3}),
        (CustomEnvDataset(Tensors(), tokenizer), None),
    ):
        data = DataProto.from_single_dict(
            next(iter(DataLoader(dataset, batch_size=4, collate_fn=collate)))
        )
        assert set(data.batch.keys()) == {"input_ids", "attention_mask", "position_ids"}
        assert data.non_tensor_batch["state"].dtype == object
        assert second is None or data.non_tensor_batch["state"][1] == second
        with pytest.raises(KeyError, match="state"):
            data.batch["state"]


def describe(path, **content):
    path.write_text(json.dumps(content))
    return str(path)


def data_config(path):
    return DataConfig(custom_cls=CustomClassConfig(path=path, name="CustomEnvDataset"))


def test_a_file_names_the_environment_and_the_rows_carry_it(tmp_path, tokenizer):
    kwargs = {"high": 9, "turns": 1}
    file = describe(
        tmp_path / "task.json",
        environment="custom.envs.guess_number:GuessNumber",
        kwargs=kwargs,
        num_rows=7,
    )
    dataset = create_dataset([file], data_config("custom/env_dataset.py"), tokenizer)
    assert len(dataset) == 7
    row = dataset[0]
    assert "1 to 9" in row["prompt"][0]["content"]
    assert row["environment"] == {"environment": row["data_source"], "kwargs": kwargs}
    assert (
        len(create_dataset([file], data_config("custom/env_dataset.py"), tokenizer, max_samples=3))
        == 3
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "does not describe an environment; allowed: "),
        ('{"kwargs": {}}', "does not describe an environment"),
        (
            '{"environment": "gymnasium:FrozenLake-v1", "seed": 1}',
            "does not describe an environment",
        ),
        (
            '{"environment": "FrozenLake"}',
            "'FrozenLake' is unknown; allowed: .*PACKAGE.MODULE:CLASS",
        ),
    ],
)
def test_a_file_that_describes_no_environment_says_so(tmp_path, text, message):
    file = tmp_path / "task.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        CustomEnvDataset(data_files=[str(file)])
    with pytest.raises(ValueError, match="needs env, or one data file"):
        CustomEnvDataset(data_files=[str(file)] * 2)


# The rewards


def batch_of(tokenizer, answers, **columns):
    """Makes responses `guess N <|im_end|>` with an environment's answer behind them.

    That is nobody's action.
    """
    rows = [tokenizer.encode(f"{answer} <|im_end|> correct") for answer in answers]
    responses = torch.zeros(len(rows), 6, dtype=torch.long)
    mask = torch.zeros_like(responses)
    for number, row in enumerate(rows):
        responses[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row) - 1] = 1
    return DataProto.from_dict({"responses": responses, "response_mask": mask}, columns)


def test_compute_reward_scores_the_rows_state(tokenizer):
    states = [{"above": 3, "below": 5}, {"above": 1, "below": 3}]
    manager = CustomRewardManager(Between(), tokenizer)
    rewards = manager(batch_of(tokenizer, ["guess 4", "guess 4"], state=states))
    # The reward lies on <|im_end|>, the last sampled token.
    assert rewards.tolist() == [[0, 0, 1, 0, 0, 0], [0] * 6]


def test_without_it_the_environment_is_reset_to_the_rows_seed_and_steps(tokenizer):
    manager = CustomRewardManager(Plain(), tokenizer)
    data = batch_of(tokenizer, ["guess 4", "guess 4", "guess 4"], seed=np.array([3, 2, 12]))
    rewards, infos = compute_reward(data, manager)
    assert rewards.sum(dim=1).tolist() == [1, 0, 1] and infos == {}


def test_extract_action_is_made_to_be_overridden(tokenizer):
    class LastNumber(CustomRewardManager):
        def extract_action(self, text):
            return f"guess {text.split()[-1]}"

    data = batch_of(tokenizer, ["number is 4"], seed=[3])
    assert LastNumber(Plain(), tokenizer)(data).sum() == 1
    assert CustomRewardManager(Plain(), tokenizer)(data).sum() == 0


def test_what_is_missing_and_what_fails_is_named(tokenizer):
    data = batch_of(tokenizer, ["guess 4"], seed=[3])
    with pytest.raises(ValueError, match="has no tokenizer"):
        CustomRewardManager(Plain())(data)
    with pytest.raises(KeyError, match="CustomRewardManager needs 'state'"):
        CustomRewardManager(Between(), tokenizer)(data)
    with pytest.raises(KeyError, match="without an environment of its own needs 'environment'"):
        CustomRewardManager(None, tokenizer)(data)

    class Nan(Plain):
        def step(self, action):
            return "", float("nan"), True, {}

    with pytest.raises(BadEnvironment, match="the reward nan") as caught:
        CustomRewardManager(Nan(), tokenizer)(data)
    assert caught.value.__notes__ == ["while Nan scored row 0, response: 'guess 4'"]


def test_the_registered_manager_reads_the_environment_from_the_rows(tokenizer):
    name = "custom.envs.guess_number:GuessNumber"
    game = GuessNumber()
    seeds = list(range(4))
    numbers = [game.reset(seed) and game.number for seed in seeds]
    answers = [f"guess {number}" for number in numbers[:3]] + [f"guess {numbers[3] % 10 + 1}"]
    described = [{"environment": name, "kwargs": {}}] * 4
    config = SimpleNamespace(
        custom_reward_function=SimpleNamespace(path=None, name="compute_score", reward_kwargs={}),
        reward_model=SimpleNamespace(reward_manager="custom", reward_kwargs={}),
        data=SimpleNamespace(reward_fn_key="data_source"),
        trainer=SimpleNamespace(run_dir="outputs"),
        section=lambda kind: kind(),
    )
    manager = load_reward_manager(config, tokenizer, num_examine=0)
    data = batch_of(tokenizer, answers, seed=seeds, environment=described)
    assert compute_reward(data, manager)[0].sum(dim=1).tolist() == [1, 1, 1, 0]


# Trained end to end


class Logged(Observer):
    """Keeps the metrics of each step."""

    def __init__(self):
        self.steps = []

    def step_logged(self, metrics):
        self.steps.append(metrics)


@pytest.mark.seconds
def test_both_train_from_python(tiny_task, tmp_path):
    config = tiny_config(tiny_task, tmp_path)
    tokenizer = make_tokenizer()
    logged = Logged()
    trainer = RayPPOTrainer(
        config,
        tokenizer,
        reward_fn=CustomRewardManager(Plain(), tokenizer),
        train_dataset=CustomEnvDataset(Plain(), tokenizer, num_rows=16),
        val_dataset=BetweenDataset(Between(), tokenizer),
        val_reward_fn=CustomRewardManager(Between(), tokenizer),
        observers=[logged],
    )
    trainer.init_workers()
    trainer.fit()
    steps = logged.steps
    assert len(steps) == 3 and 0 <= steps[2]["critic/score/mean"] <= 1
    assert "val-core/Between/reward/mean@1" in steps[2]


@pytest.mark.seconds
def test_both_train_from_a_config(tiny_task, tmp_path):
    from training.building import build_trainer

    (tmp_path / "between.py").write_text(
        "class Between:\n"
        "    def reset(self, seed):\n"
        "        self.above = seed % 9\n"
        "        return f'above {self.above} below {self.above + 2}'\n"
        "    def step(self, action):\n"
        "        return '', float(action == f'guess {self.above + 1}'), True, {}\n"
    )
    name = f"{tmp_path / 'between.py'}:Between"
    train = describe(tmp_path / "train.json", environment=name, num_rows=16)
    val = describe(tmp_path / "val.json", environment=name, num_rows=9, first_seed=1000)
    config = tiny_config(
        tiny_task,
        tmp_path / "run",
        f"data.train_files={train}",
        f"data.val_files={val}",
        "data.custom_cls.path=custom/env_dataset.py",
        "data.custom_cls.name=CustomEnvDataset",
        "reward_model.reward_manager=custom",
        "custom_reward_function.path=null",
        "trainer.observers=[tests.unit.test_env_dataset:Logged]",
    )
    trainer = build_trainer(config)
    trainer.init_workers()
    trainer.fit()
    metrics = trainer.observers.named["Logged"].steps[2]
    assert [key for key in metrics if is_validation_reward(key)] == [
        "val-core/between.py:Between/reward/mean@1"
    ]


# As guides write them, and by themselves


class GuidesDataset(RLHFDataset):
    def __init__(self, your_env, **kwargs):
        self.env = your_env
        super().__init__(**kwargs)

    def __getitem__(self, idx):
        state = self.env.get_state(idx)
        tokens = self.tokenizer(f"above {state['above']}", **self.tokenizer_kwargs)
        return {
            "input_ids": tokens["input_ids"],
            "attention_mask": tokens["attention_mask"],
            "prompt": "a text",
            "state": state,
            "expected_action": self.env.get_action(idx),
        }


@pytest.mark.parametrize("kwargs", [{}, {"return_tensors": "pt"}])
def test_a_guides_dataset_makes_its_rows_without_files(tokenizer, kwargs):
    dataset = GuidesDataset(Between(), tokenizer=tokenizer, tokenizer_kwargs=kwargs, num_rows=7)
    assert len(dataset) == 7 and dataset.tokenizer_kwargs == kwargs
    row = normalise_row(
        dataset[3], max_prompt_length=4, pad_token_id=tokenizer.pad_token_id, truncation="error"
    )
    assert tokenizer.decode(row["raw_prompt_ids"]) == "above 3"
    assert row["attention_mask"].tolist() == [0, 0, 1, 1]
    assert len(GuidesDataset(Between(), tokenizer=tokenizer)) == 1000


def test_a_dataset_that_reads_files_needs_them(tokenizer):
    with pytest.raises(ValueError, match="RLHFDataset needs data_files, tokenizer and config"):
        RLHFDataset(tokenizer=tokenizer)


def test_managers_score_what_was_made_by_hand(tokenizer):
    texts = ["guess 4", "guess 3"]
    states = np.array([{"above": 3}, {"above": 3}], dtype=object)
    by_text = DataProto.from_dict(
        tensors={}, non_tensors={"responses": np.array(texts, dtype=object), "state": states}
    )
    ids = torch.tensor([tokenizer.encode(text) for text in texts])
    by_id = DataProto.from_dict(tensors={"responses": ids}, non_tensors={"state": states})
    assert CustomRewardManager(Between())(by_text).tolist() == [1.0, 0.0]
    assert CustomRewardManager(Between(), tokenizer)(by_id).tolist() == [[0.0, 1.0], [0.0, 0.0]]
    with pytest.raises(ValueError, match="has no tokenizer to decode responses"):
        CustomRewardManager(Between())(by_id)

    # Their numbers are the seeds: below 1 and below 2.
    plain = by_text.select(non_tensor_batch_keys=["responses"])
    plain.non_tensor_batch["responses"][:] = ["guess 1", "guess 1"]
    assert CustomRewardManager(Plain())(plain).tolist() == [1.0, 0.0]
    assert EnvironmentRewardWrapper(Plain())(plain).tolist() == [1.0, 0.0]
    length = EnvironmentRewardWrapper(None, lambda trajectory: len(trajectory.actions[0]))
    assert length(plain).tolist() == [7.0, 7.0]
    with_prompts = DataProto.from_dict(tensors={"responses": ids, "prompts": ids})
    with pytest.raises(KeyError, match="needs 'seed'"):
        CustomRewardManager(Plain(), tokenizer)(with_prompts)
