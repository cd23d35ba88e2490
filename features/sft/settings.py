"""The settings of supervised training: what is learnt from, how, and beside what."""

from collections.abc import Iterator
from typing import Literal

from training.config.section import (
    InputPath,
    NonNegativeFloat,
    OutputPath,
    PositiveFloat,
    PositiveInt,
    Section,
)

# What is done with a row that has more tokens than it may have.
TooLong = Literal["error", "drop", "cut"]


class SFTSettings(Section):
    """Learns given conversations, before a run by --sft, and beside one by loss_coef."""

    #: files of conversations, or of episodes that features.records.select wrote; parquet, json or
    #: jsonl. `--sft FILE` sets it
    files: tuple[InputPath, ...] = ()
    val_files: tuple[InputPath, ...] = ()  #: --sft: held out; their loss is sft/val_loss
    folder: OutputPath | None = None  #: --sft: the folder of its run; null = RUN_DIR/sft
    epochs: PositiveInt = 3  #: --sft: passes over the rows
    steps: PositiveInt | None = None  #: --sft: optimiser steps, in place of epochs
    batch_size: PositiveInt = 32  #: rows of an optimiser step, over all ranks
    lr: PositiveFloat | None = None  #: --sft: learning rate; null = actor.optim.lr
    #: weight of their loss beside the policy's in every update of a run; 0 = none
    loss_coef: NonNegativeFloat = 0.0
    #: whose messages are learnt; a message says otherwise by its key `train`, true or false
    trained_roles: tuple[str, ...] = ("assistant",)
    #: tokens of a row at most; null = data.max_prompt_length + data.max_response_length
    max_length: PositiveInt | None = None
    too_long: TooLong = "error"  #: a longer row ends the run, is dropped, or loses its end
    messages_key: str = "messages"  #: column of conversations
    prompt_key: str = "prompt"  #: column of prompts, a text or messages, where no messages are
    answer_key: str = "answer"  #: column of the prompts' answers
    tools_key: str = "tools"  #: column of the tools' schemas, where the conversation has any

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with the roles, and that there is nothing to learn from."""
        if not self.trained_roles:
            yield "sft.trained_roles=[] learns nothing: name the roles, such as [assistant]"
        if self.loss_coef and not self.files:
            yield (
                f"sft.loss_coef={self.loss_coef} has nothing to learn from: name sft.files, or set "
                "it to 0"
            )
