"""SHIM: environments by name are made in custom/env_factory.py, adapters share contrib/adapters."""

from contrib.adapters.base import Adapter as Adapter
from contrib.adapters.base import Step as Step
from custom.env_factory import ENVIRONMENT_NAMES as ENVIRONMENT_NAMES
from custom.env_factory import LIBRARIES as LIBRARIES
from custom.env_factory import Library as Library
from custom.env_factory import library_of as library_of
from custom.env_factory import make_environment as make_environment
from custom.env_factory import taker_of as taker_of
