"""Explains a configuration: which file reads a setting, found in the project's own source, and what follows in words.

Invariant: nothing is imported or run for it, so that a configuration with mistakes is explained too.
"""

import ast
import re

from data.texts import say
from training.config.section import PROJECT_ROOT
from training.config.settings import PPOConfig

# In the order in which they are searched.
FOLDERS = ("workers", "training", "custom", "data", "examples")
# What a section is called where its settings are read; and who looks at settings without using them.
SECTION = {"cfg", "config", "own", "choice", "settings", "given", "spec"}
ONLOOKERS = ("training/config/", "training/run/plan.py", "training/run/alarms.py", "examples/")
Reads = dict[str, list[tuple[str, set[str]]]]


def attribute_reads() -> Reads:
    """Finds, by name, what reads attributes of that name: the file, and the words of its name and before theirs."""
    found: Reads = {}
    for path in (path for folder in FOLDERS for path in sorted((PROJECT_ROOT / folder).rglob("*.py"))):
        file = str(path.relative_to(PROJECT_ROOT))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                words = set(re.findall("[a-z]+", f"{file} {ast.unparse(node.value)}"))
                found.setdefault(node.attr, []).append((file, words))
    return found


def reader(key: str, reads: Reads) -> str:
    """Names the file that most likely reads a setting: with most of its sections' words before its name."""
    sections, _, name = key.rpartition(".")
    own = set(re.findall("[a-z]+", sections or name))
    known = [(file, words) for file, words in reads.get(name, []) if words & (own | SECTION)]
    # What else is read has a property behind it.
    default = ("training/config/settings.py", own)
    return max(known, key=lambda at: (not at[0].startswith(ONLOOKERS), len(at[1] & own)), default=default)[0]


def sizes(config: PPOConfig) -> str:
    """Tells in plain words what follows from the batch sizes: rows and tokens of a step, an update, a micro-batch.

    Raises:
        ValueError: they do not divide.
    """
    plan, row, n = config.batch_plan, config.data.row_length, config.actor_rollout_ref.rollout.n
    rows = plan.prompts * n
    lines = [say("step_sizes", prompts=plan.prompts, n=n, rows=rows, row=row, tokens=rows * row)]
    for name, update in {"policy": plan.actor, **({"critic": plan.critic} if config.need_critic else {})}.items():
        part, ranks = rows // update.mini_batches, plan.ranks
        lines.append(say("update_sizes", name=name, updates=update.updates, part=part, own=part // ranks, ranks=ranks))
    return "\n".join(lines)
