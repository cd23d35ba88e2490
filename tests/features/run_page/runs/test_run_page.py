"""A run's page and its events, as a real run writes them: while it goes on and however it ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from features.run_page.observer import command_line
from tests.e2e.test_training import tiny_config
from tests.features.run_page.made_runs import content_in, curve_in
from training.building import build_trainer
from training.config import PPOConfig
from training.ray_trainer import RayPPOTrainer

SAVING = ("trainer.save_freq=1", "trainer.total_training_steps=3", "trainer.test_freq=2")


def content(run_dir: Path) -> dict[str, Any]:
    return content_in((run_dir / "report.html").read_text())


def kinds(run_dir: Path) -> list[tuple[str, int]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [(event["kind"], event["step"]) for event in map(json.loads, lines)]


def fit(config: PPOConfig, on_step: Any = None) -> RayPPOTrainer:
    """Trains, and ends the trainer however that ends."""
    trainer = build_trainer(config)
    if on_step is not None:
        trainer.on_step = lambda metrics: on_step(trainer)  # type: ignore[method-assign]
    try:
        trainer.fit()
    finally:
        trainer.shutdown()
    return trainer


def test_the_page_is_there_while_the_run_goes_on_and_tells_how_it_ended(
    tiny_task: Path, tmp_path: Path
) -> None:
    seen = []
    fit(
        tiny_config(tiny_task, tmp_path, "trainer.val_before_train=true", *SAVING),
        on_step=lambda trainer: seen.append(content(tmp_path)["runs"][0]["status"]),
    )
    assert seen == ["running"] * 3
    page = content(tmp_path)
    run = page["runs"][0]
    assert (run["status"], run["lastStep"], run["totalSteps"]) == ("finished", 3, 3)
    # That of pytest, or of one of its workers.
    assert run["versions"]["torch"] and run["command"] == command_line()
    rewards = [
        json.loads(line)["critic/score/mean"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[1:]
    ]
    drawn = curve_in(page, "critic/score/mean")
    assert drawn["first"] == [1, 2, 3] and drawn["mean"] == pytest.approx(rewards)
    assert {chart["key"] for chart in page["charts"]} >= {"reward", "validation", "entropy"}
    assert {"trainer.save_freq"} <= {row["key"] for row in run["settings"]}
    found = kinds(tmp_path)
    assert found[0] == ("start", 0) and found[-1] == ("end", 3)
    assert {("validation", 0), ("validation", 2), ("checkpoint", 1), ("checkpoint", 3)} <= {*found}


def test_after_an_exception_the_page_has_its_line_and_a_resume_keeps_it(
    tiny_task: Path, tmp_path: Path
) -> None:
    def fail(trainer: RayPPOTrainer) -> None:
        if trainer.global_steps == 2:
            raise OSError("the hook's disk is <full>")

    with pytest.raises(OSError):
        fit(tiny_config(tiny_task, tmp_path, *SAVING), on_step=fail)
    run = content(tmp_path)["runs"][0]
    assert (run["status"], run["statusLine"]) == ("crashed", "OSError: the hook's disk is <full>")
    lr = "actor_rollout_ref.actor.optim.lr=0.5e-4"
    fit(tiny_config(tiny_task, tmp_path, *SAVING, lr))
    run = content(tmp_path)["runs"][0]
    assert run["status"] == "finished"
    assert run["changes"][0]["changed"][0]["key"] == "actor_rollout_ref.actor.optim.lr"
    of_processes = [kind for kind, _ in kinds(tmp_path) if kind in ("start", "resume", "end")]
    assert of_processes == ["start", "end", "resume", "end"]
    # Each step's own events stand once, though one was made again.
    assert kinds(tmp_path).count(("checkpoint", 2)) == 1
    assert curve_in(content(tmp_path), "critic/score/mean")["first"] == [1, 2, 3]


def test_after_ctrl_c_the_page_says_so_and_a_new_run_sets_the_events_aside(
    tiny_task: Path, tmp_path: Path
) -> None:
    def interrupt(trainer: RayPPOTrainer) -> None:
        # As the signal's handler does in the midst of a step.
        trainer.signals.received = signal.SIGINT

    with pytest.raises(KeyboardInterrupt):
        fit(tiny_config(tiny_task, tmp_path, *SAVING), on_step=interrupt)
    run = content(tmp_path)["runs"][0]
    assert (run["status"], run["lastStep"]) == ("interrupted", 1)
    fit(
        tiny_config(
            tiny_task, tmp_path, "trainer.resume_mode=disable", "trainer.total_training_steps=1"
        )
    )
    assert kinds(tmp_path)[0] == ("start", 0)
    assert content(tmp_path)["runs"][0]["status"] == "finished"
    assert '"interrupted"' in (tmp_path / "events.jsonl.old").read_text()


def test_a_validation_alone_and_a_run_without_files_write_no_page(
    tiny_task: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "validation"
    fit(tiny_config(tiny_task, alone, "trainer.val_only=true", "trainer.val_before_train=true"))
    assert not (alone / "events.jsonl").exists() and not (alone / "report.html").exists()
    quiet = tmp_path / "quiet"
    fit(tiny_config(tiny_task, quiet, "trainer.logger=console", "trainer.total_training_steps=1"))
    assert (quiet / "events.jsonl").exists() and not (quiet / "report.html").exists()
