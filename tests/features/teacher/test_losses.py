"""What is learnt of a teacher, by hand: advantages, divergences and their gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from data.protocol import DataProto
from features.teacher.losses import (
    MASK,
    TeacherTerm,
    divergence_of,
    log_ratio_advantages,
    sampled_reverse_kl,
)
from features.teacher.settings import TeacherSettings
from features.teacher.weights import LOG_PROBS, WORD_LOG_PROBS
from training.batch.head import BANNED
from workers.model.loss_terms import TermInputs

LOG_2 = math.log(2)


def test_an_advantage_is_how_much_likelier_the_teacher_finds_the_token_clamped() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -30.0, -1.0]])
    teacher = torch.tensor([[-0.5, -3.0, -1.0, -9.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    got = log_ratio_advantages(log_probs, teacher, mask, max_log_ratio=5.0)
    assert got.tolist() == [[0.5, -1.0, 5.0, 0.0]]


def test_the_sampled_estimate_has_the_log_ratio_as_value_and_as_weight_of_the_gradient() -> None:
    log_prob = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    teacher = torch.tensor([-3.0, -1.5, -60.0])
    got = sampled_reverse_kl(log_prob, teacher, max_log_ratio=10.0)
    assert got.tolist() == pytest.approx([2.0, -0.5, 10.0])
    got.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([2.0, -0.5, 10.0])


def test_the_sampled_gradient_is_in_expectation_that_of_the_reverse_kl() -> None:
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    log_q = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64), -1)
    log_p = torch.log_softmax(logits, -1)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits)
    log_p = torch.log_softmax(logits, -1)
    each = sampled_reverse_kl(log_p, log_q, max_log_ratio=50.0)
    # Each word as often as it is sampled.
    (got,) = torch.autograd.grad((log_p.exp().detach() * each).sum(), logits)
    assert torch.allclose(got, expected)


KINDS = ("reverse_kl", "forward_kl", "jsd")


def whole(log_p: Tensor, log_q: Tensor, kind: str) -> Tensor:
    """The divergence by its definition, over all words."""
    p, q = log_p.exp(), log_q.exp()
    if kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    m = (p + q) / 2
    return ((p * (log_p - m.log())).sum(-1) + (q * (log_q - m.log())).sum(-1)) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_over_the_whole_vocabulary_it_is_the_divergence_and_its_gradient(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, generator=generator, requires_grad=True)
    log_q = torch.log_softmax(torch.randn(4, 7, generator=generator), -1)
    expected = whole(torch.log_softmax(logits, -1), log_q, kind)
    (wanted,) = torch.autograd.grad(expected.sum(), logits)
    got = divergence_of(torch.log_softmax(logits, -1), log_q, kind)
    (gradient,) = torch.autograd.grad(got.sum(), logits)
    assert torch.allclose(got, expected, atol=1e-5)
    assert torch.allclose(gradient, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_words_beside_the_likeliest_count_as_one(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 9, generator=generator, requires_grad=True)
    log_q = torch.log_softmax(torch.randn(4, 9, generator=generator), -1)

    def joined(log_probs: Tensor) -> Tensor:
        rest = log_probs[:, 3:].exp().sum(-1, keepdim=True).log()
        return torch.cat([log_probs[:, :3], rest], -1)

    expected = whole(joined(torch.log_softmax(logits, -1)), joined(log_q), kind)
    (wanted,) = torch.autograd.grad(expected.sum(), logits)
    got = divergence_of(torch.log_softmax(logits, -1)[:, :3], log_q[:, :3], kind)
    (gradient,) = torch.autograd.grad(got.sum(), logits)
    assert torch.allclose(got, expected, atol=1e-5)
    assert torch.allclose(gradient, wanted, atol=1e-5)
    all_words = whole(torch.log_softmax(logits, -1), log_q, kind)
    assert (got <= all_words + 1e-6).all(), "a lower bound"


@pytest.mark.parametrize("kind", KINDS)
def test_words_that_are_never_sampled_add_nothing(kind: str) -> None:
    log_p = torch.tensor([[-LOG_2, -LOG_2, BANNED]], requires_grad=True)
    log_q = torch.tensor([[math.log(0.25), math.log(0.75), BANNED]])
    got = divergence_of(log_p, log_q, kind)
    expected = whole(log_p[:, :2].detach(), log_q[:, :2], kind)
    assert torch.allclose(got, expected, atol=1e-5)
    got.sum().backward()
    assert log_p.grad is not None and log_p.grad.isfinite().all()


@pytest.mark.parametrize("loss", ["sampled", "top_k"])
def test_a_token_that_the_teacher_did_not_score_or_nobody_sampled_adds_nothing(loss: Any) -> None:
    settings = TeacherSettings(model="ema", loss=loss, coef=2.0, top_k=2)
    term = TeacherTerm(settings)
    assert term.coef == 2.0
    log_prob = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    words = torch.tensor([[[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]]).log().requires_grad_()
    # The first is scored and sampled, the second not scored, the third in a row that only pads.
    fields = {
        "response_mask": torch.tensor([[1, 1, 0]]),
        MASK: torch.tensor([[1, 0, 1]]),
        LOG_PROBS: torch.tensor([[-2.0, 5.0, 5.0]]),
        WORD_LOG_PROBS: torch.log(torch.tensor([[[0.25, 0.75], [0.1, 0.9], [0.1, 0.9]]])),
    }
    rows = DataProto.from_dict(tensors={name: fields[name] for name in ("response_mask", MASK)})
    assert int(term.count(rows)) == 1
    result = term.loss(TermInputs(log_prob, torch.zeros(1, 3), fields, words))
    expected = 1.0
    if loss == "top_k":
        expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert result.loss.item() == pytest.approx(expected, abs=1e-5)
    assert result.metrics["teacher/kl"].item() == pytest.approx(1.0)
    result.loss.backward()
    if loss == "sampled":
        assert log_prob.grad is not None and log_prob.grad.tolist() == [[1.0, 0.0, 0.0]]
    else:
        assert words.grad is None or not words.grad[0, 1:].any()
