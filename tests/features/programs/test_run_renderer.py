"""The renderer for verifiers' token-in client, with stand-ins for the package that it extends."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from tests.unit.test_turn_tokens import turn_tokens

NAME = "features.programs.with_verifiers.run_renderer"
HELLO = {"role": "user", "content": "Hello"}
YES = {"role": "assistant", "content": "Yes"}
FURTHER = {"role": "user", "content": "And now?"}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields the renderer's module, imported beside stand-ins for verifiers' renderers."""
    base = ModuleType("renderers.base")
    for name in ("ParsedResponse", "ParsedToolCall", "RenderedTokens"):
        setattr(base, name, SimpleNamespace)
    base.ToolCallParseStatus = SimpleNamespace(OK="ok")  # type: ignore[attr-defined]
    base.extract_message_tool_names = lambda messages: []  # type: ignore[attr-defined]
    configs = ModuleType("renderers.configs")
    configs.BaseRendererConfig = BaseModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "renderers", ModuleType("renderers"))
    monkeypatch.setitem(sys.modules, "renderers.base", base)
    monkeypatch.setitem(sys.modules, "renderers.configs", configs)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


def test_an_answer_is_known_again_behind_its_own_prompt_alone(module: Any) -> None:
    """One renderer serves all conversations of an interpreter."""
    tokenizer = turn_tokens("smollm2").tokenizer
    renderer = module.RunRenderer(tokenizer, module.RunRendererConfig())

    def sample(prompt_ids: list[int], text: str) -> tuple[list[int], Any]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return ids, renderer.parse_response(ids, prompt_ids=prompt_ids)

    first_prompt = renderer.render_ids([HELLO], add_generation_prompt=True)
    answer_ids, answered = sample(first_prompt, "<think>\nA secret.\n</think>\n\nYes<|im_end|>")
    assert answered.content == "Yes" and answered.reasoning_content == "A secret."
    own = tokenizer.decode(renderer.render_ids([HELLO, YES, FURTHER]))
    other = tokenizer.decode(renderer.render_ids([FURTHER, YES, HELLO]))
    assert "secret" in own and "secret" not in other
    bridged = renderer.bridge_to_next_turn(first_prompt, answer_ids, [FURTHER])
    sample(bridged.token_ids, "<think>\nMore.\n</think>\n\nNo<|im_end|>")
    again = [HELLO, YES, FURTHER, {"role": "assistant", "content": "No"}, FURTHER]
    text = tokenizer.decode(renderer.render_ids(again))
    assert "secret" in text and "More." in text, "also behind a turn that went on by ids"
