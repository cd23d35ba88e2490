"""Writes a configuration as YAML: a run's own, and the reference of every documented key.

`python -m training.config.reference > configs/ppo_trainer.yaml` writes the reference after a change
of the settings; a test compares the two.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal, get_args, get_origin

from omegaconf import OmegaConf

from training.config.leaves import leaves
from training.config.schema.ppo import PPOConfig
from training.config.section import Section
from training.config.values import as_text

HEADER = (
    "# Every key with its default: python -m training.config.reference > configs/ppo_trainer.yaml"
)


def to_yaml(config: PPOConfig) -> str:
    """Writes the whole config as YAML; loading it again gives an equal config."""
    return str(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))


def reference_yaml() -> str:
    """Writes configs/ppo_trainer.yaml: every key with its default, choices and documentation."""
    return "\n".join([HEADER, *_lines_of(PPOConfig(), indent="")]) + "\n"


def _lines_of(section: Section, indent: str) -> Iterator[str]:
    """Writes a section's keys, one a line, its inner sections indented."""
    settings = dict(leaves(section))
    for name, value in vars(section).items():
        if isinstance(value, Section):
            docstring = type(value).__doc__ or ""
            yield f"{indent}{name}:  # {docstring.splitlines()[0]}"
            yield from _lines_of(value, indent + "  ")
        else:
            setting = settings[name]
            yield f"{indent}{name}: {as_text(value)}  # {setting.doc}{_choices(setting.kind)}"


def _choices(kind: Any) -> str:
    """Lists the words that a field takes, where it takes only some."""
    for alternative in (kind, *get_args(kind)):
        if get_origin(alternative) is Literal:
            return f" ({' | '.join(get_args(alternative))})"
    return ""


if __name__ == "__main__":
    print(reference_yaml(), end="")
