"""What an engine gets of a checkpoint is what it got of the policy that was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from features.evaluation import evaluated_weights
from features.evaluation.evaluated_weights import EvaluatedWeights, read_checkpoint
from training.config import ModelConfig
from training.config.schema.optim import OptimConfig
from workers.model import state as model_state
from workers.model.builder import ModelSpec
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.optimizer import build_optimizer, build_scheduler
from workers.model.policy_model import PolicyModel, PolicyValueModel
from workers.weight_sync.manifest import iter_weights, weight_manifest


def saved(module: nn.Module, folder: Path) -> str:
    """Saves a module's weights as a run does; returns their folder."""
    settings = OptimConfig()
    optimizer = build_optimizer(module, settings)
    writer = CheckpointWriter()
    state = (module, optimizer, build_scheduler(optimizer, settings, 1))
    model_state.save(writer, folder, state, ["model"])
    writer.is_written(wait=True)
    return str(folder / "model")


def a_policy(path: Path) -> tuple[ModelSpec, nn.Module]:
    spec = ModelSpec(ModelConfig(path=str(path)), str(path), torch.device("cpu"))
    lm = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += torch.randn_like(parameter)
    return spec, lm


@pytest.mark.parametrize("piece_bytes", [1, 1 << 30])
@pytest.mark.parametrize("has_values", [False, True])
def test_a_tied_model_comes_under_all_its_names_in_pieces_of_any_size(
    tied_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
    has_values: bool,
) -> None:
    monkeypatch.setattr(evaluated_weights, "PIECE_BYTES", piece_bytes)
    spec, lm = a_policy(tied_model)
    module = PolicyModel(PolicyValueModel(lm)) if has_values else lm
    weights = EvaluatedWeights("checkpoint", saved(module, tmp_path), has_values)
    manifest, pieces = read_checkpoint(weights, spec, torch.bfloat16)
    assert manifest == weight_manifest(lm)
    read = list(pieces)
    sent = list(iter_weights(lm, torch.bfloat16))
    assert [name for name, _ in read] == [name for name, _ in sent]
    assert "lm_head.weight" in manifest
    for (name, tensor), (_, expected) in zip(read, sent, strict=True):
        assert torch.equal(tensor, expected), name


def test_weights_of_another_model_are_refused(
    tied_model: Path, tiny_task: Path, tmp_path: Path
) -> None:
    """The second one's head is not tied."""
    _, lm = a_policy(tied_model)
    spec, _ = a_policy(tiny_task / "model")
    weights = EvaluatedWeights("checkpoint", saved(lm, tmp_path))
    with pytest.raises(ValueError, match="saved by another model"):
        read_checkpoint(weights, spec, torch.float32)


def test_a_folder_that_lacks_tensors_is_refused_and_not_filled_with_random_numbers(
    tiny_task: Path, tmp_path: Path
) -> None:
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    state = lm.state_dict()
    name = next(name for name in state if name.endswith("norm.weight"))
    lm.save_pretrained(tmp_path, state_dict={key: state[key] for key in state if key != name})
    spec = ModelSpec(ModelConfig(path=str(tmp_path)), str(tmp_path), torch.device("cpu"))
    with pytest.raises(ValueError, match=f"1 tensors are missing or of another shape, as {name}"):
        evaluated_weights._read_lm(spec, torch.float32)
