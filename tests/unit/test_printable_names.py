"""Names of users' that no UTF-8 can hold, where they enter a run."""

from __future__ import annotations

import json
from pathlib import Path

from data.texts import printable, with_printable_names
from training.run.metrics_file import read_records
from workers.environments.reply import numbers, task_name, tool_calls


def test_an_infos_names_are_printable() -> None:
    assert numbers({"na\ud800me": 1.0, "ok": 2}) == {"na?me": 1.0, "ok": 2.0}
    assert task_name({"task": "\ud800"}) == "?"
    (call,) = tool_calls(
        {"tool_calls": [{"name": "\ud800", "error": True, "error_kind": "\udfff"}]}
    )
    assert (call["name"], call["error_kind"]) == ("?", "?")


def test_an_older_files_names_are_printable(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "a\ud800": 2.0}) + "\n")
    assert list(read_records(path)) == [{"step": 1, "a?": 2.0}]


def test_other_texts_stay_as_they_are() -> None:
    names = {"größe": 1, "a\nb": 2, "": 3, "😀": 4}
    assert with_printable_names(names) == names
    assert printable("\ud83d\ude00") == "??"
