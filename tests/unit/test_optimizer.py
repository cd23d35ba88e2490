"""The optimiser that a run names: what it trains, with which settings, and that it goes on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.test_resume import tensors
from tests.e2e.test_training import tiny_argv, tiny_config, train
from training.config import OptimConfig
from training.config.loader import load_config
from training.config.resources.user_code import check_optimizers
from workers.model import state
from workers.model.muon import MuonAndAdamW, matrices_and_others
from workers.model.optimizer import build_optimizer, try_optimizer

OWN = """
import torch


class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr, scale=1.0):
        super().__init__(params, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * group["scale"] * parameter.grad.sign()
"""


def model(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def names_of(module: nn.Module, parameters: list[Any]) -> list[str]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_the_default_is_adamw_with_the_settings_of_its_section() -> None:
    optimizer = build_optimizer(
        nn.Linear(2, 2), OptimConfig(lr=0.3, betas=(0.8, 0.9), weight_decay=0.2)
    )
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.AdamW and group["fused"]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.3, (0.8, 0.9), 0.2)


@pytest.mark.parametrize("tied", [False, True])
def test_muon_trains_the_matrices_inside_and_adamw_the_rest(tied: bool) -> None:
    lm = model(tied=tied)
    matrices, others = matrices_and_others(lm)
    assert all("_proj" in name for name in names_of(lm, matrices)) and len(matrices) == 7
    expected = {"model.embed_tokens.weight", "model.norm.weight"}
    expected |= {f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")}
    if not tied:
        expected.add("lm_head.weight")
    assert set(names_of(lm, others)) == expected


def test_muons_first_step_is_an_orthogonal_matrix_as_large_as_adamws() -> None:
    layer = nn.Linear(8, 8, bias=False)
    optim = OptimConfig(optimizer="Muon", lr=0.1, weight_decay=0.0)
    before = layer.weight.detach().clone()
    step(layer, build_optimizer(layer, optim), seed=1)
    # Scaled by 0.2 sqrt(max of the sides); Newton and Schulz's singular values are about 1.
    moved = (before - layer.weight.detach()) / (0.1 * 0.2 * 8**0.5)
    singular = torch.linalg.svdvals(moved)
    assert (singular > 0.6).all() and (singular < 1.3).all()


def test_both_parts_go_on_from_a_state_and_with_a_schedules_rate() -> None:
    optim = OptimConfig(optimizer="Muon", lr=0.01)
    one, other = model(tied=False), model(tied=False)
    first, second = build_optimizer(one, optim), build_optimizer(other, optim)
    assert isinstance(second, MuonAndAdamW)
    step(one, first, seed=1)
    other.load_state_dict(one.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer in (first, second):
        for group in optimizer.param_groups:
            group["lr"] = 0.02
    step(one, first, seed=2)
    step(other, second, seed=2)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert len(second.state) == len(list(other.parameters()))


def test_a_part_without_a_gradient_begins_with_its_own_optimisers_state() -> None:
    """As a checkpoint asks for it: a router's correction is AdamW's, whatever Muon keeps."""
    lm = model(tied=False)
    optimizer = build_optimizer(lm, OptimConfig(optimizer="Muon", lr=0.01))
    norm = lm.model.norm.weight
    for parameter in lm.parameters():
        parameter.grad = None if parameter is norm else torch.ones_like(parameter)
    optimizer.step()
    assert norm not in optimizer.state
    state._begin_missing_states(optimizer)
    assert set(optimizer.state[norm]) == {"step", "exp_avg", "exp_avg_sq"}
    norm.grad = torch.ones_like(norm)
    optimizer.step()


def test_an_optimiser_of_ones_own_file_trains(tmp_path: Path) -> None:
    (tmp_path / "signs.py").write_text(OWN)
    source = f"{tmp_path}/signs.py:Signs"
    optim = OptimConfig(optimizer=source, lr=0.5, override_optimizer_config={"scale": 2.0})
    layer = nn.Linear(1, 1, bias=False)
    before = layer.weight.item()
    layer.weight.grad = torch.ones(1, 1)
    build_optimizer(layer, optim).step()
    assert layer.weight.item() == before - 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "muon"}, "Did you mean 'Muon'"),
        ({"optimizer": "Optimizer"}, "torch.optim has"),
        ({"optimizer": "torch.nn:Linear"}, "is no class of torch.optim.Optimizer"),
        ({"optimizer": "SGD", "betas": (0.5, 0.9)}, "SGD takes no betas"),
        ({"override_optimizer_config": {"epss": 1}}, "Did you mean 'eps'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        try_optimizer(OptimConfig(**settings))


def test_a_config_names_the_section_whose_optimiser_cannot_be(tmp_path: Path) -> None:
    lazy = OWN.replace("parameter -=", "_ =")
    (tmp_path / "lazy.py").write_text(lazy)
    overrides = (
        "actor_rollout_ref.actor.optim.optimizer=LBFGS",
        f"critic.optim.optimizer={tmp_path}/lazy.py:Signs",
    )
    config = load_config(tiny_argv(tmp_path, tmp_path, *overrides), check=False).config
    closure, nothing = check_optimizers(config)
    assert "actor_rollout_ref.actor.optim.optimizer=LBFGS" in closure and "closure" in closure
    assert nothing.startswith("critic.optim.optimizer=") and "changed nothing" in nothing


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "SGD"])
def test_a_run_goes_on_bitwise(name: str, tiny_task: Path, tmp_path: Path) -> None:
    common = (
        "trainer.save_freq=1",
        f"actor_rollout_ref.actor.optim.optimizer={name}",
        f"critic.optim.optimizer={name}",
        "trainer.deterministic=true",
    )
    train(tiny_config(tiny_task, tmp_path / "whole", *common))
    again = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path}/whole/global_step_1",
    )
    train(tiny_config(tiny_task, tmp_path / "again", *common, *again))
    for part in ("actor/model", "actor/optimizer"):
        one, other = [
            tensors(tmp_path / run / "global_step_2" / part) for run in ("whole", "again")
        ]
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == []
