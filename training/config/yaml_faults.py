"""Says in one sentence why a YAML file cannot be read: where, what is there, what to do."""

import re
from pathlib import Path

import yaml

# The parser's words for a fault, and the remedy.
FIXES = {
    "found duplicate key": "a key is given once; put what is under both together",
    "mapping values are not allowed": (
        "keys of one section begin in the same column, and a blank follows each ':'; a value that "
        "holds ': ' needs quotes"
    ),
    "expected ',' or": "check brackets, commas and quotes here and in the lines above",
    "expected <block end>": "keys of one section begin in the same column",
    "did not find expected key": "keys of one section begin in the same column",
    "could not find expected ':'": "write KEY: VALUE, with a blank after the ':'",
    "found unexpected end of stream": "a bracket or a quote is not closed",
    "found undefined alias": "a value that begins with * needs quotes",
    "found unknown escape character": "in double quotes \\ begins an escape; take single quotes",
}
CANNOT_START = re.compile(r"found character ('.+' )?that cannot start any token")
A_TAB = "YAML is indented by blanks; put blanks in the place of the tab"
A_SIGN = "a value that begins with this character needs quotes"


def describe_yaml_fault(path: Path, error: Exception) -> str:
    """Returns the sentence for an error that reading the file raised."""
    if isinstance(error, UnicodeDecodeError):
        return f"{path} is not text in UTF-8 ({error}): save it in that encoding"
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return f"cannot read {path} as YAML in UTF-8: {error}"
    problem = str(error.problem)
    place = f"cannot read {path} as YAML: line {mark.line + 1}, column {mark.column + 1}"
    if CANNOT_START.search(problem):
        fix = A_TAB if _is_tab(path, mark) else A_SIGN
    else:
        fix = next((FIXES[start] for start in FIXES if start in problem), "")
    return f"{place}: {problem}{'; ' if fix else ''}{fix}"


def _is_tab(path: Path, mark: yaml.Mark) -> bool:
    """Checks whether a tab stands where the parser stopped."""
    line = path.read_text(encoding="utf-8-sig").splitlines()[mark.line]
    return line[mark.column : mark.column + 1] == "\t"
