"""vLLM's token-in endpoint: POST /inference/v1/generate; ids in, ids and log-probs out."""

from collections.abc import Iterator

from features.programs.exchange import AnsweredCompletion, AskedCompletion, Json
from features.programs.protocols.chat_completions import usage_of
from features.programs.protocols.fields import TOKEN_IN
from features.programs.protocols.protocol import (
    Protocol,
    ProtocolError,
    checked_fields,
    openai_error,
    positive_count,
    sampling_of,
    server_sent_event,
    streams,
    texts_to_stop_at,
)


def read(body: Json) -> AskedCompletion:
    """Reads a request."""
    fields = checked_fields(body, TOKEN_IN)
    ids = body["token_ids"]
    are_ids = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
    if not are_ids or not ids:
        raise ProtocolError("token_ids must be a list of one or more token ids")
    params = body.get("sampling_params") or {}
    # Turns end at the tokens at which the run's do; token-in clients always name such tokens.
    ignored = fields.unknown
    if params.get("seed"):
        ignored = (*ignored, "seed")
    return AskedCompletion(
        prompt_ids=tuple(ids),
        max_tokens=positive_count(params, "max_tokens"),
        stop=texts_to_stop_at(params.get("stop")),
        stream=streams(body),
        wants_log_probs=True,
        model=str(body.get("model") or "policy"),
        sampling=sampling_of(params),
        token_rules=fields.overridden,
        ignored=ignored,
    )


def write(asked: AskedCompletion, answered: AnsweredCompletion) -> Json:
    """Writes an answer."""
    answer = answered.answer
    # A token is named as vLLM names it where it decodes none.
    entries: list[Json] = [
        {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None, "top_logprobs": []}
        for token, log_prob in zip(answer.token_ids, answer.log_probs, strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop,
        "token_ids": list(answer.token_ids),
        "logprobs": {"content": entries},
    }
    return {
        "request_id": answered.id,
        "model": asked.model,
        "output_mode": "tokens",
        "choices": [choice],
        "prompt_token_ids": list(asked.prompt_ids),
        "usage": usage_of(answered),
    }


def events(asked: AskedCompletion, answered: AnsweredCompletion) -> Iterator[str]:
    """Writes an answer as a stream's events: all of it in one."""
    yield server_sent_event(write(asked, answered))
    yield server_sent_event("[DONE]")


PROTOCOL = Protocol(read=read, write=write, events=events, write_error=openai_error)
