"""LoRA (arXiv:2106.09685) by peft: weights stay as they are, and small adapters train beside them.

    y = W x + alpha / rank * B A x

    W (out, in)                          frozen, of the compute type
    A (rank, in) and B (out, rank)       trained, float32

B is zero at first, and A is the same in every run. peft calls a layer's tensors
`LAYER.base_layer.weight`, `LAYER.lora_A.NAME.weight` and `LAYER.lora_B.NAME.weight`; what leaves
the trainer has the base model's names, or those of a peft folder. Invariant: nothing is ever merged
into the module that trains.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from training.config import ModelConfig
from workers.ranks.sharding import full_tensor

# The adapter's name, which no model's own tensors have in theirs.
NAME = "ppo_core"
BASE = ".base_layer."


def target_layers(lm: nn.Module, wanted: Sequence[str]) -> list[str]:
    """Lists the linear layers before the head that get adapters, by the last parts of their names.

    Raises:
        ValueError: a target is no such layer; names those there are.
    """
    linear_layers = set()
    for name, module in lm.base_model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            linear_layers.add(name.split(".")[-1])
    if "all-linear" in wanted:
        return sorted(linear_layers)
    unknown = set(wanted) - linear_layers
    if unknown:
        raise ValueError(
            "actor_rollout_ref.model.target_modules: no linear layer before the head is called "
            f"{', '.join(sorted(unknown))}; there are "
            f"{', '.join(sorted(linear_layers))}, or all-linear"
        )
    return sorted(set(wanted))


def add_adapters(lm: nn.Module, config: ModelConfig, path: str) -> nn.Module:
    """Freezes a language model read from `path`, and puts adapters into its `target_layers`."""
    from peft import LoraConfig, inject_adapter_in_model

    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        task_type="CAUSAL_LM",
        target_modules=target_layers(lm, config.target_modules),
        base_model_name_or_path=path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        inject_adapter_in_model(lora, lm, NAME)
    for parameter in lm.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return lm


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Switches adapters off in the block; a module without any computes as before."""
    adapted_layers = []
    trained = []
    for name, parameter in module.named_parameters():
        layer_name, suffix, _ = name.partition(f"{BASE}weight")
        if suffix:
            adapted_layers.append(module.get_submodule(layer_name))
        if parameter.requires_grad:
            trained.append(parameter)
    for layer in adapted_layers:
        layer.enable_adapters(False)
    # peft has frozen them, and FSDP2 looks at its first pass for what will have gradients.
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in adapted_layers:
            layer.enable_adapters(True)


def base_name(name: str) -> str | None:
    """Returns a tensor's name in the base model; None for an adapter's own."""
    return None if f".{NAME}." in name else name.replace(BASE, ".")


def whole_weights(
    module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yields a module's `tensors` by their base names, whole, one by one, cast to `dtype`.

    An adapter is added to the weight that it stands beside.
    """
    for name, tensor in tensors.items():
        name_in_base = base_name(name)
        if name_in_base is None:
            continue
        layer_name, adapted, kind = name.partition(BASE)
        if adapted and kind == "weight":
            weight = _merged_weight(module, tensors, layer_name, tensor)
            yield name_in_base, weight.to(dtype)
        else:
            yield name_in_base, full_tensor(tensor.detach().to(dtype))


def _merged_weight(
    module: nn.Module, tensors: Mapping[str, Tensor], layer_name: str, weight: Tensor
) -> Tensor:
    """Computes W + alpha / rank * B A of a layer, whole, in float32."""
    layer = module.get_submodule(layer_name)
    a = full_tensor(tensors[f"{layer_name}.lora_A.{NAME}.weight"].detach())
    b = full_tensor(tensors[f"{layer_name}.lora_B.{NAME}.weight"].detach())
    product = b @ a * layer.scaling[NAME]
    if layer.fan_in_fan_out:
        product = product.T
    return full_tensor(weight.detach()).float() + product


def adapter_export(folder: Path, lm: nn.Module) -> Callable[[], None]:
    """Gathers a language model's adapters, on every rank; returns what writes them as peft does."""
    adapters: dict[str, Tensor] = {}
    for name, tensor in lm.state_dict().items():
        if base_name(name) is None:
            name_in_peft = f"base_model.model.{name.replace(f'.{NAME}.', '.')}"
            adapters[name_in_peft] = full_tensor(tensor.detach()).cpu().clone()

    def write() -> None:
        if adapters:
            write_adapter_settings(folder, lm)
            save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    return write


def write_adapter_settings(folder: Path, lm: nn.Module) -> None:
    """Writes peft's config of a language model's adapters, if it has any."""
    if any(base_name(name) is None for name, _ in lm.named_parameters()):
        lm.peft_config[NAME].save_pretrained(folder)
