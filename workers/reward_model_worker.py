"""The reward model of one rank: frozen, it gives each row a score, on its last sampled token.

Invariant: only real tokens are read, so that a row's score does not depend on what it is batched
with.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from custom.reward_manager import decode_sampled
from data.outcome_rewards import place_outcome_rewards
from data.protocol import DataProto
from data.turn_tokens import as_messages, encode_chat, pad_token_id
from training.config import FSDPConfig, PPOConfig
from workers.model.builder import ModelSpec, find_device, torch_dtype
from workers.ranks.dispatch import Dispatch, register
from workers.ranks.sharding import shard_model
from workers.ranks.worker_process import start_worker

# Scoring reads these fields of a batch.
FIELDS_READ = ("prompts", "responses", "response_mask", "attention_mask", "raw_prompt")


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
        self.module = spec.reward_model()
        self.dtype = torch_dtype(model.dtype)
        shard_model(self.module, FSDPConfig(), self.dtype, self.device)
        self.tokenizer = spec.tokenizer
        # The policy's, where the model has a tokenizer of its own.
        self.input_tokenizer: PreTrainedTokenizerBase | None = None
        if model.input_tokenizer is not None:
            self.input_tokenizer = AutoTokenizer.from_pretrained(model.input_tokenizer)

    @register(Dispatch.DP_COMPUTE_PROTO, reads=FIELDS_READ)
    @torch.no_grad()
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Scores every row: `rm_scores` (B, response_len) float32, on the last sampled token."""
        if self.input_tokenizer is None:
            rows = self._policy_rows(data)
        else:
            rows = self._rendered_rows(data, self.input_tokenizer)
        if self.config.max_length:
            rows = [ids[-self.config.max_length :] for ids in rows]
        size = self.config.micro_batch_size_per_gpu
        scores = [self._score(rows[start : start + size]) for start in range(0, len(rows), size)]
        placed = place_outcome_rewards(torch.cat(scores), data.batch["response_mask"])
        return DataProto.from_dict(tensors={"rm_scores": placed})

    def _policy_rows(self, data: DataProto) -> list[Tensor]:
        """Returns each row's tokens as the policy has them: (its real tokens,) int64."""
        ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1).long()
        real = data.batch["attention_mask"].bool()
        return [row[kept] for row, kept in zip(ids, real, strict=True)]

    def _rendered_rows(
        self, data: DataProto, policy_tokenizer: PreTrainedTokenizerBase
    ) -> list[Tensor]:
        """Renders each row's messages and response in the model's own chat template."""
        data.require(
            "raw_prompt",
            by="reward_model.model.input_tokenizer (data.return_raw_chat=true keeps it)",
        )
        answers = decode_sampled(policy_tokenizer, data.batch)
        rows = []
        for prompt, answer in zip(data.non_tensor_batch["raw_prompt"], answers, strict=True):
            messages = [*as_messages(list(prompt)), {"role": "assistant", "content": answer}]
            ids = encode_chat(self.tokenizer, messages, add_generation_prompt=False)
            rows.append(torch.tensor(ids))
        return rows

    def _score(self, rows: list[Tensor]) -> Tensor:
        """Computes what the model gives each row's last token: (rows,) float32 on the CPU."""
        lengths = torch.tensor([len(row) for row in rows])
        padding = pad_token_id(self.tokenizer)
        ids = pad_sequence(rows, batch_first=True, padding_value=padding).to(self.device)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long().to(self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            output = self.module(input_ids=ids, attention_mask=mask, use_cache=False)
        scores = output.logits[..., 0].float().cpu()  # (rows, longest)
        return scores.gather(1, lengths[:, None] - 1)[:, 0]
