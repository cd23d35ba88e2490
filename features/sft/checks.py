"""Checks supervised training against the rest of a config, and that its files are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data.prompt_files import read_rows
from features.sft.config import max_length_of
from features.sft.settings import SFTSettings
from training.config.resources.files import LARGE_FILES, missing_file

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig


def config_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what keeps a run from learning beside it what sft.files holds."""
    settings = config.section(SFTSettings)
    if not settings.loss_coef:
        return
    yield from file_problems(config)
    for file in settings.files:
        path = Path(file)
        # Larger ones are told where each rank reads them, before the first step.
        if path.is_file() and path.stat().st_size <= LARGE_FILES:
            try:
                read_rows(path)
            except (ValueError, OSError) as error:
                yield f"sft.files: {error}"


def file_problems(config: PPOConfig) -> Iterator[str]:
    """Yields files that are not there, and a length that no micro-batch holds."""
    settings = config.section(SFTSettings)
    for key, files in (("sft.files", settings.files), ("sft.val_files", settings.val_files)):
        for file in files:
            yield from missing_file(key, file)
    longest = max_length_of(config)
    budget = config.actor_rollout_ref.actor.micro_batching.max_token_len
    if budget is not None and budget < longest:
        yield (
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget} cannot hold a row of "
            f"sft.max_length={longest} tokens: raise it, or lower sft.max_length"
        )


def rank_problems(config: PPOConfig) -> Iterator[str]:
    """Yields that a step's rows do not divide among the ranks."""
    settings = config.section(SFTSettings)
    ranks = config.data_parallel_size
    # Without one the rest of the checks says why.
    if ranks and settings.batch_size % ranks:
        yield (
            f"sft.batch_size={settings.batch_size} rows do not divide among {ranks} ranks: make it "
            f"a multiple of {ranks}"
        )
