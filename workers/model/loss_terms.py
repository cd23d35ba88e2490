"""What a feature adds to the loss of the policy's update: `LossTerm`.

A term sees each micro-batch as the policy's loss does, and returns a sum. The actor divides it by
what the term counts in the whole mini-batch over all ranks, and adds it to the loss:

    loss  +=  coef * (sum over the micro-batch) / (count over the mini-batch, of all ranks)

    update     count            of each mini-batch: this rank's part of the denominator
               loss             of each micro-batch: the sum, and sums that are metrics

The core knows no term by name; `open_loss_terms` opens those of a run. In contrast to a probe
(probe.py) a term is a part of the algorithm: what it raises ends the run. Invariant: a term's
gradient does not depend on how a mini-batch is cut into micro-batches, or over ranks; without terms
an update is bitwise what it is without this file.

Example, a cross-entropy on tokens that a field of the batch marks, such as demonstrations:

    class Demonstrations(LossTerm):
        name = "demonstrations"
        metric = ...
        fields = ("demonstration_mask",)       # (rows, response_len)
        predicted = "demonstration_mask"       # log-probs of these tokens too, not of sampled alone

        def count(self, rows):
            return rows.batch["demonstration_mask"].sum()

        def loss(self, inputs):
            mask = inputs.fields["demonstration_mask"]
            return TermSum(-(inputs.log_prob * mask).sum())
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from data.loading import load_object
from data.protocol import DataProto
from training.config import PPOConfig
from training.features import named
from workers.model.loss_fields import CANDIDATES, PREDICTED, LossFields
from workers.model.sequences import to_device
from workers.ranks.process_groups import sum_over_ranks, world_size

# The meta_info of a mini-batch's rows: by term, what its sums are divided by.
TERM_COUNTS = "term_counts"


@dataclass(frozen=True)
class TermInputs:
    """Holds what a term sees of a micro-batch.

    Attributes:
        log_prob: (rows, response_len) with its gradient, of sampled tokens and of those that the
            term's `predicted` marks; 0 elsewhere.
        entropy: (rows, response_len), of the same tokens; it has a gradient only with
            `actor.entropy_coeff`.
        fields: `response_mask`, what losses read, and the term's own fields, on the device.
        candidates: (rows, response_len, K) with its gradient: log-probs of the token ids that the
            field `LossTerm.candidates` holds, as continuations in place of the sampled token, 0
            where none was sampled; None where the term names no such field.
    """

    log_prob: Tensor
    entropy: Tensor
    fields: LossFields
    candidates: Tensor | None = None


@dataclass(frozen=True)
class TermSum:
    """Holds what a term makes of a micro-batch.

    Attributes:
        loss: 0-dim, a sum; a mean is wrong, as the mini-batch's count divides it.
        metrics: 0-dim sums by the metric's name, which the same count divides.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class LossTerm(ABC):
    """Adds a term to the actor's loss.

    Attributes:
        name: of the term.
        metric: what its loss, before the coefficient, is called among the metrics; begins with
            actor/ and ends with _loss, by which it is known as a part of the policy's loss.
        coef: what it is multiplied with.
        fields: of the batch that it reads, beside those that losses read: (B,) or (B, response_len,
            ...). What a batch lacks is not there; a term whose fields are all absent is skipped.
        predicted: a field (B, response_len), 1 on tokens whose log-probs it needs beside those of
            sampled ones; None: there is no such.
        candidates: a field (B, response_len, K) of token ids, see `TermInputs.candidates`; None:
            there is no such.
    """

    name: str
    metric: str
    coef: float = 1.0
    fields: tuple[str, ...] = ()
    predicted: str | None = None
    candidates: str | None = None

    @abstractmethod
    def count(self, rows: DataProto) -> Tensor | float:
        """Counts what its sums are divided by, in this rank's rows of a mini-batch.

        Rows of a sequence-parallel group are on each of its ranks, and count once.
        """

    @abstractmethod
    def loss(self, inputs: TermInputs) -> TermSum:
        """Sums its loss over the rows of a micro-batch.

        Rows may be there that only pad: in them `response_mask` and `predicted` are 0.
        """

    def reads(self) -> tuple[str, ...]:
        """Lists all fields of the batch that it names."""
        others = [name for name in (self.predicted, self.candidates) if name is not None]
        return tuple(dict.fromkeys((*self.fields, *others)))

    def applies_to(self, data: DataProto) -> bool:
        """Checks whether the batch has something for it: any of its fields, or it names none."""
        reads = self.reads()
        return not reads or any(name in data.batch for name in reads)


