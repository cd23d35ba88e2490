"""Reward managers: from a batch of responses to scores, by a function or an environment that sees only text.

A manager is built once per run and called with each batch; `reward_model.reward_manager` chooses it by its registered
name; its class may have `check_config(config)`, which lists what the config lacks. Invariant: only sampled tokens
(response_mask 1) are decoded, so that an environment's text never counts as the policy's.
"""

import json
import logging
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeAlias

import numpy as np
import torch
from pebble import ProcessExpired, ProcessPool
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from custom.adapters.base import make_environment
from custom.agent import reward_of
from custom.confine import die_with_parent
from custom.env import (
    StepResult,
    Trajectory,
    check_reward,
    reset_environment,
    shown,
    step_environment,
)
from custom.reward_score import default_compute_score, score_from_file
from data.containers import place_outcome_rewards
from data.protocol import DataProto
from data.texts import registered, registering, say, say_where
from data.watch import beat

logger = logging.getLogger(__name__)
REWARD_MANAGER_REGISTRY: dict[str, type] = {}


def register_reward_manager(name: str) -> Callable[[type], type]:
    """Makes a class available as `reward_model.reward_manager=name`; a class decorator."""
    return registering(REWARD_MANAGER_REGISTRY, "reward manager", name)


register = register_reward_manager  # verl's name


def get_reward_manager_cls(name: str) -> type:
    """Returns the class registered under `name`; ValueError with the names there are."""
    return registered(REWARD_MANAGER_REGISTRY, "reward_model.reward_manager", name)


def decode_sampled(tokenizer: PreTrainedTokenizerBase, tensors: TensorDict) -> list[str]:
    """Decodes the sampled tokens of each row, without special tokens."""
    rows = zip(tensors["responses"].cpu(), tensors["response_mask"].bool().cpu(), strict=True)
    # Row by row: the ids of a whole batch as Python's numbers would be many times the batch.
    return [tokenizer.decode(ids[keep].tolist(), skip_special_tokens=True) for ids, keep in rows]


def decode_prompt(tokenizer: PreTrainedTokenizerBase, tensors: TensorDict, row: int) -> str:
    """Decodes the prompt of a row, without padding and special tokens."""
    ids = tensors["prompts"][row]
    return tokenizer.decode(
        ids[tensors["attention_mask"][row, : len(ids)] > 0], skip_special_tokens=True
    )


# One row as a scoring function sees it: its keyword arguments.
Sample: TypeAlias = dict[str, Any]


