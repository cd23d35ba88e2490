"""Checks that the models that a configuration names exist, and that a full row fits them."""

import json
import logging
import re
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.names import did_you_mean
from data.prompt_files import is_lfs_pointer
from training.config.resources.files import how_to_make, nearest_in_folder
from training.config.resources.hub import hub_refusal
from training.config.schema.model import CriticModelConfig
from training.config.schema.ppo import PPOConfig

log = logging.getLogger(__name__)
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
# What runs are written to here, by our configs and by default; no organisation of the hub is meant.
FOLDERS_OF_RUNS = (("outputs",), ("checkpoints",))
POLICY_KEY = "actor_rollout_ref.model"
# Two names are one, misspelt, where they are at least so alike.
MISSPELT = 0.85


def check_models(config: PPOConfig, ask_hub: bool) -> Iterator[str]:
    """Requires that the models exist, and that a full row fits those that train.

    Args:
        ask_hub: look models up that are no local folders; otherwise they are left unchecked.
    """
    trained = trained_models(config)
    for path, key in _keys_by_path(config).items():
        is_folder = Path(path).is_dir()
        if not ask_hub and not is_folder and HUB_NAME.fullmatch(path):
            log.info(
                "%s.path=%s is no folder here: left unchecked, as the hub is not asked", key, path
            )
            continue
        try:
            entries = read_model_config(path)
        except (OSError, ValueError) as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            if is_folder:
                yield f"{key}.path={path}: {reason}"
            else:
                fix = _made_for_a_game(config, key)
                yield f"{key}.path={path} {missing_model(path, reason)}{fix}"
            continue
        # transformers would make an empty tokenizer; missing weights it names itself.
        if key == POLICY_KEY and is_folder and not any(Path(path).glob("tokenizer*")):
            yield f"{key}.path={path}: the folder holds no tokenizer; save it there"
        yield from _unreadable_weights(key, path)
        if key in trained:
            _warn_of_unknown_entries(key, trained[key], entries)
            yield from _check_fit(config, key, trained[key], entries)


def _unreadable_weights(key: str, path: str) -> Iterator[str]:
    """Yields which files of weights in a model's folder were not fetched, or not as a whole."""
    for file in sorted(Path(path).glob("*.safetensors")):
        if is_lfs_pointer(file):
            yield f"{key}.path={path}: {file.name} is a pointer of Git LFS: `git lfs pull`"
        elif not _is_whole(file):
            yield (
                f"{key}.path={path}: {file.name} ({file.stat().st_size:,} bytes) is cut or "
                "damaged: its header cannot be read, or names more bytes; fetch or save it again"
            )


def _is_whole(file: Path) -> bool:
    """Checks a safetensors file's length: a number of 8 bytes, so long a header, the tensors.

    The header says where each tensor ends, counted from the header's end.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        header_length = int.from_bytes(opened.read(8), "little")
        if size < 8 + header_length:
            return False
        try:
            header = json.loads(opened.read(header_length))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return size >= 8 + header_length + max(ends, default=0)


def missing_model(path: str, reason: str) -> str:
    """Says that a path is no folder, why the hub has none where it is asked, and what may be meant.

    Args:
        reason: of the hub, where the path could be a name there; else what is wrong with it.
    """
    place = f"is not a folder (seen from {Path.cwd()})"
    fix = how_to_make(path) or nearest_in_folder(path)
    if Path(path).is_file():
        fix = f"; it is a file, give the folder that it is in, {Path(path).parent}"
    if not may_be_hub_name(path):
        return f"{place} and cannot be a hub name{fix}"
    return f"{place}, nor is it found on the hub ({reason}){fix}"


def _made_for_a_game(config: PPOConfig, key: str) -> str:
    """Returns "; ..." with what makes a small policy for a run's environments, else ""."""
    path = str(config.actor_rollout_ref.model.path)
    can_be_made = config.environments and key == POLICY_KEY and not Path(path).exists()
    if not can_be_made or may_be_hub_name(path) or how_to_make(path):
        return ""
    return "; `python examples/prepare_game.py CONFIG.yaml` makes a small one for the game there"


