"""Reads YAML and command line into a PPOConfig: strictly, and reporting all errors at once.

Invariant: what is returned has been converted to the types of its fields and, unless asked not to
be, checked; whatever is wrong is in one ConfigError. The layers, and which of them wins, are in
`layers`; the words of a command line are in `command_line`.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from training.config.checks import check_config
from training.config.command_line import asks_for_help, read_command_line, usage
from training.config.layers import COMMAND_LINE, Layers
from training.config.leaves import build
from training.config.reference import reference_yaml
from training.config.resources.engines import describe_unasked_engine
from training.config.schema.ppo import PPOConfig
from training.config.values import convert, describe_fault, fault_location

__all__ = ["ConfigError", "LoadedConfig", "load_config", "read_config"]


@dataclass(frozen=True)
class LoadedConfig:
    """Holds a configuration, and where each of its values came from.

    Attributes:
        config: all settings.
        sources: for each dotted key "default", the name of a YAML file, or "command line".
        explain: whether the command line asks for --explain, or --explain-all.
        explain_all: whether it asks for --explain-all.
        notes: what became of foreign keys, where those were too many to be logged one by one.
        unchecked: a sentence of what the checks left out, for --explain to end with.
    """

    config: PPOConfig
    sources: dict[str, str]
    explain: bool = False
    explain_all: bool = False
    unchecked: str | None = None
    notes: tuple[str, ...] = ()


class ConfigError(ValueError):
    """Lists everything that is wrong with a configuration, one problem per line.

    Attributes:
        problems: one text each.
        loaded: what could be read, with the defaults of values that are wrong; for --explain.
    """

    def __init__(self, problems: list[str], loaded: LoadedConfig | None = None) -> None:
        self.problems = problems
        self.loaded = loaded
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"  - {problem}" for problem in problems]
        super().__init__("\n".join([f"{count} in the configuration:", *lines]))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        """Pickles the problems, as a rank hands them on."""
        return type(self), (self.problems,)


def load_config(argv: list[str], *, check: bool = True, ask_engine: bool = True) -> LoadedConfig:
    """Reads a command line (without the program's name).

    Args:
        check: also report impossible combinations and whatever this machine cannot run (checks.py),
            with bad values at their defaults; left out where a file cannot be read, as its values
            would only seem to be missing.
        ask_engine: the class of the rollout engine is asked, too; False: the caller does that, as
            it imports torch (`resources.engines.ask_engine_class`).
    Raises:
        ConfigError: with all problems together. `--help` prints the keys and raises SystemExit(0).
    """
    if asks_for_help(argv):
        print(usage() + "\n" + reference_yaml())
        raise SystemExit(0)
    command_line = read_command_line(argv)
    layers = Layers()
    layers.problems += command_line.problems
    layers.file_problems += command_line.file_problems
    if command_line.file is not None:
        layers.read_yaml(command_line.file)
    for override in command_line.overrides:
        layers.add_override(override)
    layers.end_layer(COMMAND_LINE)
    layers.translator.complete(layers)
    notes = layers.log_notes()
    config = _make_config(layers)
    if check and not layers.file_problems:
        asks_all = not command_line.explain
        ask_engine = ask_engine and asks_all and not layers.problems
        problems = check_config(
            config, ask_hub=asks_all, ask_engine=ask_engine, warns=not layers.problems
        )
        layers.report_checked(problems)
    unchecked = None
    if check and command_line.explain:
        unchecked = describe_unasked_engine(config)
    loaded = LoadedConfig(
        config,
        layers.sources(),
        explain=command_line.explain,
        explain_all=command_line.explain_all,
        unchecked=unchecked,
        notes=tuple(notes),
    )
    _raise_problems(layers, loaded)
    return loaded


def read_config(
    config: PPOConfig | Mapping[str, Any] | DictConfig,
    *,
    own_data: bool = False,
    own_agents: bool = False,
    check: bool = True,
) -> PPOConfig:
    """Reads an OmegaConf or a mapping, in verl's form too, and checks it.

    A typed config is returned as it is.

    Args:
        own_data: datasets and environments are given as objects, so that the config need not name
            any.
        own_agents: agents are given as objects, which are then what the config acts in where it
            names no environment.
        check: as of `load_config`.
    Raises:
        ConfigError: with all problems together.
    """
    if isinstance(config, PPOConfig):
        return config.acting_in_given if own_agents else config
    tree = OmegaConf.to_container(config) if OmegaConf.is_config(config) else config
    source = "the given config"
    layers = Layers()
    layers.add_tree(tree, source)
    layers.end_layer(source)
    layers.translator.complete(layers)
    layers.log_notes()
    made = _make_config(layers, own_agents)
    if check:
        problems = check_config(made, own_data=own_data, warns=not layers.problems)
        layers.report_checked(problems)
    _raise_problems(layers, LoadedConfig(made, layers.sources()))
    return made


def _make_config(layers: Layers, own_agents: bool = False) -> PPOConfig:
    """Makes the config, with defaults where values are wrong, which it reports to the layers."""
    config: PPOConfig = build(PPOConfig(), _converted(layers))
    if own_agents:
        config = config.acting_in_given
    layers.problems += layers.translator.contradictions(layers.foreign_values, config)
    return config


def _raise_problems(layers: Layers, loaded: LoadedConfig) -> None:
    """Raises ConfigError where anything is wrong."""
    problems = layers.file_problems + layers.problems
    if problems:
        raise ConfigError(problems, loaded)


def _converted(layers: Layers) -> dict[str, Any]:
    """Returns the values as the types of their fields; reports what is wrong with the others."""
    links = {key for key, sourced in layers.values.items() if "${" in str(sourced.value)}
    link_targets = _link_targets(layers) if links else OmegaConf.create()
    converted = {}
    for key, sourced in layers.values.items():
        value = sourced.value
        try:
            if key in links:
                value = _resolved(value, link_targets)
            converted[key] = convert(value, layers.schema[key])
        except ValidationError as error:
            _report_faults(layers, key, value=value, source=sourced.source, error=error)
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            layers.report_error(key, value, sourced.source, error)
    return converted


def _report_faults(
    layers: Layers, key: str, *, value: Any, source: str, error: ValidationError
) -> None:
    """Reports the faults that pydantic found in a value, at their places within it.

    Where a value may have several types, and has none of them, that is one fault.
    """
    wrong_values: dict[str, Any] = {}
    sentences: dict[str, list[str]] = {}
    for fault in error.errors():
        place = key + fault_location(fault)
        wrong_values.setdefault(place, fault["input"] if fault["loc"] else value)
        sentence = describe_fault(fault, layers.schema[key]).splitlines()[0]
        sentences.setdefault(place, []).append(sentence)
    for place, wrong_value in wrong_values.items():
        first, *others = dict.fromkeys(sentences[place])
        problem = ", or ".join([first, *(each.removeprefix("must be ") for each in others)])
        layers.report(place, wrong_value, source, problem)


def _resolved(value: Any, link_targets: DictConfig) -> Any:
    """Returns the value with `${...}` in it replaced by what that refers to."""
    # As the one entry of a list: a value need not be a mapping.
    holder = OmegaConf.create([value], parent=link_targets)
    return OmegaConf.to_container(holder, resolve=True)[0]


def _link_targets(layers: Layers) -> DictConfig:
    """Returns what `${...}` may refer to: every value that OmegaConf can hold."""
    targets = OmegaConf.create()
    for key in layers.schema:
        with suppress(OmegaConfBaseException):
            OmegaConf.update(targets, key, layers.value_of(key), merge=False)
    return targets
