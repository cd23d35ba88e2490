"""Checks the files and folders that a configuration names: data to read, folders to write."""

import glob
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data.names import nearest_name
from data.prompt_files import SUFFIXES, read_rows
from training.config.schema.data import DataConfig
from training.config.schema.ppo import PPOConfig
from training.config.section import PROJECT_ROOT
from training.config.side_services import tool_sources

# An error lists at most so many names.
MAX_NAMES_SHOWN = 8
# Larger files are read, and checked, only where the run reads them, in bytes.
LARGE_FILES = 64 << 20
# The folders of the configs' own models and data, and the programs that make them.
PREPARED = {
    "outputs/quickstart/task": "examples/prepare_quickstart.py",
    "outputs/tiny_prompts/task": "examples/prepare_tiny_prompts.py",
    "outputs/smollm2": "examples/prepare_smollm2.py",
    "outputs/gsm8k": "examples/prepare_gsm8k.py",
    "outputs/qwen3_5_tools": "examples/prepare_zoo_game.py",
    "outputs/clues": "examples/prepare_clues.py",
    "outputs/mixed": "examples/prepare_mixed.py",
    "outputs/pages": "examples/prepare_pages.py",
    "outputs/codes": "examples/prepare_codes.py",
    "outputs/sums": "examples/prepare_sums.py",
}


def how_to_make(path: str) -> str:
    """Returns "; python examples/prepare_… makes it" for what such a program makes, else ""."""
    place = Path(path).absolute()
    for folder, program in PREPARED.items():
        homes = (Path(folder).absolute(), PROJECT_ROOT / folder)
        if any(place.is_relative_to(home) for home in homes):
            return f"; `python {program}` makes it"
    return ""


def missing_file(key: str, path: str) -> Iterator[str]:
    """Yields that there is no such file, from where it was looked for, and what is there."""
    if not Path(path).is_file():
        fix = how_to_make(path) or _form_of_path(path) or nearest_in_folder(path)
        yield f"{key}={path} is not a file (seen from {Path.cwd()}){fix}"


def _form_of_path(path: str) -> str:
    """Returns "; ..." with what to write where a path is a folder, a pattern, a list or FILE:NAME.

    "" of a path in the form of a file's.
    """
    folder = Path(path)
    file, _, name = path.rpartition(":")
    if folder.is_dir():
        there = [str(entry) for entry in _entries(folder) if entry.is_file()]
        return f"; it is a folder, name a file in it: {_some(there)}"
    if "*" in path or "?" in path:
        there = sorted(glob.glob(path))
        return f"; patterns are not read, give a list: [{_some(there)}]"
    if "," in path:
        return f"; give several as a list: [{path}]"
    if file.endswith(".py"):
        return f"; give {file} here, and {name} under the key beside it, cls or name"
    return ""


def _some(names: list[str]) -> str:
    """Joins names, the first of them where they are many; "none" where there are none."""
    shown = names[:MAX_NAMES_SHOWN]
    if len(names) > MAX_NAMES_SHOWN:
        shown.append("…")
    return ", ".join(shown) or "none"


def nearest_in_folder(path: str) -> str:
    """Returns "; did you mean 'FOLDER/x'?" with the name in the path's folder that is nearest.

    Where the folder itself is missing, the nearest of the folders beside it is named; "" where
    nothing there is called alike.
    """
    place = Path(path).expanduser()
    missing = place
    while not missing.parent.is_dir():
        missing = missing.parent
    # Files that have their ending alone in common are not alike.
    names = [
        entry.name
        for entry in _entries(missing.parent)
        if nearest_name(missing.stem, [entry.stem]) is not None
        and (entry.is_file() or missing.suffix not in (".py", *SUFFIXES))
    ]
    nearest = nearest_name(missing.name, names, cutoff=0.0)
    if nearest is None or nearest == missing.name:
        return ""
    # As the path was written: relative, or from its root.
    found = missing.parent / nearest / place.relative_to(missing)
    if not found.exists():
        return f"; there is no {str(missing)!r}, but {str(missing.parent / nearest)!r}"
    return f"; did you mean {str(found)!r}?"


def _entries(folder: Path) -> list[Path]:
    """Lists a folder; nothing where it may not be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def unwritable_folder(key: str, folder: str) -> Iterator[str]:
    """Yields what stands in the way of making a folder and writing into it."""
    path = Path(folder).absolute()
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        yield (
            f"{key}={folder}: {nearest} is not a folder that can be written; name another folder"
        )


# What a prompt is rendered with in any case; see data/chat_templates.py.
TEMPLATE_ARGUMENTS = ("conversation", "messages", "prompt", "tokenizer", "where", "tokenize")
TEMPLATE_OUTPUTS = ("return_dict", "return_tensors", "return_assistant_tokens_mask")


def _check_template_arguments(config: PPOConfig) -> Iterator[str]:
    """Requires that the chat template's variables name none of what the trainer gives."""
    for name in (*TEMPLATE_ARGUMENTS, *TEMPLATE_OUTPUTS):
        if name in config.data.apply_chat_template_kwargs:
            yield (
                f"data.apply_chat_template_kwargs.{name}: the trainer renders prompts as text and "
                "gives this itself; take it out, or call the template's variable otherwise"
            )


