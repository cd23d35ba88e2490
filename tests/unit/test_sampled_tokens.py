"""The count of a run's sampled tokens, by hand."""

from __future__ import annotations

import numpy as np
import torch

from data.protocol import DataProto
from training.run.sampled_tokens import SAMPLED_TOKENS, SampledTokens, count_sampled_tokens
from workers.rollout.begin import Begin
from workers.rollout.engine import Completion
from workers.rollout.episode import Episode, FailedAttempt, Row, Turn
from workers.rollout.episode_facts import episode_facts

TRAINING = {"global_steps": 1, "validate": False}


def turns(*tokens: int) -> list[Turn]:
    return [Turn(text="", finish_reason="stop", tokens=each) for each in tokens]


def batch_of(mask: list[list[int]], **columns: list[object]) -> DataProto:
    non_tensors = {}
    for name, values in columns.items():
        column = np.empty(len(values), dtype=object)
        column[:] = values
        non_tensors[name] = column
    return DataProto.from_dict(
        tensors={"response_mask": torch.tensor(mask)}, non_tensors=non_tensors
    )


def test_prompts_count_what_was_sampled_for_them() -> None:
    assert count_sampled_tokens(batch_of([[1, 1, 0], [1, 0, 0]])) == 3


def test_an_episode_counts_its_failed_attempts_and_its_branches() -> None:
    taken = Completion(request_id="", token_ids=[1] * 3, log_probs=[0.0] * 3, finish_reason="stop")
    begin = Begin(prefix=[taken], replies=[], word="1.0")
    branch = Episode(group=0, sample=0, begin=begin, turns=turns(3, 7), ending="done")
    # The first turn of its attempt is the episode's, too.
    branch.failed_attempts.append(FailedAttempt(turns(3, 20), "env_crash", ""))
    episode = Episode(
        group=0,
        sample=0,
        rows=[Row(prompt_ids=[])],
        turns=turns(3, 5),
        failed_attempts=[FailedAttempt(turns(100), "env_crash", "")],
        branches=[branch],
        ending="done",
    )
    facts = episode_facts(episode)
    assert (facts["sampled_tokens"], facts["discarded_tokens"]) == (8, 127)
    # Its second row has no facts, and masked tokens were sampled, too.
    assert count_sampled_tokens(batch_of([[0], [1]], episode_facts=[facts, None])) == 135


def test_nothing_is_said_of_discarded_tokens_where_there_are_none() -> None:
    episode = Episode(group=0, sample=0, turns=turns(3), ending="done")
    assert "discarded_tokens" not in episode_facts(episode)


def test_a_step_counts_once_its_update_begins_and_validation_never() -> None:
    tokens = SampledTokens(limit=5)
    batch = batch_of([[1, 1, 0], [1, 0, 0]])
    tokens.played(batch, {"global_steps": 1, "validate": True})
    tokens.played(batch, TRAINING)
    tokens.played(batch, TRAINING)
    tokens.played(batch, {"global_steps": 2, "validate": False})
    batch.meta_info[SAMPLED_TOKENS] = tokens.take(1)
    assert (tokens.so_far, tokens.take(1)) == (0, 0)
    tokens.begin(batch)
    assert (tokens.so_far, tokens.are_enough) == (6, True)
    assert SAMPLED_TOKENS not in batch.meta_info
    assert tokens.take(2) == 3


def test_without_a_limit_nothing_is_enough() -> None:
    tokens = SampledTokens()
    tokens.so_far = 10**12
    assert not tokens.are_enough
