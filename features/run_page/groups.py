"""Groups runs that differ in nothing but seeds, folders and names, and says how groups differ."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from features.run_page.curves import Curve, curve_of, mean_of_runs
from features.run_page.run_folder import RunFolder
from features.run_page.settings import of_repetition, seeds_of, table_of_differences

# A group's name has the settings that make it another, at most so many.
MOST_KEYS_IN_NAME = 3
MOST_VALUE_CHARS = 40


@dataclass(frozen=True)
class Group:
    """Holds the runs that make one line of each chart."""

    name: str
    runs: Sequence[RunFolder]

    @property
    def names(self) -> list[str]:
        """Lists the metrics that any of the runs has."""
        found: set[str] = set()
        for run in self.runs:
            found.update(run.metrics.names)
        return sorted(found)

    def curve(self, name: str, most: int) -> Curve:
        """Returns a metric's curve, of so many points at most.

        It is a run's own, or the mean over those that have the metric.
        """
        having = [run.metrics.column(name) for run in self.runs if name in run.metrics]
        if len(self.runs) == 1:
            return curve_of(*having[0], most)
        return mean_of_runs(having, most)


def group_runs(runs: Sequence[RunFolder]) -> list[Group]:
    """Groups runs, in their order; one without recorded settings is a group of its own.

    Runs of other code are no repetitions, whatever their settings.
    """
    members: dict[str, list[RunFolder]] = {}
    for run in runs:
        key = f"{of_repetition(run.settings)} {run.code}" if run.settings else str(run.path)
        members.setdefault(key, []).append(run)
    differing = differences([group[0] for group in members.values()])
    names = names_of(runs)
    groups = []
    for number, group in enumerate(members.values()):
        name = _name_of(number, differing)
        if not name:
            name = names[group[0].path] if len(group) == 1 else _common_name(group)
        if len(group) > 1:
            name = f"{name} ({_count(group)})"
        groups.append(Group(name=name, runs=group))
    return groups


def differences(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Lists the settings in which runs differ, seeds left out: key, each one's value.

    The digest of the code stands first, where that differs.
    """
    if len(runs) < 2 or not all(run.settings for run in runs):
        return []
    codes = [run.code or "not recorded" for run in runs]
    rows = [("code", codes)] if len(set(codes)) > 1 else []
    return rows + table_of_differences([run.settings for run in runs])


def _count(runs: Sequence[RunFolder]) -> str:
    """Counts repetitions: seeds, where each run has its own, else runs."""
    seeds = {str(seeds_of(run.settings)) for run in runs}
    return f"{len(runs)} {'seeds' if len(seeds) == len(runs) else 'runs'}"


def _name_of(number: int, differing: Sequence[tuple[str, list[str]]]) -> str:
    """Names a group by what makes it another; "" where nothing, or too much, does."""
    if not differing or len(differing) > MOST_KEYS_IN_NAME:
        return ""
    parts = []
    for key, values in differing:
        parts.append(f"{key.rsplit('.', 1)[-1]}={values[number][:MOST_VALUE_CHARS]}")
    return " ".join(parts)


def names_of(runs: Sequence[RunFolder]) -> dict[Path, str]:
    """Names runs by their paths, without the part that all have; one alone by its last two."""
    if len(runs) == 1:
        return {runs[0].path: runs[0].name}
    common = Path(os.path.commonpath([run.path.parent for run in runs]))
    return {run.path: str(run.path.relative_to(common)) for run in runs}


def _common_name(runs: Sequence[RunFolder]) -> str:
    """Names repetitions: by their folders' name without its number, or by the folder of all."""
    names = {run.path.name.rstrip("-_. 0123456789") for run in runs}
    if len(names) == 1 and "" not in names:
        return names.pop()
    return Path(os.path.commonpath([run.path for run in runs])).name


def table_of_groups(groups: Sequence[Group]) -> dict[str, Any]:
    """Makes the page's table of what differs between groups."""
    rows = differences([group.runs[0] for group in groups])
    return {
        "groups": [group.name for group in groups],
        "rows": [{"key": key, "values": values} for key, values in rows],
    }
