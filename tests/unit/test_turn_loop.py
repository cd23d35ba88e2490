"""The turn loop on the real engines: ids, masks, rewards, limits and endings, checked on what the
engine itself was given.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from custom.env import BaseEnvironment
from data.protocol import DataProto
from data.seeds import step_info
from tests.unit.test_rollout import CONFIG, build_engine, model_spec, perturb
from training.config import (
    ActorRolloutRefConfig,
    AgentConfig,
    DataConfig,
    EnvironmentChoice,
    PPOConfig,
)
from workers.multi_turn_rollout import AgentRollout, agent_specs
from workers.rollout.base_rollout import BaseRollout, turn_seed
from workers.rollout.engine import Sampling
from workers.rollout.episode import Episode
from workers.rollout.episode_descriptions import describe_episodes
from workers.weight_sync.manifest import iter_weights, weight_manifest

WORDS = [
    "guess",
    "above",
    "below",
    "higher",
    "lower",
    "correct",
    "the",
    "number",
    "is",
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    "7",
    "8",
    "9",
]
RESPONSE, PROMPT = 80, 16
HERE = Path(__file__).resolve()


class Chatter(BaseEnvironment):
    """Says random words, for a random number of turns; the reward of turn t is t + 1."""

    def reset(self, seed: int | None = None) -> str:
        self.rng = random.Random(seed)
        self.turns = self.rng.randint(1, 5)
        self.turn = 0
        return self.say()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        return self.say(), float(self.turn), self.turn >= self.turns, {"action": action}

    def say(self) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, 4)))


class Endless(Chatter):
    def reset(self, seed: int | None = None) -> str:
        super().reset(seed)
        self.turns = 10**9
        return "higher"


class Broken(Chatter):
    """Fails in its first step where the seed says so."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if self.turns <= 3:
            raise RuntimeError("no more")
        return super().step(action)


class Hangs(Chatter):
    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        while self.turns <= 3:
            time.sleep(0.01)
        return super().step(action)


class Verbose(Chatter):
    def reset(self, seed: int | None = None) -> str:
        return "higher " * 50


