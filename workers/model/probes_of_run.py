"""Opens the probes of a run: the core's own, and those that features bring.

Each function is named as "module:function" and returns a list of probes, an empty one where the
config turns them off; its module is imported only where a rank builds its models. One that raises
costs its own probes. Invariant: every rank of a model opens the same ones.
"""

import logging
import traceback
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from data.loading import load_object
from training.config import PPOConfig
from training.features import named
from workers.model.builder import ModelSpec
from workers.model.probe import Probe, ReadProbe, SyncProbe, UpdateProbe, raises_faults
from workers.model.probe_set import first_fault
from workers.ranks.process_groups import rank

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=Probe)

# The core's own: what verl logs of an update, and what it computed.
OWN_PROBES = (
    "workers.model.sampling_mismatch:update_probes",
    "workers.model.token_counts:update_probes",
)


def open_probes(config: PPOConfig, role: str) -> list[UpdateProbe]:
    """Makes the probes of an update; a collective.

    Args:
        role: "actor" or "critic".
    """
    return _open(UpdateProbe, [*OWN_PROBES, *_of_features("probes")], config, role)


def open_read_probes(config: PPOConfig, role: str) -> list[ReadProbe]:
    """Makes the probes of a model that is only read; a collective.

    Args:
        role: "ref".
    """
    return _open(ReadProbe, _of_features("read_probes"), config, role)


def open_sync_probes(config: PPOConfig, spec: ModelSpec, engine: Any) -> list[SyncProbe]:
    """Makes the probes of weight syncs; a collective.

    Args:
        spec: of the policy.
        engine: `BaseRollout`; None where this rank has none.
    """
    return _open(SyncProbe, _of_features("sync_probes"), config, spec, engine)


def _of_features(attribute: str) -> list[str]:
    """Lists the functions that features bring for one kind of probes, as "module:function"."""
    return [place for _, place in named(attribute)]


def _open(kind: type[Kind], sources: Sequence[str], *arguments: Any) -> list[Kind]:
    """Calls the named functions; leaves out what one returns that raised on any rank."""
    probes: list[Kind] = []
    for source in sources:
        opened: list[Kind] = []
        fault = None
        try:
            opened = _require_probes(kind, load_object(source, "probe")(*arguments))
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception:
            if raises_faults():
                raise
            fault = traceback.format_exc().strip()
        fault = first_fault(fault)
        if fault is None:
            probes += opened
        elif rank() == 0:
            logger.warning(
                "the probes of %s could not be made, and what they measure is missing: %s",
                source,
                fault,
            )
    return probes


def _require_probes(kind: type[Kind], returned: Any) -> list[Kind]:
    """Returns what a function returned, as a list of probes.

    Raises:
        TypeError: it is none.
    """
    if isinstance(returned, Sequence) and all(isinstance(probe, kind) for probe in returned):
        return list(returned)
    raise TypeError(
        f"{returned!r} was returned: return a list of {kind.__name__}, an empty one where there is "
        "nothing to measure"
    )
