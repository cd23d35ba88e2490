"""Holds the settings of `reward_model` and `custom_reward_function`: who scores a response."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any

from training.config.schema.common import Dtype
from training.config.section import (
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
)


class ScoringModelConfig(Section):
    """The reward model's weights: a sequence classification model with one output."""

    #: model folder or hub name; needed with reward_model.enable
    path: InputPath | None = None
    dtype: Dtype = "bfloat16"  #: autocast compute type
    trust_remote_code: bool = False  #: run Python code that comes with the model
    #: entries of the model's config.json to replace
    override_config: dict[str, Any] = field(default_factory=dict)
    #: the policy's tokenizer, where this model has another: texts are told anew in its own chat
    #: template; null = same
    input_tokenizer: InputPath | None = None


class OverlongBufferConfig(Section):
    """DAPO's penalty of long responses, from 0 to penalty_factor over the last `len` tokens."""

    enable: bool = False  #: penalise
    len: NonNegativeInt = 0  #: tokens before data.max_response_length in which the penalty rises
    penalty_factor: NonNegativeFloat = 1.0  #: reward that is taken at the full length
    log: bool = False  #: give overlong and overlong_reward as further values


class RewardModelConfig(Section):
    """Who turns a response into a reward."""

    #: score with a reward model; what a reward function or an environment gives is added
    enable: bool = False
    model: ScoringModelConfig = ScoringModelConfig()
    micro_batch_size_per_gpu: PositiveInt = 8  #: rows per forward of the reward model on a rank
    #: tokens that it reads of a row, the last ones; null = all
    max_length: PositiveInt | None = None
    #: naive = row by row, batch = all at once, prime = in processes, dapo = overlong_buffer,
    #: custom = an environment
    reward_manager: str = "naive"
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    reward_kwargs: dict[str, Any] = field(default_factory=dict)  #: passed to the reward manager
    launch_reward_fn_async: bool = False  #: score while old log-probs and values are computed

    def problems(self) -> Iterator[str]:
        """Yields what a reward model lacks."""
        if self.enable and self.model.path is None:
            yield (
                "reward_model.enable=true needs reward_model.model.path: a sequence "
                "classification model with one output"
            )


class CustomRewardFunctionConfig(Section):
    """A scoring function of your own, of (data_source, solution_str, ground_truth, extra_info).

    It returns a number, or a dict with the number as `score`.
    """

    path: InputPath | None = None  #: Python file; null = the built-in rules by data source
    name: str = "compute_score"  #: name of the function in that file
    #: further keyword arguments for it
    reward_kwargs: dict[str, Any] = field(default_factory=dict)

    def warnings(self) -> Iterator[str]:
        """Yields that a function is named without its file."""
        if self.path is None and self.name != CustomRewardFunctionConfig().name:
            yield (
                f"custom_reward_function.name={self.name} has no effect without "
                "custom_reward_function.path"
            )
