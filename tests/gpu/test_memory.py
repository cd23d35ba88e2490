"""Offloading: device memory is really freed.

Training goes on with the same numbers, also after a checkpoint.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.e2e.test_training import tiny_config
from tests.unit.test_actor_critic import make_update
from tests.unit.test_rollout import model_spec
from training.config import ActorConfig, FSDPConfig, OptimConfig
from workers.dp_actor import DataParallelPPOActor
from workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from workers.model.forward_settings import ForwardSettings
from workers.model.optimizer import build_optimizer
from workers.ranks.offload import on_device

pytestmark = pytest.mark.gpu

OFFLOAD = FSDPConfig(param_offload=True, optimizer_offload=True)
CPU = torch.device("cpu")
Worker = ActorRolloutRefWorker | CriticWorker


def updated(
    module: nn.Module, device: torch.device, fsdp: FSDPConfig, steps: int = 3
) -> torch.optim.Optimizer:
    """Updates `module` in place, with what `fsdp` offloads away between the steps."""
    optimizer = build_optimizer(module, OptimConfig(lr=1e-3))
    actor = DataParallelPPOActor(
        ActorConfig(), module, optimizer, forward=ForwardSettings(device=device)
    )
    for _ in range(steps):
        with on_device(module, optimizer, device, fsdp):
            actor.update_policy(make_update())
    return optimizer


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().cpu().clone() for p in module.parameters()]


@pytest.mark.parametrize(
    "fsdp", [OFFLOAD, FSDPConfig(param_offload=True), FSDPConfig(optimizer_offload=True)]
)
def test_offloading_changes_no_weight_and_leaves_what_it_names_in_cpu_memory(
    lm, device, fsdp
) -> None:
    kept, offloaded = copy.deepcopy(lm), copy.deepcopy(lm)
    torch.use_deterministic_algorithms(True, warn_only=True)
    updated(kept, device, FSDPConfig())
    optimizer = updated(offloaded, device, fsdp)
    for a, b in zip(weights(kept), weights(offloaded), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
    assert {p.device for p in offloaded.parameters()} == {CPU if fsdp.param_offload else device}
    moments = {value.device for state in optimizer.state.values() for value in state.values()}
    assert moments == {CPU if fsdp.optimizer_offload else device}


def test_offloading_frees_the_bytes_of_weights_and_moments(cuda_memory, wide_model) -> None:
    device = cuda_memory
    before = torch.cuda.memory_allocated(device)
    module = model_spec(wide_model, device).causal_lm(trainable=True)
    size = 4 * sum(p.numel() for p in module.parameters())
    assert torch.cuda.memory_allocated(device) - before >= size
    optimizer = updated(module, device, FSDPConfig(), steps=1)
    assert torch.cuda.memory_allocated(device) - before >= 3 * size
    with on_device(module, optimizer, device, OFFLOAD):
        assert torch.cuda.memory_allocated(device) - before >= 3 * size
    assert torch.cuda.memory_allocated(device) - before < size / 4


def test_moments_are_whole_as_soon_as_they_are_in_cpu_memory(device) -> None:
    """The copy is asynchronous; 256 MiB take the bus longer than the next line takes."""
    parameter = nn.Parameter(torch.zeros(1 << 24, device=device))
    optimizer = build_optimizer(nn.ParameterList([parameter]), OptimConfig(lr=1.0))
    parameter.grad = torch.ones_like(parameter)
    with on_device(
        nn.ParameterList([parameter]), optimizer, device, FSDPConfig(optimizer_offload=True)
    ):
        optimizer.step()
    state = optimizer.state[parameter]
    assert state["exp_avg"].device == CPU
    # The fused kernel rounds a tenth otherwise than torch.full does, in all places alike.
    assert (state["exp_avg"] - 0.1).abs().max() < 1e-6


def build_workers(task: Path, run_dir: Path, device: torch.device, *overrides: str) -> list[Worker]:
    """Builds an actor and a critic on seven rows an update, with the config's models."""
    config = tiny_config(
        task,
        run_dir,
        f"trainer.device={device.type}",
        "data.train_batch_size=7",
        "actor_rollout_ref.actor.ppo_mini_batch_size=7",
        *overrides,
    )
    workers: list[Worker] = [ActorRolloutRefWorker(config, "actor"), CriticWorker(config)]
    for worker in workers:
        worker.init_model(10, config.batch_plan)
    return workers


def update(worker: Worker) -> None:
    data = make_update()
    _ = (
        worker.update_actor(data)
        if isinstance(worker, ActorRolloutRefWorker)
        else worker.update_critic(data)
    )


@pytest.mark.parametrize("kinds", [("param",), ("optimizer",), ("param", "optimizer")])
def test_workers_that_offload_go_on_from_their_checkpoint(
    tiny_task, tmp_path, device, kinds
) -> None:
    """It is loaded while weights are in CPU memory.

    The moments must follow them to the device at the next update.
    """
    sections = ("actor_rollout_ref.actor", "critic")
    keys = [f"{section}.fsdp_config.{kind}_offload=true" for section in sections for kind in kinds]
    for old, new in zip(
        *(build_workers(tiny_task, tmp_path, device, *keys) for _ in range(2)), strict=True
    ):
        update(old)
        old.save_checkpoint(str(tmp_path / type(old).__name__))
        assert old.checkpoint_written(wait=True)
        new.load_checkpoint(str(tmp_path / type(old).__name__))
        update(old)
        update(new)
        for a, b in zip(weights(old.module), weights(new.module), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
        assert {p.device for p in new.module.parameters()} == {CPU if "param" in kinds else device}


@pytest.mark.parametrize(("offload", "copies"), [("false", 3), ("true", 0)])
def test_between_updates_workers_hold_weights_and_moments_and_no_gradient(
    cuda_memory, tiny_task, wide_model, tmp_path, offload, copies
) -> None:
    sections = ("actor_rollout_ref.actor", "critic")
    keys = [
        f"{section}.fsdp_config.{kind}_offload={offload}"
        for section in sections
        for kind in ("param", "optimizer")
    ]
    before = torch.cuda.memory_allocated(cuda_memory)
    model = f"actor_rollout_ref.model.path={wide_model}"
    workers = build_workers(tiny_task, tmp_path, cuda_memory, model, *keys)
    size = 4 * sum(p.numel() for worker in workers for p in worker.module.parameters())
    for worker in workers:
        update(worker)
    assert abs(torch.cuda.memory_allocated(cuda_memory) - before - copies * size) < size / 4
