"""What keeps a run from recording as its settings say."""

from collections.abc import Iterator

from features.records.settings import RecordsSettings
from training.config import PPOConfig
from training.config.resources.files import unwritable_folder


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields a sentence for each."""
    settings = config.section(RecordsSettings)
    if settings.folder is not None and settings.is_on:
        yield from unwritable_folder("records.folder", settings.folder)
    if settings.gradients:
        yield from gradient_problems(config, settings)


def gradient_problems(config: PPOConfig, settings: RecordsSettings) -> Iterator[str]:
    """Yields what keeps a run from recording each episode's share of the gradient."""
    trainer = config.trainer
    if trainer.num_ranks > 1:
        yield (
            f"records.gradients=true needs one rank, and trainer.nnodes={trainer.nnodes} x "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} are {trainer.num_ranks}: set "
            "both to 1, or take it out"
        )
    if trainer.train_finished_groups:
        yield (
            "records.gradients=true compares each episode with the whole gradient, which "
            "trainer.train_finished_groups=true has only at the end: take one of the two out"
        )
    if not settings.is_on:
        yield "records.gradients=true has nowhere to go with records.keep_gib=0: set that above 0"
