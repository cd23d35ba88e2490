"""The forward pass against the plain one: the same numbers and gradients for every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    PretrainedConfig,
)

from data.protocol import DataProto
from training.config import MicroBatching
from workers.model import policy_model
from workers.model.attention import use_packed_attention
from workers.model.builder import ModelSpec
from workers.model.forward_settings import ForwardSettings
from workers.model.micro_batches import iter_micro_batches, scatter_tokens
from workers.model.packing import row_tokens
from workers.model.policy_model import PolicyModel, ValueModel

PROMPT, RESPONSE = 6, 5


@pytest.fixture(scope="module")
def lm(tiny_task: Path) -> nn.Module:
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model").eval()
    assert use_packed_attention(lm)
    return lm


def make_batch(seed: int = 0, pad_prompt: int = 0, pad_response: int = 0) -> DataProto:
    """Makes groups of four, two and one rows; a response is empty, one has masked tokens inside."""
    generator = torch.Generator().manual_seed(seed)
    groups, prompt_lengths = [0, 0, 0, 0, 1, 1, 2], [4, 6, 2]
    response_lengths = [5, 1, 0, 3, 2, 5, 4]
    prompts = torch.zeros(7, PROMPT + pad_prompt, dtype=torch.long)
    responses = torch.zeros(7, RESPONSE + pad_response, dtype=torch.long)
    attention = torch.zeros(7, prompts.shape[1] + responses.shape[1], dtype=torch.long)
    mask = torch.zeros_like(responses)
    group_prompts = [torch.randint(4, 60, (n,), generator=generator) for n in prompt_lengths]
    for row, (group, n) in enumerate(zip(groups, response_lengths, strict=True)):
        p = group_prompts[group]
        prompts[row, -len(p) :] = p
        responses[row, :n] = torch.randint(4, 60, (n,), generator=generator)
        attention[row, prompts.shape[1] - len(p) : prompts.shape[1] + n] = 1
        mask[row, :n] = 1
    # The environment's reply inside row 5.
    mask[5, 2:4] = 0
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "attention_mask": attention,
        }
    )


def plain_log_probs(lm: nn.Module, data: DataProto, temperature: float) -> tuple[Tensor, Tensor]:
    """Computes log-probs and entropies by their definition, row by row, without padding."""
    width = data.batch["prompts"].shape[1]
    log_probs = torch.zeros(data.batch["responses"].shape)
    entropies = torch.zeros_like(log_probs)
    for row in range(len(data)):
        valid = data.batch["attention_mask"][row].bool()
        ids = torch.cat([data.batch["prompts"][row], data.batch["responses"][row]])[valid][None]
        distribution = (lm(ids).logits[0].float() / temperature).log_softmax(-1)
        start = int(valid[:width].sum())
        for column in range(int(valid[width:].sum())):
            if data.batch["response_mask"][row, column]:
                before = distribution[start + column - 1]
                log_probs[row, column] = before[ids[0, start + column]]
                entropies[row, column] = -(before.exp() * before).sum()
    return log_probs, entropies


def packed(
    lm: nn.Module, data: DataProto, settings: ForwardSettings, limits: MicroBatching, t: float = 1.0
):
    log_probs, entropies = (
        torch.zeros(data.batch["responses"].shape),
        torch.zeros(data.batch["responses"].shape),
    )
    data.meta_info["temperature"] = t
    for rows, micro, inputs in iter_micro_batches(data, settings, limits):
        own_log_probs, own_entropies = PolicyModel(lm)(inputs, "grad")
        shape = micro.batch["responses"].shape
        log_probs[rows] = scatter_tokens(own_log_probs, inputs, shape)
        entropies[rows] = scatter_tokens(own_entropies, inputs, shape)
    return log_probs, entropies


LAYOUTS: dict[str, dict[str, Any]] = {
    "shared": {"pack_rows": True, "key_cost": 0.0},
    "packed": {"pack_rows": True},
    "padded": {},
}
SHARED, PACKED, _ = (ForwardSettings(**layout) for layout in LAYOUTS.values())
WAYS = [
    (SHARED, MicroBatching(max_token_len=1000)),
    (SHARED, MicroBatching(max_token_len=24)),
    (SHARED, MicroBatching(micro_batch_size=3)),
    (PACKED, MicroBatching(max_token_len=40)),
    (ForwardSettings(), MicroBatching(max_token_len=40)),
    (ForwardSettings(), MicroBatching(micro_batch_size=1)),
    (ForwardSettings(strip_padding=False), MicroBatching(micro_batch_size=4)),
]


@pytest.mark.parametrize(("settings", "limits"), WAYS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_packing_gives_the_log_probs_of_single_unpadded_rows(
    lm, settings, limits, temperature
) -> None:
    data = make_batch()
    expected = plain_log_probs(lm, data, temperature)
    got = packed(lm, data, settings, limits, temperature)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=2e-6)


def gradient(
    lm: nn.Module,
    data: DataProto,
    settings: ForwardSettings,
    limits: MicroBatching,
    temperature: float = 1.0,
) -> Tensor:
    lm.zero_grad()
    data.meta_info["temperature"] = temperature
    weights = torch.arange(data.batch["responses"].numel()).view(data.batch["responses"].shape) / 10
    for rows, micro, inputs in iter_micro_batches(data, settings, limits):
        log_probs, entropies = PolicyModel(lm)(inputs, "grad")
        shape = micro.batch["responses"].shape
        loss = (scatter_tokens(log_probs, inputs, shape) * weights[rows]).sum()
        (loss + scatter_tokens(entropies, inputs, shape).sum()).backward()
    return torch.cat([p.grad.flatten() for p in lm.parameters()])


@pytest.mark.parametrize(("settings", "limits"), WAYS[1:])
def test_gradient_does_not_depend_on_the_packing(lm, settings, limits) -> None:
    data = make_batch()
    expected = gradient(lm, data, *WAYS[0])
    got = gradient(lm, data, settings, limits)
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_padding_on_either_side_changes_nothing(lm) -> None:
    one, _ = packed(lm, make_batch(), *WAYS[0])
    other, _ = packed(lm, make_batch(pad_prompt=3, pad_response=4), *WAYS[0])
    torch.testing.assert_close(other[:, :RESPONSE], one, rtol=1e-5, atol=1e-6)
    assert not other[:, RESPONSE:].any()


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "with a bias": PhiConfig(**SIZES),
    "divided": GraniteConfig(**SIZES, logits_scaling=8.0),
    "multiplied, tied": CohereConfig(**SIZES, logit_scale=0.5),
    "capped, tied": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0),
}


@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("rows_a_chunk", [100, 2])
def test_gradient_of_every_kind_of_head_is_that_of_the_models_own_logits(
    config: PretrainedConfig, rows_a_chunk: int, monkeypatch
) -> None:
    torch.manual_seed(0)
    lm, data = AutoModelForCausalLM.from_config(config).eval(), make_batch()
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            # Differences must show.
            parameter.copy_(
                torch.randn_like(parameter)
            ) if name == "lm_head.bias" else parameter.mul_(5)
    log_probs, entropies = plain_log_probs(lm, data, 0.7)
    weights = torch.arange(log_probs.numel()).view(log_probs.shape) / 10
    ((log_probs * weights).sum() + entropies.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in lm.parameters()])
    monkeypatch.setattr(policy_model, "LOGITS_CHUNK_BYTES", 2 * 64 * rows_a_chunk)
    got = gradient(lm, data, ForwardSettings(), MicroBatching(micro_batch_size=1), temperature=0.7)
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_chunked_head_gives_the_same_log_probs_and_gradient(lm, monkeypatch) -> None:
    data = make_batch()
    expected_lp, _ = packed(lm, data, *WAYS[0])
    expected = gradient(lm, data, *WAYS[0])
    # Three positions of a 64-word vocabulary.
    monkeypatch.setattr(policy_model, "LOGITS_CHUNK_BYTES", 2 * 64 * 3)
    got_lp, _ = packed(lm, data, *WAYS[0])
    torch.testing.assert_close(got_lp, expected_lp, rtol=1e-5, atol=1e-6)
    assert (gradient(lm, data, *WAYS[0]) - expected).norm() <= 1e-5 * expected.norm()


def test_what_rows_begin_with_is_computed_once() -> None:
    data = make_batch()
    # Row 6 is what a template leaves of row 5's episode: its prompt, its first token, and then
    # other ones.
    data.batch["prompts"][6], data.batch["attention_mask"][6, :PROMPT] = data.batch["prompts"][5], 1
    data.batch["responses"][6, 0] = data.batch["responses"][5, 0]
    tokens = {}
    for settings in (SHARED, PACKED, ForwardSettings()):
        batches = iter_micro_batches(data, settings, MicroBatching(max_token_len=1000))
        tokens[settings] = sum(int((inputs.input_ids != 0).sum()) for _, _, inputs in batches)
    rows = [row.ids.tolist() for row in row_tokens(data, strip_padding=True)]
    assert tokens[SHARED] == len({tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)})
    assert tokens[PACKED] == tokens[ForwardSettings()] == sum(map(len, rows)) > tokens[SHARED]


def test_values_are_those_of_the_state_before_each_sampled_token(tiny_task: Path) -> None:
    from training.config import CriticModelConfig

    spec = ModelSpec(
        CriticModelConfig(enable_gradient_checkpointing=False),
        str(tiny_task / "model"),
        torch.device("cpu"),
    )
    transformer = spec.value_model().eval()
    assert not transformer.score.weight.any() and use_packed_attention(transformer)
    nn.init.normal_(transformer.score.weight)
    data = make_batch()
    for settings, limits in WAYS:
        values = torch.zeros(data.batch["responses"].shape)
        for rows, micro, inputs in iter_micro_batches(data, settings, limits):
            values[rows] = scatter_tokens(
                *ValueModel(transformer)(inputs), inputs, micro.batch["responses"].shape
            ).detach()
        row, width = 5, data.batch["prompts"].shape[1]
        ids = torch.cat([data.batch["prompts"][row], data.batch["responses"][row]])[None]
        expected = transformer(ids).logits[0, width - 1 : -1, 0] * data.batch["response_mask"][row]
        torch.testing.assert_close(values[row], expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strip_padding", [True, False])
def test_a_row_without_a_prompt_token_is_refused_where_padding_is_no_token(
    strip_padding: bool,
) -> None:
    data = make_batch()
    data.batch["attention_mask"][3, :PROMPT] = 0
    if strip_padding:
        with pytest.raises(ValueError, match=r"rows \[3\] have no prompt token"):
            row_tokens(data, strip_padding)
    else:
        assert len(row_tokens(data, strip_padding)) == 7
