"""vLLM for the language part of a model that also sees or hears, without what pictures need.

vLLM has the language parts as models of their own: it is given the part's configuration in place of
the folder's, builds that model, and gets its weights from the trainer, under the part's names.
Some of that code imports image processors all the same, and those torchvision, of which nothing is
used: where it is not installed empty modules stand in for it during that one import. Invariant:
no such module is left behind.
"""

import copy
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformers import AutoModelForCausalLM

from workers.model.builder import ModelSpec

TORCHVISION = "torchvision"
# What image processors import of it when they are imported themselves.
STOOD_FOR = (
    TORCHVISION,
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)
# How transformers calls the types of language parts.
PART_TYPE = "_text"


def text_part_args(spec: ModelSpec) -> dict[str, Any]:
    """Derives what vLLM must know of a model whose language part alone is played.

    Nothing is read of the folder: its names are the whole model's.
    """
    if spec.whole_model is None:
        return {}
    config = copy.deepcopy(spec.hf_config)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return {"hf_overrides": lambda _: config, "load_format": "dummy"}


def import_without_torchvision(spec: ModelSpec) -> None:
    """Imports vLLM's code of a language part where that would ask for torchvision in vain."""
    config = spec.hf_config
    if not config.model_type.endswith(PART_TYPE) or importlib.util.find_spec(TORCHVISION):
        return
    from vllm import ModelRegistry

    architecture = AutoModelForCausalLM._model_mapping[type(config)].__name__
    known: Any = ModelRegistry.models.get(architecture)
    names = vars(known) if known is not None else {}
    # One that was registered before is imported.
    if "module_name" not in names:
        return
    with empty_torchvision():
        module = importlib.import_module(names["module_name"])
    ModelRegistry.register_model(architecture, getattr(module, names["class_name"]))


class _Empty(ModuleType):
    """Stands for a module; whatever is asked of it is there, and is nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _AnyMember(type):
    def __getattr__(cls, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Nothing(metaclass=_AnyMember):
    """Stands for a class, such as InterpolationMode, whose members are None."""


@contextmanager
def empty_torchvision() -> Iterator[None]:
    """Has empty modules in torchvision's place in the block."""
    # It looks for torchvision once, and must not find these.
    import transformers.utils.import_utils

    transformers.utils.import_utils.is_torchvision_available()
    for name in STOOD_FOR:
        module = _Empty(name)
        module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, own_name = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own_name, module)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == TORCHVISION]:
            del sys.modules[name]
