"""Leaves a test out where the folder of a feature that it needs was deleted, and says which one.

For a test of the core that cannot do without: a test of what a feature does lies in
tests/features/NAME, and goes with the folder. Invariant: nothing is left out where the folder is
there, also where it cannot be imported.
"""

from __future__ import annotations

import pytest

from tests.conftest import PROJECT


def absent_folders(*names: str) -> list[str]:
    """Returns which of these features' folders are not there, as features/NAME."""
    folders = [f"features/{name}" for name in names]
    return [folder for folder in folders if not (PROJECT / folder / "feature.py").is_file()]


def needs_features(*names: str) -> pytest.MarkDecorator:
    """Marks a test, or one of its cases, that needs these features."""
    absent = absent_folders(*names)
    return pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} was deleted")


def require_features(*names: str) -> None:
    """Leaves out the test that runs where one of these features is not there."""
    absent = absent_folders(*names)
    if absent:
        pytest.skip(f"{', '.join(absent)} was deleted")
