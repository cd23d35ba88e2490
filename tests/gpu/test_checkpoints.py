"""Checkpoints between devices: what was saved on one loads on the other, bitwise, and back."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.test_actor_critic import make_update
from tests.unit.test_checkpoint import save
from training.config import ActorConfig, OptimConfig
from workers.dp_actor import DataParallelPPOActor
from workers.model import state as model_state
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.forward_settings import ForwardSettings
from workers.model.optimizer import build_optimizer, build_scheduler

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

PARTS = ("model", "optimizer", "extra")
OPTIM = OptimConfig(lr=1e-3, scheduler="cosine")
State = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]


def trained(lm: nn.Module, device: torch.device, steps: int) -> State:
    module = copy.deepcopy(lm).to(device)
    optimizer = build_optimizer(module, OPTIM)
    scheduler = build_scheduler(optimizer, OPTIM, 10)
    actor = DataParallelPPOActor(
        ActorConfig(), module, optimizer, forward=ForwardSettings(device=device)
    )
    for _ in range(steps):
        actor.update_policy(make_update())
        scheduler.step()
    return module, optimizer, scheduler


def assert_same_state(one: State, other: State) -> None:
    for tensors in (
        [model_state.model_tensors(state[0]) for state in (one, other)],
        [model_state.optimizer_tensors(*state[:2]) for state in (one, other)],
    ):
        assert tensors[0].keys() == tensors[1].keys()
        assert [
            n for n in tensors[0] if not torch.equal(tensors[0][n].cpu(), tensors[1][n].cpu())
        ] == []
    assert one[2].get_last_lr() == other[2].get_last_lr()


def test_a_checkpoint_goes_to_the_cpu_and_back_bitwise(lm, device, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    original = trained(lm, device, steps=2)
    save(tmp_path / "device", original, PARTS)
    moved = trained(lm, cpu, steps=0)
    model_state.load(tmp_path / "device", moved, PARTS)
    assert_same_state(moved, original)
    save(tmp_path / "cpu", moved, PARTS)
    back = trained(lm, device, steps=0)
    model_state.load(tmp_path / "cpu", back, PARTS)
    assert_same_state(back, original)
    assert {value.device for state in back[1].state.values() for value in state.values()} == {
        device
    }


def test_what_is_written_is_the_devices_state_at_the_start_though_training_goes_on(
    lm, device, tmp_path: Path
) -> None:
    original, writer = trained(lm, device, steps=2), CheckpointWriter()
    actor = DataParallelPPOActor(
        ActorConfig(), *original[:2], forward=ForwardSettings(device=device)
    )
    model_state.save(writer, tmp_path, original, PARTS)
    actor.compute_log_prob(make_update())
    writer.wait_until_copied()
    actor.update_policy(make_update())
    assert writer.is_written(wait=True)
    restored = trained(lm, device, steps=0)
    model_state.load(tmp_path, restored, PARTS)
    assert_same_state(restored, trained(lm, device, steps=2))


def test_the_exported_folder_holds_the_devices_weights_in_bfloat16(
    lm, device, tiny_task, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    model_state.huggingface_export(tmp_path, lm, tokenizer, weights=True)()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in lm.state_dict().items():
        assert torch.equal(exported[name], tensor.cpu().bfloat16().float()), name
