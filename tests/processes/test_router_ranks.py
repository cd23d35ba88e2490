"""Replay of routing under FSDP2: two ranks make the update of one, checkpointed, with adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.protocol import DataProto
from tests.processes.test_family_ranks import ANSWER, PROMPT, ROWS, drawn_update
from tests.processes.test_ranks import join_ranks, largest_difference, spawn_ranks, whole_weights
from tests.zoo.families import FAMILIES
from training.config import ActorConfig, FSDPConfig, ModelConfig
from workers.dp_actor import DataParallelPPOActor
from workers.model.builder import ModelSpec
from workers.model.forward_settings import forward_settings
from workers.model.policy_model import PolicyModel
from workers.model.router_replay import check_routers, missing_choice, open_routers
from workers.ranks.sharding import shard_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
FAMILY = "qwen3_moe"
EXPERTS, TOP_K, LAYERS = 4, 2, 2
KINDS = {"whole": 0, "adapters": 4}


def drawn_with_choices() -> DataProto:
    """Draws an update whose tokens have drawn experts, but for some that have none."""
    data = drawn_update()
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(ROWS, PROMPT + ANSWER, LAYERS, EXPERTS, generator=generator)
    experts = order.argsort(dim=-1)[..., :TOP_K].to(torch.uint8)
    experts[1, -1] = missing_choice(torch.uint8)
    experts[3, PROMPT : PROMPT + 2] = missing_choice(torch.uint8)
    data.batch["routed_experts"] = experts
    return data


def run_rank(folder: str, number: int, world: int, port: int, kind: str) -> None:
    """Writes down what is compared."""
    device = join_ranks(number, world, port, kind)
    data = drawn_with_choices().chunk(world)[number]
    results = {}
    for name, lora_rank in KINDS.items():
        path = str(Path(folder) / FAMILY)
        config = ModelConfig(
            path=path, dtype="float32", lora_rank=lora_rank, enable_gradient_checkpointing=True
        )
        torch.manual_seed(0)
        lm = ModelSpec(config, path, device).causal_lm(trainable=True)
        settings = forward_settings(config, False, lm, device)
        open_routers(lm)
        check_routers(lm)
        module = PolicyModel(lm)
        shard_model(module, FSDPConfig(), torch.float32, device)
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        actor = DataParallelPPOActor(
            ActorConfig(entropy_coeff=0.1, grad_clip=1e9), module, optimizer, forward=settings
        )
        before = whole_weights(module)
        metrics = actor.update_policy(data)
        after = whole_weights(module)
        results[name] = ({key: after[key] - before[key] for key in after}, metrics)
    if number == 0:
        torch.save(results, Path(folder) / f"results-{world}.pt")
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routers")
    FAMILIES[FAMILY].make(folder / FAMILY)
    for world in (1, 2):
        spawn_ranks(run_rank, str(folder), world, "cpu")
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_make_the_update_of_one_with_given_experts(folder: Path, name: str) -> None:
    (one, one_metrics), (two, two_metrics) = (
        torch.load(folder / f"results-{world}.pt")[name] for world in (1, 2)
    )
    assert largest_difference(one, two) < 1e-5
    assert two_metrics == pytest.approx(one_metrics, rel=1e-5, abs=1e-6)
    assert one_metrics["actor/router_replay_differing"] > 0.5
    assert one_metrics["actor/router_replay_absent"] > 0
