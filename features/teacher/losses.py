"""What is learnt of a teacher: advantages of its log-ratios, and two terms of the loss.

With p the policy and q the teacher behind its own prompt, both after the same tokens, at each token
y that the policy sampled:

    advantage    A += coef * clamp(log q(y) - log p_old(y))              log_ratio_advantages
    sampled      coef * mean of an estimate of KL(p || q) from y         TeacherTerm
    top_k        coef * mean of a divergence over words                  TeacherTerm, divergence_of

Invariant: the teacher's numbers have no gradient, and a token that it did not score adds nothing;
means are over the scored tokens of the whole mini-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data.protocol import DataProto
from features.teacher.settings import ADVANTAGE, SAMPLED, TOP_K, TeacherSettings
from features.teacher.weights import LOG_PROBS, WORD_LOG_PROBS, WORDS
from training.config import PPOConfig
from training.core_algos import kl_penalty
from workers.model.loss_terms import LossTerm, TermInputs, TermSum

# The field (B, R) int8: 1 on the tokens that the teacher scored.
MASK = "teacher_mask"
# What is left of a probability of 1 beside the words, where these are the whole vocabulary, is
# rounding below this.
NO_REST = 1e-6


def log_ratio_advantages(
    log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor, max_log_ratio: float
) -> Tensor:
    """Computes log q(y) - log p(y) at each token, clamped: the reverse KL as an advantage.

    It is the estimate of -KL(p || q) at this token alone, as a reward of a policy gradient with a
    discount of 0: on-policy distillation (arXiv:2306.13649, section 3), with the policy itself
    behind more context as the teacher on-policy self-distillation (OPSD, arXiv:2601.18734).

    Args:
        log_probs, teacher_log_probs, mask: (B, R), nats.
        max_log_ratio: clamps it either way.
    Returns: (B, R) float32, 0 where the mask is 0.
    """
    ratio = (teacher_log_probs.float() - log_probs.float()).clamp(-max_log_ratio, max_log_ratio)
    return torch.where(mask.bool(), ratio, 0)


def sampled_reverse_kl(log_prob: Tensor, teacher_log_prob: Tensor, max_log_ratio: float) -> Tensor:
    """Estimates KL(p || q) of each token from the token itself; its gradient is the KL's.

    The value is log p - log q, clamped, and the gradient (log p - log q) * grad log p, which is in
    expectation that of the reverse KL where y is sampled from p (arXiv:2306.13649): of several
    mini-batches so in the first. No ratio clips it, in contrast to an advantage.

    Args:
        log_prob: with its gradient; any shape, as teacher_log_prob, nats.
    """
    ratio = (log_prob.detach() - teacher_log_prob).clamp(-max_log_ratio, max_log_ratio)
    return kl_penalty(log_prob, log_prob.detach() - ratio, "k1+")


def divergence_of(log_p: Tensor, log_q: Tensor, kind: str) -> Tensor:
    """Computes a divergence of p and q over K words and one more that stands for all the others.

        reverse_kl   KL(p || q)                              SDPO, arXiv:2601.20802; OPSD
        forward_kl   KL(q || p)                              OPSD, arXiv:2601.18734
        jsd          (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2     arXiv:2306.13649, eq. 1

    With all words of the vocabulary it is exact; else it is a lower bound, as what lies beside the
    words counts as one word (SDPO, arXiv:2601.20802).

    Args:
        log_p: (..., K) with its gradient; log_q: (..., K), nats; words of probability 0 are about
            -1e15.
    Returns: (...) nats, at least 0 but for rounding.
    """
    log_p = _with_rest(log_p)
    log_q = _with_rest(log_q)
    if kind == "reverse_kl":
        return _kl(log_p, log_q)
    if kind == "forward_kl":
        return _kl(log_q, log_p)
    middle = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0))
    return (_kl(log_p, middle) + _kl(log_q, middle)) / 2


def _with_rest(log_probs: Tensor) -> Tensor:
    """Adds the log-probability of all other words: (..., K + 1)."""
    rest = 1 - log_probs.exp().sum(-1, keepdim=True)
    log_rest = torch.where(rest > NO_REST, rest, NO_REST).log()
    return torch.cat([log_probs, log_rest], dim=-1)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Computes the sum over words of a (log a - log b)."""
    a = log_a.exp()
    return torch.where(a > 0, a * (log_a - log_b), 0).sum(-1)


def open_loss_terms(config: PPOConfig) -> list[LossTerm]:
    """Opens the teacher's term of the loss; none with advantages alone, or without a teacher."""
    settings = config.section(TeacherSettings)
    if settings.model is None or settings.loss == ADVANTAGE:
        return []
    return [TeacherTerm(settings)]


class TeacherTerm(LossTerm):
    """Makes the divergence from the teacher small, a mean over the tokens that it scored."""

    name = "teacher"
    metric = "actor/teacher_loss"

    def __init__(self, settings: TeacherSettings) -> None:
        self.settings = settings
        self.coef = settings.coef
        self.fields = (MASK, LOG_PROBS)
        if settings.loss == TOP_K:
            self.fields = (MASK, LOG_PROBS, WORD_LOG_PROBS)
            self.candidates = WORDS

    def count(self, rows: DataProto) -> Tensor:
        """Counts the tokens that the teacher scored."""
        return (rows.batch[MASK].bool() & rows.batch["response_mask"].bool()).sum()

    def loss(self, inputs: TermInputs) -> TermSum:
        """Sums the divergence over those tokens, and the estimate of the reverse KL."""
        fields = inputs.fields
        mask = fields[MASK].bool() & fields["response_mask"].bool()
        of_sampled = sampled_reverse_kl(
            inputs.log_prob, fields[LOG_PROBS], self.settings.max_log_ratio
        )
        each = of_sampled
        if self.settings.loss != SAMPLED:
            assert inputs.candidates is not None
            each = divergence_of(
                inputs.candidates, fields[WORD_LOG_PROBS], self.settings.divergence
            )
        return TermSum(
            loss=torch.where(mask, each, 0).sum(),
            metrics={"teacher/kl": torch.where(mask, of_sampled.detach(), 0).sum()},
        )
