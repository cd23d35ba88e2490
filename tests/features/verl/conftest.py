"""The settings of a run that passes every check, as tests of the config have them."""

from tests.unit.config.conftest import runnable as runnable
