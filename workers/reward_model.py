"""The reward model: a frozen sequence classification model that gives each response one score.

Invariant: it reads prompt and response of each real row, with its own chat template where it has another, and the score
lies on the last sampled token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from custom.reward_manager import decode_sampled
from data.prompts import as_messages, encode_chat, pad_token_id
from data.protocol import DataProto
from data.token_rewards import place_outcome_rewards
from training.config import FSDPConfig, PPOConfig
from workers.model.builder import ModelSpec, find_device, torch_dtype
from workers.ranks.distributed import shard_model
from workers.ranks.process import start_worker
from workers.ranks.worker_group import Dispatch, register

READS = ("prompts", "responses", "response_mask", "attention_mask", "raw_prompt")


class RewardModelWorker:
    """Holds the reward model of one rank."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config.reward_model
        self.deterministic = config.trainer.deterministic
        self.device = find_device(config.trainer.device)

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model; several ranks share its weights."""
        start_worker(self.device, deterministic=self.deterministic)
        model = self.config.model
        spec = ModelSpec(model, str(model.path), self.device)
        self.module, self.dtype = spec.reward_model(), torch_dtype(model.dtype)
        shard_model(self.module, FSDPConfig(), self.dtype, self.device)
        self.tokenizer = spec.tokenizer
        given = model.input_tokenizer
        self.input_tokenizer = None if given is None else AutoTokenizer.from_pretrained(given)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=READS)
    @torch.no_grad()
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Scores every row: `rm_scores` (B, response_len) float32, each on the row's last sampled token."""
        rows = self._own_rows(data) if self.input_tokenizer is None else self._retold_rows(data)
        size = self.config.micro_batch_size_per_gpu
        scores = [self._score(rows[start : start + size]) for start in range(0, len(rows), size)]
        placed = place_outcome_rewards(torch.cat(scores), data.batch["response_mask"])
        return DataProto.from_dict(tensors={"rm_scores": placed})

    def _own_rows(self, data: DataProto) -> list[Tensor]:
        """Returns each row's tokens as the policy has them, the last `max_length` of them."""
        ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1).long()
        real = data.batch["attention_mask"].bool()
        return [self._cut(row[kept]) for row, kept in zip(ids, real, strict=True)]

    def _retold_rows(self, data: DataProto) -> list[Tensor]:
        """Renders each row's messages and response in the model's own chat template."""
        data.require("raw_prompt", by="reward_model.model.input_tokenizer (data.return_raw_chat=true keeps it)")
        assert self.input_tokenizer is not None
        answers = decode_sampled(self.input_tokenizer, data.batch)
        pairs = zip(map(list, data.non_tensor_batch["raw_prompt"]), answers, strict=True)
        told = ([*as_messages(asked), {"role": "assistant", "content": answer}] for asked, answer in pairs)
        rows = (encode_chat(self.tokenizer, messages, add_generation_prompt=False) for messages in told)
        return [self._cut(torch.tensor(row)) for row in rows]

    def _cut(self, ids: Tensor) -> Tensor:
        return ids[-(self.config.max_length or len(ids)) :]

    def _score(self, rows: list[Tensor]) -> Tensor:
        """Reads what the model says of each row's last token: (rows,) float32 on the CPU."""
        lengths = torch.tensor([len(row) for row in rows])
        ids = pad_sequence(rows, batch_first=True, padding_value=pad_token_id(self.tokenizer)).to(self.device)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long().to(self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.module(input_ids=ids, attention_mask=mask, use_cache=False).logits[..., 0]
        return logits.float().cpu().gather(1, lengths[:, None] - 1)[:, 0]
