"""The language part of a model that also sees or hears: it alone is built, trained and sampled.

    folder        model.visual.*   model.language_model.layers.*   lm_head.*   mtp.*
    here                           model.layers.*                  lm_head.*
    what leaves   the folder's     the trained                     the trained the folder's

A row of text reads nothing of the rest, such as a tower: that is frozen, held by no rank, and
copied from the folder that training began with wherever a whole model is written. Invariant: names
go both ways, and what is not the language part's is never changed.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

# Under this name a language part that was read knows the model that it is of.
WHOLE = "whole_model"


def language_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration of a model's language part; of a language model its own.

    Raises:
        ValueError: transformers has no language model of the part's type.
    """
    text_config = config.get_text_config()
    if text_config is config or _whole_class(config) is None:
        return config
    if type(text_config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"model type '{config.model_type}' also reads what is no text, and transformers has no "
            f"language model of the type of its language part, '{text_config.model_type}'; take a "
            "model without such a part"
        )
    return text_config


def _whole_class(config: PretrainedConfig) -> Any:
    """Returns the class of a model that reads more than text; None where it reads text alone."""
    mapping = transformers.AutoModelForImageTextToText._model_mapping
    return mapping.get(type(config), None)


@dataclass(frozen=True)
class WholeModel:
    """Describes a model of which the language part is trained.

    Attributes:
        config: of the whole, with the part's settings in it.
        path: the folder, or the hub's name, that has its weights; None: nobody knows.
    """

    config: PretrainedConfig
    path: str | None = None

    @cached_property
    def module(self) -> nn.Module:
        """Builds the whole model without memory."""
        with torch.device("meta"):
            return _whole_class(self.config)._from_config(self.config, dtype=torch.float32)

    @cached_property
    def names(self) -> dict[str, str]:
        """Maps the part's names of tensors to those that the whole model has."""
        with torch.device("meta"):
            part = transformers.AutoModelForCausalLM.from_config(language_config(self.config))
        pairs = [
            (part.base_model, self.module.get_decoder()),
            (part.get_output_embeddings(), self.module.get_output_embeddings()),
        ]
        prefixes = {}
        for inner, outer in pairs:
            prefixes[_place(part, inner)] = _place(self.module, outer)
        names = {}
        for name in part.state_dict():
            prefix = next(prefix for prefix in prefixes if name.startswith(f"{prefix}."))
            names[name] = prefixes[prefix] + name.removeprefix(prefix)
        return names

    def read(self, model: nn.Module, dtype: torch.dtype, *, trust_remote_code: bool) -> list[str]:
        """Reads the weights, and puts those of the language part into a model of it.

        Args:
            model: with or without memory; a head of its own, such as one that scores, stays.
        Returns: what the folder has no weights for, by the whole model's names.
        Raises:
            ValueError: the model is not made of this whole model's language part.
        """
        whole, info = _whole_class(self.config).from_pretrained(
            self.path,
            config=self.config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        decoder = whole.get_decoder()
        if type(decoder) is not type(model.base_model):
            raise ValueError(
                f"{self.path}: the language part of model type '{self.config.model_type}' is a "
                f"{type(decoder).__name__}, and {type(model).__name__} is made of a "
                f"{type(model.base_model).__name__}; it cannot be trained by itself here"
            )
        setattr(model, model.base_model_prefix, decoder)
        if model.get_output_embeddings() is not None:
            model.set_output_embeddings(whole.get_output_embeddings())
        model.config = decoder.config
        model.config._name_or_path = str(self.path)
        model.generation_config = whole.generation_config
        return sorted(info["missing_keys"])

    def language_model(self, dtype: torch.dtype, *, trust_remote_code: bool = False) -> nn.Module:
        """Reads the language part alone.

        Raises:
            OSError: the folder is not there.
            ValueError: it lacks tensors of the model, which would be random numbers.
        """
        with torch.device("meta"):
            lm: nn.Module = transformers.AutoModelForCausalLM.from_config(
                language_config(self.config), dtype=dtype
            )
        of_part = set(self.names.values())
        missing = self.read(lm, dtype, trust_remote_code=trust_remote_code)
        lacking = [name for name in missing if name in of_part]
        if lacking:
            raise ValueError(
                f"{self.path}: its weights are not those of its config.json: {len(lacking)} "
                f"tensors are missing, as {lacking[0]}"
            )
        return lm

    def saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors of the whole model as its files have them."""
        saved: dict[str, Tensor] = revert_weight_conversion(self.module, dict(tensors))
        return saved

    def write_settings(self, folder: Path, part: nn.Module) -> None:
        """Writes the whole model's configuration, with the part's as it is now."""
        config = copy.deepcopy(self.config)
        config.text_config = part.config
        config.save_pretrained(folder)

    def write_weights(self, folder: Path, trained: Mapping[str, Tensor]) -> None:
        """Writes the whole model's files: the trained tensors, by the part's names, and the rest.

        Raises:
            OSError: the folder of the rest is not there.
        """
        tensors = self.saved({self.names[name]: tensor for name, tensor in trained.items()})
        tensors.update(self.rest(tensors.keys()))
        for name, tensor in tensors.items():
            # One expert, of several that are one tensor.
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                tensors[name] = tensor.clone()
        save_torch_state_dict(tensors, folder)

    def rest(self, written: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields what else a file of the whole model has, bit by bit as it is on disk.

        Args:
            written: the names in files of what was trained.
        Raises:
            OSError: the folder is not there, or is another model's.
        """
        files = tensor_files(Path(str(self.path)))
        tied = {name for name in written if name not in files}
        if files and len(tied) < len(written):
            for name, path in files.items():
                if name not in written:
                    with safe_open(path, framework="pt") as file:
                        yield name, file.get_tensor(name)
            return
        # Other names, such as of an older release, or a hub's name.
        whole = _whole_class(self.config).from_pretrained(self.path)
        of_part = set(self.names.values())
        others = {n: tensor for n, tensor in whole.state_dict().items() if n not in of_part}
        yield from self.saved(others).items()


def _place(model: nn.Module, part: nn.Module) -> str:
    """Returns the name of a module in a model."""
    return next(name for name, module in model.named_modules() if module is part)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Finds the safetensors file of each tensor in a folder; empty where there are none."""
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    return files


def whole_model_of(lm: nn.Module) -> WholeModel | None:
    """Returns the model that a language model was read as the part of; None: it is one."""
    found: WholeModel | None = vars(lm).get(WHOLE)
    return found
