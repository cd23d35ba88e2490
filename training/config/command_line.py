"""Reads the words of a command line: the one YAML file, overrides of keys, and options.

Invariant: nothing here knows which keys there are; `layers` decides what the words mean to them.
"""

import re
import textwrap
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

from data.names import did_you_mean
from training.config.section import located
from training.features import features

USAGE = """\
    python main.py CONFIG.yaml key=value ...     CONFIG.yaml holds what differs from the defaults
    python main.py --config-path DIR --config-name NAME key=value ...
    +key=value, ++key=value   the same as key=value
    ~key         back to the default
    --explain    print the values that were given, with their source, and what follows from them
    --explain-all   print every value, its source and its reader
    --debug      show the traceback of an error
    -h, --help   print every key with its documentation
In place of training:
{modes}

Later wins: defaults, `extends: other.yaml`, the YAML, the command line.
"""
# Until it goes to its feature.
USAGE_OF_SERVE = (
    "--serve MODEL   serve it to programs, without training, and show their rows (--port N)"
)
# Those that features do not bring.
OPTIONS = ("--explain", "--explain-all", "--debug", "--help", "--config-path", "--config-name")
YAML_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class Override:
    """Holds one word of the command line about a key: KEY=TEXT, or ~KEY, whose text is None."""

    key: str
    text: str | None


@dataclass(frozen=True)
class CommandLine:
    """Holds what the words of a command line ask for.

    Attributes:
        file: the YAML file, absolute; None where none is named.
        overrides: of keys, in their order.
        explain: whether --explain is among the words, or --explain-all.
        explain_all: whether --explain-all is.
        problems: words that mean nothing.
        file_problems: why no file can be read; the values in it are then missing.
    """

    file: Path | None
    overrides: list[Override]
    explain: bool
    explain_all: bool
    problems: list[str]
    file_problems: list[str]


def usage() -> str:
    """Returns what --help begins with: the options, those of features included."""
    told = [feature.usage for feature in features().values() if feature.usage]
    lines = "\n".join([*told, USAGE_OF_SERVE])
    return USAGE.format(modes=textwrap.indent(lines, "    "))


def asks_for_help(argv: list[str]) -> bool:
    """Checks whether the keys are to be printed."""
    return "-h" in argv or "--help" in argv


def read_command_line(argv: list[str]) -> CommandLine:
    """Sorts the words of a command line (without the program's name) by what they are."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", nargs="?", const="")
    parser.add_argument("--config-name", nargs="?", const="")
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--explain-all", action="store_true")
    parser.add_argument("words", nargs="*")
    options, unknown = parser.parse_known_intermixed_args(argv)
    # The words after an unknown option cannot be told apart from it.
    words = options.words + [word for word in unknown if not word.startswith("-")]
    overrides = [word for word in words if _is_override(word)]
    files = [word for word in words if word.endswith(YAML_ENDINGS) and not _is_override(word)]
    strays = [word for word in words if not _is_override(word) and word not in files]
    file_problems = []
    if strays:
        file_problems.append(_describe_strays(strays))
    if options.config_name is not None:
        files.append(_file_of_hydras_options(options))
    elif options.config_path is not None:
        file_problems.append(f"--config-path={options.config_path} needs --config-name=NAME too")
    file = None
    if len(files) > 1:
        file_problems.append(
            f"give one CONFIG.yaml, not {' '.join(files)}; a YAML can say `extends: other.yaml`"
        )
    elif files:
        file = Path(located(files[0])).resolve()
    return CommandLine(
        file=file,
        overrides=[_override(word) for word in overrides],
        explain=options.explain or options.explain_all,
        explain_all=options.explain_all,
        problems=[_describe_unknown(word) for word in unknown if word.startswith("-")],
        file_problems=file_problems,
    )


def _is_override(word: str) -> bool:
    return ("=" in word and word != "=") or re.match(r"~[a-z]", word) is not None


def _describe_strays(words: list[str]) -> str:
    """Says that words are neither a YAML file nor a setting."""
    given = ", ".join(map(repr, words))
    return (
        f"{given}: neither a file that ends in .yaml nor KEY=VALUE; a setting is one word without "
        "blanks, as data.train_batch_size=8"
    )


def _describe_unknown(word: str) -> str:
    """Says that there is no such option, and how the setting is written that may be meant."""
    setting = word.lstrip("-")
    if "." in setting:
        return f"{word!r} is no option; a setting has no dashes: {setting.partition('=')[0]}=VALUE"
    modes = [option for feature in features().values() for option in feature.modes]
    nearest = did_you_mean(word.partition("=")[0], [*OPTIONS, *modes], cutoff=0.75)
    return f"{word!r} is no option (see --help){'.' if nearest else ''}{nearest}"


def _override(word: str) -> Override:
    """Reads KEY=TEXT, +KEY=TEXT, ++KEY=TEXT or ~KEY."""
    if word.startswith("~"):
        return Override(word[1:], text=None)
    key, _, text = word.lstrip("+").partition("=")
    return Override(key.strip(), text)


def _file_of_hydras_options(options: Namespace) -> str:
    """Joins --config-path, which is configs/ where it is not given, and --config-name."""
    folder = "configs" if options.config_path is None else options.config_path
    path = Path(folder, options.config_name)
    if path.suffix in YAML_ENDINGS:
        return str(path)
    return f"{path}.yaml"
