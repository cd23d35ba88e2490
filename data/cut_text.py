"""The text of a turn that a limit cut, so that whoever reads it knows that it may not be whole."""


class CutText(str):
    """Holds a turn that a limit cut behind its last token; it is a text like any other else."""

    __slots__ = ()
