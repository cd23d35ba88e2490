"""The trial of programs before a run: which failures keep it from beginning, and what is said."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from features.programs.spec import ProgramSpec
from training.config import AgentConfig, PPOConfig
from training.config.loader import ConfigError
from training.environment_trial import try_agents

FAULTY = Path(__file__).with_name("faulty.py")
ASK = f"""
import sys
sys.argv[1:] = []
sys.path.insert(0, {str(FAULTY.parent)!r})
from faulty import ask
"""


@pytest.fixture
def tried(tiny_game: Path, tmp_path: Path) -> Any:
    """Returns what runs a script's trial, and then why a run with it may not begin."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_game / "model")

    def try_script(
        script: str,
        preload: tuple[str, ...] = (),
        train_models: tuple[str, ...] = (),
        **agent: Any,
    ) -> list[str]:
        file = tmp_path / "mine.py"
        file.write_text(ASK + script)
        spec = ProgramSpec(
            command=(sys.executable, str(file)),
            preload=preload,
            train_models=train_models,
            memory_gb=2.0,
        )
        try:
            try_agents(PPOConfig(agent=AgentConfig(**agent)), [spec], tokenizer)
        except ConfigError as error:
            return error.problems
        return []

    return try_script


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("ask()\nprnt(1.0)", "NameError: name 'prnt' is not defined"),
        ("print(ask())\nprint('done')", "last line of output is no reward: 'done'"),
    ],
)
def test_a_program_that_fails_whatever_it_is_answered_is_refused(
    tried: Any, caplog: pytest.LogCaptureFixture, script: str, reason: str
) -> None:
    [problem] = tried(script)
    assert problem.startswith("program mine.py failed in all 4 trial episodes, whatever")
    assert problem.count(reason) == 1
    assert "agent.max_failure_rate=1 trains all the same" in problem
    for settings in ({"max_failure_rate": 1.0}, {"trial_episodes": 0}):
        caplog.clear()
        assert tried(script, **settings) == []
        [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert reason in warning.getMessage()


@pytest.mark.parametrize(
    ("script", "warning"),
    [
        ("print(float(ask() != 'Yes.'))", ""),
        ("print(float(int(ask())))", "failed in 1 of 2 trial episodes"),
        ("for _ in range(99): ask()", "failed in 1 of 1 trial episodes"),
    ],
    ids=["never", "where no number is said", "where no more is answered"],
)
def test_a_program_that_some_answer_lets_play_may_begin(
    tried: Any, caplog: pytest.LogCaptureFixture, script: str, warning: str
) -> None:
    assert tried(script) == []
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(said) == bool(warning)
    assert all(warning in text for text in said)


def test_a_program_that_needs_a_tools_call_gets_one(
    tried: Any, caplog: pytest.LogCaptureFixture
) -> None:
    script = """
import json, faulty
function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
body = {"messages": [{"role": "user", "content": "?"}]}
body["tools"] = [{"type": "function", "function": function}]
_, answer = faulty.post("/chat/completions", json.dumps(body).encode())
[call] = json.loads(answer)["choices"][0]["message"]["tool_calls"]
print(float(call["function"]["name"] == "add"))
"""
    assert tried(script) == []
    assert "failed in 1 of 2 trial episodes" in caplog.text


def test_a_traceback_of_a_forked_program_has_its_own_frames_alone(tried: Any) -> None:
    [problem] = tried("ask()\nprnt(1.0)", preload=("json",))
    assert "mine.py" in problem and "NameError" in problem
    assert "program_process.py" not in problem and "runpy" not in problem


def test_a_module_that_cannot_be_preloaded_is_refused_with_its_cause(
    tried: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    [problem] = tried("print(float(ask()))", preload=("json", "opnai"))
    assert "programs.preload=[json, opnai]" in problem
    assert f"{sys.executable} cannot import opnai (ModuleNotFoundError" in problem
    assert "json (" not in problem and "Traceback" not in problem
    assert "opnai" not in capfd.readouterr().err
