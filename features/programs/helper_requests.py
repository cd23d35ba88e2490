"""Tells a program's helper requests from those that are trained.

Agents ask beside their work: for a title of the conversation, whether a name is free, "hello". The
policy answers these too, and learns nothing from them. Invariant: without `programs.train_models`
and `programs.helper_prompts` every request is trained.
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from features.programs.exchange import AskedCompletion


def is_helper(
    asked: AskedCompletion, train_models: Sequence[str], helper_prompts: Sequence[str]
) -> bool:
    """Checks whether what is sampled for a request is kept out of training.

    Args:
        train_models: names, such as `gpt-*`; empty: all are trained.
        helper_prompts: regular expressions, any of which is found in the system text of a helper.
    """
    if train_models and not any(fnmatchcase(asked.model, name) for name in train_models):
        return True
    if not helper_prompts:
        return False
    system = "\n".join(
        message["content"] for message in asked.messages if message["role"] == "system"
    )
    return any(re.search(prompt, system) for prompt in helper_prompts)


def unreadable_prompts(helper_prompts: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with patterns of system texts."""
    for prompt in helper_prompts:
        try:
            re.compile(prompt)
        except re.error as error:
            yield (
                f"programs.helper_prompts: {prompt!r} is no regular expression ({error}); one that "
                "is found in a helper's system text is meant, such as 'short title'"
            )
