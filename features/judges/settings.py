"""The settings of models beside the policy: judges, simulated users, opponents."""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from training.config.names_and_urls import NAME, url_problems
from training.config.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig

log = logging.getLogger(__name__)


class SideModel(Section):
    """A model that environments, tools and rewards ask, behind an OpenAI-compatible server."""

    base_url: str = ""  #: such as http://127.0.0.1:8000/v1
    model: str = ""  #: its name on the server
    #: environment variable that holds its key; null = it wants none
    key_env: str | None = None
    #: seconds for a question whose turn has come, retries included
    timeout_s: PositiveFloat = 60.0
    max_retries: NonNegativeInt = 4  #: after no connection, 408, 425, 429 or 5xx
    #: requests at once, over all processes of a machine
    max_concurrency: PositiveInt = 16
    #: where answers at temperature 0 are kept: never, in each process, in the run's folder too
    cache: Literal["never", "memory", "disk"] = "memory"
    price_in: NonNegativeFloat = 0.0  #: of a million tokens of questions, for agent/models/…/cost
    price_out: NonNegativeFloat = 0.0  #: of a million tokens of answers
    body: dict[str, Any] = field(default_factory=dict)  #: further fields of every request
    trial: bool = True  #: send a small request before the run, so that a mistake shows


class JudgesSettings(Section):
    """Models beside the policy, which environments, tools, rewards and programs may ask."""

    #: models by name, each a mapping: base_url, model, … (features/judges/README.md)
    models: dict[str, SideModel] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """Yields what is wrong with a model's settings; none of them is asked."""
        yield from side_model_problems(self.models)


def side_model_problems(models: Mapping[str, SideModel]) -> Iterator[str]:
    """Yields what is wrong with `judges.models`."""
    for name, model in models.items():
        key = f"judges.models.{name}"
        if not NAME.fullmatch(name):
            yield f"{key}: a name has up to 40 letters, digits, _ or -, and begins with a letter"
        if not model.model:
            yield f"{key}.model is empty: give the model's name on the server"
        yield from url_problems(f"{key}.base_url", model.base_url, "http://127.0.0.1:8000/v1")
        if model.base_url.rstrip("/").endswith("/chat/completions"):
            yield f"{key}.base_url={model.base_url}: leave /chat/completions out"
        if model.key_env is not None and not os.environ.get(model.key_env):
            yield (
                f"{key}.key_env={model.key_env} is the name of an environment variable that is "
                "not set here: set it to the key"
            )
        reserved = sorted(model.body.keys() & {"messages", "model", "stream", "n"})
        if reserved:
            yield f"{key}.body: {', '.join(reserved)} cannot be set there"


def config_problems(config: "PPOConfig") -> Iterator[str]:
    """Warns that no model can be reached from where it is asked; yields nothing."""
    models = config.section(JudgesSettings).models
    if models and config.environments and not config.environment_home.network:
        log.warning(
            "judges.models: the environments' processes have no network, so that they reach no "
            "model; agent.environment.network=true gives it to them"
        )
    yield from ()
