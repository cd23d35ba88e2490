"""The tools that come along: a calculator, and a Python interpreter in a process with limits.

Both bound what a model's text can cost: the calculator by the size of numbers before it computes them, the interpreter
by time, memory and output.
"""

import ast
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from operator import add, floordiv, mod, mul, sub, truediv
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import IO, Any, TypeAlias

from custom.confine import kill_tree
from custom.tools.registry import Tool, ToolError, definition_of

Number: TypeAlias = int | float

MAX_EXPRESSION, MAX_BITS = 500, 4096

OPERATORS = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
    ast.FloorDiv: floordiv,
    ast.Mod: mod,
}
OPERATORS[ast.Pow] = pow


class CalculatorTool(Tool):
    """Computes arithmetic on numbers: + - * / // % ** and parentheses."""

    definition = definition_of("calculator")

    def execute(self, expression: str) -> str:
        """Returns the value in decimal; ToolError says what cannot be computed."""
        if len(expression) > MAX_EXPRESSION:
            raise ToolError(
                f"the expression has {len(expression)} characters; allowed: {MAX_EXPRESSION}"
            )
        try:
            value = evaluate(ast.parse(expression.strip(), mode="eval").body)
        except (SyntaxError, MemoryError, RecursionError) as error:
            raise ToolError("this is no arithmetic expression") from error
        except (ArithmeticError, ValueError, TypeError) as error:
            raise ToolError(f"cannot be computed: {error}") from error
        return (
            str(int(value))
            if isinstance(value, float) and value.is_integer() and abs(value) < 1e15
            else str(value)
        )


def evaluate(node: ast.expr) -> Number:
    """Computes an arithmetic expression, and on the way nothing larger than MAX_BITS bits."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return checked(node.value)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -evaluate(operand) if isinstance(sign, ast.USub) else evaluate(operand)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in OPERATORS:
            return apply(op, evaluate(left), evaluate(right))
    raise ToolError(f"not allowed in arithmetic: {ast.unparse(node)[:100]}")


def apply(op: ast.operator, left: Number, right: Number) -> Number:
    """Computes left op right, unless the result would be too large."""
    if isinstance(left, int) and isinstance(right, int):
        if isinstance(op, ast.Pow) and right > 0 and (left.bit_length() - 1) * right > MAX_BITS:
            raise ToolError("the power is too large")
        if isinstance(op, ast.Mult) and left.bit_length() + right.bit_length() > MAX_BITS + 1:
            raise ToolError("the product is too large")
    return checked(OPERATORS[type(op)](left, right))


def checked(value: Any) -> Number:
    """Returns a finite real number of bounded size; else ToolError."""
    if isinstance(value, complex):
        raise ToolError("the result is not a real number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is not a finite number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("the number is too large")
    return value


@dataclass(kw_only=True, eq=False)
class PythonTool(Tool):
    """Runs a snippet in a process of its own, with limits; what it prints is the result.

    The process has no network, an empty working folder that goes with it and no other of the user's files, none of
    this process's environment variables and the standard library only; it is killed with all its children. On Linux the
    kernel sees to it: custom/tools/python_snippet.py says how, `standing_walls()` what of it this machine allows.

    Args:
        timeout_s: seconds, of the wall's clock and of CPU time.
        memory_mb: address space, in MiB.
        disk_mb: what it may write in all, in MiB.
        max_output: characters that are shown; a file, and what is printed, takes no more than 1 MiB.
    """

    definition = definition_of("python")

    timeout_s: float = 5.0
    memory_mb: int = 512
    max_output: int = 10_000
    disk_mb: int = 16

    def execute(self, code: str) -> str:
        """Returns what the snippet printed; TimeoutError or ToolError, with that too, where it failed."""
        # A file: a pipe would have to be read while the snippet runs.
        with (
            tempfile.TemporaryDirectory(prefix="snippet-", ignore_cleanup_errors=True) as workdir,
            tempfile.TemporaryFile() as output,
        ):
            Path(workdir, "snippet.py").write_bytes(code.encode("utf-8", "replace"))
            with self._start(workdir, output) as process:
                try:
                    overran = self._overruns(process.pid)
                finally:
                    # Leaving the block waits for it.
                    kill_tree(process.pid)
            output.seek(0)
            return self._result(
                output.read().decode("utf-8", "replace"), overran, process.returncode
            )

    def _start(self, workdir: str, output: IO[bytes]) -> Popen[bytes]:
        file_bytes = max(1 << 20, 8 * self.max_output)
        limits = (
            max(math.ceil(self.timeout_s), 1),
            self.memory_mb << 20,
            file_bytes,
            self.disk_mb << 20,
        )
        flags = ("-I", "-S", "-B", "-u", "-X", "utf8")
        arguments = map(str, (os.getpid(), *limits))
        command = [
            sys.executable,
            *flags,
            str(Path(__file__).with_name("python_snippet.py")),
            *arguments,
        ]
        folder, env = os.path.realpath(workdir), {"HOME": workdir, "LANG": "C.UTF-8"}
        return Popen(
            command,
            cwd=folder,
            env=env,
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            start_new_session=True,
        )

    def _overruns(self, pid: int) -> bool:
        """Waits for the process's end; says whether it is to be ended before."""
        deadline = time.monotonic() + self.timeout_s
        # The status is left: the number is not given to another process before the kill.
        while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            if time.monotonic() > deadline:
                return True
            time.sleep(0.002)
        return False

    def _result(self, text: str, overran: bool, status: int) -> str:
        if len(text) > self.max_output:
            raise ToolError(
                f"{text[: self.max_output]}\n[ended after {self.max_output} characters of output]"
            )
        if overran:
            raise TimeoutError(f"{text}\n[ended after {self.timeout_s:g} s]".lstrip())
        if status != 0:
            raise ToolError(text.rstrip() or f"[ended with status {status}]")
        return text.rstrip("\n")
