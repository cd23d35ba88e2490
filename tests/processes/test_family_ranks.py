"""Two ranks under FSDP2 make the update of one, for one family of each kind of layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.protocol import DataProto
from tests.processes.test_ranks import join_ranks, largest_difference, spawn_ranks, whole_weights
from tests.zoo.families import FAMILIES
from training.config import ActorConfig, FSDPConfig, ModelConfig
from workers.dp_actor import DataParallelPPOActor
from workers.model.builder import ModelSpec
from workers.model.forward_settings import forward_settings
from workers.model.packing_check import check_forward, check_training
from workers.model.policy_model import PolicyModel
from workers.ranks.process_groups import rank
from workers.ranks.sharding import shard_model
from workers.weight_sync.manifest import iter_weights

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
# Windows; experts; a state, of a model that also sees; a state beside attention in every layer.
NAMES = ("gemma3", "qwen3_moe", "qwen3_5_vision", "falcon_h1")
ROWS = 4
PROMPT = 6
ANSWER = 10
NEVER = (20, 21)


def drawn_update() -> DataProto:
    """Draws rows of unequal length with advantages; none has an id that is never sampled."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(22, 88, (ROWS, PROMPT), generator=generator)
    responses = torch.randint(22, 88, (ROWS, ANSWER), generator=generator)
    mask = torch.arange(ANSWER) < torch.tensor([10, 3, 7, 10])[:, None]
    attention = torch.cat([torch.ones(ROWS, PROMPT, dtype=torch.bool), mask], dim=1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask.long(),
        "attention_mask": attention.long(),
        "advantages": torch.randn(ROWS, ANSWER, generator=generator) * mask,
    }
    return DataProto.from_dict(tensors=tensors)


def run_rank(folder: str, number: int, world: int, port: int, kind: str) -> None:
    """Writes down what is compared."""
    device = join_ranks(number, world, port, kind)
    data = drawn_update().chunk(world)[number]
    results = {}
    for name in NAMES:
        path = str(Path(folder) / name)
        config = ModelConfig(path=path, dtype="float32")
        spec = ModelSpec(config, path, device)
        lm = spec.causal_lm(trainable=True)
        assert all(parameter.is_meta == (rank() > 0) for parameter in lm.parameters())
        settings = forward_settings(config, False, lm, device)
        check_forward(lm)
        check_training(lm)
        module = PolicyModel(lm, NEVER)
        shard_model(module, FSDPConfig(), torch.float32, device)
        # The change is then the gradient, to scale.
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        actor = DataParallelPPOActor(
            ActorConfig(entropy_coeff=0.1, grad_clip=1e9), module, optimizer, forward=settings
        )
        log_probs, entropies = actor.compute_log_prob(data, calculate_entropy=True)
        before = whole_weights(module)
        metrics = actor.update_policy(data)
        after = whole_weights(module)
        sent = {key: tensor.clone() for key, tensor in iter_weights(lm, torch.float32)}
        change = {key: after[key] - before[key] for key in after}
        results[name] = (change, metrics, sent)
        rows = {"log_probs": log_probs, "entropies": entropies}
        torch.save(rows, Path(folder) / f"{name}-{world}-{number}.pt")
    if number == 0:
        torch.save(results, Path(folder) / f"results-{world}.pt")
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for name in NAMES:
        FAMILIES[name].make(folder / name)
    for world in (1, 2):
        spawn_ranks(run_rank, str(folder), world, "cpu")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_make_the_update_of_one_and_send_its_weights(folder: Path, name: str) -> None:
    (one, one_metrics, one_sent), (two, two_metrics, two_sent) = (
        torch.load(folder / f"results-{world}.pt")[name] for world in (1, 2)
    )
    assert largest_difference(one, two) < 1e-5
    assert two_metrics == pytest.approx(one_metrics, rel=1e-5, abs=1e-6)
    assert one_sent.keys() == two_sent.keys()
    assert max(float((one_sent[key] - two_sent[key]).abs().max()) for key in one_sent) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_compute_the_log_probs_and_entropies_of_one(folder: Path, name: str) -> None:
    one = torch.load(folder / f"{name}-1-0.pt")
    halves = [torch.load(folder / f"{name}-2-{number}.pt") for number in (0, 1)]
    for kind, rows in one.items():
        computed = torch.cat([half[kind] for half in halves])
        torch.testing.assert_close(computed, rows, rtol=0, atol=1e-5)
