"""Reads YAML and command line into a PPOConfig: strictly, all errors at once, knowing where each value came from.

    python main.py CONFIG.yaml key=value ...          CONFIG.yaml holds only what differs from the defaults
    python main.py --config-path DIR --config-name NAME key=value ...
    +key=value, ++key=value   the same as key=value          ~key   back to the default
    --explain   print every value, its source and its reader     -h, --help   print every key with its documentation
    --plan      print the memory that the run would take, phase by phase; loads no model

Later wins: defaults, `extends: other.yaml`, the YAML, the command line. Internally all layers are one flat table
{"data.train_batch_size": value}, so that a mistake never hides the next one.
"""

import ast
import csv
import logging
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from data.texts import did_you_mean, same_words, say, table
from training.config.algorithm_settings import RolloutCorrectionConfig
from training.config.checks import check_config
from training.config.section import (
    Section,
    as_text,
    build,
    convert,
    fault_at,
    leaves,
    located,
    parse,
    said_of,
)
from training.config.settings import PPOConfig

__all__ = [
    "ConfigError",
    "LoadedConfig",
    "explain",
    "load_config",
    "read_config",
    "reference_yaml",
    "to_yaml",
]

log = logging.getLogger(__name__)
# Giving one of an environment's settings drops what an earlier layer gave for the others.
RIVALS = {
    "path": ("name", "kwargs", "prompt_template"),
    "name": ("path", "cls", "kwargs", "prompt_template"),
}
# The keys of verl that are called otherwise here, mean nothing here, or ask for what is not there.
_TABLE: dict[str, Any] = table(__file__, "verl_keys")
SEVERAL_TURNS, ONE_LIMIT = _TABLE["several_turns"], _TABLE["one_limit"]
PROJECT = Path(__file__).resolve().parents[2]
# In the order in which they are searched.
FOLDERS = ("workers", "training", "custom", "data", "examples")
# What a section is called where its settings are read; and who looks at settings without using them.
SECTION = {"cfg", "config", "own", "choice", "settings", "given", "spec"}
ONLOOKERS = ("training/config/", "training/run/plan.py", "training/run/alarms.py", "examples/")
Reads = dict[str, list[tuple[str, set[str]]]]


