"""Reward managers that let an environment, or a function of trajectories, score the responses.

Invariant: a batch that was played in environments keeps the rewards that it got there.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from custom.agent import reward_of
from custom.coroutines import finished
from custom.env import Observation, StepResult, Trajectory
from custom.env_calls import check_reward, reset_environment, step_environment
from custom.env_factory import make_environment
from custom.model_errors import ModelError
from custom.reward_managers.decoding import decode_prompt, decode_sampled, mask_of_responses
from custom.reward_managers.registry import register_reward_manager
from custom.reward_managers.unscored import UNSCORED, Unscored, warn_of_unscored
from data.outcome_rewards import place_outcome_rewards
from data.protocol import DataProto

# So much of a response is shown in an error message.
MAX_SHOWN_CHARS = 200


class CustomRewardManager:
    """Lets an environment score the responses: `CustomRewardManager(environment)`.

    A batch that has `environment_rewards` was played in an environment: they are its rewards, and
    nothing is asked again. To try the manager by itself a batch needs `responses` alone, as token
    ids (batch, response_len), or as texts in non_tensor_batch, which need no tokenizer.

    Args:
        environment: where it has `compute_reward(state, action)`, that scores the row's `state`;
            else the environment is reset to the row's `seed` (without prompts in the batch: to its
            number) and steps once. None: each row's
            `environment` column describes it, as CustomEnvDataset writes it from a file.
        tokenizer: decodes the responses, without special tokens; the trainer lends its own where it
            is None.
    """

    def __init__(self, environment: Any = None, tokenizer: Any = None) -> None:
        self.environment = environment
        self.tokenizer = tokenizer
        # Those that rows describe, by their descriptions as JSON.
        self.environments: dict[str, Any] = {}
        self.results: list[float | Unscored] = []

    def extract_action(self, text: str) -> str:
        """Returns the action in a response; made to be overridden."""
        return text.strip()

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Returns rewards (batch, response_len) float32; (batch,) for responses that are texts.

        With return_dict: {"reward_tensor": rewards, "reward_extra_info": {}}; rows that a model
        did not judge are marked there.
        """
        data.require("responses", by=type(self).__name__)
        # This call's results: one entry a row that an environment scored.
        self.results = []
        if "responses" in data.non_tensor_batch:
            rewards = self._score_texts(data, data.non_tensor_batch["responses"])
        elif "environment_rewards" in data.batch:
            rewards = data.batch["environment_rewards"]
        else:
            rewards = self._score_responses(data)
        if return_dict:
            infos: dict[str, list[bool]] = {}
            if warn_of_unscored(self.results):
                infos[UNSCORED] = [isinstance(result, Unscored) for result in self.results]
            return {"reward_tensor": rewards, "reward_extra_info": infos}
        return rewards

    def _score_responses(self, data: DataProto) -> torch.Tensor:
        if self.tokenizer is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} has no tokenizer to decode responses: give {name}(…, tokenizer=…), or "
                "responses as texts in non_tensor_batch; a trainer lends its own"
            )
        scores = self._score_texts(data, decode_sampled(self.tokenizer, data.batch))
        return place_outcome_rewards(scores, mask_of_responses(data.batch))

    def _score_texts(self, data: DataProto, texts: Iterable[str]) -> torch.Tensor:
        """Returns the rewards of the responses: (batch,)."""
        for row, text in enumerate(texts):
            try:
                self.results.append(self._score(data, row, text))
            except ModelError as error:
                self.results.append(Unscored(str(error)))
        return torch.tensor(
            [0.0 if isinstance(result, Unscored) else result for result in self.results]
        )

    def _seed_of(self, data: DataProto, row: int) -> int:
        """Returns the row's seed; its number where no prompt is there that it may contradict."""
        if "prompts" not in data.tensors():
            return int(data.non_tensor_batch.get("seed", range(len(data)))[row])
        data.require("seed", by=type(self).__name__)
        return int(data.non_tensor_batch["seed"][row])

    def _score(self, data: DataProto, row: int, text: str) -> float:
        """Returns the environment's reward for one response; an error names the row."""
        environment = self._environment_of(data, row)
        try:
            action = self.extract_action(text)
            if hasattr(environment, "compute_reward"):
                data.require("state", by=type(self).__name__)
                reward = finished(
                    environment.compute_reward(data.non_tensor_batch["state"][row], action)
                )
                return check_reward(reward, f"{type(environment).__name__}.compute_reward")
            reset_environment(environment, self._seed_of(data, row))
            return step_environment(environment, action).reward
        except Exception as error:
            response = text[:MAX_SHOWN_CHARS]
            error.add_note(
                f"while {type(environment).__name__} scored row {row}, response: {response!r}"
            )
            raise

    def _environment_of(self, data: DataProto, row: int) -> Any:
        """Returns the manager's environment, else the one that the row describes."""
        if self.environment is not None:
            return self.environment
        data.require("environment", by=f"{type(self).__name__} without an environment of its own")
        description: Mapping[str, Any] = data.non_tensor_batch["environment"][row]
        key = json.dumps(description, sort_keys=True)
        if key not in self.environments:
            self.environments[key] = make_environment(
                description["environment"], description["kwargs"]
            )
        return self.environments[key]


