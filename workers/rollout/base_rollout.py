"""Turns every rollout engine's verbs into batches: prompts become the trainer's batch.

An engine's file derives from `BaseRollout`. How an answer of one turn and the rows of agents'
episodes lie in a batch, for P `prompt_width` and R `rollout.response_length`:

    prompts        = pad pad P0  P1                        (B, P)
    responses      =                 A0  A1  E0  A2 pad    (B, R)   A: sampled, E: environment
    response_mask  =                  1   1   0   1   0    (B, R)
    turn_ids       =                  0   0  -1   1  -1    (B, R)
    attention_mask =  0   0   1   1   1   1   1   1   0    (B, P + R)

Invariant: episodes, seeds, masks and the layout of the batch are the same for every engine.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from data.array_ops import object_array
from data.names import unknown_name
from data.protocol import DataProto
from data.seeds import seed_for
from training.config import RolloutConfig
from workers.model.router_replay import Routers
from workers.rollout.engine import Completion, Engine, Sampling, copy_with
from workers.rollout.episode import Episode, Row, Sampler, TurnLimits
from workers.rollout.turn_loop import Batch, TurnLoop

# Turns between the sampling seeds of an episode's restarts.
TURNS_PER_ATTEMPT = 10_000


class BaseRollout(Engine):
    """Turns prompts into batches, over the verbs of an engine.

    Args:
        config: the rollout section; with `response_length` (tokens) and `max_model_len` filled in.
        eos_token_ids: any of them ends a turn (and is kept as the turn's last sampled token).
        pad_token_id: fills `responses` behind the last token.

    Attributes:
        calls: of `inference` and `generate_sequences`.
        records_versions: a batch holds, for each sampled token, the version of the weights that
            sampled it.
        routers: whose choices completions tell, where a batch is to hold them.
    """

    def __init__(
        self, config: RolloutConfig, *, eos_token_ids: Sequence[int], pad_token_id: int
    ) -> None:
        if config.response_length is None or config.max_model_len is None:
            raise ValueError(
                "rollout.response_length or max_model_len is not set; "
                "give PPOConfig.resolved_rollout"
            )
        self.config = config
        self.response_length: int = config.response_length
        self.max_model_len: int = config.max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.calls = 0
        self.records_versions = False
        self.routers: Routers | None = None

    # Prompts in, answers out.

    def inference(
        self, inputs: Sequence[list[int]], sampling: Sampling | None = None
    ) -> list[Completion]:
        """Completes token-id prompts, in order, up to `max_model_len`.

        Without `sampling` as the config says. Each prompt's seed is of (`sampling.seed`, its
        place), so that the same call gives the same completions.
        """
        sampling = sampling or self.sampling({})
        # The number keeps apart what an earlier call, which was interrupted, left behind.
        request_ids = [f"{self.calls}.{place}" for place in range(len(inputs))]
        self.calls += 1
        for place, prompt_ids in enumerate(inputs):
            room = self.max_model_len - len(prompt_ids)
            request = replace(
                sampling,
                max_tokens=min(sampling.max_tokens, room),
                seed=seed_for(sampling.seed, 0, place),
            )
            self.submit(request_ids[place], list(prompt_ids), request)
        done: dict[str, Completion] = {}
        while not done.keys() >= set(request_ids):
            for completion in self.step():
                done[completion.request_id] = completion
        return [done[request_id] for request_id in request_ids]

    def generate_sequences(self, prompts: DataProto, **overrides: Any) -> DataProto:
        """Answers every row's prompt, as episodes of a single turn.

        Args:
            prompts: `input_ids`, `attention_mask` (B, P) left-padded; non-tensor `group_index`,
                `sample_index` (B,) and meta_info `seed` (run; 0), `global_steps` (the calls so far)
                seed the sampling; meta_info `validate`, `do_sample` choose it.
            overrides: of this call's sampling: temperature, top_k, top_p, max_tokens,
                stop_token_ids.

        Returns:
            What `build_batch` gives, one row a prompt, with `ending`; the prompts' own columns are
            kept.
        """
        batch = self.batch_of(prompts, **overrides)
        TurnLoop(self).run(batch)
        return self.rows_of(prompts, batch.episodes)

    # verl's other name.
    batch_generation = generate_sequences

    def batch_of(self, prompts: DataProto, **overrides: Any) -> Batch:
        """Makes single-turn episodes of prompts; arguments as of `generate_sequences`."""
        self.calls += 1
        defaults = {"seed": 0, "global_steps": self.calls}
        prompt_width = prompts.batch["input_ids"].shape[1]
        limits = TurnLimits(
            prompt_length=prompt_width,
            response_length=self.response_length,
            max_model_len=prompt_width + self.response_length,
        )
        sampler = self.sampler(defaults | prompts.meta_info, **overrides)
        return Batch(start_episodes(prompts), sampler, [limits])

    def rows_of(self, prompts: DataProto, episodes: Sequence[Episode]) -> DataProto:
        """Makes a batch of the prompts and their answers; see `generate_sequences`."""
        prompt_width = prompts.batch["input_ids"].shape[1]
        batch = self.build_batch([episode.row for episode in episodes], prompt_width)
        # `prompts` and `responses` hold all that these two would.
        replaced = {"input_ids", "position_ids", *batch.batch.keys()}
        # Columns of the user's dataset travel on.
        for name, tensor in prompts.batch.items():
            if name not in replaced:
                batch.batch[name] = tensor
        columns = dict(prompts.non_tensor_batch)
        columns["ending"] = object_array([episode.ending for episode in episodes])
        return replace(batch, non_tensor_batch=columns, meta_info=dict(prompts.meta_info))

    # How a turn is sampled.

    def sampling(self, meta_info: dict[str, Any], **overrides: Any) -> Sampling:
        """Makes the config's sampling; with `meta_info["validate"]` validation's.

        It is greedy where `do_sample` is false. Settings in `overrides` win.

        Raises:
            ValueError: one of `overrides` is unknown, or out of its bounds; names those there are.
        """
        allowed = Sampling.__dataclass_fields__.keys() - {"seed"}
        for name in overrides.keys() - allowed:
            raise unknown_name("sampling", name, allowed)
        validate = meta_info.get("validate")
        samples_by_default = not validate or self.config.val_kwargs.do_sample
        sampling = Sampling(
            max_tokens=self.response_length,
            temperature=0.0,
            stop_token_ids=() if self.config.ignore_eos else self.eos_token_ids,
        )
        if meta_info.get("do_sample", samples_by_default):
            settings = self.config.val_kwargs if validate else self.config
            sampling = replace(
                sampling,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
            )
        sampling = replace(sampling, **overrides)
        is_valid = (
            sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.max_tokens >= 1
        )
        if not is_valid:
            raise ValueError(
                f"{sampling}: temperature must be 0 or more, top_p above 0 and at most 1, "
                "max_tokens 1 or more"
            )
        return sampling

    def sampler(self, meta_info: dict[str, Any], **overrides: Any) -> Sampler:
        """Makes the sampling of each turn, with a seed of (run, step, group, sample, turn).

        So no generator that others share decides, and the ranks of a tensor-parallel engine draw
        the same.
        """
        sampling = self.sampling(meta_info, **overrides)

        def sample_turn(episode: Episode, turn: int | None = None) -> Sampling:
            return copy_with(sampling, seed=turn_seed(meta_info, episode, turn))

        return sample_turn

    # Rows as tensors.

    def build_batch(self, rows: Sequence[Row], prompt_width: int) -> DataProto:
        """Makes tensors of rows, in the dtypes of `FIELDS`.

        Returns:
            `prompts` (B, P), `responses`, `response_mask`, `turn_ids`, `rollout_log_probs`, where
            they are recorded `weight_versions` (B, R), `attention_mask` (B, P + R), where they are
            told `routed_experts` (B, P + R, layers, experts of a token).
        """
        size = len(rows)
        width = self.response_length
        prompts = np.full((size, prompt_width), self.pad_token_id, np.int32)  # (B, P)
        responses = np.full((size, width), self.pad_token_id, np.int32)  # (B, R)
        response_mask = np.zeros((size, width), np.int8)  # (B, R)
        turn_ids = np.full((size, width), -1, np.int16)  # (B, R)
        log_probs = np.zeros((size, width), np.float32)  # (B, R)
        attention_mask = np.zeros((size, prompt_width + width), np.int8)  # (B, P + R)
        for i, row in enumerate(rows):
            # An episode that never had a prompt attends to one token.
            prompt_ids = row.prompt_ids or [self.pad_token_id]
            start = prompt_width - len(prompt_ids)
            length = len(row.ids)
            prompts[i, start:] = prompt_ids
            responses[i, :length] = row.ids
            log_probs[i, :length] = row.log_probs
            attention_mask[i, start : prompt_width + length] = 1
            for span in row.spans:
                response_mask[i, span.start : span.end] = 1
                turn_ids[i, span.start : span.end] = span.turn
        arrays = {
            "prompts": prompts,
            "responses": responses,
            "response_mask": response_mask,
            "turn_ids": turn_ids,
            "attention_mask": attention_mask,
        }
        if self.config.calculate_log_probs:
            arrays["rollout_log_probs"] = log_probs
        if self.records_versions:
            arrays["weight_versions"] = weight_versions(rows, width)
        if self.routers is not None:
            arrays["routed_experts"] = routed_experts(rows, self.routers, prompt_width, width)
        return DataProto.from_dict(
            tensors={name: torch.from_numpy(array) for name, array in arrays.items()}
        )


def weight_versions(rows: Sequence[Row], width: int) -> np.ndarray:
    """Returns the version that sampled each token, -1 elsewhere: (B, width) int32."""
    versions = np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        for span in row.spans:
            versions[i, span.start : span.end] = span.version
    return versions


def routed_experts(
    rows: Sequence[Row], routers: Routers, prompt_width: int, width: int
) -> np.ndarray:
    """Returns the engine's choices for each token, as `Routers.absent` where it told none.

    Returns: (B, prompt_width + width, layers, experts of a token), in `Routers.dtype`.
    """
    choices = routers.absent(len(rows), prompt_width + width).numpy()
    for i, row in enumerate(rows):
        if row.routed_experts is not None:
            start = prompt_width - len(row.prompt_ids)
            choices[i, start : start + len(row.routed_experts)] = row.routed_experts
    return choices


def start_episodes(prompts: DataProto) -> list[Episode]:
    """Makes an episode of each row, whose prompt is the row's own tokens without padding."""
    ids = prompts.batch["input_ids"]  # (B, P)
    mask = prompts.batch["attention_mask"].bool()  # (B, P)
    rows = np.arange(len(ids))
    groups = prompts.non_tensor_batch.get("group_index", rows)
    samples = prompts.non_tensor_batch.get("sample_index", np.zeros_like(rows))
    episodes = []
    for group, sample, row_ids, is_real in zip(
        groups.tolist(), samples.tolist(), ids, mask, strict=True
    ):
        row = Row(prompt_ids=row_ids[is_real].tolist())
        episodes.append(Episode(group=group, sample=sample, rows=[row]))
    return episodes


def turn_seed(meta_info: dict[str, Any], episode: Episode, turn: int | None = None) -> int:
    """Returns sampling's seed of (run, step, group, sample, turn); None: the episode's next turn.

    A restarted episode samples anew, and validation and branches for themselves.
    """
    if turn is None:
        turn = len(episode.turns)
    branch = None
    attempt = episode.attempt
    if episode.begin is not None:
        branch = episode.begin.word_of(turn)
        attempt += episode.begin.attempt
    turn += TURNS_PER_ATTEMPT * attempt
    sample = episode.sample
    if meta_info.get("validate"):
        sample = -1 - episode.sample
    step = meta_info["global_steps"]
    return seed_for(meta_info["seed"], step, episode.group, sample, turn, branch)
