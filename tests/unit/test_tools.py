"""Tests tools: what is called runs and is counted, what fails is an observation.

The calculator and the Python tool stay within their limits.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from custom.agent import AgentSpec
from custom.env import BadEnvironment, BaseEnvironment, StepResult
from custom.tools import (
    UNKNOWN,
    EnvironmentStepTool,
    MultiTurnManager,
    Tool,
    ToolDefinition,
    ToolError,
    ToolRegistry,
    load_tools,
)
from custom.tools.builtin import CalculatorTool
from custom.tools.parsers import ToolCall, get_parser
from custom.tools.registry import MAX_HANGING
from custom.tools.turns import MAX_CALLS


class Echo(Tool):
    definition = ToolDefinition(
        name="echo",
        description="Echoes.",
        parameters={
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
        },
    )

    def execute(self, text: str) -> str:
        return text


class Returns(Tool):
    """Gives back what it was made with, or raises it."""

    def __init__(self, value: Any, name: str = "returns", timeout_s: float | None = None) -> None:
        self.value, self.definition = value, ToolDefinition(name, timeout_s=timeout_s)

    def execute(self) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Sleeps(Tool):
    definition = ToolDefinition(
        "sleeps", parameters={"type": "object", "properties": {}}, timeout_s=0.05
    )

    def __init__(self) -> None:
        self.wake = threading.Event()

    def execute(self) -> str:
        self.wake.wait(20)
        return "awake"


class Corridor(BaseEnvironment):
    """Needs three steps to the right; each gives 1."""

    place = 0

    def reset(self, seed: int | None = None) -> str:
        self.place, self.actions = 0, list[str]()
        return "start"

    def step(self, action: str) -> tuple[Any, ...]:
        self.actions.append(action)
        if action == "crash":
            raise RuntimeError("the floor gave way")
        if action == "nan":
            return "x", float("nan"), False, {}
        self.place += action == "right"
        return f"at {self.place}", float(action == "right"), self.place >= 3, {"place": self.place}


def tag(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def manager_of(
    *tools: Tool, environment: Any = None, parser: str = "function", **settings: Any
) -> MultiTurnManager:
    return MultiTurnManager(ToolRegistry(tools), get_parser(parser), environment, **settings)


def call(registry: ToolRegistry, tool: str, /, **arguments: Any) -> tuple[bool, Any]:
    record = registry.execute(ToolCall(tool, arguments))
    return record.ok, record.value


def corridor() -> Corridor:
    environment = Corridor()
    environment.reset()
    return environment


# --- The registry ---


def test_a_registered_tool_is_executed_and_described() -> None:
    registry = ToolRegistry()
    registry.register(Echo())
    assert call(registry, "echo", text="hi") == (True, "hi")
    function = {"name": "echo", "description": "Echoes.", "parameters": Echo.definition.parameters}
    assert registry.schemas() == [{"type": "function", "function": function}]


def test_registering_says_what_is_wrong_with_a_tool() -> None:
    registry = ToolRegistry([Echo()])
    with pytest.raises(ValueError, match="already a tool named 'echo'"):
        registry.register(Echo())
    with pytest.raises(ValueError, match="is no tool; give an instance"):
        registry.register(Echo)  # type: ignore[arg-type]
    broken = Returns(1)
    broken.definition = ToolDefinition(
        "broken", parameters={"type": "object", "properties": {"x": {"type": "no"}}}
    )
    with pytest.raises(ValueError, match="the parameters of tool 'broken'"):
        registry.register(broken)
    assert [*registry.tools] == ["echo"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "'text' is a required property"),
        ({"text": 3}, "at 'text': 3 is not of type 'string'"),
        ({"text": "x", "more": 1}, "unexpected keyword argument 'more'"),
        ({"text": "x", "self": 1}, "'self'"),
        ({"text": ["x" * 10**6]}, "is not of type 'string'"),
    ],
)
def test_wrong_arguments_are_named_and_never_reach_the_tool(
    arguments: dict[str, Any], said: str
) -> None:
    outcome = ToolRegistry([Echo()]).execute(ToolCall("echo", arguments))
    assert outcome.error_kind == "bad_arguments"
    assert said in outcome.value or len(outcome.value) > 300
    assert len(outcome.value) < 500


def test_a_tool_may_have_a_parameter_called_name() -> None:
    class Greet(Tool):
        definition = ToolDefinition(
            "greet", parameters={"type": "object", "properties": {"name": {"type": "string"}}}
        )

        def execute(self, name: str) -> str:
            return f"Hello {name}"

    assert call(ToolRegistry([Greet()]), "greet", name="Ann") == (True, "Hello Ann")


def test_text_alone_stands_for_the_only_parameter() -> None:
    registry = ToolRegistry([Echo(), Returns("r")])
    assert registry.execute(ToolCall("echo", "hi")).value == "hi"
    assert registry.execute(ToolCall("returns", "hi")).error_kind == "bad_arguments"


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (ValueError("no such page"), "exception", "ValueError: no such page"),
        (ToolError("no such page"), "exception", "no such page"),
        (SystemExit(3), "exception", "SystemExit: 3"),
        (RecursionError("deep"), "exception", "RecursionError: deep"),
        (TimeoutError(), "timeout", "timed out"),
    ],
)
@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_what_a_tool_raises_is_its_result(
    raised: BaseException, kind: str, said: str, timeout_s: float | None
) -> None:
    outcome = ToolRegistry([Returns(raised, timeout_s=timeout_s)]).execute(ToolCall("returns"))
    assert (outcome.error_kind, outcome.value) == (kind, said)


def test_an_exception_that_cannot_be_printed_is_a_result_too() -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert call(ToolRegistry([Returns(Rude())]), "returns") == (False, "Rude: (no message)")


def test_a_tool_that_hangs_is_left_and_after_a_few_times_not_called_again() -> None:
    tool = Sleeps()
    registry = ToolRegistry([tool])
    outcomes = [registry.execute(ToolCall("sleeps")) for _ in range(MAX_HANGING + 2)]
    assert {outcome.error_kind for outcome in outcomes} == {"timeout"}
    assert outcomes[0].value == "tool 'sleeps' did not answer within 0.05 s"
    assert outcomes[-1].value == f"tool 'sleeps' is still busy with {MAX_HANGING} earlier calls"
    left = [thread for thread in threading.enumerate() if thread.name == "tool-sleeps"]
    assert len(left) == MAX_HANGING
    assert all(thread.daemon for thread in left)
    tool.wake.set()
    for thread in left:
        thread.join(5)
    assert call(registry, "sleeps") == (True, "awake")


# --- Loading ---

MODULE = """
from custom.tools import Tool, ToolDefinition

