"""What every rollout engine does with its verbs: it turns prompts into the batch that the trainer sees.

Invariant: episodes, seeds, masks and the layout of the batch are made here and in the turn loop, and are the same for
every engine.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

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
        """Completes token-id prompts, in order; without `sampling`, as the config says.

        Each prompt's seed is of (`sampling.seed`, its place), so that the same call gives the same completions.
        """
        sampling = sampling or self.sampling({})
        for i, prompt_ids in enumerate(inputs):
            self.submit(str(i), list(prompt_ids), replace(sampling, seed=seed_for(sampling.seed, 0, i)))
        done: dict[str, Completion] = {}
        while len(done) < len(inputs):
            done.update((c.request_id, c) for c in self.step())
        return [done[str(i)] for i in range(len(inputs))]

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers every row's prompt, as episodes of a single turn.

        Args:
            prompts: `input_ids`, `attention_mask` (B, P) left-padded; non-tensor `group_index`, `sample_index` (B,)
                and meta_info `seed` (run), `global_steps` seed the sampling; meta_info `validate`, `do_sample` choose
                it.
        Returns:
            What `build_batch` gives, one row a prompt, with `ending`; the prompts' own columns are kept.
        """
        self.begin()
        width, most = prompts.batch["input_ids"].shape[1], self.response_length
        limits = TurnLimits(prompt_length=width, response_length=most, max_model_len=width + most)
        episodes = start_episodes(prompts)
        TurnLoop(self, self.sampler(prompts.meta_info), [limits]).run(episodes)
        batch = self.build_batch([episode.row for episode in episodes], width)
        # Columns of the user's dataset travel on; prompts and responses say all that these two would.
        held = {"input_ids", "position_ids", *batch.batch.keys()}
        batch.batch.update({name: tensor for name, tensor in prompts.batch.items() if name not in held})
        columns = prompts.non_tensor_batch | {"ending": object_array([episode.ending for episode in episodes])}
        return replace(batch, non_tensor_batch=columns, meta_info=dict(prompts.meta_info))

    # verl's other name.
    batch_generation = generate_sequences

    def sampling(self, meta_info: dict[str, Any]) -> Sampling:
        """Makes the config's sampling, with validation's overrides where `meta_info["validate"]`.

        It is greedy where `do_sample` is false.
        """
        validate, stops = meta_info.get("validate"), () if self.config.ignore_eos else self.eos_token_ids
        cfg = self.config.val_kwargs if validate else self.config
        do_sample = meta_info.get("do_sample", not validate or self.config.val_kwargs.do_sample)
        own = {name: cfg[name] for name in ("temperature", "top_k", "top_p")} if do_sample else {"temperature": 0.0}
        return Sampling(max_tokens=self.response_length, stop_token_ids=stops, **own)

    def sampler(self, meta_info: dict[str, Any]) -> Sampler:
        """Makes the sampling of each turn, with a seed of its own, of (run, step, group, sample, turn).

        So no generator that others share decides, and the ranks of a tensor-parallel engine draw the same.
        """
        sampling = self.sampling(meta_info)
        return lambda episode: replace(sampling, seed=turn_seed(meta_info, episode))

    def build_batch(self, rows: Sequence[Row], prompt_width: int) -> DataProto:
        """Makes tensors of rows, with P `prompt_width` and R `config.response_length`, in the dtypes of `FIELDS`.

        Returns:
            `prompts` (B, P), `responses`, `response_mask`, `turn_ids`, `rollout_log_probs` (B, R), `attention_mask`
            (B, P + R).
        """
        size, width = len(rows), self.response_length
        prompts = np.full((size, prompt_width), self.pad_token_id, np.int32)
        responses = np.full((size, width), self.pad_token_id, np.int32)
        log_probs = np.zeros((size, width), np.float32)
        mask, turns = np.zeros((size, width), np.int8), np.full((size, width), -1, np.int16)
        attended = np.zeros((size, prompt_width + width), np.int8)
        for i, row in enumerate(rows):
            # An episode that never had a prompt attends to one token.
            prompt_ids, end = row.prompt_ids or [self.pad_token_id], len(row.ids)
            start = prompt_width - len(prompt_ids)
            prompts[i, start:] = prompt_ids
            responses[i, :end], log_probs[i, :end] = row.ids, row.own_log_probs
            attended[i, start : prompt_width + end] = 1
            for span in row.spans:
                sampled = slice(span.start, span.end)
                mask[i, sampled], turns[i, sampled] = 1, span.turn
        fields = {"prompts": prompts, "responses": responses, "response_mask": mask}
        fields |= {"turn_ids": turns, "attention_mask": attended}
        fields |= {"rollout_log_probs": log_probs} if self.config.calculate_log_probs else {}
        return DataProto.from_dict(tensors={name: torch.from_numpy(field) for name, field in fields.items()})


def start_episodes(prompts: DataProto) -> list[Episode]:
    """Makes an episode of each row, whose prompt is the row's own tokens without padding."""
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()  # (B, P)
    rows = np.arange(len(ids))
    groups = prompts.non_tensor_batch.get("group_index", rows)
    samples = prompts.non_tensor_batch.get("sample_index", np.zeros_like(rows))
    played = zip(groups.tolist(), samples.tolist(), ids, mask, strict=True)
    return [Episode(group=g, sample=k, rows=[Row(prompt_ids=row[own].tolist())]) for g, k, row, own in played]


def turn_seed(meta_info: dict[str, Any], episode: Episode) -> int:
    """Returns sampling's seed of (run, step, group, sample, turn).

    A restarted episode samples anew, and validation for itself.
    """
    turn = len(episode.turns) + ATTEMPT * episode.attempt
    sample = -1 - episode.sample if meta_info.get("validate") else episode.sample
    return seed_for(meta_info["seed"], meta_info["global_steps"], episode.group, sample, turn)
