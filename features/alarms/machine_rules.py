"""Looks for throughput that falls and host memory that grows."""

from collections.abc import Iterator
from statistics import median

import psutil

from features.alarms.catalogue import Finding
from features.alarms.history import MEMORY, History, Metrics

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


def driver_memory() -> float:
    """Measures the memory of this process, in GiB."""
    return psutil.Process().memory_info().rss / 2**30


def falling_throughput(metrics: Metrics, history: History) -> Iterator[Finding]:
    """Finds a step of a third of the usual throughput that took much longer than usual."""
    past = history.values("perf/throughput")
    if len(past) < FEWEST_STEPS:
        return
    usual = median(past)
    usual_seconds = median(history.values("timing_s/step") or [0.0])
    throughput = metrics.get("perf/throughput", 0.0)
    took_longer = metrics.get("timing_s/step", 0.0) > usual_seconds + LONGER_S
    if 0 < throughput < usual * THROUGHPUT_SHARE and took_longer:
        yield Finding("throughput_falls", f"{throughput:.3g} tokens/s, {usual:.3g} is usual")


def growing_memory(metrics: Metrics, history: History) -> Iterator[Finding]:
    """Finds host memory that jumps, or that grows in every step."""
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
