"""An update on trees of eight leaves: time and memory, against flat rows and against unique tokens.

    python -m tests.benchmarks.tree_step
    python -m tests.benchmarks.tree_step --hidden 64 --layers 2 --heads 4 --vocab 256 --scale 0.1

A tree is an episode of eight rows. Three kinds: eight answers behind a long history (fork), a
history that branches in two, three times (binary), and a conversation that grows and is cut at each
turn, each row beginning with all of it (turns). Each is updated in three ways, with one micro-batch
as large as it takes:

    flat     every row by itself, its beginning computed anew
    tree     as a run does it: what rows begin with alike is computed once, where it pays
    unique   as many tokens as differ, in rows that share nothing: the one row that holds all turns,
             with the same pairs of attention; or, of a tree that branches, each row without its
             beginning, which has fewer pairs than any computation of the tree

Time is CPU seconds of one thread, because other work runs on the machine; memory is what autograd
keeps of the micro-batch for its backward pass, each storage once, without parameters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from data.protocol import DataProto
from tests.benchmarks.mfu import Settings, build_worker
from tests.benchmarks.peak_memory import MIB, activation_bytes
from workers.fsdp_workers import ActorRolloutRefWorker
from workers.ranks.memory import keep_heap

LEAVES = 8


@dataclass(frozen=True)
class Row:
    """One row: tokens, of which the first `shared` are another row's too, and what was sampled."""

    ids: np.ndarray
    shared: int
    sampled: int

    def without_beginning(self) -> Row:
        """The row's own tokens alone."""
        return Row(self.ids[self.shared :], 0, self.sampled)


def trees(vocabulary: int, scale: float) -> dict[str, list[Row]]:
    """Draws a tree of each kind."""
    rng = np.random.default_rng(0)

    def draw(tokens: int) -> np.ndarray:
        return rng.integers(1, vocabulary, size=max(int(tokens * scale), 4))

    history = draw(1024)
    forks = [np.concatenate([history, draw(256)]) for _ in range(LEAVES)]
    return {
        "fork": list(_rows(forks, draw(128).size)),
        "binary": list(_rows(_branching(draw, draw(512), 3), draw(128).size)),
        "turns": list(_rows(_growing(draw), draw(96).size)),
    }


def _branching(draw, history: np.ndarray, depth: int) -> list[np.ndarray]:
    if depth == 0:
        return [np.concatenate([history, draw(192)])]
    branches = []
    for _ in range(2):
        branches += _branching(draw, np.concatenate([history, draw(256)]), depth - 1)
    return branches


def _growing(draw) -> list[np.ndarray]:
    rows = [draw(448)]
    for _ in range(LEAVES - 1):
        rows.append(np.concatenate([rows[-1], draw(192)]))
    return rows


def _rows(paths: list[np.ndarray], sampled: int) -> Iterator[Row]:
    """Cuts each path where it leaves those before it; the last tokens of it were sampled."""
    for number, path in enumerate(paths):
        shared = max([_common(path, other) for other in paths[:number]], default=0)
        yield Row(path, shared, min(sampled, len(path) - shared - 1))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def unique_rows(rows: list[Row]) -> list[Row]:
    """Returns rows that share nothing and have as many tokens, and as many sampled ones."""
    last = rows[-1]
    if len(last.ids) == sum(len(row.ids) - row.shared for row in rows):
        return [Row(last.ids, 0, sum(row.sampled for row in rows))]
    return [row.without_beginning() for row in rows]


def batch_of(rows: list[Row]) -> DataProto:
    """Lays rows out, the sampled tokens as responses."""
    responses = max(row.sampled for row in rows)
    prompts = max(len(row.ids) - row.sampled for row in rows)
    tensors = {
        "prompts": torch.zeros(len(rows), prompts, dtype=torch.int32),
        "responses": torch.zeros(len(rows), responses, dtype=torch.int32),
        "response_mask": torch.zeros(len(rows), responses, dtype=torch.int8),
        "attention_mask": torch.zeros(len(rows), prompts + responses, dtype=torch.int8),
        "advantages": torch.randn(len(rows), responses, generator=torch.Generator().manual_seed(0)),
    }
    for number, row in enumerate(rows):
        prompt = torch.from_numpy(row.ids[: -row.sampled])
        tensors["prompts"][number, prompts - len(prompt) :] = prompt
        tensors["responses"][number, : row.sampled] = torch.from_numpy(row.ids[-row.sampled :])
        tensors["response_mask"][number, : row.sampled] = 1
        tensors["attention_mask"][number, prompts - len(prompt) : prompts + row.sampled] = 1
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors={"uid": np.array(["g"] * len(rows), dtype=object)},
        meta_info={"temperature": 1.0, "seed": 0, "global_steps": 1},
    )


@dataclass(frozen=True)
class Cost:
    """What an update took: CPU seconds, MiB, and its metrics."""

    seconds: float
    memory: float
    computed: float
    ratio: float


def measure(worker: ActorRolloutRefWorker, rows: list[Row], updates: int) -> Cost:
    batch = batch_of(rows)
    worker.update_actor(batch)
    seconds = []
    metrics: dict[str, float] = {}
    for _ in range(updates):
        start = time.thread_time()
        metrics = worker.update_actor(batch)
        seconds.append(time.thread_time() - start)
    return Cost(
        seconds=statistics.median(seconds),
        memory=activation_bytes(worker, batch) / MIB,
        computed=metrics["actor/computed_tokens"],
        ratio=metrics["actor/computed_per_unique_token"],
    )


def main(given: argparse.Namespace) -> dict[str, dict[str, Cost]]:
    keep_heap()
    torch.set_num_threads(1)
    settings = Settings(
        device="cpu",
        dtype=given.dtype,
        hidden=given.hidden,
        layers=given.layers,
        heads=given.heads,
        kv_heads=2,
        intermediate=3 * given.hidden,
        vocab=given.vocab,
        rows=LEAVES,
        group=LEAVES,
        prompt=4096,
        response=4096,
        budget=65_536,
        checkpointing=0,
    )
    worker = build_worker(settings)
    shares = worker.actor.settings
    print(f"{given.dtype}, one thread; a copied key costs {shares.key_cost:.3f} of a token")
    found: dict[str, dict[str, Cost]] = {}
    for kind, rows in trees(given.vocab, given.scale).items():
        ways = {
            "flat": (rows, replace(shares, key_cost=None)),
            "tree": (rows, shares),
            "unique": (unique_rows(rows), shares),
        }
        found[kind] = {}
        for way, (laid_out, how) in ways.items():
            worker.actor.settings = how
            cost = measure(worker, laid_out, given.updates)
            found[kind][way] = cost
            print(
                f"{kind:7s} {way:7s} {cost.computed:8,.0f} tokens  {cost.ratio:5.2f} a unique one"
                f"  {cost.seconds:8.3f} s  {cost.memory:8.0f} MiB",
                flush=True,
            )
        flat, tree, unique = (found[kind][way] for way in ("flat", "tree", "unique"))
        print(
            f"{kind:7s} flat / tree {flat.seconds / tree.seconds:.2f} in time, "
            f"{flat.memory / tree.memory:.2f} in memory; tree / unique "
            f"{tree.seconds / unique.seconds:.2f}, {tree.memory / unique.memory:.2f}"
        )
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
