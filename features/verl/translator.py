"""Translates verl's keys, and Hydra's list of `defaults:`, for training/config/layers.py.

The facts stand in verl_keys.yaml (`verl_keys` looks them up); what several keys say only together
is in `verl_runs`.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from features.verl.verl_keys import (
    NULL_MEANS_NOTHING,
    ONE_LIMIT,
    READ_TOGETHER,
    holds_moved_keys,
    judge,
    moved_to,
    translation,
)
from features.verl.verl_runs import set_runs_of_verl
from training.config.layers import Layers
from training.config.schema.ppo import PPOConfig
from training.config.translator import KeyTranslator, ParentFile, Parents, Verdict

# Names in a list of Hydra's defaults: verl's own files, and the values of the file with the list.
VERLS_DEFAULTS = "ppo_trainer"
VERLS_FILES = frozenset(
    {
        *("actor", "algorithm", "critic", "data", "dp_actor", "dp_critic", "dp_ref"),
        *("dp_reward_model", "fsdp", "hf_model", "legacy_data", "legacy_reward_impl", "model"),
        *("profiler", "ref", "reward", "reward_manager", "reward_model", "rollout"),
        *("rollout_correction", "torch", "npu_profile"),
    }
)
THIS_FILE = "_self_"
# verl builds objects from such keys.
CLASS_NAME = "_target_"
# verl's switch for episodes of several turns.
SEVERAL_TURNS = "actor_rollout_ref.rollout.multi_turn.enable"


def _parent_of(entry: Any, path: Path) -> ParentFile | None:
    """Returns the file that an entry of a list of defaults names; None where it names none.

    Args:
        path: of the file with the list.
    """
    if isinstance(entry, str):
        return ParentFile((path.parent / f"{entry}.yaml").resolve())
    if not isinstance(entry, Mapping) or len(entry) != 1:
        return None
    [(choice, name)] = entry.items()
    group, _, package = str(choice).removeprefix("optional ").partition("@")
    # Without a package the values stand under the group's name.
    section = package or group.replace("/", ".").strip(".")
    return ParentFile((path.parent / group / f"{name}.yaml").resolve(), section)


def _is_verls_own(entry: Any) -> bool:
    """Checks whether an entry of a list of defaults names a file of verl's own."""
    if isinstance(entry, str):
        return entry == VERLS_DEFAULTS
    if not isinstance(entry, Mapping) or len(entry) != 1:
        return False
    [(choice, name)] = entry.items()
    return "@" in str(choice) and str(name) in VERLS_FILES


def _is_off(entry: Any) -> bool:
    """Checks whether an entry names nothing, or says how Hydra itself works."""
    if not isinstance(entry, Mapping) or len(entry) != 1:
        return False
    [(choice, name)] = entry.items()
    return name is None or str(choice).startswith(("override hydra/", "hydra/"))


def _as_written(entry: Any) -> str:
    """Returns an entry as a YAML file has it."""
    if isinstance(entry, str):
        return entry
    return ", ".join(f"{choice}: {name}" for choice, name in entry.items())


class VerlKeys(KeyTranslator):
    """Knows verl's keys."""

    program = "verl"

    def new_key(self, key: str) -> str | None:
        return moved_to(key)

    def holds_renamed_keys(self, key: str) -> bool:
        return holds_moved_keys(key)

    def settings_for(self, key: str, value: Any) -> dict[str, Any] | None:
        return translation(key, value)

    def judge(self, key: str, value: Any) -> Verdict | None:
        if key in READ_TOGETHER:
            return Verdict("it is read together with others", "silent")
        return judge(key, value)

    def leaves_null(self, key: str) -> bool:
        return key in NULL_MEANS_NOTHING

    def shares_limit(self, key: str) -> bool:
        return key in ONE_LIMIT.values()

    def drops(self, word: str) -> bool:
        return word == CLASS_NAME

    def take_parents(self, tree: dict[Any, Any], path: Path) -> Parents:
        """Takes a list of Hydra's `defaults:` out of a file's tree.

        It may name verl's own files, whose values stand in the code here, and files beside this
        one: `name`, or `group@package: name`, which is group/name.yaml and stands under package.
        """
        parents = Parents()
        names = tree.pop("defaults", None) or []
        for place, entry in enumerate(names):
            is_last = place == len(names) - 1
            if entry == THIS_FILE and is_last:
                continue
            parent = _parent_of(entry, path)
            if parent is not None and parent.path.exists():
                parents.files.append(parent)
            elif _is_verls_own(entry):
                parents.notes.append(
                    f"`defaults: {_as_written(entry)}` ({path.name}) has no effect here: what a "
                    "file leaves out is at the defaults of this project (docs/verl.md lists those "
                    "that differ)"
                )
            elif not _is_off(entry):
                parents.problems.append(
                    f"{path.name}: `defaults:` with {entry!r} is Hydra's; write "
                    "`extends: other.yaml`, whose values this file's win over"
                )
        return parents

    def complete(self, layers: Layers) -> None:
        set_runs_of_verl(layers)

    def contradictions(self, values: Mapping[str, Any], config: PPOConfig) -> Iterator[str]:
        """Yields two values of one limit, and several turns without what is acted in."""
        for verl_key, key in ONE_LIMIT.items():
            verl_value = values.get(verl_key)
            value = attrgetter(key)(config)
            if verl_value is not None and str(verl_value) != str(value):
                yield f"{verl_key}={verl_value} and {key}={value} are the same limit: give one"
        wants_turns = str(values.get(SEVERAL_TURNS)).lower() == "true"
        if wants_turns and not config.environments:
            yield (
                f"{SEVERAL_TURNS}=true: set what the agent acts in, agent.environment.name or "
                ".path, or give tools and rows, agent.tools and data.train_files"
            )
