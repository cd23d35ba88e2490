"""The game of pages, whose sub-agents read, and the script of its table."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from pages_game import CLUES, NOTHING, Pages, found_text, page_text
from prepare_pages import FINDS, player, reader

from custom.asking import AskingLine, PolicyAnswer, held
from features.policy_calls import policy
from scripts.policy_calls_table import STEPS, table
from scripts.table_runs import folder_of


@pytest.mark.parametrize("credit", ["episode", "own", "none"])
def test_the_readers_get_a_page_each_and_earn_as_the_game_says(credit: str) -> None:
    game = Pages(Pages.config_cls(credit=credit))  # type: ignore[arg-type]
    assert game.reset(3) == f"question {game.asked}"
    asked = []

    def answer(questions):  # type: ignore[no-untyped-def]
        asked.extend(questions)
        found = [
            next(w for w in q.messages[0]["content"].split() if w[-1].isdigit()) for q in questions
        ]
        said = [clue if clue == game.right else NOTHING for clue in found]
        return [
            PolicyAnswer(number=number, text=text, finish_reason="stop", tokens=2)
            for number, text in enumerate(said)
        ]

    policy.is_set_up = True
    line = AskingLine(answer)
    with held(line):
        observation, reward, done, _ = game.step("look")
        assert line.take_paid() == (dict.fromkeys(range(4), 1.0) if credit == "own" else {})
    assert [question.trained for question in asked] == [credit != "none"] * 4
    assert {question.name for question in asked} == {"reader"}
    said = [clue if clue == game.right else NOTHING for clue in game.clues]
    assert (observation, reward, done) == (found_text(said), 0.0, False)
    assert game.step(game.right)[1:3] == (1.0, True)
    game.has_looked = True
    assert game.step(NOTHING)[1] == 0.0


def test_the_lazy_player_knows_the_form_and_finds_little() -> None:
    draw = random.Random(0)
    found = 0
    matching = 0
    for _ in range(4000):
        [(read, said)] = reader(draw)
        words = read.split()
        clue = next(word for word in words if word[-1].isdigit())
        if clue in CLUES[words[-1]]:
            matching += 1
            found += said == clue
    assert found / matching == pytest.approx(FINDS, abs=0.04)
    (question, first), (notes, answer) = player(draw)
    assert first == "look" and notes.split()[0] == "found"
    assert answer in CLUES[question.split()[-1]]
    assert page_text(random.Random(1), "red4", 3, "red").split()[-2:] == ["find", "red"]


def test_the_table_has_means_over_seeds_by_hand(tmp_path: Path) -> None:
    for seed, (first, last, won) in enumerate([(0.125, 0.5, 0.25), (0.25, 1.0, 0.5)]):
        folder = folder_of(tmp_path, "episode", seed)
        folder.mkdir()
        records = [{"step": 0, "val-core/Pages/reward/mean@1": first}]
        records += [
            {"step": step, "agent/info/won/mean": won if step == 1 else 1.0}
            for step in range(1, STEPS + 1)
        ]
        records[-1]["val-core/Pages/reward/mean@1"] = last
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    *_, row = table(tmp_path, [0, 1, 2], STEPS).splitlines()
    assert row == (
        "| what the episode earns | 2 | 0.19 (0.12–0.25) | 0.75 (0.50–1.00) | "
        "0.38 (0.25–0.50) | 1.00 |"
    )
