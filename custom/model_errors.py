"""What a question to a model beside the policy raises where it has no answer.

Invariant: whoever runs an environment or a reward function knows by these types that neither the
environment nor the function is to blame.
"""

from typing import Literal, TypeAlias

# unreachable    no connection, or it broke
# timeout        no answer within timeout_s
# busy           429, to the last try
# server_error   5xx, to the last try
# refused        another status: a wrong key, name or request
# bad_answer     an answer without a text in it, or of too many bytes
# not_set_up     there is no such model in the config, or no key in the process's environment
ErrorKind: TypeAlias = Literal[
    "unreachable", "timeout", "busy", "server_error", "refused", "bad_answer", "not_set_up"
]


class ModelError(RuntimeError):
    """Reports that a model gave no answer.

    An environment that lets it pass has crashed, and is treated as `agent.on_failure` says; so is
    an episode, or a row, whose reward function lets it pass.

    Attributes:
        kind: why, as a word.
    """

    def __init__(self, message: str, kind: ErrorKind) -> None:
        super().__init__(message, kind)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


class UnknownModel(ModelError):
    """Reports that the config has no model of a name."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "not_set_up")

    def __reduce__(self) -> tuple[type["UnknownModel"], tuple[str]]:
        return UnknownModel, (str(self),)


class ModelTimeout(ModelError, TimeoutError):
    """Reports that a model did not answer in time; a tool's call then counts as `timeout`."""


def with_cause_first(message: str, description: str) -> str:
    """Returns a message with a crash's description; that the config lacks a model comes first.

    Args:
        message: which trial the crash was in.
        description: by `custom.env_calls.describe`.
    """
    first, _, frames = description.partition("\n")
    kind, _, cause = first.partition(": ")
    if not kind.endswith(UnknownModel.__name__):
        return f"{message}: {description}"
    return f"{cause} {message}:\n{frames}"
