"""The supervisor's older names go on."""

from __future__ import annotations

import pytest

from tests.unit.test_features import run_python


@pytest.mark.seconds
def test_an_older_module_is_the_module_itself_and_is_said_once() -> None:
    said = run_python(
        "import contrib.supervisor as old\n"
        "from contrib import supervisor\n"
        "from contrib.supervisor import Supervisor\n"
        "import features.supervisor.supervisor as new\n"
        "assert old is new is supervisor and new.Supervisor is Supervisor\n"
        "assert new.__name__ == new.__spec__.name == 'features.supervisor.supervisor'"
    )
    assert said == "contrib.supervisor is called features.supervisor.supervisor now\n"
