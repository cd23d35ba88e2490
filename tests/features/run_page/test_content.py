"""What a page holds: texts that stay texts, alarms with their ways to the tokens, how a run stands.

Broken and missing files cost what they held.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from features.alarms.catalogue import ADVICE
from features.run_page.alarm_rows import meanings
from features.run_page.content import make_content, visible
from features.run_page.html import ASSETS, LIBRARY, SCRIPTS, as_json, make_html, write_html
from features.run_page.run_folder import RunFolder
from features.shared import ELEMENTS
from tests.conftest import PROJECT
from tests.features.run_page.made_runs import (
    content_in,
    content_of,
    curve_in,
    event,
    make_run,
    steps,
)
from training.run.run_lock import run_lock

HOSTILE = (
    "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>&amp;\u2028\u202eevil\x00"
)


def test_hostile_texts_of_alarms_settings_and_names_are_data(tmp_path: Path) -> None:
    events = [
        event("start", 0, command=HOSTILE, versions={HOSTILE: HOSTILE}),
        event("alarm", 1, name=HOSTILE, text=HOSTILE, view=f"list?group={HOSTILE}"),
        event("end", 2, exit="failed", name=HOSTILE, text=HOSTILE),
    ]
    folder = tmp_path / "<b>run"
    make_run(folder, [{"step": 1, f"own/{HOSTILE}": 1.0}], events)
    (folder / "config.yaml").write_text(json.dumps({"trainer": {"x": HOSTILE}}))
    text = make_html(make_content([RunFolder.read(folder)], folder / "report.html"))
    # Only the elements of the page itself, which the template has.
    assert len(re.findall(r"<script", text)) == 4 and text.count("</script>") == 4
    assert "<img src=x" not in text and "<b>" not in text and "<!--<img" not in text
    assert text.isascii() or "\u202e" not in text
    content = content_in(text)
    shown = HOSTILE.replace("\u2028", "\\u2028").replace("\u202e", "\\u202e")
    shown = shown.replace("\x00", "\\u0000")
    assert content["runs"][0]["alarms"][0]["text"] == shown
    assert content["runs"][0]["settings"][0]["value"] == shown
    assert f"own/{shown}" in content["groups"][0]["curves"]
    assert f"own/{shown}" in [metric["name"] for metric in content["metrics"]]


def test_the_policy_of_the_page_lets_its_own_scripts_run_and_nothing_else(tmp_path: Path) -> None:
    text = make_html(make_content([RunFolder.read(make_run(tmp_path, steps(1)))], tmp_path / "p"))
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    loading = re.findall(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", text)
    assert loading == []


def test_the_library_is_the_published_one_unchanged_and_its_license_is_on_the_page(
    tmp_path: Path,
) -> None:
    digests = {}
    for file in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE"):
        digests[file] = hashlib.sha256((LIBRARY / file).read_bytes()).hexdigest()
    said = (LIBRARY / "README.md").read_text()
    assert all(f"{digest}  {file}" in said for file, digest in digests.items())
    assert json.loads((LIBRARY / "package.json").read_text())["version"] == "1.6.32"
    text = make_html(make_content([RunFolder.read(make_run(tmp_path, steps(1)))], tmp_path / "p"))
    assert "Permission is hereby granted" in text


def test_an_alarm_leads_to_its_tokens_and_is_explained(tmp_path: Path) -> None:
    view = "episode/0/train/3/e1?row=0&token=5&color=mask"
    alarms = [event("alarm", 3, name="unsampled_tokens", text="alarm …", view=view)]
    folder = make_run(tmp_path / "run", steps(3, **{"alarms/unsampled_tokens": 1.0}), alarms)
    run = content_of(folder)["runs"][0]
    [alarm] = run["alarms"]
    assert (alarm["view"], alarm["step"]) == (view, 3)
    assert alarm["meaning"].startswith("tokens are trained on that the policy did not sample")
    assert run["viewer"]["href"] == "viewer/index.html" and not run["viewer"]["isThere"]
    assert run["viewer"]["command"].endswith(f"-m features.viewer.command {folder}")
    (folder / "viewer").mkdir()
    (folder / "viewer" / "index.html").write_text("")
    assert content_of(folder)["runs"][0]["viewer"]["isThere"]


def test_the_command_for_the_viewer_works_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "my runs/it's one", steps(1))
    monkeypatch.chdir(tmp_path)
    command = content_of(folder)["runs"][0]["viewer"]["command"]
    # What a shell does with it in yet another folder, with a Python that tells where it stands.
    python, stands = shlex.quote(str(Path(sys.executable))), tmp_path / "python"
    stands.write_text('#!/bin/sh\npwd; for word; do echo "$word"; done\n')
    stands.chmod(0o755)
    told = command.replace(f"&& {python} ", f"&& {shlex.quote(str(stands))} ")
    said = subprocess.run(["sh", "-c", told], cwd="/", capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [str(PROJECT), "-m", "features.viewer.command", str(folder)]


def test_an_alarm_that_is_said_again_while_it_stands_is_one_row(tmp_path: Path) -> None:
    records = steps(12)
    for step in (3, 4, 5, 9):
        records[step - 1]["alarms/kl_jump"] = float(step - 2 if step < 9 else 1)
    events = [
        event("alarm", 3, name="kl_jump", text="first", view="list?step=3"),
        event("alarm", 5, name="kl_jump", text="again", view="list?step=5"),
        event("alarm", 9, name="kl_jump", text="anew", view="list?step=9"),
    ]
    rows = content_of(make_run(tmp_path, records, events))["runs"][0]["alarms"]
    told = [(row["step"], row["last"], row["said"], row["text"], row["view"]) for row in rows]
    assert told == [(3, 5, 2, "again", "list?step=3"), (9, 9, 1, "anew", "list?step=9")]


def test_every_alarm_has_its_sentence_from_the_docs() -> None:
    assert set(meanings()) == set(ADVICE)


def test_alarms_of_a_run_without_events_are_read_from_its_metrics(tmp_path: Path) -> None:
    records = steps(10)
    for place, standing in ((4, 2.0), (5, 3.0), (8, 2.0)):
        records[place - 1]["alarms/kl_jump"] = standing
    run = content_of(make_run(tmp_path, records))["runs"][0]
    assert run["spans"] == {"kl_jump": [[3, 5], [7, 8]]}
    assert [(row["step"], row["view"]) for row in run["alarms"]] == [
        (3, "list?kind=train&step=5&sort=-kl"),
        (7, "list?kind=train&step=8&sort=-kl"),
    ]
    assert "stood from step 3 to 5" in run["alarms"][0]["text"]


@pytest.mark.parametrize(
    ("events", "status", "line"),
    [
        ([], "unknown", "nothing says how"),
        ([event("start", 0)], "crashed", "ended without a word"),
        ([event("start", 0), event("end", 9, exit="finished", text="done")], "finished", "done"),
        ([event("end", 9, exit="interrupted", text="halt")], "interrupted", "halt"),
        ([event("end", 9, exit="failed", text="OSError: disk")], "crashed", "OSError: disk"),
        ([event("end", 9, exit=7, text="?")], "crashed", "?"),
        ([event("end", 9, exit="failed"), event("resume", 4)], "crashed", "without a word"),
        ([event("start", 0), event("restart", 4, text="again")], "crashed", "again"),
    ],
)
def test_the_status_is_what_the_last_process_left(
    tmp_path: Path, events: list[dict[str, object]], status: str, line: str
) -> None:
    run = content_of(make_run(tmp_path, steps(2), events))["runs"][0]
    assert run["status"] == status and line in run["statusLine"]


def test_a_run_whose_folder_is_held_goes_on_and_asking_leaves_the_lock(tmp_path: Path) -> None:
    make_run(tmp_path, steps(2), [event("start", 0)])
    with run_lock(tmp_path):
        for _ in range(2):
            assert content_of(tmp_path)["runs"][0]["status"] == "running"
    assert content_of(tmp_path)["runs"][0]["status"] == "crashed"


def test_damaged_events_and_metrics_are_left_out(tmp_path: Path) -> None:
    make_run(tmp_path, steps(2))
    lines = [
        "nonsense",
        "[1]",
        '{"time": 1, "step": "x", "kind": "end"}',
        '{"time": 1, "step": 1, "kind": "never heard of"}',
        '{"time": 1, "step": 1, "kind": "start", "name": 5, "versions": [1], "command": null}',
        '{"time": 1, "step": 1, "kind": "alarm", "view": 7}',
        f'{{"time": 1, "step": {10**30}, "kind": "checkpoint"}}',
        '{"time": 1, "step": -1, "kind": "checkpoint"}',
        '{"time": 1, "step": 1, "kind": "al',
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe{"step": 3, "critic/sc')
    run = content_of(tmp_path)["runs"][0]
    assert [found["kind"] for found in run["events"]] == ["start"]
    assert run["versions"] == {} and run["command"] == ""
    assert run["alarms"][0]["view"] is None


def test_one_step_no_steps_and_numbers_that_are_none_have_a_page(tmp_path: Path) -> None:
    one = content_of(make_run(tmp_path / "one", steps(1)))
    assert curve_in(one, "critic/score/mean")["mean"] == pytest.approx([0.1])
    none = content_of(make_run(tmp_path / "none", [], [event("start", 0)]))
    assert none["charts"] == [] and none["runs"][0]["lastStep"] == 0
    wrong = [{"step": 1, "critic/score/mean": "nan", "timing_s/step": "inf"}]
    bad = content_of(make_run(tmp_path / "bad", wrong))
    assert bad["groups"][0]["curves"]["critic/score/mean"]["notFinite"] == 1
    assert bad["runs"][0]["stepTimes"]["columns"]["whole step"] == [None]


def test_a_folder_whose_name_is_no_utf_8_has_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / os.fsdecode(b"l\xfcbeck"), steps(1))
    content = make_content([RunFolder.read(folder)], folder / "report.html")
    assert content["runs"][0]["viewer"]["href"] == "viewer/index.html"
    page = tmp_path / "page.html"
    write_html(make_content([RunFolder.read(folder)], page), page)
    link = content_in(page.read_text())["runs"][0]["viewer"]["href"]
    assert link == "l%FCbeck/viewer/index.html"


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no steps and no events"):
        RunFolder.read(tmp_path / "none")


def test_validation_brings_its_interval_and_its_tasks(tmp_path: Path) -> None:
    name = "val-core/game/reward/mean@4"
    record = {"step": 5, name: 0.5, f"{name}/ci_low": 0.4, f"{name}/ci_high": 0.6}
    record |= {"val-core/game/tasks": 32, "val-core/other/reward/mean@4": 0.1}
    [chart] = content_of(make_run(tmp_path, [record]))["charts"]
    assert chart["key"] == "validation"
    assert chart["lines"] == [
        {
            "metric": name,
            "label": "game/reward/mean@4",
            "low": f"{name}/ci_low",
            "high": f"{name}/ci_high",
            "tasks": "val-core/game/tasks",
        },
        {"metric": "val-core/other/reward/mean@4", "label": "other/reward/mean@4"},
    ]


def test_the_charts_are_those_of_the_metrics_that_there_are(tmp_path: Path) -> None:
    record = {
        "step": 1,
        "critic/score/mean": 0.5,
        "agent/ending/done": 3.0,
        "agent/ending/env_crash": 1.0,
        "timing_s/step": 2.0,
        "timing_s/gen": 1.0,
        "timing_s/alarms": 0.1,
        "perf/rank_memory_gib": 1.0,
        "own/thing": 1.0,
    }
    content = content_of(make_run(tmp_path, [record]))
    charts = {chart["key"]: chart for chart in content["charts"]}
    assert list(charts) == ["reward", "endings", "step_time", "memory"]
    assert charts["endings"]["kind"] == "shares"
    beside = [line["label"] for line in charts["step_time"]["lines"] if "beside" in line]
    assert beside == ["alarms"] and charts["step_time"]["whole"] == "timing_s/step"
    [own] = [metric for metric in content["metrics"] if metric["name"] == "own/thing"]
    assert own["meaning"] == "A metric of this run's own code."


def test_json_for_a_script_element_has_no_markup_and_refuses_what_json_has_not() -> None:
    assert as_json("</script>&") == '"\\u003c/script\\u003e\\u0026"'
    assert json.loads(as_json("é </script>")) == "é </script>"
    with pytest.raises(ValueError):
        as_json(float("nan"))
    assert visible(["tab\tand\nline", {"\x1b[31m": "\u2066"}]) == [
        "tab\tand\nline",
        {"\\u001b[31m": "\\u2066"},
    ]


def test_a_long_run_of_many_metrics_stays_small(tmp_path: Path) -> None:
    from features.run_page.metric_store import MetricStore

    folder = RunFolder(tmp_path, is_own=True)
    folder.metrics = MetricStore()
    for step in range(1, 2001):
        folder.metrics.add(step, {f"own/{n}": step / (n + 1) for n in range(50)})
    text = make_html(make_content([folder], tmp_path / "report.html"))
    # 600 points of three float32 in base64, and what is on every page.
    assert len(text) < 50 * 600 * 3 * 5.4 + 200_000


def test_no_two_scripts_of_the_page_define_the_same_name() -> None:
    names: list[str] = []
    for file in (ELEMENTS, *(ASSETS / name for name in SCRIPTS)):
        text = file.read_text()
        names += re.findall(r"^(?:function|class|const|let) (\w+)", text, re.M)
    assert len(names) > 50 and sorted(names) == sorted(set(names))
    assert {path.name for path in ASSETS.glob("*.js")} == set(SCRIPTS)


def test_numbers_that_no_run_writes_cost_themselves_and_not_the_page(tmp_path: Path) -> None:
    make_run(tmp_path, steps(2))
    lines = [
        f'{{"step": {10**30}, "critic/score/mean": 1}}',
        '{"step": -5, "critic/score/mean": 1}',
        f'{{"step": 3, "critic/score/mean": {10**400}}}',
    ]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    events = [
        '{"time": NaN, "step": 1, "kind": "end", "exit": "finished"}',
        '{"time": 1e300, "step": 1, "kind": "end", "exit": "finished"}',
        '{"time": 5, "step": 1, "kind": "start", "total_steps": NaN}',
        '{"time": 6, "step": 1, "kind": "settings", "changed": {"a": [NaN, Infinity]}}',
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(events))
    content = content_of(tmp_path)
    assert curve_in(content, "critic/score/mean")["first"] == [1, 2, 3]
    run = content["runs"][0]
    assert (run["lastStep"], run["totalSteps"]) == (3, None)
    assert [found["kind"] for found in run["events"]] == ["start", "settings"]


def test_processes_are_told_of_throughout_however_many_validations_there_are(
    tmp_path: Path,
) -> None:
    events = [event("start", 0), *[event("validation", n) for n in range(3000)]]
    run = content_of(make_run(tmp_path, steps(1), [*events, event("end", 3000)]))["runs"][0]
    assert run["events"][0]["kind"] == "start" and run["events"][-1]["kind"] == "end"
    assert len(run["events"]) == 1002 and run["events"][1]["step"] == 2000
