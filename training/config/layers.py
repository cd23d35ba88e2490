"""Collects the layers of a configuration: values, their sources, and what is wrong with them.

Later layers win: defaults, the file that a YAML extends, the YAML, the command line. All are one
flat table {"data.train_batch_size": value}, so that a mistake never hides the next one. `loader`
turns the table into a PPOConfig.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.names import did_you_mean, nearest_name, same_words
from training.config.command_line import Override
from training.config.leaves import Leaf, leaves
from training.config.links import links_to, own_links
from training.config.plain_files import read_plain_text, require_small_yaml
from training.config.schema.ppo import PPOConfig
from training.config.section import PROJECT_ROOT, located
from training.config.translator import ParentFile, key_translator
from training.config.values import parse
from training.config.yaml_faults import describe_yaml_fault
from training.features import AbsentFeature, absent_features, folder_of, moved_keys, renamed

log = logging.getLogger(__name__)
COMMAND_LINE = "command line"
ENVIRONMENT = "agent.environment"
# Giving one of an environment's settings drops what an earlier layer gave for the others.
RIVALS = {
    "path": ("name", "kwargs", "prompt_template"),
    "name": ("path", "cls", "kwargs", "prompt_template"),
}
# A key in the text of a problem; some texts shorten it, as in rollout.n.
DOTTED_KEY = re.compile(r"[a-z_]\w*(?:\.\w+)+")
# YAML for OmegaConf writes this in place of a value that is still to be given.
MISSING = "???"
# A word that people write for a setting -> the words that it is called by here.
OTHER_WORDS: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("other_words.yaml").read_text(encoding="utf-8")
)
# So many foreign keys of one source are told one by one; verl's own files have a hundred.
MAX_NOTES_SAID = 8
NO_ADVICE = " --help lists all keys"
# At most so many names are shown of the files beside a missing one.
MAX_NAMES_SHOWN = 12


@dataclass(frozen=True)
class SourcedValue:
    """Holds a value as it was written, and the name of the file that gave it, or "command line"."""

    value: Any
    source: str


class Layers:
    """Collects layers: `add_…` adds to the layer that is being read, `end_layer` ends it.

    Attributes:
        schema: every key there is, with its type, default and documentation.
        values: by key, what the layers that ended gave.
        translator: knows the keys of another program.
        foreign_values: by that program's key, what was given for keys that are called otherwise
            here or have no effect.
        problems: what is wrong with values and keys.
        file_problems: files that could not be read, whose values are missing.
    """

    def __init__(self) -> None:
        self.schema: dict[str, Leaf] = dict(leaves(PPOConfig()))
        self.values: dict[str, SourcedValue] = {}
        self.translator = key_translator()
        self.foreign_values: dict[str, Any] = {}
        self.problems: list[str] = []
        self.file_problems: list[str] = []
        self._sections = _sections_of(self.schema)
        self._moved = self._read_moved_keys()
        # By source: what became of foreign keys, the older names of settings with those now, and
        # the folders of features that are not here, whose settings are at their defaults.
        self._notes: dict[str, list[str]] = {}
        self._older_names: dict[str, dict[str, str]] = {}
        self._absent: dict[str, set[str]] = {}
        # The layer that is being read.
        self._layer: dict[str, Any] = {}
        # Under which name a key's last value was given, and the one that is being translated.
        self._names_given: dict[str, str] = {}
        self._translated: str | None = None

    def _read_moved_keys(self) -> dict[str, str]:
        """Returns what older keys of features' settings are called now; reports those in use."""
        moved = {}
        for old, new in moved_keys().items():
            is_there = old in self.schema or old in self._sections
            if is_there or not (new in self.schema or new in self._sections):
                self.problems.append(
                    f"{old}: a feature's moved_keys calls it {new}; an older key must be none that "
                    "there is now, and the newer one must be there: mend its feature.py"
                )
            else:
                moved[old] = new
        return moved

    def value_of(self, key: str) -> Any:
        """Returns what the layers give for a key, its default where they do not."""
        if key in self.values:
            return self.values[key].value
        return self.schema[key].value

    def sources(self) -> dict[str, str]:
        """Returns for every key where its value came from."""
        sources = dict.fromkeys(self.schema, "default")
        for key, sourced in self.values.items():
            sources[key] = sourced.source
        return sources

    # The sources of layers.

    def read_yaml(self, path: Path, children: tuple[Path, ...] = (), section: str = "") -> None:
        """Reads a YAML file as a layer, after the one that it extends.

        Args:
            path: the file.
            children: the files that extend it, each the next one.
            section: the dotted key that its values stand under.
        """
        if not path.exists():
            self.file_problems.append(_describe_missing_file(path))
            return
        try:
            require_small_yaml(read_plain_text(path, encoding="utf-8-sig"))
            tree = OmegaConf.to_container(OmegaConf.load(path))
        except (
            OSError,
            UnicodeDecodeError,
            yaml.YAMLError,
            OmegaConfBaseException,
            RecursionError,
        ) as error:
            self.file_problems.append(describe_yaml_fault(path, error))
            return
        if not isinstance(tree, dict):
            self.file_problems.append(f"{path.name} holds a list; it must hold keys with values")
            return
        for parent in self._parents(tree, path):
            inner = ".".join(part for part in (section, parent.section) if part)
            self._read_parent(parent.path, (*children, path), inner)
        self.add_tree(tree, path.name, f"{section}." if section else "")
        self.end_layer(path.name)

    def _parents(self, tree: dict[Any, Any], path: Path) -> list[ParentFile]:
        """Takes out of a file's tree what it extends, and returns those files in their order."""
        parents = []
        extended = tree.pop("extends", None)
        if extended is not None:
            parents.append(ParentFile(_find_parent(path, str(extended))))
        others = self.translator.take_parents(tree, path)
        for note in others.notes:
            self.note(note, path.name)
        self.file_problems += others.problems
        return parents + others.files

    def _read_parent(self, parent: Path, children: tuple[Path, ...], section: str) -> None:
        """Reads the file that the last of the children extends, unless it is one of them."""
        if parent in children:
            circle = " -> ".join(file.name for file in (*children, parent))
            self.file_problems.append(f"`extends` goes in a circle: {circle}")
            return
        self.read_yaml(parent, children, section)

    def add_override(self, override: Override) -> None:
        """Adds what a word of the command line says of a key."""
        key = override.key
        text = override.text
        if text is None:
            self._reset(key)
            return
        leaf = self.schema.get(self._moved_to_feature(key) or key)
        if leaf and not text and leaf.plain is not str and not leaf.takes_null:
            log.warning("%s= (command line) has no value: left as it is", key)
            return
        try:
            # Where any key may be given, the value is YAML whatever it looks like.
            value = parse(text, as_yaml=leaf is None)
        except yaml.YAMLError as error:
            self.report_error(key, text, COMMAND_LINE, error)
            return
        self.add_tree({key: value}, COMMAND_LINE)

    def _reset(self, key: str) -> None:
        """Takes a key, or a section's keys, back to the default, and their problems with them.

        Values that were given under other names of the section's, older or another program's, are
        taken back, too: with `trainer.alarms=stop ~trainer`, alarms.mode.
        """
        given = key
        key = self._name_here(key)
        known = [
            name
            for name in self.schema
            if _is_inside(name, key) or _is_inside(self._names_given.get(name, name), given)
        ]
        beginnings = [f"{key}=", f"{key}.", f"{given}=", f"{given}."]
        beginnings += [f"{name}{sign}" for name in known for sign in "=.["]
        kept = [problem for problem in self.problems if not problem.startswith(tuple(beginnings))]
        names_given = {self._names_given.get(name) for name in known}
        foreign = [
            name for name in self.foreign_values if _is_inside(name, given) or name in names_given
        ]
        was_given = bool(foreign) or len(kept) < len(self.problems)
        self.problems = kept
        is_known = bool(known) or was_given or self.translator.judge(key, None) is not None
        if not is_known and self._absent_feature(key) is None:
            self._report_unknown(key, "~", COMMAND_LINE)
        for name in known:
            self.values.pop(name, None)
            self._layer.pop(name, None)
        for name in foreign:
            del self.foreign_values[name]

    def add_tree(self, tree: Mapping[Any, Any], source: str, prefix: str = "") -> None:
        """Adds nested values, descending into sections and into what is unknown.

        Args:
            tree: values by name; a name may be of several words, as in {"data.seed": 1}.
            source: where they come from.
            prefix: the dotted key of the section that the tree is, with a dot behind it.
        """
        for name, value in tree.items():
            word, *inner_words = str(name).split(".")
            for inner_word in reversed(inner_words):
                value = {inner_word: value}
            if not self.translator.drops(word):
                self._add(f"{prefix}{word}", value, source)

    def _add(self, key: str, value: Any, source: str) -> None:
        """Adds the value of one key or of what is below it."""
        if value == MISSING:
            return
        feature_key = self._moved_to_feature(key)
        if feature_key is not None:
            self._older_names.setdefault(source, {})[key] = feature_key
            value = own_links(value, key, self._name_here)
            self._add_translated(key, {feature_key: value}, source)
            return
        if key in self.schema and _is_null(value) and self.translator.leaves_null(key):
            if value:
                at_rest = self.schema[key].value
                self.note(f"{key}={value} ({source}) is null, not a name: {at_rest} stays", source)
            return
        value = own_links(value, key, self._name_here)
        if key in self.schema and isinstance(value, Mapping) and self._holds_renamed_keys(key):
            value = self._add_moved_entries(key, value, source)
        if key in self.schema:
            self._report_contradiction(key, value, source)
            self._layer[key] = _merged(self._layer.get(key), value)
            self._names_given[key] = self._translated or key
        elif isinstance(value, Mapping) and (value or key in self._sections):
            self.add_tree(value, source, f"{key}.")
        elif key not in self._sections:
            self._add_foreign(key, value, source)
        elif value is not None:
            self._report_section(key, value, source)

    def _add_translated(self, given: str, tree: Mapping[str, Any], source: str) -> None:
        """Adds what a key of another name is here; of several translations the first is `given`."""
        outer = self._translated
        self._translated = outer or given
        self.add_tree(tree, source)
        self._translated = outer

    def _report_contradiction(self, key: str, value: Any, source: str) -> None:
        """Reports a key that a file gives under an older name, too, with another value.

        On the command line the later word wins.
        """
        has_older = key in self._older_names.get(source, {}).values()
        if not has_older or source == COMMAND_LINE or key not in self._layer:
            return
        if self._layer[key] != value and not isinstance(value, Mapping):
            self.report(
                key, value, source, f"under another name it is {self._layer[key]!r} there: give one"
            )

    def _report_section(self, key: str, value: Any, source: str) -> None:
        """Reports a plain value for a section, with a key of it that may be meant."""
        inner = [name for name in self.schema if name.startswith(f"{key}.")]
        is_file = isinstance(value, str) and value.endswith(".py")
        path_key = f"{key}.path"
        example = path_key if is_file and path_key in inner else inner[0]
        self.report(key, value, source, f"is a section; set its keys, as in {example}=VALUE")

    def _add_moved_entries(self, key: str, value: Mapping[Any, Any], source: str) -> dict[Any, Any]:
        """Adds those entries of a mapping of ours that have another name; returns the others."""
        others = {}
        for name, entry in value.items():
            inner = f"{key}.{name}"
            if self._name_here(inner) != inner or self._holds_renamed_keys(inner):
                self._add(inner, entry, source)
            else:
                others[name] = entry
        return others

    def _add_foreign(self, key: str, value: Any, source: str) -> None:
        """Takes a key that is not ours: an absent feature's, another program's, or a mistake."""
        if self._absent_feature(key) is not None:
            self._add_absent(key, value, source)
            return
        translated = self.translator.settings_for(key, value)
        if translated is not None:
            self.foreign_values[key] = value
            for new_key, new_value in translated.items():
                self.note(f"{key}={value} ({source}) is {new_key}={new_value} here; set", source)
                self._add_translated(key, {new_key: new_value}, source)
            return
        moved_key = self.translator.new_key(key)
        if moved_key is not None:
            self._add_moved(key, moved_key, value, source)
            return
        verdict = self.translator.judge(key, value)
        if verdict is None:
            self._report_unknown(key, value, source)
            return
        if verdict.outcome == "error":
            self.report(key, value, source, verdict.reason)
            return
        self.foreign_values[key] = value
        if verdict.outcome == "warning":
            self.note(f"{key}={value} ({source}) has no effect here: {verdict.reason}", source)

    def _name_here(self, key: str) -> str:
        """Returns what a key is called now, where it has an older name or another program's."""
        return self._moved_to_feature(key) or self.translator.new_key(key) or key

    def _moved_to_feature(self, key: str) -> str | None:
        """Returns what a setting that has moved to a feature, or one below it, is called now."""
        return renamed(key, self._moved)

    def _holds_renamed_keys(self, key: str) -> bool:
        """Checks whether keys inside this one, a mapping, are called otherwise here."""
        holds_older = any(old.startswith(f"{key}.") for old in self._moved)
        return holds_older or self.translator.holds_renamed_keys(key)

    def _absent_feature(self, key: str) -> str | None:
        """Returns the feature that a key, or its older name, is of, where its folder is gone."""
        for name, feature in absent_features().items():
            is_inside = f"{key}.".startswith(f"{name}.")
            if is_inside or renamed(key, feature.moved_keys) is not None:
                return name
        return None

    def _add_absent(self, key: str, value: Any, source: str) -> None:
        """Takes a key of a feature whose folder is gone: at its default, or a mistake."""
        name = str(self._absent_feature(key))
        folder = folder_of(name)
        if _is_default(key, value, absent_features()[name]):
            self._absent.setdefault(source, set()).add(folder)
            return
        self.report(
            key,
            value,
            source,
            f"is a setting of {folder}, which is not here: put the folder back, or take the "
            "key out",
        )

    def _add_moved(self, key: str, new_key: str, value: Any, source: str) -> None:
        """Adds the value of another program's key under its name here."""
        if _is_null(value) or links_to(value, new_key):
            return
        if self.translator.judge(new_key, value) is None:
            self.note(f"{key} ({source}) is called {new_key} here; moved", source)
        self.foreign_values[key] = value
        # Two values of one limit are compared in the end: ours stays, whichever comes first.
        is_given = self.translator.shares_limit(new_key) and new_key in self._layer
        if not is_given:
            self._add_translated(key, {new_key: value}, source)

    def end_layer(self, source: str) -> None:
        """Ends the layer that is being read, whose values win over those of the layers before it.

        Another environment's settings do not stay with one that the layer names.
        """
        for setting, others in RIVALS.items():
            if _is_null(self._layer.get(f"{ENVIRONMENT}.{setting}")):
                continue
            for other in others:
                self.values.pop(f"{ENVIRONMENT}.{other}", None)
        for key, value in self._layer.items():
            if key in self.values:
                value = _merged(self.values[key].value, value)
            self.values[key] = SourcedValue(value, source)
        self._layer = {}

    def replace(self, key: str, value: Any, source: str) -> None:
        """Sets a key of ours after all layers, and says so."""
        self.values[key] = SourcedValue(value, source)
        self.note(f"{source} is {key}={value} here; set", source)

    def note(self, text: str, source: str) -> None:
        """Notes what became of a foreign key, to be logged or listed."""
        self._notes.setdefault(source, []).append(text)

    def log_notes(self) -> list[str]:
        """Logs what became of foreign and older keys, of a source with many how many they are.

        Returns: what was not said one by one.
        """
        for source, names in self._older_names.items():
            told = "; ".join(f"{old} is called {new} now" for old, new in names.items())
            log.warning("%s (%s)", told, source)
        for source, folders in self._absent.items():
            log.warning(
                "settings of %s, not here, are at their defaults (%s): they have no effect",
                ", ".join(sorted(folders)),
                source,
            )
        unsaid = []
        for source, texts in self._notes.items():
            if len(texts) <= MAX_NOTES_SAID:
                for text in texts:
                    log.warning("%s", text)
                continue
            unsaid += texts
            log.warning(
                "%d of %s's keys (%s) have no effect or another name here: --explain lists them",
                len(texts),
                self.translator.program,
                source,
            )
        return unsaid

    # Problems.

    def report(self, key: str, value: Any, source: str, problem: str) -> None:
        """Notes what is wrong with a value, in the form of all such problems."""
        self.problems.append(f"{key}={value!r} ({source}): {problem}")

    def report_checked(self, problems: Iterable[str]) -> None:
        """Notes what the checks found, but for what may only follow from a mistake that is noted.

        The checks saw the default of a key whose value is wrong, or which was misspelt.
        """
        wrong_keys = set()
        for noted in self.problems:
            wrong_keys |= self.schema.keys() & set(DOTTED_KEY.findall(noted))
        for problem in problems:
            if not _names_one_of(problem, wrong_keys):
                self.problems.append(problem)

    def report_error(self, key: str, value: Any, source: str, error: Exception) -> None:
        """Notes why a value cannot be read."""
        problem = str(error).splitlines()[0]
        if isinstance(error, yaml.YAMLError):
            problem += "; check brackets and quotes"
        self.report(key, value, source, problem)

    def _report_unknown(self, key: str, value: Any, source: str) -> None:
        """Notes a key that does not exist, with the nearest that does."""
        name, colon, rest = key.partition(":")
        if colon and value is None:
            self.report(key, value, source, f"a blank is missing: write {name}: {rest}")
            return
        section, _, last_word = key.rpartition(".")
        known_word = OTHER_WORDS.get(last_word, last_word)
        is_whole = not section or known_word.startswith(f"{section}.")
        known_key = known_word if is_whole else f"{section}.{known_word}"
        of_all_words = [name for name in self.schema if _has_words(name, known_key)]
        of_same_words = [name for name in self.schema if same_words(last_word, name.split(".")[-1])]
        of_same_last_word = [name for name in self.schema if name.endswith(f".{last_word}")]
        advice = (
            did_you_mean(key, of_all_words[:1], cutoff=0.0)
            or did_you_mean(key, of_same_words, cutoff=0.4)
            or did_you_mean(key, of_same_last_word, cutoff=0.0)
            or self._nearest_moved(key)
        )
        settings_of_users = f"{section}.custom_kwargs"
        if not advice and settings_of_users in self.schema:
            advice = f" A setting of your own code goes to {settings_of_users}.{last_word}"
        self.report(key, value, source, f"there is no such key.{advice or _no_advice()}")

    def _nearest_moved(self, key: str) -> str:
        """Says how the older key is called now that this one is nearest to; "": there is none."""
        nearest = nearest_name(key, self._moved, cutoff=0.85)
        if nearest is None:
            return ""
        return f" Did you mean {nearest}, which is called {self._moved[nearest]} now?"


