"""Knows where verl's modules are here, for files of users that still import them from verl.

`translate` reads a file's imports, and says for each what to write instead. Invariant: nothing of
the file is executed; a name that is nowhere here is said to be missing, and stays as it was.
"""

import ast
import importlib
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

# A module of verl, with all below it -> the modules here that have its public names; where several
# have a name it is the first's.
HERE = {
    "verl": ("data.protocol",),
    "verl.base_config": ("features.verl.config",),
    "verl.protocol": ("data.protocol", "features.verl.protocol"),
    "verl.single_controller": ("workers.ranks.ray_group", "workers.ranks.resource_pool"),
    "verl.single_controller.base.decorator": ("workers.ranks.dispatch",),
    "verl.experimental.dataset.sampler": ("features.verl.sampler",),
    "verl.tools": ("custom.tools.verl_tools",),
    "verl.tools.schemas": ("custom.tools.verl_schemas",),
    "verl.trainer.config": ("features.verl.config", "training.config"),
    "verl.trainer.ppo.core_algos": ("features.verl.core_algos", "training.core_algos"),
    "verl.trainer.ppo.metric_utils": ("training.run.metric_utils",),
    "verl.trainer.ppo.ray_trainer": ("features.verl.trainer", "training.ray_trainer"),
    "verl.trainer.ppo.reward": ("training.reward",),
    "verl.trainer.ppo.utils": ("training.run.roles",),
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
    "verl.workers.rollout": (
        "workers.rollout.base_rollout",
        "workers.hf_rollout",
        "workers.vllm_rollout_spmd",
        "workers.sglang_rollout",
    ),
}
# The packages whose own classes and functions are looked for in all modules above, since verl's
# versions have a name now in this module and now in that.
OUR_PACKAGES = ("custom", "data", "features", "training", "workers")


@dataclass(frozen=True)
class VerlImport:
    """Says what an import from verl becomes.

    Attributes:
        first_line, last_line: where it stands, from 1.
        start, end: the place of its statement in the text, behind the last character.
        written: the import.
        here: the imports that take its place; empty where nothing is here.
        kept: what of the statement stays, as it is to be written.
        missing: what of it is nowhere here, as verl.module.name.
        renamed: modules that the file calls by their whole names -> those here; or None.
    """

    first_line: int
    last_line: int
    start: int
    end: int
    written: str
    here: tuple[str, ...]
    kept: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    renamed: Mapping[str, str] | None = None


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
        for verls, ours in (found.renamed or {}).items():
            lines.append(f"    and {ours} for {verls} in the whole file")
        for name in found.missing:
            lines.append(
                f"  line {found.first_line}: {name} is not here, see features/verl/names.md"
            )
    return "\n".join(lines)


