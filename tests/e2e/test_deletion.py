"""Tests that each folder of features/ may be deleted, and all of them.

What is left imports, explains and trains.

In a copy of the checkout without the folder and its tests, in which unit tests of the core pass:
all of them in the slow cases, a choice in those of CI; with WHOLE_DELETION=1 all in each.
Invariant: the checkout itself is left as it is.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.conftest import PROJECT

FOLDERS = sorted(file.parent.name for file in (PROJECT / "features").glob("*/feature.py"))
ALL = "all of them"
WHOLE = os.environ.get("WHOLE_DELETION") == "1"
# Those that CI deletes; the others are slow tests.
IN_CI = ("alarms", "adapters", ALL)
# The core's unit tests that `make test-unit` has.
UNIT_TESTS = ("-m", "not seconds and not slow and not long and not gpu and not vllm", "-n", "2")
# Those of them that run in CI: they ask most of what features could bring.
QUICK_TESTS = (
    "tests/unit/config/test_agent.py",
    "tests/unit/config/test_command_line.py",
    "tests/unit/config/test_explain.py",
    "tests/unit/config/test_trainer.py",
    "tests/unit/test_configs_folder.py",
    "tests/unit/test_docs_site.py",
    "tests/unit/test_episode.py",
    "tests/unit/test_features.py",
    "tests/unit/test_losses.py",
    "tests/unit/test_observers.py",
    "tests/unit/test_probe.py",
    "tests/unit/test_same_numbers.py",
    "tests/unit/test_structure.py",
)
# A module that has packages of its own, in an interpreter of its own.
NOT_IMPORTED = "features.programs.with_verifiers.run_renderer"
IMPORT_AND_EXPLAIN_ALL = """
import importlib, pathlib
for package in ("data", "custom", "training", "workers", "features", "setup", "contrib"):
    for file in sorted(pathlib.Path(package).rglob("*.py")):
        name = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        if name != "NOT_IMPORTED":
            importlib.import_module(name)
from training.config.explain import explain_run
from training.config.loader import ConfigError, load_config
for file in sorted(pathlib.Path("configs").glob("*.yaml")):
    try:
        explain_run(load_config([str(file)], check=False))
    except ConfigError as error:
        # A file that is about the feature.
        assert all(", which is not here" in problem for problem in error.problems)
        assert all("features/" in problem for problem in error.problems)
        continue
    print(file)
""".replace("NOT_IMPORTED", NOT_IMPORTED)


def case(name: str) -> object:
    marks = [] if name in IN_CI else [pytest.mark.slow]
    return pytest.param(name, marks=marks)


def copy_without(folder: Path, features: Sequence[str]) -> None:
    """Copies what git would, but for features and their tests; and what Python has compiled."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    gone = tuple(
        f"{place}/{name}/" for place in ("features", "tests/features") for name in features
    )
    for name in listed.stdout.splitlines():
        source = PROJECT / name
        if name.startswith(gone) or not source.is_file():
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        # With its time, by which Python knows what it has compiled.
        shutil.copy2(source, target)
        compiled = Path(importlib.util.cache_from_source(source))
        if compiled.is_file():
            (target.parent / "__pycache__").mkdir(exist_ok=True)
            shutil.copy2(compiled, target.parent / "__pycache__")


def run(folder: Path, *argv: str) -> str:
    """Runs Python in the copy; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


def write_count(folder: Path, model: Path) -> None:
    """Writes README's count.py and count.yaml, with the model at hand and two steps."""
    readme = (PROJECT / "README.md").read_text()
    code, settings = (
        re.search(rf"```{kind}\n(# count\..*?)```", readme, re.DOTALL)[1]  # type: ignore[index]
        for kind in ("python", "yaml")
    )
    (folder / "count.py").write_text(code)
    config = yaml.safe_load(settings)
    config["actor_rollout_ref"]["model"]["path"] = str(model)
    config["data"]["train_batch_size"] = 4
    config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 2
    config["actor_rollout_ref"]["rollout"]["n"] = 4
    config["trainer"]["total_training_steps"] = 2
    (folder / "count.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("feature", [case(name) for name in [*FOLDERS, ALL]])
def test_without_a_feature_the_rest_works(feature: str, tmp_path: Path, tiny_game: Path) -> None:
    folder = tmp_path / "checkout"
    gone = FOLDERS if feature == ALL else [feature]
    copy_without(folder, gone)
    assert not any((folder / "features" / name).exists() for name in gone)
    assert (folder / "main.py").exists()

    explained = run(folder, "-c", IMPORT_AND_EXPLAIN_ALL)
    assert "configs/quickstart.yaml" in explained

    write_count(folder, tiny_game / "model")
    run(folder, "main.py", "count.yaml", "--explain")
    assert re.search(r"step +2/2", run(folder, "main.py", "count.yaml"))

    tests = QUICK_TESTS if feature in IN_CI and not WHOLE else ("tests/unit",)
    run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *UNIT_TESTS, *tests)
