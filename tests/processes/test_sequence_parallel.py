"""A sequence-parallel group (Ulysses) against one process: the same numbers (fp32)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig

from tests.processes.test_ranks import (
    LIMITS,
    MODES,
    change,
    largest_difference,
    start_ranks,
    whole_weights,
)
from tests.unit.test_actor_critic import make_update
from tests.unit.test_forward import PACKED, SHARED
from tests.unit.test_models import MODELS, SIZES
from tests.unit.test_models import build as build_model
from training.config import (
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    FSDPConfig,
    MicroBatching,
    ModelConfig,
)
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.model.attention import use_packed_attention
from workers.model.builder import ModelSpec
from workers.model.forward_settings import ForwardSettings, forward_settings
from workers.model.micro_batches import iter_micro_batches
from workers.model.packing_check import check_shared_sequences
from workers.model.policy_model import PolicyModel, ValueModel
from workers.ranks.process_groups import start_process_group
from workers.ranks.sharding import shard_model

CPU = torch.device("cpu")
# On one and on three key heads, which two ranks do not divide.
HEADS = {"4 heads": (4, 1), "6 heads": (6, 3)}
SPLITS = dict(zip(LIMITS, MODES, strict=True))
SHARING = {"shared prefix": True, "packed": False}
# Ranks, and the size of their sequence-parallel groups.
LAYOUTS_OF_RANKS = [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)]


def run_rank(folder: str, rank: int, world: int, shared: int, port: int) -> None:
    """Computes all that is compared, on this rank's rows; one process runs padded rows."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    start_process_group(CPU)
    groups = world // shared
    data = make_update().pad_with_dummies(2).chunk(groups)[rank // shared]
    results: dict[str, Any] = {}
    for heads in HEADS:
        for layout, share in SHARING.items():
            for limits, mode in SPLITS.items():
                name = f"{heads} {layout} {limits}"
                config = ActorConfig(
                    **LIMITS[limits],
                    loss_agg_mode=mode,
                    entropy_coeff=0.1,
                    use_kl_loss=True,
                    grad_clip=0.5,
                )
                module, settings, optimizer = build(
                    folder, heads, share, shared, checkpointing=limits == "rows"
                )
                actor = DataParallelPPOActor(config, module, optimizer, forward=settings)
                results[f"rows log_probs {name}"], results[f"rows entropies {name}"] = (
                    actor.compute_log_prob(data, True)
                )
                before = whole_weights(module)
                metrics = actor.update_policy(data)
                results[f"actor {name}"] = (change(before, module), metrics)
                module, settings, optimizer = build(folder, heads, share, shared, value=True)
                critic = DataParallelPPOCritic(
                    CriticConfig(**LIMITS[limits]), module, optimizer, forward=settings
                )
                results[f"rows values {name}"] = critic.compute_values(data)
                before = whole_weights(module)
                metrics = critic.update_critic(data)
                results[f"critic {name}"] = (change(before, module), metrics)
            actor.settings = replace(actor.settings, dtype=torch.bfloat16)
            results[f"bf16 {heads} {layout}"], _ = actor.compute_log_prob(data)
    torch.save(results, Path(folder) / f"results-{world}-{rank}.pt")
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def build(
    folder: str,
    heads: str,
    share_prompts: bool,
    shared: int,
    *,
    checkpointing: bool = False,
    value: bool = False,
) -> tuple[nn.Module, ForwardSettings, torch.optim.Optimizer]:
    config_cls = CriticModelConfig if value else ModelConfig
    config = config_cls(enable_gradient_checkpointing=checkpointing, dtype="float32")
    spec = ModelSpec(config, str(Path(folder) / heads), CPU)
    if value:
        inner = spec.value_model()
        nn.init.constant_(inner.score.weight, 0.01)
    else:
        inner = spec.causal_lm(trainable=True)
    settings = forward_settings(config, share_prompts, inner, CPU, shared)
    if shared == 1:
        inner.set_attn_implementation("sdpa")
        settings = replace(settings, pack_rows=False)
    elif share_prompts:
        # However little it saves.
        settings = replace(settings, key_cost=0.0)
    module = ValueModel(inner) if value else PolicyModel(inner)
    shard_model(module, FSDPConfig(), torch.float32, CPU)
    # The change is then the gradient, to scale.
    return module, settings, torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequence_parallel")
    torch.manual_seed(0)
    for name, (heads, key_heads) in HEADS.items():
        sizes = SIZES | {
            "hidden_size": 8 * heads,
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
        }
        build_model(LlamaConfig(**sizes), None).save_pretrained(folder / name)
    return folder


def results(folder: Path, world: int, shared: int) -> list[dict[str, Any]]:
    """Returns the results of every rank, which run at the first use."""
    if not (folder / f"results-{world}-0.pt").exists():
        start_ranks(run_rank, [(str(folder), rank, world, shared) for rank in range(world)])
    return [torch.load(folder / f"results-{world}-{rank}.pt") for rank in range(world)]


@pytest.mark.long
@pytest.mark.parametrize(("world", "shared"), LAYOUTS_OF_RANKS)
def test_a_sequence_parallel_group_makes_the_updates_of_one(
    folder: Path, world: int, shared: int
) -> None:
    (one,), many = results(folder, 1, 1), results(folder, world, shared)
    names = [name for name in one if name.startswith(("actor", "critic"))]
    assert len(names) == 2 * len(HEADS) * len(SHARING) * len(SPLITS)
    for name in names:
        for rank in many:
            assert largest_difference(one[name][0], rank[name][0]) < 1e-5, name
            assert rank[name][1] == pytest.approx(one[name][1], rel=1e-5, abs=1e-7), name


@pytest.mark.long
@pytest.mark.parametrize(("world", "shared"), LAYOUTS_OF_RANKS)
def test_each_of_them_has_the_log_probs_entropies_and_values_of_one(
    folder: Path, world: int, shared: int
) -> None:
    (one,), many = results(folder, 1, 1), results(folder, world, shared)
    for name in (name for name in one if name.startswith(("rows", "bf16"))):
        for first in range(shared):
            rows = torch.cat([rank[name] for rank in many[first::shared]])
            tolerance = 1e-5 if name.startswith("rows") else 3e-2
            assert (rows - one[name]).norm() < tolerance * one[name].norm(), name


class Rank:
    """Is a process group of which only the place in it is asked for."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("settings", [SHARED, PACKED])
@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_the_ranks_are_the_whole_with_padding(
    settings: ForwardSettings, size: int
) -> None:
    limits = MicroBatching(max_token_len=24)
    wholes = [inputs for _, _, inputs in iter_micro_batches(make_update(), settings, limits)]
    assert any(inputs.input_ids.shape[1] % size for inputs in wholes)
    ranks = [replace(settings, sequence_group=Rank(rank, size)) for rank in range(size)]
    of_ranks = [
        [inputs for _, _, inputs in iter_micro_batches(make_update(), s, limits)] for s in ranks
    ]
    empty = 0
    for whole, *parts in zip(wholes, *of_ranks, strict=True):
        length, tokens = whole.input_ids.shape[1], {}
        ids = torch.cat([part.input_ids for part in parts], dim=1)
        positions = torch.cat([part.position_ids for part in parts], dim=1)
        assert torch.equal(ids[:, :length], whole.input_ids) and not ids[:, length:].any()
        assert torch.equal(positions[:, :length], whole.position_ids)
        for rank, part in enumerate(parts):
            assert part.sequences is not None and part.sequences.group is ranks[rank].sequence_group
            assert sum(part.sequences.lengths) == ids.shape[1]
            width = part.input_ids.shape[1]
            assert (part.logit_positions < part.input_ids.numel()).all() and (
                part.logit_positions >= 0
            ).all()
            empty += not len(part.logit_positions)
            of_part = zip(
                part.logit_positions.tolist(), part.rows, part.columns, part.labels, strict=True
            )
            for position, *token in of_part:
                tokens[position // width, rank * width + position % width, *map(int, token)] = True
        expected = zip(
            whole.logit_positions.tolist(), whole.rows, whole.columns, whole.labels, strict=True
        )
        assert tokens.keys() == {
            (p // length, p % length, *map(int, token)) for p, *token in expected
        }
    # A rank without a sampled token must be among them.
    assert empty or size == 2


def test_models_whose_sequences_cannot_be_shared_are_refused() -> None:
    lm = build_model(*MODELS["llama"][:2])
    with pytest.raises(
        ValueError,
        match="ulysses_sequence_parallel_size=3 does not divide the model's 4 attention heads",
    ):
        check_shared_sequences(lm, 3)
    with pytest.raises(
        ValueError, match="size=2: model type 'llama' does not have plain sdpa attention"
    ):
        check_shared_sequences(lm, 2)
    assert use_packed_attention(lm)
    check_shared_sequences(lm, 2)
    windowed = build_model(*MODELS["mistral with a window"][:2])
    with pytest.raises(ValueError, match="model type 'mistral' does not have plain sdpa attention"):
        forward_settings(ModelConfig(), True, windowed, CPU, 2)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic = build_model(LlamaConfig(**SIZES, rope_parameters=rope), None)
    with pytest.raises(ValueError, match="rope_type=dynamic depends on the longest position"):
        forward_settings(ModelConfig(), True, dynamic, CPU, 2)
