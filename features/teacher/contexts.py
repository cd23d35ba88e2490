"""What a teacher may be told, by the names of `teacher.context`, and a function of the user's.

Each takes a `TeacherRow` and returns the messages that the teacher reads in place of the policy's
prompt, or None where the row has nothing to tell: it is then not taught.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from custom.env import BadContext, BadEnvironment, Message
from custom.env_calls import check_observation, located, raised, shown
from data.loading import load_object
from features.teacher.row import TeacherRow

Context = Callable[[TeacherRow], list[Message] | None]
# A message of the teacher's may be long: its model's length is the limit.
MAX_CHARS = 10_000_000


class TeacherFault(BadContext):
    """Ends the run: the teacher's context raised, or said what cannot be used."""


def with_text(messages: list[Message], text: str) -> list[Message]:
    """Returns messages of which the last one of a user ends with a further line of text.

    Without a user's message it is one, behind the others.
    """
    places = [place for place, each in enumerate(messages) if each["role"] == "user"]
    if not places:
        return [*messages, {"role": "user", "content": text}]
    last = messages[places[-1]]
    told = {**last, "content": f"{last['content']}\n{text}"}
    return [*messages[: places[-1]], told, *messages[places[-1] + 1 :]]


def hint(row: TeacherRow) -> list[Message] | None:
    """Tells the hint that `info["hint"]` had, or the dataset's column `hint`."""
    text = row.texts.get("hint") or row.columns.get("hint") or _task(row).get("hint")
    return with_text(row.messages, str(text)) if text else None


def feedback(row: TeacherRow) -> list[Message] | None:
    """Tells what was answered, and what the environment said of it at the end.

    SDPO's self-teacher reads this of its own attempts (arXiv:2601.20802).
    """
    if not row.feedback:
        return None
    return with_text(row.messages, f"An earlier attempt: {row.answer}\n{row.feedback}")


def sibling(row: TeacherRow) -> list[Message] | None:
    """Tells the best answer of the row's group, where it is better than the row's own.

    SDPO's feedback where there are scores alone: another attempt that went well
    (arXiv:2601.20802).
    """
    better = [each for each in row.siblings if each.score > row.score and each.answer]
    if not better:
        return None
    best = max(better, key=lambda each: each.score)
    return with_text(row.messages, f"A correct answer: {best.answer}")


def _task(row: TeacherRow) -> Mapping[str, Any]:
    """Returns the columns of the row that an environment was reset with."""
    task = row.columns.get("task")
    return task if isinstance(task, Mapping) else {}


CONTEXTS: dict[str, Context] = {"hint": hint, "feedback": feedback, "sibling": sibling}


class Telling:
    """Asks a context, and checks what it says.

    Args:
        name: `teacher.context`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.function: Any = CONTEXTS.get(name) or load_object(name, "teacher.context")
        self.where = located(self.function, name)

    def messages(self, row: TeacherRow) -> list[Message] | None:
        """Returns what the teacher reads; None: the row is not taught.

        Raises:
            TeacherFault: it raised, or returned anything else.
        """
        try:
            answer = self.function(row)
        # Whatever a function of the user's raises.
        except Exception as error:
            columns = ""
            if isinstance(error, KeyError):
                columns = f" (row.columns has {', '.join(row.columns) or 'none'})"
            raise TeacherFault(
                f"teacher.context={self.name} raised {raised(error, self.function)}{columns}: "
                "mend it, or return None for a row that has nothing to tell"
            ) from error
        if answer is None:
            return None
        allowed = (
            "allowed: a list of one or more messages {'role': …, 'content': …}, or None for a row "
            "that is not to be taught"
        )
        if not isinstance(answer, list) or not answer:
            raise TeacherFault(
                f"teacher.context={self.name} returned {shown(answer)} ({self.where}); {allowed}"
            )
        try:
            checked = check_observation(answer, f"teacher.context={self.name}", MAX_CHARS)
        except BadEnvironment as error:
            raise TeacherFault(f"{error} ({self.where}); {allowed}") from error
        assert isinstance(checked, list)
        return checked