def _no_advice() -> str:
    """Says where keys are listed, and which folder that is gone may have known one."""
    absent = absent_features().items()
    readers = [folder_of(name) for name, each in absent if "translator" in each.brings]
    if not readers:
        return NO_ADVICE
    return f"{NO_ADVICE}; {', '.join(readers)}, which reads other programs' keys, is not here"


def _is_default(key: str, value: Any, feature: AbsentFeature) -> bool:
    """Checks whether a value is the default of a key, or of a section, of an absent feature."""
    own_key = renamed(key, feature.moved_keys) or key
    if own_key not in feature.settings:
        return value in (None, {}) and any(
            name.startswith(f"{own_key}.") for name in feature.settings
        )
    default = feature.settings[own_key]
    if _is_null(value):
        return _is_null(default)
    return str(value).lower() == str(default).lower()


def _has_words(name: str, words: str) -> bool:
    """Checks whether a key has these words in their order, the last of them as its last one."""
    left = iter(name.split("."))
    wanted = words.split(".")
    return name.split(".")[-1] == wanted[-1] and all(word in left for word in wanted)


def _names_one_of(problem: str, keys: set[str]) -> bool:
    """Checks whether the text of a problem names one of the keys, if only by its last words."""
    endings = tuple(f".{word}" for word in DOTTED_KEY.findall(problem))
    return any(f".{key}".endswith(endings) for key in keys)


