"""Unmodified clients: what the SDKs send is read, and what they are sent they understand."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from features.programs.exchange import Answer, Asked, Exited
from features.programs.spec import ProgramSpec
from tests.features.programs.test_pool import pool_of
from workers.environments.reply import StepReply

CLIENTS = Path(__file__).with_name("clients")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call>'
CODE = "Thought: I add.\n<code>\nfinal_answer(add(3, 4))\n</code>"
# The policy's words to each client, in turn.
SCRIPTS = {
    "openai_plain": ("openai", ["Yes.", "Fine."]),
    "openai_stream": ("openai", ["Yes.", "Yes."]),
    "openai_parallel": ("openai", ["One", "Two", "Three", "Four", "All"]),
    "openai_tools": ("openai", [f"Let me see. {CALL}", "It is 5."]),
    "anthropic_sdk": ("anthropic", [CALL, "It is 5."]),
    "openai_agents": ("openai-agents", [CALL, "It is 5."]),
    "smolagents_tools": ("smolagents", [CALL, FINAL, CODE]),
    "langgraph_agent": ("langgraph", [CALL, "It is 5."]),
    "token_in": ("aiohttp", ["1", "2"]),
}
# An interpreter that has the packages which this one lacks.
SDK_PYTHON = os.environ.get("PROGRAM_SDK_PYTHON")


def python_with(package: str) -> str:
    """Returns an interpreter that has a package; skips the test where there is none."""
    try:
        importlib.metadata.distribution(package)
        return sys.executable
    except importlib.metadata.PackageNotFoundError:
        if SDK_PYTHON is None:
            pytest.skip(f"needs the package {package}, here or in PROGRAM_SDK_PYTHON")
        return SDK_PYTHON


def converse(spec: ProgramSpec, script: list[str]) -> tuple[list[Asked], Exited]:
    """Plays a client with what the policy is to say; returns what was asked and how it ended."""
    asked: list[Asked] = []
    with pool_of(spec) as pool:
        pool.reset(0, 0, 3, {})
        until = time.monotonic() + 90
        while time.monotonic() < until:
            for _, heard in pool.poll(1.0):
                if isinstance(heard, Asked):
                    text = script[len(asked)]
                    asked.append(heard)
                    pool.answer(0, heard.number, answer_of(text))
                elif isinstance(heard, Exited):
                    return asked, heard
                assert not isinstance(heard, StepReply)
    pytest.fail(f"{spec.source} did not end")


def answer_of(text: str) -> Answer:
    return Answer(
        text=text,
        token_ids=(3, 4),
        log_probs=(-0.5, -1.0),
        token_texts=("a", "b"),
        prompt_tokens=7,
    )


@pytest.mark.seconds
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unmodified_client_plays_its_episode(name: str) -> None:
    package, script = SCRIPTS[name]
    command = (python_with(package), str(CLIENTS / f"{name}.py"))
    asked, exited = converse(ProgramSpec(command=command), script)
    assert exited.failure == "", exited.error
    assert len(asked) == len(script)
    assert exited.reward == (9.0 if name == "token_in" else 1.0), exited.record
    # smolagents tells of its calls in words of its own.
    if name != "smolagents_tools":
        for request in asked:
            check_recalled(request.messages, script)


def check_recalled(messages: list[dict[str, Any]], script: list[str]) -> None:
    """Asserts that the policy's answers come back as they were sampled."""
    for message in messages:
        if message["role"] == "assistant":
            assert message["content"] in script, message
            assert "tool_calls" not in message
