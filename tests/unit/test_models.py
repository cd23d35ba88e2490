"""Kinds of models: windows, other attention, scaled and capped logits; each has its log-probs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from tests.unit.test_forward import PACKED, SHARED, make_batch, packed, plain_log_probs
from training.config import CriticConfig, CriticModelConfig, MicroBatching, ModelConfig
from workers.dp_critic import DataParallelPPOCritic
from workers.model.builder import ModelSpec
from workers.model.forward_settings import ForwardSettings, forward_settings
from workers.model.packing_check import attends_fully, check_forward, pack_rows
from workers.model.policy_model import PolicyModel, PolicyValueModel, ValueModel

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# name -> (config, attention, whether a group's prompt may be shared)
MODELS: dict[str, tuple[PretrainedConfig, str | None, bool]] = {
    "llama": (LlamaConfig(**SIZES), None, True),
    "llama eager": (LlamaConfig(**SIZES), "eager", False),
    "qwen2": (Qwen2Config(**SIZES), None, True),
    "qwen3": (Qwen3Config(**SIZES, head_dim=8), None, True),
    "mistral with a window": (MistralConfig(**SIZES, sliding_window=4), None, False),
    "gemma3 with a window": (Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4), None, False),
    "gemma2 capped": (Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0), None, False),
    "granite scaled": (GraniteConfig(**SIZES, logits_scaling=8.0), None, True),
    "cohere scaled": (CohereConfig(**SIZES, logit_scale=0.0625), None, True),
    "gpt2": (
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=2, bos_token_id=1),
        None,
        True,
    ),
    "gpt-oss eager": (
        GptOssConfig(
            **SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
        ),
        "eager",
        False,
    ),
}


def build(config: PretrainedConfig, attention: str | None) -> nn.Module:
    torch.manual_seed(0)
    kwargs = {"attn_implementation": attention} if attention else {}
    # A model may write its attention down in it.
    config = copy.deepcopy(config)
    lm = AutoModelForCausalLM.from_config(config, **kwargs).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                # Differences must show.
                parameter.mul_(5)
    return lm


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strip_padding", [True, False])
def test_log_probs_are_the_models_own_with_padding_and_without(
    name: str, strip_padding: bool
) -> None:
    config, attention, may_share = MODELS[name]
    lm = build(config, attention)
    check_forward(lm)
    assert attends_fully(lm.config) == may_share
    settings = ForwardSettings(strip_padding=strip_padding)
    data = make_batch()
    got, _ = packed(lm, data, settings, MicroBatching(max_token_len=60))
    expected, _ = plain_log_probs(lm, data, 1.0)
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", [name for name, (_, _, may_share) in MODELS.items() if may_share])
def test_packed_rows_have_the_models_own_log_probs(name: str) -> None:
    lm = build(*MODELS[name][:2])
    expected, _ = plain_log_probs(lm, make_batch(), 1.0)
    assert pack_rows(lm)
    check_forward(lm)
    for settings in (PACKED, SHARED):
        got, _ = packed(lm, make_batch(), settings, MicroBatching(max_token_len=60))
        torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3 with a window", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_layers_hand_on_is_of_the_compute_type_and_so_are_gradients_to_them(
    name, dtype, tmp_path
) -> None:
    build(*MODELS[name][:2]).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), enable_gradient_checkpointing=False)
    lm = ModelSpec(config, str(tmp_path), torch.device("cpu")).causal_lm(trainable=True)
    forward, backward = set(), set()
    for module in lm.modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_hook(lambda module, args, output: forward.add(output.dtype))
            if not isinstance(module, nn.Embedding):
                module.register_full_backward_hook(
                    lambda module, inward, outward: backward.add(outward[0].dtype)
                )
    settings = ForwardSettings(dtype=dtype)
    with settings.autocast():
        got, _ = packed(lm, make_batch(), settings, MicroBatching(max_token_len=60))
    got.sum().backward()
    assert forward == backward == {dtype}
    assert {p.grad.dtype for p in lm.parameters()} == {torch.float32}


def gradients(lm: nn.Module) -> dict[str, Any]:
    """The gradient of each parameter, of one forward pass whose ids hold every token."""
    ids = torch.arange(64)[None] % 64
    lm(input_ids=ids, labels=ids).loss.backward()
    return {name: parameter.grad for name, parameter in lm.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wrap", [None, PolicyModel, PolicyValueModel, ValueModel])
def test_gradients_do_not_depend_on_which_token_pads(name: str, wrap: Any) -> None:
    expected = None
    for pad in (None, 2, 5):
        config, attention, _ = MODELS[name]
        config = copy.deepcopy(config)
        config.pad_token_id = pad
        lm = build(config, attention)
        # What padded stays zero at the start, by transformers' own initialisation.
        with torch.no_grad():
            lm.get_input_embeddings().weight.copy_(torch.linspace(-1, 1, 32)[None].repeat(64, 1))
        if wrap is None:
            settings = ModelConfig(path="x", dtype="float32", enable_gradient_checkpointing=False)
            lm = ModelSpec(settings, "x", torch.device("cpu"))._prepare(lm, trainable=True)
        else:
            wrap(lm)
        found = gradients(lm.eval())
        expected = expected or found
        for parameter, gradient in found.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=0, atol=0)


def test_a_model_that_loses_the_sequences_on_the_way_has_padded_rows() -> None:
    lm = build(LlamaConfig(**SIZES), None)
    own = lm.base_model.forward

    def forgetful(position_ids: Any = None, sequences: Any = None, **kwargs: Any) -> Any:
        return own(position_ids=position_ids, **kwargs)

    lm.base_model.forward = forgetful
    assert not pack_rows(lm)
    check_forward(lm)
    lm.base_model.forward = own
    assert pack_rows(lm)


@pytest.mark.parametrize("config", [StableLmConfig, NemotronConfig])
def test_models_that_cannot_pack_compute_policies_and_values_of_padded_rows(
    config, tmp_path
) -> None:
    """Their layers do not hand sequences on to their attention."""
    config = config(**SIZES)
    lm, data = build(config, None), make_batch()
    expected, _ = plain_log_probs(lm, data, 1.0)
    settings = forward_settings(ModelConfig(dtype="float32"), True, lm, torch.device("cpu"))
    check_forward(lm)
    assert not settings.pack_rows
    got, _ = packed(lm, data, settings, MicroBatching(max_token_len=60))
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-4, atol=2e-4)
    lm.save_pretrained(tmp_path)
    critic_config = CriticModelConfig(path=str(tmp_path), dtype="float32")
    critic = ModelSpec(critic_config, str(tmp_path), torch.device("cpu")).value_model().eval()
    with torch.no_grad():
        ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1).long()
        mask = data.batch["attention_mask"].long()
        places = (mask.cumsum(1) - 1).clamp(min=0)
        alone = critic(input_ids=ids, attention_mask=mask, position_ids=places).logits.squeeze(-1)
    settings = forward_settings(critic_config, True, critic, torch.device("cpu"))
    values = DataParallelPPOCritic(
        CriticConfig(), ValueModel(critic), None, forward=settings
    ).compute_values(data)
    width, sampled = data.batch["prompts"].shape[1], data.batch["response_mask"].bool()
    torch.testing.assert_close(
        values[sampled], alone[:, width - 1 : -1][sampled], rtol=1e-4, atol=2e-4
    )


def test_a_model_without_positions_is_refused_before_training() -> None:
    lm = build(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4), None)
    with pytest.raises(ValueError, match="model type 'bloom' takes no position_ids"):
        check_forward(lm)


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused() -> None:
    lm = build(LlamaConfig(**SIZES), None)
    own = lm.forward

    def changed(**kwargs: Any) -> Any:
        output = own(**kwargs)
        output.logits = 3 * output.logits
        return output

    lm.forward = changed
    with pytest.raises(ValueError, match="'llama' changes its logits"):
        check_forward(lm)