def translate(source: str) -> list[VerlImport]:
    """Finds the imports from verl in a Python file's text, in their order, and translates them.

    To look names up it imports the modules here that may have them.
    """
    text = _Text(source)
    found = []
    for node in ast.walk(text.tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_verls(node.module or ""):
            found.append(_translate_from(node, text))
        elif isinstance(node, ast.Import):
            found += _translate_import(node, text)
    return sorted(found, key=lambda entry: entry.start)


class _Text:
    """Knows a Python file's text: its statements, and where the parts of them stand."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        self._lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", source)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def place(self, line: int, column: int) -> int:
        """Returns the place of a line's column, which ast counts in bytes."""
        before = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(before)

    def start_of(self, node: ast.stmt | ast.expr) -> int:
        """Returns the place of a node's first character."""
        return self.place(node.lineno, node.col_offset)

    def span_of(self, node: ast.stmt) -> tuple[int, int]:
        """Returns the places of a statement's first character, and of the one behind its last."""
        end = self.place(node.end_lineno or node.lineno, node.end_col_offset or 0)
        return self.start_of(node), end

    def used_of(self, module: str) -> set[str]:
        """Returns the names that the code takes from a module, by the name that it has here."""
        used = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and _dotted(node.value) == module:
                used.add(node.attr)
        return used


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
    """Returns the module here that has a name of a module of verl's; None where none has it.

    Where those of the module lack it, it is looked for in all others.
    """
    for module_name in modules_here(verl_module):
        module = _imported(module_name)
        # A package offers names that it resolves at first use in its `dir`.
        if module is not None and name in dir(module):
            return module_name
    return _place_elsewhere(name)


@cache
def _place_elsewhere(name: str) -> str | None:
    """Returns the module, of all here, that has a class or a function of ours of this name.

    None where none has it, or two have different ones.
    """
    places: dict[str, Any] = {}
    for modules in HERE.values():
        for module_name in modules:
            module = _imported(module_name)
            if module is None or name not in dir(module):
                continue
            value = getattr(module, name)
            package = str(getattr(value, "__module__", "")).partition(".")[0]
            if callable(value) and package in OUR_PACKAGES:
                places[module_name] = value
    if len({id(value) for value in places.values()}) != 1:
        return None
    return next(iter(places))


def _is_verls(module: str) -> bool:
    return module.partition(".")[0] == "verl"


def _imported(name: str) -> ModuleType | None:
    """Imports a module; None where it, or a package that it needs, is not there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _dotted(node: ast.expr) -> str:
    """Returns a name with its attributes, as verl.utils; empty where it is anything else."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(words)])


def _translate_from(node: ast.ImportFrom, text: _Text) -> VerlImport:
    """Translates `from verl.module import names`, each name into the module that has it."""
    module = str(node.module)
    wanted: dict[str, list[str]] = {}
    here = []
    kept = []
    missing = []
    for alias in node.names:
        submodule = f"{module}.{alias.name}"
        place = place_of(module, alias.name)
        if alias.name == "*" and module in HERE:
            here += [f"from {name} import *" for name in modules_here(module)]
        elif submodule in HERE:
            here.append(f"import {module_here(submodule)} as {alias.asname or alias.name}")
        elif place is None or alias.name == "*":
            missing.append(submodule)
            kept.append(ast.unparse(alias))
        else:
            wanted.setdefault(place, []).append(ast.unparse(alias))
    here += [f"from {place} import {', '.join(names)}" for place, names in wanted.items()]
    start, end = text.span_of(node)
    return VerlImport(
        first_line=node.lineno,
        last_line=node.end_lineno or node.lineno,
        start=start,
        end=end,
        written=ast.unparse(node),
        here=tuple(here),
        kept=tuple(f"from {module} import {name}" for name in kept),
        missing=tuple(missing),
    )


def _translate_import(node: ast.Import, text: _Text) -> Iterator[VerlImport]:
    """Translates `import verl.module`, with or without a name of its own, if it imports any."""
    if not any(_is_verls(alias.name) for alias in node.names):
        return
    start, end = text.span_of(node)
    here = []
    kept = []
    missing = []
    renamed = None
    for alias in node.names:
        module = _module_with(alias.name, text.used_of(alias.asname or alias.name))
        if not _is_verls(alias.name):
            kept.append(f"import {ast.unparse(alias)}")
        elif module is None:
            kept.append(f"import {ast.unparse(alias)}")
            missing.append(alias.name)
        elif alias.asname is not None:
            here.append(f"import {module} as {alias.asname}")
        else:
            here.append(f"import {module}")
            renamed = {**(renamed or {}), alias.name: module}
    yield VerlImport(
        first_line=node.lineno,
        last_line=node.end_lineno or node.lineno,
        start=start,
        end=end,
        written=ast.unparse(node),
        here=tuple(here),
        kept=tuple(kept),
        missing=tuple(missing),
        renamed=renamed,
    )


def _module_with(verl_module: str, used: set[str]) -> str | None:
    """Returns the module here that stands for one of verl's, with all names that are used of it.

    None where none has them all, or where nothing is used and the module is not known.
    """
    if not _is_verls(verl_module):
        return None
    if verl_module in HERE and not used:
        return module_here(verl_module)
    own = {name for name in used if f"{verl_module}.{name}" not in HERE}
    if not own:
        return None
    for name in (module_here(verl_module), *modules_here(verl_module)):
        module = _imported(name)
        if module is not None and all(_has(module, word) for word in own):
            return name
    return None


def _has(module: ModuleType, name: str) -> bool:
    """Checks whether a module has a name, or finds it at its first use."""
    try:
        getattr(module, name)
    except (AttributeError, ImportError):
        return False
    return True


def rewritten(source: str) -> str:
    """Returns the file's text with its imports from verl translated; what is missing stays."""
    text = _Text(source)
    entries = [entry for entry in translate(source) if entry.here]
    changes: dict[tuple[int, int], str] = {}
    renamed: dict[str, str] = {}
    for entry in entries:
        changes[entry.start, entry.end] = _replacement(source, entry)
        renamed |= entry.renamed or {}
    for node in ast.walk(text.tree):
        if not isinstance(node, ast.Attribute):
            continue
        verls = _dotted(node.value)
        if verls in renamed:
            start = text.start_of(node)
            end = start + len(verls)
            # Written over several lines it stays.
            if source[start:end] == verls:
                changes[start, end] = renamed[verls]
    for start, end in sorted(changes, reverse=True):
        source = source[:start] + changes[start, end] + source[end:]
    return source


def _replacement(source: str, entry: VerlImport) -> str:
    """Returns what takes an import's place: a line each, or one where it shares its line."""
    lines = [*entry.here, *entry.kept]
    begin = max(source.rfind("\n", 0, entry.start), source.rfind("\r", 0, entry.start)) + 1
    indent = source[begin : entry.start]
    behind = source[entry.end :].lstrip(" \t")
    if indent.strip() or behind.startswith(";"):
        return "; ".join(lines)
    newline = "\r\n" if "\r\n" in source else "\n"
    return f"{newline}{indent}".join(lines)
