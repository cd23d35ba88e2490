"""Finds the folders of features/ and says what each brings; nothing else reads them.

A feature is a folder `features/NAME` that one may delete. Its `feature.py` holds a `FEATURE`:

    FEATURE = Feature(
        section=AlarmSettings,                              # its settings, as alarms.KEY
        observer="features.alarms.monitor:open_alarms",  # what watches a run
    )

`feature.py` imports this file and the feature's settings alone. Everything else is named as
"module:name", and imported where a run asks for it. Invariant: the core knows no feature by name; a
folder that is gone leaves no trace but the sentence for whoever asks for something of it, which
stands in `feature_index.yaml`.
"""

from __future__ import annotations

import importlib
import keyword
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from data.texts import text_of

FOLDER = Path(__file__).resolve().parents[1] / "features"
# What features/ held when scripts/feature_index.py was last run.
INDEX = Path(__file__).with_name("feature_index.yaml")


logger = logging.getLogger(__name__)
# What takes seconds to import; a feature.py is read by every command.
HEAVY = "torch"


class FeatureError(ImportError):
    """Says what is wrong with the folders of features/; its text is for users."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Says what a feature brings; whatever is left out it does not bring.

    Attributes:
        section: the class of its settings, a `Section`. The config has it under the folder's name,
            and `config.section(CLASS)` returns it.
        moved_keys: a setting's older dotted key -> its key now.
        moved_modules: an older module, or package with all below it -> its name now.
        checks: "module:function", config -> sentences on what several sections contradict.
        translator: "module:Class" of the `KeyTranslator` of another program's keys; see
            training/config/translator.py. At most one feature brings one.
        observer: "module:function", ObservedRun -> `Observer`, or None where the config turns it
            off; see training/observers.py.
        observer_order: an observer with a smaller number is told first: what it leaves in a step's
            report (`StepReport`) is there for those with larger ones.
        metrics: a file of the folder, what the metrics mean that the feature logs, and where the
            run's page shows them; see training/run/metric_names.py.
        keeper: "module:function", (config, tokens) -> `EpisodeKeeper`, or None where the config
            turns it off; see workers/rollout/keepers.py.
        record_entries: "module:function", config -> function of an `Episode`, behind the failure
            policy, which returns entries of its record by name, as plain data; or None where the
            config turns it off. The feature that records episodes asks it.
        turn_notes: "module:function", (run's folder, folder of its episodes) -> `TurnNotes`, what
            is shown beside the turns of recorded episodes, or None where the run has nothing of the
            kind; see features/shared/turn_notes.py. The feature that shows episodes asks it.
        history: "module:function", (config, tokens) -> `HistoryRule`, which decides where an
            episode begins a new context, for every `agent.context` but keep; see
            workers/rollout/history.py. At most one feature brings one.
        questions: "module:function", (config, tokens) -> `QuestionRule`, or None where the config
            turns it off: it answers what environments ask the policy; see
            workers/rollout/questions.py. At most one feature brings one.
        samplers: a name for `data.sampler.name` -> "module:function", (config, dataset) -> torch
            Sampler of the training rows; see data/learning_sampler.py.
        branches: "module:function", (config, specs, ranks that share the engine) -> `BranchRule`,
            which has states of episodes continued from more than once, or None where the config
            turns it off; see workers/rollout/branches.py. At most one feature brings one.
        probes: "module:function", (config, role) -> list of `UpdateProbe`, the role being "actor"
            or "critic"; see workers/model/probe.py.
        read_probes: "module:function", (config, role) -> list of `ReadProbe`, the role being "ref".
        sync_probes: "module:function", (config, spec, engine) -> list of `SyncProbe`; the engine is
            None where a rank has the policy alone.
        loss_terms: "module:function", config -> list of `LossTerm`, which are added to the loss of
            the policy's update; see workers/model/loss_terms.py.
        companion: "module:function", (config, worker) -> `Companion`, which stands beside the
            policy on every rank, or None; see workers/model/companion.py.
        step_addition: "module:function", (config, tokenizer) -> `StepAddition`, which adds to the
            rows of a step before the policy's update, or None; see training/step_additions.py.
        further_rows: "module:function", (config, spec) -> list of `FurtherRows`, which every update
            of the policy learns beside what was played; see workers/model/further_rows.py.
        modes: an option of the command line, such as --plan -> "module:function", which is called
            in place of training with the words of the command line and the signals that end it,
            and returns the exit code.
        model_options: options whose value names a model, a checkpoint or a run; a path that is not
            there is refused before such a function's module is imported.
        usage: what --help says of them, a line for each.
        kinds: "module:NAME" of the kinds of episodes; see workers/rollout/kinds.py.
        services: "module:function", (config, may they write files) -> list of `SideService`, which
            environments, rewards and programs may ask; see custom/side_services.py.
        tools: "module:function", config -> list of `ToolSource`, whose tools stand beside
            `agent.tools`; see custom/tools/definition.py.
        starter: "module:function", (config, program, argv) -> exit code where it starts the run in
            processes of its own, or None where the run goes on in this one.
        libraries: "module:NAME" of a table: a name in LIBRARY:ID of an environment -> `Library`;
            see custom/env_factory.py.
        loggers: names in `trainer.logger` that its observer writes to.
        import_advice: "module:function", ModuleNotFoundError of a user's file -> what to write
            instead, or None.
        model_writer: "module:function", (CheckpointModel, folder, dtype); writes a checkpoint as a
            Hugging Face folder; see training/run/model_source.py.
    """

    section: type | None = None
    moved_keys: Mapping[str, str] = field(default_factory=dict)
    moved_modules: Mapping[str, str] = field(default_factory=dict)
    checks: str | None = None
    translator: str | None = None
    observer: str | None = None
    observer_order: int = 100
    metrics: str | None = None
    keeper: str | None = None
    record_entries: str | None = None
    turn_notes: str | None = None
    history: str | None = None
    questions: str | None = None
    samplers: Mapping[str, str] = field(default_factory=dict)
    branches: str | None = None
    probes: str | None = None
    read_probes: str | None = None
    sync_probes: str | None = None
    loss_terms: str | None = None
    companion: str | None = None
    step_addition: str | None = None
    further_rows: str | None = None
    modes: Mapping[str, str] = field(default_factory=dict)
    model_options: tuple[str, ...] = ()
    usage: str = ""
    kinds: tuple[str, ...] = ()
    services: str | None = None
    tools: str | None = None
    starter: str | None = None
    libraries: str | None = None
    loggers: tuple[str, ...] = ()
    import_advice: str | None = None
    model_writer: str | None = None


