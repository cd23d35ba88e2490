"""What a step costs the driver with 2, 8, 24 and 64 Ray workers.

Its time, and the bytes to and from it, for 4,096 rows x 2,048 tokens.

The real `RayWorkerGroup` cuts, sends and joins; the workers take what the real ones read (their
`reads=`) and answer with tensors of the real shapes, without computing. 64 workers fit this
machine's memory only without torch: theirs is a host of its own, which gets the same bytes as numpy
arrays. A step is generation, the log-probs of policy and reference, values, both updates, and the
new weights' call.

Run with nothing else on the machine: python -m tests.benchmarks.driver_load [ROWS [ROUNDS]]
"""

from __future__ import annotations

import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import torch

from data.protocol import DataProto
from data.tensor_bytes import to_bytes
from training.run.ray_cluster import OWN_CLUSTER
from workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from workers.ranks.dispatch import (
    ClassWithInitArgs,
    Dispatch,
    register,
    registered_methods,
    split_batch,
)
from workers.ranks.ray_group import RayWorkerGroup
from workers.ranks.resource_pool import RayResourcePool

PROMPT, RESPONSE = 1024, 1024
TOKENS = PROMPT + RESPONSE
TORCH_WORKERS, LIGHT_WORKERS = (2, 8, 24), (8, 64)
TORCH_WORKER_BYTES = 350 << 20
BYTES_TARGET = 1.05
MIB = 1 << 20
REAL = registered_methods(CriticWorker) | registered_methods(ActorRolloutRefWorker)
# What each call answers: dtype and width of every field.
ANSWERS: dict[str, dict[str, tuple[str, int]]] = {
    "generate_sequences": {
        "prompts": ("int32", PROMPT),
        "responses": ("int32", RESPONSE),
        "response_mask": ("int8", RESPONSE),
        "turn_ids": ("int16", RESPONSE),
        "attention_mask": ("int8", TOKENS),
        "rollout_log_probs": ("float32", RESPONSE),
    },
    "compute_log_prob": {"old_log_probs": ("float32", RESPONSE), "entropys": ("float32", RESPONSE)},
    "compute_ref_log_prob": {"ref_log_prob": ("float32", RESPONSE)},
    "compute_values": {"values": ("float32", RESPONSE)},
    "update_critic": {},
    "update_actor": {},
}


class LightWorker:
    """Answers like the actor, reference and critic workers, with numbers that do not compress."""

    def _answer(self, data: DataProto, fields: dict[str, tuple[str, int]]) -> DataProto:
        tensors = {
            name: torch.arange(1, len(data) * width + 1).view(-1, width).to(getattr(torch, dtype))
            for name, (dtype, width) in fields.items()
        }
        return DataProto.from_dict(tensors=tensors)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        generated = self._answer(prompts, ANSWERS["generate_sequences"])
        generated.non_tensor_batch = prompts.non_tensor_batch
        return generated

    @register(Dispatch.DP_COMPUTE_PROTO, reads=REAL["compute_log_prob"].reads)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return self._answer(data, ANSWERS["compute_log_prob"])

    @register(Dispatch.DP_COMPUTE_PROTO, reads=REAL["compute_ref_log_prob"].reads)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self._answer(data, ANSWERS["compute_ref_log_prob"])

    @register(Dispatch.DP_COMPUTE_PROTO, reads=REAL["compute_values"].reads)
    def compute_values(self, data: DataProto) -> DataProto:
        return self._answer(data, ANSWERS["compute_values"])

    @register(Dispatch.DP_COMPUTE_PROTO, reads=REAL["update_critic"].reads)
    def update_critic(self, data: DataProto) -> dict[str, float]:
        return {"critic/vf_loss": 0.0}

    @register(Dispatch.DP_COMPUTE_PROTO, reads=REAL["update_actor"].reads)
    def update_actor(self, data: DataProto) -> dict[str, float]:
        return {"actor/pg_loss": 0.0}

    @register(Dispatch.ONE_TO_ALL)
    def sync_weights(self) -> None:
        pass


class BytesHost:
    """A rank's process that imports no torch: takes arrays and answers with arrays."""

    def call(
        self, chunk: dict[str, Any], fields: dict[str, tuple[str, int]]
    ) -> dict[str, np.ndarray]:
        return {
            name: np.zeros((chunk["rows"], width), dtype=dtype)
            for name, (dtype, width) in fields.items()
        }

    def sync_weights(self) -> bool:
        return "torch" in sys.modules


class BytesGroup:
    """The calls of a `RayWorkerGroup` over `BytesHost`s.

    The same cut, one `put` a chunk, the answers joined.
    """

    def __init__(self, world_size: int) -> None:
        import ray

        options = {"num_cpus": 1, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
        self.hosts = [ray.remote(BytesHost).options(**options).remote() for _ in range(world_size)]
        self.world_size = world_size
        assert not any(ray.get([host.sync_weights.remote() for host in self.hosts])), (
            "a light host has imported torch"
        )

    def shutdown(self) -> None:
        import ray

        for host in self.hosts:
            ray.kill(host)

    def sync_weights(self) -> None:
        import ray

        ray.get([host.sync_weights.remote() for host in self.hosts])

    def __getattr__(self, name: str) -> Callable[[DataProto], Any]:
        import ray

        def call(data: DataProto) -> Any:
            refs = [
                ray.put(as_arrays(chunk))
                for chunk in split_batch(data, REAL[name].reads, self.world_size)
            ]
            answers = ray.get(
                [
                    host.call.remote(ref, ANSWERS[name])
                    for host, ref in zip(self.hosts, refs, strict=True)
                ]
            )
            joined = {
                key: np.concatenate([answer[key] for answer in answers]) for key in ANSWERS[name]
            }
            arrays = data.non_tensor_batch if name == "generate_sequences" else {}
            tensors = {key: torch.from_numpy(array)[: len(data)] for key, array in joined.items()}
            return DataProto.from_dict(tensors=tensors, non_tensors=arrays)

        return call


def as_arrays(chunk: DataProto) -> dict[str, Any]:
    """A chunk's bytes without torch's types."""
    tensors = {name: to_bytes(tensor)[0] for name, tensor in chunk.batch.items()}
    return {"rows": len(chunk), "tensors": tensors, "non_tensors": chunk.non_tensor_batch}


class Metered:
    """A group whose calls count what goes to the workers and what comes back, in bytes."""

    def __init__(self, group: RayWorkerGroup | BytesGroup) -> None:
        self.group, self.sent, self.received = group, 0, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: DataProto) -> Any:
            answer = getattr(self.group, name)(*args)
            if args:
                self.sent += sum(
                    serialized_bytes(chunk)
                    for chunk in split_batch(*args, REAL[name].reads, self.group.world_size)
                )
                self.received += serialized_bytes(answer)
            return answer

        return call


