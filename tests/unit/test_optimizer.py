"""The optimiser that a run names: what it trains, with which settings, and that it goes on."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.test_resume import tensors
from tests.e2e.test_training import tiny_argv, tiny_config, train
from training.config import OptimConfig
from training.config.loader import load_config
from training.config.resources.user_code import check_optimizers
from workers.model import state as model_state
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.muon import MuonAndAdamW, matrices_and_others
from workers.model.optimizer import build_optimizer, build_scheduler, try_optimizer

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
    """A checkpoint holds what there is: a router's correction is AdamW's, whatever Muon keeps."""
    lm = model(tied=False)
    optimizer = build_optimizer(lm, OptimConfig(optimizer="Muon", lr=0.01))
    norm = lm.model.norm.weight
    for parameter in lm.parameters():
        parameter.grad = None if parameter is norm else torch.ones_like(parameter)
    optimizer.step()
    assert norm not in optimizer.state
    saved = model_state.optimizer_tensors(lm, optimizer)
    assert "state.lm_head.weight.exp_avg" in saved
    assert not [key for key in saved if key.startswith("state.model.norm.weight")]
    assert not optimizer.state.get(norm)
    norm.grad = torch.ones_like(norm)
    optimizer.step()
    assert set(optimizer.state[norm]) == {"step", "exp_avg", "exp_avg_sq"}


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


@pytest.mark.seconds
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


class TwoPaths(nn.Module):
    """Has a part that some passes leave out, as experts that no token goes to are."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.always = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, *, whole: bool) -> torch.Tensor:
        outputs: torch.Tensor = self.always(rows)
        return outputs + self.sometimes(rows) if whole else outputs


MAKERS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2, momentum_decay=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2),
    "Rprop": partial(torch.optim.Rprop, lr=1e-2),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2, t0=2),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.5),
    "plain SGD": partial(torch.optim.SGD, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True),
}


def play(
    state: tuple[TwoPaths, torch.optim.Optimizer, LambdaLR], steps: range, *, whole_from: int
) -> None:
    module, optimizer, schedule = state
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for number in steps:
        module(rows, whole=number >= whole_from).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()


def made(name: str, seed: int) -> tuple[TwoPaths, torch.optim.Optimizer, LambdaLR]:
    module = TwoPaths(seed)
    optimizer = MAKERS[name](list(module.parameters()))
    return module, optimizer, LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.parametrize("whole_from", [0, 3, 5])
@pytest.mark.parametrize("name", MAKERS)
def test_a_part_without_a_gradient_so_far_begins_as_if_nothing_had_been_saved(
    name: str, whole_from: int, tmp_path: Path
) -> None:
    """A save changes nothing, and what goes on from it is what goes on without."""
    contents = ("model", "optimizer", "extra")
    alone, saved, resumed = made(name, 0), made(name, 0), made(name, 1)
    play(alone, range(6), whole_from=whole_from)
    play(saved, range(2), whole_from=whole_from)
    writer = CheckpointWriter()
    model_state.save(writer, tmp_path, saved, contents)
    assert writer.is_written(wait=True)
    # What is loaded takes the place of a state that is there.
    play(resumed, range(1), whole_from=0)
    model_state.load(tmp_path, resumed, contents)
    play(saved, range(2, 6), whole_from=whole_from)
    play(resumed, range(2, 6), whole_from=whole_from)
    expected = alone[0].state_dict()
    for played in (saved, resumed):
        for key, tensor in played[0].state_dict().items():
            assert torch.equal(tensor, expected[key]), key


# Each setting of the section by its number


def weight_after(optim: OptimConfig, *gradients: float) -> float:
    """Returns what becomes of the weight 1 in steps with these gradients."""
    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    optimizer = build_optimizer(layer, optim)
    for gradient in gradients:
        layer.weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
    return layer.weight.item()


def test_lr_and_weight_decay_by_hand() -> None:
    """A decay by lr x weight_decay, then lr against the gradient's sign."""
    optim = OptimConfig(lr=0.1, weight_decay=0.5)
    assert weight_after(optim, 3.0) == pytest.approx(1 * (1 - 0.05) - 0.1, rel=1e-6)
    assert weight_after(optim, 0.0) == pytest.approx(1 - 0.05, rel=1e-6)


def test_betas_by_hand() -> None:
    """A second step without a gradient goes on by both moments, corrected for their start at 0."""
    first, second = 0.8, 0.6
    optim = OptimConfig(lr=0.1, weight_decay=0.0, betas=(first, second))
    mean = first * (1 - first) / (1 - first**2)
    square = second * (1 - second) / (1 - second**2)
    expected = 1 - 0.1 - 0.1 * mean / square**0.5
    assert weight_after(optim, 1.0, 0.0) == pytest.approx(expected, rel=1e-5)


def rates(total: int, **settings: Any) -> list[float]:
    """Returns the rate of each training step, of lr=1, and of one beyond the last."""
    optim = OptimConfig(lr=1.0, **settings)
    optimizer = build_optimizer(nn.Linear(1, 1), optim)
    scheduler = build_scheduler(optimizer, optim, total)
    seen = []
    for _ in range(total + 1):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(
    "warmup", [{"lr_warmup_steps": 4}, {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.5}]
)
def test_lr_warmup_steps_or_their_ratio_begin_at_zero(warmup: dict[str, Any]) -> None:
    assert rates(8, **warmup) == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


def test_without_a_warm_up_the_first_step_has_the_whole_rate() -> None:
    assert rates(3) == [1, 1, 1, 1]
    # A number of steps wins over the ratio.
    assert rates(3, lr_warmup_steps=0, lr_warmup_steps_ratio=1.0) == [1, 1, 1, 1]


def test_cosine_ends_at_min_lr_ratio() -> None:
    # The cosine's quarters between 1 and 0.2: 0.6 + 0.4 cos(pi t).
    expected = [0.6 + 0.4 * math.cos(math.pi * step / 4) for step in range(5)]
    assert rates(4, scheduler="cosine", min_lr_ratio=0.2) == pytest.approx(expected)
    warmed = rates(6, scheduler="cosine", min_lr_ratio=0.2, lr_warmup_steps=2)
    assert warmed[2:] == pytest.approx(expected)


def test_num_cycles_are_waves_over_the_run() -> None:
    whole = rates(4, scheduler="cosine", num_cycles=1.0)
    assert whole == pytest.approx([1, 0.5, 0, 0.5, 1], abs=1e-7)


def test_wsd_holds_for_nine_tenths_and_then_decays_to_min_lr_ratio() -> None:
    held = rates(20, scheduler="wsd", min_lr_ratio=0.2)
    assert held[:19] == pytest.approx([1] * 19)
    assert held[19:] == pytest.approx([0.6, 0.2])