@dataclass
class Recorder:
    """Passes everything on to an engine, and keeps what was submitted."""

    inner: BaseRollout
    seen: dict[str, list[list[int]]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        self.seen.setdefault(request_id, []).append(list(prompt_ids))
        self.inner.submit(request_id, prompt_ids, sampling)


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(
    request: pytest.FixtureRequest, tiny_task: Path
) -> Iterator[tuple[BaseRollout, Any, Any]]:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    spec = model_spec(tiny_task / "model")
    lm = spec.causal_lm(trainable=True).eval()
    perturb(lm, seed=0)
    config = replace(CONFIG, response_length=RESPONSE, max_model_len=PROMPT + RESPONSE)
    rollout = build_engine(request.param, spec, config)
    rollout.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
    yield rollout, lm, spec


def config_of(environment: type[BaseEnvironment], **agent: Any) -> PPOConfig:
    choice = EnvironmentChoice(path=str(HERE), cls=environment.__name__)
    return PPOConfig(
        data=DataConfig(max_prompt_length=PROMPT, max_response_length=RESPONSE),
        actor_rollout_ref=ActorRolloutRefConfig(),
        agent=AgentConfig(environment=choice, **({"max_turn": 20, "max_turn_tokens": 4} | agent)),
    )


def play(
    engine: Any, spec: Any, config: PPOConfig, episodes: int = 12, n: int = 2, seeded: bool = True
) -> DataProto:
    agents = AgentRollout(config, engine, spec.tokenizer, agent_specs(config), None)
    try:
        return agents.run(
            describe_episodes(episodes // n, n, step_info(step=1, seed=7, seeded=seeded))
        )
    finally:
        agents.close()


def valid_ids(batch: DataProto, row: int) -> list[int]:
    ids = torch.cat([batch.batch["prompts"][row], batch.batch["responses"][row]])
    return ids[batch.batch["attention_mask"][row].bool()].tolist()


@pytest.mark.seconds
@pytest.mark.parametrize("seeded", [True, False])
def test_what_the_engine_saw_is_a_prefix_of_what_is_trained_on_and_log_probs_agree(
    engine, seeded
) -> None:
    rollout, lm, spec = engine
    recorder = Recorder(rollout, {})
    batch = play(recorder, spec, config_of(Chatter), seeded=seeded)
    assert len(batch) == 12
    turns = 0
    for row in range(len(batch)):
        ids, width = valid_ids(batch, row), int(batch.batch["attention_mask"][row][:PROMPT].sum())
        mask = batch.batch["response_mask"][row].tolist()
        turn_ids = batch.batch["turn_ids"][row]
        seen = recorder.seen[str(row)]
        assert len(seen) == int(turn_ids.max()) + 1
        turns += len(seen)
        for turn, prompt in enumerate(seen):
            assert ids[: len(prompt)] == prompt
            assert (turn_ids == turn).nonzero()[0].item() + width == len(prompt), (
                "the turn's tokens follow what was seen"
            )
        with torch.no_grad():
            log_probs = lm(torch.tensor([ids])).logits[0].log_softmax(-1)
        for position, sampled in enumerate(mask):
            if sampled:
                expected = log_probs[width + position - 1, ids[width + position]].item()
                assert batch.batch["rollout_log_probs"][row, position].item() == pytest.approx(
                    expected, abs=1e-4
                )
    assert turns > 20, "or nothing was tested"


def test_between_turns_stands_the_templates_own_text_and_nothing_else(engine) -> None:
    rollout, _, spec = engine
    batch = play(rollout, spec, config_of(Chatter))
    between = re.compile(
        r"(<\|im_end\|> )?<\|im_start\|> user [a-z0-9 ]+ <\|im_end\|> <\|im_start\|> assistant"
    )
    closed_by = set()
    for row in range(len(batch)):
        held = int(batch.batch["attention_mask"][row][PROMPT:].sum())
        ids, mask = batch.batch["responses"][row][:held], batch.batch["response_mask"][row][:held]
        for given in torch.tensor_split(ids, (mask.diff() != 0).nonzero().flatten() + 1)[1::2]:
            match = between.fullmatch(spec.tokenizer.decode(given))
            assert match, spec.tokenizer.decode(given)
            closed_by.add(match[1])
    assert closed_by == {None, "<|im_end|> "}, (
        "turns that ended by themselves, and turns that were cut"
    )


def test_each_turns_reward_is_on_its_last_sampled_token(engine) -> None:
    rollout, _, spec = engine
    batch = play(rollout, spec, config_of(Chatter))
    for row in range(len(batch)):
        turn_ids, rewards = batch.batch["turn_ids"][row], batch.batch["environment_rewards"][row]
        expected = torch.zeros(RESPONSE)
        for turn in range(int(turn_ids.max()) + 1):
            expected[(turn_ids == turn).nonzero()[-1]] = turn + 1
        torch.testing.assert_close(rewards, expected)


def test_a_groups_members_face_the_same_task_and_answer_it_differently(engine) -> None:
    rollout, _, spec = engine
    batch = play(rollout, spec, config_of(Chatter))
    prompts = batch.batch["prompts"]
    assert torch.equal(prompts[0::2], prompts[1::2])
    assert len({tuple(p.tolist()) for p in prompts}) > 3
    assert not torch.equal(batch.batch["responses"][0::2], batch.batch["responses"][1::2])


def test_lockstep_gives_the_same_batch_again(engine) -> None:
    rollout, _, spec = engine
    first, again = (play(rollout, spec, config_of(Chatter)) for _ in range(2))
    for name in first.batch.keys():  # noqa: SIM118
        assert torch.equal(first.batch[name], again.batch[name]), name


def endings(batch: DataProto) -> list[str]:
    return list(batch.non_tensor_batch["ending"])


def test_an_episode_that_no_longer_fits_ends_as_overflow_with_what_it_has(engine) -> None:
    rollout, _, spec = engine
    batch = play(rollout, spec, config_of(Endless))
    assert set(endings(batch)) == {"overflow"}
    for row in range(len(batch)):
        mask = batch.batch["response_mask"][row]
        held = int(batch.batch["attention_mask"][row][PROMPT:].sum())
        assert mask[held - 1] == 1, "it ends with a sampled token, not with the environment's words"
        assert RESPONSE - held <= 12, "one more turn and reply would not have fitted"


def test_the_turn_limit_ends_an_episode_as_max_turns(engine) -> None:
    rollout, _, spec = engine
    batch = play(rollout, spec, config_of(Endless, max_turn=2))
    assert set(endings(batch)) == {"max_turns"}
    assert (batch.batch["turn_ids"].max(dim=1).values == 1).all()


def test_a_turn_that_the_response_cuts_is_not_played(engine) -> None:
    rollout, _, spec = engine
    config = config_of(Endless, max_turn_tokens=None)
    no_end = replace(rollout.config, ignore_eos=True)
    before, rollout.config = rollout.config, no_end
    try:
        batch = play(rollout, spec, config, episodes=2)
    finally:
        rollout.config = before
    assert endings(batch) == ["overflow", "overflow"]
    assert batch.batch["response_mask"].all()
    assert not batch.batch["environment_rewards"].any()


def test_a_turn_cut_by_its_own_limit_is_closed_unsampled_and_played(engine) -> None:
    rollout, _, spec = engine
    before, rollout.config = rollout.config, replace(rollout.config, ignore_eos=True)
    try:
        batch = play(rollout, spec, config_of(Endless, max_turn_tokens=2, max_turn=2), episodes=2)
    finally:
        rollout.config = before
    end = spec.tokenizer.eos_token_id
    for row in range(2):
        turn_ids, responses = (
            batch.batch["turn_ids"][row].tolist(),
            batch.batch["responses"][row].tolist(),
        )
        assert turn_ids[:3] == [0, 0, -1]
        assert responses[2] == end
        assert turn_ids.count(1) == 2


def test_a_first_prompt_that_is_too_long_is_an_overflow_without_tokens(engine) -> None:
    rollout, _, spec = engine
    batch = play(rollout, spec, config_of(Verbose), episodes=2)
    assert endings(batch) == ["overflow", "overflow"]
    assert not batch.batch["response_mask"].any()


@pytest.mark.parametrize("on_failure", ["zero", "mask", "refill"])
def test_a_crash_is_settled_as_configured(engine, on_failure) -> None:
    rollout, _, spec = engine
    batch = play(rollout, spec, config_of(Broken, on_failure=on_failure, max_refills=2))
    failed = np.array(endings(batch)) == "env_crash"
    assert 0 < failed.sum() < len(batch)
    facts = batch.non_tensor_batch["episode_facts"]
    assert all(("no more" in fact["error"]) == bad for fact, bad in zip(facts, failed, strict=True))
    rewards, masks = (
        batch.batch["environment_rewards"].abs().sum(1),
        batch.batch["response_mask"].any(1),
    )
    assert not rewards[torch.from_numpy(failed)].any()
    assert (rewards[~torch.from_numpy(failed)] > 0).all()
    assert masks[torch.from_numpy(failed)].any() == (on_failure == "zero")
    attempts = {fact["attempts"] for fact, bad in zip(facts, failed, strict=True) if bad}
    assert attempts == ({3} if on_failure == "refill" else {1})


@pytest.mark.seconds
def test_a_hanging_environment_is_left_behind_at_its_deadline(engine) -> None:
    rollout, _, spec = engine
    batch = play(rollout, spec, config_of(Hangs, step_timeout_s=0.3), seeded=False)
    assert {"env_timeout", "done"} == set(endings(batch))


class SpeaksOutOfTurn(Chatter):
    """Answers with roles that the template of the test refuses."""

    def step(self, action: str) -> Any:
        observation, *rest = super().step(action)
        return [{"role": "system", "content": observation}], *rest


def test_a_reply_that_the_chat_template_refuses_ends_its_episode_alone(engine) -> None:
    rollout, _, spec = engine
    template = spec.tokenizer.chat_template
    refusing = (
        "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
        "{{ raise_exception('system comes first') }}{% endif %}{% endfor %}"
    )
    spec.tokenizer.chat_template = refusing + template
    try:
        batch = play(rollout, spec, config_of(SpeaksOutOfTurn))
    finally:
        spec.tokenizer.chat_template = template
    assert "env_crash" in endings(batch)
    assert set(endings(batch)) <= {"env_crash", "done"}, (
        "an episode of one turn needs no further prompt"
    )
    errors = {
        fact["error"]
        for fact in batch.non_tensor_batch["episode_facts"]
        if fact["ending"] == "env_crash"
    }
    assert all("system comes first" in error for error in errors)


class SaysTooMuch(Chatter):
    """Has an info for itself alone: like tool calls, and of what cannot leave its process."""

    def step(self, action: str) -> Any:
        observation, reward, done, _ = super().step(action)
        return (
            observation,
            reward,
            done,
            {"tool_calls": [None, 3, {"id": "x"}], "lock": threading.Lock()},
        )


def test_an_environments_info_stays_with_it(engine) -> None:
    rollout, _, spec = engine
    batch = play(rollout, spec, config_of(SaysTooMuch))
    assert set(endings(batch)) <= {"done", "overflow"}
    assert all(fact["tool_calls"] == [] for fact in batch.non_tensor_batch["episode_facts"])


def test_steps_groups_samples_and_validation_draw_for_themselves() -> None:
    meta = {"seed": 1, "global_steps": 5}
    episodes = [Episode(group=group, sample=sample) for group in (0, 8) for sample in (0, 1)]
    variants = [meta, meta | {"validate": True}, meta | {"global_steps": 6}, meta | {"seed": 2}]
    assert len({turn_seed(variant, episode) for variant in variants for episode in episodes}) == 16
