"""Games with tools in every form of calls, played by the turn loop: `agent.parser=auto`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from custom.envs.tool_arithmetic import ToolArithmetic
from custom.tools import GLMParser, get_parser
from data.protocol import DataProto
from data.seeds import step_info
from tests.e2e.test_tools_training import ENVIRONMENT, PROMPT, RESPONSE, ScriptedEngine
from tests.zoo.tool_forms import TOOL_FORMS, ToolForm, make_byte_tokenizer
from training.config import AgentConfig, DataConfig, EnvironmentChoice, PPOConfig
from training.config.loader import ConfigError
from training.environment_trial import try_agents
from workers.multi_turn_rollout import AgentRollout, agent_specs, describe_episodes
from workers.rollout.engine import Completion

EVERY_FORM = [pytest.param(form, id=name) for name, form in TOOL_FORMS.items()]


class WritingEngine(ScriptedEngine):
    """Says what it is told to the letter, the ends of turns included."""

    def __init__(self, form: ToolForm, scripts: list[list[str]]) -> None:
        tokenizer = make_byte_tokenizer(form)
        super().__init__(tokenizer, scripts)
        self.eos_token_ids = tokenizer.convert_tokens_to_ids(list(form.stops))

    def complete(self, request_id: str) -> Completion:
        text = self.scripts[int(request_id)].pop(0)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return Completion(
            request_id=request_id, token_ids=ids, log_probs=[-0.5] * len(ids), finish_reason="stop"
        )


def config_of(parser: str = "auto") -> PPOConfig:
    agent = AgentConfig(
        environment=EnvironmentChoice(name=ENVIRONMENT),
        tools=("calculator",),
        parser=parser,
        max_turn=6,
        trial_episodes=0,
    )
    return PPOConfig(
        data=DataConfig(max_prompt_length=PROMPT, max_response_length=RESPONSE), agent=agent
    )


def play(form: ToolForm, *scripts: list[str]) -> tuple[WritingEngine, DataProto]:
    engine = WritingEngine(form, list(scripts))
    config = config_of()
    rollout = AgentRollout(config, engine, engine.tokenizer, agent_specs(config), None)
    try:
        return engine, rollout.run(describe_episodes(len(scripts), 1, step_info(step=1, seed=3)))
    finally:
        rollout.close()


def calling(form: ToolForm, expression: str) -> str:
    """Returns the form's call, of the calculator."""
    whole = form.sampled
    for old in ('"q": "a b", "n": 3', 'q="a b", n=3', 'q:<|"|>a b<|"|>,n:3'):
        mine = {"q=": f'expression="{expression}"', "q:": f'expression:<|"|>{expression}<|"|>'}
        whole = whole.replace(old, mine.get(old[:2], f'"expression": "{expression}"'))
    for left in (
        "<parameter=n>\n3\n</parameter>\n",
        "\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>",
        '\n<parameter name="n">3</parameter>',
        '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n',
    ):
        whole = whole.replace(left, "")
    for old in ("<parameter=q>", "<arg_key>q<", 'name="q"'):
        whole = whole.replace(old, old.replace("q", "expression"))
    return whole.replace("a b", expression).replace("search", "calculator")


@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_call_is_answered_and_the_answer_paid_in_one_row(form: ToolForm) -> None:
    _, probe = play(form, ["none" + form.stops[0]])
    environment = ToolArithmetic()
    question = environment.reset(int(probe.non_tensor_batch["env_seed"][0]))
    expression = question.removeprefix("What is ").removesuffix("?")
    final = f"It is {environment.answer}."
    if form.parser == "harmony":
        thinking = "<|channel|>analysis<|message|>hm<|end|>"
        final = f"{thinking}<|start|>assistant<|channel|>final<|message|>{final}"
    if form.sampled.startswith("hm"):
        # The prompt opens thinking.
        final = f"hm\n</think>\n\n{final}"
    last = final + form.stops[0]
    call = calling(form, expression)
    engine, batch = play(form, [call, last])
    assert batch.batch["environment_rewards"][0].sum() == 1
    facts = batch.non_tensor_batch["episode_facts"][0]
    assert [each["error_kind"] for each in facts["tool_calls"]] == [""]
    assert len(batch) == 1
    sampled = batch.batch["responses"][0][batch.batch["response_mask"][0].bool()]
    assert engine.tokenizer.decode(sampled) == call + last


@pytest.mark.parametrize("form", EVERY_FORM)
def test_the_start_accepts_auto_and_refuses_another_form(form: ToolForm) -> None:
    tokenizer = make_byte_tokenizer(form)
    stops = tokenizer.convert_tokens_to_ids(list(form.stops))
    for parser in ("auto", form.parser):
        config = config_of(parser)
        try_agents(config, agent_specs(config), tokenizer, eos_token_ids=stops)
    other = "kimi" if form.parser != "kimi" else "glm"
    config = config_of(other)
    with pytest.raises(ConfigError, match=f"set agent.parser={form.parser}, or auto"):
        try_agents(config, agent_specs(config), tokenizer, eos_token_ids=stops)


def test_a_specs_own_parser_reads_the_turns_though_the_config_names_another() -> None:
    form = TOOL_FORMS["glm"]
    engine = WritingEngine(form, [])
    config = config_of("function")
    specs = [replace(spec, parser=get_parser("glm")) for spec in agent_specs(config)]
    rollout = AgentRollout(config, engine, engine.tokenizer, specs, None)
    try:
        reader = rollout.tokens.reader
        assert isinstance(reader, GLMParser)
        assert reader.facts.results_as_tool
        assert rollout.specs[0].parser is reader
    finally:
        rollout.close()