@register_reward_manager("dapo")
@register_reward_manager("naive")
class NaiveRewardManager:
    """Scores row by row: compute_score(data_source=, solution_str=, ground_truth=, extra_info=, **reward_kwargs).

    extra_info holds the row's own entries, `num_turns` (the prompt and each answer) and
    `rollout_reward_scores`, what the rollout itself gave (`reward_scores` of the row, a dict).

    Args:
        tokenizer: decodes the responses, without special tokens.
        num_examine: rows per data source that are printed at each call.
        compute_score: returns a number, or a dict with "score" whose entries all become extra infos under their own
            names, "score" too; by default the built-in rules by data source. An entry named "reward" scores nothing,
            and in validation the trainer's own "reward", the sum of each row's rewards, stands in its place.
        reward_fn_key: the column that holds the data source.
        max_resp_len, overlong_buffer_cfg: take reward from responses that come near the limit, in tokens
            (arXiv:2503.14476, eq. 13): with a buffer of `len` = b before the limit L a response of n > L - b loses
            penalty_factor * (n - (L - b)) / b, if `enable` is set; with `log`, overlong_reward and overlong are further
            values. `load_reward_manager` gives data.max_response_length and reward_model.overlong_buffer.
        reward_kwargs: further keyword arguments for compute_score.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
        **reward_kwargs: Any,
    ) -> None:
        self.tokenizer, self.num_examine = tokenizer, num_examine
        self.compute_score: Callable[..., Any] = compute_score or default_compute_score
        self.reward_fn_key, self.reward_kwargs = reward_fn_key, reward_kwargs
        self.buffer = (
            overlong_buffer_cfg if overlong_buffer_cfg and overlong_buffer_cfg.enable else None
        )
        self.limit = max_resp_len or 0
        if self.buffer and not 0 < self.buffer.len <= self.limit:
            raise ValueError(
                f"overlong_buffer.len={self.buffer.len} must be 1 to max_resp_len={self.limit} tokens"
            )

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Returns rewards (batch, response_len) float32, each row's score on its last sampled token.

        With return_dict: {"reward_tensor": rewards, "reward_extra_info": name -> list of length batch}; a row whose
        dict lacks a name that others have holds None there.
        """
        columns = ("reward_model", self.reward_fn_key)
        data.require(
            "prompts",
            "responses",
            "response_mask",
            "attention_mask",
            *columns,
            by=type(self).__name__,
        )
        samples = self._read(data.batch, data.non_tensor_batch)
        results = self._score(samples)
        scores = [
            _score_of(result, *numbered)
            for result, numbered in zip(results, enumerate(samples), strict=True)
        ]
        infos = _extra_infos(results, scores)
        mask = data.batch["response_mask"]
        scores, more = self._adjusted(scores, mask.sum(-1).tolist())
        self._print_examples(data.batch, samples, scores)
        rewards = place_outcome_rewards(torch.tensor(scores), mask)
        return (
            {"reward_tensor": rewards, "reward_extra_info": infos | more}
            if return_dict
            else rewards
        )

    def _adjusted(
        self, scores: list[float], lengths: list[int]
    ) -> tuple[list[float], dict[str, list[Any]]]:
        """Takes from scores what the buffer says of the numbers of sampled tokens; returns further values, too."""
        if self.buffer is None:
            return scores, {}
        size, factor = self.buffer.len, self.buffer.penalty_factor
        losses = [min((self.limit - size - length) / size * factor, 0.0) for length in lengths]
        told = {"overlong_reward": losses, "overlong": [loss < 0 for loss in losses]}
        return [a + b for a, b in zip(scores, losses, strict=True)], told if self.buffer.log else {}

    def _read(self, tensors: TensorDict, columns: dict[str, np.ndarray]) -> list[Sample]:
        texts = decode_sampled(self.tokenizer, tensors)
        nothing = [None] * len(texts)
        # As verl counts: the prompt and each answer.
        given, paid, turns = (
            columns.get(name, nothing) for name in ("extra_info", "reward_scores", "__num_turns__")
        )
        turns = tensors["turn_ids"].amax(1).add(2).tolist() if "turn_ids" in tensors else turns
        samples = []
        for row, text in enumerate(texts):
            extra = {
                **(given[row] or {}),
                "num_turns": turns[row],
                "rollout_reward_scores": paid[row] or {},
            }
            told = columns["reward_model"][row]
            if not isinstance(told, Mapping) or "ground_truth" not in told:
                raise ValueError(
                    f"row {row}: reward_model is {told!r}; it must be a dict with 'ground_truth'"
                )
            named = {"data_source": columns[self.reward_fn_key][row], "solution_str": text}
            samples.append({**named, "ground_truth": told["ground_truth"], "extra_info": extra})
        return samples

    def _score(self, samples: list[Sample]) -> list[Any]:
        results = []
        for row, sample in enumerate(samples):
            beat("the reward of a row began")
            try:
                results.append(self.compute_score(**sample, **self.reward_kwargs))
            except Exception as error:
                raise RuntimeError(
                    f"compute_score failed with {error!r} on {_describe(row, sample)}"
                ) from error
        return results

    def _print_examples(
        self, tensors: TensorDict, samples: list[Sample], scores: list[float]
    ) -> None:
        printed: Counter[str] = Counter()
        for row, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            printed[sample["data_source"]] += 1
            if printed[sample["data_source"]] <= self.num_examine:
                prompt = decode_prompt(self.tokenizer, tensors, row)
                print(
                    "[{data_source}] prompt: {0}\nresponse: {solution_str}".format(prompt, **sample)
                )
                print(f"truth: {sample['ground_truth']}\nscore: {score:g}")


