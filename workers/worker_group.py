"""Where workers live and how a call reaches them: `register` marks a worker's methods, a group offers them to the driver.

`LocalWorkerGroup` runs one worker in the driver's own process: a call is a plain call, so breakpoints and tracebacks work. Groups over several
processes offer the same methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
DISPATCH_ATTRIBUTE = "_dispatch_mode"


class Dispatch(Enum):
    """How a call's arguments are spread over the ranks of a group, and its results collected."""

    RANK_ZERO = "rank_zero"
    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    DP_COMPUTE_PROTO = "dp_compute_proto"


def register(dispatch_mode: Dispatch = Dispatch.ALL_TO_ALL) -> Callable[[Method], Method]:
    """Marks a worker's method as callable through its group."""

    def mark(method: Method) -> Method:
        setattr(method, DISPATCH_ATTRIBUTE, dispatch_mode)
        return method

    return mark


def registered_methods(worker_cls: type) -> dict[str, Dispatch]:
    found = ((name, getattr(worker_cls, name)) for name in dir(worker_cls))
    return {name: getattr(method, DISPATCH_ATTRIBUTE) for name, method in found if hasattr(method, DISPATCH_ATTRIBUTE)}


@dataclass
class WorkerSpec:
    """A worker class with its constructor's arguments, to be built where it will run."""

    cls: type
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


class LocalWorkerGroup:
    """One worker in this process; its registered methods are this object's."""

    world_size = 1

    def __init__(self, spec: WorkerSpec) -> None:
        self.worker = spec.cls(*spec.args, **spec.kwargs)
        self._methods = registered_methods(spec.cls)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"{type(self.worker).__name__} has no registered method {name!r}")
        return getattr(self.worker, name)
