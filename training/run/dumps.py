"""Writes batches as text that people read: a line of JSON a row."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.protocol import DataProto

logger = logging.getLogger(__name__)


def dump(
    batch: DataProto, folder: str | None, step: int, tokenizer: Any, anew: bool = True
) -> None:
    """Writes the batch's text and scores to FOLDER/STEP.jsonl, or adds them to what is there.

    A full disk costs what is written here, not the run: it is logged.

    Args:
        folder: None: nothing is written.
        anew: replace what the file holds.
    """
    if folder is None:
        return
    path = Path(folder) / f"{step}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if anew else "a") as file:
            for row in readable_rows(batch, tokenizer):
                file.write(json.dumps({"step": step, **row}) + "\n")
    except OSError as error:
        logger.warning("%s was not written: %s", path, error)


def readable_rows(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """Yields each scored row as text: `uid`, `input`, `output` and `score`."""
    batch = batch.drop_dummies()
    prompts = batch.batch["prompts"]
    responses = batch.batch["responses"]
    mask = batch.batch["attention_mask"].bool()
    width = prompts.shape[1]
    scores = batch.batch["token_level_scores"].sum(dim=1).tolist()
    for i, score in enumerate(scores):
        yield {
            "uid": batch.non_tensor_batch["uid"][i],
            "input": tokenizer.decode(prompts[i][mask[i, :width]]),
            "output": tokenizer.decode(responses[i][mask[i, width:]]),
            "score": score,
        }
