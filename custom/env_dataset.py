"""An environment's first observations as prompts, for single-turn training.

Invariant: row i is the same whenever it is read: its state is what the environment itself gives for
i (`get_state(i)`), or its first observation under the seed `first_seed + i`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from custom.agent import Agent, as_user_messages
from custom.env import Message
from custom.env_calls import call_method
from custom.env_factory import make_environment
from data.rl_dataset import RLHFDataset, truncate
from data.turn_tokens import encode_chat

# The keys of a data file, and their values where it lacks them.
DESCRIPTION: dict[str, Any] = {
    "environment": "gymnasium:FrozenLake-v1",
    "kwargs": {},
    "num_rows": 1000,
    "first_seed": 0,
}


class CustomEnvDataset(RLHFDataset):
    """Makes prompts from an environment: `CustomEnvDataset(env, tokenizer)`.

    Args:
        env: a BaseEnvironment; `get_state(idx)` and `get_action(idx)` are used where it has them,
            and its own length.
        tokenizer: None: rows hold text only, and the trainer tokenises them, with
            data.apply_chat_template_kwargs.
        num_rows: rows of an environment that has no length.
        data_files: in place of env, one JSON file that describes it, so that a config can name it:
            {"environment": "gymnasium:FrozenLake-v1", "kwargs": {}, "num_rows": 1000,
            "first_seed": 0}
        config: the `DataConfig`, whose apply_chat_template_kwargs are used.
        first_seed: seed of row 0, for a validation set of other episodes.
        tokenizer_kwargs: variables of the chat template, such as enable_thinking, and the
            tokenizer's own truncation, max_length and padding; they need the tokenizer.

    In a config, with task.json as above, and a file of its own (another first_seed) for validation:

    data:
      train_files: task.json
      custom_cls: {path: custom/env_dataset.py, name: CustomEnvDataset}
    reward_model: {reward_manager: custom}  # the rows name their environment

    Rows: `input_ids`, `attention_mask`, `prompt` (messages), `state`, `expected_action` (None where
    unknown), `seed`, and verl's `data_source`, `index` and `reward_model`; rows of a file also
    `environment`, its description. After collation all but the first two are in `non_tensor_batch`.
    """

    # A subclass may set its own.
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
                "tokenizer_kwargs without a tokenizer have no effect: "
                "set data.apply_chat_template_kwargs"
            )
        self.description: dict[str, Any] | None = None
        source = type(env).__name__
        if env is None:
            description = read_description(data_files)
            source = str(description["environment"])
            env = make_environment(description["environment"], description["kwargs"])
            num_rows = description["num_rows"]
            first_seed = description["first_seed"]
            self.description = description
        self.env = env
        self.tokenizer = tokenizer
        self.config = config
        self.processor = processor
        self.num_rows = len(env) if hasattr(env, "__len__") else num_rows
        self.first_seed = first_seed
        # A file's name without its folder: it ends up in the names of validation metrics.
        self.data_source = source.rpartition("/")[2]
        of_config = (config or {}).get("apply_chat_template_kwargs") or {}
        self.tokenizer_kwargs = {**of_config, **(tokenizer_kwargs or self.tokenizer_kwargs)}

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, item: int) -> dict[str, Any]:
        if not 0 <= item < self.num_rows:
            raise IndexError(f"row {item} of {self.num_rows}")
        state, prompt = self._state_and_prompt(item)
        expected_action = call_method(self.env, "get_action", item)
        row = {
            "prompt": prompt,
            "state": state.numpy() if isinstance(state, torch.Tensor) else state,
            "expected_action": expected_action,
            "seed": self.first_seed + item,
            "index": item,
            "data_source": self.data_source,
            "reward_model": {"ground_truth": expected_action},
        }
        if self.description is not None:
            row["environment"] = {
                "environment": self.description["environment"],
                "kwargs": self.description["kwargs"],
            }
        if self.tokenizer is not None:
            row.update(self.tokens(prompt))
        return row

    def state_to_text(self, state: Any) -> str:
        """Returns what the policy reads of a state; made to be overridden."""
        return str(state)

    def tokens(self, prompt: list[Message]) -> dict[str, torch.Tensor]:
        """Returns `input_ids` and `attention_mask` (prompt length,) of the chat prompt."""
        kwargs = self.tokenizer_kwargs
        max_length = kwargs.get("max_length")
        token_ids = encode_chat(self.tokenizer, prompt, **kwargs)
        cuts = kwargs.get("truncation") in (True, "longest_first", "only_first")
        if max_length is not None and cuts:
            token_ids = truncate(token_ids, max_length, self.tokenizer.truncation_side, "a prompt")
        padded = self.tokenizer.pad(
            {"input_ids": token_ids},
            padding=kwargs.get("padding", False),
            max_length=max_length,
            return_tensors="pt",
        )
        return {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}

    def _state_and_prompt(self, item: int) -> tuple[Any, list[Message]]:
        if hasattr(self.env, "get_state"):
            state = self.env.get_state(item)
            prefix = call_method(self.env, "get_prompt_prefix")
            prompt = as_user_messages(self.state_to_text(state))
            if prefix:
                prompt.insert(0, {"role": "system", "content": prefix})
            return state, prompt
        agent = Agent(self.env)
        messages = agent.reset(self.first_seed + item)
        state = agent.trajectory.states[0]
        # Messages of the environment's own are the prompt as they are.
        if isinstance(state, list):
            return state, messages
        system_messages = messages[:-1]
        return state, [*system_messages, *as_user_messages(self.state_to_text(state))]


def read_description(data_files: str | Sequence[str] | None) -> dict[str, Any]:
    """Reads the one file, with defaults filled in; ValueError says what is wrong with it."""
    files = [data_files] if isinstance(data_files, str | Path) else list(data_files or [])
    if len(files) != 1:
        raise ValueError(
            f"CustomEnvDataset needs env, or one data file that describes it; given {files}"
        )
    content = json.loads(Path(files[0]).expanduser().read_text(encoding="utf-8"))
    names_environment = isinstance(content, dict) and "environment" in content
    if not names_environment or content.keys() - DESCRIPTION.keys():
        raise ValueError(
            f"{files[0]} does not describe an environment; allowed: {json.dumps(DESCRIPTION)}"
        )
    return DESCRIPTION | content
