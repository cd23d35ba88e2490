"""Looks for tools that answer every call with an error of their own code.

Invariant: what the policy does wrong, as an unknown tool or wrong arguments, is no fault of a tool.
"""

from __future__ import annotations

from collections.abc import Iterator

from features.alarms.finding import Finding, place_of
from features.alarms.rule import rule
from features.alarms.seen_step import SeenStep

# The fewest calls of a tool in a step; fewer that fail may be chance.
FEWEST_CALLS = 8
# The kind of error that a tool's code raises, and kinds of calls that never come to its code.
RAISED = "exception"
NOT_RUN = ("unknown_tool", "bad_json", "bad_arguments")


@rule(
    "tool_fails",
    advice=(
        "the tool's code, or its server: the episodes have what it answered, the log has the "
        "first exception of its code"
    ),
    waits=True,
    view="sort=-turns",
    order=110,
)
def failing_tools(seen: SeenStep) -> Iterator[Finding]:
    """Finds tools whose code raised an exception at each call of a step."""
    batch = seen.batch
    episodes = seen.episodes
    columns = batch.non_tensor_batch
    facts = columns.get("episode_facts")
    if facts is None:
        return
    ids = columns["episode_id"]
    calls: dict[str, int] = {}
    has_answered: set[str] = set()
    # The row of the first call.
    rows: dict[str, int] = {}
    counted: set[str] = set()
    for row in episodes.first.tolist():
        known = facts[row]
        # Several agents of an episode share its facts.
        if not known or not episodes.real[row] or ids[row] in counted:
            continue
        counted.add(ids[row])
        for call in known["tool_calls"]:
            if call["error_kind"] in NOT_RUN:
                continue
            name = call["name"]
            rows.setdefault(name, row)
            calls[name] = calls.get(name, 0) + 1
            if call["error_kind"] != RAISED:
                has_answered.add(name)
    failing = [
        name for name, count in calls.items() if count >= FEWEST_CALLS and name not in has_answered
    ]
    if failing:
        counts = ", ".join(f"all {calls[name]} calls of {name}" for name in failing)
        text = f"{counts} failed by an exception"
        yield Finding("tool_fails", text, place_of(batch, rows[failing[0]]))
