"""Which episodes are selected, by conditions that run no code, and what is written of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from data.packed_arrays import pack_array
from features.records.select import NAMES, chosen, main
from features.records.where import BadCondition, Condition
from features.shared.tokenizers import tokenizer_fingerprint
from tests.made_episodes import make_tokenizer

# The first three ids are names of their own.
WORDS = [f"w{number}" for number in range(3, 40)]


def row(prompt: list[int], response: list[int], mask: list[int]) -> dict[str, Any]:
    return {
        "prompt_ids": pack_array(np.array(prompt), "<i4"),
        "response_ids": pack_array(np.array(response), "<i4"),
        "response_mask": pack_array(np.array(mask), "|i1"),
        "turn_ids": pack_array(np.array(mask) - 1, "<i2"),
        "log_probs": pack_array(np.zeros(len(mask)), "<f4"),
        "rewards": pack_array(np.zeros(len(mask)), "<f4"),
    }


def episode(number: int, reward: float, **entries: Any) -> dict[str, Any]:
    """An episode of one row, whose tokens are its own."""
    return {
        "step": 1,
        "uid": f"1.{number}",
        "episode_id": f"1.{number}.0",
        "data_source": "game",
        "environment": 0,
        "agent_index": 0,
        "env_seed": number,
        "task": {},
        "task_name": "",
        "reward": reward,
        "ending": "done",
        "masked": False,
        "sampled_tokens": 2,
        "info": {},
        "initial_messages": [{"role": "user", "content": "go"}],
        "turns": [{}, {}],
        "rows": [row([1, 2], [3 + number, 4, 5], [1, 0, 1])],
        **entries,
    }


def write_run(folder: Path, *episodes: dict[str, Any], name: str = "1.jsonl") -> Path:
    records = folder / "episodes"
    records.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(each) + "\n" for each in episodes]
    (records / name).write_text("".join(lines))
    make_tokenizer(WORDS).save_pretrained(records / "tokenizer")
    return folder


def selected(run: Path, out: Path, *more: str) -> list[dict[str, Any]]:
    assert main([str(run), "--out", str(out), *more]) == 0
    if out.suffix == ".parquet":
        return pyarrow.parquet.read_table(out).to_pylist()
    return [json.loads(line) for line in out.read_text().splitlines()]


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [each["episode_id"] for each in rows]


@pytest.mark.parametrize("name", ["best.parquet", "best.jsonl"])
def test_rows_have_the_recorded_ids_and_masks(tmp_path: Path, name: str) -> None:
    several = [row([1], [2, 3], [0, 1]), row([1, 7], [8], [1]), row([9], [9], [0])]
    run = write_run(tmp_path / "run", episode(0, 1.0, rows=several), episode(1, 0.0))
    rows = selected(run, tmp_path / name, "--where", "reward >= 0.9")
    assert [each["input_ids"] for each in rows] == [[1, 2, 3], [1, 7, 8]]
    assert [each["loss_mask"] for each in rows] == [[0, 0, 1], [0, 0, 1]]
    assert [each["row"] for each in rows] == [0, 1], "a row without a sampled token is left out"
    assert {each["tokenizer"] for each in rows} == {tokenizer_fingerprint(make_tokenizer(WORDS))}
    assert rows[0]["text"].split() == ["<turn>", "<end>", "w3"]
    assert rows[0]["reward"] == 1.0 and rows[0]["run"] == str(run)


def test_the_best_of_each_task_are_taken_in_the_order_they_were_played(tmp_path: Path) -> None:
    of_one_task = [
        episode(0, 0.5, env_seed=7),
        episode(1, 1.0, env_seed=7, sampled_tokens=9),
        episode(2, 1.0, env_seed=7, sampled_tokens=3),
        episode(3, 0.1, env_seed=7),
    ]
    run = write_run(tmp_path / "run", *of_one_task, episode(4, 0.2, env_seed=8))
    out = tmp_path / "best.jsonl"
    assert ids(selected(run, out, "--per-task", "2")) == ["1.1.0", "1.2.0", "1.4.0"]
    # Of equal rewards the shorter one.
    assert ids(selected(run, out, "--per-task", "1")) == ["1.2.0", "1.4.0"]
    assert ids(selected(run, out, "--most", "3")) == ["1.0.0", "1.1.0", "1.2.0"]


def test_a_task_is_what_its_environment_calls_it_or_its_row_or_its_prompt(tmp_path: Path) -> None:
    named = [episode(n, 1.0, task_name="door") for n in (0, 1)]
    rows = [episode(n, 1.0, task={"question": "why"}) for n in (2, 3)]
    asked = [episode(n, 1.0, environment="", env_seed=0) for n in (4, 5)]
    run = write_run(tmp_path / "run", *named, *rows, *asked)
    out = tmp_path / "best.jsonl"
    assert ids(selected(run, out, "--per-task", "1")) == ["1.0.0", "1.2.0", "1.4.0"]


def test_doubles_masked_episodes_and_validations_are_left_out(tmp_path: Path) -> None:
    first = episode(0, 1.0)
    double = episode(1, 1.0, rows=first["rows"])
    masked = episode(2, 1.0, masked=True)
    unsampled = episode(3, 1.0, rows=[row([1], [2], [0])])
    run = write_run(tmp_path / "run", first, double, masked, unsampled)
    write_run(run, episode(5, 1.0), name="val-1.jsonl")
    write_run(run, episode(6, 1.0), name="2.jsonl")
    out = tmp_path / "best.jsonl"
    assert ids(selected(run, out)) == ["1.0.0", "1.6.0"]
    assert ids(selected(run, out, "--masked")) == ["1.0.0", "1.2.0", "1.6.0"]
    assert ids(selected(run, out, "--validation")) == ["1.0.0", "1.5.0", "1.6.0"]
    assert ids(selected(run, out, "--steps", "2:")) == ["1.6.0"]
    assert ids(selected(run, out, "--validation", "--where", "is_validation")) == ["1.5.0"]


def test_a_selection_without_episodes_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", episode(0, 0.5))
    out = tmp_path / "best.parquet"
    assert main([str(run), "--where", "reward > 1", "--out", str(out)]) == 2
    assert "no episode of" in capsys.readouterr().err and not out.exists()
    assert main([str(tmp_path / "empty"), "--out", str(out)]) == 2
    assert "holds no episodes" in capsys.readouterr().err
    other = write_run(tmp_path / "other", episode(1, 1.0))
    make_tokenizer([*WORDS, "more"]).save_pretrained(other / "episodes/tokenizer")
    assert main([str(run), str(other), "--out", str(out)]) == 2
    assert "the runs have different tokenizers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["RUN", "--out", "best.csv"],
        ["RUN", "RUN", "--out", "best.jsonl"],
        ["RUN", "--per-task", "0", "--out", "best.jsonl"],
        ["RUN", "--steps", "a:b", "--out", "best.jsonl"],
        ["RUN"],
    ],
)
def test_words_that_cannot_be_meant_are_refused(tmp_path: Path, words: list[str]) -> None:
    run = str(write_run(tmp_path / "run", episode(0, 0.5)))
    with pytest.raises(SystemExit) as error:
        main([run if word == "RUN" else word for word in words])
    assert error.value.code == 2


# Conditions

ENTRIES = {
    "reward": 0.5,
    "turns": 4,
    "ending": "done",
    "info": {"won": 1.0, "tags": ["a"]},
    "task_name": "",
    "error": "",
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("reward >= 0.5", True),
        ("0.4 < reward < 0.5", False),
        ("reward * 2 - 1 == 0 and turns / 2 == 2", True),
        ("not task_name and ending in ('done', 'overflow')", True),
        ("ending not in ['done'] or turns + 1 > 4", True),
        ("info['won'] == 1", True),
        ("'lost' in info and info['lost'] > 0", False),
        ("len(info['tags']) == 1 and -turns < 0", True),
        ("turns", True),
        ("error", False),
    ],
)
def test_conditions_hold_as_python_reads_them(text: str, holds: bool) -> None:
    assert Condition(text, NAMES).holds(ENTRIES, "an episode") is holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "reward >",
        "reward = 1",
        "__import__('os')",
        "open('x')",
        "info.keys()",
        "reward.__class__",
        "().__class__",
        "lambda: 1",
        "[x for x in info]",
        "{1: 2}",
        "f'{reward}'",
        "reward if turns else 1",
        "(reward := 1)",
        "9 ** 9 ** 9",
        "1 << 99",
        "len(info, 1)",
        "len(*info)",
        "info[0:1]",
        "b'x'",
        "1j",
        "...",
        "rewards > 1",
        "reward is None",
        "await reward",
        "*info",
        "(" * 300 + "1" + ")" * 300,
    ],
)
def test_what_is_no_condition_is_refused_before_an_episode_is_read(text: str) -> None:
    with pytest.raises(BadCondition, match="--where"):
        Condition(text, NAMES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("info['lost'] > 0", "it has no 'lost'; ask first whether it is there"),
        ("reward > 'a'", "not supported .*'str'; numbers, written without quotes, go with numbers"),
        ("ending * 999999999 == 'x'", "'done' is no number"),
        ("reward / 0 > 1", "division by zero"),
        ("'a' in reward", "not iterable"),
        ("len(reward) > 1", "has no len"),
    ],
)
def test_a_condition_that_an_episode_has_no_answer_to_is_told(text: str, says: str) -> None:
    with pytest.raises(BadCondition, match=says):
        Condition(text, NAMES).holds(ENTRIES, "an episode")


def test_nothing_is_chosen_of_nothing() -> None:
    assert chosen([], 1, 1) == []