class ConfigError(ValueError):
    """Says everything that is wrong with a configuration, one problem per line."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            f"{count} in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )


class LoadedConfig(NamedTuple):
    """Holds a configuration and, for each dotted key, "default", the name of a YAML file, or "command line"."""

    config: PPOConfig
    sources: dict[str, str]
    explain: bool = False


def load_config(argv: list[str], *, check: bool = True) -> LoadedConfig:
    """Reads a command line (without the program's name).

    Args:
        check: also report impossible combinations and whatever this machine cannot run (checks.py), with bad values
            at their defaults; left out where a file cannot be read, as its values would only seem to be missing.
    Raises:
        ConfigError: with all problems together. `--help` prints the keys and raises SystemExit(0).
    """
    if {"-h", "--help"} & set(argv):
        print(__doc__ + "\n" + reference_yaml())
        raise SystemExit(0)
    reader = _Reader()
    explain_it = reader.read_command_line(argv)
    return reader.loaded(
        partial(check_config, ask_hub=not explain_it) if check else None, explain_it
    )


def read_config(
    config: PPOConfig | Mapping[str, Any] | DictConfig,
    *,
    own_data: bool = False,
    check: bool = True,
) -> PPOConfig:
    """Returns a typed config as it is; reads an OmegaConf or a mapping, in verl's form too, and checks it.

    Args:
        own_data: datasets and environments are given as objects, so that the config need not name any.
        check: as of `load_config`.
    Raises:
        ConfigError: with all problems together.
    """
    if isinstance(config, PPOConfig):
        return config
    reader = _Reader()
    reader.read_tree(
        OmegaConf.to_container(config) if OmegaConf.is_config(config) else config,
        "the given config",
    )
    return reader.loaded(partial(check_config, own_data=own_data) if check else None).config


def explain(loaded: LoadedConfig) -> str:
    """Lists every value with where it came from and the file that reads it, one per line."""
    reads = attribute_reads()
    rows = ((key, as_text(leaf.value), loaded.sources[key]) for key, leaf in leaves(loaded.config))
    return "\n".join(
        f"{key:<66} {value:<28} {source:<14} {reader(key, reads)}" for key, value, source in rows
    )


def attribute_reads() -> Reads:
    """Finds, by name, what reads attributes of that name: the file, and the words of its name and before theirs."""
    found: Reads = {}
    for path in (path for folder in FOLDERS for path in sorted((PROJECT / folder).rglob("*.py"))):
        file = str(path.relative_to(PROJECT))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                words = set(re.findall("[a-z]+", f"{file} {ast.unparse(node.value)}"))
                found.setdefault(node.attr, []).append((file, words))
    return found


def reader(key: str, reads: Reads) -> str:
    """Names the file that most likely reads a setting: with most of its sections' words before its name."""
    sections, _, name = key.rpartition(".")
    own = set(re.findall("[a-z]+", sections or name))
    known = [(file, words) for file, words in reads.get(name, []) if words & (own | SECTION)]
    # What else is read has a property behind it.
    default = ("training/config/settings.py", own)
    return max(
        known, key=lambda at: (not at[0].startswith(ONLOOKERS), len(at[1] & own)), default=default
    )[0]


def sizes(config: PPOConfig) -> str:
    """Tells in plain words what follows from the batch sizes: rows and tokens of a step, an update, a micro-batch.

    Raises:
        ValueError: they do not divide.
    """
    plan, row, n = config.batch_plan, config.data.row_length, config.actor_rollout_ref.rollout.n
    rows = plan.prompts * n
    lines = [say("step_sizes", prompts=plan.prompts, n=n, rows=rows, row=row, tokens=rows * row)]
    for name, update in {
        "policy": plan.actor,
        **({"critic": plan.critic} if config.need_critic else {}),
    }.items():
        part, ranks = rows // update.mini_batches, plan.ranks
        lines.append(
            say(
                "update_sizes",
                name=name,
                updates=update.updates,
                part=part,
                own=part // ranks,
                ranks=ranks,
            )
        )
    return "\n".join(lines)


def to_yaml(config: PPOConfig) -> str:
    """Writes the whole config as YAML; loading it again gives an equal config."""
    return str(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))


def reference_yaml() -> str:
    """Writes configs/ppo_trainer.yaml: every key with its default, its choices and its documentation."""
    lines = [
        "# Every key with its default: python -m training.config.loader --reference > configs/ppo_trainer.yaml"
    ]
    return "\n".join([*lines, *_reference_lines(PPOConfig(), "")]) + "\n"


def _reference_lines(section: Section, indent: str) -> Iterator[str]:
    """Writes a section's keys, one a line, its inner sections indented."""
    own = dict(leaves(section))
    for name, value in vars(section).items():
        if isinstance(value, Section):
            yield f"{indent}{name}:  # {(type(value).__doc__ or '').splitlines()[0]}"
            yield from _reference_lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {as_text(value)}  # {own[name].doc}{_choices(own[name].kind)}"


def _choices(kind: Any) -> str:
    """Lists the words that a field takes, where it takes only some."""
    words = next(
        (get_args(part) for part in (kind, *get_args(kind)) if get_origin(part) is Literal), ()
    )
    return f" ({' | '.join(words)})" if words else ""


