"""An episode goes on from a turn: from the very state before it, however that is had."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.replay import main as replay
from tests.features.branching.runs.test_branching_runs import train, words


def played(tiny_game: Path, folder: Path, cls: str) -> Path:
    """A step of a run whose environment is of this class."""
    assert train(words(tiny_game, folder, cls=cls, steps=1)) == 0
    return folder


def long_episode(run: Path) -> dict[str, Any]:
    lines = (run / "episodes/1.jsonl").read_text().splitlines()
    return max((json.loads(line) for line in lines), key=lambda episode: len(episode["turns"]))


def go_on(run: Path, episode: dict[str, Any], turn: int, *more: str, file: str = "1.jsonl") -> int:
    options = ("--episode", episode["episode_id"], "--until-turn", str(turn))
    return replay([str(run / "config.yaml"), str(run / "episodes" / file), *options, *more])


@pytest.mark.seconds
def test_it_goes_on_alike_however_the_state_is_had(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = played(tiny_game, tmp_path, "Held")
    episode = long_episode(run)
    capsys.readouterr()
    told = {}
    for way in ("snapshot", "copy", "replay", "proved"):
        assert go_on(run, episode, 2, "--times", "2", f"branching.state={way}") == 0
        first, told[way] = capsys.readouterr().out.split("\n", 1)
        had = "snapshot" if way == "proved" else way
        assert first.startswith(f"the state before turn 2 is had by {had}, which held in a trial")
    assert len(set(told.values())) == 1
    went_on = re.findall(r"continuation \d of 2\n(.*?)\n---", told["copy"], re.DOTALL)
    assert len(went_on) == 2
    for said in went_on:
        assert f"[turn 1, record] assistant: {episode['turns'][0]['text']}" in said
        assert "[turn 2, model]" in said
    assert "--- reward" in told["copy"]


@pytest.mark.seconds
def test_a_state_that_lies_is_not_taken(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = played(tiny_game, tmp_path, "Liar")
    assert go_on(run, long_episode(run), 2) == 0
    assert "is had by replay, which held in a trial" in capsys.readouterr().out


@pytest.mark.seconds
def test_what_cannot_be_proved_is_said_and_it_goes_on_once(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = played(tiny_game, tmp_path, "Clocked")
    episode = long_episode(run)
    assert go_on(run, episode, 2) == 0
    out = capsys.readouterr().out
    assert "no state of environment" in out and "may begin in another state" in out
    assert "[turn 2, model] assistant" in out
    assert go_on(run, episode, 2, "--times", "2") == 2
    assert "--times 2 needs the state before turn 2: branching: no state" in capsys.readouterr().err


@pytest.mark.seconds
@pytest.mark.parametrize("entry", ["observation", "reward", "initial_messages"])
def test_an_environment_that_answers_otherwise_is_told(
    entry: str, tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = played(tiny_game, tmp_path, "Held")
    episode = long_episode(run)
    said = [{"role": "user", "content": "lower"}]
    if entry == "initial_messages":
        episode[entry] = said
    else:
        episode["turns"][0][entry] = said if entry == "observation" else 7.0
        if episode["turns"][0]["observation"] == said:
            episode["turns"][0]["reward"] = 7.0
    (run / "episodes/9.jsonl").write_text(json.dumps(episode) + "\n")
    assert go_on(run, episode, 2, file="9.jsonl") == 0
    out = capsys.readouterr().out
    assert "than in the record; what follows may begin in another state" in out
    assert go_on(run, episode, 2, "--times", "3", file="9.jsonl") == 2


def test_times_need_a_turn(tmp_path: Path) -> None:
    for more in (["--times", "2"], ["--times", "0", "--until-turn", "1"]):
        with pytest.raises(SystemExit):
            replay([str(tmp_path), str(tmp_path / "1.jsonl"), *more])
