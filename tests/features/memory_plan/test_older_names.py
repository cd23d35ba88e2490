"""The memory plan's older names go on."""

from __future__ import annotations

import pytest

from tests.unit.test_features import run_python


@pytest.mark.seconds
def test_what_lies_in_an_older_package_is_no_copy() -> None:
    said = run_python(
        "from contrib.memory_plan.terms import __name__ as name\n"
        "import contrib.memory_plan.table, sys\n"
        "import features.memory_plan.table as new\n"
        "assert name == 'features.memory_plan.terms'\n"
        "assert sys.modules['contrib.memory_plan.table'] is new\n"
    )
    assert said == "contrib.memory_plan is called features.memory_plan now\n"
