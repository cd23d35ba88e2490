"""The average of weights that train: by hand, put in place and taken back."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from features.teacher.average import WeightAverage


def module() -> nn.Linear:
    made = nn.Linear(2, 1)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[1.0, 2.0]]))
        made.bias.fill_(5.0)
    made.bias.requires_grad_(False)
    return made


def test_it_moves_by_the_rest_of_the_decay_and_leaves_what_does_not_train_out() -> None:
    trained = module()
    average = WeightAverage(trained, decay=0.75)
    average.begin()
    assert average.averages.keys() == {"weight"}
    with torch.no_grad():
        trained.weight.copy_(torch.tensor([[5.0, -2.0]]))
    average.update()
    assert average.averages["weight"].tolist() == [[2.0, 1.0]]
    average.update()
    assert average.averages["weight"].tolist() == [[2.75, 0.25]]
    assert trained.weight.tolist() == [[5.0, -2.0]]


def test_a_module_is_the_average_inside_of_the_block_alone_bitwise() -> None:
    trained = nn.Linear(7, 5)
    average = WeightAverage(trained, decay=0.9)
    average.begin()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn(parameter.shape))
    average.update()
    weights = copy.deepcopy(trained.state_dict())
    averages = {name: tensor.clone() for name, tensor in average.averages.items()}
    with pytest.raises(RuntimeError, match="inside"), average.in_place():
        assert all(torch.equal(trained.state_dict()[name], averages[name]) for name in averages)
        raise RuntimeError("inside")
    assert all(torch.equal(trained.state_dict()[name], weights[name]) for name in weights)
    assert all(torch.equal(average.averages[name], averages[name]) for name in averages)


def test_it_is_not_the_weights_memory() -> None:
    trained = module()
    average = WeightAverage(trained, decay=0.5)
    average.begin()
    assert average.averages["weight"].data_ptr() != trained.weight.data_ptr()
    assert not average.averages["weight"].requires_grad


def test_with_lora_it_is_of_the_adapters_alone(tiny_task: Path) -> None:
    from training.config import ModelConfig
    from workers.model.builder import ModelSpec

    config = ModelConfig(lora_rank=2, target_modules=("all-linear",))
    spec = ModelSpec(config, str(tiny_task / "model"), torch.device("cpu"))
    lm = spec.causal_lm(trainable=True)
    average = WeightAverage(lm, decay=0.5)
    average.begin()
    assert average.averages and all(".lora_" in name for name in average.averages)
