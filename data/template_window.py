"""Reads from a chat template's source how much of a conversation its new end depends on.

Most templates render each message by itself, or by its neighbours. Then the text that a turn adds
follows from the first messages and the last ones, and a long conversation need not be rendered as a
whole for it. Templates may also do anything else: look for the last question, drop what was thought
before it, count. Invariant: a template has a window only where its source proves that; all others,
and those that cannot be read, have none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

from jinja2 import Environment, TemplateError, nodes
from jinja2.visitor import NodeVisitor

# Templates may stop and skip in loops; other extensions are not known here.
ENVIRONMENT = Environment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
# These parts of a template would show it the messages by other ways, or keep a state.
FOREIGN = (
    nodes.Extends,
    nodes.Block,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.ContextReference,
    nodes.DerivedContextReference,
    nodes.CallBlock,
)
STATEFUL = ("cycler", "joiner", "self")
# Tests of the list of messages that come out alike for all lists.
CONSTANT_TESTS = ("defined", "undefined", "none", "string", "mapping", "sequence", "iterable")


class Window(NamedTuple):
    """Says which messages the end of a rendering depends on: so many of the first and of the last.

    What is left out between them must be an even number, because templates check that roles
    alternate.
    """

    first: int
    last: int


@lru_cache(maxsize=64)
def window_of(source: str) -> Window | None:
    """Returns the template's window; None: the whole conversation must be rendered."""
    try:
        tree = ENVIRONMENT.parse(source)
        reader = _Reader(tree)
        reader.visit(tree)
    except (TemplateError, _DependsOnAll):
        return None
    # A message at the end that changes with what follows has neighbours of its own.
    return Window(first=reader.first + 1, last=2 * reader.distance + 1)


class _DependsOnAll(Exception):
    """Ends the reading: something may depend on any message, or on their number."""


