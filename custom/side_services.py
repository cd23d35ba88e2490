"""Services beside the policy that an environment's process may use, named and not imported.

    config       services of the run, each a `SideService`     (training/config/side_services.py)
    any process  service.set_up() where an agent is built, or rows are scored
    a process    installed_services() for one that it starts itself

Invariant: a service is plain data, which pickles; what it names is imported where it is set up.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from data.loading import load_object


@dataclass(frozen=True, kw_only=True)
class SideService:
    """Describes a service that environments, tools, rewards and programs may ask.

    Attributes:
        name: of the argument by which users' functions may take it, such as `models`.
        settings: what it is set up with in each process.
        names: what may be asked of it, by name; metrics count by these. Empty: the run asks
            nothing.
        install: "module:function", settings -> None: sets it up in a process.
        handle: "module:NAME" of the object that users' functions are given.
        answer: "module:function", (name, body of a chat completion) -> coroutine of the answer;
            raises ModelError. None: programs cannot ask it.
        asks_player: it is answered by who plays the episode, while the call that asks waits.
        trial: "module:function", config -> None: asks it before the run, and raises ConfigError.
    """

    name: str
    settings: Any
    names: tuple[str, ...]
    install: str
    handle: str
    answer: str | None = None
    asks_player: bool = False
    trial: str | None = None

    def set_up(self) -> None:
        """Sets the service up in this process, in place of what it was there before."""
        load_object(self.install, f"service {self.name}")(self.settings)

    def try_out(self, config: Any) -> None:
        """Asks the service before a run, where it has anything to ask."""
        if self.names and self.trial is not None:
            load_object(self.trial, f"service {self.name}")(config)

    def load_handle(self) -> Any:
        """Returns the object that users' functions are given."""
        return load_object(self.handle, f"service {self.name}")

    async def ask(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the service's answer to a request of a program. Raises ModelError."""
        assert self.answer is not None
        answer: dict[str, Any] = await load_object(self.answer, self.name)(name, body)
        return answer


# Those of this process, by name.
_INSTALLED: dict[str, SideService] = {}


def set_up_services(services: Iterable[SideService]) -> None:
    """Sets those up in this process of which anything is asked; the others stay as they are."""
    for service in services:
        if service.names:
            service.set_up()


def note_installed(service: SideService) -> None:
    """Notes a service as one that this process has; its `install` calls this."""
    _INSTALLED[service.name] = service


def installed_services() -> tuple[SideService, ...]:
    """Returns this process's services, for a process that it starts."""
    return tuple(_INSTALLED.values())


def service_arguments(services: Iterable[SideService]) -> dict[str, Any]:
    """Returns what users' functions may take of the services, by the arguments' names."""
    return {service.name: service.load_handle() for service in services}
