"""What a folder's files say, or lead to, neither has code run, nor anything written elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import transformers

from tests.conftest import make_model, make_tokenizer
from training.config import ModelConfig, plain_files
from training.config.plain_files import plain_lines, special_file
from training.run.checkpoint_weights import read_model_config
from training.run.files import append_line, write_atomically
from training.run.metrics_file import LineFile, read_records
from training.run.named_model import CannotUse
from training.run.run_lock import OWNER_FILE, run_lock
from workers.model.builder import ModelSpec
from workers.model.plain_config import MOST_LAYERS

HOLES = 1 << 40


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim"
    file.write_text("of the user\n")
    return file


@pytest.mark.seconds
def test_a_file_that_is_one_endless_line_is_refused_at_once(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(HOLES)
    with pytest.raises(OSError, match="has a line of more than 256 MiB"):
        list(read_records(tmp_path / "metrics.jsonl"))


def test_lines_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"ab\n\n\xff\x0bc\rd\nlast")
    assert list(plain_lines(file)) == [b"ab\n", b"\n", b"\xff\x0bc\rd\n", b"last"]
    monkeypatch.setattr(plain_files, "LONGEST_LINE", 7)
    assert len(list(plain_lines(file))) == 4
    file.write_bytes(b"ab\n1234567")
    with pytest.raises(OSError, match="has a line of more than"):
        list(plain_lines(file))


def test_what_lies_behind_a_link_to_a_folder_is_looked_at_too(tmp_path: Path) -> None:
    folder, hidden = tmp_path / "checkpoint", tmp_path / "hidden"
    folder.mkdir()
    hidden.mkdir()
    (folder / "model").symlink_to(hidden)
    (folder / "loop").symlink_to(folder)
    assert special_file(folder) is None
    os.mkfifo(hidden / ".metadata")
    assert special_file(folder) == folder / "model/.metadata"


def test_a_link_to_a_whole_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_files, "MAX_ELSEWHERE", 2)
    folder, disk = tmp_path / "run", tmp_path / "disk"
    for place in (folder, disk):
        place.mkdir()
        for number in range(3):
            (place / f"{number}.txt").touch()
    assert special_file(folder) is None
    (folder / "link").symlink_to(disk)
    assert special_file(folder) == folder / "link"


def test_a_tokenizer_of_holes_is_no_tokenizer(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(HOLES)
    assert special_file(tmp_path) is None
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(HOLES)
    assert special_file(tmp_path) == tmp_path / "tokenizer.json"


def test_a_link_in_a_run_s_folder_leads_nothing_that_is_written_elsewhere(
    tmp_path: Path, victim: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    names = ("config.yaml.tmp", "events.jsonl", "metrics.jsonl", OWNER_FILE)
    for name in (*names, f"config.yaml.{os.getpid()}.tmp"):
        (run_dir / name).symlink_to(victim)
    write_atomically(run_dir / "config.yaml", "a: 1\n")
    assert (run_dir / "config.yaml").read_text() == "a: 1\n"
    with pytest.raises(OSError, match="symbolic links"):
        append_line(run_dir / "events.jsonl", "{}")
    # As a run that goes on has it, whose old file is of no use.
    file = LineFile(run_dir / "metrics.jsonl", 0, read_records)
    file.append({"step": 1})
    file.close()
    with pytest.raises(OSError, match="symbolic links"), run_lock(run_dir):
        pass
    assert victim.read_text() == "of the user\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_model(make_tokenizer()).config.save_pretrained(folder)
    return folder


def say(folder: Path, **entries: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


@pytest.mark.parametrize(
    "entries",
    [
        {"attn_implementation": "stranger/kernels"},
        {"_attn_implementation": "stranger/kernels@main:evil"},
        {"num_hidden_layers": 10**6},
        {"attn_implementation": "paged|stranger/kernels"},
    ],
)
def test_a_model_s_folder_brings_no_kernels_and_no_million_layers(
    model: Path, entries: dict[str, object]
) -> None:
    say(model, **entries)
    with pytest.raises(CannotUse, match=r"is code of the hub|allowed: up to 2000"):
        read_model_config(model)
    import torch

    spec = ModelSpec(ModelConfig(path=str(model)), str(model), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"is code of the hub|allowed: up to 2000"):
        spec.hf_config  # noqa: B018


def test_a_user_s_own_config_may_ask_for_kernels(model: Path) -> None:
    import torch

    own = {"attn_implementation": "kernels-community/flash-attn"}
    settings = ModelConfig(path=str(model), override_config=own)
    spec = ModelSpec(settings, str(model), torch.device("cpu"))
    assert spec.hf_config._attn_implementation == own["attn_implementation"]
    say(model, num_hidden_layers=MOST_LAYERS)
    assert isinstance(read_model_config(model), transformers.PretrainedConfig)


def test_a_config_that_is_nested_too_deep_is_said(model: Path) -> None:
    (model / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(CannotUse, match="describes no known model: RecursionError"):
        read_model_config(model)
