"""Rewards of single answers (X-Reward, POST /reward): whom they pay, and that they do so once."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from custom.model_usage import USAGE
from features.judges import install_models
from features.programs.attempt import Deadlines
from features.programs.connections import Connections
from features.programs.exchange import Answer, Asked, Exited, Gone, Rewarded
from features.programs.play import ProgramEpisode
from features.programs.pool import ProgramPool
from features.programs.protocols import ProtocolError
from features.programs.spec import ProgramSpec
from tests.features.programs.test_server import BODY, Served, begin
from tests.features.programs.test_side_models import judge_at
from tests.model_server import model_server, say
from tests.unit.test_turn_tokens import turn_tokens
from workers.environments.reply import StepReply
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode import Ended, Episode, Several, TurnLimits
from workers.rollout.speaker import NOBODY, Speaker

USER = {"role": "user", "content": "Two and two?"}
MORE = {"role": "user", "content": "And three?"}
OTHER = {"role": "user", "content": "A colour?"}
YES = {"role": "assistant", "content": "Yes."}
LONG = {"role": "user", "content": "word " * 400}
ALICE = Speaker("alice")
BOB = Speaker("bob")


class Talk:
    """Plays an episode whose policy says Yes."""

    def __init__(self, *, max_turn: int | None = None, client_sampling: str = "override") -> None:
        self.tokens = turn_tokens("smollm2")
        self.episode = Episode(group=0, sample=0)
        self.number = 0
        limits = TurnLimits(
            prompt_length=300, response_length=300, max_model_len=600, max_turn=max_turn
        )

        def sampler(episode: Episode, turn: int | None = None) -> Sampling:
            return Sampling(max_tokens=20, seed=turn)

        self.play: Iterator[Any] = ProgramEpisode(
            self.episode, sampler, limits, self.tokens, client_sampling
        ).play()
        next(self.play)

    def begin(self, *messages: dict[str, Any], **more: Any) -> Several:
        """Asks; the answer is yet to be sampled, or the request was refused."""
        self.number += 1
        return self.play.send(Asked(number=self.number, messages=list(messages), **more))

    def sampled(self, number: int) -> None:
        ids = self.tokens.tokenizer.encode("Yes.<|im_end|>", add_special_tokens=False)
        self.play.send(
            Completion(
                request_id=f"0.{number}",
                token_ids=ids,
                log_probs=[-1.0] * len(ids),
                finish_reason="stop",
            )
        )

    def ask(self, *messages: dict[str, Any], **more: Any) -> None:
        """Asks, and is answered."""
        assert self.begin(*messages, **more).sample is not None
        self.sampled(self.number)

    def is_refused(self, *messages: dict[str, Any], **more: Any) -> str:
        """Asks, and returns why that was refused."""
        [told] = self.begin(*messages, **more).asks
        return told.args[1].refusal

    def pay(self, reward: float, **more: Any) -> None:
        self.play.send(Rewarded(reward=reward, **more))

    def earned(self) -> dict[int, float]:
        """Lists what the turns have earned that earned something."""
        paid = {}
        for row in self.episode.rows:
            for span in row.spans:
                reward = row.reward_at.get(span.end - 1, 0.0)
                if reward:
                    paid[span.turn] = reward
        return paid


REFUSALS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    "ended": ({"max_turn": 1}, [USER, YES, MORE], {}),
    "context_length": ({}, [LONG], {}),
    "template": ({}, [{"role": 5, "content": "odd"}], {}),
    "sampling": ({"client_sampling": "refuse"}, [USER, YES, MORE], {"forces_call": True}),
    "ids": ({}, [], {"prompt_ids": (10**9,)}),
    "counts": ({}, [USER, YES, MORE], {"only_counts": True}),
}


@pytest.mark.parametrize("way", REFUSALS)
@pytest.mark.parametrize("is_by_header", [True, False])
def test_a_request_pays_the_answer_before_it_whatever_becomes_of_it(
    way: str, is_by_header: bool
) -> None:
    settings, messages, more = REFUSALS[way]
    talk = Talk(**settings)
    talk.ask(USER)
    if is_by_header:
        more = more | {"reward": 1.0}
    told = talk.is_refused(*messages, **more)
    if not is_by_header:
        talk.pay(1.0)
    assert told == {"ids": "template", "counts": ""}.get(way, way)
    assert talk.earned() == {0: 1.0}
    if is_by_header:
        talk.is_refused(*messages, **more)
        assert talk.earned() == {0: 1.0}, "who tries again says the same of the same answer"


@pytest.mark.parametrize("way", ["context_length", "template", "ids", "counts"])
def test_what_a_refused_request_said_is_not_paid_again_by_the_one_in_its_place(way: str) -> None:
    settings, messages, more = REFUSALS[way]
    talk = Talk(**settings)
    talk.ask(USER)
    talk.is_refused(*messages, **more, reward=1.0)
    talk.ask(USER, YES, MORE, reward=1.0)
    assert talk.earned() == {0: 1.0}
    talk.ask(USER, YES, MORE, YES, MORE, reward=1.0)
    assert talk.earned() == {0: 1.0, 1: 1.0}


def test_a_reward_that_a_client_says_anew_replaces_that_of_its_refused_request() -> None:
    talk = Talk()
    talk.ask(USER)
    talk.is_refused(LONG, reward=1.0)
    talk.ask(OTHER, reward=0.25)
    assert talk.earned() == {0: 0.25}


@pytest.mark.parametrize("way", ["engine", "abort", "gone", "gone_later"])
def test_a_request_that_failed_pays_once_with_its_retry(way: str) -> None:
    talk = Talk()
    talk.ask(USER)
    talk.begin(USER, YES, MORE, reward=1.0)
    if way == "engine":
        talk.play.throw(Ended("engine", "no room"))
    elif way == "abort":
        talk.play.send(
            Completion(request_id="0.2", token_ids=[], log_probs=[], finish_reason="abort")
        )
    elif way == "gone":
        talk.play.send(Gone(number=2))
    else:
        talk.sampled(2)
        talk.play.send(Gone(number=2))
    assert talk.earned() == {0: 1.0}
    talk.ask(USER, YES, MORE, reward=1.0)
    assert talk.earned() == {0: 1.0}


def test_the_same_request_again_pays_an_answer_once_and_others_each_theirs() -> None:
    talk = Talk()
    talk.ask(USER)
    for _ in range(2):
        talk.ask(USER, YES, MORE, reward=0.5)
    assert talk.earned() == {0: 0.5}
    talk.ask(USER, YES, OTHER, reward=0.25)
    assert talk.earned() == {0: 0.75}, "two conversations go on from one answer"


def test_a_client_that_keeps_no_history_pays_each_answer() -> None:
    talk = Talk()
    talk.ask(USER)
    for _ in range(3):
        talk.ask(USER, reward=1.0)
    assert talk.earned() == {0: 1.0, 1: 1.0, 2: 1.0}


@pytest.mark.parametrize("is_by_header", [True, False])
@pytest.mark.parametrize(
    ("first", "second"),
    [(ALICE, BOB), (Speaker("alice", "1"), Speaker("alice", "2")), (ALICE, NOBODY)],
)
def test_a_speaker_pays_the_last_answer_of_its_own_conversation(
    first: Speaker, second: Speaker, is_by_header: bool
) -> None:
    talk = Talk()
    talk.ask(USER, speaker=first)
    talk.ask(OTHER, speaker=second)
    for speaker, turn in ((first, 0), (second, 1)):
        if is_by_header:
            talk.ask(MORE, speaker=speaker, reward=1.0)
        else:
            talk.pay(1.0, speaker=speaker)
        assert talk.earned().pop(turn) == 1.0
    assert talk.earned() == {0: 1.0, 1: 1.0}


@pytest.mark.parametrize("max_turn", [2, None])
def test_a_refused_request_pays_where_its_own_conversation_goes_on(max_turn: int | None) -> None:
    talk = Talk(max_turn=max_turn)
    talk.ask(USER)
    talk.ask(OTHER)
    last = MORE if max_turn else LONG
    for first, turn in ((USER, 0), (OTHER, 1)):
        assert talk.is_refused(first, YES, last, reward=1.0 + turn)
    assert talk.earned() == {0: 1.0, 1: 2.0}


def test_a_speaker_without_an_answer_pays_nobody_and_a_post_without_a_name_the_last() -> None:
    talk = Talk()
    talk.ask(USER, speaker=ALICE)
    talk.ask(OTHER, speaker=BOB, reward=1.0)
    talk.pay(1.0, speaker=Speaker("carol"))
    assert talk.earned() == {}
    talk.pay(2.0)
    assert talk.earned() == {1: 2.0}


def test_what_is_still_being_sampled_is_not_the_last_answer() -> None:
    talk = Talk()
    talk.ask(USER)
    talk.begin(OTHER)
    talk.pay(1.0)
    talk.begin(MORE, reward=0.5)
    assert talk.earned() == {0: 1.5}


def test_helpers_answers_are_passed_over_by_their_speakers_next_request() -> None:
    talk = Talk()
    talk.ask(USER, speaker=ALICE)
    talk.ask(OTHER, speaker=ALICE, trained=False)
    talk.ask(USER, speaker=BOB)
    talk.ask(MORE, speaker=ALICE, reward=1.0)
    talk.pay(0.5, number=2)
    assert talk.earned() == {0: 1.0}


def test_an_answer_that_is_paid_before_the_next_request_keeps_its_messages() -> None:
    for pays in ("header", "post"):
        talk = Talk()
        talk.ask(USER)
        if pays == "post":
            talk.pay(1.0)
        talk.ask(USER, YES, MORE, reward=1.0 if pays == "header" else None)
        assert talk.episode.turns[0].reply == StepReply(messages=[MORE], reward=1.0)


def test_an_answer_counts_as_taken_where_a_refused_request_pays_it() -> None:
    talk = Talk(max_turn=1)
    talk.ask(USER)
    talk.is_refused(USER, YES, MORE, reward=1.0)
    talk.play.send(Exited(undelivered=(1,)))
    assert talk.earned() == {0: 1.0}


# The server


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    spec = ProgramSpec(command=(sys.executable, "-c", "import time; time.sleep(600)"))
    with ProgramPool({0: spec}, deadlines=Deadlines(), max_tokens=64) as pool:
        yield begin(pool)


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    yield shared
    shared.events.clear()


CHAT = "/v1/chat/completions"
ASSISTANT_LAST = json.dumps({"messages": [USER, YES]}).encode()
TWO_ANSWERS = json.dumps({"messages": [USER], "n": 2}).encode()
KEEPS = json.dumps({"input": "Hi", "previous_response_id": "resp_1"}).encode()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, b"{", 400),
        (CHAT, b"[]", 400),
        (CHAT, b'{"messages": []}', 400),
        (CHAT, b'{"messages": 5}', 400),
        (CHAT, ASSISTANT_LAST, 400),
        (CHAT, TWO_ANSWERS, 400),
        (CHAT, b"x" * (2 << 20), 400),
        ("/v1/responses", KEEPS, 400),
        ("/v1/messages", b"{}", 400),
        ("/v1/messages/count_tokens", b"{", 400),
        ("/inference/v1/generate", b"{}", 400),
        ("/v1/embeddings", b"{}", 404),
    ],
)
def test_a_request_that_the_server_refuses_has_its_reward_told(
    served: Served, path: str, body: bytes, status: int
) -> None:
    response = served.send(body, path, X_Reward="0.5", X_Agent="bob").getresponse()
    assert response.status == status, response.read()
    assert served.heard(Rewarded) == Rewarded(reward=0.5, speaker=BOB, by_refused=True)
    assert served.heard(Rewarded, 0.2) is None


def test_a_refused_requests_reward_comes_before_the_request_in_its_place() -> None:
    refused = Rewarded(reward=1.0, by_refused=True)
    again = Asked(number=2, messages=[USER, YES, MORE], reward=1.0)
    talk = Talk()
    talk.ask(USER)
    assert sorted([again, refused], key=lambda event: event.order) == [refused, again]
    talk.play.send(refused)
    talk.play.send(refused)
    talk.ask(USER, YES, MORE, reward=1.0)
    assert talk.earned() == {0: 1.0}


def test_a_post_names_its_speaker_and_an_answer_of_its_own_episode(served: Served) -> None:
    connection = served.send()
    asked = served.heard(Asked)
    early = json.dumps({"reward": 1.0, "id": f"0-{asked.number}"}).encode()
    assert served.send(early, "/reward").getresponse().status == 404, "it has no answer yet"
    served.answer(asked)
    answer_id = json.load(connection.getresponse())["id"]
    body = json.dumps({"reward": 1.0}).encode()
    assert served.send(body, "/reward", X_Agent="bob").getresponse().status == 200
    assert served.heard(Rewarded) == Rewarded(reward=1.0, speaker=BOB)
    for prefix in ("", "msg_", "resp_"):
        body = json.dumps({"reward": 1.0, "id": prefix + answer_id}).encode()
        assert served.send(body, "/reward").getresponse().status == 200
        assert served.heard(Rewarded).number == asked.number
    for wrong, status in ((f"7-{asked.number}", 400), ("0-999", 404), ("x", 400)):
        body = json.dumps({"reward": 1.0, "id": wrong}).encode()
        assert served.send(body, "/reward").getresponse().status == status, wrong
    assert served.heard(Rewarded, 0.2) is None


def test_a_request_of_too_many_has_its_reward_told(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ProtocolError("too many", "too_many_requests", 429)

    monkeypatch.setattr(Connections, "assign", refuse)
    assert served.send(X_Reward="0.5").getresponse().status == 429
    assert served.heard(Rewarded) == Rewarded(reward=0.5, by_refused=True)


def test_a_header_that_stands_twice_pays_once_and_one_that_is_no_number_is_refused(
    served: Served,
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.putrequest("POST", served.base + CHAT)
    for name, value in (("Content-Length", "2"), ("X-Reward", "0.5"), ("X-Reward", "0.5")):
        connection.putheader(name, value)
    connection.endheaders(b"[]")
    assert connection.getresponse().status == 400
    assert served.heard(Rewarded).reward == 0.5
    for value in ("much", "nan", "inf"):
        assert served.send(X_Reward=value).getresponse().status == 400
    assert served.heard(Rewarded, 0.2) is None


def test_a_question_to_a_model_beside_the_policy_has_its_reward_told() -> None:
    with model_server(say("0.5")) as server:
        spec = ProgramSpec(
            command=(sys.executable, "-c", "import time; time.sleep(600)"),
            services=judge_at(server.url),
        )
        body = json.dumps({"model": "judge", "messages": [USER]}).encode()
        with ProgramPool({0: spec}, deadlines=Deadlines(), max_tokens=64) as pool:
            served = begin(pool)
            assert served.send(body, X_Reward="0.5").getresponse().status == 200
            assert served.heard(Rewarded) == Rewarded(reward=0.5, by_refused=True)
    install_models({})
    USAGE.take()


@pytest.mark.seconds
def test_a_retry_that_takes_the_waiting_answer_tells_its_reward_once(served: Served) -> None:
    first = served.send(X_Reward="0.5")
    asked = served.heard(Asked)
    assert asked.reward == 0.5
    first.close()
    time.sleep(0.2)
    second = served.send(X_Reward="0.5", x_stainless_retry_count="1")
    served.answer(asked)
    assert second.getresponse().status == 200
    assert served.heard(Asked, 0.3) is None


def test_a_retry_that_says_a_reward_for_the_first_time_is_heard(served: Served) -> None:
    first = served.send()
    served.heard(Asked)
    first.close()
    time.sleep(0.2)
    second = served.send(X_Reward="0.5")
    asked = served.heard(Asked)
    assert asked.reward == 0.5
    served.answer(asked)
    assert second.getresponse().status == 200


def test_a_refused_answer_of_the_episode_tells_no_reward_twice(served: Served) -> None:
    connection = served.send(BODY, X_Reward="0.5")
    asked = served.heard(Asked)
    served.pool.answer(0, asked.number, Answer(refusal="sampling", error="other"))
    assert connection.getresponse().status == 400
    assert served.heard(Rewarded, 0.3) is None
