"""What a user named wrongly is told by its own name: templates, tools, folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from custom.tools import Tool, ToolDefinition, ToolRegistry
from data.chat_templates import require_template
from data.turn_tokens import TurnTokens
from tests.e2e.test_training import tiny_config
from tests.unit.config.helpers import load
from training.building import build_trainer
from training.config.loader import ConfigError
from training.config.resources.files import check_run_folders
from training.run.run_lock import run_lock

BROKEN = (
    "{% for m in messages %}{{ m.content }}",
    "{{ messages[0].content }",
    "line one\n{% if %}{% endif %}",
    "{{ messages | no_such_filter }}",
    "{% endfor %}",
)


@pytest.mark.parametrize("template", BROKEN)
def test_a_template_that_is_no_jinja_is_told_as_that(
    tiny_task: Path, tmp_path: Path, template: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"has a syntax error in line \d+: .*chat_template.jinja"):
        require_template(tokenizer, {})
    with pytest.raises(ValueError, match="has a syntax error in line"):
        TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=[tokenizer.eos_token_id])
    with pytest.raises(ConfigError, match="has a syntax error in line"):
        build_trainer(tiny_config(tiny_task, tmp_path / "run"), tokenizer)


def test_a_template_of_the_config_is_told_by_its_key(tiny_task: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    with pytest.raises(ValueError, match=r"mend data\.apply_chat_template_kwargs\.chat_template"):
        require_template(tokenizer, {"chat_template": "{{ messages"})
    # What refuses a conversation is told where one is rendered.
    require_template(tokenizer, {"chat_template": "{{ raise_exception('no') }}"})
    require_template(tokenizer, {"chat_template": "{{ messages[7].content }}"})


class Named(Tool):
    def __init__(self, name: str) -> None:
        self.definition = ToolDefinition(name=name)

    def execute(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("name", "possible"),
    [
        ("my tool", "my_tool"),
        (" spaces ", "spaces"),
        ("", "my_tool"),
        ("two\nlines", "two_lines"),
        ('say "hi"', "say_hi_"),
        ("f(x)", "f_x_"),
        ("{tool}", "_tool_"),
    ],
)
def test_a_name_that_no_call_can_have_is_refused(name: str, possible: str) -> None:
    with pytest.raises(
        ValueError, match=r"Named \(\S+test_errors_by_name.py:\d+\): a tool"
    ) as told:
        ToolRegistry([Named(name)])
    assert repr(name) in str(told.value) and f"{possible!r} can be" in str(told.value)


@pytest.mark.parametrize(
    "name", ["my_tool", "my-tool", "files.read", "server/tool", "a:b", "größe"]
)
def test_a_name_that_a_call_can_have_is_taken(name: str) -> None:
    assert name in ToolRegistry([Named(name)]).tools


@pytest.mark.parametrize("folder", ["s3://bucket/run", "hdfs://node/run"])
def test_a_run_folder_that_is_a_url_is_told_by_its_key(folder: str) -> None:
    (problem,) = check_run_folders(load(f"trainer.default_local_dir={folder}"))
    assert problem.startswith(f"trainer.default_local_dir={folder} is a URL: name a folder")


@pytest.mark.parametrize("folder", ["/proc/no/run", "n" * 300, "nul\0byte"])
def test_a_run_folder_that_cannot_be_made_is_told_by_its_key(tmp_path: Path, folder: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"trainer\.default_local_dir=.* cannot be made"),
        run_lock(tmp_path / folder),
    ):
        raise AssertionError
