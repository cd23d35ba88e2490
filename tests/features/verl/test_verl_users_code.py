"""What a user of verl has written runs here once its imports are changed, and they alone.

Each source is as it would be for verl; features/verl/verl_modules.py changes it, and the project's
own doors take it: `custom_algorithm`, `data.custom_cls`, `reward_model.reward_manager`,
`agent.tools`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from custom.reward_manager import get_reward_manager_cls
from custom.reward_managers.registry import REWARD_MANAGER_REGISTRY
from custom.tools import ToolCall, load_tools
from data.loading import load_extern_object
from data.protocol import DataProto
from data.rl_dataset import create_dataset
from features.verl.config import ActorConfig, PolicyLossConfig
from features.verl.verl_modules import rewritten
from training.advantage import compute_advantage
from training.config import AlgorithmConfig, DataConfig
from training.config.schema.common import CustomClassConfig
from training.core_algos import PolicyLossConfig as ConfigOfRun
from training.core_algos import registry

LOSS = """
import torch
import verl.utils.torch_functional as verl_F
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.workers.config import ActorConfig


@register_policy_loss("squared_ratio")
def squared_ratio(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights=None,
):
    assert isinstance(config.clip_ratio, float) and config.policy_loss.get("loss_mode")
    bound = config.get("clip_ratio_c", 3.0)
    log_ratio = torch.clamp(log_prob - old_log_prob, -20.0, 20.0)
    losses = -advantages * torch.exp(log_ratio).clamp(max=bound) ** 2
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/ppo_kl": verl_F.masked_mean(-log_ratio, response_mask).detach().item()}
"""

ESTIMATOR = """
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import compute_rloo_outcome_advantage, register_adv_est


@register_adv_est("half_rloo")
def half_rloo(token_level_rewards, response_mask, index, config: AlgoConfig = None, **kwargs):
    advantages, returns = compute_rloo_outcome_advantage(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=index,
        config=config,
        **kwargs,
    )
    share = config.get("gamma", 1.0)
    return share * advantages, returns
"""

DATASET = """
import logging

from omegaconf import DictConfig
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

logger = logging.getLogger(__name__)


class Above(RLHFDataset):
    def __init__(self, data_files, tokenizer, config: DictConfig, processor=None):
        super().__init__(data_files, tokenizer, config, processor)
        self.word = config.get("reward_fn_key", "data_source")

    def _build_messages(self, example: dict):
        messages = list(example[self.prompt_key])
        return [{**message, "content": f"above {message['content']}"} for message in messages]

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["changed"] = True
        return row
"""

MANAGER = """
from collections import defaultdict

import torch

from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


@register("by_length")
class ByLength(AbstractRewardManager):
    def __init__(
        self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **kwargs
    ):
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict: bool = False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            length = int(item.batch["attention_mask"][prompt_length:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:length])
            score = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=text,
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info", {}),
            )
            rewards[i, length - 1] = score
            extra["length"].append(length)
        if return_dict:
            return {"reward_tensor": rewards, "reward_extra_info": extra}
        return rewards
