"""Terms that features add to the policy's loss: by hand, however a mini-batch is cut."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from data.protocol import DataProto
from tests.unit.test_actor_critic import SPLITS, close, make_update, weights_after
from training.batch.head import (
    BANNED,
    LabelLogProbs,
    LogitForm,
    candidate_log_probs,
    top_log_probs,
)
from training.config import ActorConfig, UpdatePlan
from workers.dp_actor import DataParallelPPOActor
from workers.model.attention import use_packed_attention
from workers.model.forward_settings import ForwardSettings
from workers.model.loss_terms import LossTerm, LossTerms, TermInputs, TermSum
from workers.model.policy_model import PolicyModel

NOTHING_ELSE = ActorConfig(grad_clip=1e9)


class CrossEntropy(LossTerm):
    """Learns tokens that a field marks, sampled or not."""

    name = "marked"
    metric = "actor/marked_loss"
    fields = ("marked",)
    predicted = "marked"

    def count(self, rows: DataProto) -> Tensor:
        return rows.batch["marked"].sum()

    def loss(self, inputs: TermInputs) -> TermSum:
        mask = inputs.fields["marked"]
        assert not (inputs.log_prob * ~(mask.bool() | inputs.fields["response_mask"].bool())).any()
        return TermSum(-(inputs.log_prob * mask).sum(), {"mine/rows": mask.sum()})


class ThreeWords(LossTerm):
    """Makes some words likelier, weighed, wherever something is sampled."""

    name = "words"
    metric = "actor/words_loss"
    fields = ("weights_of_words",)
    candidates = "words"

    def count(self, rows: DataProto) -> Tensor:
        return rows.batch["response_mask"].sum()

    def loss(self, inputs: TermInputs) -> TermSum:
        assert inputs.candidates is not None
        weights = inputs.fields["weights_of_words"] * inputs.fields["response_mask"][..., None]
        return TermSum(-(inputs.candidates * weights).sum())


@pytest.fixture(scope="module")
def lm(tiny_task: Path) -> nn.Module:
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    assert use_packed_attention(lm)
    return lm


def update() -> DataProto:
    """An update without advantages, so that the terms' gradient stands alone."""
    data = make_update()
    data.batch["advantages"] = torch.zeros_like(data.batch["advantages"])
    generator = torch.Generator().manual_seed(5)
    shape = data.batch["responses"].shape
    # What is not sampled in row 5, and some that is.
    data.batch["marked"] = torch.zeros(shape, dtype=torch.int8)
    data.batch["marked"][5, 1:4] = 1
    data.batch["marked"][0, 2] = 1
    data.batch["words"] = torch.randint(4, 60, (*shape, 3), generator=generator)
    data.batch["weights_of_words"] = torch.rand((*shape, 3), generator=generator)
    return data


def change_by(
    lm: nn.Module, terms: list[LossTerm], config: ActorConfig, data: DataProto, **settings: Any
) -> tuple[Tensor, dict[str, float]]:
    module = copy.deepcopy(lm)
    actor = DataParallelPPOActor(
        config,
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        forward=ForwardSettings(**settings),
        terms=LossTerms(terms),
    )
    metrics = actor.update_policy(data, UpdatePlan.of_rows(len(data), len(data), 1, False))
    change = [p - q for p, q in zip(module.parameters(), lm.parameters(), strict=True)]
    return torch.cat([c.detach().flatten() for c in change]), metrics


def plain_logits(lm: nn.Module, data: DataProto, row: int) -> Tensor:
    """Log-probs of all words (response_len, vocabulary) of one row, without padding or packing."""
    real = data.batch["attention_mask"][row].bool()
    ids = torch.cat([data.batch["prompts"], data.batch["responses"]], 1)[row][real]
    begin = int(real[: data.batch["prompts"].shape[1]].sum())
    logits = lm(input_ids=ids[None], use_cache=False).logits[0, begin - 1 :]
    width = data.batch["responses"].shape[1]
    return torch.log_softmax(nn.functional.pad(logits, (0, 0, 0, width))[:width], -1)