def check_tasks(config: PPOConfig, own_data: bool) -> Iterator[str]:
    """Requires something to train on, and to validate on where that is asked for.

    Args:
        own_data: datasets and environments are passed as objects.
    """
    if own_data:
        return
    trainer = config.trainer
    acts = bool(config.environments)
    if not acts and not config.data.train_files:
        yield (
            "data.train_files is missing: give a parquet, json or jsonl file, or a list of them; "
            "or something to act in, agent.environment.name"
        )
    if not acts and (config.agent.tools or tool_sources(config)):
        yield (
            "agent.tools and mcp.servers need an environment, agent.environment.name or "
            ".path, or rows to play, data.train_files"
        )
    validates = config.data.val_files or (acts and config.agent.val_length)
    source = "agent.val_length" if acts else "data.val_files"
    if trainer.val_only and not validates:
        yield f"trainer.val_only has nothing to validate on: set {source}"
    if trainer.test_freq > 0 and not validates:
        yield f"trainer.test_freq has nothing to validate on: set {source}"


def check_data(config: PPOConfig) -> Iterator[str]:
    """Requires that the data files are there, and hold rows that can be used.

    Whether their prompts fit is known once there is a tokenizer. An environment is given rows as
    they are.
    """
    data = config.data
    if config.environments and not config.plays_dataset_rows:
        yield from _check_tasks_of_environment("data.train_files", data.train_files, data)
        yield from _check_tasks_of_environment("data.val_files", data.val_files, data)
        return
    yield from _check_template_arguments(config)
    yield from _check_rows(config, "data.train_files", data.train_files, data.train_max_samples)
    yield from _check_rows(config, "data.val_files", data.val_files, data.val_max_samples)


def _check_rows(
    config: PPOConfig, key: str, paths: tuple[str, ...], max_samples: int
) -> Iterator[str]:
    """Reads the rows of some files, and yields what is wrong with them."""
    yield from _missing_data_files(key, paths)
    readable = _files_to_try(paths, config.data)
    if not readable:
        return
    # Imports torch: late.
    from data.rl_dataset import RLHFDataset

    untokenized = replace(config.data, truncation="right", filter_overlong_prompts=False)
    try:
        dataset = RLHFDataset(readable, None, untokenized, max_samples=max_samples)
    except ValueError as error:
        yield f"{key}: {error}; files of another form are read by data.custom_cls"
        return
    batch_size = config.data.train_batch_size
    # A sampler may give rows more than once.
    sampler = config.data.sampler
    has_sampler = sampler.class_path is not None or sampler.name is not None
    gives_each_once = key == "data.train_files" and not has_sampler
    if gives_each_once and len(dataset) < config.prompts_per_step:
        yield (
            f"data.train_batch_size={batch_size} is more than the rows of {key}, "
            f"{len(dataset)}: make it smaller or give more rows"
        )


def _missing_data_files(key: str, paths: tuple[str, ...]) -> Iterator[str]:
    """Yields which data files are not there, and the fix."""
    for path in paths:
        # As a reader of rows takes it.
        if Path(path).expanduser().is_file():
            continue
        for problem in missing_file(key, path):
            yield problem + _advice_on_hub_names(path)


def _files_to_try(paths: tuple[str, ...], data: DataConfig) -> list[str]:
    """Lists the files that are read here; none where they are large, or of the user's own form."""
    expanded = [Path(path).expanduser() for path in paths]
    readable = [str(path) for path in expanded if path.is_file()]
    size = sum(Path(path).stat().st_size for path in readable)
    if size > LARGE_FILES or data.custom_cls.path is not None:
        return []
    return readable


def _check_tasks_of_environment(
    key: str, paths: tuple[str, ...], data: DataConfig
) -> Iterator[str]:
    """Yields which files of an environment's tasks are not there, or hold no rows."""
    yield from _missing_data_files(key, paths)
    for file in _files_to_try(paths, data):
        try:
            read_rows(file)
        except ValueError as error:
            yield f"{key}: {error}; files of another form are read by data.custom_cls"


def _advice_on_hub_names(path: str) -> str:
    """Returns "; …" where a data file's path is in the form of a data set's name, ORG/NAME."""
    is_name = path.count("/") == 1 and not Path(path).suffix and not Path(path).parent.exists()
    if not is_name:
        return ""
    return (
        "; data sets of a hub are made into files of rows first, as examples/prepare_gsm8k.py does"
    )


def check_run_folders(config: PPOConfig) -> Iterator[str]:
    """Requires that the run's folder can be written, and that the one to resume from is there."""
    trainer = config.trainer
    key = "trainer.default_local_dir"
    if not trainer.default_local_dir:
        key += "=null, so the run's folder"
    if "://" in trainer.run_dir:
        yield (
            f"{key}={trainer.run_dir} is a URL: name a folder; of a bucket one where it is mounted"
        )
    else:
        yield from unwritable_folder(key, trainer.run_dir)
    resumed = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
    if resumed is not None and not Path(resumed).is_dir():
        yield f"trainer.resume_from_path={resumed} is not a folder"
