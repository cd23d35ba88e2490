"""Anthropic's messages: POST /v1/messages."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from features.programs.exchange import AnsweredCompletion, AskedCompletion, Json
from features.programs.protocols.fields import MESSAGES
from features.programs.protocols.protocol import (
    THINKING_KEY,
    Protocol,
    ProtocolError,
    checked_fields,
    function_tool,
    positive_count,
    role_of,
    sampling_of,
    server_sent_event,
    streams,
    text_of,
    texts_to_stop_at,
    tool_call,
    tool_choice_of,
)

# Thinking that only Anthropic can read; this server writes none.
REDACTED = "redacted_thinking"

TOO_LONG = "prompt is too long"
# What Anthropic's servers call an error of a status; others are a request's fault, or a server's.
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


def read(body: Json) -> AskedCompletion:
    """Reads a request."""
    fields = checked_fields(body, MESSAGES)
    messages: list[Json] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of(body["system"])})
    for message in body["messages"]:
        messages += read_message(message)
    choice = tool_choice_of(body)
    ignored = fields.unknown
    if (body.get("tool_choice") or {}).get("disable_parallel_tool_use"):
        ignored = (*ignored, "disable_parallel_tool_use")
    thinking = (body.get("thinking") or {}).get("type")
    return AskedCompletion(
        messages=messages,
        tools=[read_tool(tool) for tool in body.get("tools") or ()] or None,
        reads_calls=choice != "none",
        forces_call=choice == "required",
        max_tokens=positive_count(body, "max_tokens"),
        stop=texts_to_stop_at(body.get("stop_sequences")),
        stream=streams(body),
        shows_thinking=thinking in ("enabled", "adaptive"),
        model=str(body.get("model") or "policy"),
        sampling=sampling_of(body),
        token_rules=fields.overridden,
        ignored=ignored,
    )


def read_count(body: Json) -> AskedCompletion:
    """Reads a request to count its tokens."""
    return replace(read(body), only_counts=True, stream=False)


def write_count(asked: AskedCompletion, answered: AnsweredCompletion) -> Json:
    """Writes how many tokens a request has."""
    return {"input_tokens": answered.answer.prompt_tokens}


def read_tool(tool: Json) -> Json:
    """Reads a tool; those that Anthropic's own servers run are refused."""
    if "input_schema" not in tool:
        raise ProtocolError(
            f"a tool of type {tool.get('type')!r} is not served here; tools with an input_schema "
            "are"
        )
    return function_tool(tool["name"], tool.get("description"), tool["input_schema"])


def read_message(message: Json) -> list[Json]:
    """Reads one message: results of tools become messages of their own, before its text."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    results: list[Json] = []
    texts: list[Json] = []
    calls: list[Json] = []
    thinking = ""
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            texts.append(block)
        elif kind == "thinking":
            thinking += str(block["thinking"])
        elif kind == "tool_use":
            calls.append(tool_call(block["id"], block["name"], block["input"]))
        elif kind == "tool_result":
            result = {"role": "tool", "content": text_of(block.get("content"))}
            results.append({**result, "tool_call_id": block["tool_use_id"]})
        elif kind != REDACTED:
            raise ProtocolError(f"content of type {kind!r} is not served here; text is")
    # An answer of thinking alone is a message all the same: clients leave its empty text out.
    if results and not texts and not calls:
        return results
    read: Json = {"role": role_of(message), "content": text_of(texts)}
    if thinking.strip():
        read[THINKING_KEY] = thinking
    if calls:
        read["tool_calls"] = calls
    return [*results, read]


def write(asked: AskedCompletion, answered: AnsweredCompletion) -> Json:
    """Writes an answer."""
    content: list[Json] = []
    if answered.thinking and asked.shows_thinking:
        # Some clients send no thinking back that nobody signed.
        block = {"type": "thinking", "thinking": answered.thinking, "signature": answered.id}
        content.append(block)
    if answered.text or not answered.calls:
        content.append({"type": "text", "text": answered.text})
    for call in answered.calls:
        arguments = json.loads(call.arguments)
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    answer = answered.answer
    return {
        "id": f"msg_{answered.id}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": content,
        "stop_reason": stop_reason_of(answered),
        "stop_sequence": answer.stop,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.token_ids)},
    }


def stop_reason_of(answered: AnsweredCompletion) -> str:
    """Returns why the answer ended, in Anthropic's words."""
    if answered.finish_reason == "length":
        return "max_tokens"
    if answered.finish_reason == "tool_calls":
        return "tool_use"
    return "end_turn" if answered.answer.stop is None else "stop_sequence"


def events(asked: AskedCompletion, answered: AnsweredCompletion) -> Iterator[str]:
    """Writes an answer as a stream's events."""
    whole = write(asked, answered)

    def event(kind: str, **fields: Any) -> str:
        return server_sent_event({"type": kind, **fields}, kind)

    yield event("message_start", message={**whole, "content": [], "stop_reason": None})
    for index, block in enumerate(whole["content"]):
        empty, deltas = begun(block)
        yield event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ending = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield event("message_delta", delta=ending, usage=whole["usage"])
    yield event("message_stop")


def begun(block: Json) -> tuple[Json, list[Json]]:
    """Returns a block as a stream begins it, and what then comes to it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        delta = {"type": "thinking_delta", "thinking": block["thinking"]}
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [delta, signature]
    arguments = json.dumps(block["input"])
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def write_error(error: ProtocolError) -> Json:
    """Writes an error as Anthropic's servers do."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    kind = KINDS.get(error.status, kind)
    message = str(error)
    if error.code == "context_length_exceeded":
        # Clients know it by these words at its beginning.
        message = f"{TOO_LONG}: {message.rpartition(f'{TOO_LONG}: ')[2]}"
    told: Json = {"type": kind, "message": message}
    if error.details is not None:
        told["details"] = error.details
    return {"type": "error", "error": told}


COUNTING = Protocol(read=read_count, write=write_count, events=events, write_error=write_error)
PROTOCOL = Protocol(read=read, write=write, events=events, write_error=write_error)
