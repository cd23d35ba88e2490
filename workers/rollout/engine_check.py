"""Tries an engine on the run's own weights before anything trains on what it samples.

An engine whose code computes a model otherwise than the trainer's, by a fault of a kernel or of a
loader, still writes fluent text. Here it answers a few drawn prompts, twice, so that the second
time they come from its cache, and the trainer computes the log-probs of what it sampled.

Invariant: no generator of random numbers, and no request of the run, is other than without it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from data.protocol import DataProto
from data.texts import text_of
from workers.ranks.process_groups import max_over_ranks
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Completion, Sampling

# Tokens of the prompts; one that begins as the engine's cache keeps it comes beside them.
PROMPTS = (2, 7, 16)
# Tokens that the longest has beyond what is cached.
BEYOND = 9
ANSWER = 8
# Nats that log-probs are off on average: in float32, and in a type of two bytes, which rounds.
TOLERANCE = 1e-4
TOLERANCE_OF_TWO_BYTES = 0.5

# Log-probs (rows, answer) of a batch's sampled tokens, by the trainer; a collective.
LogProbs = Callable[[DataProto], Tensor]


@dataclass(frozen=True)
class PlannedTrial:
    """Holds what is played.

    Attributes:
        prompts: token ids.
        answer: tokens of each answer.
    """

    prompts: list[list[int]]
    answer: int


def plan_trial(engine: BaseRollout, vocabulary: int) -> PlannedTrial | None:
    """Draws prompts that the engine holds with an answer; None: there is no room for any."""
    lengths = list(PROMPTS)
    if engine.cached_block:
        lengths.append(engine.cached_block + BEYOND)
    answer = min(ANSWER, engine.max_model_len - min(lengths))
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length in lengths:
        if length + answer <= engine.max_model_len:
            prompts.append(torch.randint(vocabulary, (length,), generator=generator).tolist())
    return PlannedTrial(prompts, answer) if answer > 0 else None


def check_engine(
    engine: BaseRollout, log_probs_of: LogProbs, *, vocabulary: int, kind: str, exact: bool
) -> None:
    """Compares what an engine says of its samples with what the trainer says; every rank calls it.

    Args:
        kind: the model's type, for the message.
        exact: engine and trainer both compute in float32.
    Raises:
        ValueError: they differ by more than the types explain.
    """
    trial = plan_trial(engine, vocabulary)
    if trial is None:
        return
    calls = engine.calls
    worst = 0.0
    with torch.random.fork_rng():
        for _ in range(2):
            sampling = Sampling(max_tokens=trial.answer, temperature=1.0)
            try:
                answers = engine.inference(trial.prompts, sampling)
            except (AssertionError, AttributeError, NotImplementedError) as error:
                reason = text_of(error) or type(error).__name__
                raise ValueError(
                    f"rollout.name={engine.config.name} cannot play model type '{kind}' in "
                    f"rollout.dtype={engine.config.dtype}: {reason}; set what it says, or take "
                    "another engine, such as rollout.name=hf"
                ) from error
            data = as_batch(trial, answers)
            gap = (log_probs_of(data) - data.batch["rollout_log_probs"]).abs()
            mask = data.batch["response_mask"].bool()
            worst = max(worst, float(torch.nan_to_num(gap[mask], nan=torch.inf).mean()))
    engine.calls = calls
    engine.begin()
    worst = float(max_over_ranks(torch.tensor([worst])))
    tolerance = TOLERANCE if exact else TOLERANCE_OF_TWO_BYTES
    if not worst <= tolerance:
        name = engine.config.name
        raise ValueError(
            f"rollout.name={name} gives other log-probs for model type '{kind}' than the trainer: "
            f"{worst:.1e} nats a token on average, where {tolerance:.0e} would be rounding. What "
            "is sampled would be of another distribution than what is trained: set "
            "rollout.dtype and engine_kwargs to what the model was made for, or take another "
            "engine, such as rollout.name=hf (docs/models.md says what was proved with which)"
        )


def as_batch(trial: PlannedTrial, answers: list[Completion]) -> DataProto:
    """Lays prompts and answers out as the trainer gets them: prompts left-padded, (rows, width)."""
    rows = len(trial.prompts)
    width = max(len(prompt) for prompt in trial.prompts)
    prompts = torch.zeros(rows, width, dtype=torch.int32)
    responses = torch.zeros(rows, trial.answer, dtype=torch.int32)
    attention = torch.zeros(rows, width + trial.answer, dtype=torch.int8)
    mask = torch.zeros(rows, trial.answer, dtype=torch.int8)
    log_probs = torch.zeros(rows, trial.answer)
    for row, (prompt, answer) in enumerate(zip(trial.prompts, answers, strict=True)):
        count = len(answer.token_ids)
        prompts[row, width - len(prompt) :] = torch.tensor(prompt)
        responses[row, :count] = torch.tensor(answer.token_ids)
        attention[row, width - len(prompt) : width + count] = 1
        mask[row, :count] = 1
        log_probs[row, :count] = torch.tensor(answer.log_probs)
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "attention_mask": attention,
            "rollout_log_probs": log_probs,
        },
        meta_info={"temperature": 1.0},
    )
