"""Finds where a program's request asks for another sampling than the run's.

Invariant: log-probs are those of the distribution that is trained, so that nothing of it is done:
it is counted, or the request is refused (`programs.client_sampling`).
"""

from typing import Protocol

from features.programs.exchange import Asked

# The neutral value of a client's setting that the run does not have.
NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0}


class RunSampling(Protocol):
    """The run's sampling."""

    @property
    def temperature(self) -> float: ...

    @property
    def top_p(self) -> float: ...

    @property
    def top_k(self) -> int: ...


def other_sampling(asked: Asked, run: RunSampling) -> list[str]:
    """Lists which of a request's settings would make the policy's answer another than the run's."""
    values = NEUTRAL | {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k}
    differences = []
    for name, value in asked.sampling.items():
        is_off = name == "top_k" and value <= 0 and run.top_k <= 0
        if value != values[name] and not is_off:
            differences.append(
                f"{name}={value:g} is asked for, and the run samples with {values[name]:g}"
            )
    for name in asked.token_rules:
        differences.append(f"{name} is asked for, and the run samples as the policy does by itself")
    if asked.forces_call:
        differences.append(
            "tool_choice asks for a call, and whether there is one is the policy's own choice"
        )
    return differences
