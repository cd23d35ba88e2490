"""Knows where verl's modules are here, for files of users that still import them from verl.

`translate` reads a file's imports, and says for each what to write instead. Invariant: nothing of
the file is executed, and a name that is nowhere here is said to be missing.
"""

import ast
import importlib
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# A module of verl, with all below it -> the modules here that have its public names; where several
# have a name it is the first's.
HERE = {
    "verl": ("data.protocol",),
    "verl.base_config": ("features.verl.config",),
    "verl.protocol": ("data.protocol", "features.verl.protocol"),
    "verl.single_controller": ("workers.ranks.ray_group", "workers.ranks.resource_pool"),
    "verl.experimental.dataset.sampler": ("features.verl.sampler",),
    "verl.tools": ("custom.tools.verl_tools",),
    "verl.tools.schemas": ("custom.tools.verl_schemas",),
    "verl.trainer.config": ("features.verl.config", "training.config"),
    "verl.trainer.ppo.core_algos": ("features.verl.core_algos", "training.core_algos"),
    "verl.trainer.ppo.metric_utils": ("training.run.metric_utils",),
    "verl.trainer.ppo.ray_trainer": ("training.ray_trainer",),
    "verl.trainer.ppo.reward": ("training.reward",),
    "verl.trainer.ppo.rollout_corr_helper": (
        "training.rollout_correction",
        "training.rollout_mismatch",
        "features.verl.rollout_corr",
    ),
    "verl.utils": ("features.verl.utils", "features.verl.config"),
    "verl.utils.config": ("features.verl.config",),
    "verl.utils.dataset": ("data.rl_dataset",),
    "verl.utils.metric": ("training.run.metric_utils",),
    "verl.utils.reward_score": ("custom.reward_score",),
    "verl.utils.seqlen_balancing": ("training.batch.batching",),
    "verl.utils.torch_functional": (
        "training.batch.torch_functional",
        "features.verl.torch_functional",
    ),
    "verl.utils.tracking": ("features.trackers",),
    "verl.workers.actor": ("workers.dp_actor",),
    "verl.workers.config": ("features.verl.config", "training.config"),
    "verl.workers.critic": ("workers.dp_critic",),
    "verl.workers.fsdp_workers": ("workers.fsdp_workers",),
    "verl.workers.reward_manager": ("custom.reward_manager", "features.verl.reward_manager"),
    "verl.workers.rollout": ("workers.rollout.base_rollout",),
}


@dataclass(frozen=True)
class VerlImport:
    """Says what an import from verl becomes.

    Attributes:
        first_line, last_line: where it stands, from 1; its first column is `indent`.
        written: the import.
        here: the imports that take its place; empty where nothing is here.
        missing: what of it is nowhere here, as verl.module.name.
        renamed: a module that the file calls by its whole name, and the one here; or None.
    """

    first_line: int
    last_line: int
    indent: int
    written: str
    here: tuple[str, ...]
    missing: tuple[str, ...] = ()
    renamed: tuple[str, str] | None = None


def verl_import_problem(error: ModuleNotFoundError) -> str | None:
    """Returns what to say of an import of verl, which is not installed; None for any other.

    That is all imports from verl of the file that failed.
    """
    if (error.name or "").partition(".")[0] != "verl":
        return None
    file = traceback.extract_tb(error.__traceback__)[-1].filename
    lines = [f"{file} imports from verl, which is not installed; its names are here, write instead"]
    for found in translate(Path(file).read_text(encoding="utf-8")):
        for line in found.here:
            lines.append(f"  line {found.first_line}: {line}")
        if found.renamed:
            lines.append(f"    and {found.renamed[1]} for {found.renamed[0]} in the whole file")
        for name in found.missing:
            lines.append(
                f"  line {found.first_line}: {name} is not here, see features/verl/names.md"
            )
    return "\n".join(lines)


