"""CustomRewardManager: an environment judges the responses to its own prompts, in single-turn training.

Rewards lie on each row's last sampled token, and only what the policy sampled is read as its action.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from custom.env import check_reward, reset_environment, step_environment
from custom.env_wrapper import ADAPTERS, make_environment
from data.protocol import DataProto
from training.reward import place_outcome_rewards

NO_FUNCTION = (
    "reward_model.reward_manager=custom asks the environment for rewards; leave custom_reward_function.path out, "
    "or choose reward_manager=naive"
)


class CustomRewardManager:
    """DataProto -> rewards: `CustomRewardManager(environment)`.

    Args:
        environment: where it has `compute_reward(state, action)`, that scores the row's `state`; else the environment
            is reset to the row's `seed` and steps once. None: each row's `environment` column describes it, as
            CustomEnvDataset writes it from a file.
        tokenizer: decodes the responses, without special tokens; the trainer lends its own where it is None.
        num_examine: rows that are printed at each call.
    A batch that has `environment_rewards` was played in an environment: they are its rewards, and nothing is asked again.
    """

    def __init__(self, environment: Any = None, tokenizer: Any = None, num_examine: int = 0) -> None:
        self.environment, self.tokenizer, self.num_examine = environment, tokenizer, num_examine
        self.environments: dict[str, Any] = {}  # by description

    def extract_action(self, text: str) -> str:
        """The action in a response; made to be overridden."""
        return text.strip()

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Rewards (batch, response_len) float32; with return_dict as {"reward_tensor", "reward_extra_info"}."""
        data.require("responses", "response_mask", by=type(self).__name__)
        rewards = data.batch.get("environment_rewards", None)
        if rewards is None:
            rewards = self._judge(data)
        return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards

    def _judge(self, data: DataProto) -> torch.Tensor:
        texts = self._texts(data)
        scores = [self._score(data, row, text) for row, text in enumerate(texts)]
        for text, score in list(zip(texts, scores, strict=True))[: self.num_examine]:
            print(f"response: {text}\nscore: {score:g}")
        return place_outcome_rewards(torch.tensor(scores), data.batch["response_mask"])

    def _texts(self, data: DataProto) -> list[str]:
        if self.tokenizer is None:
            raise ValueError(
                "CustomRewardManager has no tokenizer to decode responses: CustomRewardManager(env, tokenizer)"
            )
        sampled = data.batch["response_mask"].bool().cpu()
        rows = zip(data.batch["responses"].cpu(), sampled, strict=True)
        return self.tokenizer.batch_decode([ids[keep].tolist() for ids, keep in rows], skip_special_tokens=True)

    def _score(self, data: DataProto, row: int, text: str) -> float:
        environment = self._environment_of(data, row)
        try:
            action = self.extract_action(text)
            if hasattr(environment, "compute_reward"):
                data.require("state", by=type(self).__name__)
                reward = environment.compute_reward(data.non_tensor_batch["state"][row], action)
                return check_reward(reward, f"{type(environment).__name__}.compute_reward")
            data.require("seed", by=type(self).__name__)
            reset_environment(environment, int(data.non_tensor_batch["seed"][row]))
            return step_environment(environment, action).reward
        except Exception as error:
            error.add_note(f"while {type(environment).__name__} scored row {row}, response: {text[:200]!r}")
            raise

    def _environment_of(self, data: DataProto, row: int) -> Any:
        if self.environment is not None:
            return self.environment
        data.require("environment", by=f"{type(self).__name__} without an environment of its own")
        description: Mapping[str, Any] = data.non_tensor_batch["environment"][row]
        key = json.dumps(description, sort_keys=True)
        if key not in self.environments:
            self.environments[key] = make_environment(description["environment"], description["kwargs"])
        return self.environments[key]


class ConfiguredRewardManager(CustomRewardManager):
    """`reward_model.reward_manager=custom`: the environment of the rows, or one that the config names.

    data:                                             # CustomEnvDataset's rows name their environment
      train_files: task.json
      custom_cls: {path: custom/env_dataset.py, name: CustomEnvDataset}
    reward_model:
      reward_manager: custom
      reward_kwargs:                                  # only where rows, of any other dataset, name none
        environment: gymnasium:FrozenLake-v1          # or package.module:Class, /path/to/file.py:Class
        kwargs: {is_slippery: false}
    The rows' `seed` says how it is reset, or their `state` what is scored where it has `compute_reward(state, action)`.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        environment: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if compute_score is not None:
            raise ValueError(NO_FUNCTION)
        made = None if environment is None else make_environment(environment, kwargs)
        super().__init__(made, tokenizer, num_examine)

    @staticmethod
    def check_config(config: Any) -> list[str]:
        """What is missing, or too much, in a config that names this manager; the environment itself is built later."""
        settings = config.reward_model.reward_kwargs
        problems = [] if config.custom_reward_function.path is None else [NO_FUNCTION]
        if unknown := sorted(settings.keys() - {"environment", "kwargs"}):
            problems.append(f"reward_model.reward_kwargs has {', '.join(unknown)}; allowed: environment and its kwargs")
        name = settings.get("environment")
        if name is not None and not (isinstance(name, str) and all(name.rpartition(":")[::2])):
            problems.append(
                f"reward_model.reward_kwargs.environment={name!r} must be {', '.join(f'{a}:…' for a in ADAPTERS)}, "
                "package.module:Class or /path/to/file.py:Class"
            )
        if name is None and config.data.custom_cls.path is None and not config.environments:
            problems.append(
                "reward_model.reward_manager=custom has no environment to ask: set reward_model.reward_kwargs.environment, "
                "or take rows that name theirs: data.custom_cls.path=custom/env_dataset.py data.custom_cls.name=CustomEnvDataset"
            )
        return problems
