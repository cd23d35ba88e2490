"""Finds the samplers of training rows that features bring, by the names of `data.sampler.name`."""

from __future__ import annotations

from data.names import unknown_name
from training.features import features, folder_without


def samplers() -> dict[str, str]:
    """Returns "module:function" of each sampler, by its name."""
    found: dict[str, str] = {}
    for feature in features().values():
        found |= feature.samplers
    return found


def named_sampler(name: str) -> str:
    """Returns "module:function" of a sampler.

    Raises:
        ValueError: no feature that is here brings it.
    """
    known = samplers()
    if name in known:
        return known[name]
    folder = folder_without("samplers", name)
    if folder is not None:
        raise ValueError(
            f"data.sampler.name={name} is a part of {folder}, which is not here: put the folder "
            "back, or take the setting out"
        )
    raise unknown_name("data.sampler.name", name, [*known, "null"])
