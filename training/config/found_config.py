"""Checks a config that a command found in a folder, and that nobody has named.

Whoever evaluates, or replays, a stranger's run has not asked for the code that its config.yaml
names. Invariant: such a config brings numbers and choices, names of data and weights, and code of
this project; no other code, no program and no place to write to.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from training.config.layers import COMMAND_LINE
from training.config.leaves import Leaf, leaves
from training.config.loader import ConfigError, LoadedConfig
from training.config.schema.ppo import PPOConfig
from training.config.section import PROJECT_ROOT

# So much of a setting is shown that a stranger's config asks for.
MAX_VALUE_CHARS = 120
# Words that name data and weights, which are read as such, and the run.
HARMLESS = frozenset(
    {
        "data.train_files",
        "data.val_files",
        "data.prompt_key",
        "data.reward_fn_key",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.target_modules",
        "actor_rollout_ref.actor.optim.betas",
        "actor_rollout_ref.actor.checkpoint.save_contents",
        "actor_rollout_ref.actor.checkpoint.load_contents",
        "critic.model.path",
        "critic.optim.betas",
        "critic.checkpoint.save_contents",
        "critic.checkpoint.load_contents",
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.logger",
    }
)
# Folders of this project whose code its user wrote, or keeps.
OWN_CODE = ("contrib", "custom", "data", "examples", "features", "training", "workers")
# A Python file, and what is taken from it.
CODE_FILES = {
    "custom_algorithm": None,
    "custom_reward_function.path": "custom_reward_function.name",
    "data.custom_cls.path": "data.custom_cls.name",
    "agent.environment.path": "agent.environment.cls",
}
# Names of what is registered here.
NAMES = (
    "actor_rollout_ref.actor.optim.optimizer",
    "critic.optim.optimizer",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.rollout.name",
    "reward_model.reward_manager",
    "algorithm.adv_estimator",
)


def require_no_code(loaded: LoadedConfig, file: str, named: str) -> None:
    """Checks a config that a folder brought, which may be a stranger's.

    Numbers and the choices that a setting allows may stand there, the words of HARMLESS, and
    Python files of this project.

    Args:
        file: that the config was read from.
        named: the command that names it, and takes it as it is.
    Raises:
        ConfigError: another setting is in it, which could run code, or a program.
    """
    defaults = dict(leaves(PPOConfig()))
    own = _keys_of_own_code(dict(leaves(loaded.config)))
    asked = []
    for key, leaf in leaves(loaded.config):
        if key in own:
            continue
        source = loaded.sources.get(key)
        if source in ("default", COMMAND_LINE) or leaf.value == defaults[key].value:
            continue
        if key.endswith("trust_remote_code") or not _is_harmless(key, leaf.value):
            asked.append(f"{key}={leaf.value}"[:MAX_VALUE_CHARS])
    if asked:
        raise ConfigError(
            [
                f"{file} asks for {', '.join(asked)}, and nobody has named that file: if you trust "
                f"the one who wrote it, give it as the config: {named}"
            ]
        )


def _keys_of_own_code(settings: Mapping[str, Leaf]) -> set[str]:
    """Returns the keys of Python files of this project, and of the names that are taken from them.

    Files of outputs are none of them: a stranger's run may lie there.
    """
    keys: set[str] = set()
    for key, name in CODE_FILES.items():
        path = settings[key].value
        if path is None or not _is_own_code(Path(path).resolve()):
            continue
        keys.add(key)
        if name is not None and str(settings[name].value).isidentifier():
            keys.add(name)
    return keys


def _is_own_code(file: Path) -> bool:
    """Tells whether a file lies where this project's user writes or keeps code."""
    return any(file.is_relative_to(PROJECT_ROOT / folder) for folder in OWN_CODE)


def _is_harmless(key: str, value: Any) -> bool:
    """Tells whether a setting of a stranger's may be taken."""
    if value is None or isinstance(value, bool | int | float) or key in HARMLESS:
        return True
    if key in NAMES:
        # A name with a dot or a colon is that of a file or a module.
        return re.fullmatch(r"[\w-]+", str(value)) is not None
    if isinstance(value, tuple | dict):
        return not value
    leaf = dict(leaves(PPOConfig()))[key]
    return isinstance(value, str) and leaf.plain is Literal
