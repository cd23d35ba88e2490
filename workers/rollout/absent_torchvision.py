"""Imports vLLM's model classes that ask for torchvision, where it is not installed.

The language models of families that also see (Qwen3.5) live in files that import image processors.
For text nothing of them runs, so that empty modules in torchvision's place are enough while the
file is imported.

Invariant: behind the import torchvision is as absent as before.
"""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torchvision"


class _Nothing(type):
    """A class whose every attribute is None."""

    def __getattr__(cls, name: str) -> None:
        return None


class _EmptyModule(ModuleType):
    """A module whose every other name is a class of nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _EmptyModules(MetaPathFinder, Loader):
    """Finds torchvision, and whatever is imported from it, as empty modules."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != NAME:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module empty."""


@contextmanager
def empty_torchvision() -> Iterator[None]:
    """Puts empty modules in torchvision's place in the block."""
    from transformers.utils import import_utils

    # It looks once, and must not find the empty ones.
    import_utils.is_torchvision_available()
    finder = _EmptyModules()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]


def register_models(architectures: Sequence[str]) -> None:
    """Makes vLLM know the classes of these architectures, if torchvision alone is in their way."""
    if importlib.util.find_spec(NAME) is not None:
        return
    from vllm import ModelRegistry

    for name in architectures:
        model = ModelRegistry.models.get(name)
        if model is None:
            continue
        try:
            model.load_model_cls()
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != NAME:
                raise
            with empty_torchvision():
                ModelRegistry.register_model(name, model.load_model_cls())
