"""LoRA on two ranks under FSDP2: update, reference, merged weights, checkpoint of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes.test_ranks import join_ranks, largest_difference, spawn_ranks, whole_weights
from tests.unit.test_actor_critic import make_update
from tests.unit.test_checkpoint import save
from training.config import ActorConfig, FSDPConfig, ModelConfig, OptimConfig
from workers.dp_actor import DataParallelPPOActor
from workers.model import state as model_state
from workers.model.builder import ModelSpec
from workers.model.forward_settings import ForwardSettings
from workers.model.lora import adapter_export, without_adapters
from workers.model.optimizer import build_optimizer, build_scheduler
from workers.model.policy_model import PolicyModel
from workers.ranks.process_groups import rank
from workers.ranks.sharding import shard_model
from workers.weight_sync.manifest import iter_weights

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run_rank(folder: str, number: int, world: int, port: int, kind: str) -> None:
    """Writes down what is compared; the reference comes first, as in a step."""
    device, results = join_ranks(number, world, port, kind), {}
    data = make_update().pad_with_dummies(2).chunk(world)[number]
    for name, dtype in TYPES.items():
        spec = ModelSpec(ModelConfig(lora_rank=4, dtype=name), str(Path(folder) / "model"), device)
        module = PolicyModel(spec.causal_lm(trainable=True))
        assert all(parameter.is_meta == (rank() > 0) for parameter in module.parameters())
        shard_model(module, FSDPConfig(), dtype, device)
        # The change is then the gradient, to scale.
        optimizer: Any = torch.optim.SGD(
            [p for p in module.parameters() if p.requires_grad], lr=0.1
        )
        actor = DataParallelPPOActor(
            ActorConfig(), module, optimizer, forward=ForwardSettings(device=device, dtype=dtype)
        )
        with without_adapters(module):
            reference, _ = actor.compute_log_prob(data)
        before = whole_weights(module)
        for _ in range(2):
            metrics = actor.update_policy(data)
        after = whole_weights(module)
        torch.save(
            (actor.compute_log_prob(data)[0], reference),
            Path(folder) / f"{name}-{world}-{number}.pt",
        )
        sent = {name: tensor.clone() for name, tensor in iter_weights(module.lm, torch.float32)}
        export = adapter_export(Path(folder) / f"{name}-{world}-adapter", module.lm)
        if number == 0:
            export()
        results[name] = ({k: after[k] - before[k] for k in after}, metrics, sent)
    results["resumed"] = resumed(folder, world, spec)
    if number == 0:
        torch.save(results, Path(folder) / f"results-{world}.pt")
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def resumed(
    folder: str, world: int, spec: ModelSpec
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights of a policy that was saved and goes on, and of one that reads those."""
    weights, parts = [], ("model", "optimizer", "extra")
    for reads in (False, True):
        lm = spec.causal_lm(trainable=True)
        module, optim = PolicyModel(lm), OptimConfig(lr=0.01)
        shard_model(module, FSDPConfig(), torch.bfloat16, spec.device)
        optimizer = build_optimizer(lm, optim)
        state = lm, optimizer, build_scheduler(optimizer, optim, 10)
        settings = ForwardSettings(device=spec.device, dtype=torch.bfloat16)
        actor = DataParallelPPOActor(ActorConfig(), module, optimizer, forward=settings)
        saved = Path(folder) / f"saved-{world}"
        if reads:
            model_state.load(saved, state, parts)
        else:
            actor.update_policy(make_update(1).pad_with_dummies(2).chunk(world)[rank()])
            save(saved, state, parts)
        actor.update_policy(make_update(2).pad_with_dummies(2).chunk(world)[rank()])
        weights.append(whole_weights(module))
    return weights[0], weights[1]