@dataclass(frozen=True, kw_only=True)
class AbsentFeature:
    """Remembers a feature whose folder is gone, as `feature_index.yaml` has it.

    Attributes:
        settings: the defaults of its settings, by dotted key.
        moved_keys: as of `Feature`.
        moved_modules: as of `Feature`.
        modes: its options of the command line.
        libraries: the names of its libraries of environments.
        loggers: as of `Feature`.
        samplers: the names of its samplers.
        brings: the attributes of `Feature` that it has.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    moved_keys: Mapping[str, str] = field(default_factory=dict)
    moved_modules: Mapping[str, str] = field(default_factory=dict)
    modes: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    loggers: tuple[str, ...] = ()
    samplers: tuple[str, ...] = ()
    brings: tuple[str, ...] = ()


@cache
def features() -> dict[str, Feature]:
    """Returns the features that there are by the names of their folders, in alphabetical order.

    Raises:
        FeatureError: a feature.py cannot be read or says nothing, as one that is still being
            imported does; or two of them bring what one alone may bring.
    """
    found = {file.parent.name: _read(file) for file in sorted(FOLDER.glob("*/feature.py"))}
    _require_one(
        "translator", {name: ["a translator"] for name, each in found.items() if each.translator}
    )
    _require_one("history", {name: ["a history"] for name, each in found.items() if each.history})
    _require_one("questions", {name: ["answers"] for name, each in found.items() if each.questions})
    _require_one("branches", {name: ["branches"] for name, each in found.items() if each.branches})
    for attribute in ("modes", "moved_keys", "moved_modules", "samplers"):
        _require_one(attribute, {name: vars(each)[attribute] for name, each in found.items()})
    return found


def _read(file: Path) -> Feature:
    """Imports a feature.py.

    Raises:
        FeatureError: it cannot be imported, or has no FEATURE.
    """
    name = file.parent.name
    shown = f"{folder_of(name)}/{file.name}"
    if not name.isidentifier() or keyword.iskeyword(name):
        raise FeatureError(
            f"{folder_of(name)} is no name of a Python package: rename the folder, to letters, "
            "digits and _"
        )
    was_there = HEAVY in sys.modules
    with _told_as(shown):
        module = importlib.import_module(f"{FOLDER.name}.{name}.feature")
    if HEAVY in sys.modules and not was_there:
        logger.warning(
            "%s imports %s, so that every command, --help too, waits for it: name modules as text "
            '("module:function"), or import it in the functions that need it',
            shown,
            HEAVY,
        )
    feature = vars(module).get("FEATURE")
    if not isinstance(feature, Feature):
        raise FeatureError(f"{shown} has no FEATURE = Feature(...)")
    return feature


@contextmanager
def _told_as(what: str, how: str = "cannot be imported") -> Iterator[None]:
    """Tells in a sentence what an import, or a call, in the block raises, whatever it is.

    A module that ends the program as it is imported, by `sys.exit()`, would end a run as if it had
    been made.

    Raises:
        FeatureError: it cannot be imported, or the call fails.
    """
    try:
        yield
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise FeatureError(
            f"{what} {how}: {type(error).__name__}: {text_of(error)}; mend it, or take the folder "
            "away"
        ) from error


def _require_one(attribute: str, names: Mapping[str, Iterable[str]]) -> None:
    """Requires that no two features bring the same name under an attribute.

    Args:
        names: that each feature brings, by the feature.

    Raises:
        FeatureError: two of them do.
    """
    owners: dict[str, str] = {}
    for feature, brought_names in names.items():
        for name in brought_names:
            if name in owners:
                raise FeatureError(
                    f"{folder_of(owners[name])} and {folder_of(feature)} both bring {name}, under "
                    f"{attribute}: take one of the folders away, or change its feature.py"
                )
            owners[name] = feature


@cache
def absent_features() -> dict[str, AbsentFeature]:
    """Returns the features whose folders are gone, by their names."""
    # Late: main.py imports this file before it knows that the libraries are there.
    import yaml

    index = yaml.safe_load(INDEX.read_text(encoding="utf-8"))
    return {name: AbsentFeature(**entry) for name, entry in index.items() if name not in features()}


def folder_of(name: str) -> str:
    """Returns how a feature's folder is called in sentences."""
    return f"{FOLDER.name}/{name}"


