"""The settings of the teacher: who it is, what it reads, what becomes of what it says."""

from collections.abc import Iterator
from typing import Literal

from training.config.section import (
    Fraction,
    InputPath,
    NonNegativeFloat,
    ObjectName,
    PositiveFloat,
    PositiveInt,
    Section,
)

# The values of teacher.model that are no path.
POLICY = "policy"
EMA = "ema"
# The values of teacher.loss.
ADVANTAGE = "advantage"
SAMPLED = "sampled"
TOP_K = "top_k"


class TeacherSettings(Section):
    """Says who scores the policy's tokens behind another prompt, and what is learnt of that."""

    #: policy = the policy itself; ema = an average of its weights; else the folder or hub name of a
    #: model with the policy's vocabulary; null = there is no teacher
    model: Literal["policy", "ema"] | InputPath | None = None
    #: what the teacher reads in place of the prompt: hint, feedback, sibling, or FILE.py:FUNCTION;
    #: null = the policy's own prompt
    context: ObjectName | None = None
    #: advantage = log-ratios are added to the advantages; sampled, top_k = a term of the loss, over
    #: the sampled tokens or over each place's likeliest words
    loss: Literal["advantage", "sampled", "top_k"] = "advantage"
    coef: NonNegativeFloat = 1.0  #: weight of what the teacher says
    #: weight of the advantages that rewards make; 0 = the teacher alone
    reward_coef: NonNegativeFloat = 1.0
    #: the episodes that are taught: all, or those that failed
    where: Literal["all", "failed"] = "all"
    failed_below: float = 0.5  #: an episode with a score below this has failed
    #: advantage, sampled: log-ratios are clamped to this many nats either way
    max_log_ratio: PositiveFloat = 10.0
    #: top_k: what is made small; reverse_kl and jsd are over the policy's words, forward_kl over
    #: the teacher's
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    #: top_k: words of each place; all others count as one; the vocabulary's size or more = all
    top_k: PositiveInt = 64
    ema_decay: Fraction = 0.99  #: ema: part of the average that stays in a step
    #: a prompt of the teacher's that leaves its model no room for the tokens: end the run, or leave
    #: the row untaught
    too_long: Literal["refuse", "leave_out"] = "refuse"

    def problems(self) -> Iterator[str]:
        """Yields what cannot be."""
        if self.model == POLICY and self.context is None:
            yield (
                "teacher.model=policy with teacher.context=null compares the policy with itself, "
                "and teaches nothing: set teacher.context (hint, feedback, sibling, or "
                "FILE.py:FUNCTION), or another model"
            )
        if self.model is not None and self.coef == 0 and self.reward_coef == 0:
            yield "teacher.coef=0 and teacher.reward_coef=0 leave nothing to learn: set one of them"

    def warnings(self) -> Iterator[str]:
        """Yields settings that nothing reads."""
        default = TeacherSettings()
        unread: dict[str, str] = {}
        if self.model is None:
            unread = dict.fromkeys(vars(default), "without teacher.model")
        else:
            if self.loss != TOP_K:
                unread |= dict.fromkeys(("divergence", "top_k"), f"with teacher.loss={self.loss}")
            else:
                unread["max_log_ratio"] = "with teacher.loss=top_k"
            if self.model != EMA:
                unread["ema_decay"] = "unless teacher.model=ema"
            if self.where == "all":
                unread["failed_below"] = "with teacher.where=all"
        for name, when in unread.items():
            if self[name] != default[name]:
                yield f"teacher.{name}={self[name]} is read by nothing {when}"
