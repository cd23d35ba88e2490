"""Defines what the settings of formulas have in common: bounds of their types, reading by name.

Settings are plain frozen dataclasses, which import neither torch nor the configuration. A section
of the configuration that inherits them checks the bounds when it is made; `check_bounds` does for
settings that stand alone.
"""

from dataclasses import astuple
from functools import cache
from typing import Annotated, Any, get_type_hints

from annotated_types import Ge, Gt, Le

PositiveInt = Annotated[int, Gt(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
AboveOne = Annotated[float, Gt(1)]


class ByName:
    """Makes the fields of settings be had by name too, as estimators and losses of verl's do.

    Code of this project writes `config.gamma`, which a type checker can follow.
    """

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the field, else that entry of its custom_kwargs, else `default`."""
        try:
            return self[name]
        except KeyError:
            return default

    def __getitem__(self, name: str) -> Any:
        """Returns the field, else that entry of custom_kwargs; raises KeyError without either."""
        fields = vars(self)
        if name in fields:
            return fields[name]
        return fields.get("custom_kwargs", {})[name]


def check_bounds(settings: Any) -> None:
    """Checks the numbers of a settings dataclass against the bounds of their types.

    Raises:
        ValueError: a number is outside; None, and what is no number, is not looked at.
    """
    settings_type: Any = type(settings)
    for name, bounds in _bounds_of(settings_type).items():
        value = getattr(settings, name)
        if not isinstance(value, int | float):
            continue
        for kind, limit in bounds:
            if kind is Gt and not value > limit:
                raise ValueError(f"{name}={value} must be above {limit:g}")
            if kind is Ge and not value >= limit:
                raise ValueError(f"{name}={value} must be {limit:g} or more")
            if kind is Le and not value <= limit:
                raise ValueError(f"{name}={value} must be at most {limit:g}")


@cache
def _bounds_of(settings_type: Any) -> dict[str, list[tuple[type, float]]]:
    """Reads the bounds of each field from its type, which may be one or None."""
    bounds: dict[str, list[tuple[type, float]]] = {}
    for name, kind in get_type_hints(settings_type, include_extras=True).items():
        for alternative in (kind, *getattr(kind, "__args__", ())):
            for bound in getattr(alternative, "__metadata__", ()):
                # Each has one field, its limit.
                (limit,) = astuple(bound)
                bounds.setdefault(name, []).append((type(bound), limit))
    return bounds
