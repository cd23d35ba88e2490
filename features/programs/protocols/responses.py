"""OpenAI's responses: POST /v1/responses, without state: the whole input comes each time."""

from collections.abc import Iterable, Iterator
from typing import Any

from features.programs.exchange import AnsweredCompletion, AskedCompletion, Json
from features.programs.protocols.fields import RESPONSES
from features.programs.protocols.protocol import (
    THINKING_KEY,
    Protocol,
    ProtocolError,
    checked_fields,
    function_tool,
    openai_error,
    positive_count,
    role_of,
    sampling_of,
    server_sent_event,
    streams,
    text_of,
    tool_call,
    tool_choice_of,
)

# Between a namespace's name and its tool's.
SEPARATOR = "__"


def read(body: Json) -> AskedCompletion:
    """Reads a request."""
    fields = checked_fields(body, RESPONSES)
    choice = tool_choice_of(body)
    ignored = fields.unknown
    tools, namespaces = read_tools(body.get("tools") or ())
    if body.get("parallel_tool_calls") is False:
        ignored = (*ignored, "parallel_tool_calls=false")
    return AskedCompletion(
        messages=read_input(body),
        tools=tools or None,
        namespaces=namespaces,
        reads_calls=choice != "none",
        forces_call=choice == "required",
        max_tokens=positive_count(body, "max_output_tokens"),
        stream=streams(body),
        model=str(body.get("model") or "policy"),
        sampling=sampling_of(body),
        token_rules=fields.overridden,
        ignored=ignored,
    )


def read_tools(tools: Iterable[Json]) -> tuple[list[Json], dict[str, tuple[str, str]]]:
    """Reads tools, and of those in namespaces by which name the policy knows each.

    Raises ProtocolError where two would have the same.
    """
    read: list[Json] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for tool in tools:
        if tool.get("type") != "namespace":
            read.append(read_tool(tool))
            continue
        for member in tool["tools"]:
            name = name_of(member["name"], tool["name"])
            namespaces[name] = (tool["name"], member["name"])
            read.append(read_tool({**member, "name": name}))
    names = [tool["function"]["name"] for tool in read]
    twice = [name for name in names if names.count(name) > 1]
    if namespaces and twice:
        raise ProtocolError(f"two tools go by the name {twice[0]!r}: give one of them another")
    return read, namespaces


def name_of(name: str, namespace: str | None) -> str:
    """Returns by which name the policy knows a tool."""
    if not namespace:
        return name
    return f"{namespace.removesuffix(SEPARATOR)}{SEPARATOR}{name}"


def read_tool(tool: Json) -> Json:
    """Reads a tool; those that OpenAI's own servers run are refused."""
    if tool.get("type") != "function":
        raise ProtocolError(f"a tool of type {tool.get('type')!r} is not served here")
    return function_tool(tool["name"], tool.get("description"), tool.get("parameters"))


def read_input(body: Json) -> list[Json]:
    """Reads instructions and input as chat messages: the items of one answer become one message."""
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": text_of(body["instructions"])})
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role = role_of(item)
            text = text_of(item["content"])
            if role == "assistant":
                assistant_message(messages)["content"] += text
            else:
                messages.append({"role": role, "content": text})
        elif kind == "function_call":
            name = name_of(item["name"], item.get("namespace"))
            call = tool_call(item["call_id"], name, item["arguments"])
            assistant_message(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "content": text_of(item["output"])}
            messages.append({**result, "tool_call_id": item["call_id"]})
        elif kind == "reasoning":
            thinking = thinking_in(item)
            if thinking.strip():
                message = assistant_message(messages)
                message[THINKING_KEY] = message.get(THINKING_KEY, "") + thinking
        else:
            raise ProtocolError(f"an input item of type {kind!r} is not served here")
    return messages


def thinking_in(item: Json) -> str:
    """Returns what an item of thinking says."""
    return "".join(str(part["text"]) for part in item.get("content") or ())


def assistant_message(messages: list[Json]) -> Json:
    """Returns the assistant's message at the end, which is made where there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def write(asked: AskedCompletion, answered: AnsweredCompletion) -> Json:
    """Writes an answer."""
    is_cut = answered.finish_reason == "length"
    return {
        "id": f"resp_{answered.id}",
        "object": "response",
        "created_at": 0,
        "model": asked.model,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output_of(asked, answered),
        "usage": usage_of(answered),
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
    }


def output_of(asked: AskedCompletion, answered: AnsweredCompletion) -> list[Json]:
    """Writes the answer's items: its thinking, its text, and its calls."""
    items: list[Json] = []
    if answered.thinking:
        items.append(
            {
                "id": f"rs_{answered.id}",
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": answered.thinking}],
            }
        )
    if answered.text or not answered.calls:
        part = {"type": "output_text", "text": answered.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{answered.id}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call in answered.calls:
        item = {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        if call.name in asked.namespaces:
            item["namespace"], item["name"] = asked.namespaces[call.name]
        items.append(item)
    return items


def usage_of(answered: AnsweredCompletion) -> Json:
    """Counts the tokens of prompt and answer."""
    prompt_tokens = answered.answer.prompt_tokens
    sampled = len(answered.answer.token_ids)
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + sampled,
    }


class EventWriter:
    """Writes the events of a stream, which are numbered."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, kind: str, **fields: Any) -> str:
        number = self._number
        self._number += 1
        return server_sent_event({"type": kind, "sequence_number": number, **fields}, kind)


def events(asked: AskedCompletion, answered: AnsweredCompletion) -> Iterator[str]:
    """Writes an answer as a stream's events."""
    whole = write(asked, answered)
    event = EventWriter()
    begun = {**whole, "output": [], "status": "in_progress"}
    yield event("response.created", response=begun)
    for index, item in enumerate(whole["output"]):
        if item["type"] == "reasoning":
            yield from thinking_events(event, index, item)
        elif item["type"] == "message":
            yield from text_events(event, index, item)
        else:
            yield from call_events(event, index, item)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{whole['status']}", response=whole)


def thinking_events(event: EventWriter, index: int, item: Json) -> Iterator[str]:
    """Writes an item of thinking."""
    text = thinking_in(item)
    place = {"output_index": index, "item_id": item["id"], "content_index": 0}
    yield event("response.output_item.added", output_index=index, item={**item, "content": []})
    yield event("response.reasoning_text.delta", delta=text, **place)
    yield event("response.reasoning_text.done", text=text, **place)


def text_events(event: EventWriter, index: int, item: Json) -> Iterator[str]:
    """Writes a message's text."""
    part = item["content"][0]
    place = {"output_index": index, "item_id": item["id"], "content_index": 0}
    begun = {**item, "content": [], "status": "in_progress"}
    text = part["text"]
    yield event("response.output_item.added", output_index=index, item=begun)
    yield event("response.content_part.added", part={**part, "text": ""}, **place)
    yield event("response.output_text.delta", delta=text, logprobs=[], **place)
    yield event("response.output_text.done", text=text, logprobs=[], **place)
    yield event("response.content_part.done", part=part, **place)


def call_events(event: EventWriter, index: int, item: Json) -> Iterator[str]:
    """Writes a call's arguments."""
    place = {"output_index": index, "item_id": item["id"]}
    begun = {**item, "arguments": "", "status": "in_progress"}
    arguments = item["arguments"]
    name = item["name"]
    yield event("response.output_item.added", output_index=index, item=begun)
    yield event("response.function_call_arguments.delta", delta=arguments, **place)
    yield event("response.function_call_arguments.done", arguments=arguments, name=name, **place)


PROTOCOL = Protocol(read=read, write=write, events=events, write_error=openai_error)
