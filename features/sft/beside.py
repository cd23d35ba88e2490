"""Given conversations that a run learns beside what it plays: sft.loss_coef.

    update 0     rows 3 0     of the data's order in epoch 0, sft.batch_size at a time
    update 1     rows 2 1
    update 2     rows 1 3     of epoch 1

Invariant: an update's rows follow from its number and the run's seed, and the loss is one mean over
the tokens of all ranks, so that neither a kill nor the number of ranks changes what is learnt.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from data.epoch_order import EpochOrder
from data.protocol import DataProto
from features.sft.batches import batch_of, rows_of_update
from features.sft.config import FOLDER
from features.sft.data_files import BadData
from features.sft.loss import LOSS, cross_entropy
from features.sft.reading import row_reader
from features.sft.settings import SFTSettings
from features.sft.turns import TrainedRow
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.core_algos import GlobalBatchInfo
from training.observers import ObservedRun, Observer
from workers.model.builder import ModelSpec
from workers.model.further_rows import FurtherRows

logger = logging.getLogger(__name__)


def open_rows(config: PPOConfig, spec: ModelSpec) -> list[FurtherRows]:
    """Reads the rows that updates learn; none where sft.loss_coef is 0.

    Raises:
        ConfigError: some cannot be learnt.
    """
    settings = config.section(SFTSettings)
    if not settings.loss_coef:
        return []
    try:
        rows = row_reader(config, spec).read(settings.files)
    except (BadData, ValueError, OSError) as error:
        raise ConfigError([str(error)]) from error
    order = EpochOrder(rows, config.data.run_seed, config.data.shuffle)
    return [SFTRows(rows, order, settings.loss_coef, settings.batch_size, spec.pad_token_id)]


@dataclass
class SFTRows(FurtherRows):
    """Gives each update its rows, and their cross-entropy.

    Attributes:
        order: of the rows in each epoch.
        size: rows of an update, over all ranks.
    """

    rows: Sequence[TrainedRow]
    order: EpochOrder
    coef: float
    size: int
    pad_id: int
    metric = LOSS

    def batch(self, update: int, share: int, shares: int) -> DataProto:
        """Returns this share of an update's rows; one without a row gets one that only pads."""
        numbers = rows_of_update(self.order, self.size, update)
        own = numbers[share::shares]
        batch = batch_of([self.rows[number] for number in own or numbers[:1]], self.pad_id)
        if not own:
            batch.batch["response_mask"].zero_()
        return batch

    def loss(self, log_prob: Tensor, response_mask: Tensor, counts: GlobalBatchInfo) -> Tensor:
        """Computes the mean cross-entropy of the tokens, in nats."""
        return cross_entropy(log_prob, response_mask, counts)


def open_observer(run: ObservedRun) -> FilesObserver | None:
    """Opens what remembers which files a run learns; None where it learns none, which it says."""
    settings = run.config.section(SFTSettings)
    if settings.loss_coef:
        return FilesObserver(settings.files)
    # The run of --sft learns them by itself.
    own = FOLDER if settings.folder is None else Path(settings.folder).name
    if settings.files and run.run_dir.name != own:
        logger.info(
            "sft.files=[%s] are not learnt in this run, as sft.loss_coef=0: --sft learns them "
            "before a run, sft.loss_coef beside one",
            ", ".join(settings.files),
        )
    return None


class FilesObserver(Observer):
    """Says where a run that goes on learns other files than before."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = files
        self.digest = digest_of(files)

    def state_dict(self) -> Mapping[str, Any]:
        """Returns what tells the files from others."""
        return {"files": self.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compares the files with those of the checkpoint."""
        if state["files"] != self.digest:
            logger.warning(
                "sft.files=[%s] hold something else than when the checkpoint was saved: the run "
                "goes on with what they hold now, in an order of its own",
                ", ".join(self.files),
            )


def digest_of(files: Sequence[str]) -> str:
    """Returns a text that is equal for files of equal contents in one order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(Path(file).expanduser().read_bytes()).digest())
    return digest.hexdigest()[:16]