def by_hand(lm: nn.Module, data: DataProto, coefs: dict[str, float]) -> Tensor:
    """The change of the terms' step, by plain autograd."""
    module = copy.deepcopy(lm)
    loss = torch.zeros(())
    marked = data.batch["marked"]
    mask = data.batch["response_mask"]
    for row in range(len(data)):
        log_p = plain_logits(module, data, row)
        labels = data.batch["responses"][row][:, None]
        own = log_p.gather(1, labels)[:, 0]
        loss = loss - coefs["marked"] * (own * marked[row]).sum() / marked.sum()
        of_words = log_p.gather(1, data.batch["words"][row])
        weights = data.batch["weights_of_words"][row] * mask[row][:, None]
        loss = loss - coefs["words"] * (of_words * weights).sum() / mask.sum()
    loss.backward()
    return torch.cat([-0.1 * p.grad.flatten() for p in module.parameters()])


def terms_of(coefs: dict[str, float]) -> list[LossTerm]:
    terms: list[LossTerm] = [CrossEntropy(), ThreeWords()]
    for term in terms:
        term.coef = coefs[term.name]
    return terms


@pytest.mark.parametrize("layout", [{"pack_rows": True, "key_cost": 0.0}, {}])
@pytest.mark.parametrize("split", SPLITS)
def test_the_terms_gradient_is_that_of_plain_autograd_however_the_rows_are_cut(
    lm: nn.Module, split: dict[str, int], layout: dict[str, Any]
) -> None:
    data, coefs = update(), {"marked": 0.7, "words": 1.5}
    expected = by_hand(lm, data, coefs)
    got, metrics = change_by(lm, terms_of(coefs), replace(NOTHING_ELSE, **split), data, **layout)
    assert close(got, expected)
    own = sum(
        float(
            plain_logits(lm, data, row).gather(1, data.batch["responses"][row][:, None])[:, 0]
            @ data.batch["marked"][row].float()
        )
        for row in range(len(data))
    )
    assert metrics["actor/marked_loss"] == pytest.approx(-own / 4, rel=1e-4)
    assert metrics["mine/rows"] == pytest.approx(1.0), "a sum divided by the count"


def test_without_terms_or_their_fields_an_update_is_bitwise_as_before(lm: nn.Module) -> None:
    data = make_update()
    expected, expected_metrics = weights_after(lm, data, NOTHING_ELSE)
    for terms in ([], terms_of({"marked": 1.0, "words": 1.0})):
        got, metrics = change_by(lm, terms, NOTHING_ELSE, data)
        assert torch.equal(got, expected) and metrics == expected_metrics


def test_a_term_adds_to_the_policys_loss_and_leaves_its_metrics(lm: nn.Module) -> None:
    data = update()
    data.batch["advantages"] = make_update().batch["advantages"]
    alone, plain = change_by(lm, [], NOTHING_ELSE, data)
    coefs = {"marked": 0.7, "words": 1.5}
    both, metrics = change_by(lm, terms_of(coefs), NOTHING_ELSE, data)
    assert close(both - alone, by_hand(lm, data, coefs))
    assert {name: metrics[name] for name in plain if name != "actor/grad_norm"} == {
        name: value for name, value in plain.items() if name != "actor/grad_norm"
    }


def test_a_batch_of_marked_tokens_alone_is_learnt_from(lm: nn.Module) -> None:
    data = update()
    data.batch["response_mask"] = torch.zeros_like(data.batch["response_mask"])
    got, _ = change_by(lm, terms_of({"marked": 1.0, "words": 0.0}), NOTHING_ELSE, data)
    assert got.any()
    data.batch["marked"] = torch.zeros_like(data.batch["marked"])
    got, _ = change_by(lm, terms_of({"marked": 1.0, "words": 0.0}), NOTHING_ELSE, data)
    assert not got.any() and got.isfinite().all()


