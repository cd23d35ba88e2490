"""Replay of routing: experts that are given are those that compute, everywhere a policy computes.

The model is a tiny random Qwen3-MoE: two layers, eight experts, two of them a token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from data.protocol import DataProto
from training.config import ActorConfig, MicroBatching
from workers.dp_actor import DataParallelPPOActor
from workers.model.attention import use_packed_attention
from workers.model.forward_settings import ForwardSettings
from workers.model.micro_batches import iter_micro_batches
from workers.model.packing import _take_rank_part
from workers.model.policy_model import PolicyModel
from workers.model.router_replay import (
    RouterPass,
    Routers,
    blocks_with_experts,
    check_routers,
    missing_choice,
    open_routers,
    routed,
)
from workers.model.training_pass import checkpoint_gradients
from workers.rollout.base_rollout import routed_experts
from workers.rollout.engine import Completion
from workers.rollout.episode import Row

VOCABULARY = 40
EXPERTS = 8
TOP_K = 2
LAYERS = 2
WIDTH = 4  # of prompts
LENGTH = 6  # of responses
ABSENT = missing_choice(torch.uint8)
PACKED = ForwardSettings(pack_rows=True, strip_padding=True)
PADDED = ForwardSettings(pack_rows=False, strip_padding=True)
KEPT_PADDING = ForwardSettings(pack_rows=False, strip_padding=False)


def make_model(seed: int = 0) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        attn_implementation="sdpa",
    )
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def laid_out(model: Qwen3MoeForCausalLM, settings: ForwardSettings) -> Qwen3MoeForCausalLM:
    """Has a model attend as its rows are laid out."""
    model.set_attn_implementation("sdpa")
    if settings.pack_rows:
        assert use_packed_attention(model)
    return model


@pytest.fixture
def model() -> Qwen3MoeForCausalLM:
    opened = make_model()
    assert open_routers(opened) == Routers((0, 1), TOP_K, EXPERTS)
    return opened


def make_batch(experts: Tensor | None = None) -> DataProto:
    """Four rows; the first two share their prompt, the third has a shorter one."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(VOCABULARY, (4, WIDTH), generator=generator)
    prompts[1] = prompts[0]
    responses = torch.randint(VOCABULARY, (4, LENGTH), generator=generator)
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    mask[1, 4:] = 0
    mask[3, 2:] = 0
    attention = torch.cat([torch.ones(4, WIDTH, dtype=torch.long), mask], dim=1)
    attention[2, :2] = 0
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "attention_mask": attention,
        "advantages": torch.randn(4, LENGTH, generator=generator),
    }
    if experts is not None:
        tensors["routed_experts"] = experts
    return DataProto.from_dict(tensors=tensors)


def own_choices(model: Qwen3MoeForCausalLM, data: DataProto) -> Tensor:
    """Records what the model chooses for each row by itself: (B, P + R, layers, k) uint8."""
    before = model.config._attn_implementation
    laid_out(model, PADDED)
    routers = Routers((0, 1), TOP_K, EXPERTS)
    experts = routers.absent(len(data), WIDTH + LENGTH)
    ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1)
    for row in range(len(data)):
        real = data.batch["attention_mask"][row].bool()
        recorded = RouterPass()
        with routed(recorded), torch.no_grad():
            model(ids[row][real][None], use_cache=False)
        experts[row, real] = recorded.all_chosen().to(torch.uint8)
    model.set_attn_implementation(before)
    return experts


def shifted(experts: Tensor) -> Tensor:
    """Gives each token the experts behind its own, and leaves absent ones absent."""
    return torch.where(experts == ABSENT, experts, (experts + 1) % EXPERTS)


def actor(
    model: Qwen3MoeForCausalLM,
    settings: ForwardSettings = PACKED,
    optimizer: torch.optim.Optimizer | None = None,
) -> DataParallelPPOActor:
    return DataParallelPPOActor(
        ActorConfig(grad_clip=1e9),
        PolicyModel(laid_out(model, settings)),
        optimizer,
        forward=settings,
    )


