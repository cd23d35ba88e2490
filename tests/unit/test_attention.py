"""Packed rows against padded rows and rows alone: the same numbers, less to compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config

from tests.unit.test_actor_critic import close, make_update
from tests.unit.test_forward import PACKED, SHARED, gradient, make_batch, packed, plain_log_probs
from tests.unit.test_models import MODELS, SIZES, build
from training.config import ActorConfig, CriticModelConfig, MicroBatching, ModelConfig
from workers.dp_actor import DataParallelPPOActor
from workers.model import block_attention
from workers.model.attention import NAME, attention_forward, packed_attention, use_packed_attention
from workers.model.builder import ModelSpec
from workers.model.forward_settings import ForwardSettings, forward_settings
from workers.model.micro_batches import iter_micro_batches, scatter_tokens
from workers.model.policy_model import ValueModel
from workers.model.sequences import Sequences

CPU = torch.device("cpu")
PADDED = ForwardSettings()
KINDS: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config}


def grouped_heads(kind: str, checkpointing: bool) -> nn.Module:
    """Builds a model with four query heads on two key heads."""
    lm = build(KINDS[kind](**SIZES), None)
    if checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert use_packed_attention(lm)
    return lm.train()


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_padded_rows_and_rows_alone_are_the_same(
    kind: str, checkpointing: bool
) -> None:
    lm, data = grouped_heads(kind, checkpointing), make_batch()
    alone = [x.detach() for x in plain_log_probs(lm, data, 0.7)]
    expected = gradient(lm, data, PADDED, MicroBatching(micro_batch_size=1))
    for settings in (SHARED, PACKED, PADDED):
        for limits in (MicroBatching(max_token_len=1000), MicroBatching(max_token_len=24)):
            got = packed(lm, data, settings, limits, 0.7)
            assert all(relative(a.detach(), b) < 1e-5 for a, b in zip(got, alone, strict=True))
            assert relative(gradient(lm, data, settings, limits), expected) < 1e-5


def test_values_of_packed_rows_are_those_of_padded_rows(tiny_task: Path) -> None:
    transformer = ModelSpec(CriticModelConfig(), str(tiny_task / "model"), CPU).value_model()
    nn.init.normal_(transformer.score.weight)
    assert use_packed_attention(transformer)
    data, values = make_batch(), {}
    for name, settings in {"shared": SHARED, "packed": PACKED, "padded": PADDED}.items():
        transformer.zero_grad()
        values[name] = torch.zeros(data.batch["responses"].shape)
        for rows, micro, inputs in iter_micro_batches(
            data, settings, MicroBatching(max_token_len=40)
        ):
            values[name][rows] = scatter_tokens(
                *ValueModel(transformer)(inputs), inputs, micro.batch["responses"].shape
            )
        values[name].square().sum().backward()
        values[name + " gradient"] = torch.cat([p.grad.flatten() for p in transformer.parameters()])
    for name in ("shared", "packed"):
        assert relative(values[name].detach(), values["padded"].detach()) < 1e-5
        assert relative(values[name + " gradient"], values["padded gradient"]) < 1e-5


def test_packed_rows_have_no_padding_and_no_mask() -> None:
    data = make_batch()
    (_, _, inputs), *others = iter_micro_batches(data, PACKED, MicroBatching(micro_batch_size=7))
    tokens = data.batch["attention_mask"].sum(dim=1)
    assert not others and inputs.attention_mask is None and inputs.sequences is not None
    assert inputs.input_ids.shape == (1, tokens.sum())
    assert sorted(inputs.sequences.lengths) == sorted(tokens.tolist())
    assert (inputs.position_ids == 0).sum() == len(data)


def test_the_budget_counts_the_tokens_of_packed_rows_once_and_the_padding_of_others() -> None:
    # Rows of 11, 9, 8, 7, 6, 5 and 4 tokens.
    data = make_batch()
    budget = MicroBatching(max_token_len=28)

    def sizes(settings: ForwardSettings) -> list[int]:
        return [
            inputs.input_ids.numel() for _, _, inputs in iter_micro_batches(data, settings, budget)
        ]

    assert sizes(PACKED) == [11 + 9 + 8, 7 + 6 + 5 + 4]
    assert len(sizes(PADDED)) == 3 and max(sizes(PADDED)) <= 28
    assert sum(sizes(SHARED)) < sum(sizes(PACKED)) and max(sizes(SHARED)) <= 28


def test_an_update_of_packed_rows_does_not_depend_on_the_micro_batches(tiny_task: Path) -> None:
    changes, metrics = [], []
    for limits in ({"ppo_max_token_len_per_gpu": n} for n in (1000, 24)):
        for settings in (PACKED, SHARED, PADDED):
            lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
            assert use_packed_attention(lm)
            before = [p.detach().clone() for p in lm.parameters()]
            config = ActorConfig(grad_clip=1e9, entropy_coeff=0.1, use_kl_loss=True, **limits)
            optimizer = torch.optim.SGD(lm.parameters(), lr=0.1)
            metrics.append(
                DataParallelPPOActor(config, lm, optimizer, forward=settings).update_policy(
                    make_update()
                )
            )
            after = zip(lm.parameters(), before, strict=True)
            changes.append(torch.cat([(p.detach() - q).flatten() for p, q in after]))
    assert all(close(change, changes[0]) for change in changes[1:])
    assert all(m == pytest.approx(metrics[0], rel=2e-5, abs=1e-7) for m in metrics[1:])


def test_autocast_computes_packed_rows_in_its_type() -> None:
    lm, data = grouped_heads("qwen2", False), make_batch()
    seen = set()
    lm.base_model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda _, inputs: seen.add(inputs[0].dtype)
    )
    expected, _ = packed(lm, data, PACKED, MicroBatching(max_token_len=60))
    settings = replace(SHARED, dtype=torch.bfloat16)
    with settings.autocast():
        got, _ = packed(lm, data, settings, MicroBatching(max_token_len=60))
    assert seen == {torch.float32, torch.bfloat16}
    assert relative(got.detach(), expected.detach()) < 2e-2


def test_without_sequences_it_is_sdpa_and_generates_as_before(tiny_task: Path) -> None:
    own, plain = (
        AutoModelForCausalLM.from_pretrained(tiny_task / "model").eval() for _ in range(2)
    )
    assert use_packed_attention(own) and plain.config._attn_implementation == "sdpa"
    ids = torch.tensor([[0, 0, 5, 6, 7], [5, 9, 8, 7, 6]])
    mask = (ids != 0).long()
    assert torch.equal(
        own(ids, attention_mask=mask).logits[:, 2:], plain(ids, attention_mask=mask).logits[:, 2:]
    )
    assert torch.equal(own(ids).logits, plain(ids).logits)
    kwargs = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(own.generate(ids, **kwargs), plain.generate(ids, **kwargs))


def test_a_model_whose_rows_share_no_prompt_is_named_by_its_role(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    padded = ModelConfig(path="mine", use_remove_padding=False)
    windowed = build(*MODELS["mistral with a window"][:2])
    forward_settings(padded, True, windowed, CPU, role="critic")
    assert "critic (mine): rows are padded, and the prompt of a group is computed" in caplog.text


@pytest.mark.seconds
def test_workers_pack_rows_where_the_model_attends_fully_and_the_engines_model_is_left_alone(
    tiny_task: Path,
) -> None:
    spec = ModelSpec(ModelConfig(dtype="float32"), str(tiny_task / "model"), CPU)
    module = spec.causal_lm(trainable=False)
    assert forward_settings(spec.config, False, module, CPU).pack_rows
    assert module.config._attn_implementation == NAME
    assert spec.empty_causal_lm(torch.float32).config._attn_implementation == "sdpa"
    windowed = build(*MODELS["mistral with a window"][:2])
    assert not forward_settings(spec.config, True, windowed, CPU).pack_rows
    assert windowed.config._attn_implementation == "sdpa"
    padded = ModelConfig(use_remove_padding=False)
    module = spec.causal_lm(trainable=False)
    assert not forward_settings(padded, True, module, CPU).pack_rows
    # Rounding over many layers in bfloat16, 1.6 percent here, is no sign of another's row.
    torch.manual_seed(0)
    shape = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 32,
        "num_attention_heads": 4,
    }
    deep = LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape)).bfloat16()
    assert forward_settings(spec.config, False, deep, CPU).pack_rows
    assert module.config._attn_implementation == "sdpa"


def test_attention_of_segments_is_written_out_softmax_along_each_path() -> None:
    torch.manual_seed(0)
    scale, total = 0.3, 9
    query, key, value = (
        torch.randn(1, 4, total, 8),
        torch.randn(1, 2, total, 8),
        torch.randn(1, 2, total, 8),
    )
    # A prompt of three tokens, two answers to it, a row alone, and one that goes on behind the
    # first answer.
    paths = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4, 5], [6], [0, 1, 2, 3, 7, 8]]
    lengths = (3, 1, 2, 1, 2)
    sequences = Sequences.of(lengths, [torch.tensor(path) for path in paths])
    assert (
        sequences.boundaries.tolist() == [0, 3, 4, 6, 7, 9]
        and sequences.boundaries.dtype == torch.int32
    )
    assert sequences.key_boundaries.tolist() == [0, 3, 7, 12, 13, 19]
    output, _ = attention_forward(
        nn.Module(), query, key, value, None, sequences=sequences, scaling=scale
    )
    for path, n in zip(paths, lengths, strict=True):
        for place in path[-n:]:
            seen = path[: path.index(place) + 1]
            for head in range(4):
                weights = (scale * key[0, head // 2, seen] @ query[0, head, place]).softmax(0)
                torch.testing.assert_close(
                    output[0, place, head], weights @ value[0, head // 2, seen]
                )
    alone = Sequences.of([4, 5])
    assert alone.keys is None and alone.boundaries.tolist() == alone.key_boundaries.tolist() == [
        0,
        4,
        9,
    ]


@pytest.mark.parametrize("short", [0, 1 << 18])
def test_keys_that_several_segments_read_gather_all_their_gradients(
    short: int, monkeypatch
) -> None:
    """As the rows would have alone; in bfloat16 they add up in float32."""
    monkeypatch.setattr(block_attention, "SHORT", short)
    torch.manual_seed(0)
    prompt, answers, n = 16, 4, 24
    tokens = [
        torch.randn(prompt + answers * n, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2)
    ]
    upstream = torch.randn_like(tokens[0])
    rows = [
        torch.arange(prompt),
        *(torch.arange(prompt + i * n, prompt + (i + 1) * n) for i in range(answers)),
    ]
    paths = [rows[0], *(torch.cat([rows[0], row]) for row in rows[1:])]

    def gradients(dtype: torch.dtype, alone: bool) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in tokens]
        if alone:
            outputs = torch.zeros_like(inputs[0])
            for row, path in zip(rows, paths, strict=True):
                q, k, v = (x[path].transpose(0, 1)[None] for x in inputs)
                whole = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                outputs = outputs.index_copy(0, row, whole[0].transpose(0, 1)[-len(row) :])
        else:
            q, k, v = (x.transpose(0, 1)[None] for x in inputs)
            sequences = Sequences.of([len(row) for row in rows], paths)
            outputs = packed_attention(q, k, v, sequences, None)[0].transpose(0, 1)
        return list(torch.autograd.grad(outputs, inputs, upstream.to(dtype)))

    for got, expected in zip(
        gradients(torch.float32, False), gradients(torch.float32, True), strict=True
    ):
        assert relative(got, expected) < 1e-6
    for got, expected in zip(
        gradients(torch.bfloat16, False), gradients(torch.float32, True), strict=True
    ):
        assert got.dtype == torch.bfloat16 and relative(got.float(), expected) < 1e-2
