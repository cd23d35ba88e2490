"""What every rollout engine does with its verbs: it turns prompts into the batch that the trainer sees.

Invariant: episodes, seeds, masks and the layout of the batch are made here and in the turn loop, and are the same for
every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.containers import object_array
from data.protocol import DataProto
from data.seeding import seed_for
from training.config import RolloutConfig
from workers.rollout.engine import Completion, Engine, Sampling
from workers.rollout.episode import Episode, Row, Sampler, TurnLimits
from workers.rollout.turn_loop import TurnLoop

# Turns between the sampling seeds of an episode's restarts.
ATTEMPT = 10_000


class BaseRollout(Engine):
    """Is a rollout engine that also turns prompts into batches.

    Args:
        config: the rollout section; with `response_length` (tokens) and `max_model_len` filled in.
        eos_token_ids: any of them ends a turn (and is kept as the turn's last sampled token).
        pad_token_id: fills `responses` behind the last token.
    """

    def __init__(self, config: RolloutConfig, *, eos_token_ids: Sequence[int], pad_token_id: int) -> None:
        if config.response_length is None or config.max_model_len is None:
            raise ValueError("rollout.response_length or max_model_len is not set; give PPOConfig.resolved_rollout")
        self.config = config
        self.response_length: int = config.response_length
        self.max_model_len: int = config.max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id

    def inference(self, inputs: Sequence[list[int]], sampling: Sampling | None = None) -> list[Completion]:
        """Completes token-id prompts, in order; without `sampling`, as the config says."""
        sampling = sampling or self.sampling({})
        for i, prompt_ids in enumerate(inputs):
            self.submit(str(i), list(prompt_ids), sampling)
        done: dict[str, Completion] = {}
        while len(done) < len(inputs):
            done.update((c.request_id, c) for c in self.step())
        return [done[str(i)] for i in range(len(inputs))]

    def batch_generation(self, batch: DataProto) -> DataProto:
        """Does what `generate_sequences` does, under verl's other name."""
        return self.generate_sequences(batch)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers every row's prompt, as episodes of a single turn.

        Args:
            prompts: `input_ids`, `attention_mask` (B, P) left-padded; non-tensor `group_index`, `sample_index` (B,)
                where sampling is seeded; meta_info `validate`, `do_sample` choose the sampling; with `seeded`, `seed`
                (run) and `global_steps` seed it.
        Returns:
            What `build_batch` gives, one row a prompt, with `ending`; the prompts' own columns are kept.
        """
        self.begin()
        width = prompts.batch["input_ids"].shape[1]
        limits = TurnLimits(
            prompt_length=width, response_length=self.response_length, max_model_len=width + self.response_length
        )
        episodes = start_episodes(prompts)
        TurnLoop(self, self.sampler(prompts.meta_info), [limits]).run(episodes)
        batch = self.build_batch([episode.row for episode in episodes], width)
        # Columns of the user's dataset travel on.
        batch.batch.update({name: tensor for name, tensor in prompts.batch.items() if name not in batch.batch})
        endings = object_array([episode.ending for episode in episodes])
        batch.non_tensor_batch = prompts.non_tensor_batch | {"ending": endings}
        batch.meta_info = dict(prompts.meta_info)
        return batch

    def sampling(self, meta_info: dict[str, Any]) -> Sampling:
        """Makes the config's sampling, with validation's overrides where `meta_info["validate"]`.

        It is greedy where `do_sample` is false.
        """
        cfg = self.config.val_kwargs if meta_info.get("validate") else self.config
        do_sample = meta_info.get("do_sample", self.config.val_kwargs.do_sample if meta_info.get("validate") else True)
        return Sampling(
            max_tokens=self.response_length,
            temperature=cfg.temperature if do_sample else 0.0,
            top_k=cfg.top_k if do_sample else -1,
            top_p=cfg.top_p if do_sample else 1.0,
            stop_token_ids=() if self.config.ignore_eos else self.eos_token_ids,
        )

    def sampler(self, meta_info: dict[str, Any]) -> Sampler:
        """Makes the sampling of each turn, seeded by (run, step, group, sample, turn) where `meta_info["seeded"]`."""
        sampling = self.sampling(meta_info)
        # The ranks of a tensor-parallel engine sample by themselves, and must agree.
        seeded = meta_info.get("seeded") or self.config.tensor_model_parallel_size > 1
        return lambda episode: replace(sampling, seed=turn_seed(meta_info, episode) if seeded else None)

    def build_batch(self, rows: Sequence[Row], prompt_width: int) -> DataProto:
        """Makes tensors of rows, with P `prompt_width` and R `config.response_length`.

        Returns:
            `prompts` (B, P), `responses`, `response_mask`, `turn_ids`, `rollout_log_probs` (B, R), `input_ids`,
            `attention_mask`, `position_ids` (B, P + R).
        """
        width = self.response_length
        # An episode that never had a prompt attends to one token.
        prompt_ids = [row.prompt_ids or [self.pad_token_id] for row in rows]
        prompts = pad_left(prompt_ids, prompt_width, self.pad_token_id)  # (B, P)
        responses = pad_right([row.response_ids for row in rows], width, self.pad_token_id)  # (B, R)
        attention_mask = torch.cat(
            [
                pad_left([[1] * len(ids) for ids in prompt_ids], prompt_width, 0),
                pad_right([[1] * len(row.response_ids) for row in rows], width, 0),
            ],
            dim=1,
        )  # (B, P + R)
        tensors = {
            "prompts": prompts,
            "responses": responses,
            "response_mask": pad_right([row.response_mask for row in rows], width, 0),
            "turn_ids": pad_right([row.turn_ids for row in rows], width, -1),
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        }
        if self.config.calculate_log_probs:
            tensors["rollout_log_probs"] = pad_right([row.log_probs for row in rows], width, 0.0)
        return DataProto.from_dict(tensors=tensors)


def start_episodes(prompts: DataProto) -> list[Episode]:
    """Makes an episode of each row, whose prompt is the row's own tokens without padding."""
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()  # (B, P)
    rows = np.arange(len(ids))
    groups = prompts.non_tensor_batch.get("group_index", rows)
    samples = prompts.non_tensor_batch.get("sample_index", np.zeros_like(rows))
    return [
        Episode(group=int(groups[i]), sample=int(samples[i]), rows=[Row(prompt_ids=ids[i][mask[i]].tolist())])
        for i in range(len(ids))
    ]


def turn_seed(meta_info: dict[str, Any], episode: Episode) -> int:
    """Returns sampling's seed of (run, step, group, sample, turn).

    A restarted episode samples anew, and validation for itself.
    """
    turn = episode.turn + ATTEMPT * episode.attempt
    sample = -1 - episode.sample if meta_info.get("validate") else episode.sample
    return seed_for(meta_info["seed"], meta_info["global_steps"], episode.group, sample, turn)


def noise_seed(meta_info: dict[str, Any], engine: int) -> int:
    """Returns the seed of what is not seeded turn by turn, of (run, step, engine).

    It is of the batch in the step too, since there may be several.
    """
    batch, validate = meta_info.get("first_group", 0), bool(meta_info.get("validate"))
    return seed_for(meta_info["seed"], meta_info["global_steps"], engine, batch, int(validate))


def pad_right(rows: Sequence[Sequence[float]], width: int, value: float) -> Tensor:
    """Pads to (len(rows), width); float32 where the padding value is a float, else int64."""
    dtype = torch.float32 if isinstance(value, float) else torch.int64
    out = torch.full((len(rows), width), value, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


def pad_left(rows: Sequence[Sequence[int]], width: int, value: int) -> Tensor:
    """Pads to (len(rows), width) int64; rows are at least one and at most `width` long."""
    out = torch.full((len(rows), width), value, dtype=torch.int64)
    for i, row in enumerate(rows):
        out[i, -len(row) :] = torch.tensor(row)
    return out