def translate(source: str) -> list[VerlImport]:
    """Finds the imports from verl in a Python file's text, in their order, and translates them.

    To look names up it imports the modules here that may have them.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_verls(node.module or ""):
            found.append(_translate_from(node))
        elif isinstance(node, ast.Import):
            found += [
                _translate_import(node, alias) for alias in node.names if _is_verls(alias.name)
            ]
    return sorted(found, key=lambda entry: entry.first_line)


def module_here(verl_module: str) -> str:
    """Returns the module here that stands for the longest part of verl's that is known.

    Of several it is the one of features/verl, which has the names of the others too.
    """
    modules = modules_here(verl_module)
    for module in modules:
        if module.startswith("features.verl."):
            return module
    return modules[0]


def modules_here(verl_module: str) -> tuple[str, ...]:
    """Returns the modules here that may have a name of verl's module."""
    parts = verl_module.split(".")
    while ".".join(parts) not in HERE:
        parts.pop()
    return HERE[".".join(parts)]


def place_of(verl_module: str, name: str) -> str | None:
    """Returns the module here that has a name of a module of verl's; None where none has it."""
    for module_name in modules_here(verl_module):
        module = _imported(module_name)
        if module is not None and _has_name(module, name):
            return module_name
    return None


def _has_name(module: ModuleType, name: str) -> bool:
    """Checks whether a module has a name of its own, or offers it at its first use."""
    return name in dir(module) or name in vars(module).get("__all__", ())


def _is_verls(module: str) -> bool:
    return module.partition(".")[0] == "verl"


def _imported(name: str) -> ModuleType | None:
    """Imports a module; None where it, or a package that it needs, is not there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _translate_from(node: ast.ImportFrom) -> VerlImport:
    """Translates `from verl.module import names`, each name into the module that has it."""
    module = str(node.module)
    wanted: dict[str, list[str]] = {}
    here = []
    missing = []
    for alias in node.names:
        submodule = f"{module}.{alias.name}"
        place = place_of(module, alias.name)
        if alias.name == "*":
            here += [f"from {name} import *" for name in modules_here(module)]
        elif submodule in HERE:
            here.append(f"import {module_here(submodule)} as {alias.asname or alias.name}")
        elif place is None:
            missing.append(submodule)
        else:
            wanted.setdefault(place, []).append(ast.unparse(alias))
    here += [f"from {place} import {', '.join(names)}" for place, names in wanted.items()]
    return VerlImport(
        first_line=node.lineno,
        last_line=node.end_lineno or node.lineno,
        indent=node.col_offset,
        written=ast.unparse(node),
        here=tuple(here),
        missing=tuple(missing),
    )


def _translate_import(node: ast.Import, alias: ast.alias) -> VerlImport:
    """Translates `import verl.module`, with or without a name of its own."""
    module = module_here(alias.name)
    renamed = None
    line = f"import {module} as {alias.asname}"
    if alias.asname is None:
        line = f"import {module}"
        renamed = (alias.name, module)
    return VerlImport(
        first_line=node.lineno,
        last_line=node.end_lineno or node.lineno,
        indent=node.col_offset,
        written=ast.unparse(node),
        here=(line,),
        renamed=renamed,
    )


def rewritten(source: str) -> str:
    """Returns the file's text with its imports from verl translated; what is missing stays."""
    lines = source.splitlines()
    for entry in reversed(translate(source)):
        replacement = [" " * entry.indent + line for line in _replacement(entry)]
        lines[entry.first_line - 1 : entry.last_line] = replacement
    text = "\n".join(lines) + "\n"
    for entry in translate(source):
        if entry.renamed:
            verls, ours = entry.renamed
            text = re.sub(rf"(?<![\w./]){re.escape(verls)}(?=\.)", ours, text)
    return text


def _replacement(entry: VerlImport) -> Iterator[str]:
    """Yields the lines that take an import's place."""
    yield from entry.here
    for name in entry.missing:
        module, _, own_name = name.rpartition(".")
        yield f"from {module} import {own_name}"
