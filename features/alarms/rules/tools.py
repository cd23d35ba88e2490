"""Looks for tools that answer every call with an error of their own code, and for cut answers.

Invariant: what the policy does wrong, as an unknown tool or wrong arguments, is no fault of a tool.
"""

from __future__ import annotations

from collections.abc import Iterator

from features.alarms.finding import Finding, Place, place_of
from features.alarms.rule import rule
from features.alarms.seen_step import SeenStep

# The fewest calls of a tool in a step; fewer that fail may be chance.
FEWEST_CALLS = 8
# The kind of error that a tool's code raises, and kinds of calls that never come to its code.
RAISED = "exception"
NOT_RUN = ("unknown_tool", "bad_json", "cut", "bad_arguments")
# The share of a tool's results, or of an environment's replies, that are cut.
MOST_CUT = 0.25


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


@rule(
    "observations_cut",
    advice=(
        "agent.max_observation_chars, or what writes so much: nobody reads what is left out, and "
        "an answer may stand there"
    ),
    waits=True,
    view="sort=-turns",
    settings=("agent.max_observation_chars", "agent.tools"),
    order=112,
)
def cut_observations(seen: SeenStep) -> Iterator[Finding]:
    """Finds tools, or else environments, whose texts are longer than an observation may be."""
    most = seen.config.agent.max_observation_chars
    for name in sorted(_tools_with_cut_results(seen)):
        calls = seen.metrics[f"tool/{name}/calls"]
        cut = seen.metrics[f"tool/{name}/cut"]
        yield Finding(
            "observations_cut",
            f"{cut:.0f} of {calls:.0f} results of {name} are cut at "
            f"agent.max_observation_chars={most}",
            _place_of_cut(seen, name),
        )
    cut = seen.metrics.get("agent/cut_observations", 0.0)
    turns = seen.metrics.get("agent/episodes", 0.0) * seen.metrics.get("agent/turns/mean", 0.0)
    if turns >= FEWEST_CALLS and cut >= MOST_CUT * turns:
        yield Finding(
            "observations_cut",
            f"replies to {cut:.0f} of {turns:.0f} turns are cut at "
            f"agent.max_observation_chars={most}",
        )


def _tools_with_cut_results(seen: SeenStep) -> Iterator[str]:
    """Yields the tools of whose results many are cut."""
    for metric, cut in seen.metrics.items():
        if not (metric.startswith("tool/") and metric.endswith("/cut")):
            continue
        name = metric.removeprefix("tool/").removesuffix("/cut")
        calls = seen.metrics[f"tool/{name}/calls"]
        if calls >= FEWEST_CALLS and cut >= MOST_CUT * calls:
            yield name


def _place_of_cut(seen: SeenStep, name: str) -> Place:
    """Says in which episode a result of the tool was cut."""
    for rows, facts in seen.played_episodes():
        for call in facts["tool_calls"]:
            if call["name"] == name and "chars_left_out" in call:
                return place_of(seen.batch, rows[0])
    return Place()
