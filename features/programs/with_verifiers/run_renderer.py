"""Makes ids of messages for verifiers' token-in client, as this project does everywhere.

It runs in verifiers' interpreter, as a renderer that verifiers loads by its name. Prompts are the
run's chat template's, calls are read by `agent.parser`, and a turn goes on behind the very ids that
were sampled. Invariant: `bridge_to_next_turn` returns ids that begin with those it was given, or
nothing.
"""

import hashlib
import itertools
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field
from renderers.base import (
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    extract_message_tool_names,
)
from renderers.configs import BaseRendererConfig

from custom.tools.chat_form import resolve_parser
from custom.tools.families import FamilyParser
from data.turn_tokens import TurnTokens
from features.programs.exchange import Answer, AskedCompletion, Json
from features.programs.protocols.chat_completions import read_message
from features.programs.recall import Recall, message_of

Messages = list[Json]


class RunRendererConfig(BaseRendererConfig):
    """Holds what the run's template and parser are.

    Attributes:
        template_kwargs: variables of the chat template.
        eos_token_ids: the ids at which sampling stops.
        parser: how tool calls are written.
    """

    name: Literal["run"] = "run"
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    parser: str = "function"
    _internal_fields: ClassVar[frozenset[str]] = frozenset(
        {"template_kwargs", "eos_token_ids", "parser"}
    )


@dataclass(frozen=True)
class Prompt:
    """Holds what a prompt was made of.

    Attributes:
        messages: each answer of the policy's as it was sampled.
        sent: the same as they were sent, by which answers are known again; empty: not known.
        digest: of `sent`.
    """

    messages: Messages
    tools: list[Json] | None
    sent: Messages
    digest: str = ""


class RunRenderer:
    """Renders and reads by the run's chat template and parser.

    Attributes:
        prompts: by a digest of its ids, what each prompt was made of.
        shown: by a digest of the ids up to its end, each answer as a message that is sent back.
        numbers: of the answers that were read; calls are named after them.
    """

    config_class = RunRendererConfig
    is_prefix_stable = False
    supports_tools = True
    is_multimodal = False

    def __init__(self, tokenizer: Any, config: RunRendererConfig) -> None:
        self.config = config
        self.eos_token_ids = config.eos_token_ids or (tokenizer.eos_token_id,)
        turns = TurnTokens(
            tokenizer,
            template_kwargs=dict(config.template_kwargs),
            eos_token_ids=self.eos_token_ids,
        )
        parser = resolve_parser(config.parser, turns)
        self.turns = turns.read_by(parser) if isinstance(parser, FamilyParser) else turns
        # Its own messages keep the thinking or not as verifiers likes; rows go on by their ids.
        self.recall = Recall(parser, adds_thinking=True)
        self.prompts: dict[bytes, Prompt] = {}
        self.shown: dict[bytes, Json] = {}
        self.numbers = itertools.count(1)

    def render(
        self,
        messages: Messages,
        *,
        tools: list[Json] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """Renders a whole conversation, up to the generation prompt."""
        sent = [read_message(dict(message)) for message in messages]
        as_sampled, digest = self.recall.recalled(sent, tools=tools)
        token_ids = self.turns.prompt(as_sampled, tools)
        self._remember(token_ids, Prompt(as_sampled, tools, sent, digest))
        return rendered(token_ids, messages, new=len(token_ids))

    def render_ids(
        self,
        messages: Messages,
        *,
        tools: list[Json] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Renders a whole conversation, up to the generation prompt."""
        return self.render(messages, tools=tools).token_ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Messages,
        *,
        tools: list[Json] | None = None,
    ) -> RenderedTokens | None:
        """Goes on behind a sampled turn.

        None where the prompt is unknown, its tools were others, or the template rewrites history.
        """
        before = self.prompts.get(digest_of(previous_prompt_ids))
        if before is None or as_json(before.tools) != as_json(tools):
            return None
        replies = [read_message(dict(message)) for message in new_messages]
        join = self.turns.join(before.messages, previous_completion_ids, replies, tools)
        if join.rewritten is not None or not join.token_ids:
            return None
        answer = {
            "role": "assistant",
            "content": self.turns.text(previous_completion_ids),
        }
        answered_ids = [*previous_prompt_ids, *previous_completion_ids]
        token_ids = [*answered_ids, *join.token_ids]
        sent: Messages = []
        shown = self.shown.get(digest_of(answered_ids))
        if before.sent and shown is not None:
            sent = [*before.sent, shown, *replies]
        digest = self.recall.recalled(sent).digest
        prompt = Prompt([*before.messages, answer, *replies], tools, sent, digest)
        self._remember(token_ids, prompt)
        return rendered(token_ids, new_messages, new=len(join.token_ids))

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[Json] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        """Reads text, thinking and tool calls out of what was sampled.

        The answer is known again where its prompt's ids are given.
        """
        text = self.turns.text(token_ids)
        before = self.prompts.get(digest_of(prompt_ids or ()))
        asked = AskedCompletion(messages=before.sent if before else [], tools=tools)
        number = next(self.numbers)
        digest = before.digest if before else ""
        answered = self.recall.shown(asked, str(number), number, Answer(text=text), digest)
        self.shown[digest_of([*(prompt_ids or ()), *token_ids])] = message_of(answered)
        calls = [
            ParsedToolCall(
                raw=call.arguments,
                name=call.name,
                arguments=call.arguments,
                status=ToolCallParseStatus.OK,
                id=call.id,
            )
            for call in answered.calls
        ]
        return ParsedResponse(
            content=answered.text,
            reasoning_content=answered.thinking or None,
            tool_calls=calls,
        )

    def get_stop_token_ids(self) -> list[int]:
        """Lists the ids at which sampling stops."""
        return list(self.eos_token_ids)

    def _remember(self, token_ids: Sequence[int], prompt: Prompt) -> None:
        self.prompts[digest_of(token_ids)] = prompt


def rendered(token_ids: list[int], messages: Messages, new: int) -> RenderedTokens:
    """Makes verifiers' record of a rendering, whose new ids all count as the last message's."""
    last = len(messages) - 1
    return RenderedTokens(
        token_ids=token_ids,
        message_indices=[-1] * (len(token_ids) - new) + [last] * new,
        message_roles=[str(message["role"]) for message in messages],
        message_tool_names=extract_message_tool_names(messages),
    )


def digest_of(token_ids: Sequence[int]) -> bytes:
    """Returns what stands for ids."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


def as_json(value: Any) -> str:
    """Writes a value so that equal ones are written alike."""
    return json.dumps(value, sort_keys=True)