def gradients(
    model: Qwen3MoeForCausalLM, data: DataProto, settings: ForwardSettings = PACKED
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Computes the gradients of an update, and its metrics, without moving a weight."""
    kept: dict[str, Tensor] = {}

    class Keeper(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    kept[name] = parameter.grad.clone()

    metrics = actor(model, settings, Keeper(model.parameters(), lr=1.0)).update_policy(data)
    return kept, metrics


# The choices themselves.


@pytest.mark.parametrize("settings", [PACKED, PADDED, KEPT_PADDING])
def test_ones_own_choices_give_the_same_bits(
    model: Qwen3MoeForCausalLM, settings: ForwardSettings
) -> None:
    data = make_batch()
    plain, _ = actor(make_model(), settings).compute_log_prob(data)
    replayed = make_batch(own_choices(model, data))
    given, _ = actor(model, settings).compute_log_prob(replayed)
    assert torch.equal(plain, given)


def test_shared_prefixes_get_the_choices_of_their_first_row(model: Qwen3MoeForCausalLM) -> None:
    data = make_batch()
    sharing = replace(PACKED, key_cost=0.0)
    plain, _ = actor(make_model(), sharing).compute_log_prob(data)
    given, _ = actor(model, sharing).compute_log_prob(make_batch(own_choices(model, data)))
    assert torch.equal(plain, given)
    others = make_batch(shifted(own_choices(model, data)))
    shared, _ = actor(model, sharing).compute_log_prob(others)
    alone, _ = actor(model, PACKED).compute_log_prob(others)
    torch.testing.assert_close(shared, alone, atol=2e-6, rtol=0)


@pytest.mark.parametrize("settings", [PACKED, PADDED, KEPT_PADDING])
def test_other_choices_compute_what_a_forward_by_hand_computes(
    model: Qwen3MoeForCausalLM, settings: ForwardSettings
) -> None:
    data = make_batch()
    experts = shifted(own_choices(model, data))
    data = make_batch(experts)
    computed, _ = actor(model, settings).compute_log_prob(data)
    by_hand = log_probs_by_hand(make_model(), data)
    torch.testing.assert_close(computed, by_hand.detach(), atol=2e-6, rtol=0)
    plain, _ = actor(make_model(), settings).compute_log_prob(data_without_choices(data))
    assert (plain - computed).abs().max() > 0.1


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_gradient_is_that_of_a_forward_by_hand_and_reaches_the_router(
    model: Qwen3MoeForCausalLM, checkpointed: bool
) -> None:
    data = make_batch(shifted(own_choices(model, make_batch())))
    if checkpointed:
        checkpoint_gradients(model)
    computed, metrics = gradients(model, data)
    reference = make_model()
    log_probs = log_probs_by_hand(reference, data)
    mask = data.batch["response_mask"]
    # The policy is the one that sampled, so the ratio's gradient is that of the log-prob.
    (-(log_probs * data.batch["advantages"] * mask).sum() / mask.sum()).backward()
    expected = {name: each.grad for name, each in reference.named_parameters()}
    routers = [name for name in computed if name.endswith("gate.weight")]
    assert len(routers) == LAYERS
    for name, gradient in computed.items():
        torch.testing.assert_close(gradient, expected[name], atol=5e-6, rtol=1e-4)
    assert all(computed[name].abs().max() > 1e-4 for name in routers)
    assert metrics["actor/router_replay_differing"] > 0.5
    assert metrics["actor/router_replay_absent"] == 0


def test_layers_that_are_made_again_get_the_choices_of_their_own_pass(
    model: Qwen3MoeForCausalLM,
) -> None:
    """Two passes, whose choices differ, before either's backward pass."""
    data = make_batch()
    own = own_choices(model, data)
    plain = [gradients_of(model, [experts]) for experts in (own, shifted(own))]
    checkpoint_gradients(model)
    both = gradients_of(model, [own, shifted(own)])
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, plain[0][name] + plain[1][name], atol=1e-5, rtol=1e-4)


def gradients_of(model: Qwen3MoeForCausalLM, choices: list[Tensor]) -> dict[str, Tensor]:
    """Adds up the log-probs under several choices, and differentiates them at once."""
    policy = actor(model)
    policy.module.train()
    model.zero_grad()
    total = sum(policy.forward(make_batch(each))[0].sum() for each in choices)
    assert isinstance(total, Tensor)
    total.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def test_the_gradient_does_not_depend_on_micro_batches(model: Qwen3MoeForCausalLM) -> None:
    data = make_batch(shifted(own_choices(model, make_batch())))
    whole, metrics = gradients(model, data)
    policy = actor(model)
    limits = MicroBatching(micro_batch_size=1)
    assert len(list(iter_micro_batches(data, policy.settings, limits))) == len(data)
    single = DataParallelPPOActor(
        ActorConfig(grad_clip=1e9, ppo_micro_batch_size_per_gpu=1),
        PolicyModel(laid_out(model, PACKED)),
        KeepingSGD(model.parameters(), lr=1.0),
        forward=PACKED,
    )
    metrics_of_parts = single.update_policy(data)
    kept = single.optimizer.kept  # type: ignore[union-attr]
    for parameter, name in zip(model.parameters(), dict(model.named_parameters()), strict=True):
        torch.testing.assert_close(kept[parameter], whole[name], atol=2e-6, rtol=1e-4)
    for name in ("actor/router_replay_differing", "actor/router_replay_absent"):
        assert metrics_of_parts[name] == pytest.approx(metrics[name], abs=1e-6)


