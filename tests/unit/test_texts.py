"""The texts of data/texts.yaml against the calls that say them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from string import Formatter

from data.texts import say, texts
from tests.conftest import PROJECT

ROOMS = ("data", "custom", "training", "workers")


def fields(text: str) -> set[str]:
    return {name.split(".")[0].split("[")[0] for _, name, _, _ in Formatter().parse(text) if name is not None}


def calls(name: str) -> Iterator[tuple[ast.expr, set[str], ast.AST]]:
    """The calls of a function in the code: what it is given, the facts that it names, and the function it stands in."""
    for path in [PROJECT / "main.py", *(path for room in ROOMS for path in (PROJECT / room).rglob("*.py"))]:
        for function in ast.walk(ast.parse(path.read_text())):
            for node in ast.walk(function) if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
                    yield node.args[0], {str(keyword.arg) for keyword in node.keywords}, function


def said_texts() -> Iterator[tuple[str, set[str]]]:
    """What `say` is given, either of two texts included; a text that a name stands for is handed on."""
    for given, facts, _ in chain(calls("say"), calls("finding")):
        chosen = (given.body, given.orelse) if isinstance(given, ast.IfExp) else (given,)
        yield from ((text.value, facts) for text in chosen if isinstance(text, ast.Constant))


def test_every_text_is_said_with_the_facts_that_it_names() -> None:
    # A player's words have no facts, and `say_where` hands texts on.
    own = {name: fields(text) for name, text in texts().items() if not name.startswith("player_")}
    said = dict(said_texts())
    assert all(facts == own[name] for name, facts in said_texts())
    # `say_where` is given a table of texts, or one that stands before it; each of them names some of its facts.
    for table, facts, function in calls("say_where"):
        tables = [table] if isinstance(table, ast.Dict) else []
        tables += [
            n.value
            for n in ast.walk(function)
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == ast.unparse(table)
        ]
        names = [key.value for key in tables[0].keys]
        assert facts == set().union(*(own[name] for name in names))
        said |= {name: own[name] for name in names}
    assert said == own


def test_a_text_is_filled_in() -> None:
    said = say("folder_held", run_dir="here", holder="{x}")
    assert said == "trainer.default_local_dir=here is held by {x}; end that run, or choose another folder"


def test_a_texts_name_stands_once_in_the_table() -> None:
    lines = (PROJECT / "data" / "texts.yaml").read_text().splitlines()
    names = [line.split(":")[0] for line in lines if line and line[0] not in " #"]
    assert len(names) == len(set(names)) and set(names) == texts().keys()


def test_saying_a_text_imports_no_torch() -> None:
    program = (
        "import sys; from data.texts import say; say('no_sglang'); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=PROJECT, check=True, env={})
