"""A run's folder: one process holds it, and it says with which settings each step was made."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from data.protocol import DataProto
from training.config import PPOConfig
from training.config.loader import ConfigError, load_config
from training.run.dumps import dump
from training.run.recorded_config import changes_before_step, config_of_step, record_config
from training.run.run_lock import run_lock

PROJECT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from pathlib import Path
from training.run.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the folder."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(
        command, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.seconds
def test_a_folder_that_is_held_is_refused_with_its_holder(other, tmp_path) -> None:
    with (
        pytest.raises(ConfigError, match=f'"pid": {other.pid}, "host": "{socket.gethostname()}"'),
        run_lock(tmp_path),
    ):
        pytest.fail("held twice")
    other.communicate("end\n")
    with run_lock(tmp_path):
        assert json.loads((tmp_path / "owner.json").read_text())["pid"] == os.getpid()


@pytest.mark.seconds
def test_a_holder_that_was_killed_is_followed(other, tmp_path, caplog) -> None:
    other.kill()
    other.wait()
    with run_lock(tmp_path):
        assert f'"pid": {other.pid}' in caplog.text and "taken over" in caplog.text
    caplog.clear()
    with run_lock(tmp_path):
        assert not caplog.text, "the last holder ended as it should"


def config_with(*overrides: str) -> PPOConfig:
    files = ("data.train_files=null", "actor_rollout_ref.model.path=null")
    return load_config(["configs/tiny_prompts.yaml", *files, *overrides], check=False).config


@pytest.mark.seconds
def test_every_version_of_the_settings_stays_with_its_steps(tmp_path, caplog) -> None:
    lr = "actor_rollout_ref.actor.optim.lr"
    record_config(tmp_path, config_with(f"{lr}=0.001"), 0)
    record_config(tmp_path, config_with(f"{lr}=0.001", "trainer.resume_mode=disable"), 3)
    assert not caplog.text and not (tmp_path / "config.1.yaml").exists()
    record_config(tmp_path, config_with(f"{lr}=0.002"), 4)
    assert f"{lr}: 0.001 -> 0.002" in caplog.text and "step 4" in caplog.text
    record_config(tmp_path, config_with(f"{lr}=0.003", "trainer.save_freq=2"), 6)
    assert "trainer.save_freq" in caplog.text
    for name, first_line, rate in (
        ("config.1", "# steps 1 to 4", 0.001),
        ("config.2", "# steps 5 to 6", 0.002),
    ):
        text = (tmp_path / f"{name}.yaml").read_text()
        assert text.startswith(first_line + "\n")
        assert (
            load_config(
                [str(tmp_path / f"{name}.yaml")], check=False
            ).config.actor_rollout_ref.actor.optim.lr
            == rate
        )
    record_config(tmp_path, config_with(f"{lr}=0.004"), 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml"], "another run"


def rate_of(run_dir: Path, step: int | None) -> float:
    """The learning rate that a step was made with, as the folder tells."""
    file = config_of_step(run_dir, step)
    return load_config([str(file)], check=False).config.actor_rollout_ref.actor.optim.lr


@pytest.mark.seconds
def test_a_step_is_read_by_the_settings_that_it_was_made_with(tmp_path: Path) -> None:
    lr = "actor_rollout_ref.actor.optim.lr"
    for rate, step in ((0.001, 0), (0.002, 4), (0.003, 6)):
        record_config(tmp_path, config_with(f"{lr}={rate}"), step)
    rates = {step: rate_of(tmp_path, step) for step in (0, 1, 4, 5, 6, 7, 99, None)}
    # Step 0 is the validation before the first step.
    assert rates == {
        0: 0.001,
        1: 0.001,
        4: 0.001,
        5: 0.002,
        6: 0.002,
        7: 0.003,
        99: 0.003,
        None: 0.003,
    }
    changes = changes_before_step(tmp_path, 7)
    assert changes == {4: {lr: (0.001, 0.002)}, 6: {lr: (0.002, 0.003)}}
    assert changes_before_step(tmp_path, 5) == {4: {lr: (0.001, 0.002)}}
    assert changes_before_step(tmp_path, 4) == {}


@pytest.mark.seconds
def test_steps_that_are_made_again_have_the_settings_of_the_last_time(tmp_path: Path) -> None:
    lr = "actor_rollout_ref.actor.optim.lr"
    for rate, step in ((0.001, 0), (0.002, 4), (0.002, 2)):
        record_config(tmp_path, config_with(f"{lr}={rate}"), step)
    assert [rate_of(tmp_path, step) for step in (2, 3, 4)] == [0.001, 0.002, 0.002]
    record_config(tmp_path, config_with(f"{lr}=0.003"), 1)
    assert [rate_of(tmp_path, step) for step in (1, 2, 5)] == [0.001, 0.003, 0.003]
    assert changes_before_step(tmp_path, 5) == {1: {lr: (0.001, 0.003)}}


@pytest.mark.seconds
def test_a_setting_that_the_earlier_version_lacked_has_not_changed(tmp_path, caplog) -> None:
    record_config(tmp_path, PPOConfig(), 0)
    file = tmp_path / "config.yaml"
    earlier = file.read_text().replace("  observers: []\n", "").replace("  save_freq: null\n", "")
    assert len(earlier) < len(file.read_text()) - 30
    file.write_text(earlier)
    assert record_config(tmp_path, PPOConfig(), 3) == {}
    file.write_text(earlier)
    changes = record_config(tmp_path, config_with("trainer.save_freq=2"), 3)
    assert changes["trainer.save_freq"] == (None, 2)
    assert "trainer.observers" not in changes


def test_a_validation_alone_leaves_the_settings_of_the_training(tmp_path) -> None:
    record_config(tmp_path, config_with(), 0)
    kept = (tmp_path / "config.yaml").read_text()
    record_config(tmp_path, config_with("trainer.val_only=true"), 5)
    assert (tmp_path / "config.yaml").read_text() == kept
    assert "val_only: true" in (tmp_path / "config.validation.yaml").read_text()


@pytest.mark.parametrize("text", ["", "a: [", "\0\0\0", "- 1", "seven"])
def test_a_config_that_cannot_be_read_is_said_and_written_anew(tmp_path, caplog, text) -> None:
    (tmp_path / "config.yaml").write_text(text)
    record_config(tmp_path, PPOConfig(), step=3)
    assert f"{tmp_path}/config.yaml cannot be read (" in caplog.text
    caplog.clear()
    record_config(tmp_path, PPOConfig(), step=4)
    assert not caplog.text and [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.seconds
def test_a_config_without_room_leaves_the_one_before_and_names_the_file(tmp_path) -> None:
    record_config(tmp_path, PPOConfig(), step=0)
    whole = (tmp_path / "config.yaml").read_text()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=re.escape(f"{tmp_path}/config.yaml")):
            record_config(tmp_path, PPOConfig(), step=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "config.yaml").read_text() == whole


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_no_room_at_the_start_names_the_file(tmp_path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        with (tmp_path / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while filler.write(b"0" * 4096):
                pass
        with (
            pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/owner.json'"),
            run_lock(tmp_path),
        ):
            pytest.fail("there was room")
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_disk_costs_the_rows_that_are_dumped_not_the_run(tmp_path: Path, caplog) -> None:
    no_folder = tmp_path / "file"
    no_folder.touch()
    dump(DataProto(), str(no_folder / "rows"), 3, tokenizer=None)
    assert f"{no_folder}/rows/3.jsonl was not written: [Errno 20] Not a directory" in caplog.text
