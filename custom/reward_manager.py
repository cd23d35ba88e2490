"""Reward managers: from a batch of responses to scores, through a scoring function that sees only text.

A manager is built once per run and called with each batch; `reward_model.reward_manager` chooses it by its registered
name; its class may have `check_config(config)`, which lists what the config lacks. Only sampled tokens (response_mask 1)
are decoded, so that an environment's text never counts as the policy's.
"""

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from custom.env_reward import ConfiguredRewardManager
from custom.env_reward import CustomRewardManager as CustomRewardManager  # found here, too
from custom.reward_score import default_compute_score
from data.protocol import DataProto
from training.reward import place_outcome_rewards

REWARD_MANAGER_REGISTRY: dict[str, type] = {}


def register_reward_manager(name: str) -> Callable[[type], type]:
    """Class decorator: makes the class available as `reward_model.reward_manager=name`."""

    def register(cls: type) -> type:
        taken = REWARD_MANAGER_REGISTRY.setdefault(name, cls)
        if taken is not cls:
            raise ValueError(
                f"reward manager {name!r} is already {taken.__name__}; choose another name for {cls.__name__}"
            )
        return cls

    return register


def get_reward_manager_cls(name: str) -> type:
    """The class registered under `name`; ValueError with the names there are."""
    if name not in REWARD_MANAGER_REGISTRY:
        nearest = difflib.get_close_matches(name, REWARD_MANAGER_REGISTRY, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        allowed = ", ".join(REWARD_MANAGER_REGISTRY)
        raise ValueError(f"reward_model.reward_manager={name!r} is unknown; allowed: {allowed}.{hint}")
    return REWARD_MANAGER_REGISTRY[name]


@dataclass(frozen=True)
class Sample:
    """One row as a scoring function sees it."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


@register_reward_manager("naive")
class NaiveRewardManager:
    """Scores row by row: compute_score(data_source=, solution_str=, ground_truth=, extra_info=, **reward_kwargs).

    Args:
        tokenizer: decodes the responses, without special tokens.
        num_examine: rows per data source that are printed at each call.
        compute_score: returns a number, or a dict with "score" whose entries all become extra infos under their own
            names, "score" too; by default the built-in rules by data source. An entry named "reward" scores nothing,
            and in validation the trainer's own "reward", the sum of each row's rewards, stands in its place.
        reward_fn_key: the column that holds the data source.
        reward_kwargs: further keyword arguments for compute_score.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score: Callable[..., Any] = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.reward_kwargs = reward_kwargs

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Rewards (batch, response_len) float32, each row's score on its last sampled token.

        With return_dict: {"reward_tensor": rewards, "reward_extra_info": name -> list of length batch}; a row whose
        dict lacks a name that others have holds None there.
        """
        columns = ("reward_model", self.reward_fn_key)
        data.require("prompts", "responses", "response_mask", "attention_mask", *columns, by=type(self).__name__)
        assert data.batch is not None
        samples = self._read(data.batch, data.non_tensor_batch)
        results = self._score(samples)
        scores = [_score_of(result, *numbered) for result, numbered in zip(results, enumerate(samples), strict=True)]
        self._print_examples(data.batch, samples, scores)
        rewards = place_outcome_rewards(torch.tensor(scores), data.batch["response_mask"])
        if not return_dict:
            return rewards
        return {"reward_tensor": rewards, "reward_extra_info": _extra_infos(results, scores)}

    def _read(self, tensors: TensorDict, columns: dict[str, np.ndarray]) -> list[Sample]:
        sampled = tensors["response_mask"].bool().cpu()
        responses = tensors["responses"].cpu()
        token_ids = [row[keep].tolist() for row, keep in zip(responses, sampled, strict=True)]
        texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        extra_infos: Iterable[dict[str, Any]] = (
            columns["extra_info"] if "extra_info" in columns else ({} for _ in texts)
        )
        rows = zip(columns[self.reward_fn_key], texts, columns["reward_model"], extra_infos, strict=True)
        return [
            Sample(source, text, _ground_truth(truth, row), {} if extra is None else extra)
            for row, (source, text, truth, extra) in enumerate(rows)
        ]

    def _score(self, samples: list[Sample]) -> list[Any]:
        results = []
        for row, sample in enumerate(samples):
            try:
                results.append(self.compute_score(**vars(sample), **self.reward_kwargs))
            except Exception as error:
                raise RuntimeError(f"compute_score failed with {error!r} on {_describe(row, sample)}") from error
        return results

    def _print_examples(self, tensors: TensorDict, samples: list[Sample], scores: list[float]) -> None:
        printed: Counter[str] = Counter()
        for row, sample in enumerate(samples):
            if printed[sample.data_source] >= self.num_examine:
                continue
            printed[sample.data_source] += 1
            prompt_ids = tensors["prompts"][row]
            attended = tensors["attention_mask"][row, : len(prompt_ids)].bool()
            prompt = self.tokenizer.decode(prompt_ids[attended], skip_special_tokens=True)
            print(f"[{sample.data_source}] prompt: {prompt}\nresponse: {sample.solution_str}")
            print(f"truth: {sample.ground_truth}\nscore: {scores[row]:g}")


@register_reward_manager("batch")
class BatchRewardManager(NaiveRewardManager):
    """Scores all rows in one call, for functions that ask a server or run in parallel.

    compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=, **reward_kwargs) -> one result per row;
    each argument is a list. It has no default.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.compute_score is default_compute_score:
            raise ValueError(
                "reward_model.reward_manager=batch needs custom_reward_function.path: a function that takes lists"
            )

    @staticmethod
    def check_config(config: Any) -> list[str]:
        """What is missing in a config that names this manager."""
        if config.custom_reward_function.path is not None:
            return []
        return ["reward_model.reward_manager=batch needs custom_reward_function.path: a function that takes lists"]

    def _score(self, samples: list[Sample]) -> list[Any]:
        try:
            results = list(
                self.compute_score(
                    data_sources=[sample.data_source for sample in samples],
                    solution_strs=[sample.solution_str for sample in samples],
                    ground_truths=[sample.ground_truth for sample in samples],
                    extra_infos=[sample.extra_info for sample in samples],
                    **self.reward_kwargs,
                )
            )
        except Exception as error:
            rows = f"{len(samples)} rows; the first: {_describe(0, samples[0])}"
            raise RuntimeError(f"compute_score failed with {error!r} on {rows}") from error
        if len(results) != len(samples):
            raise ValueError(f"compute_score returned {len(results)} results; allowed: one per row, {len(samples)}")
        return results


register_reward_manager("custom")(ConfiguredRewardManager)


def _ground_truth(reward_model: Any, row: int) -> Any:
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise ValueError(f"row {row}: reward_model is {reward_model!r}; it must be a dict with 'ground_truth'")
    return reward_model["ground_truth"]


def _describe(row: int, sample: Sample) -> str:
    return f"row {row}, data_source={sample.data_source!r}, response: {sample.solution_str[:200]!r}"


def _score_of(result: Any, row: int, sample: Sample) -> float:
    try:
        return float(result["score"] if isinstance(result, dict) else result)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        given = f"compute_score returned {_shown(result)} on {_describe(row, sample)}"
        raise ValueError(f"{given}; allowed: a number that fits a float, or a dict with it as 'score'") from error


def _shown(result: Any) -> str:
    try:
        return repr(result)[:200]
    except ValueError:  # Python writes no int of more than 4,300 digits
        return f"a {type(result).__name__} too large to print"


def _extra_infos(results: list[Any], scores: list[float]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for result in results if isinstance(result, dict) for name in result)
    rows = [
        result if isinstance(result, dict) else {"score": score} for result, score in zip(results, scores, strict=True)
    ]
    return {name: [row.get(name) for row in rows] for name in names}
