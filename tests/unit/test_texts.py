"""The texts of training/config/texts.yaml against the calls that say them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from string import Formatter

from tests.conftest import PROJECT
from training.config.texts import TEXTS, say


def fields(text: str) -> set[str]:
    return {name.split(".")[0] for _, name, _, _ in Formatter().parse(text) if name is not None}


def calls(name: str) -> Iterator[tuple[ast.expr, set[str], ast.FunctionDef]]:
    """The calls of a function in the code: what it is given, the facts that it names, and the function it stands in."""
    for path in [PROJECT / "main.py", *(PROJECT / "training").rglob("*.py"), *(PROJECT / "workers").rglob("*.py")]:
        for function in ast.walk(ast.parse(path.read_text())):
            for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                    yield node.args[0], {str(keyword.arg) for keyword in node.keywords}, function


def test_every_text_is_said_with_the_facts_that_it_names() -> None:
    # A player's words have no facts, and `say_where` hands texts on.
    said = {text.value: facts for text, facts, _ in calls("say") if isinstance(text, ast.Constant)}
    own = {name: fields(text) for name, text in TEXTS.items() if not name.startswith("player_")}
    # `say_where` has a table of texts that stands before it, each of which names some of its facts.
    for table, facts, function in calls("say_where"):
        tables = [
            n.value for n in ast.walk(function) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == table.id
        ]
        names = [key.value for key in tables[0].keys]
        assert facts == set().union(*(own[name] for name in names))
        said |= {name: own[name] for name in names}
    assert said == own


def test_a_text_is_filled_in() -> None:
    said = say("folder_held", run_dir="here", holder="{x}")
    assert said == "trainer.default_local_dir=here is held by {x}; end that run, or choose another folder"
