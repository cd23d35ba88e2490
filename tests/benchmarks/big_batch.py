"""Time of the driver's maths and of DataProto on 16,384 rows x 2,048 tokens.

Each stands beside one pass over such a tensor (x * y + z), which is timed anew before each.

Run with nothing else on the machine: python -m tests.benchmarks.big_batch [NAME ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from data.protocol import DataProto
from training import core_algos
from training.core_algos.built_in import ESTIMATOR_NEEDS

ROWS, TOKENS, GROUP, TURNS = 16_384, 2_048, 8, 8


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def batch() -> dict[str, Any]:
    """Makes what the estimators and losses ask for.

    Rows of random lengths, each of up to eight turns.
    """
    torch.manual_seed(0)
    lengths = torch.randint(1, TOKENS + 1, (ROWS, 1))
    mask = (torch.arange(TOKENS) < lengths).long()
    old, new, values = (torch.randn(ROWS, TOKENS) for _ in range(3))
    anchors = [[f"state {turn % 3}" for turn in range(TURNS)] for _ in range(ROWS)]
    return {
        "response_mask": mask,
        "token_level_rewards": torch.zeros(ROWS, TOKENS).scatter(
            1, lengths - 1, torch.randn(ROWS, 1).abs()
        ),
        "values": values,
        "old_log_probs": old.mul_(0.1).sub_(1),
        "new_log_probs": new.mul_(0.1).sub_(1),
        "rollout_log_probs": old,
        "ref_log_prob": new,
        "sum_pi_squared": torch.full((ROWS, TOKENS), 0.3),
        "turn_ids": (torch.arange(TOKENS) * TURNS // TOKENS).expand(ROWS, -1),
        "reward_baselines": torch.rand(ROWS),
        "index": np.repeat(
            np.array([f"uid{i}" for i in range(ROWS // GROUP)], dtype=object), GROUP
        ),
        "role": np.array(["one", "other"] * (ROWS // 2), dtype=object),
        "anchors": anchors,
        "branch_returns": [[[0.0, 1.0]] * TURNS for _ in range(ROWS)],
        "state": {},
        "non_tensor_batch": {},
    }


def calls() -> dict[str, Callable[[], object]]:
    """Names what is timed."""
    have = batch()
    mask, old, new, values = (
        have[name] for name in ("response_mask", "old_log_probs", "new_log_probs", "values")
    )
    rewards, index = have["token_level_rewards"], have["index"]
    data = DataProto.from_dict(tensors={"a": values, "mask": mask}, non_tensors={"uid": index})
    order = torch.randperm(ROWS)
    named: dict[str, Callable[[], object]] = {"one pass x * y + z": lambda: values * old + new}
    for name, needs in ESTIMATOR_NEEDS.items():
        if not name.endswith("_vectorized"):
            given = {need: have[need] for need in needs}
            named[name] = lambda name=name, given=given: core_algos.call_adv_estimator(
                name,
                token_level_rewards=rewards,
                response_mask=mask,
                gamma=1.0,
                lam=0.95,
                config=None,
                **given,
            )
    for name in core_algos.POLICY_LOSS_REGISTRY:
        named[f"loss {name}"] = lambda name=name: core_algos.get_policy_loss_fn(name)(
            old, new, values, mask, "token-mean", config=loss_config()
        )
    return named | {
        "kl_penalty low_var_kl": lambda: core_algos.kl_penalty(old, new, "low_var_kl"),
        "value loss": lambda: core_algos.compute_value_loss(
            vpreds=new, returns=old, values=values, response_mask=mask, cliprange_value=0.5
        ),
        "DataProto.select_idxs": lambda: data.select_idxs(order),
        "DataProto.repeat(2)": lambda: data.repeat(2),
        "DataProto.chunk(64) + concat": lambda: DataProto.concat(data.chunk(64)),
        "DataProto.union": lambda: data.select(batch_keys=["a"]).union(
            data.select(batch_keys=["mask"])
        ),
    }


def loss_config() -> core_algos.PolicyLossConfig:
    """Returns the defaults, with what dro asks for."""
    from training.config.schema.actor import PolicyLossChoice

    return core_algos.PolicyLossConfig(policy_loss=PolicyLossChoice(dro_beta=0.1))


def main() -> None:
    wanted, named = sys.argv[1:], calls()
    one_pass = named["one pass x * y + z"]
    seconds(one_pass)
    print(f"{ROWS} rows x {TOKENS} tokens, {torch.get_num_threads()} threads")
    for name, call in named.items():
        if not wanted or name in wanted:
            unit, took = seconds(one_pass), seconds(call)
            print(
                f"  {name:30s} {took:7.3f} s {took / unit:7.1f} passes of {unit:.3f} s", flush=True
            )


if __name__ == "__main__":
    main()
