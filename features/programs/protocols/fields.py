"""Says of every field of a request what becomes of it; the docs' table is made of this.

    python -m features.programs.protocols.fields > features/programs/fields.md

Invariant: nothing that changes what a prompt means, or what is sampled, is ignored in silence. A
field is honoured, or refused in the protocol's own form, or overridden by the run and counted
(refused with `programs.client_sampling=refuse`), or it has no effect on what is sampled. A field
that no table names is warned of and counted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from features.programs.exchange import Json

Handling = Literal["honoured", "overridden", "refused", "no effect"]


@dataclass(frozen=True)
class RequestField:
    """Says what becomes of a field.

    Attributes:
        neutral: values that ask for nothing else than what is done anyway.
        note: for the docs, and what an error advises.
    """

    handling: Handling
    note: str = ""
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ReadFields:
    """Names the fields of a request that the run overrides, and those that it does not know."""

    overridden: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class RefusedField(ValueError):
    """Reports a field that is not served; `name` is its name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


HONOURED = RequestField("honoured")
NO_EFFECT = RequestField("no effect")
SENT_WHOLE = "the whole conversation comes with each request"
STATE = RequestField("refused", f"no state is kept here: {SENT_WHOLE}")
FORM = RequestField(
    "overridden", "asked for in the prompt alone; the answer's form is the policy's"
)
EFFORT = RequestField("overridden", "how much it thinks is the policy's own")
RUN_SAMPLES = RequestField("overridden", "sampled as the run does; counted where it differs")
RULE = RequestField(
    "overridden", "which tokens it samples is the policy's own", neutral=(0, {}, [], "")
)
TEMPLATE = RequestField(
    "overridden", "rendered as data.apply_chat_template_kwargs says", neutral=({},)
)
CHOICE = RequestField("honoured", "auto and none; a call that is asked for is overridden")
SEED = RequestField("no effect", "the episode's seed decides; warned of")
PARALLEL = RequestField(
    "no effect", "false is warned of; how many calls there are is the policy's own"
)
COMPACTION = RequestField(
    "overridden", f"nothing is taken out of a prompt: {SENT_WHOLE}", neutral=([],)
)

