"""Programs in which several agents speak: whose rows a request goes on in, what each earns."""

from __future__ import annotations

import sys
from pathlib import Path

from features.programs.exchange import Asked, Earned, Exited
from features.programs.play import ProgramEpisode
from features.programs.spec import ProgramSpec
from features.shared.conversations import Conversations
from tests.features.programs.test_pool import exit_of, play, pool_of
from tests.unit.test_turn_tokens import turn_tokens
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode import Episode, TurnLimits
from workers.rollout.speaker import NOBODY, Speaker

SOLVER = Speaker("solver", "1")
CRITIC = Speaker("critic", "2")
LIMITS = TurnLimits(prompt_length=300, response_length=300, max_model_len=600)
ASKED = [{"role": "user", "content": "Two and two?"}]
TWO_AGENTS = """
import json, os, urllib.request

def ask(agent, conversation):
    headers = {"X-Agent": agent, "X-Session-ID": conversation, "Authorization": "Bearer x"}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}]}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers)).read()

ask("solver", "1")
ask("critic", "2")
ask("", "3")
earned = {"1": {"reward": 1.0}, "2": {"trained": False}}
print(json.dumps({"conversations": earned, "metrics": {"steps": 2}}))
"""


def say(talk: Conversations, speaker: Speaker, turn: int) -> None:
    """Has the policy answer a speaker."""
    tokens = talk.tokens
    place = talk.place(ASKED, None, speaker)
    assert place is not None
    ids = tokens.tokenizer.encode("Yes.<|im_end|>", add_special_tokens=False)
    row = talk.enter(place)
    completion = Completion(
        request_id=f"0.{turn}", token_ids=ids, log_probs=[-1.0] * len(ids), finish_reason="stop"
    )
    row.append_sampled(completion, turn)
    talk.leave(place, turn, ids)


def test_a_request_goes_on_in_no_other_speakers_row() -> None:
    talk = Conversations(turn_tokens("smollm2"), LIMITS, [])
    say(talk, SOLVER, 0)
    following = [*ASKED, {"role": "assistant", "content": "Yes."}, *ASKED]
    rendered = talk.tokens.prompt(following)
    for speaker, kind in ((SOLVER, "grows"), (CRITIC, "begins"), (NOBODY, "begins")):
        by_messages = talk.place(following, None, speaker)
        assert by_messages is not None and by_messages.kind == kind
        assert by_messages.row.speaker == speaker
    row = talk.rows[0]
    ids = [*row.token_ids, *rendered[-4:]]
    by_ids = {speaker: talk.place_ids(ids, speaker) for speaker in (SOLVER, CRITIC)}
    assert [place.kind for place in by_ids.values() if place] == ["grows", "begins"]


def test_a_fork_stays_its_speakers() -> None:
    talk = Conversations(turn_tokens("smollm2"), LIMITS, [])
    say(talk, SOLVER, 0)
    following = [*ASKED, {"role": "assistant", "content": "Yes."}, *ASKED]
    first = talk.place(following, None, SOLVER)
    assert first is not None
    talk.enter(first)
    second = talk.place(following, None, SOLVER)
    assert second is not None and second.kind == "forks" and second.row.speaker == SOLVER


def test_a_program_names_its_speakers_by_headers_and_pays_them_at_its_end(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO_AGENTS)
    with pool_of(ProgramSpec(command=(sys.executable, str(script)))) as pool:
        told = play(pool)
    speakers = [heard.speaker for heard in told if isinstance(heard, Asked)]
    assert speakers == [SOLVER, CRITIC, NOBODY], "a session alone is a client's own affair"
    exited = exit_of(told)
    assert exited.failure == "", exited.error
    assert exited.earned == {"1": Earned(reward=1.0), "2": Earned(trained=False)}
    assert exited.metrics == {"steps": 2.0} and exited.reward is None


def test_a_conversation_is_paid_on_its_last_turn_and_one_not_trained_makes_no_row() -> None:
    tokens = turn_tokens("smollm2")
    episode = Episode(group=0, sample=0)

    def sampler(episode: Episode, turn: int | None = None) -> Sampling:
        return Sampling(max_tokens=20, seed=turn)

    coroutine = ProgramEpisode(episode, sampler, LIMITS, tokens).play()
    next(coroutine)
    ids = tokens.tokenizer.encode("Yes.<|im_end|>", add_special_tokens=False)
    for number, speaker in enumerate((SOLVER, CRITIC), start=1):
        asked = Asked(number=number, messages=ASKED, speaker=speaker)
        request = coroutine.send(asked).sample
        done = Completion(
            request_id=f"0.{request.number}",
            token_ids=list(ids),
            log_probs=[-1.0] * len(ids),
            finish_reason="stop",
        )
        coroutine.send(done)
    earned = {"1": Earned(reward=0.5), "2": Earned(reward=2.0, trained=False), "x": Earned()}
    coroutine.send(Exited(earned=earned, metrics={"steps": 2.0}))
    [row] = episode.rows
    assert row.speaker == SOLVER and row.reward_at == {len(ids) - 1: 0.5}
    assert episode.program["metrics"] == {"steps": 2.0}