class _Reader:
    """Collects layers, sources and problems; `loaded` turns them into a config."""

    def __init__(self) -> None:
        self.schema = dict(leaves(PPOConfig()))
        self.sections = {
            key[: dot.start()] for key in self.schema for dot in re.finditer(r"\.", key)
        }
        # What layers that ended gave, each value with its source, and the layer that is read.
        self.given: dict[str, tuple[Any, str]] = {}
        self.layer: dict[str, Any] = {}
        # Files that could not be read, whose values are missing, and what else is wrong.
        self.unread: list[str] = []
        self.problems: list[str] = []
        # What verl's keys gave that are called otherwise here, or have no effect.
        self.of_verl: dict[str, Any] = {}

    def read_command_line(self, argv: list[str]) -> bool:
        """Reads the one YAML that is named, then the overrides; returns whether --explain was given."""
        options = ArgumentParser(add_help=False, allow_abbrev=False)
        for name in ("--config-path", "--config-name"):
            options.add_argument(name, nargs="?", const="")
        options.add_argument("--explain", action="store_true")
        options.add_argument("words", nargs="*")
        given, unknown = options.parse_known_intermixed_args(argv)
        self.problems += [f"{word!r} is no option (see --help)" for word in unknown]
        overrides = [word for word in given.words if "=" in word or re.match(r"~[a-z]", word)]
        files = [word for word in given.words if word not in overrides]
        if given.config_name is not None:
            path = Path(
                "configs" if given.config_path is None else given.config_path, given.config_name
            )
            files.append(str(path if path.suffix in (".yaml", ".yml") else f"{path}.yaml"))
        elif given.config_path is not None:
            self.unread.append(f"--config-path={given.config_path} needs --config-name=NAME too")
        if len(files) > 1 or not all(file.endswith((".yaml", ".yml")) for file in files):
            self.unread.append(say("one_yaml", words=" ".join(files)))
        elif files:
            self._read_yaml(Path(located(files[0])).resolve())
        for override in overrides:
            self._read_override(override)
        self.read_tree({}, "command line")
        return bool(given.explain)

    def _read_yaml(self, path: Path, children: tuple[Path, ...] = ()) -> None:
        """Reads a YAML file after the one that it extends; `children` are the files that led here."""
        try:
            tree = OmegaConf.to_container(OmegaConf.load(path))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
            self.unread.append(f"cannot read {path} as YAML in UTF-8: {error}")
            return
        if not isinstance(tree, dict):
            self.unread.append(f"{path.name} holds a list; it must hold keys with values")
            return
        if tree.pop("defaults", None) is not None:
            self.unread.append(
                f"{path.name}: `defaults:` lists are Hydra's; write `extends: other.yaml` instead"
            )
        named, files = tree.pop("extends", None), (*children, path)
        parent = (path.parent / str(named)).resolve()
        if named is not None and parent in files:
            self.unread.append(
                f"`extends` goes in a circle: {' -> '.join(file.name for file in (*files, parent))}"
            )
        elif named is not None:
            self._read_yaml(parent, files)
        self.read_tree(tree, path.name)

    def _read_override(self, override: str) -> None:
        """Reads +KEY=VALUE or ~KEY; where any key may be given, the value is YAML whatever it looks like."""
        if override.startswith("~"):
            self._reset(override[1:])
            return
        key, _, text = override.lstrip("+").partition("=")
        leaf = self.schema.get(key)
        if leaf and not text and leaf.plain is not str and not leaf.takes_null:
            log.warning("%s= (command line) has no value: left as it is", key)
            return
        try:
            self._add({key: parse(text, as_yaml=leaf is None)}, "command line")
        except yaml.YAMLError as error:
            self._report(key, text, "command line", error)

    def _reset(self, key: str) -> None:
        """Takes a key, or a section's keys, back to the default, and with them what was wrong with them."""
        known = [name for name in self.schema if name == key or name.startswith(f"{key}.")]
        gone = [problem for problem in self.problems if problem.startswith((f"{key}=", f"{key}."))]
        self.problems = [problem for problem in self.problems if problem not in gone]
        if not (known or gone or not_here(key, None)):
            self._report_unknown(key, "~", "command line")
        for name in known:
            self.given.pop(name, None)
            self.layer.pop(name, None)

    def read_tree(self, tree: Mapping[Any, Any], source: str) -> None:
        """Reads the rest of a layer, and ends it; another environment's settings do not stay with one that it names."""
        self._add(tree, source)
        named = [
            name for name in RIVALS if not _is_null(self.layer.get(f"agent.environment.{name}"))
        ]
        for other in (other for name in named for other in RIVALS[name]):
            self.given.pop(f"agent.environment.{other}", None)
        for key, value in self.layer.items():
            self.given[key] = _merged(self.given.get(key, (None,))[0], value), source
        self.layer = {}

    def _add(self, tree: Mapping[Any, Any], source: str, prefix: str = "") -> None:
        """Adds nested values to the layer that is read, descending into sections and into what is unknown.

        A name may be of several words, as an override's is.
        """
        for name, value in tree.items():
            word, *further = str(name).split(".")
            key = f"{prefix}{word}"
            for part in reversed(further):
                value = {part: value}
            # Of verl's own way to build objects.
            if word == "_target_" or (_is_null(value) and key in _TABLE["null_says_nothing"]):
                continue
            if key in self.schema:
                self.layer[key] = _merged(self.layer.get(key), value)
            elif isinstance(value, Mapping) and (value or key in self.sections):
                self._add(value, source, f"{key}.")
            elif key not in self.sections:
                self._add_foreign(key, value, source)
            elif value is not None:
                inner = next(name for name in self.schema if name.startswith(f"{key}."))
                self._report(key, value, source, f"is a section; set its keys, as in {inner}=VALUE")

    def _add_foreign(self, key: str, value: Any, source: str) -> None:
        """Takes a key that is not ours: moved, without meaning here, of a part that is missing, or a mistake."""
        new = moved_to(key)
        said = not_here(new or key, value)
        if new is not None and _is_null(value):
            return
        if new is not None:
            if said is None:
                log.warning("%s (%s) is called %s here; moved", key, source, new)
            self.of_verl[key] = value
            # Two values of one limit are compared in the end.
            if new not in ONE_LIMIT.values() or new not in self.layer:
                self._add({new: value}, source)
        elif said is None:
            self._report_unknown(key, value, source)
        elif said[1] == logging.ERROR:
            self._report(key, value, source, said[0])
        else:
            self.of_verl[key] = value
            log.log(said[1], "%s=%s (%s) has no effect here: %s", key, value, source, said[0])

    def _report(self, key: str, value: Any, source: str, problem: str | Exception) -> None:
        """Notes what is wrong with a value, in the form of all such problems."""
        advice = "; check brackets and quotes" if isinstance(problem, yaml.YAMLError) else ""
        self.problems.append(f"{key}={value!r} ({source}): {str(problem).splitlines()[0]}{advice}")

    def _report_unknown(self, key: str, value: Any, source: str) -> None:
        """Notes a key that does not exist, with the nearest that does."""
        whole = [name for name in self.schema if name.endswith(f".{key}")]
        last = [name for name in self.schema if name.endswith("." + key.split(".")[-1])]
        alike = [
            name for name in self.schema if same_words(key.split(".")[-1], name.split(".")[-1])
        ]
        near = (
            did_you_mean(key, whole, 0.0)
            or did_you_mean(key, alike, 0.4)
            or did_you_mean(key, last, 0.0)
        )
        self._report(key, value, source, f"there is no such key.{near or ' --help lists all keys'}")

    def loaded(
        self, check: Callable[[PPOConfig], list[str]] | None, explain_it: bool = False
    ) -> LoadedConfig:
        """Makes the config; raises ConfigError with what is wrong, and with what `check` finds.

        Where a value is wrong it is checked with its default; unless a value is missing because its file could not be
        read: without it no check means anything.
        """
        config: PPOConfig = build(PPOConfig(), self._converted())
        for theirs, key in ONE_LIMIT.items():
            limit, ours = self.of_verl.get(theirs), attrgetter(key)(config)
            if limit is not None and str(limit) != str(ours):
                self.problems.append(
                    f"{theirs}={limit} and {key}={ours} are the same limit: give one"
                )
        if str(self.of_verl.get(SEVERAL_TURNS)).lower() == "true" and not config.environments:
            self.problems.append(
                f"{SEVERAL_TURNS}=true: set what the agent acts in, agent.environment.name or .path"
            )
        self.problems += check(config) if check is not None and not self.unread else []
        sources = {key: self.given.get(key, (None, "default"))[1] for key in self.schema}
        loaded, problems = LoadedConfig(config, sources, explain_it), self.unread + self.problems
        if problems and explain_it:
            # Most wanted when something is wrong.
            print(explain(loaded))
        if problems:
            raise ConfigError(problems)
        return loaded

    def _converted(self) -> dict[str, Any]:
        """Returns the given values as the types of their fields; notes what is wrong with the others."""
        linked = {key for key, (value, _) in self.given.items() if "${" in str(value)}
        made, root = {}, self._root() if linked else None
        for key, (value, source) in self.given.items():
            try:
                if key in linked:
                    value = OmegaConf.to_container(
                        OmegaConf.create([value], parent=root), resolve=True
                    )[0]
                made[key] = convert(value, self.schema[key])
            except ValidationError as error:
                for fault in error.errors():
                    wrong = fault["input"] if fault["loc"] else value
                    self._report(
                        key + fault_at(fault), wrong, source, said_of(fault, self.schema[key])
                    )
            except (OmegaConfBaseException, yaml.YAMLError) as error:
                self._report(key, value, source, error)
        return made

    def _root(self) -> DictConfig:
        """Returns what `${...}` may refer to: every value that OmegaConf can hold."""
        root = OmegaConf.create()
        for key, leaf in self.schema.items():
            with suppress(OmegaConfBaseException):
                OmegaConf.update(root, key, self.given.get(key, (leaf.value,))[0], merge=False)
        return root


