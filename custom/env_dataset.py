"""An environment's first observations as prompts, for single-turn training.

Invariant: row i is the same whenever it is read: its state is what the environment itself gives for i
(`get_state(i)`), or its first observation under the seed `first_seed + i`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from custom.adapters.base import make_environment
from custom.agent import Agent, as_user_messages
from custom.env import Message, call_method
from data.rl_dataset import RLHFDataset, truncate
from data.turn_tokens import encode_chat


class CustomEnvDataset(RLHFDataset):
    """Makes prompts from an environment: `CustomEnvDataset(env, tokenizer)`.

    Args:
        env: a BaseEnvironment; `get_state(idx)` and `get_action(idx)` are used where it has them, and its own length.
        tokenizer: None: rows hold text only, and the trainer tokenises them, with data.apply_chat_template_kwargs.
        num_rows: rows of an environment that has no length.
        data_files: in place of env, one JSON file that describes it, so that a config can name it (data.custom_cls):
            {"environment": "gymnasium:FrozenLake-v1", "kwargs": {}, "num_rows": 1000, "first_seed": 0}
        config: the `DataConfig`, whose apply_chat_template_kwargs are used.
        first_seed: seed of row 0, for a validation set of other episodes.
        tokenizer_kwargs: variables of the chat template, such as enable_thinking, and the tokenizer's own truncation,
            max_length and padding; they need the tokenizer.

    In a config, with task.json as above, and a file of its own (another first_seed) for validation:

    data:
      train_files: task.json
      custom_cls: {path: custom/env_dataset.py, name: CustomEnvDataset}
    reward_model: {reward_manager: custom}            # the rows name their environment, see ConfiguredRewardManager

    Rows: `input_ids`, `attention_mask`, `prompt` (messages), `state`, `expected_action` (None where unknown), `seed`,
    and verl's `data_source`, `index` and `reward_model`; rows of a file also `environment`, its description. After
    collation all but the two are in `non_tensor_batch`.
    """

    # Of a subclass's own.
    tokenizer_kwargs: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        env: Any = None,
        tokenizer: Any = None,
        num_rows: int = 1000,
        *,
        data_files: str | Sequence[str] | None = None,
        config: Any = None,
        processor: Any = None,
        first_seed: int = 0,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer is None and tokenizer_kwargs:
            raise ValueError(
                "tokenizer_kwargs without a tokenizer have no effect: set data.apply_chat_template_kwargs"
            )
        self.description = read_description(data_files) if env is None else None
        if self.description:
            env = make_environment(self.description["environment"], self.description["kwargs"])
            num_rows, first_seed = self.description["num_rows"], self.description["first_seed"]
        self.env, self.tokenizer, self.config, self.processor = env, tokenizer, config, processor
        self.num_rows, self.first_seed = (
            len(env) if hasattr(env, "__len__") else num_rows,
            first_seed,
        )
        # A file's name without its folder: it ends up in the names of validation metrics.
        named = str(self.description["environment"]) if self.description else type(env).__name__
        self.data_source = named.rpartition("/")[2]
        settings = (config or {}).get("apply_chat_template_kwargs") or {}
        self.tokenizer_kwargs = {**settings, **(tokenizer_kwargs or self.tokenizer_kwargs)}

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, item: int) -> dict[str, Any]:
        if not 0 <= item < self.num_rows:
            raise IndexError(f"row {item} of {self.num_rows}")
        state, prompt = self._state_and_prompt(item)
        expected = call_method(self.env, "get_action", item)
        row = {
            "prompt": prompt,
            "state": state.numpy() if isinstance(state, torch.Tensor) else state,
            "expected_action": expected,
            "seed": self.first_seed + item,
            "index": item,
            "data_source": self.data_source,
            "reward_model": {"ground_truth": expected},
        }
        if self.description:
            row["environment"] = {key: self.description[key] for key in ("environment", "kwargs")}
        return row if self.tokenizer is None else row | self.tokens(prompt)

    def state_to_text(self, state: Any) -> str:
        """Writes what the policy reads of a state; made to be overridden."""
        return str(state)

    def tokens(self, prompt: list[Message]) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `attention_mask` (prompt length,) of the chat prompt."""
        given = self.tokenizer_kwargs
        token_ids, limit = encode_chat(self.tokenizer, prompt, **given), given.get("max_length")
        if limit is not None and given.get("truncation") in (True, "longest_first", "only_first"):
            token_ids = truncate(token_ids, limit, self.tokenizer.truncation_side, "a prompt")
        padding = {"padding": given.get("padding", False), "max_length": limit}
        padded = self.tokenizer.pad({"input_ids": token_ids}, **padding, return_tensors="pt")
        return {key: padded[key] for key in ("input_ids", "attention_mask")}

    def _state_and_prompt(self, item: int) -> tuple[Any, list[Message]]:
        if hasattr(self.env, "get_state"):
            state, prefix = self.env.get_state(item), call_method(self.env, "get_prompt_prefix")
            system = [{"role": "system", "content": prefix}] if prefix else []
        else:
            agent = Agent(self.env)
            *system, first = agent.reset(self.first_seed + item)
            state = agent.trajectory.states[0]
            if isinstance(state, list):
                return state, [*system, first]
        return state, [*system, *as_user_messages(self.state_to_text(state))]


def read_description(data_files: str | Sequence[str] | None) -> dict[str, Any]:
    """Reads the one file, with defaults filled in; ValueError says what is wrong with it."""
    files = [data_files] if isinstance(data_files, str | Path) else list(data_files or [])
    if len(files) != 1:
        raise ValueError(
            f"CustomEnvDataset needs env, or one data file that describes it; given {files}"
        )
    example = {
        "environment": "gymnasium:FrozenLake-v1",
        "kwargs": {},
        "num_rows": 1000,
        "first_seed": 0,
    }
    content = json.loads(Path(files[0]).expanduser().read_text(encoding="utf-8"))
    if (
        not isinstance(content, dict)
        or "environment" not in content
        or content.keys() - example.keys()
    ):
        raise ValueError(
            f"{files[0]} does not describe an environment; allowed: {json.dumps(example)}"
        )
    return example | content
