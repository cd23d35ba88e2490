"""Opens the probes of a run, by the names of the functions that make them.

Each function is named as "module:function" and returns a list of probes, an empty one where the
config turns them off; its module is imported only where a rank builds its models. One that raises
costs its own probes. Invariant: this is the one place that names probes, and every rank of a model
opens the same ones.
"""

import logging
import traceback
from typing import Any

import torch

from data.loading import load_object
from training.config import PPOConfig
from workers.model.builder import ModelSpec
from workers.model.probe import ReadProbe, SyncProbe, UpdateProbe, raises_faults
from workers.model.probe_set import first_fault
from workers.ranks.process_groups import rank

logger = logging.getLogger(__name__)

# (config, role) -> list[UpdateProbe], role being "actor" or "critic".
UPDATE_PROBES = (
    "workers.model.sampling_mismatch:update_probes",
    "features.alarms.probes:update_probes",
    "features.records.probes:update_probes",
)
# (config, role) -> list[ReadProbe], role being "ref".
READ_PROBES = ("features.alarms.probes:read_probes",)
# (config, spec, engine) -> list[SyncProbe]; the engine is None where a rank has the policy alone.
SYNC_PROBES = ("features.alarms.probes:sync_probes",)


def open_probes(config: PPOConfig, role: str) -> list[UpdateProbe]:
    """Makes the probes of an update; a collective.

    Args:
        role: "actor" or "critic".
    """
    return _open(UPDATE_PROBES, config, role)


def open_read_probes(config: PPOConfig, role: str) -> list[ReadProbe]:
    """Makes the probes of a model that is only read; a collective.

    Args:
        role: "ref".
    """
    return _open(READ_PROBES, config, role)


def open_sync_probes(config: PPOConfig, spec: ModelSpec, engine: Any) -> list[SyncProbe]:
    """Makes the probes of weight syncs; a collective.

    Args:
        spec: of the policy.
        engine: `BaseRollout`; None where this rank has none.
    """
    return _open(SYNC_PROBES, config, spec, engine)


def _open(sources: tuple[str, ...], *arguments: Any) -> list[Any]:
    """Calls the named functions; leaves out what one returns that raised on any rank."""
    probes = []
    for source in sources:
        opened: list[Any] = []
        fault = None
        try:
            opened = load_object(source, "probe")(*arguments)
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
