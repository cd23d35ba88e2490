"""The default reward manager: a function scores row by row.

    columns + decoded response -> RewardSample -> compute_score -> a number, or a dict with "score"

Invariant: a row's score lies on its last sampled token, and a function that fails, or returns no
number, is an error that names the row; but where it is a model beside the policy that fails
(ModelError), the row has no score, and is treated as `agent.on_failure` says. The prime and batch
managers change only `_score`.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from custom.coroutines import finished
from custom.env import BadRewardFunction, RewardFunctionRaised
from custom.env_calls import located, raised, shown
from custom.model_errors import ModelError
from custom.reward_managers.decoding import decode_prompt, decode_sampled, mask_of_responses
from custom.reward_managers.registry import register_reward_manager
from custom.reward_managers.unscored import UNSCORED, Unscored, warn_of_unscored
from custom.reward_score import default_compute_score
from data.outcome_rewards import place_outcome_rewards
from data.own_names import keep_own
from data.protocol import DataProto
from data.watchdog import beat

# So much of a response is shown in an error message.
MAX_SHOWN_CHARS = 200
# A scoring function is told these beside a row's own extra_info.
ADDED_INFOS = ("num_turns", "rollout_reward_scores")


@dataclass(frozen=True)
class RewardSample:
    """Holds one row as a scoring function sees it; see its arguments in NaiveRewardManager."""

    row: int
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]

    def describe(self) -> str:
        """Returns the row and the beginning of its response, for an error message."""
        response = self.solution_str[:MAX_SHOWN_CHARS]
        return f"row {self.row}, data_source={self.data_source!r}, response: {response!r}"


@register_reward_manager("dapo")
@register_reward_manager("naive")
class NaiveRewardManager:
    """Scores row by row.

    It calls

        compute_score(data_source=, solution_str=, ground_truth=, extra_info=, **reward_kwargs)

    where extra_info holds the row's own entries, `num_turns` (the prompt and each answer) and
    `rollout_reward_scores`, what the rollout itself gave (`reward_scores` of the row, a dict); a
    row's own entries of these names are `own_num_turns` and `own_rollout_reward_scores`.

    Args:
        tokenizer: decodes the responses, without special tokens.
        num_examine: rows per data source that are printed at each call.
        compute_score: returns a number, or a dict with "score" whose entries all become extra infos
            under their own names, "score" too; by default the built-in rules by data source. An
            entry named "reward" scores nothing, and is "own_reward" in validation, beside the
            trainer's, the sum of each row's rewards.
        reward_fn_key: the column that holds the data source.
        max_resp_len, overlong_buffer_cfg: take reward from responses that come near the limit, in
            tokens (arXiv:2503.14476, eq. 13): with a buffer of `len` = b before the limit L a
            response of n > L - b loses penalty_factor * (n - (L - b)) / b, if `enable` is set; with
            `log`, overlong_reward and overlong are further extra infos. `load_reward_manager` gives
            data.max_response_length and reward_model.overlong_buffer.
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
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score: Callable[..., Any] = compute_score or default_compute_score
        # How messages call it.
        self.score_name = located(self.compute_score, _name_of(self.compute_score))
        self.reward_fn_key = reward_fn_key
        self.reward_kwargs = reward_kwargs
        self.limit = max_resp_len or 0
        self.buffer: Any = None
        if overlong_buffer_cfg and overlong_buffer_cfg.enable:
            self.buffer = overlong_buffer_cfg
            if not 0 < self.buffer.len <= self.limit:
                raise ValueError(
                    f"overlong_buffer.len={self.buffer.len} must be 1 to max_resp_len={self.limit} "
                    "tokens"
                )

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Returns rewards (batch, response_len) float32.

        Each row's score lies on its last sampled token. With return_dict: {"reward_tensor":
        rewards, "reward_extra_info": name -> list of length batch}; a row whose dict lacks a name
        that others have holds None there.
        """
        data.require(
            "prompts",
            "responses",
            "attention_mask",
            "reward_model",
            self.reward_fn_key,
            by=type(self).__name__,
        )
        samples = self._read_samples(data.batch, data.non_tensor_batch)
        results = self._score(samples)
        scores = [
            _score_of(result, sample, self.score_name)
            for result, sample in zip(results, samples, strict=True)
        ]
        infos = _extra_infos(results, scores)
        taken = {UNSCORED}
        if self.buffer is not None and self.buffer.log:
            taken |= {"overlong_reward", "overlong"}
        infos = keep_own(infos, taken, f"what {self.score_name} returns")
        if warn_of_unscored(results):
            infos[UNSCORED] = [isinstance(result, Unscored) for result in results]
        response_mask = mask_of_responses(data.batch)
        if self.buffer is not None:
            overlong_rewards = self._overlong_rewards(response_mask.sum(-1).tolist())
            scores = [
                score + reward for score, reward in zip(scores, overlong_rewards, strict=True)
            ]
            if self.buffer.log:
                infos["overlong_reward"] = overlong_rewards
                infos["overlong"] = [reward < 0 for reward in overlong_rewards]
        self._print_examples(data.batch, samples, scores)
        rewards = place_outcome_rewards(torch.tensor(scores), response_mask)
        if return_dict:
            return {"reward_tensor": rewards, "reward_extra_info": infos}
        return rewards

    def _read_samples(
        self, tensors: TensorDict, columns: Mapping[str, np.ndarray]
    ) -> list[RewardSample]:
        """Makes a sample of each row; ValueError where a row has no ground truth."""
        texts = decode_sampled(self.tokenizer, tensors)
        nothing = [None] * len(texts)
        extra_infos = columns.get("extra_info", nothing)
        rollout_scores = columns.get("reward_scores", nothing)
        num_turns = columns.get("__num_turns__", nothing)
        if "turn_ids" in tensors:
            # As verl counts: the prompt and each answer.
            num_turns = tensors["turn_ids"].amax(1).add(2).tolist()
        samples = []
        for row, text in enumerate(texts):
            given = extra_infos[row] or {}
            extra_info: dict[str, Any] = keep_own(given, ADDED_INFOS, "a row's extra_info")
            extra_info["num_turns"] = num_turns[row]
            extra_info["rollout_reward_scores"] = rollout_scores[row] or {}
            sample = RewardSample(
                row=row,
                data_source=columns[self.reward_fn_key][row],
                solution_str=text,
                ground_truth=_ground_truth_of(columns["reward_model"][row], row),
                extra_info=extra_info,
            )
            samples.append(sample)
        return samples

    def _score(self, samples: list[RewardSample]) -> list[Any]:
        """Calls the scoring function; returns what it returned for each sample."""
        results = []
        for sample in samples:
            beat("the reward of a row began")
            try:
                result = finished(
                    self.compute_score(
                        data_source=sample.data_source,
                        solution_str=sample.solution_str,
                        ground_truth=sample.ground_truth,
                        extra_info=sample.extra_info,
                        **self.reward_kwargs,
                    )
                )
            except ModelError as error:
                result = Unscored(str(error))
            except Exception as error:
                raise RewardFunctionRaised(
                    f"{self.score_name} failed with {raised(error, self.compute_score)} "
                    f"on {sample.describe()}"
                ) from error
            results.append(result)
        return results

    def _overlong_rewards(self, lengths: list[int]) -> list[float]:
        """Returns what responses of so many sampled tokens lose, 0 or less."""
        begin = self.limit - self.buffer.len
        factor = self.buffer.penalty_factor
        return [min((begin - length) / self.buffer.len * factor, 0.0) for length in lengths]

    def _print_examples(
        self, tensors: TensorDict, samples: list[RewardSample], scores: list[float]
    ) -> None:
        num_printed: Counter[str] = Counter()
        for sample, score in zip(samples, scores, strict=True):
            num_printed[sample.data_source] += 1
            if num_printed[sample.data_source] > self.num_examine:
                continue
            prompt = decode_prompt(self.tokenizer, tensors, sample.row)
            print(f"[{sample.data_source}] prompt: {prompt}")
            print(f"response: {sample.solution_str}")
            print(f"truth: {sample.ground_truth}")
            print(f"score: {score:g}")


def _ground_truth_of(reward_model: Any, row: int) -> Any:
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise ValueError(
            f"row {row}: reward_model is {reward_model!r}; it must be a dict with 'ground_truth'"
        )
    return reward_model["ground_truth"]


def _name_of(function: Any) -> str:
    """Returns a function's own name; compute_score where it has none."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", "")
    return name if name.isidentifier() else "compute_score"