class Mine(Tool):
    definition = ToolDefinition("mine", "Mine.")
    def execute(self):
        return "mine"

class Named(Mine):
    def __init__(self, name):
        self.definition = ToolDefinition(name)

shared = Named("shared")
def several():
    return [Named("a"), Named("b")]
nothing = 3
"""


def test_tools_are_loaded_by_name_from_files_and_modules(tmp_path: Path) -> None:
    file = tmp_path / "my_tools.py"
    file.write_text(MODULE)
    sources = (
        f"{file}:Mine",
        f"{file}:several",
        f"{file}:shared",
        "custom.tools.builtin:CalculatorTool",
    )
    registry = load_tools(sources)
    assert [*registry.tools] == ["mine", "a", "b", "shared", "calculator"]
    assert [*load_tools(("calculator",)).tools] == ["calculator"]
    assert call(registry, "mine") == (True, "mine")
    assert load_tools(sources).tools["shared"] is not registry.tools["shared"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "calculater",
            "unknown; allowed: calculator, python, environment_step, "
            "/path/to/file.py:name, module:name",
        ),
        ("no.such.module:X", "there is no module 'no'"),
        ("custom.tools:Missing", "does not define 'Missing'"),
        ("custom.tools.turns:MAX_CALLS", "is a int; allowed: a Tool, or what makes one"),
    ],
)
def test_a_tool_that_cannot_be_loaded_is_named(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"agent\.tools") as error:
        load_tools((source,))
    assert said in str(error.value)


# --- Turns ---


def test_the_documented_example_works() -> None:
    environment = corridor()
    registry = ToolRegistry()
    registry.register(Echo())
    registry.register(EnvironmentStepTool(environment))
    manager = MultiTurnManager(registry, get_parser("json"), environment)
    environment.reset()
    turn = manager.step("model output")
    assert (turn.observation, turn.reward, turn.done, turn.calls) == ("at 0", 0.0, False, ())
    turn = manager.step('{"name": "echo", "arguments": {"text": "hi"}}')
    assert (turn.calls[0].result, turn.calls[0].name, turn.calls[0].ok, turn.observation) == (
        "hi",
        "echo",
        True,
        "hi",
    )


def test_every_call_is_executed_in_order_and_the_results_are_the_observation() -> None:
    environment = corridor()
    manager = manager_of(Echo(), EnvironmentStepTool(), environment=environment)
    turn = manager.step(
        tag("echo", text="a")
        + tag("environment_step", action="right")
        + tag("nope")
        + tag("echo", text="b")
    )
    assert turn.observation == (
        "[1] echo: a\n[2] environment_step: at 1\n"
        "[3] nope: Error (unknown_tool): there is no tool 'nope'; "
        "the tools are: echo, environment_step\n[4] echo: b"
    )
    assert (turn.reward, turn.done, turn.info) == (1.0, False, {"place": 1})
    assert [(call.name, call.ok, call.error_kind) for call in turn.calls] == [
        ("echo", True, ""),
        ("environment_step", True, ""),
        (UNKNOWN, False, "unknown_tool"),
        ("echo", True, ""),
    ]
    assert environment.actions == ["right"]


def test_nothing_is_executed_behind_the_end_of_the_episode() -> None:
    environment = corridor()
    manager = manager_of(Echo(), EnvironmentStepTool(), environment=environment)
    turn = manager.step(tag("environment_step", action="right") * 5 + tag("echo", text="late"))
    assert (turn.reward, turn.done, len(turn.calls), environment.actions) == (
        3.0,
        True,
        3,
        ["right"] * 3,
    )
    assert turn.observation.endswith("[3] environment_step: at 3")


def test_the_managers_environment_is_stepped_also_where_the_tool_knows_the_original() -> None:
    original, played = corridor(), corridor()
    manager = manager_of(EnvironmentStepTool(original), environment=played)
    assert manager.step(tag("environment_step", action="right")).reward == 1.0
    assert (original.actions, played.actions) == ([], ["right"])
    alone = manager_of(EnvironmentStepTool(original))
    assert alone.step(tag("environment_step", action="right")).reward == 1.0
    assert original.actions == ["right"]


class Where(Tool):
    """Tells which steps its environment has seen."""

    definition = ToolDefinition("where")

    def execute(self) -> Any:
        return list(self.environment.actions)


def test_a_tool_finds_the_environment_of_the_episode() -> None:
    registry = ToolRegistry([Where()])
    for actions in (["right"], ["left", "right"]):
        environment = corridor()
        manager = MultiTurnManager(registry, get_parser("function"), environment)
        for action in actions:
            manager.step(action)
        assert json.loads(str(manager.step(tag("where")).observation)) == actions
    assert Where().environment is None


def test_a_tool_knows_its_environment_as_an_episode_begins() -> None:
    class Begins(Where):
        def begin_episode(self, task: Any) -> None:
            self.begun_in = self.environment

    tool, environment = Begins(), corridor()
    manager_of(tool, environment=environment).begin_episode({})
    assert tool.begun_in is environment


def test_an_agent_class_of_ones_own_may_call_its_tools_by_hand() -> None:
    class ByHand:
        def __init__(self, environment: Any, tools: ToolRegistry) -> None:
            self.environment, self.tools = environment, tools

        def reset(self, seed: int) -> str:
            return "go"

        def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
            self.environment.step(text)
            return self.tools.execute_tool("where")[1], 0.0, True, {}

    agents = [AgentSpec(corridor(), agent_cls=ByHand, tools=(Where(),)).build() for _ in range(2)]
    for agent, action in zip(agents, ["right", "left"], strict=True):
        agent.reset(0)
        assert agent.step(action).observation == [{"role": "user", "content": f'["{action}"]'}]


def test_a_copy_of_a_tool_copies_no_environment() -> None:
    class Locked:
        def __deepcopy__(self, memo: object) -> Any:
            raise TypeError("cannot be copied")

    tool = Where()
    tool.environment = Locked()
    [copied] = load_tools([tool]).tools.values()
    assert copied is not tool


def test_a_tool_may_have_an_environment_of_its_own_that_is_never_replaced() -> None:
    class Fixed(Where):
        own = corridor()

        @property
        def environment(self) -> Any:
            return self.own

    manager = manager_of(Fixed(), environment=corridor())
    assert manager.step(tag("where")).observation == "[]"


def test_an_environment_tool_may_have_parameters_of_its_own() -> None:
    class Move(EnvironmentStepTool):
        definition = ToolDefinition(
            "move", "", {"type": "object", "properties": {"steps": {"type": "integer"}}}
        )

        def __init__(self) -> None:
            self.environment = None

        def action_text(self, steps: int) -> str:  # type: ignore[override]
            return {1: "right", -1: "left"}[steps]

    environment = corridor()
    manager = manager_of(Move(), environment=environment)
    assert manager.step(tag("move", steps=1)).observation == "at 1"
    assert manager.step(tag("move", steps=7)).calls[0].error_kind == "exception"
    assert manager.step(tag("move", action="right")).calls[0].error_kind == "bad_arguments"
    assert environment.actions == ["right"]


@pytest.mark.parametrize("text", ["crash", tag("environment_step", action="crash")])
def test_a_crash_of_the_environment_is_the_episodes_and_passes_through(text: str) -> None:
    with pytest.raises(RuntimeError, match="the floor gave way"):
        manager_of(EnvironmentStepTool(), environment=corridor()).step(text)


@pytest.mark.parametrize("text", ["nan", tag("environment_step", action="nan")])
def test_a_reward_that_is_no_number_is_the_environments_fault(text: str) -> None:
    with pytest.raises(BadEnvironment, match="reward"):
        manager_of(EnvironmentStepTool(), environment=corridor()).step(text)


def test_without_an_environment_a_text_without_a_call_is_the_answer() -> None:
    turn = manager_of(Echo()).step("It is 42.")
    assert (turn.done, turn.reward, turn.calls) == (True, 0.0, ())


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (tag("nope"), "unknown_tool"),
        ("<tool_call>{'name'}</tool_call>", "bad_json"),
        (tag("echo"), "bad_arguments"),
        (tag("echo", text=[]), "bad_arguments"),
        (tag("raises"), "exception"),
        (tag("sleeps"), "timeout"),
    ],
)
def test_each_kind_of_failure_is_an_observation(text: str, kind: str) -> None:
    sleeps = Sleeps()
    manager = manager_of(
        Echo(), Returns(OSError("gone"), name="raises"), sleeps, environment=corridor()
    )
    turn = manager.step(text)
    sleeps.wake.set()
    assert turn.observation.startswith(f"Error ({kind}): ")
    assert (turn.reward, turn.done, len(turn.calls), turn.calls[0].error_kind) == (
        0.0,
        False,
        1,
        kind,
    )


def test_a_turn_executes_a_bounded_number_of_calls() -> None:
    manager = manager_of(Echo())
    turn = manager.step(tag("echo", text="x") * (MAX_CALLS + 5))
    assert len(turn.calls) == MAX_CALLS
    assert turn.observation.endswith(
        f"5 more calls were not executed: a turn may have {MAX_CALLS}."
    )


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "observation"),
    [
        ("text", "text"),
        (None, ""),
        (3, "3"),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        (np.float32(0.5), "0.5"),
        ([{"role": "nobody", "content": "x"}], '[{"role": "nobody", "content": "x"}]'),
        (Unprintable(), "RuntimeError: no"),
        ("\ud800", "?"),
    ],
)
def test_whatever_a_tool_returns_becomes_text(value: Any, observation: str) -> None:
    turn = manager_of(Returns(value)).step(tag("returns"))
    assert (turn.observation, turn.calls[0].ok) == (observation, True)


def test_a_megabyte_of_result_is_cut() -> None:
    turn = manager_of(Returns("x" * 10**6), max_observation_chars=500).step(tag("returns") * 3)
    assert len(turn.observation) == 500
    assert all(len(call.result) == 500 for call in turn.calls)


def test_any_tool_may_bring_a_reward_and_end_the_episode_but_not_with_nan() -> None:
    good = manager_of(Returns(StepResult("found", 2.0, True, {"k": 1}))).step(tag("returns"))
    assert (good.observation, good.reward, good.done, good.info) == ("found", 2.0, True, {"k": 1})
    bad = manager_of(Returns(StepResult("found", float("nan"), True, {}))).step(tag("returns"))
    assert (bad.reward, bad.done, bad.calls[0].error_kind) == (0.0, False, "exception")


# --- The calculator ---


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(1 + 2) ** 3 - -1", "28"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** -2", "0.25"),
        ("10 ** 30", "1" + "0" * 30),
        ("0.1 + 0.2", "0.30000000000000004"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert CalculatorTool().execute(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "9**9**9",
            "2**-(10**400)",
            "10**4000*10**4000*10**4000",
            "(2**4000)**2",
            "1/0",
            "0**-1",
            "1e308*10",
            "(-8)**0.5",
        ),
        *(
            "__import__('os').system('x')",
            "().__class__",
            "[1]*9",
            "'a'*9",
            "True+1",
            "x",
            "2^3",
        ),
        *(
            "f(1)",
            "lambda: 1",
            "min()",
            "sqrt(x=1)",
            "1,2",
            "",
            " ",
            "1 +",
            "(" * 400,
            "-" * 490 + "1,",
            "1" * 501,
            "\0",
        ),
        *("\ud800", "1 if 1 else 2"),
    ],
)
def test_the_calculator_refuses_at_once_what_is_no_or_too_much_arithmetic(expression: str) -> None:
    started = time.process_time()
    with pytest.raises(ToolError):
        CalculatorTool().execute(expression)
    assert time.process_time() - started < 5


VERL_TOOL = """
from custom.tools import BaseTool, ToolResponse

