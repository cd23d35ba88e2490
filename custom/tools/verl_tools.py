"""Tools written for verl: they have verl's base class, under its name, and a file that lists them.

A file of `actor_rollout_ref.rollout.multi_turn.tool_config_path` is an entry of `agent.tools` like
any other:

    tools:
      - class_name: package.module.Class      # or /path/to/file.py:Class
                                              # a module may also lie beside the file
        config: {}
        tool_schema: {type: function, function: {name: search, description: …, parameters: {…}}}
"""

import importlib.util
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from custom.coroutines import finished
from custom.env import Task
from custom.env_calls import takes_keyword
from custom.tools.definition import Tool, ToolDefinition
from custom.tools.verl_schemas import OpenAIFunctionToolSchema as OpenAIFunctionToolSchema
from custom.tools.verl_schemas import ToolResponse as ToolResponse
from data.loading import load_object


class BaseTool:
    """Stands for verl's base class: `execute` is a coroutine, between `create` and `release`.

    `self.environment` is the episode's, where there is one, as of our own tools.

    Args:
        config: the settings that the file has for the tool.
        tool_schema: what the tool is called and takes, as a schema or as a mapping; None: what
            `get_openai_tool_schema` of the class returns.
    """

    environment: Any = None

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config = config
        # A subclass may need the schema to be there.
        self.tool_schema = as_schema(tool_schema)
        self.tool_schema = as_schema(self.tool_schema or self.get_openai_tool_schema())
        if self.tool_schema is None:
            raise ValueError(
                f"{type(self).__name__} has no schema: give it tool_schema, or return one in "
                "get_openai_tool_schema"
            )
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Returns the schema that the tool was made with."""
        return self.tool_schema

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begins an instance."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Any, float, dict]:
        """Answers a call: (response, reward, metrics), of which the response counts here."""
        raise NotImplementedError(f"{type(self).__name__}.execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Returns what the instance is worth; nothing here asks for it."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends an instance."""


class VerlTool(Tool):
    """Answers calls by a tool of verl's, each in an instance of its own.

    The row's `tools_kwargs[NAME]`, a column of its own or of `extra_info`, has the further
    arguments of `create`, `execute` and `release`, as `create_kwargs` and so on.
    """

    def __init__(self, tool: Any, schema: dict[str, Any]) -> None:
        self.tool = tool
        self.row_kwargs: Mapping[str, Any] = {}
        function = schema["function"]
        self.definition = ToolDefinition(
            name=function["name"],
            description=function.get("description") or "",
            parameters=function.get("parameters") or {"type": "object", "properties": {}},
        )

    def begin_episode(self, task: Task) -> None:
        """Reads the row's arguments for this tool."""
        self.row_kwargs = tools_kwargs_of(task).get(self.definition.name) or {}

    def execute(self, **arguments: Any) -> Any:
        """Runs the call to its end."""
        return finished(self._call(arguments))

    async def _call(self, arguments: dict[str, Any]) -> Any:
        created = await self._run("create", str(uuid.uuid4()))
        instance = created[0] if isinstance(created, tuple) else created
        try:
            answer = await self._run("execute", instance, arguments)
        finally:
            await self._run("release", instance)
        response = answer[0] if isinstance(answer, tuple) else answer
        if isinstance(response, str):
            return response
        return response.text

    async def _run(self, method_name: str, *arguments: Any) -> Any:
        """Awaits a method of the tool's with the row's further arguments for it."""
        if self.environment is not None:
            with suppress(AttributeError):
                self.tool.environment = self.environment
        method = getattr(self.tool, method_name)
        name = f"{method_name}_kwargs"
        kwargs = dict(self.row_kwargs.get(name) or {})
        if kwargs and takes_keyword(method, name):
            # verl's newer tools read them out of one dictionary, its older ones by name.
            kwargs[name] = dict(kwargs)
        return await method(*arguments, **kwargs)


def as_schema(tool_schema: Any) -> Any:
    """Makes a schema of a mapping; a schema, another library's too, and None stay as they are."""
    from omegaconf import DictConfig, OmegaConf

    if isinstance(tool_schema, DictConfig):
        tool_schema = OmegaConf.to_container(tool_schema, resolve=True)
    if isinstance(tool_schema, Mapping):
        return OpenAIFunctionToolSchema.model_validate(tool_schema)
    return tool_schema


def tools_kwargs_of(task: Task) -> Mapping[str, Any]:
    """Returns a row's arguments by tool, from a column of its own or of `extra_info`."""
    extra_info = task.get("extra_info") or {}
    return task.get("tools_kwargs") or extra_info.get("tools_kwargs") or {}


def read_tool_config(path: str) -> Iterator[Tool]:
    """Makes the tools that a file of verl's form describes."""
    for entry in _entries(path):
        tool = _make_tool(path, entry)
        if isinstance(tool, Tool):
            yield tool
            continue
        # The model reads the file's schema to the letter.
        schema = _as_dict(entry, "tool_schema")
        if not schema:
            schema = as_schema(tool.get_openai_tool_schema()).model_dump(exclude_unset=True)
        yield VerlTool(tool, schema)


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """Makes the tools that a file of verl's form describes, as their classes make them."""
    return [_make_tool(tools_config_file, entry) for entry in _entries(tools_config_file)]


def _entries(path: str) -> Any:
    """Reads the entries of a file of verl's form."""
    # Parsers of tool calls are read where omegaconf is not (features/programs/verifiers).
    from omegaconf import OmegaConf

    return OmegaConf.load(path).tools


def _make_tool(path: str, entry: Any) -> Any:
    """Makes an object of the class that an entry names: a Tool, or a tool of verl's form."""
    tool_class = _load_tool_class(path, entry.class_name)
    if issubclass(tool_class, Tool):
        return tool_class()
    try:
        schema = as_schema(entry.get("tool_schema"))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ValueError(
            f"{path}: tool_schema of {entry.class_name}: {'; '.join(faults)}. It is "
            "{type: function, function: {name: …, description: …, parameters: {…}}}"
        ) from error
    return tool_class(_as_dict(entry, "config"), schema)


def _load_tool_class(path: str, class_name: str) -> Any:
    """Loads a class that a file of verl's form names; its module may lie beside that file."""
    separator = ":" if ":" in class_name else "."
    module, _, name = class_name.rpartition(separator)
    if module and not module.endswith(".py") and not _can_be_found(module):
        beside = Path(path).resolve().parent / f"{module.replace('.', '/')}.py"
        if not beside.is_file():
            raise ValueError(
                f"{path}: class_name={class_name}: there is no module {module!r}, and no file "
                f"{beside}; name the file, class_name: PATH.py:{name}, or start the run with "
                "PYTHONPATH=FOLDER, the folder that the module is in"
            )
        module = str(beside)
    return load_object(f"{module}:{name}", f"{path}:")


def _can_be_found(module: str) -> bool:
    """Checks whether Python's path has a module; what one above it lacks itself is no answer."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        return not f"{module}.".startswith(f"{error.name}.")


def _as_dict(entry: Any, key: str) -> Any:
    """Returns a section of an entry as plain Python; an empty dict where it is missing."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(entry.get(key) or OmegaConf.create())