DAPORewardManager = NaiveRewardManager  # verl's name, with the limits above


@register_reward_manager("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Scores rows side by side in processes, each within a deadline; for functions that compute long, or may hang.

    A row that takes longer, or whose process dies, scores 0, and another process takes its place. `compute_score`
    stands at the top level of a file, which each process loads for itself.

    Args:
        num_processes: at work at once; None: as many as there are cores.
        timeout_s: for one row.
        args, kwargs: as of NaiveRewardManager.
    """

    def __init__(
        self, *args: Any, num_processes: int | None = None, timeout_s: float = 300.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        given = partial(self.compute_score)
        self.reward_kwargs, function = given.keywords | self.reward_kwargs, given.func
        module, name = (
            sys.modules.get(getattr(function, "__module__", "")),
            getattr(function, "__name__", ""),
        )
        if getattr(module, name, None) is not function or not getattr(module, "__file__", None):
            raise ValueError(
                f"reward_manager=prime: {function!r} must stand in a file, at its top level by its name"
            )
        self.source, self.timeout_s = (str(module.__file__), name), timeout_s  # type: ignore[union-attr]
        # Fresh ones: a fork of this process would have its models' threads half.
        size, fresh = num_processes or os.cpu_count() or 1, get_context("spawn")
        self.pool = ProcessPool(size, context=fresh, initializer=die_with_parent)
        # They end with the thread that starts them: that is this one, and none that scores beside the passes.
        self.pool.schedule(os.getpid)
        weakref.finalize(self, _end_pool, self.pool)

    def _score(self, samples: list[Sample]) -> list[Any]:
        given, limit = self.reward_kwargs, self.timeout_s
        futures = [
            self.pool.schedule(score_from_file, (*self.source, s | given), timeout=limit)
            for s in samples
        ]
        results: list[Any] = []
        for row, (sample, future) in enumerate(zip(samples, futures, strict=True)):
            beat("the reward of a row began")
            try:
                failure, result = future.result()
            except (TimeoutError, ProcessExpired) as error:
                logger.warning(
                    "%s scores 0: %s within %g s",
                    _describe(row, sample),
                    repr(error),
                    self.timeout_s,
                )
                failure, result = "", 0.0
            if failure:
                what, _, trace = failure.partition("\n")
                raise RuntimeError(
                    f"compute_score failed with {what} on {_describe(row, sample)}\n{trace}"
                )
            results.append(result)
        return results


@register_reward_manager("batch")
class BatchRewardManager(NaiveRewardManager):
    """Scores all rows in one call, for functions that ask a server or run in parallel.

    compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=, **reward_kwargs) -> one result per row;
    each argument is a list. It has no default.
    """

    @staticmethod
    def check_config(config: Any) -> list[str]:
        """Lists what is missing in a config that names this manager."""
        return [say("no_batch_function")] if config.custom_reward_function.path is None else []

    def _score(self, samples: list[Sample]) -> list[Any]:
        columns = {f"{name}s": [sample[name] for sample in samples] for name in samples[0]}
        try:
            results = list(self.compute_score(**columns, **self.reward_kwargs))
        except Exception as error:
            rows = f"{len(samples)} rows; the first: {_describe(0, samples[0])}"
            raise RuntimeError(f"compute_score failed with {error!r} on {rows}") from error
        if len(results) != len(samples):
            raise ValueError(
                f"compute_score returned {len(results)} results; allowed: one per row, {len(samples)}"
            )
        return results


class CustomRewardManager:
    """Lets an environment score the responses: `CustomRewardManager(environment)`.

    Args:
        environment: where it has `compute_reward(state, action)`, that scores the row's `state`; else the environment
            is reset to the row's `seed` and steps once. None: each row's `environment` column describes it, as
            CustomEnvDataset writes it from a file.
        tokenizer: decodes the responses, without special tokens; the trainer lends its own where it is None.
    A batch that has `environment_rewards` was played in an environment: they are its rewards, and nothing is asked
    again.
    """

    def __init__(self, environment: Any = None, tokenizer: Any = None) -> None:
        self.environment, self.tokenizer = environment, tokenizer
        # By their descriptions.
        self.environments: dict[str, Any] = {}

    def extract_action(self, text: str) -> str:
        """Returns the action in a response; made to be overridden."""
        return text.strip()

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Returns rewards (batch, response_len) float32; with return_dict {"reward_tensor", "reward_extra_info"}."""
        data.require("responses", "response_mask", by=type(self).__name__)
        played = "environment_rewards" in data.batch
        rewards = data.batch["environment_rewards"] if played else self._judge(data)
        return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards

    def _judge(self, data: DataProto) -> torch.Tensor:
        if self.tokenizer is None:
            raise ValueError(
                "CustomRewardManager has no tokenizer to decode responses; give it: (env, tokenizer)"
            )
        scores = [
            self._score(data, row, text)
            for row, text in enumerate(decode_sampled(self.tokenizer, data.batch))
        ]
        return place_outcome_rewards(torch.tensor(scores), data.batch["response_mask"])

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
            error.add_note(
                f"while {type(environment).__name__} scored row {row}, response: {text[:200]!r}"
            )
            raise

    def _environment_of(self, data: DataProto, row: int) -> Any:
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

    data:                                             # CustomEnvDataset's rows name their environment
      train_files: task.json
      custom_cls: {path: custom/env_dataset.py, name: CustomEnvDataset}
    reward_model: {reward_manager: custom}
    The rows' `seed` says how it is reset, or their `state` what is scored where it has `compute_reward(state, action)`.
    """

    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: None = None, reward_fn_key: str = ""
    ) -> None:
        super().__init__(None, tokenizer)

    @staticmethod
    def check_config(config: Any) -> list[str]:
        """Lists what is missing, or too much, in a config with this manager; the environment itself is built later."""
        nobody = not (config.data.custom_cls.path or config.environments)
        return [
            *say_where({"two_judges": config.custom_reward_function.path, "nobody_judges": nobody})
        ]


def _end_pool(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def _describe(row: int, sample: Sample) -> str:
    return f"row {row}, data_source={sample['data_source']!r}, response: {sample['solution_str'][:200]!r}"


def _score_of(result: Any, row: int, sample: Sample) -> float:
    try:
        return float(result["score"] if isinstance(result, dict) else result)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            say("no_score", given=shown(result), where=_describe(row, sample))
        ) from error


def _extra_infos(results: list[Any], scores: list[float]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for result in results if isinstance(result, dict) for name in result)
    rows = [
        result if isinstance(result, dict) else {"score": scores[row]}
        for row, result in enumerate(results)
    ]
    return {name: [row.get(name) for row in rows] for name in names}


class EnvironmentRewardWrapper(CustomRewardManager):
    """Scores responses by a function of trajectories: it is called with a DataProto and returns rewards (B, R) float32.

    Args:
        environment: is reset to a row's `seed`, else its number, and plays its response; None: the trajectory has the
            prompt as its state, the response as its action, and the row's columns as its info.
        reward_fn: `reward_fn(trajectory, environment)` or `reward_fn(trajectory)`; None: the environment's reward.
        tokenizer: see CustomRewardManager.
    """

    def __init__(
        self, environment: Any = None, reward_fn: Any = None, tokenizer: Any = None
    ) -> None:
        super().__init__(environment, tokenizer)
        self.reward_fn = reward_fn

    def _score(self, data: DataProto, row: int, text: str) -> float:
        columns, env = (
            {name: values[row] for name, values in data.non_tensor_batch.items()},
            self.environment,
        )
        if env is None:
            trajectory = Trajectory(states=[decode_prompt(self.tokenizer, data.batch, row)])
        else:
            trajectory = Trajectory(states=[reset_environment(env, int(columns.get("seed", row)))])
        told = StepResult("", 0.0, True, columns)
        result = told if env is None else step_environment(env, self.extract_action(text))
        trajectory.record(text, result)
        return (
            result.reward if self.reward_fn is None else reward_of(self.reward_fn, trajectory, env)
        )
