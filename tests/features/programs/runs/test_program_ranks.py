"""Programs with tensor parallelism: the leader has them, and all ranks make the same rows."""

from __future__ import annotations

import os
import pickle
import random
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.features.programs.hostile import MOVES, check, play
from tests.unit.test_turn_tokens import turn_tokens
from workers.ranks.process_groups import start_process_group

RANKS = 2


def moves_of(seed: int) -> list[tuple[str, int]]:
    rng = random.Random(seed)
    return [(rng.choice(MOVES), rng.randrange(20)) for _ in range(12)]


def play_on_rank(number: int, port: int, folder: str) -> None:
    """Plays some hostile programs, in lockstep and without; writes down this rank's rows."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    start_process_group(torch.device("cpu"))
    rows: list[Any] = []
    for seed in range(12):
        tokens = turn_tokens("smollm2")
        lockstep = seed % 2 == 0
        played = play(moves_of(seed), tokens, seed, lockstep, group=dist.group.WORLD)
        episode, _, engine = played
        if number == 0:
            check(*played)
        rows.append([(row.token_ids, row.spans, row.reward_at) for row in episode.rows])
        rows.append(list(engine.given.items()))
    Path(folder, f"{number}.pickle").write_bytes(pickle.dumps(rows))
    dist.destroy_process_group()


def test_all_ranks_of_a_tensor_parallel_group_make_the_same_rows(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(play_on_rank, args=(port, str(tmp_path)), nprocs=RANKS)
    leader, other = (pickle.loads((tmp_path / f"{k}.pickle").read_bytes()) for k in range(RANKS))
    assert leader == other
    assert sum(len(rows) for rows in leader[::2]) > 30
