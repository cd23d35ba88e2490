"""configs/qwen3_5_tools.yaml: a hybrid that also sees plays a game with a tool in its own form."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from custom.tools import get_parser
from custom.tools.families import FamilyParser, TemplateFacts
from tests.e2e.test_docs import run

pytestmark = pytest.mark.long
SHORT = (
    *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "agent.val_length=0"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.val_before_train=false"),
    *("trainer.total_training_steps=2", "trainer.logger=[console,file]"),
)
# Kinds of calls that could not be read, or that a limit has cut.
NOT_EXECUTED = ("bad_json", "cut")
# A form of each kind: thinking that the prompt opens, ends that are roles, channels, values quoted.
FORMS = [
    ("qwen3_5_vision", "qwen3_xml"),
    ("glm4_moe", "glm"),
    ("gpt_oss", "harmony"),
    ("gemma4_vision", "gemma"),
]


@pytest.mark.parametrize(("family", "form"), FORMS)
def test_a_family_calls_the_tool_in_its_own_form_and_is_trained(
    family: str, form: str, tmp_path: Path
) -> None:
    out = tmp_path / "made"
    chosen = ("--family", family, "--form", form, "--out", str(out), "--steps", "80")
    run(sys.executable, "examples/prepare_zoo_game.py", *chosen)
    folder = tmp_path / "run"
    model = f"actor_rollout_ref.model.path={out / 'model'}"
    place = f"trainer.default_local_dir={folder}"
    run(sys.executable, "main.py", "configs/qwen3_5_tools.yaml", model, place, *SHORT)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert sum(step.get("tool/look_up/calls", 0) for step in steps) > 0
    for number in (1, 2):
        lines = (folder / f"episodes/{number}.jsonl").read_text().splitlines()
        for line in lines:
            check_calls(json.loads(line)["turns"], form)


def check_calls(turns: list[dict[str, Any]], form: str) -> None:
    """Requires that what was executed is what stands behind thinking, finished."""
    parser = get_parser(form)
    assert isinstance(parser, FamilyParser)
    if form == "qwen3_xml":
        parser = parser.under(TemplateFacts(opens_thinking=True))
    for turn in turns:
        executed = [call for call in turn["tool_calls"] if call["error_kind"] not in NOT_EXECUTED]
        assert len(executed) == len(parser.read(turn["text"]).finished)
