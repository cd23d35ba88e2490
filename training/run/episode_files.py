"""Writes what was played as files that people and scripts read: rows as text, episodes as records.

Both are JSON lines, one a row or an episode; a process that dies while it writes leaves all lines
but the last whole.
"""

import json
import logging
from collections.abc import Iterator, Mapping
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


def write_episodes(folder: Path, batch: DataProto) -> None:
    """Writes a rollout's episodes to FOLDER/STEP.jsonl, validation's to val-STEP.jsonl.

    Further ones of a step are added. A line is an episode in strict JSON, as `scripts/replay.py`
    reads it.
    """
    meta_info = batch.meta_info
    columns = batch.non_tensor_batch
    step = meta_info["global_steps"]
    prefix = "val-" if meta_info["validate"] else ""
    path = folder / f"{prefix}{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    is_first_of_step = 0 in columns["group_index"]
    with path.open("w" if is_first_of_step else "a") as file:
        for i, facts in enumerate(columns["episode_facts"]):
            if facts is None:
                continue
            entries = {
                "step": step,
                "uid": columns["uid"][i],
                "episode_id": columns["episode_id"][i],
                "data_source": columns["data_source"][i],
                "agent_index": int(columns["agent_index"][i]),
                "env_seed": int(columns["env_seed"][i]),
                **facts,
            }
            record = entries.pop("record")
            file.write(strict_json({**entries, **record}) + "\n")


def strict_json(entries: Mapping[str, Any]) -> str:
    """Writes one line of JSON.

    Numbers that are not finite become null, objects that JSON has not become text.
    """
    try:
        return json.dumps(entries, default=str, allow_nan=False)
    except ValueError:
        text = json.dumps(entries, default=str)
        return json.dumps(json.loads(text, parse_constant=lambda _: None))
