"""The policy's weights as a checkpoint holds them, read a few at a time.

    full weights    actor/model has them all                    names as the language model's
    shared critic   the same, with the value head               lm.NAME and value_head.weight
    LoRA            actor/model has the adapters alone          the base model's folder has the rest

However many ranks wrote them, the shards lie in one folder that knows how they join. Adapters are
merged tensor by tensor, so that neither peft nor a whole model in memory is needed; an engine that
is evaluated gets them as training sends them (features/evaluation/evaluated_weights.py). Invariant:
nothing in a checkpoint is run, and a tensor is read only once its name and shape are known to be
those of the model that actor/huggingface describes.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers.pytorch_utils import Conv1D

from training.run.named_model import CannotUse
from workers.model.checkpoint_reader import SafeReader, read_portions
from workers.model.language_part import WholeModel, language_config
from workers.model.lora import NAME
from workers.model.plain_config import require_plain_config
from workers.weight_sync.saved_form import SavedForm

# Bytes of tensors that are read at once, a larger tensor alone.
READ_BYTES = 1 << 29
# The prefixes of the language model's names in a policy with values, and of its value head.
LM = "lm."
# So much of a library's complaint about a file is shown.
MAX_REASON_CHARS = 300
VALUE_HEAD = "value_head.weight"


@dataclass(frozen=True)
class Adapters:
    """Tells how a policy's adapters count, and what they stand on.

    Attributes:
        alpha: `actor_rollout_ref.model.lora_alpha`.
        base: the base model's folder, or its name.
        dtype: of the base's weights in training.
    """

    alpha: int
    base: str
    dtype: torch.dtype


class PolicyWeights:
    """Reads the policy's weights from the `actor` folder of a checkpoint.

    Args:
        actor: the folder, whose files have been checked against the manifest.
    Raises:
        CannotUse: it holds no weights of the model that its huggingface folder describes.
    """

    def __init__(self, actor: Path) -> None:
        self.folder = actor / "model"
        self.config = read_model_config(actor / "huggingface")
        self.form = SavedForm(self.config)
        self.saved = read_metadata(self.folder)
        shares_backbone = VALUE_HEAD in self.saved
        self.prefix = LM if shares_backbone else ""
        self._check_names()

    @property
    def model(self) -> nn.Module:
        """Returns the model without its weights."""
        return self.form.model

    @cached_property
    def has_adapters(self) -> bool:
        """Checks whether the checkpoint holds adapters alone."""
        return any(f".{NAME}." in name for name in self.saved)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Returns the model's tensors by name, a tied one once."""
        named = {name for name, _ in self.model.named_parameters()}
        named |= {name for name, _ in self.model.named_buffers()}
        state = self.model.state_dict()
        return {name: tensor.shape for name, tensor in state.items() if name in named}

    @cached_property
    def adapted_layers(self) -> dict[str, int]:
        """Returns the rank of the adapters of each layer that has some."""
        ranks = {}
        for name, entry in self.saved.items():
            layer, is_a, _ = name.removeprefix(self.prefix).partition(f".lora_A.{NAME}.weight")
            if is_a:
                ranks[layer] = entry.size[0]
        return ranks

    def _check_names(self) -> None:
        """Raises CannotUse where the saved tensors are not those of the model."""
        wanted = {f"{self.prefix}{name}": shape for name, shape in self.shapes.items()}
        if self.has_adapters:
            wanted = self._adapter_shapes()
        saved = {name: entry.size for name, entry in self.saved.items() if name != VALUE_HEAD}
        differing = sorted(
            name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name)
        )
        if differing:
            name = differing[0]
            raise CannotUse(
                f"{self.folder} holds other tensors than {self.folder.with_name('huggingface')} "
                f"describes: {len(differing)} differ, such as {name} (saved: {saved.get(name)}, "
                f"described: {wanted.get(name)})"
            )

    def _adapter_shapes(self) -> dict[str, torch.Size]:
        """Returns the tensors that adapters of these ranks have in the model."""
        wanted = {}
        for layer, rank in self.adapted_layers.items():
            weight = self.shapes.get(f"{layer}.weight")
            if weight is None or len(weight) != 2:
                continue
            if self.is_transposed(layer):
                weight = weight[::-1]
            name = f"{self.prefix}{layer}"
            wanted[f"{name}.lora_A.{NAME}.weight"] = torch.Size((rank, weight[1]))
            wanted[f"{name}.lora_B.{NAME}.weight"] = torch.Size((weight[0], rank))
        return wanted

    def is_transposed(self, layer: str) -> bool:
        """Checks whether a layer holds its weight as (in, out)."""
        return isinstance(self.model.get_submodule(layer), Conv1D)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the adapters' tensors by their names, without a prefix."""
        for name, tensor in read_tensors(self.folder, self.saved):
            if name != VALUE_HEAD:
                yield name.removeprefix(self.prefix), tensor

    def tensors(
        self, dtype: torch.dtype, adapters: Adapters | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights cast to `dtype`, as a file of the model has them.

        Args:
            adapters: how those of the checkpoint count, where it holds adapters; they are merged.
        Raises:
            CannotUse: a file is damaged, or the base model is not the one that was adapted.
        """
        whole = self._whole_tensors() if adapters is None else self._merged_tensors(adapters)
        yield from self.form.of((name, cast(tensor, dtype)) for name, tensor in whole)

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_tensors(self.folder, self.saved):
            if name != VALUE_HEAD:
                yield name.removeprefix(self.prefix), tensor

    def _merged_tensors(self, adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
        """Yields the base model's weights, W + alpha / rank * B A where a layer has adapters."""
        saved = dict(self.adapter_tensors())
        base = base_tensors(adapters, self.form, self.shapes)
        for name, weight in base:
            layer = name.removesuffix(".weight")
            rank = self.adapted_layers.get(layer)
            if rank is None or not name.endswith(".weight"):
                yield name, weight
                continue
            a = saved[f"{layer}.lora_A.{NAME}.weight"]
            b = saved[f"{layer}.lora_B.{NAME}.weight"]
            product = b @ a * (adapters.alpha / rank)
            if self.is_transposed(layer):
                product = product.T
            yield name, weight.float() + product


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a weight; a buffer that counts stays as it is."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def read_model_config(folder: Path) -> transformers.PretrainedConfig:
    """Reads a Hugging Face folder's config.json; code beside it is not run.

    Raises:
        CannotUse: there is none, or it describes no language model that transformers knows.
    """
    if not (folder / "config.json").is_file():
        raise CannotUse(f"{folder} holds no config.json: the checkpoint is not whole")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        require_plain_config(config, str(folder))
    # A fault in a file shows itself in many ways.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CannotUse(
            f"{folder}/config.json describes no known model: {_in_one_line(error)}"
        ) from error
    try:
        language = language_config(config)
    except ValueError as error:
        raise CannotUse(f"{folder}/config.json: {error}") from error
    if type(language) not in transformers.AutoModelForCausalLM._model_mapping:
        raise CannotUse(
            f"{folder}/config.json: transformers has no language model of type {config.model_type}"
        )
    return config


