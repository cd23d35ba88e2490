"""What is proved of a form of tool calls: that a call goes round, from the template and back.

Invariant: every step is the product's own: the parser that `auto` finds, the tools' registry, the
join of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from custom.tools import MultiTurnManager, Tool, ToolDefinition, ToolRegistry
from custom.tools.chat_form import form_problem, resolve_parser
from custom.tools.families import FamilyParser
from data.turn_tokens import Join, TurnTokens
from tests.zoo.tool_forms import ToolForm, make_byte_tokenizer

QUESTION = [{"role": "user", "content": "How many?"}]
CALLED = [{"q": "a b", "n": 3}]


class Search(Tool):
    """Notes what it is called with."""

    definition = ToolDefinition(
        name="search",
        description="Searches.",
        parameters={
            "type": "object",
            "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["q", "n"],
        },
    )

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []

    def execute(self, q: str, n: int) -> str:
        """Answers."""
        self.got.append({"q": q, "n": n})
        return f"found {n} of {q}"


@dataclass
class PlayedForm:
    """Plays turns in a form.

    Attributes:
        tokens: with the parser that the template's own text chose.
        tool: that the turns call.
    """

    form: ToolForm
    tokens: TurnTokens
    parser: FamilyParser
    tool: Search = field(default_factory=Search)

    @classmethod
    def of(cls, form: ToolForm) -> PlayedForm:
        """Makes the tokenizer and finds the parser."""
        tokenizer = make_byte_tokenizer(form)
        stops: Any = tokenizer.convert_tokens_to_ids(list(form.stops))
        tokens = TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=stops)
        parser = resolve_parser("auto", tokens)
        assert isinstance(parser, FamilyParser)
        return cls(form, tokens.read_by(parser), parser)

    def __post_init__(self) -> None:
        self.manager = MultiTurnManager(ToolRegistry([self.tool]), self.parser)
        self.tools = self.manager.registry.schemas()

    def ids(self, sampled: str) -> list[int]:
        """Returns the ids of what a policy writes."""
        return self.tokens.tokenizer.encode(sampled, add_special_tokens=False)

    def answer(self, sampled: str) -> list[dict[str, Any]]:
        """Has a turn's calls executed; returns the messages that answer them."""
        observation = self.manager.step(self.tokens.text(self.ids(sampled))).observation
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        return list(observation)

    def join(self, sampled: str, reply: Sequence[dict[str, Any]]) -> Join:
        """Joins a turn and what answers it."""
        return self.tokens.join(QUESTION, self.ids(sampled), reply, self.tools)

    def in_parts(self, sampled: str) -> dict[str, Any]:
        """Returns a turn as the message that a client would send back."""
        text = self.tokens.text(self.ids(sampled))
        message = self.parser.as_message(text, self.tools)
        return message or {"role": "assistant", "content": text}


def call_goes_round(form: ToolForm) -> bool:
    """Checks that a call is read as the template writes it and as it is sampled, and is answered.

    The template's own rendering of the whole conversation ends as the joined row does.
    """
    played = PlayedForm.of(form)
    if played.parser.name != form.parser or form_problem("auto", played.parser, played.tokens):
        return False
    reply = played.answer(form.sampled)
    if played.tool.got != CALLED or [each["role"] for each in reply] != ["tool"]:
        return False
    join = played.join(form.sampled, reply)
    if join.rewritten is not None:
        return False
    whole = played.tokens.prompt([*QUESTION, played.in_parts(form.sampled), *reply], played.tools)
    return bool(join.token_ids) and whole[-len(join.token_ids) :] == join.token_ids