def test_two_terms_of_one_name_and_groups_one_by_one_are_refused(lm: nn.Module) -> None:
    with pytest.raises(ValueError, match="two terms of the loss are called marked"):
        LossTerms([CrossEntropy(), CrossEntropy()])
    module = copy.deepcopy(lm)
    actor = DataParallelPPOActor(
        NOTHING_ELSE,
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        terms=LossTerms([CrossEntropy()]),
    )
    with pytest.raises(ValueError, match="marked needs whole mini-batches"):
        actor.add_groups(update())


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(divisor=0.7, cap=3.0)])
@pytest.mark.parametrize("chunk", [1, 10**6])
def test_words_log_probs_and_gradients_are_those_of_the_whole_softmax(
    form: LogitForm, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(5, 4, generator=generator, requires_grad=True)
    weight = torch.randn(9, 4, generator=generator, requires_grad=True)
    bias = torch.randn(9, generator=generator, requires_grad=True)
    labels = torch.tensor([0, 3, 3, 8, 1])
    words = torch.randint(0, 9, (5, 3), generator=generator)
    words[0, 0] = 5
    penalty = torch.zeros(9)
    penalty[5] = BANNED
    mix = torch.randn(5, 3, generator=generator)
    mix[words == 5] = 0

    logits = states @ weight.T + bias
    logits = logits / form.divisor
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    whole = torch.log_softmax(logits + penalty, -1)
    expected = whole.gather(1, words)
    inputs = (states, weight, bias)
    wanted = torch.autograd.grad((expected * mix).sum(), inputs, retain_graph=True)

    own = whole.gather(1, labels[:, None])[:, 0]
    got = candidate_log_probs(
        states, weight, bias, LabelLogProbs(labels, own), words, form, penalty, chunk
    )
    assert torch.allclose(got[words != 5], expected[words != 5], atol=1e-5)
    assert (got[words == 5] < BANNED / 2).all()
    for gradient, want in zip(torch.autograd.grad((got * mix).sum(), inputs), wanted, strict=True):
        assert torch.allclose(gradient, want, atol=1e-5)


def test_a_model_with_values_gives_words_behind_them(lm: nn.Module) -> None:
    data = update()
    from workers.model.policy_model import PolicyValueModel

    actor = DataParallelPPOActor(
        ActorConfig(),
        PolicyModel(PolicyValueModel(copy.deepcopy(lm))),
        terms=LossTerms([ThreeWords()]),
    )
    outputs = actor.read(actor.terms.prepared(data), "a test", None, "value")
    log_probs, _, values, words = outputs
    assert not values.any() and words.shape == data.batch["words"].shape
    row = plain_logits(lm, data, 0)
    sampled = data.batch["response_mask"][0].bool()
    expected = row.gather(1, data.batch["words"][0])
    assert torch.allclose(words[0][sampled], expected[sampled], atol=1e-4)
    assert not words[0][~sampled].any() and log_probs.shape == words.shape[:2]


@pytest.mark.parametrize("k", [2, 99])
def test_the_likeliest_words_are_those_of_the_whole_softmax(k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(5, 4, generator=generator)
    weight = torch.randn(9, 4, generator=generator)
    penalty = torch.zeros(9)
    penalty[int((states[0] @ weight.T).argmax())] = BANNED
    whole = torch.log_softmax((states @ weight.T) / 0.7 + penalty, -1)
    for chunk in (1, 10**6):
        found, ids = top_log_probs(states, weight, None, LogitForm(divisor=0.7), k, penalty, chunk)
        expected = whole.topk(min(k, 9), dim=-1)
        assert torch.equal(ids, expected.indices)
        assert torch.allclose(found, expected.values, atol=1e-5)
    nothing, ids = top_log_probs(states[:0], weight, None, LogitForm(), k)
    assert nothing.shape == ids.shape == (0, min(k, 9))


def test_the_likeliest_words_come_row_by_row(lm: nn.Module) -> None:
    data = update()
    actor = DataParallelPPOActor(ActorConfig(ppo_micro_batch_size_per_gpu=2), copy.deepcopy(lm))
    log_probs, found, ids = actor.read(data, "a test", None, "none", 3)
    for row in range(len(data)):
        sampled = data.batch["response_mask"][row].bool()
        expected = plain_logits(lm, data, row).topk(3, dim=-1)
        assert torch.equal(ids[row][sampled], expected.indices[sampled])
        assert torch.allclose(found[row][sampled], expected.values[sampled], atol=1e-4)
    assert log_probs.shape == data.batch["responses"].shape
