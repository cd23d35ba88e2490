"""The house itself: imports point one way, and heavy packages are imported where they are used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import PROJECT

PACKAGES = ("data", "training", "workers", "custom")
# What each module or package may import of ours; the longest matching name decides.
ALLOWED = {
    "data": {"data"},
    "training.config": {"training.agent_config", "training.config_base"},
    "training.agent_config": {"training.config_base"},
    "training.config_base": set(),
    "training.registry": set(),
    "training.torch_functional": set(),
    "training.checkpoint": set(),
    "training.tracking": set(),
    "training.report": set(),
    "training.core_algos": {"training.registry", "training.torch_functional"},
    "training.rollout_correction": set(),
    "training.advantage": {"data", "training.core_algos"},
    "training.group_filter": {"data", "training.advantage", "training.config"},
    "training.batching": {"data"},
    "training.metric_utils": {"data"},
    "training.config_tables": set(),
    "training.config_loader": {
        *("training.config", "training.config_base", "training.agent_config"),
        *("training.config_checks", "training.config_tables"),
    },
    # the checks look names up in the registries, when they run
    "training.agent_checks": {"training.config", "training.agent_config", "data.loading"},
    "training.config_checks": {
        *("training.config", "training.config_base", "training.agent_checks", "training.rank_checks"),
        *("training.core_algos", "custom.reward_manager", "data.loading"),
    },
    "training.rank_checks": {"training.config", "training.config_base"},
    "training.reward": {"data", "training.config", "custom.reward_manager"},
    "custom": {"data", "custom", "training.reward", "training.registry"},
    "workers": {
        *(
            "data",
            "workers",
            "custom.agent",
            "custom.env",
            "custom.env_homes",
            "training.config",
            "training.core_algos",
            "training.batching",
        ),
        *("training.torch_functional", "training.rollout_correction"),
    },
    # the trainer knows worker interfaces; the role mapping names the classes, when it is asked
    "training.ray_trainer": {"data", "training", "workers.worker_group"},
    "training.agent_trainer": {
        *("data", "training", "custom.agent", "custom.tools.UNKNOWN", "workers.worker_group"),
        *("workers.environments", "workers.multi_turn_rollout", "workers.turn_loop.ENDINGS"),
    },
    "training.roles": {"training.config", "workers.fsdp_workers", "workers.worker_group"},
}
HEAVY = ("vllm", "sglang", "ray", "flash_attn", "wandb", "datasets", "reasoning_gym", "gymnasium", "textarena")


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((PROJECT / package).rglob("*.py")):
            yield ".".join(path.relative_to(PROJECT).with_suffix("").parts), ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def matches(name: str, prefixes: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def test_imports_point_one_way() -> None:
    wrong = []
    for name, tree in modules():
        rule = max((key for key in ALLOWED if matches(name, {key})), key=len, default=None)
        assert rule is not None or name.endswith("__init__"), f"{name}: say in ALLOWED what it may import"
        ours = [target for target in imported(tree) if target.split(".")[0] in (*PACKAGES, "main", "setup")]
        wrong += [f"{name} imports {target}" for target in ours if rule and not matches(target, ALLOWED[rule])]
    assert not wrong


def test_heavy_packages_are_imported_inside_functions() -> None:
    wrong = []
    for name, tree in modules():
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        wrong += [f"{name} imports {t}" for t in imported(top) if t.split(".")[0] in HEAVY]
    assert not wrong


def test_no_file_is_longer_than_its_budget() -> None:
    from scripts.line_budget import LONGEST_FILE

    files = [path for package in PACKAGES for path in (PROJECT / package).rglob("*.py")]
    assert {str(p): n for p in files if (n := len(Path(p).read_text().splitlines())) > LONGEST_FILE} == {}
