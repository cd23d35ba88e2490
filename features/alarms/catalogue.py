"""Finds the rules of `rules/`, and says of each alarm what to check and which episodes show it.

features/alarms/README.md says what each means.
"""

import importlib
import pkgutil
from urllib.parse import quote

from features.alarms import rules
from features.alarms.finding import Finding
from features.alarms.rule import ALARMS, RULES, Alarm, Rule


def _import_rules() -> None:
    """Imports each file of `rules/`: its rules register themselves."""
    for module in pkgutil.iter_modules(rules.__path__, prefix=f"{rules.__name__}."):
        importlib.import_module(module.name)


_import_rules()

# What to check, by alarm.
ADVICE = {name: alarm.advice for name, alarm in ALARMS.items()}


def rules_in_order() -> list[Rule]:
    """Lists the rules in the order in which they run, and in which findings are told.

    Raises:
        ValueError: a rule names an alarm that none describes.
    """
    for rule in RULES.values():
        unknown = sorted(rule.alarms - ALARMS.keys())
        if unknown:
            raise ValueError(
                f"the rule {rule.name} rings {', '.join(unknown)}, and no @rule line says what to "
                "check then: give it advice=..."
            )
    return sorted(RULES.values(), key=lambda rule: rule.order)


def view_of(finding: Finding, step: int) -> str:
    """Returns the viewer's address, behind its #, of what a finding of this step is about."""
    # An older run may name an alarm that is no more.
    alarm = ALARMS.get(finding.alarm, Alarm(name=finding.alarm, advice=""))
    place = finding.place
    if place.episode:
        address = f"episode/0/train/{step}/{quote(place.episode, safe='')}?row={place.row}"
        if place.token is not None:
            address += f"&token={place.token}"
        return f"{address}&color={alarm.color}" if alarm.color else address
    if place.group:
        return f"group/0/train/{step}/{quote(place.group, safe='')}"
    parts = ["kind=train"]
    if not alarm.of_any_step:
        parts.append(f"step={step}")
    if alarm.view:
        parts.append(alarm.view)
    return f"list?{'&'.join(parts)}"
