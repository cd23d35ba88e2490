"""The transcript of an episode that goes on from a turn, of a program with two conversations."""

from __future__ import annotations

from typing import Any

from scripts.replay_continued import tell_conversation


def request(question: str, answer: str, behind: int | None) -> dict[str, Any]:
    asked = [{"role": "user", "content": question}]
    return {"text": answer, "asked": asked, "behind": behind, "observation": []}


def test_each_conversation_of_a_program_is_told_from_its_question_on() -> None:
    turns = [
        request("name one colour", "pear", None),
        request("another colour", "plum", None),
        request("bad, another", "red", 1),
        request("and one more", "blue", 0),
    ]
    # What the viewer of environments reads it by stands in the record as well.
    turns[1]["observation"] = turns[2]["asked"]
    record = {
        "initial_messages": turns[0]["asked"],
        "turns": turns,
        "ending": "env_done",
        "reward": 1.0,
    }
    otherwise = {**turns[1], "asked": [{"role": "user", "content": "a third colour"}]}
    in_environment = {**turns[0], "asked": None, "observation": turns[2]["asked"]}
    lines: list[str] = []
    played = {**record, "turns": [in_environment]}
    tell_conversation(played, played, 2, lines.append)
    assert lines[:3] == [
        "user: name one colour",
        "[turn 1, record] assistant: pear",
        "user: bad, another",
    ]
    lines.clear()
    tell_conversation(
        record, {**record, "turns": [turns[0], otherwise, *turns[2:]]}, 3, lines.append
    )
    assert lines == [
        "user: name one colour",
        "[turn 1, record] assistant: pear",
        "(a conversation begins)",
        "user: a third colour",
        "(in the record turn 2 was asked otherwise)",
        "[turn 2, record] assistant: plum",
        "user: bad, another",
        "[turn 3, model] assistant: red",
        "(goes on behind turn 1)",
        "user: and one more",
        "[turn 4, model] assistant: blue",
        "env_done after 4 turns, reward 1; the record: env_done after 4 turns, reward 1",
    ]
