"""Says which charts a page shows of the metrics that there are.

A chart is a title, a unit, and lines: metrics with their names. The tables of metrics may name
further ones (`Metric.chart`). Invariant: a chart without a
metric of the run's is left out; every other metric is found by its name on the page.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from training.run.metric_names import Metric
from training.run.validation_names import is_validation_mean, short_name

# The parts of `timing_s/step`, in the order of a step; other sections come beside it.
SECTIONS = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
)
SECTION_NAMES = {
    "gen": "generation",
    "reward": "rewards",
    "old_log_prob": "old log-probs",
    "ref": "reference",
    "values": "values",
    "adv": "advantages",
    "update_critic": "critic's update",
    "update_actor": "policy's update",
    "update_weights": "weight sync",
    "save_checkpoint": "checkpoint",
}
ENDING = "agent/ending/"
TIMING = "timing_s/"
TOOL_FAILURES = re.compile("tool/.+/failures")
# So many of the sources, environments or tools are lines of a chart.
MOST_LINES = 8


@dataclass(frozen=True)
class Line:
    """Names a metric of a chart, and the metrics of its band.

    Attributes:
        tasks: the metric that counts the tasks behind it.
        beside: it is no part of the chart's whole.
        view: filters of the viewer, and its order, that show the episodes behind this line; "": no
            others than the chart's.
    """

    metric: str
    label: str
    low: str | None = None
    high: str | None = None
    tasks: str | None = None
    beside: bool = False
    view: str = ""


@dataclass(frozen=True)
class Chart:
    """Describes a chart.

    Attributes:
        unit: of its axis.
        view: filters of the viewer, and its order, that show the episodes behind a point; "" where
            none do.
        of_kind: of episodes: train, or val.
        kind: "lines"; "shares": the lines stacked, as parts of `whole`; "parts": the lines
            stacked, and what is missing to `whole`.
        left_out: lines that there was no room for.
    """

    key: str
    title: str
    unit: str
    lines: Sequence[Line]
    view: str = ""
    of_kind: str = "train"
    kind: str = "lines"
    whole: str | None = None
    left_out: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns it as the page's script reads it."""
        lines = []
        for line in self.lines:
            parts: dict[str, Any] = {"metric": line.metric, "label": line.label}
            if line.beside:
                parts["beside"] = True
            if line.view:
                parts["view"] = f"kind={self.of_kind}&{line.view}"
            bands = {"low": line.low, "high": line.high, "tasks": line.tasks}
            lines.append(parts | {name: metric for name, metric in bands.items() if metric})
        return {
            "key": self.key,
            "title": self.title,
            "unit": self.unit,
            "view": f"kind={self.of_kind}&{self.view}" if self.view else "",
            "kind": self.kind,
            "whole": self.whole,
            "leftOut": self.left_out,
            "lines": lines,
        }


@dataclass(frozen=True)
class _Plan:
    """Lists the metrics that a chart shows where the run has them."""

    key: str
    title: str
    unit: str
    metrics: dict[str, str]
    view: str = ""
    bands: dict[str, tuple[str, str]] = field(default_factory=dict)
    line_views: dict[str, str] = field(default_factory=dict)


