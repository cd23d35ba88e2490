"""What environments ask is sampled beside all else, in rows of the episode; in every home."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from data.protocol import DataProto
from data.seeds import step_info
from features.policy_calls.counts import calls_metrics
from features.policy_calls.settings import PolicyCallsSettings
from tests.unit.test_rollout import CONFIG, model_spec
from training.config import DataConfig, EnvironmentChoice, PPOConfig
from training.config.schema.agent import AgentConfig
from training.config.schema.reward import CustomRewardFunctionConfig
from workers.multi_turn_rollout import AgentRollout, agent_specs
from workers.ranks.process_groups import start_process_group
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode import Episode
from workers.rollout.episode_descriptions import describe_episodes

GAMES = Path(__file__).with_name("games.py")
RESPONSE, PROMPT = 120, 40
HOMES = ["thread", "process", pytest.param("ray", marks=pytest.mark.seconds)]


class Scripted(BaseRollout):
    """Samples words that follow from the prompt and the seed alone, one step after it was asked.

    Attributes:
        together: how many turns each step had.
    """

    def __init__(self, tokenizer: Any, eos: tuple[int, ...], words: int = 3) -> None:
        config = replace(CONFIG, response_length=RESPONSE, max_model_len=PROMPT + RESPONSE)
        super().__init__(config, eos_token_ids=eos, pad_token_id=0)
        self.choices = [tokenizer.encode(word)[0] for word in ("1", "2", "3", "higher", "lower")]
        self.words = words
        self.pending: list[Completion] = []
        self.together: list[int] = []
        self.refuses: set[int] = set()
        self.submitted = 0

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        self.submitted += 1
        if self.submitted in self.refuses:
            raise RuntimeError("no room")
        digest = hashlib.sha256(repr((prompt_ids, sampling.seed)).encode()).digest()
        draw = random.Random(digest)
        ids = draw.choices(self.choices, k=self.words)
        ids = [*ids, self.eos_token_ids[0]][: sampling.max_tokens]
        self.pending.append(
            Completion(
                request_id=request_id,
                token_ids=ids,
                log_probs=[-draw.random() for _ in ids],
                finish_reason="stop" if len(ids) == self.words + 1 else "length",
            )
        )

    def step(self) -> list[Completion]:
        done = self.pending
        self.pending = []
        self.together.append(len(done))
        return done

    def abort(self, request_id: str) -> None:
        self.pending = [each for each in self.pending if each.request_id != request_id]

    def update_weights(self, weights: Any, manifest: Any) -> None: ...


@pytest.fixture(scope="module")
def spec(tiny_task: Path) -> Any:
    return model_spec(tiny_task / "model")


def config_of(
    game: str, *, home: str = "thread", calls: Any = None, reward: str = "", **agent: Any
) -> PPOConfig:
    given = {"enable": True} | (calls or {})
    choice = EnvironmentChoice(path=str(GAMES), cls=game, isolation=home)
    return PPOConfig(
        policy_calls=PolicyCallsSettings(**given),
        custom_reward_function=CustomRewardFunctionConfig(
            path=str(GAMES) if reward else None, name=reward or "compute_score"
        ),
        data=DataConfig(max_prompt_length=PROMPT, max_response_length=RESPONSE),
        agent=AgentConfig(environment=choice, **({"max_turn": 6, "max_turn_tokens": 8} | agent)),
    )


class Played:
    """Plays episodes of a game with the scripted engine, and keeps all that came of them."""

    def __init__(
        self,
        spec: Any,
        config: PPOConfig,
        episodes: int = 4,
        n: int = 2,
        seeded: bool = True,
        refuses: tuple[int, ...] = (),
        words: int = 3,
        group: Any = None,
    ) -> None:
        self.engine = Scripted(spec.tokenizer, spec.eos_token_ids, words)
        self.engine.refuses = set(refuses)
        agents = AgentRollout(config, self.engine, spec.tokenizer, agent_specs(config), group)
        try:
            described = describe_episodes(
                episodes // n, n, step_info(step=1, seed=7, seeded=seeded)
            )
            batch = agents.batch_of(described)
            agents.loop.run(batch)
            self.episodes: list[Episode] = list(batch.episodes)
            self.batch: DataProto = agents.rows_of(described, self.episodes)
        finally:
            agents.close()
        facts = self.batch.non_tensor_batch["episode_facts"]
        self.facts = [each for each in facts if each is not None]


def told(episode: Episode) -> list[tuple[str, bool, int, bool]]:
    """Of each turn who was asked, whether aside, its tokens, whether it is trained."""
    return [(turn.writes, turn.aside, turn.tokens, turn.is_trained) for turn in episode.turns]


def contents(played: Played) -> list[Any]:
    """All that must be equal in every home, but for times."""
    return [
        (
            [(row.prompt_ids, list(row.ids), list(row.log_probs), row.spans) for row in each.rows],
            [turn.text for turn in each.turns],
            each.ending,
            [dict(row.reward_at) for row in each.rows],
            each.asked,
        )
        for each in played.episodes
    ]


def test_an_answer_is_a_turn_and_a_row_of_its_episode(spec: Any) -> None:
    played = Played(spec, config_of("Asker"))
    for episode in played.episodes:
        assert episode.ending == "done", episode.error
        own = ("", False, 4, True)
        asked = ("call", True, 4, True)
        assert told(episode) == [own, asked, own, asked]
        assert [row.aside for row in episode.rows] == [False, True, True]
        main, *aside = episode.rows
        assert [span.turn for span in main.spans] == [0, 2]
        assert [[span.turn for span in row.spans] for row in aside] == [[1], [3]]
        # What the environment read is what the row has.
        said = spec.tokenizer.decode(list(aside[0].ids), skip_special_tokens=True)
        assert episode.turns[1].text == said
        assert said in episode.turns[0].reply.messages[0]["content"]
        assert episode.turns[1].asked == [{"role": "user", "content": "number 1"}]
    assert len(played.batch) == 12
    assert set(played.batch.non_tensor_batch["agent_conversation"]) == {""}
    # 1 for the first step, 2 for the second, each on the last token that was sampled for it.
    rewards = played.batch.batch["environment_rewards"].reshape(4, 3, -1).sum(-1)
    assert rewards.tolist() == [[0.0, 1.0, 2.0]] * 4
    assert [facts["reward"] for facts in played.facts] == [3.0] * 4
    assert [facts["turns"] for facts in played.facts] == [2] * 4
    assert [facts["policy_calls"]["answers"] for facts in played.facts] == [2.0] * 4


def test_the_prompt_of_an_answer_is_the_templates_of_its_messages(spec: Any) -> None:
    played = Played(spec, config_of("Asker"))
    wanted = spec.tokenizer.apply_chat_template(
        [{"role": "user", "content": "number 1"}], add_generation_prompt=True, tokenize=False
    )
    for episode in played.episodes:
        assert spec.tokenizer.decode(episode.rows[1].prompt_ids) == spec.tokenizer.decode(
            spec.tokenizer.encode(wanted, add_special_tokens=False)
        )


@pytest.mark.parametrize("game", ["Critic", "Talker", "SideBySide", "InReset", "PaysLate"])
@pytest.mark.parametrize("home", HOMES)
def test_every_home_gives_the_same(
    spec: Any, game: str, home: str, request: pytest.FixtureRequest
) -> None:
    if home == "ray":
        request.getfixturevalue("cluster")
    config = config_of(game, home=home)
    there = Played(spec, config, seeded=False)
    assert all(episode.ending == "done" for episode in there.episodes), there.episodes[0].error
    assert contents(there) == contents(Played(spec, config_of(game)))


@pytest.mark.parametrize("home", HOMES)
def test_a_game_of_coroutines_is_played_as_one_of_functions_in_every_home(
    spec: Any, home: str, request: pytest.FixtureRequest
) -> None:
    if home == "ray":
        request.getfixturevalue("cluster")
    config = config_of("Awaiting", home=home, reward="judged_later")
    awaited = Played(spec, config, episodes=6, seeded=False)
    assert all(each.ending == "done" for each in awaited.episodes), awaited.episodes[0].error
    blocking = Played(spec, config_of("Blocking", reward="judged"), episodes=6)
    assert contents(awaited) == contents(blocking)
    assert [turn.anchor for turn in awaited.episodes[0].turns if not turn.aside] == [
        "turn 0",
        "turn 1",
    ]
    assert [facts["policy_calls"]["answers"] for facts in awaited.facts] == [6.0] * 6


def test_masked_answers_stay_out_and_paid_ones_earn_their_own(spec: Any) -> None:
    played = Played(spec, config_of("Critic"))
    columns = played.batch.non_tensor_batch
    mask = played.batch.batch["response_mask"].sum(-1).reshape(4, 5).tolist()
    assert mask == [[8, 0, 4, 0, 4]] * 4
    rewards = played.batch.batch["environment_rewards"].sum(-1).reshape(4, 5).tolist()
    # What the steps paid, 1 and 2, lies on the episode's own turns; a critic's is its own.
    assert rewards == [[3.0, 0.0, 0.25, 0.0, 0.5]] * 4
    speakers = columns["agent_conversation"].reshape(4, 5).tolist()
    assert speakers == [["", "", "critic/2", "", "critic/5"]] * 4
    roles = columns["agent_role"].reshape(4, 5)
    assert all(role.endswith("/critic") for role in roles[:, [2, 4]].flatten())
    assert len(set(roles[:, [0, 1, 3]].flatten())) == 1
    assert [facts["policy_calls"]["paid"] for facts in played.facts] == [2.0] * 4


def test_a_conversation_that_goes_on_stays_in_its_row(spec: Any) -> None:
    played = Played(spec, config_of("Talker"))
    for episode in played.episodes:
        assert [row.aside for row in episode.rows] == [False, True]
        assert [span.turn for span in episode.rows[1].spans] == [1, 3]
        assert episode.turns[3].behind == 1


def test_questions_at_once_are_sampled_together_and_numbered_by_content(spec: Any) -> None:
    played = Played(spec, config_of("SideBySide"), episodes=1, n=1)
    assert played.engine.together == [1, 3, 1, 3]
    [episode] = played.episodes
    asked = [turn.asked[0]["content"] for turn in episode.turns if turn.aside]
    assert sorted(asked[:3]) == ["number 1", "number 2", "number 3"]
    # By tasks or by a list, in whichever order: the same numbers. What was asked before draws anew.
    assert asked[:3] == asked[3:]


def test_seeds_follow_from_what_is_asked_and_not_from_when(spec: Any) -> None:
    in_rounds = contents(Played(spec, config_of("Critic"), seeded=True))
    assert in_rounds == contents(Played(spec, config_of("Critic"), seeded=False))
    assert in_rounds != contents(Played(spec, config_of("Asker"), seeded=True))
    samples = {
        tuple(row.ids)
        for each in Played(spec, config_of("Asker")).episodes
        for row in each.rows[1:2]
    }
    assert len(samples) > 1, "members of a group are answered differently"


def test_a_reward_function_may_ask_and_pay(spec: Any) -> None:
    asked = Played(spec, config_of("Asker", reward="judged"))
    for episode in asked.episodes:
        assert episode.final_reward == len(episode.turns[-1].text) % 3
        assert not episode.turns[-1].is_trained
    paid = Played(spec, config_of("Asker", reward="judged_and_paid"))
    rewards = paid.batch.batch["environment_rewards"].sum(-1).reshape(4, 4).tolist()
    # The episode's is behind its last turn that is not the judge's.
    assert rewards == [[0.0, 0.0, 2.0, 0.5]] * 4


# Bounds


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("game", ["ForEver", "AwaitsForEver"])
def test_a_tool_that_asks_for_ever_ends_its_episode_alone(
    spec: Any, home: str, game: str, request: pytest.FixtureRequest
) -> None:
    if home == "ray":
        request.getfixturevalue("cluster")
    calls = {"max_calls": 3, "max_refused": 5}
    played = Played(spec, config_of(game, home=home, calls=calls), episodes=2, n=1)
    for episode in played.episodes:
        assert episode.ending == "env_timeout"
        assert "policy_calls.max_refused" in episode.error
        assert sum(turn.aside for turn in episode.turns) == 3
        assert episode.asked["refused"] == 6


@pytest.mark.parametrize(
    ("calls", "agent", "answers", "word"),
    [
        ({"max_calls": 5}, {}, 5, "policy_calls.max_calls"),
        ({"max_episode_tokens": 7}, {}, 4, "policy_calls.max_episode_tokens"),
        ({}, {"max_episode_tokens": 10}, 3, "agent.max_episode_tokens"),
    ],
)
def test_bounds_are_told_in_a_sentence(
    spec: Any, calls: Any, agent: Any, answers: int, word: str
) -> None:
    played = Played(spec, config_of("UntilRefused", calls=calls, **agent), episodes=1, n=1)
    [episode] = played.episodes
    assert episode.ending == "done"
    assert sum(turn.aside for turn in episode.turns) == answers
    assert episode.turns[0].reply.reward == answers
    assert all(turn.tokens <= 2 for turn in episode.turns if turn.aside)


def test_what_has_no_room_is_refused_and_ends_who_lets_it_pass(spec: Any) -> None:
    played = Played(spec, config_of("LetsPass", on_failure="zero"), episodes=1, n=1)
    [episode] = played.episodes
    assert episode.ending == "env_crash"
    assert "data.max_prompt_length" in episode.error and "PolicyError" in episode.error


def test_depth_is_that_of_tools_that_answers_call(spec: Any) -> None:
    from custom.asking import AskingLine, PolicyAnswer, held
    from custom.tools import ToolCall, ToolRegistry
    from features.policy_calls import policy
    from tests.features.policy_calls.games import SubAgent

    registry = ToolRegistry([SubAgent()])
    depths = []

    def answer(questions: Any) -> list[PolicyAnswer]:
        [question] = questions
        depths.append(question.depth)
        text = question.messages[0]["content"]
        return [PolicyAnswer(text=text, finish_reason="stop", tokens=1)]

    class Recursive(SubAgent):
        def execute(self, question: str) -> str:
            reply = policy.ask(question)
            if len(depths) < 3:
                registry.execute(ToolCall("sub_agent", {"question": reply.text}))
            return reply.text

    registry.tools["sub_agent"] = Recursive()
    policy.is_set_up = True
    with held(AskingLine(answer)):
        assert registry.execute(ToolCall("sub_agent", {"question": "guess"})).ok
        assert depths == [1, 2, 3]
        policy.ask("guess")
        with policy.deeper(), policy.deeper():
            policy.ask("guess")
    assert depths == [1, 2, 3, 1, 2]


def test_a_tool_may_be_a_coroutine_and_is_cancelled_at_its_deadline() -> None:
    from custom.asking import AskingLine, PolicyAnswer, held
    from custom.tools import ToolCall, ToolRegistry
    from features.policy_calls import policy
    from tests.features.policy_calls.games import AwaitingAgent

    depths = []

    def answer(questions: Any) -> list[PolicyAnswer]:
        time.sleep(0.6)
        depths.extend(question.depth for question in questions)
        return [PolicyAnswer(text="7", finish_reason="stop", tokens=1) for _ in questions]

    registry = ToolRegistry([AwaitingAgent()])
    policy.is_set_up = True
    with held(AskingLine(answer)):
        asked = registry.execute(ToolCall("sub_agent", {"question": "guess"}))
        assert (asked.ok, asked.result) == (True, "7"), "its clock stands still while it asks"
        late = registry.execute(ToolCall("sub_agent", {"question": "hang"}))
    assert late.error_kind == "timeout" and "did not answer within 0.3 s" in late.result
    assert AwaitingAgent.cancelled == ["hang"]
    assert depths == [1]


def test_what_a_task_asks_behind_its_call_is_told_that_the_call_is_over(spec: Any) -> None:
    [episode] = Played(spec, config_of("LeavesTasks"), episodes=1, n=1).episodes
    assert episode.ending == "done", episode.error
    assert not any(turn.aside for turn in episode.turns)
    assert episode.turns[1].reply.task.startswith("the call of the environment that this belongs")


# Deadlines


@pytest.mark.seconds
@pytest.mark.parametrize("home", ["thread", "process"])
def test_a_calls_clock_stands_still_while_the_policy_is_asked(spec: Any, home: str) -> None:
    class Sleepy(Scripted):
        def step(self) -> list[Completion]:
            if self.pending:
                time.sleep(0.5)
            return super().step()

    config = config_of("Slow", home=home, step_timeout_s=1.5, on_failure="zero")
    agents = AgentRollout(
        config,
        Sleepy(spec.tokenizer, spec.eos_token_ids),
        spec.tokenizer,
        agent_specs(config),
        None,
    )
    try:
        described = describe_episodes(1, 1, step_info(step=1, seed=7))
        batch = agents.batch_of(described)
        agents.loop.run(batch)
    finally:
        agents.close()
    [episode] = batch.episodes
    # Two steps of 0.6 s of its own, in each of which the engine took a second.
    assert episode.ending == "done", episode.error
    assert 1.0 < episode.env_seconds < 2.5
    short = config_of("Slow", home=home, step_timeout_s=0.3, on_failure="zero")
    [late] = Played(spec, short, episodes=1, n=1).episodes
    assert late.ending == "env_timeout" and late.error.startswith("step was still running")


@pytest.mark.seconds
@pytest.mark.parametrize("home", ["thread", "process"])
def test_a_coroutine_that_hangs_is_given_up_with_its_tasks(spec: Any, home: str) -> None:
    config = config_of("Hangs", home=home, step_timeout_s=0.3, on_failure="zero")
    before = threading.active_count()
    [episode] = Played(spec, config, episodes=1, n=1).episodes
    assert episode.ending == "env_timeout"
    assert episode.error.startswith("step was still running")
    assert threading.active_count() <= before


# Faults


@pytest.mark.parametrize("home", HOMES)
def test_an_engine_that_refuses_an_answer_fails_the_episode(
    spec: Any, home: str, request: pytest.FixtureRequest
) -> None:
    if home == "ray":
        request.getfixturevalue("cluster")
    config = config_of("SideBySide", home=home, on_failure="zero")
    played = Played(spec, config, episodes=1, n=1, refuses=(3,))
    [episode] = played.episodes
    assert (episode.ending, episode.error) == ("engine_error", "RuntimeError: no room")
    assert not any(row.aside for row in episode.rows), "what was given up left no rows"
    refilled = Played(spec, config_of("SideBySide", home=home), episodes=1, n=1, refuses=(3,))
    [again] = refilled.episodes
    assert again.ending == "done" and again.attempt == 1


def test_a_thread_of_its_own_and_a_run_that_is_not_asked_get_a_sentence(spec: Any) -> None:
    [episode] = Played(spec, config_of("FromThread", on_failure="zero"), episodes=1, n=1).episodes
    assert episode.ending == "env_crash" and "asyncio.gather" in episode.error
    off = config_of("Asker", calls={"enable": False}, on_failure="zero")
    from features.policy_calls import policy

    for is_set_up, word in ((False, "policy_calls.enable=true"), (True, "answers no questions")):
        policy.is_set_up = is_set_up
        [refused] = Played(spec, off, episodes=1, n=1).episodes
        assert refused.ending == "env_crash" and word in refused.error
        assert [row.aside for row in refused.rows] == [False]
    policy.is_set_up = True


def test_metrics_by_hand() -> None:
    facts = [
        {
            "policy_calls": {"answers": 2.0, "refused": 1.0, "tokens": 8.0, "paid": 1.0},
            "sampled_tokens": 16,
        },
        {
            "policy_calls": {"answers": 0.0, "refused": 0.0, "tokens": 0.0, "paid": 0.0},
            "sampled_tokens": 4,
        },
    ]
    assert calls_metrics(facts) == {
        "policy_calls/per_episode/mean": 1.0,
        "policy_calls/per_episode/max": 2.0,
        "policy_calls/refused": 1.0,
        "policy_calls/paid": 1.0,
        "policy_calls/tokens/mean": 4.0,
        "policy_calls/tokens/share": 0.4,
    }
    assert calls_metrics([]) == {}


# Ranks that share an engine

RANKS = 2


def play_on_rank(number: int, port: int, folder: str, model: str) -> None:
    """Plays games that ask, on the leader's environments; writes down this rank's rows."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    start_process_group(torch.device("cpu"))
    spec = model_spec(Path(model))
    made = [contents(Played(spec, config_of(game), group=dist.group.WORLD)) for game in RANKS_PLAY]
    Path(folder, f"{number}.pickle").write_bytes(pickle.dumps(made))
    dist.destroy_process_group()


RANKS_PLAY = ("Critic", "SideBySide", "ForEver", "Awaiting")


@pytest.mark.seconds
def test_all_ranks_that_share_an_engine_make_the_same_rows(
    spec: Any, tiny_task: Path, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(play_on_rank, args=(port, str(tmp_path), str(tiny_task / "model")), nprocs=RANKS)
    leader, other = (pickle.loads((tmp_path / f"{k}.pickle").read_bytes()) for k in range(RANKS))
    assert leader == other == [contents(Played(spec, config_of(game))) for game in RANKS_PLAY]
