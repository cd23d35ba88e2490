"""Branches that vLLM plays: what of their prompts its prefix cache spares."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.features.branching.runs.test_branching_runs import VINE, numbers_of, train, words

BLOCK = 32
EPISODES = 4
# Prompts of 1,200 words a turn; the model's own positions are 256.
LONG = (
    "actor_rollout_ref.rollout.name=vllm",
    f"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size={BLOCK}",
    "+actor_rollout_ref.model.override_config.max_position_embeddings=8192",
    "data.train_batch_size=2",
    "data.max_prompt_length=1300",
    "data.max_response_length=3000",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "branching.samples=4",
)


@dataclass
class Metered:
    """Holds the requests between two resets of the cache.

    Attributes:
        requests: how many there were; an episode's turns have one name.
        sequences: by name the ids of the last turn, less the last, which is not read.
        computed: by name the tokens that the scheduler had computed.
    """

    requests: int = 0
    sequences: dict[str, list[int]] = field(default_factory=dict)
    computed: Counter[str] = field(default_factory=Counter)


class Meter:
    """Keeps the time between two resets of the cache in which most was asked for."""

    def __init__(self) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.now = Metered()
        self.longest = Metered()

    def begin(self) -> None:
        """Begins anew where the cache does."""
        if self.now.requests > self.longest.requests:
            self.longest = self.now
        self.now = Metered()


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    """Counts the tokens that vLLM's scheduler has computed, by request."""
    from workers.vllm_rollout_spmd import vLLMRollout

    meter = Meter()
    built, submitted = vLLMRollout.__init__, vLLMRollout.submit
    stepped, begun = vLLMRollout.step, vLLMRollout.begin

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        scheduler = self.engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def count(*args: Any, **kwargs: Any) -> Any:
            scheduled = schedule(*args, **kwargs)
            for name, tokens in scheduled.num_scheduled_tokens.items():
                # vLLM appends letters of its own to a request's name.
                meter.now.computed[name.rpartition("-")[0]] += tokens
            return scheduled

        scheduler.schedule = count

    def submit(self: Any, request_id: str, prompt_ids: list[int], sampling: Any) -> None:
        meter.prompts[request_id] = list(prompt_ids)
        meter.now.requests += 1
        submitted(self, request_id, prompt_ids, sampling)

    def step(self: Any) -> Any:
        completions = stepped(self)
        for each in completions:
            sampled = list(each.token_ids)[:-1]
            meter.now.sequences[each.request_id] = meter.prompts[each.request_id] + sampled
        return completions

    def begin(self: Any) -> None:
        meter.begin()
        begun(self)

    monkeypatch.setattr(vLLMRollout, "__init__", build)
    monkeypatch.setattr(vLLMRollout, "submit", submit)
    monkeypatch.setattr(vLLMRollout, "step", step)
    monkeypatch.setattr(vLLMRollout, "begin", begin)
    return meter


def unique_tokens(sequences: list[list[int]]) -> int:
    """Counts the tokens of a tree of sequences: each once where all before it is the same."""
    return len({hash(tuple(ids[:end])) for ids in sequences for end in range(1, len(ids) + 1)})


@pytest.mark.vllm
@pytest.mark.slow
def test_a_branch_costs_its_own_tokens(tiny_game: Path, tmp_path: Path, meter: Meter) -> None:
    pytest.importorskip("vllm")
    assert train(words(tiny_game, tmp_path, *VINE, *LONG, cls="Wordy", steps=1)) == 0
    meter.begin()
    metered = meter.longest
    [step] = [step for step in numbers_of(tmp_path) if "branching/continuations" in step]
    assert step["branching/continuations"] == len(metered.sequences) - EPISODES == EPISODES * 2 * 4
    # Three turns of an episode; of a branch two, or the last.
    assert metered.requests == EPISODES * (3 + 4 * (2 + 1))
    unique = unique_tokens(list(metered.sequences.values()))
    total = sum(metered.computed[name] for name in metered.sequences)
    whole = sum(len(ids) for ids in metered.sequences.values())
    print(f"{total} tokens computed, {unique} are unique, {whole} in all sequences")
    assert unique <= total <= 1.1 * unique
    # What fills no whole block of the cache is computed again.
    assert total <= unique + BLOCK * metered.requests
    assert whole > 3 * total
