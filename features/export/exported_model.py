"""Writes the model of a checkpoint as a Hugging Face folder, or its adapters as a peft folder.

    model-0000K-of-N.safetensors   the weights, adapters merged, without a value head
    config.json, generation_config.json, the tokenizer's files, the chat template
    adapter_model.safetensors, adapter_config.json      with adapters alone, in place of the weights

Invariant: at most a shard of weights is in memory at a time.
"""

import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.disk_errors import as_os_errors
from training.run.checkpoint_weights import PolicyWeights, cast, read_model_config
from training.run.model_source import CheckpointModel
from training.run.named_model import CannotUse
from workers.model.builder import torch_dtype
from workers.model.language_part import WholeModel, language_config
from workers.model.lora import NAME

# Bytes of a weight file, a larger tensor alone.
SHARD_BYTES = 2 << 30
WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
# Code of others would be in these.
CODE_FILES = (".py", ".pyc", ".so", ".pkl", ".pt", ".pth")
METADATA = {"format": "pt"}
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
# Names classes in Python files beside the model, which an export leaves behind.
AUTO_MAP = "auto_map"


def write_model(model: CheckpointModel, out: Path, dtype: str) -> None:
    """Writes a whole model into `out`, a folder that is there, adapters merged.

    Raises:
        CannotUse: the checkpoint, or the base model of its adapters, cannot be read.
        OSError: `out` cannot be written.
    """
    _write_config(model, out, dtype)
    _copy_others(model.huggingface, out)
    write_shards(_weights(model, dtype), out)


def _weights(model: CheckpointModel, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights as a file of the model has them."""
    if not (model.actor / "model").is_dir():
        yield from _written_weights(model.huggingface, torch_dtype(dtype))
        return
    weights = PolicyWeights(model.actor)
    adapters = model.adapters() if weights.has_adapters else None
    names = set()
    for name, tensor in weights.tensors(torch_dtype(dtype), adapters):
        names.add(name)
        yield name, tensor
    if weights.form.whole is not weights.form.model:
        yield from _rest(model, weights.form.config, names)


def _rest(
    model: CheckpointModel, config: transformers.PretrainedConfig, names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yields what no language part has, such as a tower, as the folder of the beginning has it.

    Raises:
        CannotUse: nobody knows that folder, or it cannot be read.
    """
    place = "--base FOLDER names where that lies now"
    if model.base_model is None:
        raise CannotUse(
            f"{model.checkpoint} holds the language part of model type '{config.model_type}' "
            f"alone; the rest stands in the folder that training began with: {place}"
        )
    try:
        yield from WholeModel(config, model.base_model).rest(names)
    except (OSError, ValueError, SafetensorError) as error:
        raise CannotUse(
            f"what {model.checkpoint} did not train stands in {model.base_model}, which cannot be "
            f"read ({error}): {place}"
        ) from error


def _written_weights(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights that a run wrote with `hf_model`, where it kept no others.

    Raises:
        CannotUse: it wrote none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CannotUse(
            f"{folder.parent} holds no weights: the run's checkpoint.save_contents has neither "
            "'model' nor 'hf_model'"
        )
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, cast(file.get_tensor(name), dtype)


def _write_config(model: CheckpointModel, out: Path, dtype: str) -> None:
    """Writes config.json, with the type of the weights and the class that reads them."""
    config: Any = read_model_config(model.huggingface)
    # Where the language part alone was trained, the rest keeps its type and the class its name.
    if language_config(config) is config:
        config.dtype = torch_dtype(dtype)
        model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        config.architectures = [model_class.__name__]
    config.save_pretrained(out)
    _leave_code_unnamed(out / "config.json")


def _copy_others(source: Path, out: Path) -> None:
    """Copies tokenizer, chat template and generation config.

    Raises:
        CannotUse: there is no tokenizer.
    """
    if not (source / TOKENIZER_CONFIG).is_file():
        raise CannotUse(f"{source} holds no {TOKENIZER_CONFIG}: the checkpoint is not whole")
    for path in sorted(source.iterdir()):
        if path.name == "config.json" or path.name.endswith((*WEIGHT_FILES, *CODE_FILES)):
            continue
        if path.is_file() and not path.is_symlink():
            shutil.copyfile(path, out / path.name)
            if path.name.endswith("config.json"):
                _leave_code_unnamed(out / path.name)


def _leave_code_unnamed(file: Path) -> None:
    """Takes out of a file of settings what names code that was not copied, at any depth.

    One without keeps its bytes, and so does one that is no JSON.
    """
    try:
        settings = json.loads(file.read_bytes())
        plain = _without_auto_map(settings)
    except (ValueError, RecursionError):
        return
    if plain != settings:
        file.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_auto_map(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: entry for key, entry in value.items() if key != AUTO_MAP}
        return {key: _without_auto_map(entry) for key, entry in kept.items()}
    if isinstance(value, list):
        return [_without_auto_map(entry) for entry in value]
    return value


def write_shards(weights: Iterator[tuple[str, Tensor]], out: Path) -> None:
    """Writes tensors as safetensors, in one file or in several with an index."""
    shards: list[list[str]] = []
    total = 0
    for number, tensors in enumerate(_shards(weights)):
        _save(tensors, out / f"{number}.part")
        shards.append(list(tensors))
        total += sum(tensor.nbytes for tensor in tensors.values())
        # Before the next ones are gathered.
        tensors.clear()
    if len(shards) == 1:
        (out / "0.part").rename(out / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (out / f"{number}.part").rename(out / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes tensors to a file that others may read, as they may the files beside it.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with as_os_errors(path):
            save_file(tensors, path, metadata=METADATA)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    path.chmod(0o644)


def _shards(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Gathers tensors until they fill a file."""
    tensors: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if tensors and size + tensor.nbytes > SHARD_BYTES:
            yield tensors
            tensors = {}
            size = 0
        tensors[name] = tensor.contiguous()
        size += tensor.nbytes
    if tensors:
        yield tensors


def write_adapter(model: CheckpointModel, out: Path) -> None:
    """Writes the adapters of a checkpoint into `out` as peft does, in float32.

    Raises:
        CannotUse: it has none, or the run's settings are not there.
    """
    from peft import LoraConfig

    if not (model.actor / "model").is_dir():
        raise CannotUse(
            f"{model.actor} holds no 'model': the run's checkpoint.save_contents left it out"
        )
    weights = PolicyWeights(model.actor)
    if not weights.has_adapters:
        raise CannotUse(
            f"{model.checkpoint} has no adapters (model.lora_rank was 0): leave --adapter out"
        )
    adapters = model.adapters()
    layers = weights.adapted_layers
    config = LoraConfig(
        r=next(iter(layers.values())),
        lora_alpha=adapters.alpha,
        task_type="CAUSAL_LM",
        target_modules=sorted({layer.split(".")[-1] for layer in layers}),
        fan_in_fan_out=any(weights.is_transposed(layer) for layer in layers),
        base_model_name_or_path=adapters.base,
        inference_mode=True,
    )
    config.save_pretrained(out)
    tensors = {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor
        for name, tensor in weights.adapter_tensors()
    }
    _save(tensors, out / "adapter_model.safetensors")
    _copy_others(model.huggingface, out)
    # A peft folder has the base model's.
    (out / GENERATION_CONFIG).unlink(missing_ok=True)
