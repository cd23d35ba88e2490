"""Checks a call's arguments and runs a tool's code, whatever either of them does.

Invariant: `guarded` raises nothing that a tool raised but what ends the episode or the program;
`checked_arguments` raises a ValueError only, whose text is for the model.
"""

import inspect
import json
from collections.abc import Callable
from typing import Any

from custom.env_calls import Abandoned, cut_middle, located, parameters_of
from custom.tools.argument_types import with_types
from custom.tools.calls import Outcome
from custom.tools.definition import Tool, ToolError
from custom.tools.environment_step import EnvironmentStepTool
from data.names import did_you_mean
from data.warn_once import warn_once

# Characters of a problem with arguments, and of the place where it is, that the model is shown.
MAX_PROBLEM_CHARS = 300
MAX_PLACE_CHARS = 100


def make_validator(tool: Tool) -> Any:
    """Makes what checks arguments against a tool's schema; ValueError where that is none."""
    import jsonschema

    schema = tool.definition.parameters
    validator_class = jsonschema.validators.validator_for(
        schema, default=jsonschema.Draft202012Validator
    )
    validator = validator_class(schema)
    try:
        validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(
            f"the parameters of tool {tool.definition.name!r}: {_describe_fault(error)}"
        ) from error
    return validator


# Types that are written as Python names them.
PYTHON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "dict": "object",
    "None": "null",
    "NoneType": "null",
}
SCHEMA_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def _describe_fault(error: Any) -> str:
    """Says where a schema is none; of a type that there is not, which there are.

    Args:
        error: jsonschema's SchemaError.
    """
    place = [str(step) for step in error.absolute_path]
    where = ".".join(place)
    if "type" not in place[-2:]:
        return f"{where}: {error.message}" if where else str(error.message)
    given = error.instance if isinstance(error.instance, list) else [error.instance]
    unknown = [each for each in given if each not in SCHEMA_TYPES]
    if not unknown:
        return f"{where}: {error.message}"
    name = str(unknown[0])
    if name in PYTHON_TYPES:
        hint = f" Did you mean {PYTHON_TYPES[name]!r}?"
    else:
        hint = did_you_mean(name, SCHEMA_TYPES)
    return f"{where}={name!r} is no type of a schema; allowed: {', '.join(SCHEMA_TYPES)}.{hint}"


# Where a schema has one of these, its properties are not all that it allows.
COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "if")


def require_same_arguments(tool: Tool) -> None:
    """Raises ValueError where a tool's code does not take the arguments that its schema has.

    One that the code needs and the schema does not require is warned of: a call without it is
    answered as wrong.
    """
    schema = tool.definition.parameters
    if any(key in schema for key in COMPOSED):
        return
    promised = list(schema.get("properties", {}))
    called = _called_with_arguments(tool)
    signature = parameters_of(called)
    parameters = list(signature.parameters.values())
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = [parameter.name for parameter in parameters if parameter.kind in by_name]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    needed = [p.name for p in parameters if p.name in taken and p.default is p.empty]
    where = located(called, f"{type(tool).__name__}.{called.__name__}")
    words = (
        f"tool {tool.definition.name!r}: its schema has {', '.join(promised) or 'nothing'}, and "
        f"{where} takes {signature}"
    )
    for name in promised:
        if name not in taken and not takes_any:
            raise ValueError(f"{words}: not {name!r}.{did_you_mean(name, taken)}")
    for name in needed:
        if name not in promised:
            raise ValueError(f"{words}: the schema lacks {name!r}.{did_you_mean(name, promised)}")
    optional = [name for name in needed if name not in schema.get("required", [])]
    if optional:
        warn_once(
            __name__,
            f"{words}, which has no default for {', '.join(optional)}: add that to the schema's "
            "required",
        )


def _called_with_arguments(tool: Tool) -> Callable[..., Any]:
    """Returns the method that gets a call's arguments by name."""
    if isinstance(tool, EnvironmentStepTool):
        return tool.action_text
    return tool.execute


def checked_arguments(tool: Tool, arguments: dict[str, Any] | str) -> dict[str, Any]:
    """Returns a call's arguments by name, as the tool's schema and signature have them.

    Args:
        tool: the tool that is called.
        arguments: by name, or a text that stands for the tool's one parameter.
    Raises:
        ValueError: what is wrong with them.
    """
    if isinstance(arguments, str):
        arguments = _name_single_argument(tool, arguments)
    arguments = with_types(arguments, tool.definition.parameters)
    try:
        problem = _find_problem(tool, arguments)
    # An unknown name, a reference that does not resolve, nesting too deep.
    except Exception as error:
        problem = message_of(error)
    if problem is not None:
        raise ValueError(cut_middle(problem, MAX_PROBLEM_CHARS))
    return arguments


def _name_single_argument(tool: Tool, text: str) -> dict[str, Any]:
    """Returns the text under the name of the tool's one parameter, "3" as 3 where that wants one.

    A parameter that may be a string gets the text as it is.
    """
    schema = tool.definition.parameters
    names = schema.get("required") or list(schema.get("properties", {}))
    if len(names) > 1 or (text.strip() and not names):
        raise ValueError(f"give a JSON object with: {', '.join(names) or 'nothing in it'}")
    if not names:
        return {}
    name = names[0]
    declared = schema.get("properties", {}).get(name)
    kinds = declared.get("type", "string") if isinstance(declared, dict) else "string"
    # "integer", or ["integer", "null"].
    if "string" in kinds:
        return {name: text}
    return {name: _decoded(text)}


def _decoded(text: str) -> Any:
    """Returns the JSON value that a text is, such as a number; the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _find_problem(tool: Tool, arguments: dict[str, Any]) -> str | None:
    """Returns what the schema has against the arguments; raises what the signature has."""
    error = next(make_validator(tool).iter_errors(arguments), None)
    if error is None:
        inspect.signature(_called_with_arguments(tool)).bind(**arguments)
        return None
    place = ".".join(map(str, error.absolute_path))
    if not place:
        return error.message
    return f"at {cut_middle(place, MAX_PLACE_CHARS)!r}: {error.message}"


def guarded(function: Callable[[], Any], in_thread: bool = False) -> Outcome:
    """Calls a function and returns its result, or the text and the kind of what it raised.

    A tool's SystemExit ends nothing. A KeyboardInterrupt passes through, unless the function runs
    in a thread of its own (`in_thread`), where no user pressed a key.
    """
    try:
        return Outcome(function())
    except ToolError as error:
        return Outcome(message_of(error), "exception")
    except TimeoutError as error:
        return Outcome(message_of(error) or "timed out", "timeout")
    except Abandoned:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not in_thread:
            raise
        return Outcome(f"{type(error).__name__}: {message_of(error)}", "exception", error)


def message_of(error: BaseException) -> str:
    """Returns an exception's text; never raises."""
    try:
        return str(error)
    # A tool's exceptions may do anything.
    except Exception:
        return "(no message)"
