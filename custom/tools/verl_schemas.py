"""The schemas of tools as verl's users write and read them: pydantic models, also read by key.

    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {…}})
    schema.function.name == schema["function"]["name"]

Invariant: what a schema has beside the fields named here is kept, as JSON schemas have much more,
and `model_dump(exclude_unset=True)` gives back what was put in.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator


class Schema(BaseModel):
    """Makes a model whose entries are also had by key."""

    model_config = ConfigDict(extra="allow")

    def __getitem__(self, key: str) -> Any:
        value = self.get(key, KeyError)
        if value is KeyError:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key, KeyError) is not KeyError

    def get(self, key: str, default: Any = None) -> Any:
        """Returns an entry, or `default` where there is none."""
        if key in type(self).model_fields:
            return getattr(self, key)
        return (self.model_extra or {}).get(key, default)


class OpenAIFunctionPropertySchema(Schema):
    """Describes a parameter, as JSON schema does."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(Schema):
    """Describes the parameters of a function."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(Schema):
    """Describes a function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(Schema):
    """Describes a tool, which is a function."""

    type: str = "function"
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(Schema):
    """Holds a call as a model wrote it: its arguments are JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(Schema):
    """Holds a call with its arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Reads the arguments; returns the call, and whether they are no JSON object."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None
        is_wrong = not isinstance(arguments, dict)
        if is_wrong:
            arguments = {}
        call = OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments)
        return call, is_wrong


class OpenAIFunctionToolCall(Schema):
    """Holds a call with the id that its answer names."""

    id: str
    type: Literal["function"] = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """Holds the answer of a tool; only its text is shown to the model."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_a_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"{type(value).__name__} given; put it into a list, also a single one")
        return value

    def is_empty(self) -> bool:
        """Returns whether there is nothing in it."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Returns whether there is a text, and nothing else."""
        return bool(self.text) and not self.image and not self.video
