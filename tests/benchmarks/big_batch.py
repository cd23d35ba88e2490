"""Time of the driver's maths and of DataProto on 16,384 rows x 2,048 tokens, each beside one pass over such a tensor
(x * y + z).

Run with nothing else on the machine: python -m tests.benchmarks.big_batch
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from data.protocol import DataProto
from training import core_algos

ROWS, TOKENS, GROUP = 16_384, 2_048, 8


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def main() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(1, TOKENS + 1, (ROWS, 1))
    mask = (torch.arange(TOKENS) < lengths).long()
    rewards = torch.zeros(ROWS, TOKENS).scatter(1, lengths - 1, torch.randn(ROWS, 1))
    values, old, new = (torch.randn(ROWS, TOKENS) for _ in range(3))
    index = np.repeat(np.array([f"uid{i}" for i in range(ROWS // GROUP)], dtype=object), GROUP)
    given = {"token_level_rewards": rewards, "response_mask": mask}
    data = DataProto.from_dict(tensors={"a": values, "mask": mask}, non_tensors={"uid": index})
    order = torch.randperm(ROWS)
    calls: dict[str, Callable[[], object]] = {
        "one pass x * y + z": lambda: values * old + new,
        "gae": lambda: core_algos.compute_gae_advantage_return(**given, values=values, gamma=1.0, lam=0.95),
        "grpo": lambda: core_algos.compute_grpo_outcome_advantage(**given, index=index),
        "rloo": lambda: core_algos.compute_rloo_outcome_advantage(**given, index=index),
        "reinforce_plus_plus": lambda: core_algos.compute_reinforce_plus_plus_outcome_advantage(**given),
        "kl_penalty low_var_kl": lambda: core_algos.kl_penalty(old, new, "low_var_kl"),
        "vanilla loss": lambda: core_algos.compute_policy_loss_vanilla(old, new, values, mask),
        "value loss": lambda: core_algos.compute_value_loss(
            vpreds=new, returns=old, values=values, response_mask=mask, cliprange_value=0.5
        ),
        "DataProto.select_idxs": lambda: data.select_idxs(order),
        "DataProto.repeat(2)": lambda: data.repeat(2),
        "DataProto.chunk(64) + concat": lambda: DataProto.concat(data.chunk(64)),
        "DataProto.union": lambda: data.select(batch_keys=["a"]).union(data.select(batch_keys=["mask"])),
    }
    unit = seconds(calls["one pass x * y + z"])
    print(f"{ROWS} rows x {TOKENS} tokens, {torch.get_num_threads()} threads")
    for name, call in calls.items():
        took = seconds(call)
        print(f"  {name:30s} {took:7.3f} s {took / unit:7.1f} passes")


if __name__ == "__main__":
    main()
