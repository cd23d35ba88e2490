"""The bytes that a rank holds, by what takes them; and the phases of a step that are planned.

Invariant: no term is negative.
"""

from dataclasses import asdict, dataclass
from typing import Literal, get_args

GIB = 1 << 30
Phase = Literal[
    "generation",
    "reference",
    "log-probs",
    "values",
    "critic update",
    "actor update",
    "weight sync",
    "checkpoint",
]
# In the order of a step, as the plan shows them.
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, kw_only=True)
class MemoryTerms:
    """Holds the bytes on one rank, by what takes them.

    Args:
        weights: of models, as they are kept: of several ranks each has its shards.
        gradients: float32, of the parameters that train.
        optimiser: its state, as AdamW's two moments.
        activations: what a pass makes, but for logits.
        logits: of these, what is as wide as the vocabulary.
        kv_cache: the rollout engine's.
        copies: of weights that are gathered or cast, and of what a checkpoint saves.
    """

    weights: int = 0
    gradients: int = 0
    optimiser: int = 0
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0
    copies: int = 0

    def __add__(self, other: "MemoryTerms") -> "MemoryTerms":
        """Adds up what two parts of a rank hold at the same time."""
        added = asdict(other)
        return MemoryTerms(**{term: size + added[term] for term, size in asdict(self).items()})

    def total(self) -> int:
        """Sums all terms."""
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class PartMemory:
    """Holds what one part of a rank, a model or the engine, takes.

    Args:
        at_rest: in the phases that do not use it.
        phases: in those that do.
    """

    at_rest: MemoryTerms
    phases: dict[Phase, MemoryTerms]

    def in_phase(self, phase: Phase) -> MemoryTerms:
        """Returns what the part takes in a phase of the step."""
        return self.phases.get(phase, self.at_rest)