LENGTH_BANDS = {
    "response_length/mean": ("response_length/min", "response_length/max"),
    "prompt_length/mean": ("prompt_length/min", "prompt_length/max"),
}
PLANS = {
    "length": _Plan(
        key="length",
        title="Length of responses and prompts",
        unit="tokens",
        metrics={
            "response_length/mean": "response, mean",
            "prompt_length/mean": "prompt, mean",
        },
        view="sort=-tokens",
        bands=LENGTH_BANDS,
    ),
    "turns": _Plan(
        key="turns",
        title="Turns of an episode",
        unit="turns",
        metrics={"agent/turns/mean": "mean", "agent/turns/max": "most"},
        view="sort=-turns",
    ),
    "episode_seconds": _Plan(
        key="episode_seconds",
        title="Seconds of an episode",
        unit="seconds",
        metrics={
            "agent/env_seconds/mean": "in its environment, mean",
            "agent/env_seconds/max": "in its environment, most",
            "agent/episode_seconds/max": "the longest episode",
        },
        view="sort=-seconds",
        line_views={
            "agent/env_seconds/mean": "sort=-env_seconds",
            "agent/env_seconds/max": "sort=-env_seconds",
        },
    ),
    "failures": _Plan(
        key="failures",
        title="Failed, retried and masked episodes",
        unit="episodes",
        metrics={
            "agent/failed": "failed",
            "agent/retries": "played again",
            "agent/masked": "not trained on",
        },
        view="sort=-attempts",
        line_views={
            "agent/failed": "failed=1",
            "agent/retries": "refilled=1&sort=-attempts",
            "agent/masked": "masked=1",
        },
    ),
    "nothing": _Plan(
        key="nothing",
        title="Nothing to learn from",
        unit="share",
        metrics={
            "groups/no_spread": "groups whose scores are equal",
            "response/empty_ratio": "episodes without a word",
            "response/aborted_ratio": "episodes without a token to train on",
        },
        view="spread=0",
        line_views={
            "groups/no_spread": "spread=0&sort=-reward",
            "response/empty_ratio": "empty=1&sort=-reward",
            "response/aborted_ratio": "masked=1",
        },
    ),
    "rows": _Plan(
        key="rows",
        title="Rows of an episode",
        unit="rows",
        metrics={"response/rows_per_episode": "mean (1: each is one sequence)"},
        view="rows=2..&sort=-rows",
    ),
    "entropy": _Plan(
        key="entropy",
        title="Entropy of the policy",
        unit="nats per token",
        metrics={"actor/entropy": "during the update", "actor/old_entropy": "before the update"},
        view="sort=entropy",
    ),
    "kl": _Plan(
        key="kl",
        title="KL divergence",
        unit="nats per token",
        metrics={
            "actor/ppo_kl": "update from the old policy",
            "actor/kl_loss": "policy from the reference (in the loss)",
            "actor/reward_kl_penalty": "policy from the reference (in the reward)",
        },
        view="sort=-kl",
    ),
    "mismatch": _Plan(
        key="mismatch",
        title="Engine against trainer",
        unit="difference",
        metrics={
            "training/rollout_probs_diff_mean": "sampled tokens' probability, mean difference",
            "canary/difference": "canaries' log-prob, nats per token",
            "training/rollout_kl": "KL, nats per token",
        },
        view="sort=-mismatch",
    ),
    "gradient": _Plan(
        key="gradient",
        title="Norm of the gradient, before clipping",
        unit="norm",
        metrics={"actor/grad_norm": "policy", "critic/grad_norm": "critic"},
        view="sort=-gradient",
    ),
    "clip": _Plan(
        key="clip",
        title="Tokens whose ratio was clipped",
        unit="share of tokens",
        metrics={"actor/pg_clipfrac": "policy", "critic/vf_clipfrac": "critic's values"},
        view="sort=-ratio",
        line_views={"actor/pg_clipfrac": "fate=clipped&sort=-ratio"},
    ),
    "critic": _Plan(
        key="critic",
        title="Variance of the returns that values explain",
        unit="share (1 is all)",
        metrics={"critic/vf_explained_var": "explained variance"},
    ),
    "rate": _Plan(
        key="rate",
        title="Learning rate",
        unit="rate",
        metrics={"actor/lr": "policy", "critic/lr": "critic"},
    ),
    "throughput": _Plan(
        key="throughput",
        title="Throughput, prompts included",
        unit="tokens per second and rank",
        metrics={"perf/throughput": "tokens per second"},
        view="sort=-seconds",
    ),
}


def charts_of(names: Sequence[str], find: Callable[[str], Metric | None]) -> list[Chart]:
    """Lists the charts of a run, or runs, with these metrics, in the order of the page.

    Args:
        find: describes a metric by its name; None: a table has it not.
    """
    known = set(names)
    charts = [
        _reward(names),
        *_validation(names),
        _planned(PLANS["length"], known),
        _planned(PLANS["turns"], known),
        _endings(names),
        *[_planned(PLANS[key], known) for key in ("failures", "nothing", "rows")],
        _tools(names),
        *[_planned(PLANS[key], known) for key in ("entropy", "kl", "mismatch")],
        *[_planned(PLANS[key], known) for key in ("gradient", "clip", "critic", "rate")],
        _planned(PLANS["throughput"], known),
        _planned(PLANS["episode_seconds"], known),
        _step_time(names),
        _memory(names, find),
        *_named_by_tables(names, find),
    ]
    return [chart for chart in charts if chart is not None and chart.lines]


def _planned(plan: _Plan, known: set[str]) -> Chart:
    lines = []
    for metric, label in plan.metrics.items():
        if metric in known:
            low, high = plan.bands.get(metric, (None, None))
            has_band = low in known and high in known
            lines.append(
                Line(
                    metric=metric,
                    label=label,
                    low=low if has_band else None,
                    high=high if has_band else None,
                    view=plan.line_views.get(metric, ""),
                )
            )
    return Chart(key=plan.key, title=plan.title, unit=plan.unit, lines=lines, view=plan.view)


def _reward(names: Sequence[str]) -> Chart:
    """Shows the mean reward of an episode, and each environment's where there are several."""
    lines = []
    if "critic/score/mean" in names:
        lines.append(Line("critic/score/mean", "mean of the step's episodes"))
    environments = [name for name in names if name.startswith("env/") and name.endswith("/reward")]
    room = MOST_LINES - len(lines)
    for name in environments[:room]:
        source = name.removeprefix("env/").removesuffix("/reward")
        view = f"source={quote(source, safe='')}&sort=-reward"
        lines.append(Line(name, source, view=view))
    return Chart(
        key="reward",
        title="Reward of an episode",
        unit="reward",
        lines=lines,
        view="sort=-reward",
        left_out=max(0, len(environments) - room),
    )


