"""Reads verl_keys.yaml: the keys of verl that are called otherwise here, mean nothing here, or ask for what is not."""

import logging
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ONE_LIMIT, NULL_SAYS_NOTHING = frozenset(_TABLE["one_limit"]), frozenset(_TABLE["null_says_nothing"])
SEVERAL_TURNS = "actor_rollout_ref.rollout.multi_turn.enable"


def moved_to(key: str) -> str | None:
    """Returns the name here of a key of verl's that lives elsewhere."""
    fitting = ((old, new) for old, new in _TABLE["moved"].items() if fnmatchcase(key, old))
    return next((new.replace("*", key[len(old) - 1 :]) for old, new in fitting), None)


def not_here(key: str, value: Any) -> tuple[str, int] | None:
    """Returns what is said of a key of verl's, and at which logging level: ERROR refuses; None where it is unknown."""
    for reason, patterns in _TABLE["not_here"].items():
        for pattern, asks, accepted in (entry.partition("=") for entry in patterns.split()):
            if fnmatchcase(key, pattern):
                nothing = accepted.lower().split("|") if accepted else ["false", "[]", "{}"]
                given = str(value).lower()
                at_rest = given.startswith("${") or given in ("", "none", *nothing)
                return reason, logging.WARNING if not asks else logging.DEBUG if at_rest else logging.ERROR
    return None