@register_reward_manager("custom")
class ConfiguredRewardManager(CustomRewardManager):
    """Lets the rows' environment score: `reward_model.reward_manager=custom`.

    data:                                   # CustomEnvDataset's rows name their environment
      train_files: task.json
      custom_cls: {path: custom/env_dataset.py, name: CustomEnvDataset}
    reward_model: {reward_manager: custom}

    The rows' `seed` says how it is reset, or their `state` what is scored where it has
    `compute_reward(state, action)`.
    """

    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: None = None, reward_fn_key: str = ""
    ) -> None:
        super().__init__(None, tokenizer)

    @staticmethod
    def check_config(config: Any) -> list[str]:
        """Lists what is missing, or too much, in a config that names this manager.

        The environment itself is built later.
        """
        problems = []
        if config.custom_reward_function.path:
            problems.append(
                "reward_model.reward_manager=custom asks the environment; leave "
                "custom_reward_function.path out, or choose reward_manager=naive"
            )
        if not config.data.custom_cls.path and not config.environments:
            problems.append(
                "reward_model.reward_manager=custom has no environment to ask; take rows that name "
                "theirs: data.custom_cls.path=custom/env_dataset.py "
                "data.custom_cls.name=CustomEnvDataset"
            )
        return problems


class EnvironmentRewardWrapper(CustomRewardManager):
    """Scores responses by a function of trajectories.

    It is called with a DataProto and returns rewards (batch, response_len) float32.

    Args:
        environment: is reset to a row's `seed`, else its number, and plays its response; None: the
            trajectory has the prompt as its state, the response as its action, and the row's
            columns as its info.
        reward_fn: `reward_fn(trajectory, environment)` or `reward_fn(trajectory)`; None: the
            environment's reward.
        tokenizer: see CustomRewardManager.
    """

    def __init__(
        self, environment: Any = None, reward_fn: Any = None, tokenizer: Any = None
    ) -> None:
        super().__init__(environment, tokenizer)
        self.reward_fn = reward_fn

    def _score(self, data: DataProto, row: int, text: str) -> float:
        columns = {name: values[row] for name, values in data.non_tensor_batch.items()}
        first_state: Observation
        if self.environment is None:
            first_state = ""
            if "prompts" in data.tensors():
                first_state = decode_prompt(self.tokenizer, data.batch, row)
            result = StepResult(observation="", reward=0.0, done=True, info=columns)
        else:
            first_state = reset_environment(self.environment, int(columns.get("seed", row)))
            result = step_environment(self.environment, self.extract_action(text))
        if self.reward_fn is None:
            return result.reward
        trajectory = Trajectory(states=[first_state])
        trajectory.record(text, result)
        return reward_of(self.reward_fn, trajectory, self.environment)