def read_metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Reads which tensors a DCP folder holds.

    Raises:
        CannotUse: it is none, holds more than tensors, or parts of a tensor are missing.
    """
    try:
        metadata = SafeReader(folder).read_metadata()
    except FileNotFoundError as error:
        raise CannotUse(f"{folder} holds no weights: {error.filename} is missing") from error
    except (OSError, ValueError, AttributeError) as error:
        raise CannotUse(f"{folder}/.metadata is no list of tensors: {error}") from error
    saved: dict[str, Any] = metadata.state_dict_metadata
    for name, entry in saved.items():
        parts = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if parts != math.prod(entry.size):
            raise CannotUse(f"{folder}: {name} is not whole: {parts} of {math.prod(entry.size)}")
    return saved


def read_tensors(
    folder: Path, saved: Mapping[str, TensorStorageMetadata]
) -> Iterator[tuple[str, Tensor]]:
    """Yields a DCP folder's tensors, of which about READ_BYTES are in memory at a time."""
    try:
        yield from read_portions(folder, saved, list(saved), READ_BYTES)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            # The failure of the one rank that reads; the other text has its traceback.
            cause = next(iter(error.failures.values()))[0]
        raise CannotUse(f"{folder} cannot be read: {_in_one_line(cause)}") from error


def _in_one_line(error: BaseException) -> str:
    """Writes an error's kind and the beginning of its text."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_CHARS]


# The base model


def base_tensors(
    adapters: Adapters, form: SavedForm, shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the model that adapters stand on, of the type that it had in training.

    They are read one by one where its safetensors have the model's own names; otherwise
    transformers loads it whole.
    Raises:
        CannotUse: the folder cannot be read, or is another model.
    """
    base = adapters.base
    files = _files_by_tensor(Path(base))
    places = {
        name: _name_in_file(form.names[name], files, form.whole.base_model_prefix)
        for name in shapes
    }
    if all(places.values()):
        yield from _read_safetensors(files, places, shapes, adapters.dtype)
        return
    try:
        if form.whole is form.model:
            lm = transformers.AutoModelForCausalLM.from_pretrained(
                base, config=form.config, dtype=adapters.dtype, trust_remote_code=False
            )
        else:
            lm = WholeModel(form.config, base).language_model(adapters.dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise CannotUse(
            f"the adapters stand on {base}, which cannot be read ({_in_one_line(error)}): "
            "--base FOLDER names where it lies now; --adapter exports the adapters without it"
        ) from error
    state = lm.state_dict()
    for name in shapes:
        yield name, state[name]


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """Finds the file of each tensor of a folder with safetensors; empty without any."""
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                files.update(dict.fromkeys(file.keys(), path))
        except SafetensorError as error:
            raise CannotUse(f"{path} is damaged: {error}") from error
    return files


def _name_in_file(name: str, files: Mapping[str, Path], prefix: str) -> str | None:
    """Returns the name that a tensor has in the files; some leave the first part out."""
    short = name.removeprefix(f"{prefix}.")
    return next((form for form in (name, short) if form in files), None)


def _read_safetensors(
    files: Mapping[str, Path],
    places: Mapping[str, str | None],
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    for name, place in places.items():
        assert place is not None
        with safe_open(files[place], framework="pt") as file:
            tensor = file.get_tensor(place)
        if tensor.shape != shapes[name]:
            raise CannotUse(
                f"{files[place]}: {place} is {tuple(tensor.shape)}, and the policy's "
                f"{tuple(shapes[name])}: these adapters stand on another model"
            )
        yield name, cast(tensor, dtype)