SAMPLING_FIELDS: dict[str, RequestField] = dict.fromkeys(
    (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ),
    RUN_SAMPLES,
)
RULE_FIELDS: dict[str, RequestField] = dict.fromkeys(
    (
        "logit_bias",
        "min_tokens",
        "bad_words",
        "allowed_token_ids",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    ),
    RULE,
) | {
    "ignore_eos": RequestField("overridden", "turns end where the run's do", neutral=(False,)),
    "use_beam_search": RequestField("overridden", "sampled as the run does", neutral=(False,)),
}
# What vLLM's servers take beside OpenAI's fields.
VLLM_PROMPT_FIELDS: dict[str, RequestField] = {
    "chat_template": RequestField("refused", "the run's template renders"),
    "chat_template_kwargs": TEMPLATE,
    "documents": RequestField("refused", "put them into a message", neutral=([],)),
    "continue_final_message": RequestField("refused", "no message is continued", neutral=(False,)),
    "add_generation_prompt": RequestField(
        "refused", "an answer is sampled always", neutral=(True,)
    ),
    "add_special_tokens": RequestField("refused", "the run's template renders", neutral=(False,)),
    "truncate_prompt_tokens": RequestField("refused", "nothing is taken out of a prompt"),
    "echo": RequestField("refused", "the prompt is not repeated", neutral=(False,)),
    "best_of": RequestField("refused", "send the request several times", neutral=(1,)),
}
OPENAI_SIDE_FIELDS: dict[str, RequestField] = dict.fromkeys(
    (
        "metadata",
        "user",
        "safety_identifier",
        "service_tier",
        "store",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "moderation",
    ),
    NO_EFFECT,
)
CHAT: dict[str, RequestField] = {
    "messages": RequestField("honoured", "text; other contents are refused"),
    "model": RequestField(
        "honoured", "names of judges.models are theirs; any other is the policy's"
    ),
    "tools": RequestField("honoured", "functions; others are refused"),
    "tool_choice": CHOICE,
    **dict.fromkeys(
        ("max_completion_tokens", "max_tokens", "stop", "stream", "stream_options", "logprobs"),
        HONOURED,
    ),
    **SAMPLING_FIELDS,
    **RULE_FIELDS,
    "response_format": RequestField("overridden", FORM.note, neutral=({"type": "text"},)),
    "reasoning_effort": EFFORT,
    "verbosity": RequestField(
        "overridden", "how long it writes is the policy's own", neutral=("medium",)
    ),
    "seed": SEED,
    "parallel_tool_calls": PARALLEL,
    "prediction": RequestField("no effect", "it makes sampling faster elsewhere"),
    "n": RequestField(
        "refused", "each answer is a turn: send the request several times", neutral=(1,)
    ),
    "top_logprobs": RequestField("refused", "those of sampled tokens are told", neutral=(0,)),
    "modalities": RequestField("refused", "text is served", neutral=(["text"],)),
    "audio": RequestField("refused", "text is served"),
    "functions": RequestField("refused", "give them as tools", neutral=([],)),
    "function_call": RequestField(
        "refused", "give tools and tool_choice", neutral=("auto", "none")
    ),
    "web_search_options": RequestField("refused", "nothing is searched here"),
    **VLLM_PROMPT_FIELDS,
    **OPENAI_SIDE_FIELDS,
}
RESPONSES: dict[str, RequestField] = {
    "input": RequestField("honoured", "text, calls, their results; other items are refused"),
    "instructions": HONOURED,
    "model": CHAT["model"],
    "tools": RequestField("honoured", "functions, also in namespaces; others are refused"),
    "tool_choice": CHOICE,
    "max_output_tokens": HONOURED,
    "stream": HONOURED,
    "stream_options": NO_EFFECT,
    **SAMPLING_FIELDS,
    **RULE_FIELDS,
    "text": RequestField("honoured", "see its parts"),
    "text.format": RequestField("overridden", FORM.note, neutral=({"type": "text"},)),
    "text.verbosity": CHAT["verbosity"],
    "reasoning": RequestField("honoured", "see its parts"),
    "reasoning.effort": EFFORT,
    "reasoning.summary": NO_EFFECT,
    "reasoning.generate_summary": NO_EFFECT,
    "previous_response_id": STATE,
    "conversation": STATE,
    "prompt": STATE,
    "background": RequestField("refused", "answers come at once", neutral=(False,)),
    "background_options": RequestField("refused", "answers come at once"),
    "context_management": COMPACTION,
    "truncation": RequestField("overridden", COMPACTION.note, neutral=("disabled",)),
    "top_logprobs": CHAT["top_logprobs"],
    "parallel_tool_calls": PARALLEL,
    "max_tool_calls": RequestField("no effect", "it counts calls of tools that are refused"),
    "include": RequestField("no effect", "what it asks for beside the answer is not there"),
    "image": RequestField("refused", "text is served"),
    "access_programs": RequestField("refused", "nothing beside the policy is asked here"),
    **VLLM_PROMPT_FIELDS,
    **OPENAI_SIDE_FIELDS,
}
MESSAGES: dict[str, RequestField] = {
    "messages": CHAT["messages"],
    "system": HONOURED,
    "model": CHAT["model"],
    "tools": CHAT["tools"],
    "tool_choice": RequestField(
        "honoured", f"{CHOICE.note}; disable_parallel_tool_use is warned of"
    ),
    "max_tokens": HONOURED,
    "stop_sequences": HONOURED,
    "stream": HONOURED,
    "thinking": RequestField(
        "honoured", "whether thinking is shown; how much there is, is the policy's"
    ),
    **SAMPLING_FIELDS,
    **RULE_FIELDS,
    "output_config": RequestField("honoured", "see its parts"),
    "output_config.format": FORM,
    "output_config.effort": EFFORT,
    "output_config.task_budget": EFFORT,
    "output_format": FORM,
    "thread": STATE,
    "container": STATE,
    "mcp_servers": RequestField("refused", "a program asks its servers itself", neutral=([],)),
    "context_management": RequestField("overridden", COMPACTION.note, neutral=({}, {"edits": []})),
    "compaction": COMPACTION,
    "fallbacks": RequestField("overridden", "no other model is asked", neutral=([],)),
    **dict.fromkeys(
        (
            "cache_control",
            "metadata",
            "service_tier",
            "speed",
            "inference_geo",
            "diagnostics",
            "billing_policy",
            "fallback_credit_token",
            "user_profile_id",
            "workspace_id",
            "betas",
        ),
        NO_EFFECT,
    ),
}
TOKEN_IN: dict[str, RequestField] = {
    "token_ids": RequestField("honoured", "the ids that are to be continued"),
    "model": CHAT["model"],
    "stream": HONOURED,
    "stream_options": NO_EFFECT,
    "features": RequestField("refused", "ids are served", neutral=([], {})),
    "content_parts": RequestField("refused", "ids are served", neutral=([],)),
    "sampling_params": RequestField("honoured", "see its parts"),
    "sampling_params.max_tokens": HONOURED,
    "sampling_params.stop": HONOURED,
    "sampling_params.n": CHAT["n"],
    **{f"sampling_params.{name}": field for name, field in (SAMPLING_FIELDS | RULE_FIELDS).items()},
    "sampling_params.seed": SEED,
    **{
        f"sampling_params.{name}": field
        for name, field in dict.fromkeys(
            (
                "logprobs",
                "prompt_logprobs",
                "stop_token_ids",
                "include_stop_str_in_output",
                "skip_special_tokens",
                "spaces_between_special_tokens",
                "detokenize",
                "output_kind",
                "extra_args",
                "skip_reading_prefix_cache",
            ),
            NO_EFFECT,
        ).items()
    },
    **dict.fromkeys(("request_id", "priority", "cache_salt", "kv_transfer_params"), NO_EFFECT),
}
# By the end of a request's path.
TABLES: dict[str, Mapping[str, RequestField]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/inference/v1/generate": TOKEN_IN,
}
# These are compared with the run's own values, where they are read.
COMPARED = frozenset({*SAMPLING_FIELDS, *(f"sampling_params.{name}" for name in SAMPLING_FIELDS)})