def require_feature(name: str, what: str) -> None:
    """Requires that a feature is here, before its modules are imported for `what`.

    Args:
        what: a program of this project's, as scripts/replay.py.
    Raises:
        ImportError: it is not.
        SystemExit: it is not, and `what` is the program that runs: the sentence alone is printed.
    """
    if name in features():
        return
    problem = (
        f"{what} is a part of {folder_of(name)}, which is not here: put the folder back, or do "
        "without it"
    )
    running = vars(sys.modules["__main__"]).get("__file__")
    if running is not None and Path(running).resolve() == FOLDER.parent / what:
        print(problem, file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(problem)


def sections() -> dict[str, type]:
    """Returns the classes of the features' settings, by the features' names."""
    return {name: each.section for name, each in features().items() if each.section is not None}


def moved_keys() -> dict[str, str]:
    """Returns by the older key of a feature's setting what it is called now."""
    moved: dict[str, str] = {}
    for feature in features().values():
        moved |= feature.moved_keys
    return moved


def renamed(key: str, moved: Mapping[str, str]) -> str | None:
    """Returns what a key that has moved, or one below it, is called now; None: it has not."""
    for old, new in moved.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return None


def moved_modules() -> dict[str, str]:
    """Returns by the older name of a feature's module what it is called now.

    Those of features whose folders are gone are among them, so that their names are known.
    """
    moved: dict[str, str] = {}
    for absent in absent_features().values():
        moved |= absent.moved_modules
    for feature in features().values():
        moved |= feature.moved_modules
    return moved


def require_module(module: str, what: str) -> None:
    """Requires that the feature is here in which a module stands, if it stands in one.

    Raises:
        ModuleNotFoundError: it is not.
    """
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if package != FOLDER.name or name not in absent_features():
        return
    raise ModuleNotFoundError(
        f"{what} is {module} now, a part of {folder_of(name)}, which is not here: put the folder "
        "back, or do without it",
        name=module,
    )


def named(attribute: str) -> Iterator[tuple[str, str]]:
    """Yields (feature, what it names) for each feature that brings this attribute."""
    for name, feature in features().items():
        place = vars(feature)[attribute]
        if place is not None:
            yield name, place


def brought(attribute: str) -> Iterator[Any]:
    """Yields what each feature names under this attribute, imported.

    Raises:
        FeatureError: it cannot be imported.
    """
    for _, found in _brought_by(attribute):
        yield found


def _brought_by(attribute: str) -> Iterator[tuple[str, Any]]:
    """Yields what each feature names under this attribute, behind how sentences call that."""
    for feature, place in named(attribute):
        module, _, name = place.partition(":")
        what = f"{attribute}={place!r} of {folder_of(feature)}/feature.py"
        with _told_as(what):
            found = getattr(importlib.import_module(module), name)
        yield what, found


def answers(attribute: str, *arguments: Any) -> Iterator[str]:
    """Calls what each feature names under this attribute; yields the sentences that they return.

    Raises:
        FeatureError: it cannot be imported, raises, or returns anything but a list of texts.
    """
    for what, function in _brought_by(attribute):
        with _told_as(what, "failed"):
            answer = function(*arguments)
            sentences = [answer] if isinstance(answer, str) else list(answer)
        if isinstance(answer, str):
            raise FeatureError(f"{what} returned the text {answer!r}; return a list: [{answer!r}]")
        for sentence in sentences:
            if not isinstance(sentence, str):
                raise FeatureError(
                    f"{what} returned a list with {sentence!r}, a {type(sentence).__name__}; each "
                    "entry is a text, and nothing wrong is an empty list"
                )
        yield from sentences


def files(attribute: str) -> Iterator[Path]:
    """Yields the file that each feature names under this attribute, in the feature's folder."""
    for feature, file in named(attribute):
        yield FOLDER / feature / file


def folder_without(attribute: str, name: str) -> str | None:
    """Returns the folder that is gone and with it the name under this attribute; else None."""
    for feature, absent in absent_features().items():
        if name in vars(absent)[attribute]:
            return folder_of(feature)
    return None


def folder_that_brings(attribute: str) -> str:
    """Returns the folder that is gone and with it this attribute, to be told in a sentence."""
    for feature, absent in absent_features().items():
        if attribute in absent.brings:
            return folder_of(feature)
    return "a feature"
