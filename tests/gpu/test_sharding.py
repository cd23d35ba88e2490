"""FSDP2 over NCCL (gloo in the dry run): one GPU is not wrapped.

Two make the updates of one, also with offloading.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.processes.test_ranks import (
    LIMITS,
    MODES,
    build,
    compare_ranks,
    join_ranks,
    largest_difference,
    spawn_ranks,
    whole_weights,
)
from tests.unit.test_actor_critic import make_update
from training.config import ActorConfig, FSDPConfig
from workers.dp_actor import DataParallelPPOActor
from workers.model.forward_settings import ForwardSettings
from workers.model.policy_model import PolicyModel
from workers.ranks.offload import on_device
from workers.ranks.sharding import shard_model

pytestmark = pytest.mark.gpu


def test_one_device_is_not_wrapped(lm, device) -> None:
    policy = PolicyModel(lm)
    shard_model(policy, FSDPConfig(), torch.bfloat16, device)
    assert not any(isinstance(module, FSDPModule) for module in policy.modules())


@pytest.fixture(scope="module")
def two_devices(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return device.type


@pytest.fixture(scope="module")
def folder(two_devices: str, tiny_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpus")
    compare_ranks(tiny_task, folder, two_devices)
    return folder


CASES = [f"actor {limits} {mode}" for limits in LIMITS for mode in MODES] + [
    f"critic {limits}" for limits in LIMITS
]


@pytest.mark.parametrize("case", CASES)
def test_two_gpus_make_the_update_of_one(folder: Path, case: str) -> None:
    (one, one_metrics), (two, two_metrics) = (
        torch.load(folder / f"results-{world}.pt")[case] for world in (1, 2)
    )
    assert largest_difference(one, two) < 1e-4
    assert two_metrics == pytest.approx(one_metrics, rel=1e-4, abs=1e-6)


def offloaded_rank(folder: str, rank: int, world: int, port: int, kind: str) -> None:
    """Makes two updates with the parameters in CPU memory between them, and two without.

    Every one must have moved.
    """
    device = join_ranks(rank, world, port, kind)
    data = make_update().pad_with_dummies(2).chunk(world)[rank]
    ends = []
    for fsdp in (FSDPConfig(), FSDPConfig(param_offload=True, optimizer_offload=True)):
        actor = DataParallelPPOActor(
            ActorConfig(), *build(folder, "actor", device), forward=ForwardSettings(device=device)
        )
        before = whole_weights(actor.actor_module)
        for _ in range(2):
            with on_device(actor.actor_module, actor.actor_optimizer, device, fsdp):
                actor.update_policy(data)
        with on_device(actor.actor_module, None, device, fsdp):
            ends.append(whole_weights(actor.actor_module))
        log_probs = actor_log_probs(actor, data, device, fsdp)
        assert (ends[-1]["lm.lm_head.weight"] != before["lm.lm_head.weight"]).any()
        torch.save(log_probs, Path(folder) / f"log-probs-{rank}-{fsdp.param_offload}.pt")
    for name in ends[0]:
        torch.testing.assert_close(ends[1][name], ends[0][name], rtol=1e-5, atol=1e-6)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def actor_log_probs(actor, data, device, fsdp) -> torch.Tensor:
    with on_device(actor.actor_module, None, device, fsdp):
        return actor.compute_log_prob(data)[0]


def test_two_gpus_that_offload_train_every_parameter(
    two_devices: str, tiny_task: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(tiny_task / "model")
    spawn_ranks(offloaded_rank, str(tmp_path), 2, two_devices)
    for rank in range(2):
        kept, offloaded = (
            torch.load(tmp_path / f"log-probs-{rank}-{way}.pt") for way in (False, True)
        )
        torch.testing.assert_close(offloaded, kept, rtol=1e-4, atol=1e-5)
