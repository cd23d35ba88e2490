"""A checkpoint that two ranks wrote is exported as one that a single process wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from features.export import export
from tests.features.export.test_export import write_run
from tests.processes.test_ranks import join_ranks, spawn_ranks
from training.config import FSDPConfig, ModelConfig, OptimConfig
from training.run import checkpoint_names
from training.run.checkpoint_contents import DriverState, save_driver_state
from workers.model import state as model_state
from workers.model.builder import ModelSpec
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.optimizer import build_optimizer, build_scheduler
from workers.model.policy_model import PolicyModel, PolicyValueModel
from workers.ranks.sharding import shard_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
KINDS = {"shared": 0, "lora": 4}


def save_sharded(folder: str, number: int, world: int, port: int, kind: str) -> None:
    """Saves a policy and its Hugging Face folder, with weights, from each rank's shards."""
    device = join_ranks(number, world, port, kind)
    for name, rank in KINDS.items():
        settings = ModelConfig(dtype="float32", lora_rank=rank, lora_alpha=24)
        spec = ModelSpec(settings, str(Path(folder) / "model"), device)
        lm = spec.causal_lm(trainable=True)
        policy = PolicyModel(PolicyValueModel(lm) if name == "shared" else lm)
        shard_model(policy, FSDPConfig(), torch.float32, device)
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.5).add_(0.01)
        trained = policy if name == "shared" else policy.lm
        optimizer = build_optimizer(trained, OptimConfig())
        state = (trained, optimizer, build_scheduler(optimizer, OptimConfig(), 5))
        writer = CheckpointWriter()
        actor = Path(folder) / name / "unfinished/actor"
        model_state.save(writer, actor, state, ("model", "hf_model"), spec.tokenizer)
        assert writer.is_written(wait=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tiny_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "model").symlink_to(tiny_task / "model")
    spawn_ranks(save_sharded, str(folder), 2, "cpu")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_joined_and_merged_as_the_ranks_themselves_do(folder: Path, kind: str) -> None:
    run_dir = folder / kind
    actor = run_dir / "unfinished/actor"
    assert len(list((actor / "model").glob("*.distcp"))) == 2, "each rank wrote a part"
    written = load_file(actor / "huggingface/model.safetensors")
    checkpoint = checkpoint_names.start_checkpoint(run_dir, 1)
    actor.rename(checkpoint / "actor")
    save_driver_state(checkpoint, DriverState(global_steps=1))
    checkpoint_names.complete_checkpoint(checkpoint)
    # The settings of such a run.
    write_run(folder / f"settings of {kind}", folder / "model", kind)
    (folder / f"settings of {kind}/config.yaml").rename(run_dir / "config.yaml")
    export.export(run_dir, folder / f"{kind}-out", dtype="float32")
    exported = load_file(folder / f"{kind}-out/model.safetensors")
    assert exported.keys() == written.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor.to(torch.bfloat16), written[name]), name
