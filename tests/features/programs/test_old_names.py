"""Settings and modules of programs, judges and MCP servers are found under their older names."""

from __future__ import annotations

import logging

import pytest

from custom.agent import AgentSpec
from features.judges.settings import JudgesSettings
from features.mcp.mcp_server import McpServer
from features.mcp.settings import McpSettings
from features.programs.settings import ProgramsSettings
from training.config.loader import load_config

OLD = (
    "agent.command=python examples/guess_program.py",
    "agent.preload=[json]",
    "agent.program_reward=exit_code",
    "agent.client_sampling=refuse",
    "agent.program_host=node",
    "agent.request_timeout_s=3",
    "agent.verifiers.trained=[a]",
    "agent.models.judge={base_url: 'http://127.0.0.1:1/v1', model: m}",
    "agent.mcp_servers.files.command=ls",
)


def test_older_keys_are_read_and_named_anew(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = load_config([*OLD], check=False).config
    programs = config.section(ProgramsSettings)
    assert programs.command == ("python", "examples/guess_program.py")
    assert programs.preload == ("json",)
    assert (programs.reward, programs.host) == ("exit_code", "node")
    assert (programs.client_sampling, programs.request_timeout_s) == ("refuse", 3.0)
    assert programs.verifiers.trained == ("a",)
    assert config.section(JudgesSettings).models["judge"].model == "m"
    assert config.section(McpSettings).servers["files"].command == "ls"
    assert [choice.command for choice in config.environments] == [programs.command]
    function = load_config(["agent.program=a.py:solve"], check=False).config
    assert function.environments[0].program == "a.py:solve"


def test_older_modules_are_the_same_ones() -> None:
    import custom.models.errors
    import custom.models.usage
    from custom import model_errors, model_usage
    from custom.models import ModelError, models
    from features.judges.registry import models as by_new_name

    assert models is by_new_name
    assert ModelError is model_errors.ModelError
    assert custom.models.errors.UnknownModel is model_errors.UnknownModel
    assert custom.models.usage.USAGE is model_usage.USAGE


def test_an_agents_servers_are_taken_under_their_older_name() -> None:
    server = McpServer(name="files", command="ls")
    spec = AgentSpec("x", tools=("calculator",), mcp_servers=(server,))
    assert spec.tools == ("calculator", server)