def _find_parent(child: Path, extended: str) -> Path:
    """Finds the file that a YAML extends: beside it, or else where other paths are looked for."""
    beside = child.parent / extended
    if beside.exists():
        return beside.resolve()
    elsewhere = Path(located(extended))
    return elsewhere.resolve() if elsewhere.exists() else beside.resolve()


def _describe_missing_file(path: Path) -> str:
    """Explains that a YAML file, or a folder on the way to it, is not there, and what is."""
    missing = next(place for place in (path, *path.parents) if place.parent.is_dir())
    folder = missing.parent
    if missing == path:
        kind = "YAML files"
        there = [entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")]
    else:
        kind = "folders"
        there = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    names = sorted(name for name in there if not name.startswith("."))
    shown = names[:MAX_NAMES_SHOWN]
    if len(names) > MAX_NAMES_SHOWN:
        shown.append("…")
    # Files that have their ending alone in common are not alike.
    hint = did_you_mean(missing.name, names, cutoff=0.7)
    configs = [entry.name for entry in (PROJECT_ROOT / "configs").glob("*.yaml")]
    nearest = nearest_name(path.name, configs, cutoff=0.8)
    if not hint and nearest is not None:
        hint = f" Did you mean 'configs/{nearest}' of the project?"
    return f"{path} does not exist; {kind} in {folder}: {', '.join(shown) or 'none'}.{hint}"


def _sections_of(keys: Mapping[str, Leaf]) -> set[str]:
    """Lists the dotted names of all sections: data, agent, agent.environment, …"""
    sections = set()
    for key in keys:
        words = key.split(".")
        for length in range(1, len(words)):
            sections.add(".".join(words[:length]))
    return sections


def _is_inside(key: str, section: str) -> bool:
    """Checks whether a dotted name is a section's, or is itself that name."""
    return f"{key}.".startswith(f"{section}.")


def _merged(before: Any, after: Any) -> Any:
    """Merges two mappings, and those inside them.

    What is no mapping takes the place of the value before it, as an empty mapping does.
    """
    if not (isinstance(before, dict) and isinstance(after, dict) and after):
        return after
    merged = dict(before)
    for name, value in after.items():
        merged[name] = _merged(before.get(name), value)
    return merged


def _is_null(value: Any) -> bool:
    """Checks whether a value, as YAML or as text, is null."""
    return str(value).lower() in ("none", "null", "")
