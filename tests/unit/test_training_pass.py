"""What a model computes in training is what it computes when it is read: nothing is random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.unit.test_forward import make_batch
from tests.unit.test_models import SIZES
from training.config import ActorConfig, CriticConfig, CriticModelConfig, ModelConfig
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.model.builder import ModelSpec
from workers.model.forward_settings import forward_settings
from workers.model.packing_check import check_training
from workers.model.policy_model import PolicyModel, PolicyValueModel, ValueModel

CPU = torch.device("cpu")
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "eos_token_id": 2}
# What is random in their training, by the name of their config.
NOISE: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.3},
    "mistral": {"attention_dropout": 0.3, "sliding_window": 4},
    "seed_oss": {"attention_dropout": 0.3, "residual_dropout": 0.3},
    "phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3, **EXPERTS},
    "mixtral": {"router_jitter_noise": 0.3, **EXPERTS},
    "gpt2": {"attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3, **GPT},
    "opt": {"layerdrop": 0.5, "dropout": 0.3, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "biogpt": {"layerdrop": 0.5, "hidden_dropout_prob": 0.3, "activation_dropout": 0.3},
    "falcon": {"hidden_dropout": 0.3, "attention_dropout": 0.3, "alibi": False},
    "stablelm": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
}


def build(kind: str, checkpoints: bool, **settings: Any) -> nn.Module:
    """Builds a policy with random weights, as a worker does."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **NOISE.get(kind, {}), **settings})
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return prepare(lm, checkpoints)


def prepare(lm: nn.Module, checkpoints: bool) -> nn.Module:
    settings = ModelConfig(path="x", dtype="float32", enable_gradient_checkpointing=checkpoints)
    return ModelSpec(settings, "x", CPU)._prepare(lm, trainable=True)


def log_probs_in_training(actor: DataParallelPPOActor) -> Tensor:
    """Log-probs as an update computes them, with their gradient."""
    actor.actor_module.train()
    return actor.forward(make_batch())[0]


@pytest.mark.parametrize("checkpoints", [True, False])
@pytest.mark.parametrize("kind", NOISE)
def test_log_probs_in_training_are_those_that_are_read(kind: str, checkpoints: bool) -> None:
    lm = build(kind, checkpoints)
    check_training(lm)
    settings = forward_settings(ModelConfig(dtype="float32"), True, lm, CPU)
    actor = DataParallelPPOActor(ActorConfig(), lm, forward=settings)
    read, _ = actor.compute_log_prob(make_batch())
    trained = log_probs_in_training(actor)
    assert torch.equal(trained.detach(), read)
    trained.sum().backward()
    without = [name for name, weight in lm.named_parameters() if weight.grad is None]
    assert not [name for name in without if "expert" not in name and "embed_positions" not in name]


@pytest.mark.parametrize("checkpoints", [True, False])
def test_values_in_training_are_those_that_are_read(checkpoints: bool) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("mistral", **SIZES, **NOISE["mistral"], num_labels=1)
    model_config = CriticModelConfig(dtype="float32", enable_gradient_checkpointing=checkpoints)
    model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    model = ModelSpec(model_config, "x", CPU)._prepare(model, trainable=True)
    check_training(model)
    critic = DataParallelPPOCritic(CriticConfig(), ValueModel(model))
    read = critic.compute_values(make_batch())
    assert read.abs().max() > 0
    critic.critic_module.eval = critic.critic_module.train
    assert torch.equal(critic.compute_values(make_batch()), read)


def test_a_policy_with_values_has_no_dropout_in_training() -> None:
    module = PolicyValueModel(build("seed_oss", checkpoints=False))
    ids = torch.arange(3, 23)[None]
    read, _ = module.eval()(ids)
    trained, _ = module.train()(ids)
    assert module.training
    assert torch.equal(read, trained)


def test_checkpointed_layers_are_computed_again_and_give_the_same_gradient() -> None:
    gradients = []
    calls = []
    for checkpoints in (False, True):
        lm = build("mistral", checkpoints)
        layers = [m for m in lm.modules() if isinstance(m, GradientCheckpointingLayer)]
        counted: list[int] = []
        for layer in layers:
            layer.self_attn.register_forward_hook(lambda *_, to=counted: to.append(1))
        actor = DataParallelPPOActor(ActorConfig(), lm)
        log_probs_in_training(actor).sum().backward()
        assert all(layer.training == checkpoints for layer in layers)
        gradients.append([weight.grad for weight in lm.parameters()])
        calls.append(len(counted) / len(layers))
    assert calls == [1, 2]
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_the_check_leaves_modes_gradients_and_random_numbers_as_they_are() -> None:
    lm = build("mixtral", checkpoints=True)
    modes = [module.training for module in lm.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_training(lm)
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in lm.modules()] == modes
    assert all(weight.grad is None for weight in lm.parameters())


def test_a_model_that_is_random_while_it_checkpoints_by_itself_is_refused() -> None:
    """As code of a hub's model may: it asks for the whole model's mode, not for the layers'."""
    lm = build("llama", checkpoints=False)
    own = lm.base_model.forward

    def noisy(**inputs: Any) -> Any:
        output = own(**inputs)
        hidden = output.last_hidden_state
        output.last_hidden_state = nn.functional.dropout(hidden, 0.1, lm.base_model.training)
        return output

    lm.base_model.forward = noisy
    check_training(lm)
    lm.base_model.gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"model type 'llama' computes other states in training"):
        check_training(lm)


def test_a_model_without_gradients_outside_of_training_mode_is_refused() -> None:
    """As the experts of some hub's models, which are only inferred in evaluation mode."""
    lm = build("llama", checkpoints=False)
    mlp = lm.base_model.layers[1].mlp
    own = mlp.forward

    def inferred(states: Tensor) -> Tensor:
        with torch.set_grad_enabled(mlp.training):
            return own(states)

    mlp.forward = inferred
    with pytest.raises(ValueError, match=r"no gradient to model.layers.1.mlp.down_proj.weight"):
        check_training(lm)


def test_a_wrapped_policy_stays_without_noise_however_it_is_switched() -> None:
    policy = PolicyModel(build("gpt2", checkpoints=False))
    outer = nn.ModuleList([policy]).train()
    assert outer.training
    assert policy.training
    assert not any(module.training for module in policy.lm.modules())