"""

TOOL = """
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class Adder(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.totals = {}
        self.required = self.tool_schema.function.parameters.required

    async def create(self, instance_id: Optional[str] = None, start: int = 0, **kwargs):
        instance_id = instance_id or str(uuid4())
        self.totals[instance_id] = start
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        if any(name not in parameters for name in self.required):
            return ToolResponse(text="missing"), -0.1, {}
        self.totals[instance_id] += int(parameters["amount"]) * self.config["factor"]
        return ToolResponse(text=f"total {self.totals[instance_id]}"), 0.0, {"calls": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(self.totals[instance_id])

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.totals[instance_id]
"""


@pytest.fixture(autouse=True)
def registries_as_they_were() -> Iterator[None]:
    registry.load_built_in()
    names = ("ADV_ESTIMATOR_REGISTRY", "POLICY_LOSS_REGISTRY", "ESTIMATOR_NEEDS")
    names += ("ESTIMATOR_FACTS",)
    tables: list[dict[str, Any]] = [getattr(registry, name) for name in names]
    before = [set(table) for table in (*tables, REWARD_MANAGER_REGISTRY)]
    yield
    for table, known in zip((*tables, REWARD_MANAGER_REGISTRY), before, strict=True):
        for name in set(table) - known:
            del table[name]


def ported(source: str, folder: Path, name: str) -> str:
    """Writes a file for verl with its imports changed; nothing but imports from verl may differ."""
    text = rewritten(source)
    kept = [line for line in source.splitlines() if " verl" not in line]
    assert [line for line in text.splitlines() if line in kept] == kept
    assert "verl." not in text.replace("features.verl.", "") and "import verl" not in text
    file = folder / f"{name}.py"
    file.write_text(text)
    return str(file)


def test_a_loss(tmp_path: Path) -> None:
    load_extern_object(ported(LOSS, tmp_path, "loss"), "squared_ratio")
    loss_fn = registry.get_policy_loss_fn("squared_ratio")
    old = torch.tensor([[-1.0, -2.0]])
    new = torch.tensor([[-1.0, -2.0 + np.log(2.0)]], requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0]])
    mask = torch.tensor([[1, 1]])
    as_verl_tests = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size=2, use_torch_compile=False
    )
    assert list(as_verl_tests) and as_verl_tests["rollout_n"] == 1
    as_a_run = ConfigOfRun(global_batch_info={"batch_num_tokens": 4})
    for config, share in ((as_verl_tests, 1.0), (as_a_run, 0.5)):
        loss, metrics = loss_fn(old, new, advantages, mask, "token-mean", config)
        assert loss.item() == pytest.approx(share * (-1 + 4) / 2)
        assert metrics["actor/ppo_kl"] == pytest.approx(-np.log(2) / 2)
    loss.backward()
    assert new.grad is not None and new.grad.abs().sum() > 0


def test_an_estimator(tmp_path: Path) -> None:
    load_extern_object(ported(ESTIMATOR, tmp_path, "estimator"), "half_rloo")
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.tensor([[0.0, 4.0], [2.0, 0.0]]),
            "response_mask": torch.tensor([[1, 1], [1, 0]]),
            # With **kwargs it is handed everything, which rloo does not know.
            "values": torch.zeros(2, 2),
        },
        non_tensors={"uid": ["a", "a"], "data_source": ["x", "x"]},
    )
    config = AlgorithmConfig(adv_estimator="half_rloo", gamma=0.5)
    compute_advantage(data, "half_rloo", gamma=0.5, config=config)
    assert data.batch["advantages"].tolist() == [[1.0, 1.0], [-1.0, 0.0]]


def test_a_dataset(tmp_path: Path, tiny_task: Path) -> None:
    from transformers import AutoTokenizer

    rows = [
        {
            "data_source": "mine",
            "prompt": [{"role": "user", "content": "1 below 8"}],
            "reward_model": {"ground_truth": "1 8"},
        }
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    path = ported(DATASET, tmp_path, "dataset")
    config = DataConfig(
        max_prompt_length=12,
        return_raw_chat=True,
        custom_cls=CustomClassConfig(path=path, name="Above"),
    )
    (row,) = create_dataset(str(tmp_path / "rows.json"), config, tokenizer)
    assert row["raw_prompt"][0]["content"] == "above 1 below 8" and row["changed"]
    built_by_hand = load_extern_object(path, "Above")(
        data_files=str(tmp_path / "rows.json"),
        tokenizer=tokenizer,
        config=OmegaConf.create({"max_prompt_length": 12, "prompt_key": "prompt"}),
    )
    batch = load_extern_object(path, "collate_fn")([built_by_hand[0]])
    assert batch["input_ids"].shape == (1, 12)


def test_a_reward_manager(tmp_path: Path, tiny_task: Path) -> None:
    from transformers import AutoTokenizer

    load_extern_object(ported(MANAGER, tmp_path, "manager"), "ByLength")
    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    data = DataProto.from_single_dict(
        {
            "prompts": torch.ones(2, 2, dtype=torch.long),
            "responses": torch.tensor([[4, 5, 6], [4, 5, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
            "reward_model": np.array([{"ground_truth": "1"}] * 2, dtype=object),
            "data_source": np.array(["mine"] * 2, dtype=object),
        }
    )

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any):
        return len(solution_str.split())

    manager = get_reward_manager_cls("by_length")(tokenizer, 0, compute_score)
    result = manager(data, return_dict=True)
    assert result["reward_extra_info"]["length"] == [3, 2]
    assert result["reward_tensor"][0, 2] > 0 and result["reward_tensor"][1, 1] > 0
    built_in = get_reward_manager_cls("naive")(tokenizer, 0, compute_score)(data)
    assert built_in.tolist() == result["reward_tensor"].tolist(), "also without response_mask"


def test_a_tool(tmp_path: Path) -> None:
    ported(TOOL, tmp_path, "adder")
    parameters = {
        "type": "object",
        "properties": {"amount": {"type": "integer", "description": "How much."}},
        "required": ["amount"],
    }
    function = {"name": "add", "description": "Adds.", "parameters": parameters}
    entry = {
        "class_name": f"{tmp_path}/adder.py:Adder",
        "config": {"type": "native", "factor": 2},
        "tool_schema": {"type": "function", "function": function},
    }
    (tmp_path / "tools.yaml").write_text(OmegaConf.to_yaml({"tools": [entry]}))
    tools = load_tools([str(tmp_path / "tools.yaml")])
    tool: Any = tools.tools["add"]
    tool.begin_episode({"extra_info": {"tools_kwargs": {"add": {"create_kwargs": {"start": 5}}}}})
    assert tools.execute(ToolCall("add", {"amount": 3})).result == "total 11"
    assert tool.tool.totals == {}, "released"


def test_a_loss_of_bypass_mode_reads_the_correction_where_verl_has_it() -> None:
    loss_fn = registry.get_policy_loss_fn("bypass_mode")
    engine = torch.tensor([[-1.0, -1.0]])
    policy = torch.log(torch.tensor([[0.9, 0.1]]))
    advantages = torch.ones(1, 2)
    mask = torch.ones(1, 2)
    correction = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
    config = ActorConfig(policy_loss=PolicyLossConfig(rollout_correction=correction))
    loss, metrics = loss_fn(engine, policy, advantages, mask, "token-mean", config)
    ratio = (policy - engine).exp().clamp(max=2.0)
    assert loss.item() == pytest.approx(-(ratio * policy).mean().item())
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
    beside = ConfigOfRun(rollout_correction=correction)
    assert loss_fn(engine, policy, advantages, mask, "token-mean", beside)[0] == loss