def serialized_bytes(value: object) -> int:
    buffers: list[pickle.PickleBuffer] = []
    return len(pickle.dumps(value, protocol=5, buffer_callback=buffers.append)) + sum(
        b.raw().nbytes for b in buffers
    )


def prompts(rows: int) -> DataProto:
    """What the trainer gives to generation: the dataset's columns and its own."""
    ids = torch.randint(0, 50_000, (rows, PROMPT))
    objects = {
        "uid": [f"1.{row // 8}" for row in range(rows)],
        "episode_id": [f"1.{row // 8}.{row % 8}" for row in range(rows)],
        "data_source": ["benchmark"] * rows,
        "reward_model": [{"style": "rule", "ground_truth": str(row)} for row in range(rows)],
        "extra_info": [{"index": row, "split": "train"} for row in range(rows)],
        "raw_prompt_ids": [row.tolist() for row in ids],
    }
    tensors = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(PROMPT).expand(rows, -1).clone(),
    }
    numbers = {"group_index": np.arange(rows) // 8, "sample_index": np.arange(rows) % 8}
    meta_info = {"global_steps": 1, "seed": 0, "seeded": False, "validate": False}
    return DataProto.from_dict(tensors=tensors, non_tensors=objects | numbers, meta_info=meta_info)


def step(group: Any, given: DataProto, ready: torch.Tensor) -> None:
    """The calls of one PPO step with a reference model, in the trainer's order."""
    batch = group.generate_sequences(given)
    log_probs = group.compute_log_prob(batch)
    log_probs.pop(batch_keys=["entropys"])
    batch = batch.union(log_probs)
    batch = batch.union(group.compute_ref_log_prob(batch))
    batch = batch.union(group.compute_values(batch))
    batch.batch["advantages"] = batch.batch["returns"] = ready
    group.update_critic(batch)
    group.update_actor(batch)
    group.sync_weights()


def groups() -> Iterator[tuple[str, RayWorkerGroup | BytesGroup]]:
    """Each group of workers in turn, while it lives.

    Those that memory does not hold are left out.
    """
    for size in TORCH_WORKERS:
        needed = size * TORCH_WORKER_BYTES + (4 << 30)
        if (free := psutil.virtual_memory().available) < needed:
            print(
                f"{size} workers with torch left out: {free / MIB:.0f} MiB are free, "
                f"{needed / MIB:.0f} needed"
            )
            continue
        group = RayWorkerGroup.start(
            RayResourcePool((size,), use_gpu=False), {"light": ClassWithInitArgs(LightWorker)}
        )["light"]
        yield f"{size}", group
        group.shutdown()
    for size in LIGHT_WORKERS:
        light = BytesGroup(size)
        yield f"{size} without torch", light
        light.shutdown()


def main(rows: int, rounds: int) -> None:
    for name, value in OWN_CLUSTER.items():
        os.environ.setdefault(name, value)  # before the first import
    import ray

    ray.init(
        num_cpus=max(TORCH_WORKERS + LIGHT_WORKERS), include_dashboard=False, log_to_driver=False
    )
    given, ready = prompts(rows), torch.rand(rows, RESPONSE)
    print(
        f"{rows} rows x {TOKENS} tokens, medians of {rounds} steps; "
        "ratios to the first line of their kind"
    )
    print(
        "\n| workers | wall s/step | driver's CPU s/step | MiB sent | MiB received "
        "| wall | bytes | target |"
        "\n|---|---|---|---|---|---|---|---|"
    )
    first: dict[bool, tuple[float, float]] = {}
    for name, group in groups():
        meter = Metered(group)
        step(meter, given, ready)  # counts, and warms up
        wall, own = [], []
        for _ in range(rounds):
            start, own_start = time.perf_counter(), time.process_time()
            step(group, given, ready)
            wall.append(time.perf_counter() - start)
            own.append(time.process_time() - own_start)
        took, moved = statistics.median(wall), meter.sent + meter.received
        base = first.setdefault(isinstance(group, BytesGroup), (took, moved))
        print(
            f"| {name} | {took:.2f} | {statistics.median(own):.2f} "
            f"| {meter.sent / MIB:.0f} | {meter.received / MIB:.0f} "
            f"| {took / base[0]:.2f} | {moved / base[1]:.3f} | bytes at most {BYTES_TARGET} |",
            flush=True,
        )
    ray.shutdown()


if __name__ == "__main__":
    main(*(int(value) for value in (sys.argv[1:] + ["4096", "5"][len(sys.argv) - 1 :])))
