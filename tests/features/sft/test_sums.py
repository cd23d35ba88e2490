"""The game of sums, the script that plays it, and the table of its runs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from prepare_sums import EPISODES, random_episode, scripted_episode, write_episodes
from sums_game import HIGHEST, SUMS, Sums

from scripts import warm_start_table
from scripts.table_runs import folder_of
from tests.conftest import PROJECT
from training.config.loader import load_config

CONFIG = load_config([str(PROJECT / "configs/sums.yaml")], check=False).config


def test_all_sums_right_are_paid_and_nothing_else_is() -> None:
    for wrong in (None, 0, SUMS - 1):
        game = Sums()
        observation = game.reset(seed=4)
        for turn in range(SUMS):
            first, second = (int(word) for word in observation.split()[1::2])
            answer = first + second + (turn == wrong)
            observation, reward, done, info = game.step(f" {answer} ")
            assert done == (turn == SUMS - 1)
            assert reward == float(done and wrong is None)
        assert info == {"won": wrong is None}


def test_random_answers_are_never_paid() -> None:
    """At best 1 in 7 for a sum, a fifth power of it for a game."""
    draw = random.Random(0)
    sums = [first + second for first in range(HIGHEST + 1) for second in range(HIGHEST + 1)]
    likeliest = max(map(sums.count, sums)) / len(sums)
    assert likeliest**SUMS < 1e-4
    for _ in range(200):
        messages = random_episode(draw)
        asked = [message["content"].split()[1::2] for message in messages[::2]]
        right = [str(int(first) + int(second)) for first, second in asked]
        assert right != [answer["content"] for answer in messages[1::2]]


def test_the_script_plays_other_games_for_training_and_for_the_held_out_ones(
    tmp_path: Path,
) -> None:
    for name, seeds in (("a", range(EPISODES)), ("b", range(EPISODES, 2 * EPISODES))):
        write_episodes(tmp_path / name, seeds)
    rows = [
        [json.loads(line)["messages"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("a", "b")
    ]
    assert [len(each) for each in rows] == [EPISODES, EPISODES] == [20, 20]
    assert not [messages for messages in rows[0] if messages in rows[1]]
    assert scripted_episode(3) == rows[0][3]


def test_every_row_fits_the_config() -> None:
    """A header of 3 tokens, 4 words or 1, and the end of each message."""
    longest = SUMS * (3 + 4) + SUMS * (2 + 1 + 1)
    assert longest <= CONFIG.data.row_length
    assert CONFIG.agent.max_turn == SUMS


def write_run(folder: Path, rewards: dict[int, float], last: int) -> None:
    folder.mkdir(parents=True)
    lines = []
    for step in range(last + 1):
        record: dict[str, float] = {"step": step}
        if step in rewards:
            record["val-core/Sums/reward/mean@1"] = rewards[step]
        lines.append(json.dumps(record) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_the_table_has_means_over_the_runs_that_have_ended(tmp_path: Path) -> None:
    for seed, last, end in ((0, 40, 0.5), (1, 40, 1.0), (2, 30, 0.0)):
        folder = folder_of(tmp_path, warm_start_table.FIRST, seed)
        write_run(folder, {0: 0.25, 20: 0.5, 40: end}, last)
    lines = warm_start_table.table(tmp_path, (0, 1, 2), steps=40).splitlines()
    assert lines[0] == "| way | seeds | step 0 | step 20 | step 40 |"
    assert lines[2:] == ["| episodes first, then GRPO | 2 | 0.25 | 0.50 | 0.75 (0.50–1.00) |"]


def test_what_was_broken_off_goes_on_and_what_has_ended_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = folder_of(tmp_path, "GRPO alone", 0)
    write_run(ended, {0: 0.0, 20: 0.0}, 20)
    learnt = folder_of(tmp_path, warm_start_table.FIRST, 0)
    (learnt / "sft/model").mkdir(parents=True)
    made: list[tuple[str, ...]] = []

    def run(folder: Path, seed: int, *words: str) -> int:
        made.append((folder.name, *words))
        return 0

    monkeypatch.setattr(warm_start_table, "run", run)
    words = ["--out", str(tmp_path), "--seeds", "0", "--steps", "20", "x.y=1"]
    assert warm_start_table.main(words) == 0
    assert [each[0] for each in made] == [
        "episodes-first-then-GRPO-0",
        "GRPO-with-the-episodes-beside-0",
    ]
    assert f"actor_rollout_ref.model.path={learnt}/sft/model" in made[0]
    assert "sft.loss_coef=0.1" in made[1] and all("x.y=1" in each for each in made)
    assert "GRPO alone | 1 | 0.00 | 0.00" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        warm_start_table.main(["--unknown"])