class _Reader(NodeVisitor):
    """Walks through a template, and notes what its output depends on.

    Attributes:
        lists: the names of the list of messages: `messages`, and what is set to it or its rest.
        skipped: how many messages such rests leave out, all together.
        first: the first messages are looked at one by one up to this number.
        distance: a message is rendered by neighbours of at most this distance.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self.lists = {"messages"}
        self.skipped = 0
        self.first = 0
        self.distance = 0
        # Whether the innermost loop goes over messages, and any loop does or may.
        self._loop_of_messages = False
        self._is_inside = False
        self._find_lists(tree)

    def _find_lists(self, tree: nodes.Template) -> None:
        """Finds every name of the list of messages, wherever it is set."""
        count = 0
        while count != len(self.lists):
            count = len(self.lists)
            for assign in tree.find_all(nodes.Assign):
                is_list = self._rest(assign.node) is not None
                if is_list and isinstance(assign.target, nodes.Name):
                    self.lists.add(assign.target.name)
        for assign in tree.find_all(nodes.Assign):
            self.skipped += self._rest(assign.node) or 0

    def _rest(self, node: nodes.Node | None) -> int | None:
        """Returns how many messages an expression leaves out; None: it is no list of messages.

        It is `messages`, `messages[1:]`, or a choice between two of these.
        """
        if isinstance(node, nodes.Name):
            return 0 if node.name in self.lists else None
        if isinstance(node, nodes.CondExpr):
            one, other = self._rest(node.expr1), self._rest(node.expr2)
            return None if one is None or other is None else max(one, other)
        if not isinstance(node, nodes.Getitem) or not isinstance(node.arg, nodes.Slice):
            return None
        inner = self._rest(node.node)
        start = 0 if node.arg.start is None else _number(node.arg.start)
        if inner is None or start is None or node.arg.stop or node.arg.step:
            return None
        return inner + start

    @contextmanager
    def _within(self, *, of_messages: bool, inside: bool) -> Iterator[None]:
        before = self._loop_of_messages, self._is_inside
        self._loop_of_messages = of_messages
        self._is_inside = inside
        yield
        self._loop_of_messages, self._is_inside = before

    # Statements

    def generic_visit(self, node: nodes.Node) -> None:
        """Visits what a node is made of; refuses what is foreign."""
        if isinstance(node, FOREIGN):
            raise _DependsOnAll
        super().generic_visit(node)

    def visit_For(self, node: nodes.For) -> None:
        """Visits a loop over messages, or over something else."""
        rest = self._rest(node.iter)
        names = [node.target, *node.target.find_all(nodes.Name)]
        if any(isinstance(name, nodes.Name) and name.name in self.lists for name in names):
            raise _DependsOnAll
        if rest is None:
            self.visit(node.iter)
        else:
            if node.test is not None or node.recursive:
                raise _DependsOnAll
            self.skipped += rest
            self._visit_choices(node.iter)
        of_messages = rest is not None
        with self._within(of_messages=of_messages, inside=self._is_inside or of_messages):
            for child in [*node.body, *([node.test] if node.test else [])]:
                self.visit(child)
        for child in node.else_:
            self.visit(child)

    def visit_Macro(self, node: nodes.Macro) -> None:
        """Visits a macro, which may be called anywhere."""
        # One within a loop sees that loop.
        if self._is_inside or any(argument.name in self.lists for argument in node.args):
            raise _DependsOnAll
        with self._within(of_messages=False, inside=True):
            self.generic_visit(node)

    def visit_Assign(self, node: nodes.Assign) -> None:
        """Visits an assignment; to a name of the messages nothing else may be assigned."""
        is_list = self._rest(node.node) is not None
        is_name = isinstance(node.target, nodes.Name) and node.target.name in self.lists
        if is_list != is_name or (is_list and self._is_inside):
            raise _DependsOnAll
        if is_list:
            self._visit_choices(node.node)
            return
        self.visit(node.target)
        self.visit(node.node)

    def visit_NSRef(self, node: nodes.NSRef) -> None:
        """Refuses what is kept from one message to the next."""
        if self._is_inside:
            raise _DependsOnAll

    def visit_Break(self, node: nodes.Break) -> None:
        """Refuses a loop over messages that ends before them."""
        if self._loop_of_messages:
            raise _DependsOnAll

    def _visit_choices(self, node: nodes.Node) -> None:
        """Visits the conditions of an expression that is a list of messages."""
        if isinstance(node, nodes.CondExpr):
            self.visit(node.test)
            self._visit_choices(node.expr1)
            if node.expr2 is not None:
                self._visit_choices(node.expr2)

    # Expressions

    def visit_Name(self, node: nodes.Name) -> None:
        """Refuses the list as a whole, and the loop over it."""
        if node.name in self.lists or node.name in STATEFUL:
            raise _DependsOnAll
        if node.name == "loop" and self._loop_of_messages:
            raise _DependsOnAll

    def visit_Getitem(self, node: nodes.Getitem) -> None:
        """Takes `messages[0]`, and neighbours such as `messages[loop.index0 - 1]`."""
        if self._rest(node.node) is None:
            self.generic_visit(node)
            return
        number = _number(node.arg)
        step = self._step(node.arg)
        if number is not None and number >= 0:
            self._note(first=number + 1)
        elif isinstance(node.arg, nodes.Neg) and _number(node.arg.node) and not self._is_inside:
            # This reads the end, outside of the part that renders every message.
            self._note(distance=_number(node.arg.node) or 0)
        elif step is not None:
            self._note(distance=step)
        else:
            raise _DependsOnAll

    def visit_Getattr(self, node: nodes.Getattr) -> None:
        """Takes of a loop over messages what depends on neighbours alone."""
        if not self._is_loop(node.node):
            self.generic_visit(node)
        elif node.attr == "first":
            self._note(first=1)
        elif node.attr in ("last", "previtem", "nextitem"):
            self._note(distance=1)
        else:
            raise _DependsOnAll

    def visit_Compare(self, node: nodes.Compare) -> None:
        """Takes comparisons of a message's place, and of their number, with numbers."""
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        numbers = [_number(side) for side in sides]
        if any(self._step(side) is not None or self._is_length(side) for side in sides):
            known = [number for number in numbers if number is not None]
            if len(known) == len(sides) - 1 and min(known) >= 0:
                self._note(first=max(known) + 2)
                return
        self.generic_visit(node)

    def visit_Mod(self, node: nodes.Mod) -> None:
        """Takes whether a message's place is even."""
        if self._step(node.left) is None or _number(node.right) != 2:
            self.generic_visit(node)

    def visit_Test(self, node: nodes.Test) -> None:
        """Takes tests that come out alike for all lists of messages."""
        if self._rest(node.node) is None or node.name not in CONSTANT_TESTS:
            self.generic_visit(node)

    def _note(self, first: int | None = None, distance: int | None = None) -> None:
        # Skipped messages shift the places in a rest.
        if first is not None:
            self.first = max(self.first, first + self.skipped)
        if distance is not None:
            self.distance = max(self.distance, distance + self.skipped)

    def _is_loop(self, node: nodes.Node) -> bool:
        return isinstance(node, nodes.Name) and node.name == "loop" and self._loop_of_messages

    def _is_length(self, node: nodes.Node) -> bool:
        """Checks for `messages|length`."""
        if not isinstance(node, nodes.Filter) or node.name not in ("length", "count"):
            return False
        return self._rest(node.node) is not None

    def _step(self, node: nodes.Node) -> int | None:
        """Returns how far `loop.index0 - 1` is from the message at hand; None: it is no place."""
        if isinstance(node, nodes.Getattr) and self._is_loop(node.node):
            return {"index0": 0, "index": 1}.get(node.attr)
        if not isinstance(node, nodes.Add | nodes.Sub):
            return None
        place = self._step(node.left)
        number = _number(node.right)
        if place is None or number is None:
            return None
        return place + abs(number)


def _number(node: nodes.Node) -> int | None:
    """Returns the whole number that a node is; None: it is none."""
    if isinstance(node, nodes.Const) and type(node.value) is int:
        return node.value
    return None