def _validation(names: Sequence[str]) -> Iterator[Chart]:
    """Shows each source's mean validation reward, with its interval where the run computed one."""
    known = set(names)
    means = [name for name in names if is_validation_mean(name)]
    lines = []
    for name in means[:MOST_LINES]:
        low = _companion(name, "ci_low", known)
        high = _companion(name, "ci_high", known)
        lines.append(
            Line(
                metric=name,
                label=short_name(name),
                low=low if high else None,
                high=high if low else None,
                tasks=_companion(name, "tasks", known),
            )
        )
    yield Chart(
        key="validation",
        title="Reward in validation",
        unit="reward",
        lines=lines,
        view="sort=-reward",
        of_kind="val",
        left_out=max(0, len(means) - MOST_LINES),
    )


def _companion(name: str, suffix: str, known: set[str]) -> str | None:
    """Finds NAME/suffix, or PARENT/suffix for a parent of NAME; None where there is neither."""
    stem = name
    while stem.count("/") >= 1:
        if f"{stem}/{suffix}" in known:
            return f"{stem}/{suffix}"
        stem = stem.rsplit("/", 1)[0]
    return None


def _endings(names: Sequence[str]) -> Chart:
    """Stacks the ways in which episodes ended, as shares of all."""
    endings = {name: name.removeprefix(ENDING) for name in names if name.startswith(ENDING)}
    return Chart(
        key="endings",
        title="How episodes ended",
        unit="share of episodes",
        lines=[
            Line(name, ending, view=f"ending={quote(ending, safe='')}&sort=-reward")
            for name, ending in endings.items()
        ],
        kind="shares",
        view="sort=-reward",
    )


def _tools(names: Sequence[str]) -> Chart:
    """Shows how many calls of each tool failed."""
    failures = [name for name in names if TOOL_FAILURES.fullmatch(name)]
    lines = []
    for name in failures[:MOST_LINES]:
        tool = name.removeprefix("tool/").removesuffix("/failures")
        lines.append(Line(name, tool, view=f"tool={quote(tool, safe='')}&sort=reward"))
    return Chart(
        key="tools",
        title="Tool calls that failed",
        unit="calls",
        lines=lines,
        view="sort=reward",
        left_out=max(0, len(failures) - MOST_LINES),
    )


def sections_of(names: Sequence[str]) -> list[str]:
    """Lists the timed sections that lie within a step, in their order."""
    return [section for section in SECTIONS if TIMING + section in names]


def sections_beside(names: Sequence[str]) -> list[str]:
    """Lists the timed sections beside a step's own seconds."""
    timed = [name.removeprefix(TIMING) for name in names if name.startswith(TIMING)]
    return [name for name in timed if name not in SECTIONS and name != "step"]


def section_name(section: str) -> str:
    """Returns a section's name for people."""
    return SECTION_NAMES.get(section, section.replace("_", " "))


def _step_time(names: Sequence[str]) -> Chart:
    """Stacks a step's sections; what they lack to the whole step is shown as other work."""
    lines = [Line(TIMING + section, section_name(section)) for section in sections_of(names)]
    beside = []
    for section in sections_beside(names):
        beside.append(Line(TIMING + section, section_name(section), beside=True))
    return Chart(
        key="step_time",
        title="Where a step's time goes",
        unit="seconds",
        lines=[*lines, *beside],
        kind="parts",
        whole=TIMING + "step" if TIMING + "step" in names else None,
        view="sort=-seconds",
    )


def _memory(names: Sequence[str], find: Callable[[str], Metric | None]) -> Chart:
    """Shows every metric of memory."""
    memory = [name for name in names if "memory" in name and name.endswith("_gib")]
    lines = []
    for name in memory[:MOST_LINES]:
        metric = find(name)
        lines.append(Line(name, metric.meaning.rstrip(".") if metric else name))
    return Chart(key="memory", title="Memory", unit="GiB", lines=lines)


def _named_by_tables(names: Sequence[str], find: Callable[[str], Metric | None]) -> Iterator[Chart]:
    """Shows together the metrics for which tables name the same chart, in the unit of the first."""
    shown: dict[str, list[str]] = {}
    units: dict[str, str] = {}
    for name in names:
        metric = find(name)
        if metric is not None and metric.chart:
            shown.setdefault(metric.chart, []).append(name)
            units.setdefault(metric.chart, metric.unit)
    for title, of_chart in shown.items():
        yield Chart(
            key=f"table/{title}",
            title=title,
            unit=units[title],
            lines=[Line(name, name) for name in evenly(of_chart, MOST_LINES)],
            left_out=max(0, len(of_chart) - MOST_LINES),
        )


def evenly(names: Sequence[str], most: int) -> list[str]:
    """Picks at most so many names, the first, the last and what lies evenly between them."""
    if len(names) <= most:
        return list(names)
    gap = (len(names) - 1) / (most - 1)
    return [names[round(number * gap)] for number in range(most)]
