"""What is named as verifiers' interpreter is asked for its version, within bounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from features.programs.with_verifiers import checks as resources

NO_ANSWER = "did not answer within 1 s when asked for its packages"
NO_PYTHON = "is no Python: asked for its packages it said "


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (f'exec env PYTHONPATH={{folder}} {sys.executable} "$@"', "has verifiers 0.1.15; 0.4 or"),
        ("sleep 100", NO_ANSWER),
        ("while true; do echo x; sleep 0.1; done", NO_ANSWER),
        ("yes", f"{NO_PYTHON}'y y y"),
        ("read line; echo $line", f"{NO_PYTHON}''"),
        ('echo "{{}}"', f"{NO_PYTHON}'{{}}'"),
        ('echo "$@"', NO_PYTHON),
    ],
)
def test_another_version_and_what_is_no_python_are_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, sentence: str
) -> None:
    """In {folder} lies what tells a Python that it has an older verifiers."""
    installed = tmp_path / "verifiers-0.1.15.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.1.15\n")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n" + program.format(folder=tmp_path))
    python.chmod(0o755)
    monkeypatch.setattr(resources, "MAX_S", 20.0 if "verifiers" in sentence else 1.0)
    [refusal] = resources.python_refusals(str(python))
    assert sentence in refusal
    assert "\n" not in refusal
