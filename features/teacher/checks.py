"""Checks the teacher against the rest of a config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from custom.env_calls import parameters_of
from features.teacher.settings import EMA, POLICY, TeacherSettings
from training.config.resources.files import how_to_make
from training.config.resources.models import missing_place, read_model_config
from training.config.resources.user_code import loading_failure

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig

BUILT_IN = ("hint", "feedback", "sibling")


def config_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what is wrong with the teacher of this config."""
    settings = config.section(TeacherSettings)
    if settings.model is None:
        return
    if settings.model not in (POLICY, EMA):
        missing = missing_place(settings.model)
        if missing is not None:
            yield (
                f"teacher.model={settings.model}: {missing}{how_to_make(settings.model)}; "
                "allowed: policy, ema, a model's folder or a hub name"
            )
        else:
            yield from _model_problems(settings.model, str(config.actor_rollout_ref.model.path))
    if settings.context is not None:
        yield from _context_problems(config, settings.context)
    if config.trainer.train_finished_groups:
        yield (
            "teacher.model is set, and trainer.train_finished_groups=true makes the update group "
            "by group, which the teacher does not see: set one of them to null or false"
        )
    if config.algorithm.use_pf_ppo:
        yield (
            "teacher.model is set, and algorithm.use_pf_ppo=true draws rows anew, some of them "
            "several times: set one of them to null or false"
        )


def _model_problems(teacher: str, policy: str) -> Iterator[str]:
    """Yields that a folder holds no model, or one with other words than the policy's.

    Words that cannot be read as a file are compared where the teacher is loaded.
    """
    if Path(teacher).is_dir():
        try:
            read_model_config(teacher)
        except (OSError, ValueError) as error:
            yield f"teacher.model={teacher}: {error}"
            return
    known, own = (vocabulary_of(Path(path).expanduser()) for path in (teacher, policy))
    if known is None or own is None or known == own:
        return
    others = sum(known.get(word) != number for word, number in own.items())
    yield (
        f"teacher.model={teacher} has another vocabulary than the policy's {policy} "
        f"({len(known)} words, {len(own)} here, {others} of which it lacks or has under another "
        "id), so that the ids of a row are other words to it: take a model of the same family"
    )


def vocabulary_of(folder: Path) -> dict[str, int] | None:
    """Reads a model's words and their ids from its tokenizer.json; None where it holds none."""
    try:
        file = json.loads((folder / "tokenizer.json").read_bytes())
        words: dict[str, int] = dict(file["model"]["vocab"])
        return words | {added["content"]: added["id"] for added in file["added_tokens"]}
    # Not there, or in a form of its own.
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _context_problems(config: PPOConfig, context: str) -> Iterator[str]:
    """Yields that a context cannot be asked."""
    from data.loading import load_object

    setting = f"teacher.context={context}"
    if ":" not in context and context not in BUILT_IN:
        yield f"{setting} must be one of {', '.join(BUILT_IN)}, or FILE.py:FUNCTION of yours"
        return
    if ":" in context:
        failures = list(loading_failure(setting, load_object, context, "teacher.context"))
        yield from failures
        if not failures:
            yield from _function_problems(setting, load_object(context, "teacher.context"))
    if context == "sibling" and config.actor_rollout_ref.rollout.n == 1:
        yield (
            f"{setting} tells a better answer of the group, and with "
            "actor_rollout_ref.rollout.n=1 an answer is a group of its own: set "
            "actor_rollout_ref.rollout.n to 2 or more, or take another context"
        )
    if not config.environments and not config.data.return_raw_chat:
        yield (
            f"{setting} reads the messages of the dataset's rows, which the batch does not keep: "
            "set data.return_raw_chat=true"
        )


def _function_problems(setting: str, function: Any) -> Iterator[str]:
    """Yields that a context cannot be called with a row."""
    if not callable(function):
        yield (
            f"{setting} is no function: write `def NAME(row)`, which returns the messages that "
            "the teacher reads (features/teacher/README.md)"
        )
        return
    try:
        signature = parameters_of(function)
    except (TypeError, ValueError):
        # A function that is written in C may have none.
        return
    try:
        signature.bind(None)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        yield f"{setting} takes {signature}; it is called as {name}(row): {error}"
