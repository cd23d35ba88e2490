"""What cannot be made is told alone, before anything is imported that takes long."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.watchdog import ATTEMPT
from training.config.loader import ConfigError, load_config
from training.making_trial import try_making

PROJECT = Path(__file__).parents[2]
GAME = """
import random

class Game:
    def __init__(self, **kwargs):
        random.random()
        {line}

    def reset(self, seed=None):
        return "say one"

    def step(self, action):
        return "", 0.0, True, {{}}
"""
MAIN = """
import sys
import main
code = main.main(sys.argv[1:])
print("heavy:", [name for name in ("torch", "transformers", "ray") if name in sys.modules])
sys.exit(code)
"""


def words(folder: Path, line: str, *settings: str) -> list[str]:
    """Writes a game whose constructor has a line of its own; returns the words of its run."""
    (folder / "game.py").write_text(GAME.format(line=line))
    return [
        str(PROJECT / "configs/quickstart.yaml"),
        f"agent.environment.path={folder / 'game.py'}",
        "agent.environment.cls=Game",
        f"trainer.default_local_dir={folder / 'run'}",
        *settings,
    ]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("line", "settings", "told"),
    [
        ("open('/nowhere/words.txt')", (), "environment Game cannot be built: FileNotFoundError"),
        ("self.missing", (), "environment Game cannot be built: AttributeError"),
        (
            "open('/nowhere/words.txt')",
            ("agent.environment.isolation=process",),
            "environment Game cannot be built: FileNotFoundError",
        ),
        ("pass", ("agent.tools=[no_tool]",), "agent.tools: 'no_tool' is unknown"),
        ("pass", ("agent.environment.cls=Gmae",), "Did you mean 'Game'?"),
    ],
)
def test_a_mistake_of_the_environment_is_told_alone_and_before_heavy_imports(
    tmp_path: Path, line: str, settings: tuple[str, ...], told: str
) -> None:
    # The model's folder has to be there, and nothing else of it.
    model = f"actor_rollout_ref.model.path={tmp_path}"
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 9}')
    ended = subprocess.run(
        [sys.executable, "-c", MAIN, *words(tmp_path, line, model, *settings)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2, ended.stderr
    assert told in ended.stderr
    assert ended.stdout.strip() == "heavy: []"
    assert not (tmp_path / "run/report.html").exists()


def test_the_global_random_numbers_go_on_as_if_none_had_been_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made.txt"
    line = f"open({str(made)!r}, 'a').write('x'); __import__('numpy').random.rand()"
    config = load_config(words(tmp_path, line), check=False).config
    random.seed(1)
    np.random.seed(1)
    expected = (random.random(), np.random.rand())
    random.seed(1)
    np.random.seed(1)
    try_making(config)
    assert (random.random(), np.random.rand()) == expected
    assert made.read_text() == "x"
    # What was made before the process was started again is not made again to try it.
    monkeypatch.setenv(ATTEMPT, "2")
    try_making(config)
    assert made.read_text() == "x"


def test_all_that_cannot_be_made_is_listed(tmp_path: Path) -> None:
    config = load_config(words(tmp_path, "raise OSError('no words')"), check=False).config
    with pytest.raises(ConfigError, match="environment Game cannot be built: OSError: no words"):
        try_making(config)


@pytest.mark.parametrize("parser", ["auto", "vllm:hermes", "harmony", "react"])
def test_no_parser_is_asked_for_what_the_model_says(tmp_path: Path, parser: str) -> None:
    """`auto` is found in the chat template, which nobody has read yet: runs with tools ended."""
    settings = ("agent.tools=[calculator]", f"agent.parser={parser}")
    try_making(load_config(words(tmp_path, "pass", *settings), check=False).config)
