"""The rollout engines by the name that `actor_rollout_ref.rollout.name` gives them.

An engine is one file with a subclass of `BaseRollout` and one line here. One of your own needs no
line here: register it in the file that `custom_algorithm` names, which every process of a run
loads:

    from workers.rollout.engine_registry import register_engine

    register_engine("mine", "/path/to/my_engine.py:MyRollout")

and set `actor_rollout_ref.rollout.name=mine`. Its class is built as `MyRollout(config, spec)`, with
the run's `RolloutConfig` and a `ModelSpec`; `workers/hf_rollout.py` is the shortest example.

Invariant: this module imports neither torch nor an engine; a class is loaded when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from data.loading import load_object
from data.names import registered

if TYPE_CHECKING:
    from workers.rollout.base_rollout import BaseRollout

# name -> "PACKAGE.MODULE:CLASS" or "/path/file.py:CLASS"
ENGINES = {
    "vllm": "workers.vllm_rollout_spmd:vLLMRollout",
    "sglang": "workers.sglang_rollout:SGLangRollout",
    "hf": "workers.hf_rollout:HFRollout",
}
SETTING = "actor_rollout_ref.rollout.name"


def register_engine(name: str, source: str) -> None:
    """Makes "PACKAGE.MODULE:CLASS" or "/path/file.py:CLASS" the engine of that name.

    Raises:
        ValueError: the name belongs to another class.
    """
    owner = ENGINES.setdefault(name, source)
    if owner != source:
        raise ValueError(
            f"rollout engine {name!r} is already registered by {owner}; "
            "register yours under another name"
        )


def engine_source(name: str) -> str:
    """Returns where the class of an engine is, "MODULE_OR_FILE:CLASS"; imports nothing.

    Raises:
        ValueError: there is no engine of that name; lists those there are.
    """
    return registered(ENGINES, SETTING, name)


def load_engine_class(name: str) -> type[BaseRollout]:
    """Returns the class of an engine; imports its file, but not the engine's own package.

    Raises:
        ValueError: there is no engine of that name; lists those there are.
    """
    return load_object(engine_source(name), SETTING)
