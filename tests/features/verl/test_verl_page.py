"""Tests docs/verl.md: its table has every default that differs, and its files play."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from custom.agent import AgentSpec
from features.verl.verl_keys import NULL_MEANS_NOTHING, moved_to
from tests.conftest import PROJECT
from training.config import PPOConfig
from training.config.leaves import leaves

PAGE = (PROJECT / "docs/verl.md").read_text()
DEFAULTS = (Path(__file__).parent / "verl_defaults.txt").read_text().splitlines()
SCHEMA = dict(leaves(PPOConfig()))
# Null in verl, and the same without a word here.
SAME_AS_NULL = ("warmup_style", "tool_config_path", "custom_reward_function.name")
# One value is one of a list.
SAME_AS_ALL = ["all-linear"]


def differing() -> dict[str, list[Any]]:
    """Lists verl's keys whose default is another one here, with verl's values."""
    theirs: dict[str, list[Any]] = defaultdict(list)
    for line in DEFAULTS:
        key, _, text = line.partition("=")
        theirs[key].append(yaml.safe_load(text))
    found = {}
    for key, values in theirs.items():
        ours_key = key if key in SCHEMA else moved_to(key)
        if ours_key not in SCHEMA or key.endswith(SAME_AS_NULL):
            continue
        ours = SCHEMA[ours_key].value
        ours = list(ours) if isinstance(ours, tuple) else ours
        others = [value for value in values if not same(value, ours)]
        if ours_key in NULL_MEANS_NOTHING:
            # Null of verl's says there that another key may be meant.
            others = [value for value in others if value is not None]
        if others:
            found[key] = others
    return found


def same(theirs: Any, ours: Any) -> bool:
    """Checks whether two defaults are one value, as numbers too."""
    if theirs == ours or (ours == SAME_AS_ALL and [theirs] == ours):
        return True
    try:
        return str(theirs) == str(ours) or float(theirs) == float(ours)
    except (TypeError, ValueError):
        return False


def rows() -> dict[str, list[str]]:
    """Reads the table: key -> verl's, ours, what follows."""
    found = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            for key in re.findall(r"`([\w.]+)`", cells[0]):
                found[key] = cells[1:]
    return found


def test_every_default_that_differs_is_in_the_table() -> None:
    table = rows()
    missing = sorted(differing().keys() - table.keys())
    assert not missing
    # And no key stands there that does not.
    assert table.keys() <= differing().keys() | NULL_MEANS_NOTHING


@pytest.mark.seconds
def test_the_tables_values_are_the_defaults() -> None:
    for key, (theirs, ours, _) in rows().items():
        if ours == "empty":
            continue
        for value in differing().get(key, [None]):
            words = value if isinstance(value, list) else [value]
            shown = yaml.safe_dump(words[0]).split("\n")[0]
            assert shown in theirs, (key, shown, theirs)
        value = SCHEMA[key if key in SCHEMA else str(moved_to(key))].value
        words = value if isinstance(value, tuple) else [value]
        shown = ", ".join(yaml.safe_dump(word).split("\n")[0] for word in words)
        assert ours == shown, (key, ours, shown)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, ModuleType]:
    """The page's files, as modules."""
    modules = {}
    for name, code in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL):
        file = tmp_path / f"{name}.py"
        file.write_text(code)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    return modules


def test_the_interaction_plays_a_row(files: dict[str, ModuleType]) -> None:
    agent = AgentSpec(files["tutor"].Tutor).build()
    row = {"question": "2 + 2 ?", "answer": "4"}
    assert agent.reset(0, row) == [{"role": "user", "content": "2 + 2 ?"}]
    first, second = agent.step("5"), agent.step("it is 4")
    assert (first.reward, first.done) == (0.0, False)
    assert (second.reward, second.done, second.info["tries"]) == (1.0, True, 2)


def test_the_agent_loop_searches_and_is_paid(files: dict[str, ModuleType]) -> None:
    asked: list[list[Any]] = []
    texts = iter(["search(Peru)", "it is Lima"])

    async def create(model: str, messages: list[Any]) -> Any:
        asked.append(list(messages))
        message = SimpleNamespace(role="assistant", content=next(texts))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    task = {"question": "Peru's capital?", "answer": "Lima"}
    assert asyncio.run(files["search_loop"].run(task, client, seed=0)) == 1.0
    assert [len(messages) for messages in asked] == [1, 3]
    assert asked[1][-1] == {"role": "user", "content": "Lima"}


def test_both_are_shown_in_twelve_lines() -> None:
    for body in re.findall(r"\n(?:async def run|    def reset).*?(?=\n```)", PAGE, re.DOTALL):
        assert len([line for line in body.splitlines() if line.strip()]) <= 12
