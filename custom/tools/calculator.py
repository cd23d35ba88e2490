"""The calculator: arithmetic on numbers, whose size is bounded before they are computed.

Invariant: whatever a model writes, no number of more than MAX_BITS bits is computed.
"""

import ast
import math
from collections.abc import Callable
from operator import add, floordiv, mod, mul, sub, truediv
from typing import Any, TypeAlias

from custom.tools.definition import Tool, ToolDefinition, ToolError

Number: TypeAlias = int | float

# Characters of an expression.
MAX_EXPRESSION = 500
# Bits of an integer, results on the way included.
MAX_BITS = 4096
# Whole floats below this are written as integers: 3, not 3.0.
LARGEST_WHOLE_FLOAT = 1e15

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.Div: truediv,
    ast.FloorDiv: floordiv,
    ast.Mod: mod,
    ast.Pow: pow,
}


class CalculatorTool(Tool):
    """Computes arithmetic on numbers: + - * / // % ** and parentheses."""

    definition = ToolDefinition(
        name="calculator",
        description=(
            "Computes an arithmetic expression, for example (2 + 3) * 4 ** 2. "
            "Knows + - * / // % ** and parentheses."
        ),
        parameters={
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "The expression to compute."}
            },
            "required": ["expression"],
            "additionalProperties": False,
        },
    )

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
        if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_WHOLE_FLOAT:
            return str(int(value))
        return str(value)


def evaluate(node: ast.expr) -> Number:
    """Computes an arithmetic expression, and on the way nothing larger than MAX_BITS bits."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return checked(node.value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return evaluate(operand)
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
