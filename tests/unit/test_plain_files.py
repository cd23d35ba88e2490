"""What a stranger's folder may hold is refused in a second: devices, FIFOs, bombs of YAML."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from training.config.loader import ConfigError, load_config
from training.config.plain_files import load_plain_yaml, read_plain_text, special_file
from training.run.checkpoint_contents import MANIFEST
from training.run.checkpoint_manifest import damage
from training.run.named_model import CannotUse, find_named_model
from training.run.recorded_config import settings_of_step

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}}}\n" for i in range(1, 30)
)
DEEP = "[" * 3000 + "]" * 3000
BOMBS = {"laughs": LAUGHS, "pairs": MERGES, "deep": DEEP, "long": "a: 1 #" + "x" * (5 << 20)}


@pytest.fixture(autouse=True)
def in_a_moment() -> Iterator[None]:
    """Ends a test that reads for ever, by no error that the code may catch."""

    class Late(BaseException):
        pass

    def ring(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_yaml_bomb_is_refused_wherever_settings_are_read(bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(BOMBS[bomb])
    assert settings_of_step(tmp_path, None) is None
    with pytest.raises(ConfigError):
        load_config([str(path)], check=False)


def test_aliases_of_usual_size_are_read() -> None:
    assert load_plain_yaml("a: &a {x: 1}\nb: [*a, *a]") == {"a": {"x": 1}, "b": [{"x": 1}] * 2}
    with pytest.raises(yaml.YAMLError):
        load_plain_yaml("a: [1")


@pytest.mark.parametrize("kind", ["fifo", "zero", "folder"])
def test_what_is_no_regular_file_is_not_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(OSError, match=r"no regular file|Is a directory"):
        read_plain_text(path)
    assert settings_of_step(tmp_path, None) is None
    with pytest.raises(ConfigError):
        load_config([str(path)], check=False)
    assert (special_file(tmp_path) is None) is (kind == "folder")


@pytest.mark.parametrize(
    "name", ["/dev/zero", "../../outside", "fifo", "linked", "/etc/passwd", "folder", "tty"]
)
@pytest.mark.parametrize("size", [0, 5])
def test_a_manifest_names_regular_files_of_its_folder_alone(
    name: str, size: int, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "linked").symlink_to("/dev/zero")
    (tmp_path / "tty").symlink_to("/dev/tty")
    (tmp_path / "folder").mkdir()
    (tmp_path / MANIFEST).write_text(json.dumps({name: [size, 0], "data.pt": [0, 0]}))
    assert damage(tmp_path) is not None


@pytest.mark.parametrize("text", ["[" * 100_000, "7", '{"data.pt": 3}', '{"data.pt": [[0], {}]}'])
def test_a_manifest_that_is_none_is_damage(text: str, tmp_path: Path) -> None:
    (tmp_path / "data.pt").touch()
    (tmp_path / MANIFEST).write_text(text)
    assert damage(tmp_path) is not None


def test_a_model_beside_a_fifo_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CannotUse, match="no regular file"):
        find_named_model(str(tmp_path))
