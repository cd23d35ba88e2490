"""The services beside the policy that features bring, and further sources of tools.

Invariant: a feature says what they are; whoever asks here knows none of them by name.
"""

from typing import Any

from custom.side_services import SideService
from data.loading import load_object
from training.features import named


def side_services(config: Any, *, writes: bool = True) -> tuple[SideService, ...]:
    """Returns the services that environments, rewards and programs of this run may ask.

    Args:
        writes: they may keep files in the run's folder.
    """
    return tuple(_collected("services", config, writes))


def side_names(config: Any) -> tuple[str, ...]:
    """Lists what may be asked of the run's services, by name; empty: nothing."""
    return tuple(name for service in side_services(config) for name in service.names)


def tool_sources(config: Any) -> tuple[Any, ...]:
    """Returns the sources of tools that stand beside `agent.tools`; see `ToolSource`."""
    return tuple(_collected("tools", config))


def _collected(attribute: str, *arguments: Any) -> list[Any]:
    """Joins what each feature's function of this name says of the config."""
    found: list[Any] = []
    for name, place in named(attribute):
        found += load_object(place, f"feature {name}")(*arguments)
    return found
