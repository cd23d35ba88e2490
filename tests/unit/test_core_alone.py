"""core_algos stands alone: it imports torch, numpy and itself; a configuration needs no torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from training import core_algos
from training.core_algos import built_in, registry

CORE = PROJECT / "training/core_algos"
PACKAGES = ("training", "data", "custom", "workers", "contrib", "setup", "features")
# What core_algos takes from `data`: small files without a batch.
FROM_DATA = {"data", "data.names", "data.array_ops", "data.warn_once", "data.moved_modules"}
# Other than torch, numpy and the standard library.
OTHERS = ("pydantic", "omegaconf", "yaml", "ray", "transformers")


def loaded_by(statement: str) -> set[str]:
    """Returns the modules that a fresh interpreter has loaded after the statement."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] in PACKAGES}


def submodules() -> list[str]:
    return [f"training.core_algos.{path.stem}" for path in sorted(CORE.glob("[!_]*.py"))]


def test_a_configuration_is_imported_without_torch() -> None:
    loaded = loaded_by("import training.config")
    print(f"import training.config loads {len(ours(loaded))} modules of this project")
    assert "torch" not in loaded and "numpy" not in loaded


@pytest.mark.seconds
@pytest.mark.parametrize(
    "statement", ["import training.core_algos", f"import {', '.join(submodules())}"]
)
def test_core_algos_loads_nothing_else_of_this_project(statement: str) -> None:
    loaded = loaded_by(statement)
    print(f"{statement[:40]}: {len(ours(loaded))} modules of this project")
    own = {name for name in ours(loaded) if name.startswith("training.core_algos")}
    assert ours(loaded) - own <= {"training"} | FROM_DATA
    assert not loaded & set(OTHERS)


@pytest.mark.parametrize("path", sorted(CORE.glob("*_settings.py")), ids=lambda path: path.stem)
def test_settings_are_read_without_torch(path: Path) -> None:
    loaded = loaded_by(f"import training.core_algos.{path.stem}")
    assert "torch" not in loaded
    assert not any(name.startswith("training.config") for name in loaded)


def test_every_name_that_the_package_offers_is_told_to_type_checkers_too() -> None:
    (guarded,) = (
        node
        for node in ast.parse((CORE / "__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    told: dict[str, str] = {}
    for node in guarded.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        told.update({alias.name: node.module for alias in node.names})
    assert told == core_algos._PLACES
    assert sorted(told) == core_algos.__all__
    for name in told:
        assert getattr(core_algos, name) is not None
        assert name in dir(core_algos)


@pytest.mark.seconds
def test_the_registries_are_full_where_one_file_alone_was_imported() -> None:
    program = (
        "from training.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY; "
        "assert len(ADV_ESTIMATOR_REGISTRY) >= 20 and len(POLICY_LOSS_REGISTRY) >= 13"
    )
    loaded_by(program)
    loaded_by("from training.core_algos.registry import get_policy_loss_fn as f; f('clip_cov')")


@pytest.mark.seconds
def test_a_name_of_ours_cannot_be_taken_before_our_formulas_are_loaded() -> None:
    program = (
        "from training.core_algos import register_adv_est\n"
        "def mine(token_level_rewards, response_mask): ...\n"
        "try:\n    register_adv_est('grpo')(mine)\n"
        "except ValueError as error:\n    assert 'compute_grpo_outcome_advantage' in str(error)\n"
        "else:\n    raise AssertionError('it was taken')"
    )
    loaded_by(program)


def test_what_a_config_knows_of_estimators_is_what_they_say_of_themselves() -> None:
    registry.load_built_in()
    assert registry.ESTIMATOR_FACTS.keys() >= built_in.BUILT_IN_ESTIMATORS
    for name in built_in.BUILT_IN_ESTIMATORS:
        facts = registry.estimator_facts(name)
        assert facts.formula, name
        if name in built_in.ESTIMATORS_WITHIN_GROUPS:
            assert facts.span in ("scores", "groups") and not facts.whitens_batch, name
        if facts.compares is not None:
            assert "index" in built_in.ESTIMATOR_NEEDS[name], name


@pytest.mark.seconds
@pytest.mark.parametrize("module", ["training.ray_trainer", "workers.fsdp_workers"])
def test_the_trainer_and_its_workers_load_of_features_what_they_say_of_themselves(
    module: str,
) -> None:
    """A config has a section for each feature; what a feature does is imported by a run."""
    loaded = ours(loaded_by(f"import {module}"))
    print(f"import {module} loads {len(loaded)} modules of this project")
    of_features = {name for name in loaded if name.startswith("features.")}
    parts = {name.split(".")[2] for name in of_features if name.count(".") > 1}
    assert parts <= {"feature", "settings"}