class Scale(BaseTool):
    released = []

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["x"] < 0:
            raise ValueError("negative")
        return ToolResponse(text=f"{self.name}: {parameters['x'] * self.config['factor']}"), 0.0, {}

    async def release(self, instance_id, **kwargs):
        self.released.append(instance_id)
"""


def test_tools_of_verls_form_come_from_its_file_and_answer_as_ours(tmp_path: Path) -> None:
    (tmp_path / "scale.py").write_text(VERL_TOOL)
    parameters = "{type: object, properties: {x: {type: number}}, required: [x]}"
    (tmp_path / "tools.yaml").write_text(
        f"tools:\n- class_name: {tmp_path}/scale.py:Scale\n  config: {{factor: 3}}\n"
        "  tool_schema:\n    type: function\n"
        f"    function: {{name: scale, description: Scales., parameters: {parameters}}}\n"
        "- class_name: custom.tools.builtin.CalculatorTool\n"
    )
    registry = load_tools([str(tmp_path / "tools.yaml")])
    assert list(registry.tools) == ["scale", "calculator"]
    assert registry.execute(ToolCall("scale", {"x": 2})).result == "scale: 6"
    failed = registry.execute(ToolCall("scale", {"x": -1}))
    assert failed.error_kind == "exception" and "negative" in failed.result
    assert registry.execute(ToolCall("scale", {"x": "two"})).error_kind == "bad_arguments"
    tool: Any = registry.tools["scale"]
    assert len(set(tool.tool.released)) == 2
    environment = corridor()
    registry.execute(ToolCall("scale", {"x": 2}), environment)
    assert tool.tool.environment is environment


@pytest.mark.parametrize("place", ["scale_beside", "tools_beside.scale"])
def test_a_tools_module_may_lie_beside_the_file_that_names_it(tmp_path: Path, place: str) -> None:
    file = tmp_path / f"{place.replace('.', '/')}.py"
    config = tmp_path / "tools.yaml"
    config.write_text(
        f"tools:\n- class_name: {place}.Scale\n  config: {{factor: 3}}\n"
        "  tool_schema: {type: function, function: {name: scale}}\n"
    )
    with pytest.raises(ValueError, match=r"name the file, class_name: PATH\.py:Scale.*PYTHONPATH"):
        load_tools([str(config)])
    file.parent.mkdir(exist_ok=True)
    file.write_text(VERL_TOOL)
    assert list(load_tools([str(config)]).tools) == ["scale"]


def tool_with(parameters: dict[str, Any], execute: Any) -> Tool:
    definition = ToolDefinition(name="look", parameters={"type": "object", **parameters})
    return type("Look", (Tool,), {"definition": definition, "execute": execute})()


QUERY = {"properties": {"query": {"type": "string"}}, "required": ["query"]}


@pytest.mark.parametrize(
    ("parameters", "execute", "words"),
    [
        (
            QUERY,
            lambda self, qurey: "",
            r"Look\.\S+ \(.*test_tools.py:\d+\) takes \(qurey\): not 'query'. Did you mean 'qurey'",
        ),
        (QUERY, lambda self: "", "its schema has query.* takes \\(\\): not 'query'"),
        ({}, lambda self, query: "", "its schema has nothing.*the schema lacks 'query'"),
        (QUERY, lambda self, query, page: "", "the schema lacks 'page'"),
    ],
)
def test_a_schema_and_code_that_differ_are_refused_at_start(parameters, execute, words) -> None:
    with pytest.raises(ValueError, match=words):
        ToolRegistry([tool_with(parameters, execute)])


@pytest.mark.parametrize(
    ("parameters", "execute"),
    [
        (QUERY, lambda self, query, page=1: ""),
        (QUERY, lambda self, **arguments: ""),
        ({"$ref": "#/$defs/x", "$defs": {"x": QUERY}}, lambda self, query: ""),
    ],
)
def test_code_may_take_more_than_a_schema_has(parameters, execute) -> None:
    ToolRegistry([tool_with(parameters, execute)])


def test_a_parameter_that_only_the_code_needs_is_warned_of(caplog) -> None:
    parameters = {"properties": {"query": {"type": "string"}, "word": {"type": "string"}}}
    ToolRegistry([tool_with(parameters, lambda self, query, word="": "")])
    assert "which has no default for query: add that to the schema's required" in caplog.text


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("integer", "3", 3),
        ("integer", " -12\n", -12),
        ("number", "0.5", 0.5),
        ("boolean", "true", True),
        ("array", "[1, 2]", [1, 2]),
        (["integer", "null"], "null", None),
        ("string", "3", "3"),
        (["string", "integer"], "3", "3"),
    ],
)
def test_a_text_alone_is_of_the_kind_that_the_parameter_wants(kind, text, expected) -> None:
    seen: list[Any] = []
    parameters = {"properties": {"n": {"type": kind}}, "required": ["n"]}
    registry = ToolRegistry([tool_with(parameters, lambda self, n: seen.append(n))])
    (record,) = (
        MultiTurnManager(registry, get_parser("react"))
        .step(f"Action: look\nAction Input: {text}")
        .calls
    )
    assert record.ok, record.result
    assert seen == [expected] and type(seen[0]) is type(expected)


@pytest.mark.parametrize("text", ["three", "3.5", "9" * 5000, "[" * 5000, "NaN"])
def test_a_text_that_is_no_integer_is_answered(text) -> None:
    parameters = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    registry = ToolRegistry([tool_with(parameters, lambda self, n: n)])
    assert registry.execute(ToolCall("look", text)).error_kind == "bad_arguments"