def moved_to(key: str) -> str | None:
    """Returns the name here of a key of verl's that lives elsewhere."""
    fitting = ((old, new) for old, new in _TABLE["moved"].items() if fnmatchcase(key, old))
    return next((new.replace("*", key[len(old) - 1 :]) for old, new in fitting), None)


def not_here(key: str, value: Any) -> tuple[str, int] | None:
    """Returns what is said of a key of verl's, and at which logging level: ERROR refuses; None where it is unknown."""
    for reason, patterns in _TABLE["not_here"].items():
        for pattern, asks, accepted in (entry.partition("=") for entry in patterns.split()):
            if fnmatchcase(key, pattern):
                given, nothing = str(value).lower(), (accepted or "false|[]|{}").lower().split("|")
                at_rest = given.startswith("${") or given in ("", "none", *nothing)
                return (
                    reason,
                    logging.WARNING if not asks else logging.DEBUG if at_rest else logging.ERROR,
                )
    return None


def _merged(before: Any, after: Any) -> Any:
    """Merges two mappings, and those inside them; elsewhere, and where it is empty, the later value counts."""
    if not (isinstance(before, dict) and isinstance(after, dict) and after):
        return after
    return before | {name: _merged(before.get(name), value) for name, value in after.items()}


def _is_null(value: Any) -> bool:
    """Says whether a value, as YAML or as text, is null."""
    return str(value).lower() in ("none", "null", "")


