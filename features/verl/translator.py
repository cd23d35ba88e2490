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
from training.config.translator import KeyTranslator, Parents, Verdict

# Names in a list of Hydra's defaults: verl's own file, and the values of the file with the list.
VERLS_DEFAULTS = "ppo_trainer"
THIS_FILE = "_self_"
# Of verl's own way to build objects.
CLASS_NAME = "_target_"
# verl's switch for episodes of several turns.
SEVERAL_TURNS = "actor_rollout_ref.rollout.multi_turn.enable"


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

        It may name verl's own file, whose values stand in the code here, and files beside this one.
        """
        parents = Parents()
        names = tree.pop("defaults", None) or []
        for place, name in enumerate(names):
            parent = path.parent / f"{name}.yaml"
            is_last = place == len(names) - 1
            if isinstance(name, str) and parent.exists():
                parents.files.append(parent.resolve())
            elif name == VERLS_DEFAULTS:
                parents.notes.append(
                    f"`defaults: {name}` ({path.name}) has no effect here: what a file leaves out "
                    "is at the defaults of this project"
                )
            elif name != THIS_FILE or not is_last:
                parents.problems.append(
                    f"{path.name}: `defaults:` with {name!r} is Hydra's; write "
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
