"""Writes what `--explain` prints: values with their source, sizes, and the bias.

The reader of a setting is the file whose code reads an attribute of its name, `….entropy_coeff`,
from something that is called as its section is. It is found in the source whenever it is asked for,
so that it cannot be out of date.
"""

import ast
import inspect
import re
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from training.config.bias import bias_line
from training.config.engine_cache import describe_cache
from training.config.leaves import leaves
from training.config.row_layout import describe_layout
from training.config.schema.ppo import PPOConfig
from training.config.values import as_text

if TYPE_CHECKING:
    from training.config.loader import LoadedConfig

PROJECT = Path(__file__).resolve().parents[2]
# Where settings are read; of files that fit alike the first one counts.
FOLDERS = ("workers", "training", "custom", "data", "features", "examples")
# They look at settings to check, plan, watch or show, and are named where nothing else reads one.
ONLOOKERS = (
    "training/config/",
    "features/",
    "examples/",
)
# Code that reads a section's settings may call it so, beside its own name.
WORDS_OF_ANY_SECTION = {"config", "cfg", "settings", "spec", "choice", "own", "given", "self"}
# In the list of the values that were given, in characters.
MAX_VALUE_WIDTH = 32
# By the name of an attribute: the files that read one, and what it is an attribute of in each.
Reads = dict[str, dict[str, set[str]]]


def explain_run(loaded: "LoadedConfig") -> str:
    """Lists values, what became of verl's keys, and what follows: sizes, the layout of rows
    and the bias.

    The values are those that were given; with --explain-all every one, and its reader. The last
    line tells what the checks left out, if anything.

    Raises:
        ValueError: batch sizes do not divide.
    """
    parts = [explain_values(loaded), "", sizes(loaded.config)]
    policy = loaded.config.actor_rollout_ref
    layout = describe_layout(policy.model, policy.actor.use_prefix_grouper)
    if layout is not None:
        parts.append(layout)
    cache = describe_cache(policy.model, policy.rollout, loaded.config.trainer.device)
    if cache is not None:
        parts.append(cache)
    bias = bias_line(loaded.config)
    if bias is not None:
        parts.append(bias)
    if loaded.unchecked is not None:
        parts.append(loaded.unchecked)
    return "\n".join(parts)


def explain_values(loaded: "LoadedConfig") -> str:
    """Lists the values that were asked for, given or all, and what became of verl's keys."""
    values = explain(loaded) if loaded.explain_all else explain_given(loaded)
    return "\n".join([values, *loaded.notes])


def explain_given(loaded: "LoadedConfig") -> str:
    """Lists the values that a YAML or the command line gives, with their source."""
    given = {
        key: as_text(leaf.value)
        for key, leaf in leaves(loaded.config)
        if loaded.sources[key] != "default"
    }
    key_width = max(map(len, given), default=0)
    # The sources of long values, as texts, do not stand below each other.
    value_width = min(max(map(len, given.values()), default=0), MAX_VALUE_WIDTH)
    lines = [
        f"{key:<{key_width}}  {value:<{value_width}}  {loaded.sources[key]}"
        for key, value in given.items()
    ]
    others = len(loaded.sources) - len(given)
    lines.append(f"{others} other settings are at their defaults: --explain-all lists them too")
    return "\n".join(lines)


def explain(loaded: "LoadedConfig") -> str:
    """Lists every value with where it came from and the file that reads it, one per line."""
    reads = attribute_reads()
    lines = []
    for key, leaf in leaves(loaded.config):
        value = as_text(leaf.value)
        source = loaded.sources[key]
        lines.append(f"{key:<66} {value:<28} {source:<14} {reader(key, reads)}")
    return "\n".join(lines)


def attribute_reads() -> Reads:
    """Finds what reads attributes, by their names: `optim.lr` reads `lr` of `optim`."""
    reads: Reads = {}
    for folder in FOLDERS:
        for path in sorted((PROJECT / folder).rglob("*.py")):
            file = path.relative_to(PROJECT).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    files = reads.setdefault(node.attr, {})
                    files.setdefault(file, set()).add(_name_of(node.value))
    return reads


def _name_of(node: ast.expr) -> str:
    """Returns the last name of an expression: `optim` of `actor.optim`; "" where it has none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


def reader(key: str, reads: Reads) -> str:
    """Names the file that reads a setting.

    Of the files that read an attribute of its name, it is the one where the attribute's owner is
    called most like the setting's sections, and next the file itself; onlookers come last. Where
    there is none, a property of the section reads the setting, or it is handed on with all others
    of the section: then its reader is the section's own file.
    """
    sections, _, name = key.rpartition(".")
    section_words = _words(sections or name)
    best_file = _declaring_file(sections, name)
    best_score = (False, 0, 0)
    for file, owners in reads.get(name, {}).items():
        likeness = max(_likeness(owner, section_words) for owner in owners)
        file_likeness = len(section_words & _words(file))
        score = (not file.startswith(ONLOOKERS), likeness, file_likeness)
        if likeness > 0 and score > best_score:
            best_file = file
            best_score = score
    return best_file


def _likeness(owner: str, section_words: set[str]) -> int:
    """Rates how much the owner of an attribute is called like a section; 0: it is something else.

    For the section `critic.optim`, `critic_optim` has 3, `optim` and `optim_config` have 2,
    `config` has 1 and `actor` has 0.
    """
    owner_words = _words(owner) - WORDS_OF_ANY_SECTION
    if not owner or not owner_words <= section_words:
        return 0
    return 1 + len(owner_words)


def _words(text: str) -> set[str]:
    return set(re.findall("[a-z]+", text))


def _declaring_file(sections: str, name: str) -> str:
    """Returns the file of the class that has the setting as a field."""
    section = attrgetter(sections)(PPOConfig()) if sections else PPOConfig()
    for section_type in type(section).__mro__:
        if name in inspect.get_annotations(section_type):
            return Path(inspect.getfile(section_type)).relative_to(PROJECT).as_posix()
    raise KeyError(f"{sections} has no setting {name!r}")


def sizes(config: PPOConfig) -> str:
    """Describes what follows from the batch sizes: rows and tokens of a step, rows of an update.

    Raises:
        ValueError: they do not divide.
    """
    plan = config.batch_plan
    row_length = config.data.row_length
    n = config.actor_rollout_ref.rollout.n
    rows = plan.prompts * n
    lines = [
        f"a step: {plan.prompts:,} prompts x {n} = {rows:,} rows of at most {row_length:,} tokens "
        f"({rows * row_length:,} tokens)"
    ]
    updates = {"policy": plan.actor}
    if config.need_critic:
        updates["critic"] = plan.critic
    for name, update in updates.items():
        rows_per_update = rows // update.mini_batches
        lines.append(
            f"{name}: {update.updates} update(s) a step, of {rows_per_update:,} rows each; "
            f"of these {rows_per_update // plan.ranks:,} on each of {plan.ranks} rank(s)"
        )
    return "\n".join(lines)
