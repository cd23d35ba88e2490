"""Hands the policy on to every process in which an episode's code runs."""

from typing import Any

from custom.side_services import SideService, note_installed
from features.policy_calls.handle import policy
from features.policy_calls.settings import PolicyCallsSettings


def services(config: Any, writes: bool = True) -> list[SideService]:
    """Returns the policy as a service that may be asked, where the config says so.

    Args:
        writes: the run's folder may be written to, which it never is.
    """
    return [SERVICE] if config.section(PolicyCallsSettings).enable else []


def install(settings: None) -> None:
    """Lets the policy be asked in this process."""
    policy.is_set_up = True
    note_installed(SERVICE)


SERVICE = SideService(
    name="policy",
    settings=None,
    names=("policy",),
    install="features.policy_calls.service:install",
    handle="features.policy_calls.handle:policy",
    asks_player=True,
)
