"""Tools written for verl: schemas as models and by key, and files that describe tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from custom.tools import BaseTool, ToolCall, ToolResponse, load_tools
from custom.tools.verl_schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolSchema,
)
from custom.tools.verl_tools import initialize_tools_from_config

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "pick",
        "description": "Picks.",
        "parameters": {
            "type": "object",
            "properties": {
                "rows": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                "how": {"enum": ["first", 2, None]},
                "note": {"type": ["string", "null"]},
            },
            "required": ["rows"],
        },
    },
}


def test_a_schema_is_read_by_name_and_by_key_and_dumped_as_it_was() -> None:
    schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)
    assert schema.function.name == schema["function"]["name"] == "pick"
    assert schema.function.parameters.properties["rows"].type == "array"
    assert schema["function"]["parameters"]["properties"]["rows"]["items"] == {"type": "integer"}
    assert schema.model_dump(exclude_unset=True) == SCHEMA
    assert schema.get("strict") is None and "strict" not in schema and "function" in schema
    assert schema["function"]["strict"] is False, "a default"
    with pytest.raises(KeyError, match="strict"):
        schema["strict"]


@pytest.mark.parametrize("form", [dict, OmegaConf.create, OpenAIFunctionToolSchema.model_validate])
def test_a_tool_takes_its_schema_in_every_form(form: Any) -> None:
    tool = BaseTool({"k": 1}, form(SCHEMA))
    assert tool.name == "pick" and tool.config == {"k": 1}
    assert tool.tool_schema.function.description == "Picks."
    assert tool.get_openai_tool_schema().model_dump(exclude_unset=True) == SCHEMA


class Own(BaseTool):
    """Writes its schema itself, as verl's guide has it."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema(**SCHEMA)

    async def execute(self, instance_id: str, parameters: dict, **kwargs: Any) -> tuple:
        return ToolResponse(text=f"{self.name} {parameters['rows']}"), 0.5, {"n": 1}


def test_a_class_may_return_the_schema_that_the_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    name = f"{__name__}.Own"
    path.write_text(json.dumps({"tools": [{"class_name": name, "config": {"type": "native"}}]}))
    (tool,) = initialize_tools_from_config(str(path))
    assert isinstance(tool, Own) and tool.config == {"type": "native"}
    registry = load_tools([str(path)])
    assert registry.execute(ToolCall("pick", {"rows": [3]})).result == "pick [3]"
    definition = registry.tools["pick"].definition
    assert definition.parameters == SCHEMA["function"]["parameters"]
    with pytest.raises(ValueError, match="BaseTool has no schema: give it tool_schema"):
        BaseTool({}, None)


def test_a_schema_that_is_none_is_told_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    entry = {"class_name": f"{__name__}.Own", "tool_schema": {"type": "function", "function": {}}}
    path.write_text(json.dumps({"tools": [entry]}))
    with pytest.raises(ValueError, match=r"tools\.json: tool_schema of .*Own: function\.name: "):
        load_tools([str(path)])


def test_a_response_says_what_it_holds() -> None:
    assert ToolResponse().is_empty() and not ToolResponse().is_text_only()
    assert ToolResponse(text="a").is_text_only()
    with_image = ToolResponse(text="a", image=[object()])
    assert not with_image.is_empty() and not with_image.is_text_only()
    with pytest.raises(ValueError, match="put it into a list"):
        ToolResponse(image=object())


@pytest.mark.parametrize(("text", "wrong"), [('{"a": 1}', False), ("{", True), ("[1]", True)])
def test_the_arguments_of_a_call_are_read_from_json(text: str, wrong: bool) -> None:
    parsed = OpenAIFunctionParsedSchema(name="pick", arguments=text)
    call, is_wrong = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert is_wrong is wrong and call.name == "pick"
    assert call.arguments == ({} if wrong else {"a": 1})
