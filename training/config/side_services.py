"""The services beside the policy that features bring, and further sources of tools.

Invariant: a feature says what they are; whoever asks here knows none of them by name.
"""

from typing import Any

from custom.side_services import SideService
from training.features import brought


def side_services(config: Any, *, writes: bool = True) -> tuple[SideService, ...]:
    """Returns the services that environments, rewards and programs of this run may ask.

    Args:
        writes: they may keep files in the run's folder.
    """
    found: list[SideService] = []
    for services in brought("services"):
        found += services(config, writes)
    return tuple(found)


def side_names(config: Any) -> tuple[str, ...]:
    """Lists what may be asked of the run's services, by name; empty: nothing.

    What who plays an episode answers is the policy's, and counted elsewhere.
    """
    beside = [service for service in side_services(config) if not service.asks_player]
    return tuple(name for service in beside for name in service.names)


def tool_sources(config: Any) -> tuple[Any, ...]:
    """Returns the sources of tools that stand beside `agent.tools`; see `ToolSource`."""
    found: list[Any] = []
    for sources in brought("tools"):
        found += sources(config)
    return tuple(found)
