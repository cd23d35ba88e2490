"""What a record says of branches: returns, endings, the first words that differ, and no more."""

from __future__ import annotations

import json
import random

import pytest

from features.branching.recorded import (
    ALL_CHARS,
    BRANCHES,
    MOST_CHARS,
    MOST_LISTED,
    branch_entries,
    common_length,
    first_difference,
    open_entries,
)
from training.config import PPOConfig
from training.config.leaves import build
from workers.environments.reply import StepReply
from workers.rollout.begin import DIFFERS, SAME, Begin
from workers.rollout.branches import branch_of
from workers.rollout.engine import Completion
from workers.rollout.episode import Episode, Row, Turn


def completion(length: int = 1) -> Completion:
    return Completion(
        request_id="0", token_ids=[5] * length, log_probs=[-1.0] * length, finish_reason="stop"
    )


def play(episode: Episode, texts: list[str], reward: float, ending: str = "done") -> Episode:
    """Lets an episode say these turns, the last of which is paid."""
    row = Row(prompt_ids=[1])
    episode.rows = [row]
    for number, text in enumerate(texts):
        row.append_sampled(completion(2), number)
        episode.turns.append(
            Turn(text=text, finish_reason="stop", tokens=2, reply=StepReply(messages=[]))
        )
    episode.add_reward(reward)
    episode.ending = ending
    return episode


def branch(
    episode: Episode, turn: int, texts: list[str], reward: float = 0.0, ending: str = "done"
) -> Episode:
    """Adds a branch that begins at a turn and says these texts from there on."""
    word = f"{turn}.{len(episode.branches)}"
    begun = branch_of(episode, Begin(prefix=[completion()] * turn, replies=[], word=word))
    before = [each.text for each in episode.turns[:turn]]
    episode.branches.append(play(begun, before + texts, reward, ending))
    return begun


def main_chain() -> Episode:
    return play(Episode(group=0, sample=0), ["go left", "open the left box", "wait"], 1.0)


@pytest.mark.parametrize(
    ("turn", "texts", "differs", "words"),
    [
        (0, ["go right", "stop"], [0, 3], "right"),
        (1, ["open the right box, then wait"], [1, 9], "right box, then wait"),
        (1, ["open the left box", "go"], [2, 0], "go"),
        # It ends where the episode goes on, and the other way round.
        (1, ["open the left box"], [2, 0], ""),
        (2, ["wait", "and more"], [3, 0], "and more"),
        (2, ["wait"], None, ""),
        (2, [""], [2, 0], ""),
        # It goes on in the midst of the episode's last word.
        (2, ["waiting"], [2, 0], "waiting"),
        (1, ["open the left box again"], [1, 14], "box again"),
    ],
)
def test_the_first_words_that_differ(
    turn: int, texts: list[str], differs: list[int] | None, words: str
) -> None:
    episode = main_chain()
    begun = branch(episode, turn, texts)
    assert first_difference(begun, episode) == differs
    [entry] = branch_entries(episode, PPOConfig())[BRANCHES]["listed"]
    assert (entry["differs"], entry["words"]) == (differs, words)
    assert entry["turns"] == len(texts) and entry["tokens"] == 2 * len(texts)


def test_common_beginnings_are_counted_as_one_by_one() -> None:
    draw = random.Random(0)
    for _ in range(300):
        one, other = ("".join(draw.choices("ab", k=draw.randint(0, 9))) for _ in range(2))
        expected = 0
        while one[: expected + 1] == other[: expected + 1] and expected < min(len(one), len(other)):
            expected += 1
        assert common_length(one, other) == expected


def test_returns_are_those_that_are_measured_and_what_is_left_out_says_why() -> None:
    config = build(PPOConfig(), {"algorithm.turn_gamma": 0.5, "agent.on_failure": "mask"})
    episode = main_chain()
    branch(episode, 0, ["go", "on", "now"], reward=4.0)
    branch(episode, 1, ["x"], ending="env_crash").error = "boom " * 1000
    branch(episode, 1, ["x"], ending=DIFFERS).error = "played again, turn 0 was paid 1.0"
    branch(episode, 1, ["open the left box"], ending=SAME)
    told = branch_entries(episode, config)[BRANCHES]
    assert told["own_returns"] == [0.25, 0.5, 1.0]
    assert [each["return"] for each in told["listed"]] == [1.0, None, None, 0.5]
    assert len(told["listed"][1]["left_out"]) == 300
    assert told["listed"][2]["left_out"].startswith("played again, turn 0")
    assert told["listed"][3]["differs"] is None, "the turn was drawn as the episode's"


def test_an_entry_has_a_bounded_size() -> None:
    episode = main_chain()
    for _ in range(MOST_LISTED + 7):
        branch(episode, 1, ["é" * 100_000])
    told = branch_entries(episode, PPOConfig())[BRANCHES]
    assert len(told["listed"]) == MOST_LISTED and told["not_listed"] == 7
    assert sum(len(each["words"]) for each in told["listed"]) <= ALL_CHARS
    assert len(json.dumps(told, ensure_ascii=False).encode()) < 2 * ALL_CHARS + 200 * MOST_LISTED
    del episode.branches[1:]
    [entry] = branch_entries(episode, PPOConfig())[BRANCHES]["listed"]
    assert len(entry["words"]) == MOST_CHARS


def test_without_branches_a_record_has_no_entry() -> None:
    assert branch_entries(main_chain(), PPOConfig()) == {}
    assert open_entries(PPOConfig()) is None
    opened = open_entries(build(PPOConfig(), {"branching.at": ("every",)}))
    assert opened is not None and opened(main_chain()) == {}
