"""Says in one line when something silently goes wrong in a run: alarms.mode.

What other features ask of alarms stands here.
"""

from pathlib import Path

from features.alarms.settings import AlarmSettings
from training.features import Feature

FEATURE = Feature(
    section=AlarmSettings,
    checks="features.alarms.settings:config_problems",
    moved_keys={"trainer.alarms": "alarms.mode"},
    moved_modules={
        "training.run.alarms": "features.alarms",
        "workers.weight_sync.canary": "features.alarms.probes.canary",
    },
    observer="features.alarms.monitor:open_alarms",
    probes="features.alarms.probes:update_probes",
    read_probes="features.alarms.probes:read_probes",
    sync_probes="features.alarms.probes:sync_probes",
    # First: what rings in a step is a notice to those that record it.
    observer_order=10,
    metrics="metric_names.yaml",
)


def advice_on(alarm: str) -> str:
    """Returns what to check when an alarm rings; "" of an unknown one."""
    from features.alarms.catalogue import ADVICE

    return ADVICE.get(alarm, "")


def view_of_step(alarm: str, step: int) -> str:
    """Returns the viewer's address, behind its #, of the episodes that show an alarm of a step."""
    from features.alarms.catalogue import view_of
    from features.alarms.finding import Finding

    return view_of(Finding(alarm, ""), step)


def page() -> Path | None:
    """Returns the page that says what each alarm means, where it is there."""
    from features.alarms import alarms_page

    return alarms_page.page()


def meanings() -> dict[str, str]:
    """Returns what each alarm means, as far as the alarms' page is there."""
    from features.alarms import alarms_page

    return alarms_page.meanings()
