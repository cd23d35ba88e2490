"""Measures whether the members of a group meet the same first observation.

For every adapter, with every isolation, over thousands of seeds.

Two members of each group are reset at once, among those of other groups, while another thread draws
from the global generators as an environment does (`OwnGenerators`), or with --foreign as code does
that knows nothing of it; that changes games of textarena's in threads. A difference is an error of
the adapter's or of the home's.

python -m tests.benchmarks.same_tasks [--seeds 10000] [--isolation thread process ray] [--foreign]
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import threading
import time
from contextlib import nullcontext

import numpy as np

from custom.agent import AgentSpec
from custom.own_generators import OwnGenerators
from workers.environments.pool import Answer, EnvironmentPool

TEXTARENA = (
    "Sokoban",
    "RushHour",
    "GuessTheNumber",
    "Mastermind",
    "FrozenLake",
    "TowerOfHanoi",
    "Minesweeper",
    "Sudoku",
)
REASONING_GYM = (
    *(
        "chain_sum",
        "countdown",
        "prime_factorization",
        "sokoban",
        "mini_sudoku",
        "rush_hour",
        "maze",
        "word_ladder",
    ),
    *(
        "leg_counting",
        "tower_of_hanoi",
        "graph_color",
        "letter_jumble",
        "knights_knaves",
        "simple_equations",
    ),
)
GAMES = {
    "gymnasium": (
        "FrozenLake-v1",
        "Taxi-v4",
        "Blackjack-v1",
        "CliffWalking-v1",
        "CartPole-v1",
        "MountainCar-v0",
    ),
    "reasoning_gym": REASONING_GYM,
    "textarena": tuple(f"{game}-v0" for game in TEXTARENA),
    "textworld": ("tw-coin_collector", "tw-simple"),
}
# So many groups are under way at once.
TOGETHER = 8
# A game whose resets take longer than this altogether is played with fewer seeds.
LONGEST_S = 40.0


def compare(name: str, isolation: str, seeds: int) -> tuple[int, int, str]:
    """Resets two members under each seed.

    Returns the groups compared, those that differ, and the first error.
    """
    compared = different = 0
    error, end = "", time.monotonic() + LONGEST_S
    with EnvironmentPool([AgentSpec(name)], isolation=isolation) as pool:  # type: ignore[arg-type]
        for first in range(0, seeds, TOGETHER):
            keys = [
                (seed, member)
                for seed in range(first, min(first + TOGETHER, seeds))
                for member in (0, 1)
            ]
            random.Random(first).shuffle(keys)
            for key in keys:
                pool.reset(key, 0, key[0])
            replies = dict(collect(pool, len(keys)))
            error = error or next((reply.error for reply in replies.values() if reply.failure), "")
            begun = [key for key, reply in replies.items() if not reply.failure]
            for key in begun:
                pool.finish(key, "max_turns")
            collect(pool, len(begun))
            for seed in {key[0] for key in keys}:
                begins = [
                    repr(replies[seed, member].messages)
                    for member in (0, 1)
                    if (seed, member) in begun
                ]
                compared += len(begins) == 2
                different += len(set(begins)) > 1
            if time.monotonic() > end or error:
                break
    return compared, different, error


def collect(pool: EnvironmentPool, count: int) -> list[Answer]:
    """Waits for so many replies."""
    replies: list[Answer] = []
    while len(replies) < count:
        replies += pool.poll(1.0)
    return replies


def disturb(stop: threading.Event, foreign: bool) -> None:
    """Draws from the global generators until it is told to stop."""
    own = OwnGenerators(0)
    while not stop.is_set():
        with nullcontext() if foreign else own.installed():
            random.random(), np.random.random()
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, default=10_000, help="of an adapter, shared out among its games"
    )
    parser.add_argument(
        "--isolation",
        nargs="+",
        default=["thread", "process"],
        choices=["thread", "process", "ray"],
    )
    parser.add_argument("--library", nargs="+", default=list(GAMES), choices=list(GAMES))
    parser.add_argument(
        "--foreign", action="store_true", help="draw without regard to environments"
    )
    options = parser.parse_args()
    if "ray" in options.isolation:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    stop = threading.Event()
    threading.Thread(target=disturb, args=(stop, options.foreign), daemon=True).start()
    wrong = 0
    for library in options.library:
        if importlib.util.find_spec(library) is None:
            print(f"{library} is not installed")
            continue
        for isolation in options.isolation:
            total = 0
            for game in GAMES[library]:
                compared, different, error = compare(
                    f"{library}:{game}", isolation, options.seeds // len(GAMES[library])
                )
                total, wrong = total + compared, wrong + different
                if different or error:
                    print(
                        f"  {library}:{game} {isolation}: {different} of {compared} groups "
                        f"differ {error[:300]}"
                    )
            print(f"{library:14} {isolation:8} {total:6} groups compared", flush=True)
    stop.set()
    print(f"{wrong} groups differ")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
