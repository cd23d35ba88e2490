"""OpenAI's chat completions: POST /v1/chat/completions."""

from collections.abc import Iterator
from typing import Any

from features.programs.exchange import AnsweredCompletion, AskedCompletion, Json
from features.programs.protocols.fields import CHAT
from features.programs.protocols.protocol import (
    THINKING_KEY,
    Protocol,
    checked_fields,
    checked_tool,
    openai_error,
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

# By which clients send thinking back.
THINKING_KEYS = (THINKING_KEY, "reasoning")


def read(body: Json) -> AskedCompletion:
    """Reads a request."""
    fields = checked_fields(body, CHAT)
    choice = tool_choice_of(body)
    ignored = [*fields.unknown]
    if body.get("seed"):
        ignored.append("seed")
    if body.get("parallel_tool_calls") is False:
        ignored.append("parallel_tool_calls=false")
    stream_options = body.get("stream_options") or {}
    return AskedCompletion(
        messages=[read_message(message) for message in body["messages"]],
        tools=[checked_tool(tool) for tool in body.get("tools") or ()] or None,
        reads_calls=choice != "none",
        forces_call=choice == "required",
        max_tokens=positive_count(body, "max_completion_tokens", "max_tokens"),
        stop=texts_to_stop_at(body.get("stop")),
        stream=streams(body),
        usage_in_stream=bool(stream_options.get("include_usage")),
        wants_log_probs=bool(body.get("logprobs")),
        model=str(body.get("model") or "policy"),
        sampling=sampling_of(body),
        token_rules=fields.overridden,
        ignored=tuple(ignored),
    )


def read_message(message: Json) -> Json:
    """Reads one message."""
    read: Json = {"role": role_of(message), "content": text_of(message.get("content"))}
    thinking = [message[name] for name in THINKING_KEYS if isinstance(message.get(name), str)]
    if thinking and thinking[0].strip() and read["role"] == "assistant":
        read[THINKING_KEY] = thinking[0]
    calls = message.get("tool_calls")
    if calls:
        read["tool_calls"] = [
            tool_call(
                str(call.get("id", "")),
                call["function"]["name"],
                call["function"].get("arguments"),
            )
            for call in calls
        ]
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    return read


def write(asked: AskedCompletion, answered: AnsweredCompletion) -> Json:
    """Writes an answer."""
    choice = {
        "index": 0,
        "message": message_of(answered),
        "finish_reason": answered.finish_reason,
        "logprobs": log_probs_of(answered) if asked.wants_log_probs else None,
    }
    return {
        "id": answered.id,
        "object": "chat.completion",
        "created": 0,
        "model": asked.model,
        "choices": [choice],
        "usage": usage_of(answered),
    }


def message_of(answered: AnsweredCompletion) -> Json:
    """Writes the answer's message."""
    content = answered.text or (None if answered.calls else "")
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if answered.thinking:
        message[THINKING_KEY] = answered.thinking
    if answered.calls:
        message["tool_calls"] = calls_of(answered)
    return message


def calls_of(answered: AnsweredCompletion) -> list[Json]:
    """Writes the answer's tool calls."""
    calls = []
    for call in answered.calls:
        function = {"name": call.name, "arguments": call.arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return calls


def log_probs_of(answered: AnsweredCompletion) -> Json:
    """Writes the log-probs of the tokens that were sampled, in nats."""
    entries = []
    answer = answered.answer
    for text, log_prob in zip(answer.token_texts, answer.log_probs, strict=True):
        entries.append(
            {
                "token": text,
                "logprob": log_prob,
                "bytes": list(text.encode()),
                "top_logprobs": [],
            }
        )
    return {"content": entries, "refusal": None}


def usage_of(answered: AnsweredCompletion) -> Json:
    """Counts the tokens of prompt and answer."""
    prompt_tokens = answered.answer.prompt_tokens
    sampled = len(answered.answer.token_ids)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }


def events(asked: AskedCompletion, answered: AnsweredCompletion) -> Iterator[str]:
    """Writes an answer as a stream's events."""
    base: Json = {
        "id": answered.id,
        "object": "chat.completion.chunk",
        "created": 0,
        "model": asked.model,
    }

    def chunk(delta: Json, finish_reason: str | None = None, log_probs: Any = None) -> str:
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish_reason,
            "logprobs": log_probs,
        }
        return server_sent_event({**base, "choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    if answered.thinking:
        yield chunk({"reasoning_content": answered.thinking})
    log_probs = log_probs_of(answered) if asked.wants_log_probs else None
    if answered.text or log_probs:
        yield chunk({"content": answered.text}, log_probs=log_probs)
    for index, call in enumerate(calls_of(answered)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, answered.finish_reason)
    if asked.usage_in_stream:
        yield server_sent_event({**base, "choices": [], "usage": usage_of(answered)})
    yield server_sent_event("[DONE]")


PROTOCOL = Protocol(read=read, write=write, events=events, write_error=openai_error)
