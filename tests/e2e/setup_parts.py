"""What the tests of the small Python API share: an environment, a tool, a reward, a tiny config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from setup import (
    BaseEnvironment,
    BaseInferenceEngine,
    ConfigStore,
    Tool,
    ToolDefinition,
    Trajectory,
    create_inference_engine,
)

BACKENDS = ["hf", pytest.param("vllm", marks=pytest.mark.vllm)]


class TextGameEnv(BaseEnvironment):
    """The guide's environment: "take" is paid at once, "attack" ends the episode."""

    def reset(self) -> str:
        self.score = 0.0
        self.inventory: list[str] = []
        return "Welcome to the game! You are in a room."

    def step(self, action: str) -> tuple:
        reward = 0.0
        if "take" in action.lower():
            self.inventory.append("item")
            reward = 1.0
        elif "attack" in action.lower():
            reward = 5.0
            self._done = True
        else:
            reward = -0.1
        self.score += reward
        return self.get_state_description(), reward, self._done, {}

    def get_state_description(self) -> str:
        return f"Score: {self.score}, Inventory: {self.inventory}"

    def get_prompt_prefix(self) -> str:
        return "You are a helpful assistant."


class MyTool(Tool):
    definition = ToolDefinition(
        name="my_tool",
        description="Echoes.",
        parameters={
            "type": "object",
            "properties": {"param": {"type": "string"}},
            "required": ["param"],
        },
    )

    def execute(self, param: str) -> str:
        return param


def compute_reward(trajectory: Trajectory, environment: Any) -> float:
    return float(sum(len(action) for action in trajectory.actions))


def make_config(game: Path, folder: Path) -> ConfigStore:
    """A config that trains the tiny game's model in seconds; the run's folder is in `folder`."""
    store = ConfigStore()
    store.model.model_name = str(game / "model")
    store.model.dtype = "float32"
    store.inference.backend = "hf"
    store.inference.max_tokens = 6
    store.inference.max_turns = 2
    store.inference.max_prompt_length = 96
    store.inference.max_response_length = 96
    store.training.batch_size = 2
    store.training.group_size = 2
    store.training.learning_rate = 1e-3
    store.training.iterations_per_epoch = 2
    store.checkpoint.output_dir = str(folder / "run")
    return store


def make_hf_engine(game: Path) -> BaseInferenceEngine:
    settings = {"dtype": "float32", "max_model_len": 200}
    return create_inference_engine(str(game / "model"), "hf", settings)
