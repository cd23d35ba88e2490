"""Looks for throughput that falls and host memory that grows."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from features.alarms.finding import Finding
from features.alarms.rule import rule
from features.alarms.seen_step import MEMORY, SeenStep

# A step that takes so many seconds more than usual is no accident: of short steps the machine's
# other work makes more.
LONGER_S = 1.0
THROUGHPUT_SHARE = 1 / 3
FEWEST_STEPS = 3
# A jump of memory in one step, and a growth over all the steps that are remembered: GiB, and the
# share of what there was.
JUMP_GIB = 0.5
JUMP_SHARE = 0.1
GROWTH_GIB = 1.0
GROWTH_SHARE = 0.2


@rule(
    "throughput_falls",
    advice=(
        "what else runs here, and the environment; timing_s/* say which section of the step grew"
    ),
    waits=True,
    view="sort=-seconds",
    order=340,
)
def falling_throughput(seen: SeenStep) -> Iterator[Finding]:
    """Finds a step of a third of the usual throughput that took much longer than usual."""
    metrics = seen.metrics
    history = seen.history
    past = history.values("perf/throughput")
    if len(past) < FEWEST_STEPS:
        return
    usual = median(past)
    usual_seconds = median(history.values("timing_s/step") or [0.0])
    throughput = metrics.get("perf/throughput", 0.0)
    took_longer = metrics.get("timing_s/step", 0.0) > usual_seconds + LONGER_S
    if 0 < throughput < usual * THROUGHPUT_SHARE and took_longer:
        yield Finding("throughput_falls", f"{throughput:.3g} tokens/s, {usual:.3g} is usual")


@rule(
    "memory_grows",
    advice="what keeps steps' data alive: environments, hooks, reward functions, caches",
    waits=True,
    view="sort=-tokens",
    order=350,
)
def growing_memory(seen: SeenStep) -> Iterator[Finding]:
    """Finds host memory that jumps, or that grows in every step."""
    metrics = seen.metrics
    history = seen.history
    for name in ("perf/driver_memory_gib", "perf/rank_memory_gib"):
        sizes = [*history.values(name), metrics.get(name, 0.0)]
        first = sizes[0]
        last = sizes[-1]
        jumps = False
        if len(sizes) > FEWEST_STEPS:
            before = sizes[-2]
            jumps = last - before > max(JUMP_GIB, JUMP_SHARE * before)
        grows_always = len(sizes) > MEMORY and sizes == sorted(set(sizes))
        grows_much = last - first > max(GROWTH_GIB, GROWTH_SHARE * first)
        if jumps or (grows_always and grows_much):
            steps = len(sizes) - 1
            yield Finding(
                "memory_grows", f"{name} grew from {first:.3g} to {last:.3g} in {steps} steps"
            )