def _score_of(result: Any, sample: RewardSample, function: str) -> float:
    """Returns the number in what the scoring function returned; ValueError names the row."""
    if isinstance(result, Unscored):
        return 0.0
    keys = result if isinstance(result, dict) else {}
    nameless = [key for key in keys if not isinstance(key, str)]
    if nameless:
        raise BadRewardFunction(
            f"{function} returned a dict with the key {shown(nameless[0])} on {sample.describe()}; "
            "allowed: texts, which name the values, as 'score'"
        )
    try:
        score = float(result["score"] if isinstance(result, dict) else result)
        if math.isfinite(score):
            return score
        cause: Exception | None = None
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        cause = error
    raise BadRewardFunction(
        f"{function} returned {shown(result)} on {sample.describe()}; allowed: a finite number "
        "that fits a float, or a dict with it as 'score'"
    ) from cause


def _extra_infos(results: list[Any], scores: list[float]) -> dict[str, list[Any]]:
    """Gathers the entries of dicts by name; a plain number is an entry named "score"."""
    # A dict, which keeps the order, unlike a set.
    names: dict[str, None] = {}
    for result in results:
        if isinstance(result, dict):
            names.update(dict.fromkeys(result))
    infos: dict[str, list[Any]] = {name: [] for name in names}
    for result, score in zip(results, scores, strict=True):
        entries = result if isinstance(result, dict) else {"score": score}
        for name, values in infos.items():
            values.append(entries.get(name))
    return infos