if __name__ == "__main__":
    # --reference, the one thing to ask for.
    print(reference_yaml(), end="")


SEQUENCE_REJECTION = RolloutCorrectionConfig(
    rollout_rs="seq_mean_k1", rollout_rs_threshold="0.8_1.25"
)
# Of the samples, as columns of the table.
AGES = ("of fresh samples", "one update later", "two updates later")


def bias_line(config: PPOConfig) -> str:
    """Tells the row of the configured estimator, loss, aggregation and correction in one line."""
    correction, mode = (
        config.algorithm.rollout_correction,
        config.actor_rollout_ref.actor.loss_agg_mode,
    )
    estimator = config.algorithm.adv_estimator.removesuffix("_vectorized")
    loss = (
        "vanilla"
        if correction.bypass_mode and correction.loss_type == "ppo_clip"
        else config.loss_mode
    )
    with Path(__file__).with_name("bias.csv").open() as file:
        rows = {
            (row["estimator"], row["loss"], row["correction"]): row for row in csv.DictReader(file)
        }
    if (
        not config.algorithm.norm_adv_by_std_in_grpo
        and (f"{estimator} no_std", loss, "old") in rows
    ):
        estimator += " no_std"
    # The others have its direction.
    column = mode if mode.endswith("token-mean") else "seq-mean-token-sum"
    key = (estimator, loss, _form(correction))
    if key not in rows:
        return say("bias_unknown", key=", ".join(key))
    corrected = f"rollout correction {key[2]}" if key[2] != "old" else "uncorrected"
    told = "; ".join(f"{rows[key][f'{column}/{stale}']} {age}" for stale, age in enumerate(AGES))
    return say(
        "bias", estimator=estimator, loss=loss, column=column, corrected=corrected, told=told
    )


def _form(correction: RolloutCorrectionConfig) -> str:
    """Names the correction as the table does; weights with other limits than its own are the nearest."""
    if correction.rollout_rs or correction.rollout_token_veto_threshold:
        return (
            "sequence rejection"
            if correction == SEQUENCE_REJECTION
            else "rejection of another kind"
        )
    band = " band" if "_" in correction.rollout_is_threshold else ""
    return "old" if correction.rollout_is is None else correction.rollout_is + band