class LossTerms:
    """Holds the terms of an actor, and adds them up.

    Raises:
        ValueError: two of them have one name.
    """

    def __init__(self, terms: Sequence[LossTerm] = ()) -> None:
        names = [term.name for term in terms]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"two terms of the loss are called {', '.join(twice)}: give each a name of its "
                "own, as its metric is called after it"
            )
        self.terms = list(terms)

    def __bool__(self) -> bool:
        return bool(self.terms)

    def fields(self) -> tuple[str, ...]:
        """Lists the fields of the batch that they read."""
        return tuple(dict.fromkeys(name for term in self.terms for name in term.reads()))

    def prepared(self, data: DataProto) -> DataProto:
        """Tells passes over a batch which further log-probs are wanted; without terms the same."""
        if not self.terms:
            return data
        there = set(data.batch.keys())
        predicted = [term.predicted for term in self.terms if term.predicted in there]
        candidates = [term.candidates for term in self.terms if term.candidates in there]
        wanted = {PREDICTED: tuple(predicted), CANDIDATES: tuple(candidates)}
        return replace(data, meta_info=data.meta_info | wanted)

    def counts(self, rows: DataProto, sequence_ranks: int = 1) -> dict[str, float]:
        """Counts the terms' denominators in a mini-batch over all ranks; a collective.

        Args:
            sequence_ranks: each row is on so many ranks, and counts once.
        """
        if not self.terms:
            return {}
        own = [float(term.count(rows)) if term.applies_to(rows) else 0.0 for term in self.terms]
        totals = sum_over_ranks(torch.tensor(own, dtype=torch.float64)) / sequence_ranks
        return dict(zip((term.name for term in self.terms), totals.tolist(), strict=True))

    def add(
        self,
        micro: DataProto,
        fields: LossFields,
        outputs: Mapping[str, Tensor],
        candidates: Tensor | None,
        device: torch.device,
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        """Adds the terms up; returns the loss, with the factor of all ranks, and metrics.

        Args:
            outputs: `log_prob` and `entropy` (rows, response_len).
            candidates: (rows, response_len, all K) of the fields that `prepared` named, in order.

        Raises:
            ValueError: the mini-batch has no counts, as where its groups come one by one.
        """
        loss: Tensor | float = 0.0
        metrics: dict[str, Tensor] = {}
        of_term = self._candidates_of_terms(micro, candidates)
        for term in self._applying(micro):
            if TERM_COUNTS not in micro.meta_info:
                raise ValueError(
                    f"the loss term {term.name} needs whole mini-batches, whose counts divide it: "
                    "set trainer.train_finished_groups=false"
                )
            own = {name: to_device(micro.batch[name], device) for name in _there(term, micro)}
            result = term.loss(
                TermInputs(
                    log_prob=outputs["log_prob"],
                    entropy=outputs["entropy"],
                    fields={**fields, **own},
                    candidates=of_term.get(term.name),
                )
            )
            # A mini-batch without anything to count has sums of zero.
            count = micro.meta_info[TERM_COUNTS][term.name] or 1.0
            loss = loss + term.coef * result.loss / count * world_size()
            metrics[term.metric] = result.loss / count
            for metric, value in result.metrics.items():
                metrics[metric] = value / count
        return loss, metrics

    def _applying(self, micro: DataProto) -> Iterator[LossTerm]:
        """Yields the terms for which a batch has something."""
        for term in self.terms:
            if term.applies_to(micro):
                yield term

    def _candidates_of_terms(
        self, micro: DataProto, candidates: Tensor | None
    ) -> dict[str, Tensor]:
        """Splits the candidates' log-probs by term."""
        if candidates is None:
            return {}
        of_term = {}
        start = 0
        for term in self.terms:
            if term.candidates is not None and term.candidates in micro.batch:
                stop = start + micro.batch[term.candidates].shape[-1]
                of_term[term.name] = candidates[..., start:stop]
                start = stop
        return of_term


def _there(term: LossTerm, micro: DataProto) -> list[str]:
    """Lists the fields of a term that a batch has."""
    return [name for name in term.reads() if name in micro.batch]


def open_loss_terms(config: PPOConfig) -> LossTerms:
    """Opens the terms that features bring (`Feature.loss_terms`) and the config asks for.

    Raises:
        TypeError: a feature returned anything else.
    """
    terms: list[LossTerm] = []
    for feature, place in named("loss_terms"):
        opened = list(load_object(place, f"feature {feature}")(config))
        if not all(isinstance(term, LossTerm) for term in opened):
            raise TypeError(
                f"loss_terms={place!r} of feature {feature} returned {opened!r}: return a list of "
                "LossTerm, an empty one where the config turns them off"
            )
        terms += opened
    return LossTerms(terms)
