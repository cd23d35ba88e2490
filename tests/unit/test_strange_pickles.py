"""Pickles of a stranger's checkpoint or model run no code, and are told in a line."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from data.plain_pickles import NotPlain
from data.protocol import DataProto
from tests.conftest import make_model, make_tokenizer
from training.config import ModelConfig
from training.run.checkpoint_contents import load_driver_state
from training.run.model_source import reading_model
from workers.model import state as model_state
from workers.model.builder import ModelSpec
from workers.model.checkpoint_reader import SafeReader, load_tensors
from workers.model.plain_config import require_own_weights


class Touches:
    """A pickle of it makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def as_pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value))


def as_torch(value: Any, path: Path) -> None:
    torch.save(value, path)


WRITERS = (as_pickle, as_torch)
Write = Callable[[Any, Path], None]


@pytest.mark.parametrize("write", WRITERS)
def test_a_driver_s_state_and_a_step_in_flight_run_no_code(write: Write, tmp_path: Path) -> None:
    evil = {"global_steps": Touches(tmp_path / "ran"), "arrays": {}, "objects": {}}
    write(evil, tmp_path / "data.pt")
    with pytest.raises(
        NotPlain, match=r"data\.pt is not read: its pickle is damaged, or names more"
    ):
        load_driver_state(tmp_path)
    with pytest.raises(ValueError, match="which could run code"):
        DataProto.load_from_disk(tmp_path / "data.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([1], "has no number of steps"),
        ({}, "has no number of steps"),
        ({"global_steps": "many"}, "its global_steps is a str"),
        ({"global_steps": 1, "epoch": [1]}, "its epoch is a list"),
        ({"global_steps": 1, "observers": 3}, "its observers is a int"),
        ({"global_steps": 1, "suite": [2]}, "its suite is a list"),
    ],
)
def test_a_driver_s_state_of_other_types_is_refused(
    entries: Any, words: str, tmp_path: Path
) -> None:
    torch.save(entries, tmp_path / "data.pt")
    with pytest.raises(ValueError, match=words):
        load_driver_state(tmp_path)


@pytest.mark.parametrize("write", WRITERS)
def test_weights_that_are_a_pickle_run_no_code(write: Write, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(make_tokenizer()).config.save_pretrained(model)
    write({"w": Touches(tmp_path / "ran")}, model / "pytorch_model.bin")
    spec = ModelSpec(ModelConfig(path=str(model)), str(model), torch.device("cpu"))
    with pytest.raises(NotPlain, match="model is not read"):
        spec.causal_lm(trainable=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/dev/zero", "fifo", "a/../../b.safetensors", "folder"]
)
def test_an_index_of_weights_names_files_of_its_folder_alone(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    lm = make_model(make_tokenizer())
    lm.save_pretrained(model)
    os.mkfifo(model / "fifo")
    (model / "folder").mkdir()
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    require_own_weights(model)
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    spec = ModelSpec(ModelConfig(path=str(model)), str(model), torch.device("cpu"))
    with pytest.raises(ValueError, match="which is no file of"):
        spec.hf_config  # noqa: B018


@pytest.mark.parametrize("text", ["[1]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_an_index_that_is_none_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="lists no weights"):
        require_own_weights(tmp_path)


def saved_tensor(folder: Path) -> Any:
    save({"a": torch.ones(2)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    return pickle.loads((folder / ".metadata").read_bytes())


@pytest.mark.parametrize("name", ["../../dev/zero", "/dev/zero", "fifo", "a/b.distcp"])
def test_a_checkpoint_s_tensors_lie_in_files_of_its_folder(name: str, tmp_path: Path) -> None:
    metadata = saved_tensor(tmp_path)
    assert "a" in SafeReader(tmp_path).read_metadata().state_dict_metadata
    os.mkfifo(tmp_path / "fifo")
    for place in metadata.storage_data.values():
        place.relative_path = name
    as_pickle(metadata, tmp_path / ".metadata")
    with pytest.raises(NotPlain, match=r"\.metadata names .*, which is no file of it"):
        SafeReader(tmp_path).read_metadata()


@pytest.mark.parametrize("write", WRITERS)
def test_tensors_of_a_checkpoint_that_are_pickles_run_no_code(write: Write, tmp_path: Path) -> None:
    saved_tensor(tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    size = file.stat().st_size
    write(Touches(tmp_path / "ran"), file)
    file.write_bytes(file.read_bytes().ljust(size, b"\0"))
    with pytest.raises(NotPlain, match="a file of it holds more than tensors"):
        load_tensors({"a": torch.zeros(2)}, SafeReader(tmp_path), no_dist=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x80", b"no pickle", pickle.dumps({"a": 1})])
def test_a_checkpoint_s_list_that_is_none_is_said(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="metadata"):
        SafeReader(tmp_path).read_metadata()


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '{"last_epoch": "many"}', '{"last_epoch": 1, "lr": []}']
)
def test_a_schedule_that_says_no_place_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "scheduler.json").write_text(text)
    with pytest.raises(ValueError, match="does not say where the schedule stood"):
        model_state._place_of_schedule(tmp_path / "scheduler.json")


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("modulo"), TypeError("unhashable"), KeyError(3)]
)
def test_what_makes_no_model_is_told_in_a_line(error: Exception) -> None:
    with (
        pytest.raises(ValueError, match="FOLDER cannot be read as a model: "),
        reading_model("FOLDER"),
    ):
        raise error
    with pytest.raises(torch.OutOfMemoryError), reading_model("FOLDER"):
        raise torch.OutOfMemoryError("CUDA out of memory")
