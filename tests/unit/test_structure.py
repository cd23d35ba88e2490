"""The house itself: imports point one way, heavy packages are imported where they are used.

Files and functions are short.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.conftest import PROJECT

PACKAGES = ("setup", "data", "training", "workers", "custom", "features")
# Rooms from the ground up, a module belonging to the longest name that fits: each may import what
# is at or below it.
ROOMS = (
    "data",
    "training.core_algos",
    "custom.env",
    "custom.own_generators",
    "custom.env_calls",
    "custom.confine",
    "custom.loop_thread",
    "features.judges",
    "custom.verifier_process",
    "custom.reward_score",
    "custom.env_factory",
    "features.adapters",
    "custom.adapters",
    "custom.tools",
    "features.sandbox",
    "custom.tools.builtin",
    "custom.tools.walls",
    "custom",
    "training.config",
    "training.batch",
    "training.rollout_mismatch",
    "training.rollout_correction",
    "training.reward",
    "training.advantage",
    "workers.ranks",
    "workers.environments",
    "workers.model",
    "workers.weight_sync",
    "workers.rollout",
    "workers",
    "features",
    "training.observers",
    "training.run",
    "training",
    "contrib",
    "setup",
    "main",
)
# The exceptions, which docs/architecture.md names: (from, to).
UPWARD = {
    # A config's checks ask the registry of engines, where they run.
    ("training.config", "workers.rollout"),
    # A dataset that is built by hand takes a mapping, whose defaults stand there.
    ("data", "training.config"),
}
HEAVY = ("vllm", "sglang", "ray", "flash_attn", "wandb", "datasets", "reasoning_gym")
HEAVY += ("gymnasium", "textarena", "textworld", "verifiers", "peft")
HEAVY += ("mlflow", "swanlab", "trackio", "clearml")


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in [
        PROJECT / "main.py",
        *(p for package in PACKAGES for p in sorted((PROJECT / package).rglob("*.py"))),
    ]:
        name = ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text())


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return dict(sources())


def imported(tree: ast.AST, known: dict[str, ast.Module]) -> Iterator[str]:
    """The modules that are imported anywhere in the tree, those for type checkers alone apart."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in inner)
        else:
            yield from imported(node, known)


def room(module: str) -> str:
    return max((name for name in ROOMS if module == name or module.startswith(f"{name}.")), key=len)


def test_imports_point_downward(modules: dict[str, ast.Module]) -> None:
    arrows: dict[tuple[str, str], list[str]] = {}
    for name, tree in modules.items():
        for target in set(imported(tree, modules)):
            if target in modules and ROOMS.index(room(target)) > ROOMS.index(room(name)):
                arrows.setdefault((room(name), room(target)), []).append(f"{name} imports {target}")
    assert arrows.keys() == UPWARD, arrows


def test_no_imports_go_in_a_circle(modules: dict[str, ast.Module]) -> None:
    graph = {
        name: {t for t in imported(tree, modules) if t in modules} - {name}
        for name, tree in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_heavy_packages_are_imported_inside_functions(modules: dict[str, ast.Module]) -> None:
    wrong = []
    for name, tree in modules.items():
        top = ast.Module(
            [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], []
        )
        wrong += [f"{name} imports {t}" for t in imported(top, modules) if t.split(".")[0] in HEAVY]
    assert not wrong
