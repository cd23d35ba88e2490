"""The house itself: imports point one way, and to no feature; heavy packages are imported late."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.conftest import PROJECT
from training.features import features

PACKAGES = ("setup", "data", "training", "workers", "custom", "features", "contrib")
# Rooms from the ground up, a module belonging to the longest name that fits: each may import what
# is at or below it.
ROOMS = (
    "data",
    "training.core_algos",
    "training.features",
    "custom.env",
    "custom.own_generators",
    "custom.coroutines",
    "custom.env_calls",
    "custom.asking",
    "custom.confine",
    "custom.loop_thread",
    "custom.math_answers",
    "custom.verifier_process",
    "custom.reward_score",
    "custom.env_factory",
    "custom.adapters",
    "custom.tools",
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
    "training.observers",
    "training.run",
    "training",
    "features",
    "contrib",
    "setup",
    "main",
)
# The exceptions, which docs/architecture.md names: (from, to).
UPWARD = {
    # A config's checks ask the registries of engines and of kinds of episodes, where they run.
    ("training.config", "workers.rollout"),
    # They make an optimiser and step once.
    ("training.config", "workers.model"),
    # A dataset that is built by hand takes a mapping, whose defaults stand there.
    ("data", "training.config"),
}
# What core_algos does not know.
STRANGERS_TO_CORE_ALGOS = ("training.config", "custom", "workers", "features")
# What features share; it is none.
SHARED = "shared"
# A module of a feature, or a file of it, in a text.
NAME_OF_A_FEATURE = re.compile(r"features[./][a-z_]\w*[\w./]*(:\w+)?")
# Classes that two files name alike, as both names are users' words: verl's, and the Python API's;
# and what a user's step replies with, which the pool's reply of the same name carries.
SHARED_NAMES = {"CheckpointConfig", "ModelConfig", "RayPPOTrainer", "StepReply"}
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


def feature_of(module: str) -> str | None:
    """Names the feature that a module is of."""
    words = module.split(".")
    return words[1] if words[0] == "features" and len(words) > 1 else None


def is_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def room(module: str) -> str:
    return max((name for name in ROOMS if module == name or module.startswith(f"{name}.")), key=len)


@pytest.mark.seconds
def test_imports_point_downward(modules: dict[str, ast.Module]) -> None:
    arrows: dict[tuple[str, str], list[str]] = {}
    for name, tree in modules.items():
        for target in set(imported(tree, modules)):
            # Who imports features is asked below.
            if target not in modules or feature_of(target):
                continue
            if ROOMS.index(room(target)) > ROOMS.index(room(name)):
                arrows.setdefault((room(name), room(target)), []).append(f"{name} imports {target}")
    assert arrows.keys() == UPWARD, arrows


@pytest.mark.seconds
def test_no_imports_go_in_a_circle(modules: dict[str, ast.Module]) -> None:
    graph = {
        name: {t for t in imported(tree, modules) if t in modules} - {name}
        for name, tree in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


@pytest.mark.seconds
def test_no_settings_go_in_a_circle_for_a_type_checker_either(
    modules: dict[str, ast.Module],
) -> None:
    schema = "training.config.schema"
    graph = {}
    for name, tree in modules.items():
        if is_in(name, schema):
            found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
            graph[name] = {node.module for node in found if is_in(str(node.module), schema)}
    users = [name for name, targets in graph.items() if f"{schema}.ppo" in targets]
    assert users == [], "a section sees itself alone; checks of several are in cross_checks"
    TopologicalSorter(graph).prepare()


def test_core_algos_never_import_config(modules: dict[str, ast.Module]) -> None:
    arrows = set()
    for name, tree in modules.items():
        if not is_in(name, "training.core_algos"):
            continue
        for target in imported(tree, modules):
            strangers = [each for each in STRANGERS_TO_CORE_ALGOS if is_in(target, each)]
            arrows |= {(name, stranger) for stranger in strangers}
    assert arrows == set()


@pytest.mark.seconds
def test_trainer_update_rollout_and_data_never_import_a_feature(
    modules: dict[str, ast.Module],
) -> None:
    arrows = set()
    for name, tree in modules.items():
        # What one calls from a script lies above features.
        if feature_of(name) or is_in(name, "setup"):
            continue
        arrows |= {(name, feature_of(target)) for target in imported(tree, modules)}
    assert {arrow for arrow in arrows if arrow[1]} == set()


# Their tests are there whatever folder of features/ was deleted.
TESTS_OF_THE_CORE = ("tests/unit", "tests/processes")


def test_the_cores_tests_import_no_feature() -> None:
    arrows = []
    for folder in TESTS_OF_THE_CORE:
        for path in sorted((PROJECT / folder).rglob("*.py")):
            for target in imported(ast.parse(path.read_text()), {}):
                is_of_feature = is_in(target, "features") and feature_of(target) != SHARED
                if is_of_feature or is_in(target, "tests.features"):
                    arrows.append(f"{path.relative_to(PROJECT)} imports {target}")
    assert arrows == [], "a test of what a feature does lies in tests/features/NAME"


def test_only_the_reader_of_features_names_them(modules: dict[str, ast.Module]) -> None:
    names = set()
    for name, tree in modules.items():
        if name.split(".")[0] not in ("data", "training", "workers", "main"):
            continue
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and NAME_OF_A_FEATURE.fullmatch(text):
                names.add(name)
    assert names == set()


@pytest.mark.seconds
def test_a_feature_imports_no_other_but_through_its_feature_file(
    modules: dict[str, ast.Module],
) -> None:
    arrows = set()
    for name, tree in modules.items():
        own = feature_of(name)
        for target in imported(tree, modules):
            other = feature_of(target)
            if own and other not in (None, own, SHARED) and target != f"features.{other}.feature":
                arrows.add((own, other))
    assert arrows == set()


def test_what_features_share_knows_none_of_them(modules: dict[str, ast.Module]) -> None:
    for name, tree in modules.items():
        if feature_of(name) == SHARED:
            assert {feature_of(target) for target in imported(tree, modules)} <= {None, SHARED}


def test_each_folder_of_features_is_a_feature_or_what_they_share() -> None:
    folders = {file.parent.name for file in (PROJECT / "features").glob("*/__init__.py")}
    assert folders - {SHARED} <= features().keys()


def test_a_feature_file_imports_its_settings_alone(modules: dict[str, ast.Module]) -> None:
    for name, tree in modules.items():
        feature = feature_of(name)
        if name != f"features.{feature}.feature":
            continue
        allowed = {"training.features", f"features.{feature}.settings"}
        top = ast.Module(
            [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], []
        )
        own = {target for target in imported(top, modules) if target.split(".")[0] in PACKAGES}
        assert own <= allowed, f"{name} imports {own - allowed}: name it as 'module:name'"


def test_each_class_outside_tests_has_a_name_of_its_own(modules: dict[str, ast.Module]) -> None:
    places: dict[str, list[str]] = {}
    for name, tree in modules.items():
        # Code that was written for verl has classes by verl's names from there.
        if is_in(name, "features.verl"):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert shared.keys() == SHARED_NAMES, shared


def test_heavy_packages_are_imported_inside_functions(modules: dict[str, ast.Module]) -> None:
    wrong = []
    for name, tree in modules.items():
        top = ast.Module(
            [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], []
        )
        wrong += [f"{name} imports {t}" for t in imported(top, modules) if t.split(".")[0] in HEAVY]
    assert not wrong
