"""Defines a protocol, and the parts that all of them share: errors, contents, tool calls."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from features.programs.exchange import AnsweredCompletion, AskedCompletion, Json
from features.programs.protocols.fields import (
    SAMPLING_FIELDS,
    ReadFields,
    RefusedField,
    RequestField,
    read_fields,
)

# How the roles of newer models are called in chat templates.
ROLES = {"developer": "system"}
# So much of a value is shown in an error.
SHOWN_CHARS = 200
# How often lists and objects of a request may hold each other.
MAX_DEPTH = 100
# Where a message keeps what was thought before it, as chat templates know it.
THINKING_KEY = "reasoning_content"
TEXT_PARTS = ("text", "input_text", "output_text")
# Settings that say how to sample; log-probs must be those of what the run samples.
SAMPLING = tuple(SAMPLING_FIELDS)
# How a choice names a tool, or several that may be called.
NAMED_CHOICES = ("function", "tool", "custom", "allowed_tools")

# At this Anthropic's clients send the whole conversation.
THREAD_CODE = "thread_unsupported_request"

ToolChoice = Literal["auto", "none", "required"]
# How the protocols say it.
TOOL_CHOICES: dict[str, ToolChoice] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}


class ProtocolError(ValueError):
    """A request that is answered with an error.

    Args:
        code: what kind of error, as OpenAI's `code`.
        status: of HTTP.
        details: what Anthropic's clients read beside the message.
    """

    def __init__(
        self,
        message: str,
        code: str = "invalid_request_error",
        status: int = 400,
        details: Json | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.details = details


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Joins the functions of one protocol.

    Attributes:
        read: a request's JSON -> what is asked. Raises ProtocolError, or KeyError, TypeError,
            ValueError, AttributeError where the JSON is of another form.
        write: an answer -> the response's JSON.
        events: an answer -> the events of a stream, each as text with its blank line.
        write_error: an error -> the response's JSON.
    """

    read: Callable[[Json], AskedCompletion]
    write: Callable[[AskedCompletion, AnsweredCompletion], Json]
    events: Callable[[AskedCompletion, AnsweredCompletion], Iterator[str]]
    write_error: Callable[[ProtocolError], Json]


def role_of(message: Json) -> str:
    """Returns a message's role, as chat templates know it."""
    role = message["role"]
    if not isinstance(role, str):
        raise ProtocolError(f"a message's role is a text, not {short(role)}")
    return ROLES.get(role, role)


def text_of(content: Any) -> str:
    """Returns a content as text: a string, parts with text, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ProtocolError("a message's content must be a string or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS:
            raise ProtocolError(f"content of type {kind!r} is not served here; text is")
        texts.append(str(part["text"]))
    return "".join(texts)


def tool_call(call_id: str, name: str, arguments: Any) -> Json:
    """Makes a call as chat templates take it: its arguments an object, where they are one."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except ValueError:
            value = arguments
    check_depth(value)
    function = {"name": name, "arguments": value or {}}
    return {"id": call_id, "type": "function", "function": function}


def check_depth(value: Any, most: int = MAX_DEPTH) -> None:
    """Raises ProtocolError where lists and objects hold each other too often.

    What is behind reads a request by functions that call themselves: templates, records, what
    sends it to other ranks.
    """
    level = [value]
    for _ in range(most):
        held: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                held += item.values()
            elif isinstance(item, list):
                held += item
        level = [item for item in held if isinstance(item, dict | list)]
        if not level:
            return
    raise ProtocolError(f"lists and objects may hold each other {most} times at most")


def function_tool(name: str, description: str | None, parameters: Any) -> Json:
    """Makes a tool as chat templates take it. Raises ProtocolError where it is none."""
    function: Json = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return checked_tool({"type": "function", "function": function})


def checked_tool(tool: Any) -> Json:
    """Returns a tool in OpenAI's form as it is. Raises ProtocolError where it is of another."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise ProtocolError(
            f"{short(tool)} is no tool that is served here; "
            '{"type": "function", "function": {"name": ..., "parameters": {...}}} is'
        )
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ProtocolError(f"a tool's name is a text, not {short(name)}")
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {} if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        raise ProtocolError(
            f"the parameters of the tool {name!r} must be a JSON schema of an object, not "
            f"{short(parameters)}"
        )
    return dict(tool)


def short(value: Any) -> str:
    """Shows a value in an error."""
    shown = json.dumps(value)
    return shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]} ..."


def sampling_of(body: Json) -> dict[str, float]:
    """Takes the sampling settings from a request, those that it sets."""
    return {name: float(body[name]) for name in SAMPLING if body.get(name) is not None}


def checked_fields(body: Json, table: Mapping[str, RequestField]) -> ReadFields:
    """Sorts the fields that a request sets. Raises ProtocolError where one is not served."""
    try:
        return read_fields(body, table)
    except RefusedField as error:
        details = {"error_code": THREAD_CODE} if error.name == "thread" else None
        raise ProtocolError(str(error), details=details) from None


def streams(body: Json) -> bool:
    """Reads whether the answer is to come in pieces."""
    value = body.get("stream")
    if value is not None and not isinstance(value, bool):
        raise ProtocolError(f"stream={short(value)} must be true or false")
    return bool(value)


def positive_count(body: Json, *names: str) -> int | None:
    """Returns the first of these settings that is given: a number of tokens, 1 or more."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ProtocolError(f"{name}={value!r} must be a whole number of 1 or more")
        return value
    return None


def texts_to_stop_at(value: Any) -> tuple[str, ...]:
    """Reads stop texts: one, several or none."""
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(text, str) for text in texts):
        raise ProtocolError("stop must be a string or a list of strings")
    return tuple(text for text in texts if text)


def too_long(size: int, most: int, why: str) -> str:
    """Says that a prompt has no room, in the words that agents' libraries look for.

    OpenAI's library goes by the error's code; LiteLLM and others by "maximum context length is",
    LangChain and those for Anthropic by "prompt is too long"; some read the two numbers.

    Args:
        size, most: tokens of the prompt, and of the longest one.
    """
    return (
        f"This model's maximum context length is {most} tokens. However, your messages resulted in "
        f"{size} tokens: prompt is too long: {size} tokens > {most} maximum. It exceeds "
        f"the context window: please reduce the length of the messages. {why}"
    )


def openai_error(error: ProtocolError) -> Json:
    """Writes an error as OpenAI's servers do."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {"message": str(error), "type": kind, "param": None, "code": error.code},
    }


def tool_choice_of(body: Json) -> ToolChoice:
    """Reads whether the answer may call tools, or is to.

    One that names a tool, or some, wants a call. Raises ProtocolError where it means nothing here,
    or wants a call of no tool.
    """
    choice = body.get("tool_choice")
    word = choice.get("type") if isinstance(choice, Mapping) else choice
    if isinstance(choice, Mapping) and word in NAMED_CHOICES:
        word = "required"
    if word is not None and (not isinstance(word, str) or word not in TOOL_CHOICES):
        raise ProtocolError(
            f"tool_choice={json.dumps(choice)} is not served here: 'auto' and 'none' are; "
            "'required' and a tool's name are overridden, as programs.client_sampling says"
        )
    meant = TOOL_CHOICES[word or "auto"]
    if meant == "required" and not body.get("tools"):
        raise ProtocolError(f"tool_choice={json.dumps(choice)} needs tools, and there are none")
    return meant


def server_sent_event(data: Json | str, kind: str | None = None) -> str:
    """Writes one event of a stream."""
    text = data if isinstance(data, str) else json.dumps(data)
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {text}\n\n"