def may_be_hub_name(path: str) -> bool:
    """Checks the form of a name; the hub is not asked for what a folder that is there lacks."""
    in_a_folder = "/" in path and Path(path).parent.is_dir()
    in_a_folder |= Path(path).parts[:1] in FOLDERS_OF_RUNS
    return HUB_NAME.fullmatch(path) is not None and not in_a_folder


def missing_place(given: str) -> str | None:
    """Says that a path, by which a model or a run is named, is not there; None: it may be used."""
    if Path(given).expanduser().exists() or may_be_hub_name(given):
        return None
    return f"there is no {given} (seen from {Path.cwd()}){nearest_in_folder(given)}"


def trained_models(config: PPOConfig) -> dict[str, CriticModelConfig]:
    """Returns the models that are trained, by the key of their section."""
    models: dict[str, CriticModelConfig] = {POLICY_KEY: config.actor_rollout_ref.model}
    if config.need_critic:
        models["critic.model"] = config.critic.model
    return models


def _keys_by_path(config: PPOConfig) -> dict[str, str]:
    """Returns the paths of all models, each with the first of the sections that name it."""
    paths = {key: model.path for key, model in trained_models(config).items()}
    paths["actor_rollout_ref.ref.model"] = config.actor_rollout_ref.ref.model.path
    if config.reward_model.enable:
        paths["reward_model.model"] = config.reward_model.model.path
    keys: dict[str, str] = {}
    for key, path in paths.items():
        if path:
            keys.setdefault(path, key)
    return keys


def read_model_config(path: str) -> dict[str, Any]:
    """Reads a model's config.json, from a local folder or, for a hub name (org/name), from the hub.

    Raises:
        OSError, ValueError: there is no such folder or hub model, or it has no config.json with
            settings.
    """
    if Path(path).is_dir():
        entries = _read_local_config(Path(path, "config.json"))
    elif not may_be_hub_name(path):
        raise ValueError(f"is not a folder (seen from {Path.cwd()}) and cannot be a hub name")
    else:
        refusal = hub_refusal(path)
        if refusal is not None:
            raise OSError(refusal)
        from transformers import PretrainedConfig

        entries = PretrainedConfig.get_config_dict(path)[0]
    if not entries or not isinstance(entries, dict):
        raise ValueError("holds no config.json with settings; is it a Hugging Face model folder?")
    return entries


def _read_local_config(file: Path) -> Any:
    """Returns what a config.json holds, None where there is none; needs no transformers."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not a valid JSON file: {error}") from error


def _check_fit(
    config: PPOConfig, key: str, model: CriticModelConfig, entries: dict[str, Any]
) -> Iterator[str]:
    """Requires that a full row, in tokens, and the ranks that share sequences fit the model.

    Its `override_config` counts before `entries`, its config.json, and those before their
    text_config, where models that also see images keep the language model's.
    """
    text_entries = _text_entries(entries | model.override_config)
    known = ChainMap(model.override_config, entries, text_entries)

    ranks_per_sequence = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    heads = known.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0 and heads % ranks_per_sequence:
        yield (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size="
            f"{ranks_per_sequence} does not divide the {heads} attention heads of "
            f"{key}.path={model.path}: take one of their divisors"
        )

    row = config.data.row_length
    what = f"data.max_prompt_length + data.max_response_length = {row}"
    limit = config.actor_rollout_ref.rollout.max_model_len
    if key == POLICY_KEY and limit:
        row = limit
        what = f"actor_rollout_ref.rollout.max_model_len={limit}"
    context = known.get("max_position_embeddings")
    if isinstance(context, int) and row > context:
        yield f"{what} tokens, but {key}.path={model.path} reads at most {context}"


def _text_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a config's text_config, none where there is none."""
    text_entries = entries.get("text_config")
    return text_entries if isinstance(text_entries, dict) else {}


def _warn_of_unknown_entries(key: str, model: CriticModelConfig, entries: dict[str, Any]) -> None:
    """Warns of entries of `override_config` that are misspelt, which transformers does not see.

    A config.json may leave out what is at its default, so that only what is nearly the name of one
    of its entries is meant.
    """
    known = entries.keys() | _text_entries(entries).keys()
    for name in model.override_config:
        hint = did_you_mean(str(name), known, MISSPELT)
        if name not in known and hint:
            log.warning(
                f"{key}.override_config.{name} has no effect: config.json has no {name}.{hint}"
            )
