"""YAML and command line -> PPOConfig: strict, all errors at once, and able to say where each value came from.

    python main.py CONFIG.yaml key=value ...          CONFIG.yaml holds only what differs from the defaults
    python main.py --config-path DIR --config-name NAME key=value ...
    +key=value, ++key=value   the same as key=value          ~key   back to the default
    --explain   print every value with its source            -h, --help   print every key with its documentation

Later wins: defaults, `extends: other.yaml`, the YAML, the command line. Internally all layers are one flat table
{"data.train_batch_size": value}, so that a mistake never hides the next one.
"""

import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.names import did_you_mean
from training.config.checks import check_config
from training.config.section import leaves
from training.config.settings import EnvironmentChoice, PPOConfig
from training.config.verl_keys import IGNORED, INPUT_PATHS, MOVED, ONE_LIMIT, SEVERAL_TURNS, UNAVAILABLE

log = logging.getLogger(__name__)
PROJECT_ROOT = Path(__file__).resolve().parents[2]
DOTTED = re.compile(r"[a-z_]\w*(?:\.\w+)+")  # keys in the text of a problem


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one problem per line."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems))


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A configuration and, for each dotted key, "default", the name of a YAML file, or "command line"."""

    config: PPOConfig
    sources: dict[str, str]
    explain: bool = False


def load_config(argv: list[str], *, check: bool = True) -> LoadedConfig:
    """Read a command line (without the program's name).

    Args:
        check: also report impossible combinations and whatever this machine cannot run (config_checks), with bad values
            at their defaults; left out where a file cannot be read, as its values would only seem to be missing.
    Raises:
        ConfigError: with all problems together. `--help` prints the keys and raises SystemExit(0).
    """
    if {"-h", "--help"} & set(argv):
        print(__doc__ + "\n" + reference_yaml())
        raise SystemExit(0)
    reader = _Reader()
    explain_it = reader.read_command_line(argv)
    config = reader.build()
    if check and reader.complete:
        reader.problems += [problem for problem in check_config(config) if not reader.has_reported(problem)]
    sources = {key: reader.sources.get(key, "default") for key in reader.schema}
    loaded = LoadedConfig(config=config, sources=sources, explain=explain_it)
    if reader.problems:
        if explain_it:  # most wanted when something is wrong
            print(explain(loaded))
        raise ConfigError(reader.problems)
    return loaded


class _Reader:
    """Collects layers, sources and problems; `build` turns them into a config."""

    def __init__(self) -> None:
        self.schema = dict(leaves(PPOConfig()))
        self.sections = {key[: dot.start()] for key in self.schema for dot in re.finditer(r"\.", key)}
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.problems: list[str] = []
        self.wants_turns = False
        self.moved: dict[str, tuple[str, Any]] = {}
        self.complete = True  # every file that was named has been read

    def read_command_line(self, argv: list[str]) -> bool:
        """Reads the YAML that is named, then the overrides; returns whether --explain was given."""
        flags: dict[str, str] = {}
        overrides, files = [], []
        words = iter(argv)
        for word in words:
            name, equals, text = word.partition("=")
            if name in ("--config-path", "--config-name"):
                flags[name] = text if equals else next(words, "")
            elif word == "--explain":
                flags[word] = word
            elif equals or re.match(r"~[a-z]", word):
                overrides.append(word)
            else:
                files.append(word)
        if "--config-name" in flags:
            name = flags["--config-name"].removesuffix(".yaml")
            files.append(str(Path(flags.get("--config-path", "configs")) / f"{name}.yaml"))
        elif "--config-path" in flags:
            self._cannot_read(f"--config-path={flags['--config-path']} needs --config-name=NAME too")
        self._read_files(files)
        for override in overrides:
            self._read_override(override)
        return "--explain" in flags

    def _read_files(self, files: list[str]) -> None:
        wrong = [word for word in files if word.startswith("-") or not word.endswith((".yaml", ".yml"))]
        self.problems += [
            f"{word!r} is neither CONFIG.yaml, key=value nor a known option (see --help)" for word in wrong
        ]
        self.complete &= all(word.startswith("-") for word in wrong)
        chosen = [word for word in files if word not in wrong]
        if len(chosen) > 1:
            self._cannot_read(f"one YAML file at a time, not {', '.join(chosen)}; a YAML can say `extends: other.yaml`")
        for word in chosen[:1]:
            self._read_yaml(Path(_locate(word)), ())

    def _cannot_read(self, problem: str) -> None:
        self.problems.append(problem)
        self.complete = False

    def _read_yaml(self, path: Path, children: tuple[Path, ...]) -> None:
        """One YAML file after the one that it extends; `children` are the files that led here."""
        path = path.resolve()
        if path in children:
            chain = " -> ".join(file.name for file in (*children, path))
            self._cannot_read(f"`extends` goes in a circle: {chain}")
            return
        try:
            tree = OmegaConf.to_container(OmegaConf.load(path))
        except UnicodeDecodeError as error:
            self._cannot_read(f"cannot read {path}: byte {error.start + 1} is not UTF-8; save the file as UTF-8")
            return
        except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
            near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.yaml")])
            self._cannot_read(f"cannot read {path}: {error}" if path.exists() else f"{path} does not exist.{near}")
            return
        if not isinstance(tree, dict):
            self._cannot_read(f"{path.name} holds a list; it must hold keys with values")
            return
        if tree.pop("defaults", None) is not None:
            self._cannot_read(f"{path.name}: `defaults:` lists are Hydra's; write `extends: other.yaml` instead")
        parent = tree.pop("extends", None)
        if parent is not None:
            self._read_yaml(path.parent / str(parent), (*children, path))
        self._add(tree, path.name)

    def _read_override(self, override: str) -> None:
        if override.startswith("~"):
            self._reset(override[1:])
            return
        key, _, text = override.lstrip("+").partition("=")
        is_free = any(
            key.startswith(f"{name}.") and get_origin(leaf.kind) is dict for name, leaf in self.schema.items()
        )
        try:
            value = _parse(text, as_yaml=is_free)
        except yaml.YAMLError as error:
            self.problems.append(
                f"{key}={text!r} (command line): {str(error).splitlines()[0]}; check brackets and quotes"
            )
            return
        self._add(_nest({key: value}), "command line")

    def _reset(self, key: str) -> None:
        known = [name for name in self.schema if name == key or name.startswith(f"{key}.")]
        if not known:
            self._report_unknown(key, "~", "command line")
        for name in known:
            self.values.pop(name, None)
            self.sources.pop(name, None)

    def _add(self, tree: Mapping[Any, Any], source: str, prefix: str = "") -> None:
        """Enter a nested layer into the flat table, descending into sections and into what is unknown."""
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if key in self.schema:
                self._set(key, value, source)
            elif isinstance(value, Mapping) and (value or key in self.sections):
                self._add(value, source, f"{key}.")
            elif key not in self.sections:
                self._set_foreign(key, value, source)
            elif value is not None:
                self.problems.append(
                    f"{key}={value!r} ({source}): is a section; set its keys, as in {self._example(key)}"
                )

    def _example(self, section: str) -> str:
        return next(
            f"{key}={_as_text(leaf.value)}" for key, leaf in self.schema.items() if key.startswith(f"{section}.")
        )

    def _set(self, key: str, value: Any, source: str) -> None:
        before = self.values.get(key)
        self.values[key] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
        self.sources[key] = source

    def _set_foreign(self, key: str, value: Any, source: str) -> None:
        """A key that is not ours: moved, without meaning here, of a part that is missing, or a mistake."""
        if (old := _match(key, MOVED)) is not None:
            new = MOVED[old].replace("*", key[len(old) - 1 :])
            log.warning("%s (%s) is called %s here; moved", key, source, new)
            if new in ONE_LIMIT:
                self.moved[new] = (key, value)
                if new in self.values:
                    return  # compared in the end
            self._add(_nest({new: value}), source)
        elif key == "actor_rollout_ref.hybrid_engine" and str(value).lower() != "true":
            self.problems.append(
                f"{key}={value!r} ({source}): actor and rollout always share devices here; leave it true"
            )
        elif (pattern := _match(key, IGNORED)) is not None:
            self.wants_turns |= key == SEVERAL_TURNS and str(value).lower() == "true"
            log.warning("%s=%s (%s) has no effect here: %s", key, value, source, IGNORED[pattern])
        elif (pattern := _match(key, UNAVAILABLE)) is not None:
            if str(value).lower() in ("none", "false"):
                return  # switched off, which is how things are
            self.problems.append(f"{key}={value!r} ({source}): {UNAVAILABLE[pattern]}")
        else:
            self._report_unknown(key, value, source)

    def _report_unknown(self, key: str, value: Any, source: str) -> None:
        whole = [name for name in self.schema if name.endswith(f".{key}")]
        last = [name for name in self.schema if name.endswith("." + key.split(".")[-1])]
        near = did_you_mean(key, whole, 0.0) or did_you_mean(key, self.schema) or did_you_mean(key, last, 0.0)
        self.problems.append(f"{key}={value!r} ({source}): there is no such key.{near or ' --help lists all keys'}")

    def build(self) -> PPOConfig:
        """The config; where a value is wrong it keeps its default and the problem is noted."""
        self._resolve_interpolations()
        flat = {key: leaf.value for key, leaf in self.schema.items()}
        for key, value in self.values.items():
            try:
                flat[key] = _convert(value, self.schema[key].kind)
            except _MismatchError as error:
                self.problems.append(f"{key}={value!r} ({self.sources[key]}): {error}")
        flat["env_template"] = tuple(self._entry(i, entry) for i, entry in enumerate(flat["env_template"]))
        for key, (old, value) in self.moved.items():
            if str(value) != str(self.values[key]):
                self.problems.append(f"{old}={value} and {key}={self.values[key]} are the same limit: give one")
        for key in INPUT_PATHS:
            value = flat[key]
            flat[key] = tuple(map(_locate, value)) if isinstance(value, tuple) else value and _locate(value)
        config: PPOConfig = _build(PPOConfig, flat)
        if self.wants_turns and not config.environments:
            self.problems.append(f"{SEVERAL_TURNS}=true: set what the agent acts in, agent.environment.name or .path")
        return config

    def _entry(self, number: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        """An entry of env_template with its values converted; what is wrong with it is noted and left out."""
        kinds, made = get_type_hints(EnvironmentChoice), {}
        for name, value in entry.items():
            given = f"env_template[{number}].{name}={value!r}"
            if name in ("isolation", "num_workers"):
                self.problems.append(f"{given}: it is one for all environments; set agent.environment.{name}")
            elif name not in kinds:
                self.problems.append(f"{given}: there is no such key.{did_you_mean(str(name), kinds)}")
            else:
                try:
                    made[name] = _convert(value, kinds[name])
                except _MismatchError as error:
                    self.problems.append(f"{given}: {error}")
        return made

    def has_reported(self, problem: str) -> bool:
        """Whether a check's problem names a key that is reported already: it may only follow from the default there."""
        reported = {word for text in self.problems for word in DOTTED.findall(text) if word in self.schema}
        named = [word for word in DOTTED.findall(problem) if word not in self.schema]  # short for a key: rollout.n
        return any(
            key in DOTTED.findall(problem) or key.endswith(tuple(f".{word}" for word in named)) for key in reported
        )

    def _resolve_interpolations(self) -> None:
        linked = {key: value for key, value in self.values.items() if "${" in str(value)}
        if not linked:
            return
        plain = {key: _plain(leaf.value) for key, leaf in self.schema.items()} | self.values
        root = OmegaConf.create(_nest({key: value for key, value in plain.items() if key not in linked}))
        for key, value in linked.items():
            with self._reporting_links(key):
                OmegaConf.update(root, key, value, merge=False)
        for key in [key for key in linked if key in self.values]:
            with self._reporting_links(key):
                resolved = OmegaConf.select(root, key)
                self.values[key] = (
                    OmegaConf.to_container(resolved, resolve=True) if OmegaConf.is_config(resolved) else resolved
                )

    @contextmanager
    def _reporting_links(self, key: str) -> Iterator[None]:
        try:
            yield
        except OmegaConfBaseException as error:
            value, source = self.values.pop(key), self.sources.pop(key)
            self.problems.append(f"{key}={value!r} ({source}): {str(error).splitlines()[0]}")


class _MismatchError(ValueError):
    """What would have been allowed instead of a value."""


def _convert(value: Any, kind: Any) -> Any:
    """A YAML value or the text of an override as the type of a field."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _choice(value, args)
    if origin is tuple:
        return _sequence(value, args)
    if origin is dict:
        if not isinstance(value, dict):
            raise _MismatchError("must be a mapping, as in {key: value}")
        return value
    if NoneType in args:
        if value is None or (isinstance(value, str) and value.lower() in ("null", "none", "")):
            return None
        try:
            return _convert(value, args[0])
        except _MismatchError as error:
            raise _MismatchError(f"{error} (or null)") from None
    return _scalar(value, kind)


def _scalar(value: Any, kind: type) -> Any:
    if kind is str and isinstance(value, str):
        return value
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if kind in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        number = _number(value) if isinstance(value, str) else value
        if math.isfinite(number) and (kind is float or number == int(number)):
            return kind(number)
    expected = {str: "text; put it in quotes", bool: "true or false", int: "a whole number", float: "a finite number"}
    raise _MismatchError(f"must be {expected[kind]}")


def _number(text: str) -> int | float:
    """NaN where it is none; whole numbers exactly, so that no digit of a long seed is lost."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return math.nan


def _choice(value: Any, allowed: tuple[str, ...]) -> str:
    if value in allowed:
        return str(value)
    missing = " The Megatron backend is not there" if value == "megatron" else did_you_mean(str(value), allowed)
    raise _MismatchError(f"must be one of {', '.join(allowed)}.{missing}")


def _sequence(value: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A list, or one item without brackets; `args` is (item type, ...) or one type per place."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = _parse(value.strip())
        except yaml.YAMLError as error:
            raise _MismatchError(f"must be a list: {str(error).splitlines()[0]}; check brackets and quotes") from None
    if value is None or value == "":
        value = []
    items = list(value) if isinstance(value, list | tuple) else [value]
    kinds = [args[0]] * len(items) if args[-1] is Ellipsis else args
    if len(items) != len(kinds):
        raise _MismatchError(f"must be a list of {len(kinds)} values")
    return tuple(_convert(item, kind) for item, kind in zip(items, kinds, strict=True))


def _parse(text: str, *, as_yaml: bool = False) -> Any:
    """An override's value. Plain words stay text, so that the field's type decides (run 007 is not run 7)."""
    if text in ("null", "~"):
        return None
    if text[:1] == "{":
        text = re.sub(r"([{,]\s*\w+):(?=[^\s/])", r"\1: ", text)  # Hydra writes {key:value} without a blank
    if as_yaml or text[:1] in ("[", "{", '"', "'"):
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    return text


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = value
    return tree


def _merged(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    both = {
        name
        for name in before.keys() & after.keys()
        if isinstance(before[name], dict) and isinstance(after[name], dict)
    }
    return before | after | {name: _merged(before[name], after[name]) for name in both}


def _match(key: str, patterns: Mapping[str, str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(key, pattern)), None)


def _locate(path: str) -> str:
    """The path itself where it exists, seen from the current folder; else inside the project where it exists there."""
    if Path(path).expanduser().exists():
        return str(Path(path).expanduser())
    return str(PROJECT_ROOT / path) if (PROJECT_ROOT / path).exists() else path


def _build(section_type: Any, flat: Mapping[str, Any], prefix: str = "") -> Any:
    kinds = get_type_hints(section_type)
    return section_type(
        **{
            name: _build(kind, flat, f"{prefix}{name}.") if is_dataclass(kind) else flat[prefix + name]
            for name, kind in kinds.items()
        }
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _as_text(value: Any) -> str:
    """A value as one would write it in a YAML file or an override."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./+-]*", value) and value.lower() not in ("null", "none"):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_as_text, value))}]"
    return json.dumps(value)


def explain(loaded: LoadedConfig) -> str:
    """Every value with where it came from, one per line."""
    rows = [(key, _as_text(leaf.value), loaded.sources[key]) for key, leaf in leaves(loaded.config)]
    return "\n".join(f"{key:<66} {value:<28} {source}" for key, value, source in rows)


def to_yaml(config: PPOConfig) -> str:
    """The whole config as YAML; loading it again gives an equal config."""
    return str(OmegaConf.to_yaml(OmegaConf.create(_nest({key: _plain(leaf.value) for key, leaf in leaves(config)}))))


def reference_yaml() -> str:
    """configs/ppo_trainer.yaml: every key with its default, its choices and its documentation."""
    lines = ["# Every key with its default: python -m training.config.loader --reference > configs/ppo_trainer.yaml"]
    lines += _reference_lines(PPOConfig(), "")
    return "\n".join(lines) + "\n"


def _reference_lines(section: Any, indent: str) -> Iterator[str]:
    own = dict(leaves(section))
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield f"{indent}{item.name}:  # {(type(value).__doc__ or '').splitlines()[0]}"
            yield from _reference_lines(value, indent + "  ")
        else:
            yield f"{indent}{item.name}: {_as_text(value)}  # {own[item.name].doc}{_choices(own[item.name].kind)}"


def _choices(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f" ({' | '.join(get_args(kind))})"
    return next((_choices(arg) for arg in get_args(kind) if get_origin(arg) is Literal), "")


if __name__ == "__main__":
    if sys.argv[1:] != ["--reference"]:
        raise SystemExit("usage: python -m training.config.loader --reference")
    print(reference_yaml(), end="")
