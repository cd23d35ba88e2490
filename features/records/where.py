"""Reads conditions on episodes, such as `reward >= 0.9 and turns < 6`: no code is run.

A condition has names of an episode's entries, numbers, texts, comparisons (also `in`), and, or,
not, + - * / of numbers, info["KEY"], and len(...). Invariant: what is not of this list is refused
when the condition is read, before any episode is.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

Value = Any
COMPARISONS: dict[type[ast.cmpop], Callable[[Value, Value], Value]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, whole: value in whole,
    ast.NotIn: lambda value, whole: value not in whole,
}
ARITHMETIC: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CONSTANTS = (int, float, str, bool, type(None))


class BadCondition(ValueError):
    """Reports a condition that cannot be read, or that an episode gives no answer to."""


class Condition:
    """Holds a condition that was read.

    Args:
        text: as the user wrote it.
        names: that it may use.

    Raises:
        BadCondition: it has anything else.
    """

    def __init__(self, text: str, names: Collection[str]) -> None:
        self.text = text
        self.names = names
        try:
            self.tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BadCondition(
                f"--where {text!r} cannot be read ({error.__class__.__name__}); a condition is "
                "like reward >= 0.9 and turns < 6"
            ) from error
        for node in ast.walk(self.tree):
            self._require_allowed(node)

    def _require_allowed(self, node: ast.AST) -> None:
        allowed = (
            ast.BoolOp | ast.boolop | ast.Compare | ast.cmpop | ast.UnaryOp | ast.Not | ast.USub
        )
        allowed |= ast.expr_context | ast.List | ast.Tuple | ast.Subscript
        if isinstance(node, ast.Name):
            if node.id not in self.names and node.id != "len":
                raise self._refusal(f"the name {node.id}, which no episode has")
        elif isinstance(node, ast.Constant):
            if not isinstance(node.value, CONSTANTS):
                raise self._refusal(f"{node.value!r}")
        elif isinstance(node, ast.Call):
            is_len = isinstance(node.func, ast.Name) and node.func.id == "len"
            if not is_len or len(node.args) != 1 or node.keywords:
                raise self._refusal(f"the call {ast.unparse(node)}")
        elif isinstance(node, ast.BinOp):
            if type(node.op) not in ARITHMETIC:
                raise self._refusal(f"{ast.unparse(node)}")
        elif isinstance(node, ast.operator):
            return
        elif isinstance(node, ast.Is | ast.IsNot) or not isinstance(node, allowed):
            raise self._refusal(f"{type(node).__name__}")

    def _refusal(self, what: str) -> BadCondition:
        return BadCondition(
            f"--where {self.text!r} has {what}; allowed: comparisons, and, or, not, in, numbers, "
            f'texts, + - * /, info["KEY"], len(…) and {", ".join(sorted(self.names))}'
        )

    def holds(self, entries: Mapping[str, Value], where: str) -> bool:
        """Returns whether an episode meets the condition.

        Args:
            entries: of the episode, by name.
            where: names it in errors.
        Raises:
            BadCondition: its entries cannot be compared so.
        """
        try:
            return bool(_value(self.tree, entries))
        except (TypeError, LookupError, ZeroDivisionError, OverflowError) as error:
            told = f"it has no {error}" if isinstance(error, LookupError) else str(error)
            advice = ""
            if isinstance(error, LookupError) or "NoneType" in told:
                advice = "; ask first whether it is there, as in 'score' in info and "
                advice += "info['score'] > 1"
            elif isinstance(error, TypeError):
                advice = "; numbers, written without quotes, go with numbers, and texts with texts"
            raise BadCondition(
                f"--where {self.text!r} cannot be asked of {where}: {told}{advice}"
            ) from error


def _value(node: ast.expr, entries: Mapping[str, Value]) -> Value:
    """Computes a node of a condition that was checked."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return entries[node.id]
        case ast.List() | ast.Tuple():
            return [_value(part, entries) for part in node.elts]
        case ast.BoolOp():
            stops_at = isinstance(node.op, ast.Or)
            return any_or_all(node.values, entries, stops_at)
        case ast.UnaryOp():
            operand = _value(node.operand, entries)
            return not operand if isinstance(node.op, ast.Not) else -operand
        case ast.BinOp():
            left, right = _value(node.left, entries), _value(node.right, entries)
            for number in (left, right):
                if not isinstance(number, int | float):
                    raise TypeError(f"{number!r:.60} is no number")
            return ARITHMETIC[type(node.op)](left, right)
        case ast.Compare():
            return _compared(node, entries)
        case ast.Subscript():
            return _value(node.value, entries)[_value(node.slice, entries)]
        case ast.Call():
            return len(_value(node.args[0], entries))
    raise TypeError(f"{ast.unparse(node)} cannot be computed")


def any_or_all(parts: list[ast.expr], entries: Mapping[str, Value], stops_at: bool) -> Value:
    """Computes `or` (stops at what is true) or `and` (at what is not), from left to right."""
    value: Value = not stops_at
    for part in parts:
        value = _value(part, entries)
        if bool(value) is stops_at:
            return value
    return value


def _compared(node: ast.Compare, entries: Mapping[str, Value]) -> bool:
    left = _value(node.left, entries)
    for comparison, part in zip(node.ops, node.comparators, strict=True):
        right = _value(part, entries)
        if not COMPARISONS[type(comparison)](left, right):
            return False
        left = right
    return True
