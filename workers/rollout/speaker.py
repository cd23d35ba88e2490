"""Names the agent that speaks in an episode, where several do."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speaker:
    """Names whose turns a row holds, as the program that plays does; "": it names nobody.

    Attributes:
        agent: such as `solver`.
        conversation: which of that agent's conversations it is.
    """

    agent: str = ""
    conversation: str = ""


NOBODY = Speaker()
