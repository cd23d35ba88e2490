"""Looks for throughput that falls and host memory that grows."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from statistics import median

from features.alarms.finding import Finding
from features.alarms.rule import RulesWithMemory, rule
from features.alarms.seen_step import MEMORY, SeenStep
from training.observers import ObservedRun

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
# Steps whose memory is looked at for a small growth that goes on and on: it is one where the median
# of each part of them lies above the one before, by MiB a step, and the last parts do not grow more
# slowly than the first ones, as caches do that fill up.
SLOPE_STEPS = 240
SLOPE_PARTS = 6
SLOPE_MIB = 0.08
FILLING_UP = 0.6
MEMORIES = ("perf/driver_memory_gib", "perf/rank_memory_gib")


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
    for name in MEMORIES:
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


class MemoryRules(RulesWithMemory):
    """Watches for memory that grows by little, and without end.

    A process that goes on from a checkpoint begins anew.
    """

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self.sizes: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SLOPE_STEPS))

    @rule("memory_grows", order=350)
    def creeping_memory(self, seen: SeenStep) -> Iterator[Finding]:
        """Finds host memory that has grown all the time."""
        for name in MEMORIES:
            if name not in seen.metrics:
                continue
            sizes = self.sizes[name]
            sizes.append(seen.metrics[name])
            slope = steady_slope(list(sizes))
            if slope is not None:
                yield Finding(
                    "memory_grows",
                    f"{name} grows all the time, by {1024 * slope:.2g} MiB a step over the last "
                    f"{len(sizes)} steps",
                )


def steady_slope(sizes: Sequence[float]) -> float | None:
    """Returns by how much memory grows in a step, GiB; None where it does not, or will not go on.

    Args:
        sizes: GiB, of one step after another.
    """
    if len(sizes) < SLOPE_STEPS:
        return None
    width = len(sizes) // SLOPE_PARTS
    middles = [median(sizes[part * width : (part + 1) * width]) for part in range(SLOPE_PARTS)]
    growths = [later - earlier for earlier, later in itertools.pairwise(middles)]
    slope = sum(growths) / len(growths) / width
    half = len(growths) // 2
    first = sum(growths[:half]) / half
    last = sum(growths[-half:]) / half
    grows_always = min(growths) > 0
    goes_on = min(growths[-1], last) > FILLING_UP * first
    if grows_always and goes_on and slope > SLOPE_MIB / 1024:
        return slope
    return None
