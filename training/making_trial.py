"""Makes an agent of each environment before anything is loaded that takes long.

A class that cannot be made is told in seconds so: importing torch and transformers alone takes ten.
What an environment does once it is there is tried later (`environment_trial`). Invariant: nothing
here imports torch, the environments are made where the run makes them, and the process's global
random numbers go on as if none had been made.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from custom.agent import AgentSpec
from data.watchdog import ATTEMPT
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.config.side_services import side_services
from workers.agent_pools import open_pool
from workers.agent_specs import agent_specs
from workers.environments.names import CannotBuild

# It reads no turn here; the config's own was checked when the config was read.
ANY_PARSER = "function"


def try_making(config: PPOConfig) -> None:
    """Makes and discards an agent of each environment.

    Left out are what a service or a dataset has to be there for, and a run that a supervisor has
    started.

    Raises:
        ConfigError: some cannot be made.
    """
    # The process that starts it has tried them.
    is_started_by_another = ATTEMPT in os.environ
    if not config.environments or is_started_by_another:
        return
    services = side_services(config, writes=False)
    if config.plays_dataset_rows or any(service.names for service in services):
        return
    specs = [
        # What reads the model's turns may need its chat template, or vLLM.
        replace(spec, parser=ANY_PARSER)
        for spec in agent_specs(config)
        if isinstance(spec, AgentSpec)
    ]
    if not specs:
        return
    with _keeping_global_random(), open_pool(config, specs) as pool:
        try:
            _ = pool.tool_schemas
        except CannotBuild as error:
            raise ConfigError(list(error.problems)) from error


@contextmanager
def _keeping_global_random() -> Iterator[None]:
    """Gives Python's and numpy's global generators back as they were."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
