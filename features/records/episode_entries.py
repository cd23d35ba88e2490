"""The lines of a run's episode files: of episodes that were played, and of prompts and answers.

Invariant: a batch's episodes are handed out once. The engine's process has put the record of an
episode among its facts (episode_records.py), from where it is taken; a batch of
prompts has no such facts, and is marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.packed_arrays import pack_array
from data.protocol import DUMMY_UID, DataProto
from training.batch.episode_rows import REWARD_INFO
from training.batch.row_groups import rows_by_key

# In an episode's facts, and in its entry: all but the names and the reward, as JSON.
RECORD = "record"
# In a batch's meta_info: its prompts and answers are written.
RECORDED = "prompts_are_recorded"
# Columns in which a dataset's row may hold its prompt as messages, before `data.prompt_key`.
RAW_PROMPT = "raw_prompt"


def take_played_episodes(batch: DataProto) -> list[dict[str, Any]]:
    """Takes the records of played episodes out of a batch; those taken before do not come again."""
    columns = batch.non_tensor_batch
    entries = []
    for row, facts in enumerate(columns.get("episode_facts", ())):
        record = None if facts is None else facts.pop(RECORD, None)
        if record is None:
            continue
        entry = {
            "step": batch.meta_info["global_steps"],
            "uid": columns["uid"][row],
            "episode_id": columns["episode_id"][row],
            "data_source": columns["data_source"][row],
            "agent_index": int(columns["agent_index"][row]),
            "env_seed": int(columns["env_seed"][row]),
            "reward": facts["reward"],
            RECORD: record,
        }
        entries.append(entry)
    return entries


def take_scored_episodes(batch: DataProto) -> list[dict[str, Any]]:
    """Takes the records of played episodes whose scores the trainer made, with these as `reward`.

    `batch` has token_level_scores (B, R).
    """
    entries = take_played_episodes(batch)
    if not entries:
        return []
    score_of: dict[str, float] = {}
    ids = batch.non_tensor_batch["episode_id"]
    scores = batch.batch["token_level_scores"].sum(dim=1).tolist()
    for episode_id, score in zip(ids, scores, strict=True):
        score_of[episode_id] = score_of.get(episode_id, 0.0) + score
    for entry in entries:
        entry["reward"] = score_of[entry["episode_id"]]
    return entries


def prompt_episodes(
    batch: DataProto, tokenizer: PreTrainedTokenizerBase, prompt_key: str, source_key: str
) -> Iterator[dict[str, Any]]:
    """Yields a scored batch of prompts and answers as episodes of one turn.

    Args:
        prompt_key, source_key: columns of the dataset, with messages, and with the data source.
    """
    reader = _PromptReader(batch, tokenizer, prompt_key, source_key)
    uids = [str(uid) for uid in batch.non_tensor_batch["uid"]]
    for uid, rows in rows_by_key(uids).items():
        if uid == DUMMY_UID:
            continue
        messages = reader.messages(rows[0])
        for row in rows:
            yield reader.episode(row, uid, messages)


class _PromptReader:
    """Reads rows of prompts and answers off a batch."""

    def __init__(
        self,
        batch: DataProto,
        tokenizer: PreTrainedTokenizerBase,
        prompt_key: str,
        source_key: str,
    ) -> None:
        self.tokenizer = tokenizer
        self.columns = batch.non_tensor_batch
        self.step = batch.meta_info.get("global_steps", 0)
        self.message_columns = [
            name for name in (RAW_PROMPT, prompt_key) if name in batch.non_tensor_batch
        ]
        self.sources = batch.non_tensor_batch.get(source_key)
        self.infos = [name for name in batch.non_tensor_batch if name.startswith(REWARD_INFO)]
        tensors = batch.tensors()
        self.prompts = tensors["prompts"].numpy()
        self.responses = tensors["responses"].numpy()
        self.is_token = tensors["attention_mask"].numpy().astype(bool)
        # The sampled tokens, whatever has been masked since.
        self.is_sampled = tensors["response_mask"].numpy() > 0
        if "turn_ids" in tensors:
            self.is_sampled = tensors["turn_ids"].numpy() >= 0
        self.scores = tensors["token_level_scores"].float().numpy()
        self.log_probs = np.full(self.responses.shape, np.nan, np.float32)
        if "rollout_log_probs" in tensors:
            self.log_probs = tensors["rollout_log_probs"].float().numpy()
        self.versions = None
        if "weight_versions" in tensors:
            self.versions = tensors["weight_versions"].numpy()

    def messages(self, row: int) -> list[Any]:
        """Returns the messages of a row's prompt; or one of the role `prompt`, with its text."""
        for name in self.message_columns:
            prompt = self.columns[name][row]
            if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, str):
                messages = list(prompt)
                if all(isinstance(message, Mapping) and "role" in message for message in messages):
                    return messages
        width = self.prompts.shape[1]
        ids = self.prompts[row][self.is_token[row, :width]]
        return [{"role": "prompt", "content": self.tokenizer.decode(ids)}]

    def episode(self, row: int, uid: str, messages: list[Any]) -> dict[str, Any]:
        """Returns a row as an episode."""
        width = self.prompts.shape[1]
        length = int(self.is_token[row, width:].sum())
        ids = self.responses[row, :length]
        is_sampled = self.is_sampled[row, :length]
        text = self.tokenizer.decode(ids[is_sampled], skip_special_tokens=True)
        reward = float(self.scores[row].sum())
        ending = str(self._value("ending", row, ""))
        source = "prompts" if self.sources is None else self.sources[row]
        turn = {
            "text": text,
            "reward": reward,
            "finish_reason": ending,
            "observation": [],
            "done": True,
            "env_seconds": 0.0,
            "tool_calls": [],
            "info": {},
        }
        return {
            "step": self.step,
            "uid": uid,
            "episode_id": str(self._value("episode_id", row, f"{self.step}.{row}")),
            "data_source": source,
            "agent_index": 0,
            "env_seed": 0,
            "observation": "",
            "done": True,
            "ending": ending,
            "error": "",
            "environment": "",
            "group": int(self._value("group_index", row, 0)),
            "begins": "",
            "attempts": 1,
            "cut_turns": int(ending == "length"),
            "cut_observations": 0,
            "env_seconds": 0.0,
            "seconds": 0.0,
            "tool_calls": [],
            "info": self._info(row),
            "sampled_tokens": int(is_sampled.sum()),
            "paid": reward,
            "reward": reward,
            "masked": False,
            "attempt": 0,
            "task": {},
            "initial_messages": messages,
            "turns": [turn],
            "rows": [self._row(row, length)],
            "failed_attempts": [],
        }

    def _value(self, name: str, row: int, otherwise: Any) -> Any:
        """Returns a column's entry; `otherwise` where a batch of one's own has no such column."""
        return self.columns[name][row] if name in self.columns else otherwise

    def _info(self, row: int) -> dict[str, float]:
        """Returns the numbers that the reward function gave beside the score."""
        info = {}
        for name in self.infos:
            value = self.columns[name][row]
            if isinstance(value, int | float | np.number):
                info[name.removeprefix(REWARD_INFO)] = float(value)
        return info

    def _row(self, row: int, length: int) -> dict[str, Any]:
        """Returns the row's arrays; see features/records/row_records.py."""
        width = self.prompts.shape[1]
        is_sampled = self.is_sampled[row, :length]
        record: dict[str, Any] = {
            "prompt_ids": pack_array(self.prompts[row][self.is_token[row, :width]], "<i4"),
            "response_ids": pack_array(self.responses[row, :length], "<i4"),
            "response_mask": pack_array(is_sampled, "|i1"),
            "log_probs": pack_array(self.log_probs[row, :length], "<f4"),
            "turn_ids": pack_array(np.where(is_sampled, 0, -1), "<i2"),
            "rewards": pack_array(self.scores[row, :length], "<f4"),
            "template_mask": pack_array(np.zeros(length), "|i1"),
            "parent": None,
        }
        if self.versions is not None:
            versions = self.versions[row, :length]
            if len(np.unique(versions[is_sampled])) > 1:
                record["weight_versions"] = pack_array(versions, "<i4")
        return record