def read_fields(body: Json, table: Mapping[str, RequestField]) -> ReadFields:
    """Sorts the fields that a request sets. Raises RefusedField where one is not served."""
    overridden = []
    unknown = []
    for name, value in fields_of(body, table):
        field = table.get(name)
        if field is None:
            unknown.append(name)
            continue
        if is_neutral(value, field):
            continue
        if field.handling == "refused":
            raise RefusedField(name, f"{name}={short(value)} is not served here: {field.note}")
        if field.handling == "overridden" and name not in COMPARED:
            overridden.append(name)
    in_order = [name for name in table if name in overridden]
    names = tuple(name.removeprefix("sampling_params.") for name in in_order)
    return ReadFields(names, tuple(unknown))


def fields_of(body: Json, table: Mapping[str, RequestField]) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of a request's fields, parts of fields as `field.part`."""
    parents = {name.partition(".")[0] for name in table if "." in name}
    for name, value in body.items():
        if value is None:
            continue
        yield name, value
        if name in parents and isinstance(value, Mapping):
            for part, held in value.items():
                if held is not None:
                    yield f"{name}.{part}", held


def is_neutral(value: Any, field: RequestField) -> bool:
    """Checks whether a value asks for nothing else than what is done anyway."""
    return any(type(value) is type(other) and value == other for other in field.neutral)


def short(value: Any) -> str:
    """Shows a value in an error."""
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]} ..."


def written() -> str:
    """Writes the docs' page."""
    lines = [
        "# What becomes of each field of a request",
        "",
        "    python -m features.programs.protocols.fields > features/programs/fields.md",
        "",
        "writes this page, from the tables by which the server reads requests.",
        "",
        "| | |",
        "|---|---|",
        "| honoured | it does what the protocol says |",
        "| overridden | the run decides; counted, refused with `programs.client_sampling=refuse` |",
        "| refused | an error in the protocol's own form, where it asks for more than is done |",
        "| no effect | it does not change what is sampled |",
        "",
        "A field that stands in no table is warned of once, and counted as `ignored`.",
    ]
    for path, table in TABLES.items():
        lines += ["", f"## {path}"]
        if list(TABLES.values()).index(table) < list(TABLES).index(path):
            lines += ["As above."]
            continue
        lines += ["| field | what becomes of it | |", "|---|---|---|"]
        for name, field in sorted(table.items()):
            lines.append(f"| `{name}` | {field.handling} | {field.note} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(written(), end="")
