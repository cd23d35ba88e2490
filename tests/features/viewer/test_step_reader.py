"""A step is read once where it fits into memory, and its pages are the same where it does not."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from features.viewer import step_reader
from features.viewer.command import find_run
from features.viewer.credit_turns import turn_table
from features.viewer.records import RecordedEpisode, parse_episode
from features.viewer.token_texts import find_tokenizer
from tests.made_episodes import Made, make_run
from tests.viewer_data import make_viewer
from training.config.plain_files import read_plain_text


def count_reads(run: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes the viewer of a run; returns how many lines were parsed for it."""
    read = []

    def parse(text: bytes) -> RecordedEpisode:
        read.append(len(text))
        assert not gc.isenabled()
        return parse_episode(text)

    monkeypatch.setattr(step_reader, "parse_episode", parse)
    make_viewer(run)
    assert gc.isenabled()
    return len(read)


@pytest.mark.seconds
def test_lines_that_do_not_fit_into_memory_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for held in (step_reader.HELD_BYTES, 20_000, 0):
        run = tmp_path / f"held-{held}" / "run"
        make_run(run, Made(steps=2))
        monkeypatch.setattr(step_reader, "HELD_BYTES", held)
        lines = count_reads(run, monkeypatch)
        assert lines == 32 if held > 20_000 else 32 < lines <= 64
        data = run / "viewer/data"
        names = sorted(path.relative_to(data) for path in data.rglob("*.js"))
        made.append({name: (data / name).read_bytes() for name in names})
    assert made[0] == made[1] == made[2] and len(made[0]) > 5


def test_a_config_is_read_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, Made(steps=1))
    (tmp_path / "config.yaml").write_text("actor_rollout_ref: {model: {path: nowhere}}")
    read = []

    def noted(path: Path) -> str:
        read.append(path.name)
        return read_plain_text(path)

    monkeypatch.setattr("features.viewer.command.read_plain_text", noted)
    monkeypatch.setattr("features.viewer.token_texts.read_plain_text", noted)
    episodes = tmp_path / "episodes"
    assert find_run(tmp_path, 0).episodes == episodes
    tokenizer, problem = find_tokenizer(tmp_path, episodes)
    assert tokenizer is not None and not problem and read == []
    _, problem = find_tokenizer(tmp_path, tmp_path)
    assert "tokenizer and nowhere" in problem and read == ["config.yaml"]


def test_the_table_of_turns_sums_each_column_of_each_turn() -> None:
    rng = np.random.default_rng(0)
    size = 30_000
    # The turns of rows that were put behind each other do not lie in one piece.
    turn_ids = rng.integers(-1, 3, size).astype(np.int16)
    sampled = rng.random(size) < 0.9
    columns: dict[str, np.ndarray] = {"turn_ids": turn_ids}
    for name in ("token_level_rewards", "returns", "advantages", "policy_weight"):
        scales = 10.0 ** rng.integers(-6, 6, size)
        columns[name] = (rng.normal(size=size) * scales).astype(np.float32)
    credit: Any = SimpleNamespace(facts=SimpleNamespace(compares=""))
    table = turn_table(columns, sampled, credit, cast(Any, None))
    assert table is not None
    names = [name for name, _ in table["columns"]]
    assert names == ["turn", "tokens", "reward", "return", "advantage", "policy weight"]
    for turn, row in enumerate(table["rows"]):
        places = np.flatnonzero(sampled & (turn_ids == turn))
        sums = {
            name: float(columns[name][places].sum(dtype=np.float64))
            for name in ("token_level_rewards", "advantages", "policy_weight")
        }
        assert row == [
            turn + 1,
            len(places),
            sums["token_level_rewards"],
            float(columns["returns"][places[0]]),
            sums["advantages"] / len(places),
            sums["policy_weight"],
        ]
