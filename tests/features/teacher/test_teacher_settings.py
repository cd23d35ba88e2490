"""The teacher's settings: what cannot be, and what nothing reads, each with its sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from features.teacher.checks import config_problems
from features.teacher.contexts import feedback, hint, sibling, with_text
from features.teacher.keeper import TOLD, open_keeper
from features.teacher.row import Sibling, TeacherRow
from features.teacher.settings import TeacherSettings
from training.config import PPOConfig
from training.config.loader import load_config
from workers.environments.reply import StepReply
from workers.rollout.episode import Episode, PromptSource, Row, Turn


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": "policy"}, "compares the policy with itself, and teaches nothing"),
        ({"model": "ema", "coef": 0, "reward_coef": 0}, "leave nothing to learn"),
    ],
)
def test_what_teaches_nothing_is_refused(settings: dict[str, Any], sentence: str) -> None:
    (problem,) = TeacherSettings(**settings).problems()
    assert sentence in problem


@pytest.mark.parametrize(
    ("settings", "unread"),
    [
        ({"coef": 0.5}, "teacher.coef=0.5 is read by nothing without teacher.model"),
        ({"model": "ema", "top_k": 3}, "teacher.top_k=3 is read by nothing with teacher.loss="),
        ({"model": "m", "ema_decay": 0.5}, "teacher.ema_decay=0.5 is read by nothing unless"),
        ({"model": "ema", "failed_below": 0.1}, "nothing with teacher.where=all"),
        ({"model": "ema", "loss": "top_k", "max_log_ratio": 1}, "nothing with teacher.loss=top_k"),
    ],
)
def test_what_nothing_reads_is_said(settings: dict[str, Any], unread: str) -> None:
    (warning,) = TeacherSettings(**settings).warnings()
    assert unread in warning


def config_of(settings: TeacherSettings, **others: dict[str, Any]) -> Any:
    """The defaults, with these settings of a teacher, and of other sections."""
    config: Any = PPOConfig()
    sections = {name: replace(config[name], **changed) for name, changed in others.items()}
    return replace(config, teacher=settings, **sections)


def problems_of(settings: dict[str, Any], others: dict[str, Any]) -> list[str]:
    return list(config_problems(config_of(TeacherSettings(**settings), **others)))


CHAT = {"data": {"return_raw_chat": True}}


@pytest.mark.parametrize(
    ("settings", "others", "sentence"),
    [
        ({"model": "./nowhere/m"}, {}, "teacher.model=./nowhere/m: there is no ./nowhere/m"),
        ({"model": "ema", "context": "hints"}, CHAT, "must be one of hint, feedback, sibling, or"),
        ({"model": "ema", "context": "no.py:tell"}, CHAT, "teacher.context=no.py:tell"),
        ({"model": "ema", "context": "FILE:number"}, CHAT, "is no function: write `def NAME(row)`"),
        ({"model": "ema", "context": "FILE:gone"}, CHAT, "gone"),
        (
            {"model": "ema", "context": "FILE:two"},
            CHAT,
            "it is called as two(row)",
        ),
        ({"model": "ema", "context": "sibling"}, CHAT, "an answer is a group of its own"),
        ({"model": "ema", "context": "hint"}, {}, "set data.return_raw_chat=true"),
        ({"model": "ema"}, {"trainer": {"train_finished_groups": True}}, "group by group"),
        ({"model": "ema"}, {"algorithm": {"use_pf_ppo": True}}, "draws rows anew"),
    ],
)
def test_what_contradicts_the_rest_is_refused(
    tmp_path: Path, settings: dict[str, Any], others: dict[str, Any], sentence: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("number = 5\ndef two(row, more):\n    return None\n")
    if "context" in settings:
        settings = settings | {"context": settings["context"].replace("FILE", str(file))}
    (problem,) = problems_of(settings, others)
    assert sentence in problem


def test_a_teacher_that_can_be_is_accepted_and_without_one_nothing_is_checked(
    tmp_path: Path,
) -> None:
    assert problems_of({"model": "ema", "context": "hint"}, CHAT) == []
    (problem,) = problems_of({"model": str(tmp_path)}, {})
    assert "holds no config.json with settings" in problem
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert problems_of({"model": str(tmp_path)}, {}) == []
    assert problems_of({"context": "hints"}, {}) == []


def test_a_model_of_other_words_is_refused_by_its_files(tmp_path: Path) -> None:
    def make(name: str, words: dict[str, int]) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        added = [{"id": 9, "content": "<end>"}]
        whole = {"model": {"vocab": words}, "added_tokens": added}
        (folder / "tokenizer.json").write_text(json.dumps(whole))
        return str(folder)

    policy = make("policy", {"a": 0, "b": 1})
    others = {"actor_rollout_ref": {"model": {"path": policy}}}
    assert problems_of({"model": make("alike", {"b": 1, "a": 0})}, others) == []
    (problem,) = problems_of({"model": make("swapped", {"a": 1, "b": 0})}, others)
    assert "has another vocabulary than the policy's" in problem
    assert "2 of which it lacks or has under another id" in problem


# What a teacher may be told


def row(**own: Any) -> TeacherRow:
    plain: dict[str, Any] = {
        "messages": [{"role": "user", "content": "guess"}],
        "answer": "5",
        "score": 0.0,
        "failed": True,
    }
    return TeacherRow(**plain | own)


def test_a_hint_is_the_environments_or_the_datasets() -> None:
    told = [{"role": "user", "content": "guess\nabove 4"}]
    assert hint(row(texts={"hint": "above 4"})) == told
    assert hint(row(columns={"hint": "above 4"})) == told
    assert hint(row(columns={"task": {"hint": "above 4"}})) == told
    assert hint(row(columns={"task": None})) is None


def test_feedback_is_the_attempt_and_what_came_of_it() -> None:
    (message,) = feedback(row(feedback="too low")) or []
    assert "5" in message["content"] and message["content"].endswith("too low")
    assert feedback(row()) is None


def test_a_sibling_is_told_where_it_is_better() -> None:
    others = (Sibling("6", 0.5), Sibling("7", 1.0), Sibling("8", 0.0))
    (message,) = sibling(row(siblings=others)) or []
    assert message["content"].endswith("7")
    assert sibling(row(siblings=others, score=1.0)) is None
    assert sibling(row()) is None


def test_a_text_goes_to_the_last_message_of_a_user_and_changes_none_in_place() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    assert with_text(messages, "more")[0]["content"] == "a\nmore"
    assert messages[0]["content"] == "a"
    system = [{"role": "system", "content": "s"}]
    assert with_text(system, "more")[1] == {"role": "user", "content": "more"}


def test_the_keeper_keeps_messages_texts_and_the_last_words() -> None:
    config = config_of(TeacherSettings(model="ema", context="hint"))
    keeper = open_keeper(config, None)  # type: ignore[arg-type]
    assert keeper is not None
    replies = [
        StepReply(texts={"hint": "above 2", "note": "a"}, messages=[said("higher")]),
        StepReply(texts={"hint": "above 4"}, messages=[said("too"), said("late")]),
    ]
    episode = Episode(
        group=0,
        sample=0,
        rows=[
            Row(prompt_ids=[1], source=PromptSource([said("guess")], [{"name": "tool"}])),
            Row(prompt_ids=[2]),
        ],
        turns=[Turn(text="5", finish_reason="stop", reply=reply) for reply in replies],
    )
    (name, told), *_ = keeper.after_policy(episode, {}).items()
    assert name == TOLD
    assert told["sources"] == [{"messages": [said("guess")], "tools": [{"name": "tool"}]}, None]
    assert told["texts"] == {"hint": "above 4", "note": "a"}
    assert told["feedback"] == "too\nlate"


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def config_at(section: str, given: dict[str, str]) -> PPOConfig:
    words = [f"{section}.{key}={value}" for key, value in given.items()]
    return load_config(words, check=False).config


def test_settings_are_read_under_algorithm_teacher_too() -> None:
    given = {"model": "ema", "context": "hint", "coef": "0.5", "where": "failed", "top_k": "8"}
    older = config_at("algorithm.teacher", given)
    newer = config_at("teacher", given)
    assert older == newer
    settings = older.section(TeacherSettings)
    assert (settings.model, settings.context, settings.coef) == ("ema", "hint", 0.5)