class KeepingSGD(torch.optim.SGD):
    """Keeps gradients, and moves nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.kept = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self.kept[parameter] = parameter.grad.clone()


# Tokens without a choice.


def test_a_token_without_a_choice_is_decided_by_the_trainers_router(
    model: Qwen3MoeForCausalLM,
) -> None:
    data = make_batch()
    own = own_choices(model, data)
    partly = own.clone()
    partly[:, : WIDTH + 1] = ABSENT
    plain, _ = actor(make_model()).compute_log_prob(data)
    given, _ = actor(model).compute_log_prob(make_batch(partly))
    assert torch.equal(plain, given)
    nothing = torch.full_like(own, ABSENT)
    given, _ = actor(model).compute_log_prob(make_batch(nothing))
    assert torch.equal(plain, given)


def test_the_metrics_are_shares_of_the_states_that_predict_sampled_tokens(
    model: Qwen3MoeForCausalLM,
) -> None:
    data = make_batch()
    own = own_choices(model, data)
    changed = own.clone()
    # In one layer of two, of the state that predicts the first token of the first row.
    changed[2, WIDTH - 1, 0] = (changed[2, WIDTH - 1, 0] + 1) % EXPERTS
    # A last sampled token predicts nothing.
    changed[2, -1] = (changed[2, -1] + 1) % EXPERTS
    # Two states without a choice.
    changed[3, WIDTH - 1 : WIDTH + 1] = ABSENT
    _, metrics = gradients(model, make_batch(changed))
    sampled = int(data.batch["response_mask"].sum())
    assert metrics["actor/router_replay_absent"] == pytest.approx(2 / sampled)
    # What follows in the row may differ in the second layer, as its states do.
    assert metrics["actor/router_replay_differing"] >= 0.5 / sampled - 1e-6
    _, metrics = gradients(model, make_batch(own))
    assert metrics["actor/router_replay_differing"] == 0
    _, metrics = gradients(model, make_batch())
    assert not [name for name in metrics if "router" in name]


def test_several_ranks_of_a_sequence_get_the_choices_of_their_tokens(
    model: Qwen3MoeForCausalLM,
) -> None:
    data = make_batch(own_choices(model, make_batch()))
    settings = replace(PACKED, key_cost=None)
    laid_out(model, PACKED)
    [(_, _, whole)] = iter_micro_batches(data, settings, MicroBatching(micro_batch_size=4))
    assert whole.router_pass is not None and whole.router_pass.given is not None
    half = whole.input_ids.shape[1] // 2
    parts = []
    for rank in range(2):
        part = _take_rank_part(whole, RankOfTwo(rank))  # type: ignore[arg-type]
        assert part.router_pass is not None and part.router_pass.given is not None
        assert len(part.router_pass.given) == part.input_ids.shape[1] == half
        parts.append(part.router_pass.given)
    assert torch.equal(torch.cat(parts), whole.router_pass.given[: 2 * half])


class RankOfTwo:
    """Stands for a process group."""

    def __init__(self, number: int) -> None:
        self.number = number

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return 2


# What is refused.


def test_a_model_without_experts_is_refused() -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(ValueError, match=r"model type 'llama': it has no experts; set it to disab"):
        open_routers(LlamaForCausalLM(config))


def test_a_router_that_chooses_otherwise_is_refused(model: Qwen3MoeForCausalLM) -> None:
    check_routers(model)

    def choose_by_sorting(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate = model.model.layers[1].mlp.gate
        logits = F.linear(hidden, gate.weight)
        ids = logits.argsort(dim=-1, descending=True)[:, :TOP_K]
        return logits, logits.gather(-1, ids).softmax(-1), ids

    model.model.layers[1].mlp.gate.forward = choose_by_sorting
    with pytest.raises(ValueError, match=r"router of 'model.layers.1.mlp' chooses otherwise"):
        check_routers(model)


def test_experts_that_do_not_get_what_is_given_are_refused(model: Qwen3MoeForCausalLM) -> None:
    gate = model.model.layers[0].mlp.gate
    forward = gate.forward

    def choose_again(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, _ = forward(hidden)
        return logits, weights, logits.argsort(dim=-1, descending=True)[:, :TOP_K]

    gate.forward = choose_again
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp' do not get what is given"):
        check_routers(model)


def test_choices_of_another_model_are_refused(model: Qwen3MoeForCausalLM) -> None:
    experts = own_choices(model, make_batch())
    with pytest.raises(ValueError, match=r"has choices of \(\d+, 1\).* are of another model"):
        actor(model).compute_log_prob(make_batch(experts[..., :1]))


def test_choices_for_a_model_that_does_not_heed_them_are_refused(
    model: Qwen3MoeForCausalLM,
) -> None:
    data = make_batch(own_choices(model, make_batch()))
    with pytest.raises(ValueError, match=r"the model does not heed them: call open_routers"):
        actor(make_model()).compute_log_prob(data)


# How choices travel with a row.


def told(tokens: int, number: int = 0) -> np.ndarray:
    """Choices that name their token and the turn that told them: (tokens, 1, 2)."""
    return np.stack([np.full(tokens, number), np.arange(tokens)], axis=1)[:, None].astype(np.uint8)


def completion(ids: list[int], experts: np.ndarray | None) -> Completion:
    return Completion(
        request_id="0",
        token_ids=ids,
        log_probs=[0.0] * len(ids),
        finish_reason="stop",
        routed_experts=experts,
    )


def test_a_row_keeps_the_choices_of_the_turn_that_computed_a_token_first() -> None:
    row = Row(prompt_ids=[1, 2, 3])
    row.append_sampled(completion([4, 5], told(4, number=1)), turn=0)
    assert row.routed_experts is not None
    assert len(row.routed_experts) == 4
    row.append_tokens([6])
    row.append_sampled(completion([7, 8], told(7, number=2)), turn=1)
    assert row.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert row.routed_experts[:, 0, 1].tolist() == list(range(7))


def test_a_turn_whose_end_is_cut_off_leaves_its_choices() -> None:
    row = Row(prompt_ids=[1, 2, 3])
    row.append_sampled(completion([4, 5], told(6)), turn=0)
    assert row.routed_experts is not None
    assert len(row.routed_experts) == 4
    row.append_sampled(completion([6, 7], told(6)), turn=1)
    row.cut(2)
    assert len(row.routed_experts) == 5


def test_a_turn_that_tells_nothing_or_too_little_leaves_the_row_as_it_was() -> None:
    row = Row(prompt_ids=[1, 2, 3])
    row.append_sampled(completion([4, 5], None), turn=0)
    row.append_sampled(completion([6, 7], told(3)), turn=1)
    assert row.routed_experts is None
    row.append_sampled(completion([8], told(7)), turn=2)
    assert row.routed_experts is not None


def test_a_batch_holds_the_choices_where_its_tokens_are() -> None:
    first = Row(prompt_ids=[1, 2, 3])
    first.append_sampled(completion([4, 5], told(4)), turn=0)
    untold = Row(prompt_ids=[1])
    untold.append_sampled(completion([2], None), turn=0)
    routers = Routers((3,), 2, 8)
    experts = routed_experts([first, untold], routers, 4, 3)
    assert experts.dtype == np.uint8
    assert experts[0, :, 0, 1].tolist() == [ABSENT, 0, 1, 2, 3, ABSENT, ABSENT]
    assert (experts[1] == ABSENT).all()
    many = routed_experts([untold], Routers((0,), 2, 256), 1, 1)
    assert many.dtype == np.int16
    assert (many == missing_choice(torch.int16)).all()


# A forward pass by hand.


def data_without_choices(data: DataProto) -> DataProto:
    copy = data.select()
    del copy.batch["routed_experts"]
    return copy


def log_probs_by_hand(model: Qwen3MoeForCausalLM, data: DataProto) -> Tensor:
    """Computes log-probs of each row alone, whose experts are looped over: (B, R)."""
    ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1)
    result = []
    for row in range(len(data)):
        real = data.batch["attention_mask"][row].bool()
        experts = data.batch["routed_experts"][row][real].long()  # (n, layers, k)
        for layer, block in enumerate(blocks_with_experts(model).values()):
            block.forward = partial(by_hand, block, experts[:, layer])
        logits = model(ids[row][real][None], use_cache=False).logits[0]
        start = int(real[:WIDTH].sum())
        sampled = ids[row][real][start:]
        log_probs = logits[start - 1 : -1].log_softmax(-1).gather(1, sampled[:, None])[:, 0]
        result.append(F.pad(log_probs, (0, LENGTH - len(sampled))))
    return torch.stack(result)


def by_hand(block: nn.Module, experts: Tensor, hidden: Tensor) -> Tensor:
    """Computes a block of experts token by token: experts (n, k), hidden (1, n, h)."""
    outputs = []
    for token, chosen in zip(hidden[0], experts, strict=True):
        probabilities = (block.gate.weight @ token).softmax(-1)
        weights = probabilities[chosen] / probabilities[chosen].sum()
        output = torch.zeros_like(token)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            output = output + weight * (block.experts.down_proj[expert] @ (F.silu(gate) * up))
        outputs.append(output)
    return torch.stack(outputs)[None]
