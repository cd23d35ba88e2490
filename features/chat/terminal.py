"""Shows a chat to a person, and reads what they type.

A message is a line; a line that ends in a backslash goes on in the next, and between two lines of
three double quotes stands a message of many. A line that begins with a slash is a command, and with
two slashes a message that begins with one. Invariant: what a model or an environment wrote is shown
as text: it moves no cursor and changes no colour; and Ctrl-C ends a chat where the person is asked.
"""

import math
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from io import StringIO, TextIOWrapper
from typing import TextIO

from custom.envs.person import PersonsReply
from training.run.signals import EndingSignals

BLOCK = '"""'
HELP = """\
  a line is a message; end it in \\ to go on in the next, or put lines between two of \"\"\"
  Ctrl-D, or Ctrl-C, ends the episode"""
ENVIRONMENT_HELP = f"""\
{HELP}
  /reward 1.0    what the policy's last turn is paid, before or instead of the message
  /done [TEXT]   ends the episode, with a last message or without
  /system TEXT   before the first message: the system message
  /help          this; a message that begins with a slash is written with two"""
# Characters without a width of their own that may be shown all the same.
SHOWN_CONTROLS = "\n\t\u200d"


def printable(text: str) -> str:
    """Writes control characters, those that turn the direction of text too, as escapes."""
    parts = []
    for character in text:
        is_control = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        if is_control and character not in SHOWN_CONTROLS:
            parts.append(character.encode("unicode_escape", "backslashreplace").decode())
        else:
            parts.append(character)
    return "".join(parts)


class Terminal:
    """Reads lines and shows text, in a terminal or through pipes.

    Args:
        lines: where the person types; None: the process's own input.
        out: where text is shown; None: the process's own output.
        signals: those that end the chat. One that comes while nothing is read waits.

    Attributes:
        is_reading: a line is being read.
        has_ended: no more is typed.
    """

    def __init__(
        self,
        lines: TextIO | None = None,
        out: TextIO | None = None,
        signals: EndingSignals | None = None,
    ) -> None:
        # A process may have neither.
        self.lines = lines or sys.stdin or StringIO()
        self.out = out or sys.stdout or StringIO()
        self.signals = signals or EndingSignals()
        self.is_reading = False
        self.has_ended = False
        for stream, errors in ((self.lines, "replace"), (self.out, "backslashreplace")):
            # Bytes that are no text in the terminal's encoding end no episode.
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors=errors)
        self.is_terminal = lines is None and self.lines.isatty()
        if self.is_terminal:
            # Makes `input` edit lines.
            import readline  # noqa: F401

    def show(self, text: str) -> None:
        """Shows a text and a line's end."""
        self._write(printable(text) + "\n")

    def _write(self, text: str) -> None:
        """Writes a text as it is; a person who reads no more has left, which costs no record."""
        try:
            self.out.write(text)
            self.out.flush()
        except OSError:
            # A closed terminal, or a `tee` that Ctrl-C has ended.
            self.out = StringIO()
            self.has_ended = True

    def show_message(self, role: str, text: str) -> None:
        """Shows a message under who wrote it, its lines indented."""
        self.show(f"{role}:")
        for line in text.split("\n"):
            self.show(f"  {line}")

    def line(self, prompt: str) -> str:
        """Reads a line.

        Raises:
            EOFError: there is none; KeyboardInterrupt: Ctrl-C, now or since the last line.
        """
        self.is_reading = True
        try:
            self.require_person()
            return self._read(prompt)
        except (EOFError, OSError):
            self.has_ended = True
            raise EOFError from None
        finally:
            self.is_reading = False

    def require_person(self) -> None:
        """Raises KeyboardInterrupt where the person has left by Ctrl-C."""
        if self.signals.received:
            raise KeyboardInterrupt

    def _read(self, prompt: str) -> str:
        if self.has_ended:
            raise EOFError
        if self.is_terminal:
            return input(prompt)
        self._write(prompt)
        line = self.lines.readline()
        if not line:
            self._write("\n")
            raise EOFError
        return line.rstrip("\r\n")

    def message(self, prompt: str, command: Callable[[str], bool] | None = None) -> str | None:
        """Reads a message, which may have several lines; None: a command ended the reading.

        Args:
            command: is given a line that begins with a slash; returns whether the reading ends.
        """
        while True:
            line = self.line(prompt)
            if line.strip() == BLOCK:
                return self._block()
            if line.startswith("//"):
                return self._going_on(line[1:])
            if line.startswith("/") and command is not None:
                if command(line):
                    return None
                continue
            return self._going_on(line)

    def _going_on(self, line: str) -> str:
        """Adds the lines that a backslash asks for."""
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self.line("… "))
        return "\n".join(lines)

    def _block(self) -> str:
        lines: list[str] = []
        while (line := self.line("… ")).strip() != BLOCK:
            lines.append(line)
        return "\n".join(lines)

    def pause(self) -> None:
        """Waits for Enter, unless no more is typed.

        Raises:
            KeyboardInterrupt: the person has left.
        """
        self.require_person()
        if not self.has_ended:
            with suppress(EOFError):
                self.line("Enter goes on ")


class EnvironmentsVoice:
    """Reads what a person says as the environment: messages, rewards and the end."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.started = False
        self.reward = 0.0
        self.done = False
        self.system = ""
        self.last_text = ""

    def ask(self) -> PersonsReply:
        """Waits for the next reply.

        Ctrl-D and Ctrl-C end the episode, with the reward that was given; before its first message
        they are raised, as there is no episode yet.
        """
        self.reward = 0.0
        self.done = False
        self.last_text = ""
        try:
            text = self.terminal.message("environment> ", self._command)
        except (EOFError, KeyboardInterrupt):
            if not self.started:
                raise
            text = None
            self.done = True
        self.started = True
        reply_text = self.last_text if text is None else text
        return PersonsReply(reply_text, self.reward, self.done, self.system)

    def _command(self, line: str) -> bool:
        """Follows a command; returns whether it ends the reply."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/reward" and self.started:
            self._set_reward(rest)
        elif name == "/done" and self.started:
            self.done = True
            self.last_text = rest
            return True
        elif name == "/system" and not self.started:
            self.system = rest
        elif name == "/help":
            self.terminal.show(ENVIRONMENT_HELP)
        else:
            when = "after" if self.started else "before"
            self.terminal.show(f"{name} is no command {when} the first message:")
            self.terminal.show(ENVIRONMENT_HELP)
        return False

    def _set_reward(self, text: str) -> None:
        try:
            reward = float(text)
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            self.terminal.show(f"/reward takes a finite number, as in /reward 1.0, not {text!r}")
            return
        self.reward = reward
        self.terminal.show(f"reward {reward:g} for the last turn")
