"""Knows verl's keys: what each is called here, and what is said of those that mean nothing here.

The facts stand in verl_keys.yaml beside this file; here is how they are looked up.
Invariant: no key of the table is a setting of ours, so that nothing is shadowed.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from training.config.translator import Verdict

_TABLE: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("verl_keys.yaml").read_text(encoding="utf-8")
)
# verl's name of a key or a pattern -> its name here.
_MOVED: dict[str, str] = _TABLE["moved"]
# verl's key -> ours, of which only one may be set where they differ.
ONE_LIMIT: dict[str, str] = _TABLE["one_limit"]
# Our keys that a null in verl's form leaves as they are.
NULL_MEANS_NOTHING: frozenset[str] = frozenset(_TABLE["null_means_nothing"])
# verl's key -> its value, as lower-case text -> what is set here: {our key: value}.
_TRANSLATED: dict[str, dict[str, dict[str, Any]]] = _TABLE["translated"]
# verl's keys for engines that have ranks of their own: whether they share the actor's, their nodes,
# and the ranks of a node.
OWN_ENGINES: dict[str, list[str]] = _TABLE["own_engines"]
# verl's keys of which only several together have a meaning.
READ_TOGETHER: frozenset[str] = frozenset(
    [*_TABLE["read_together"], *(key for keys in OWN_ENGINES.values() for key in keys)]
)
# How values that switch something off read as text; null and "" do too, for every key.
OFF = ("false", "[]", "{}")


@dataclass(frozen=True)
class Rule:
    """Holds what is said of the keys that a pattern fits.

    Attributes:
        pattern: as of fnmatch, for the dotted key.
        reason: what the user is told.
        accepted: the values, as lower-case text, beside null and "", at which nothing is said; all
            others are errors. None: every value is accepted, with a warning.
    """

    pattern: str
    reason: str
    accepted: tuple[str, ...] | None


def _read_rules() -> list[Rule]:
    """Lists the table's rules in the order in which they count."""
    rules = []
    for entry in _TABLE["not_here"]:
        reason = entry["reason"]
        for pattern, values in entry.get("accepted_at", {}).items():
            accepted = tuple(str(value).lower() for value in values)
            rules.append(Rule(pattern, reason, accepted))
        for pattern in entry.get("accepted_when_off", ()):
            rules.append(Rule(pattern, reason, accepted=OFF))
        for pattern in entry.get("without_effect", ()):
            rules.append(Rule(pattern, reason, accepted=None))
    return rules


_RULES = _read_rules()


def moved_to(key: str) -> str | None:
    """Returns the name here of a key of verl's that lives elsewhere; None for other keys."""
    for pattern, new in _MOVED.items():
        if fnmatchcase(key, pattern):
            rest = key[len(pattern) - 1 :]
            return new.replace("*", rest)
    return None


def translation(key: str, value: Any) -> dict[str, Any] | None:
    """Returns what a value of verl's key is here, {our key: value}; None where it is nothing."""
    return _TRANSLATED.get(key, {}).get(str(value).lower())


def holds_moved_keys(key: str) -> bool:
    """Checks whether keys inside this one, a mapping of verl's, are called otherwise here."""
    inside = f"{key}."
    return any(fnmatchcase(pattern, f"{inside}*") for pattern in _MOVED)


def judge(key: str, value: Any) -> Verdict | None:
    """Returns what happens to a key of verl's without meaning here; None where it is unknown."""
    rule = next((rule for rule in _RULES if fnmatchcase(key, rule.pattern)), None)
    if rule is None:
        return None
    if rule.accepted is None:
        return Verdict(rule.reason, "warning")
    text = str(value).lower()
    is_link = text.startswith("${")
    if is_link or text in ("", "none", *rule.accepted):
        return Verdict(rule.reason, "silent")
    return Verdict(rule.reason, "error")
