"""Lists ways from a run's page into its episodes, with how much there is to see on each.

Invariant: a way of whose metric the run has nothing leads to nothing, and is left out.
"""

from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from features.run_page.metric_store import MetricStore

TOOL = "tool/"


@dataclass(frozen=True)
class Look:
    """Describes a way into the episodes.

    Attributes:
        view: the viewer's address of a list: filters and order.
        metric: how much there is to see; "": it is not counted.
        kind: what the metric is: a count of a step, a share of it, or its largest value.
        nothing: the metric's value where there is nothing to see.
    """

    words: str
    view: str
    metric: str = ""
    kind: Literal["count", "share", "largest"] = "count"
    nothing: float = 0.0


LOOKS = (
    Look("crashed and played again", "refilled=1&sort=-attempts", "agent/retries"),
    Look("failed", "failed=1&sort=-step", "agent/failed"),
    Look("not trained on", "masked=1&sort=-step", "agent/masked"),
    Look(
        "without a word, the best paid first",
        "empty=1&sort=-reward",
        "response/empty_ratio",
        "share",
    ),
    Look("groups whose scores are equal", "spread=0&sort=-reward", "groups/no_spread", "share"),
    Look("a turn was cut at its limit", "cut=1&sort=-tokens", "agent/cut_turns"),
    Look(
        "tokens whose ratio was clipped", "fate=clipped&sort=-ratio", "actor/pg_clipfrac", "share"
    ),
    Look(
        "more than one row: a history was rewritten, or a conversation began anew",
        "rows=2..&sort=-rows",
        "response/rows_per_episode",
        "largest",
        nothing=1.0,
    ),
    Look("sampled by older weights", "stale=1&sort=-mismatch", "async/staleness_max", "largest"),
    Look(
        "engine and trainer differ most",
        "sort=-mismatch",
        "training/rollout_probs_diff_max",
        "largest",
    ),
)


def looks_of(metrics: MetricStore, last_step: int) -> list[dict[str, Any]]:
    """Returns the ways of a run: words, a note of how much there is, and the viewer's address."""
    rows = [
        _row(Look("all of the last step", f"step={last_step}&sort=-reward"), ""),
        _row(Look("the best paid", "sort=-reward"), ""),
        _row(Look("the worst paid", "sort=reward"), ""),
    ]
    for look in (*LOOKS, *_tool_looks(metrics)):
        steps, values = metrics.column(look.metric)
        finite = np.where(np.isfinite(values), values, look.nothing)
        if finite.max(initial=look.nothing) > look.nothing:
            rows.append(_row(look, _note(look, steps, finite)))
    return rows


def _tool_looks(metrics: MetricStore) -> list[Look]:
    """Makes a way for each tool of which a call failed."""
    looks = []
    for name in metrics.names:
        if name.startswith(TOOL) and name.endswith("/failures"):
            tool = name.removeprefix(TOOL).removesuffix("/failures")
            view = f"tool={quote(tool, safe='')}&sort=reward"
            looks.append(Look(f"calls of {tool} that failed", view, name))
    return looks


def _row(look: Look, note: str) -> dict[str, Any]:
    return {"words": look.words, "note": note, "view": f"list?kind=train&{look.view}"}


def _note(look: Look, steps: np.ndarray, values: np.ndarray) -> str:
    """Says how much there is to see, and at which step there is most."""
    largest = float(values.max())
    step = int(steps[values.argmax()])
    if look.kind == "count":
        return f"{values.sum():g}, most at step {step}"
    if look.kind == "share":
        return f"up to {largest:.2g} of a step, at step {step}"
    return f"up to {largest:.2g}, at step {step}"
