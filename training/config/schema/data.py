"""Holds the settings of `data`: prompts, their files and how they become token ids."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from training.config.schema.common import CustomClassConfig
from training.config.section import (
    InputPath,
    NonNegativeInt,
    PositiveInt,
    PositiveOrMinusOne,
    Section,
)


class SamplerConfig(Section):
    """The order of training rows; of a class of yours set_epoch, update, if any, are called."""

    #: a sampler that a feature brings: difficulty (its settings: difficulty.*); null = none
    name: str | None = None
    #: Python file; null = shuffled or sequential by data.shuffle
    class_path: InputPath | None = None
    class_name: str | None = None  #: name of the torch Sampler in that file


class DataConfig(Section):
    """Prompts: where they come from and how they become token ids."""

    train_files: tuple[InputPath, ...] = ()  #: parquet, json or jsonl: one file or a list
    val_files: tuple[InputPath, ...] = ()  #: the same for validation; empty = no validation
    train_max_samples: PositiveOrMinusOne = -1  #: use at most this many training rows; -1 = all
    val_max_samples: PositiveOrMinusOne = -1  #: use at most this many validation rows; -1 = all
    prompt_key: str = "prompt"  #: column with the chat messages
    reward_fn_key: str = "data_source"  #: column that chooses the scoring rule
    #: tokens; prompts are padded on the left to this length
    max_prompt_length: PositiveInt = 512
    max_response_length: PositiveInt = 512  #: tokens a response may have
    train_batch_size: PositiveInt = 1024  #: prompts per step
    val_batch_size: PositiveInt | None = None  #: prompts per validation batch; null = all at once
    shuffle: bool = True  #: shuffle the training rows, anew in every epoch
    seed: NonNegativeInt | None = None  #: seed of data order and sampling; null = 1
    validation_shuffle: bool = False  #: shuffle the validation rows
    dataloader_num_workers: NonNegativeInt = 8  #: processes that load rows; 0 = in the driver
    filter_overlong_prompts: bool = False  #: drop prompts longer than max_prompt_length at start-up
    filter_overlong_prompts_workers: PositiveInt = 1  #: threads that measure them
    #: what to do with a longer prompt
    truncation: Literal["error", "left", "right", "middle"] = "error"
    return_raw_chat: bool = False  #: keep the messages in the batch as raw_prompt
    custom_cls: CustomClassConfig = CustomClassConfig()
    sampler: SamplerConfig = SamplerConfig()
    #: passed to the tokenizer's chat template
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def run_seed(self) -> int:
        """Returns the seed in force; a run always has one, so that it can be repeated."""
        return 1 if self.seed is None else self.seed

    @property
    def row_length(self) -> int:
        """Returns the tokens of the longest row: a prompt and its response."""
        return self.max_prompt_length + self.max_response_length

    def warnings(self) -> Iterator[str]:
        """Yields which settings nothing reads."""
        dataset = self.custom_cls
        if dataset.name is not None and dataset.path is None:
            yield f"data.custom_cls.name={dataset.name} has no effect without data.custom_cls.path"
        sampler = self.sampler
        if sampler.class_name is not None and sampler.class_path is None:
            yield (
                f"data.sampler.class_name={sampler.class_name} has no effect without "
                "data.sampler.class_path"
            )