@pytest.fixture(scope="module")
def folder(tiny_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    (folder / "model").symlink_to(tiny_task / "model")
    for world in (1, 2):
        spawn_ranks(run_rank, str(folder), world, "cpu")
    return folder


def read(folder: Path, what: int) -> dict[str, dict[str, Tensor]]:
    """The files of float32 on one rank and on two, and of bfloat16 on both."""
    results = {world: torch.load(folder / f"results-{world}.pt") for world in (1, 2)}
    return {f"{world} {dtype}": results[world][dtype][what] for world in (1, 2) for dtype in TYPES}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The difference of all tensors together, relative to the other's norm."""
    assert one.keys() == other.keys()
    apart, whole = (
        torch.cat([kind[n].flatten() for n in one])
        for kind in ({n: one[n] - other[n] for n in one}, other)
    )
    return float(apart.norm() / whole.norm())


@pytest.mark.long
def test_two_ranks_make_the_update_of_one(folder: Path) -> None:
    changes, metrics = read(folder, 0), read(folder, 1)
    for change in changes.values():
        assert {n for n, c in change.items() if c.any()} == {n for n in change if ".ppo_core." in n}
    assert largest_difference(changes["1 float32"], changes["2 float32"]) < 1e-5
    assert metrics["2 float32"] == pytest.approx(metrics["1 float32"], rel=1e-5, abs=1e-7)


def test_two_ranks_update_in_bfloat16_as_exactly_as_one(folder: Path) -> None:
    """Each rounds in an order of its own, and updates add to it; neither is far from float32."""
    changes = read(folder, 0)
    one, two = (distance(changes[f"{world} bfloat16"], changes["1 float32"]) for world in (1, 2))
    assert 1e-3 < one < 0.1 and two < 2 * one, (one, two)


def test_two_ranks_compute_the_log_probs_and_the_reference_of_one(folder: Path) -> None:
    one = torch.load(folder / "float32-1-0.pt")
    halves = [torch.load(folder / f"float32-2-{rank}.pt") for rank in (0, 1)]
    for kind in (0, 1):
        torch.testing.assert_close(
            torch.cat([half[kind] for half in halves]), one[kind], atol=1e-5, rtol=1e-5
        )
    assert (one[0] - one[1]).abs().max() > 0.02


@pytest.mark.long
def test_the_reference_of_two_ranks_in_bfloat16_is_that_of_one_bitwise(folder: Path) -> None:
    one = torch.load(folder / "bfloat16-1-0.pt")[1]
    two = torch.cat([torch.load(folder / f"bfloat16-2-{rank}.pt")[1] for rank in (0, 1)])
    assert torch.equal(two, one) and not torch.equal(one, torch.load(folder / "float32-1-0.pt")[1])


def test_what_leaves_two_ranks_is_whole(folder: Path) -> None:
    from safetensors.torch import load_file

    sent = read(folder, 2)
    assert largest_difference(sent["1 float32"], sent["2 float32"]) < 1e-5
    one, two = (
        load_file(folder / f"float32-{world}-adapter/adapter_model.safetensors") for world in (1, 2)
    )
    assert largest_difference(one, two) < 1e-5
    # In bfloat16 too the merged weights are those of the adapters, on the rank that has both.
    whole, adapter = (
        sent["2 bfloat16"],
        load_file(folder / "bfloat16-2-adapter/adapter_model.safetensors"),
    )
    name = "model.layers.1.mlp.down_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    base = load_file(folder / "model/model.safetensors")[f"{name}.weight"].bfloat16().float()
    torch.testing.assert_close(whole[f"{name}.weight"], base + 16 / 4 * b @ a, atol=1e-6, rtol=0)


@pytest.mark.parametrize("world", [1, 2])
def test_training_goes_on_bitwise_from_a_checkpoint(folder: Path, world: int) -> None:
    whole, again = torch.load(folder / f"results-{world}.pt")["resumed"]
    assert whole.keys() == again.keys() and all(
        torch.equal(whole[name], again[name]) for name in whole
    )
