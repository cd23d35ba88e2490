"""Which settings of contexts are refused, and with which sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from features.context.checks import config_problems
from features.context.opening import open_history
from features.context.settings import ContextSettings
from training.config import PPOConfig
from training.config.cross_checks import cross_problems
from training.config.loader import load_config
from workers.rollout.history import HistoryFault
from workers.rollout.history import open_history as open_named

LONG = ["data.max_prompt_length=999", "data.max_response_length=999"]
SUMMARISE = ["agent.context=summarise", *LONG]
GAME = "agent.environment.name=custom.envs.guess_number:GuessNumber"


def config_of(*words: str) -> PPOConfig:
    return load_config(words, check=False).config


def problems(*words: str) -> list[str]:
    config = config_of(*words)
    return [*config.section(ContextSettings).problems(), *config_problems(config)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["agent.context=sumarise"], "agent.context=sumarise must be one of keep, last_turns, "),
        (
            ["context.after_turns=4", "context.most_turns=2"],
            "context.most_turns=2 is the upper bound of context.after_turns=4",
        ),
        (
            ["context.most_turns=2"],
            "context.most_turns=2 is the upper bound of context.after_turns",
        ),
        (["context.thinking=[<think>]"], "context.thinking=['<think>'] must be two texts"),
        (["context.request=' '"], "context.request is empty: say what the policy is to write"),
        (["context.summary_text=so"], "context.summary_text='so' must have {summary}"),
        (
            [
                "agent.context=summarise",
                "data.max_prompt_length=512",
                "data.max_response_length=999",
            ],
            "context.summary_tokens=512 leaves no room for the task",
        ),
        (
            [
                "agent.context=summarise",
                "data.max_prompt_length=999",
                "data.max_response_length=512",
            ],
            "context.summary_tokens=512 leaves no room for turns",
        ),
        (
            [*SUMMARISE, "agent.max_turn=16384"],
            "agent.max_turn=16384 is above 16383, the most with agent.context=summarise",
        ),
        (
            [*SUMMARISE, "context.train_summaries=false", "agent.observation_loss_coef=0.5"],
            "agent.observation_loss_coef=0.5 learns all that has mask 0",
        ),
        (["agent.context=nowhere.py:Mine"], "agent.context=nowhere.py:Mine"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_a_sentence(words: list[str], says: str) -> None:
    (problem, *others) = problems(*words)
    assert problem.startswith(says), problem
    assert not others


def test_settings_that_fit_are_taken() -> None:
    for context in ("keep", "last_turns", "drop_tool_results", "drop_thinking", "summarise"):
        assert problems(f"agent.context={context}", *LONG) == []
    bounds = ["context.after_turns=3", "context.most_turns=3"]
    assert problems("agent.context=last_turns", *bounds) == []


def test_a_class_needs_a_method_of_that_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    pass\n")
    (problem,) = problems(f"agent.context={file}:Mine")
    assert f"agent.context={file}:Mine has no method next_context(self, standing)" in problem


def test_a_class_is_given_the_arguments_that_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n    def __init__(self, turns=3):\n        pass\n"
        "    def next_context(self, standing):\n        return None\n"
    )
    context = f"agent.context={file}:Mine"
    assert problems(context) == problems(context, "context.kwargs.turns=4") == []
    (problem,) = problems(context, "context.kwargs.turn=4")
    assert f"{context} takes (turns=3), and context.kwargs gives turn=" in problem


def context_problems(*words: str) -> list[str]:
    return [each for each in cross_problems(config_of(*words)) if "agent.context" in each]


def test_who_takes_no_turns_has_no_contexts() -> None:
    set_context = "agent.context=last_turns"
    assert context_problems(GAME, set_context) == []
    assert context_problems(set_context) == [
        "agent.context=last_turns is of episodes of several turns, and there is no environment: "
        "name one (agent.environment), or take the setting out"
    ]
    (of_program,) = context_problems("programs.command=python play.py", set_context)
    assert "agent.context=last_turns does not hold for a program, which says itself" in of_program
    tokens = "agent.max_episode_tokens=9"
    (of_program,) = [
        each
        for each in cross_problems(config_of("programs.command=python play.py", tokens))
        if "max_episode_tokens" in each
    ]
    assert "agent.max_episode_tokens=9 does not hold for a program" in of_program


def test_contexts_that_go_on_open_nothing() -> None:
    assert open_named(config_of(GAME), None) is None  # type: ignore[arg-type]


class FewTokens:
    """A template under which every prompt has 40 tokens."""

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return [0] * 40


def test_rows_that_are_too_short_for_summaries_are_refused_where_they_are_opened() -> None:
    words = [GAME, "agent.context=summarise", "context.summary_tokens=30"]
    tokens: object = FewTokens()
    fits = open_history(config_of(*words, "data.max_response_length=79"), tokens)  # type: ignore[arg-type]
    assert fits.reserved == 78
    with pytest.raises(HistoryFault, match=r"keeps 78 tokens of each context free, 40 for"):
        open_history(config_of(*words, "data.max_response_length=78"), tokens)  # type: ignore[arg-type]
