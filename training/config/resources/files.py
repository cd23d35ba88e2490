"""Checks the files and folders that a configuration names: data to read, folders to write."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data.names import nearest_name
from training.config.schema.ppo import PPOConfig
from training.config.section import PROJECT_ROOT

# Larger files are read, and checked, only where the run reads them, in bytes.
LARGE_FILES = 64 << 20
# The folders of the configs' own models and data, and the programs that make them.
PREPARED = {
    "outputs/quickstart/task": "examples/prepare_quickstart.py",
    "outputs/tiny_prompts/task": "examples/prepare_tiny_prompts.py",
    "outputs/smollm2": "examples/prepare_smollm2.py",
    "outputs/gsm8k": "examples/prepare_gsm8k.py",
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
        fix = how_to_make(path) or nearest_in_folder(path)
        yield f"{key}={path} is not a file (seen from {Path.cwd()}){fix}"


def nearest_in_folder(path: str) -> str:
    """Returns "; did you mean 'FOLDER/x'?" with the name in the path's folder that is nearest.

    Where the folder itself is missing, the nearest of the folders beside it is named; "" where
    nothing there is called alike.
    """
    place = Path(path).expanduser()
    missing = place
    while not missing.parent.is_dir():
        missing = missing.parent
    names = [entry.name for entry in _entries(missing.parent)]
    nearest = nearest_name(missing.name, names)
    if nearest is None:
        return ""
    # As the path was written: relative, or from its root.
    found = missing.parent / nearest / place.relative_to(missing)
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
    if not acts and config.agent.tools:
        yield (
            "agent.tools need an environment, agent.environment.name or .path, or rows to play, "
            "data.train_files"
        )
    validates = config.data.val_files or (acts and config.agent.val_length)
    source = "agent.val_length" if acts else "data.val_files"
    if trainer.val_only and not validates:
        yield f"trainer.val_only has nothing to validate on: set {source}"
    if trainer.test_freq > 0 and not validates:
        yield f"trainer.test_freq has nothing to validate on: set {source}"


def check_data(config: PPOConfig) -> Iterator[str]:
    """Requires that the data files are there, and hold rows that can be used.

    Whether their prompts fit is known once there is a tokenizer.
    """
    if config.environments and not config.plays_dataset_rows:
        return
    data = config.data
    yield from _check_rows(config, "data.train_files", data.train_files, data.train_max_samples)
    yield from _check_rows(config, "data.val_files", data.val_files, data.val_max_samples)


def _check_rows(
    config: PPOConfig, key: str, paths: tuple[str, ...], max_samples: int
) -> Iterator[str]:
    """Reads the rows of some files, and yields what is wrong with them."""
    for path in paths:
        yield from missing_file(key, path)
    readable = [path for path in paths if Path(path).is_file()]
    size = sum(Path(path).stat().st_size for path in readable)
    if not readable or size > LARGE_FILES or config.data.custom_cls.path is not None:
        return
    # Imports torch: late.
    from data.rl_dataset import RLHFDataset

    untokenized = replace(config.data, truncation="right", filter_overlong_prompts=False)
    try:
        RLHFDataset(readable, None, untokenized, max_samples=max_samples)
    except ValueError as error:
        yield f"{key}: {error}; files of another form are read by data.custom_cls"


def check_run_folders(config: PPOConfig) -> Iterator[str]:
    """Requires that the run's folder can be written, and that the one to resume from is there."""
    trainer = config.trainer
    key = "trainer.default_local_dir"
    if not trainer.default_local_dir:
        key += "=null, so the run's folder"
    yield from unwritable_folder(key, trainer.run_dir)
    resumed = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
    if resumed is not None and not Path(resumed).is_dir():
        yield f"trainer.resume_from_path={resumed} is not a folder"
