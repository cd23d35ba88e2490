"""LoRA (arXiv:2106.09685) by peft: the policy's weights stay as they are, and small adapters train beside them.

    y = W x + alpha / rank * B A x        W frozen, of the compute type; A (rank, in) and B (out, rank) float32

B is zero at first, and A is the same in every run. peft calls a layer's tensors `LAYER.base_layer.weight`,
`LAYER.lora_A.NAME.weight` and `LAYER.lora_B.NAME.weight`; what leaves the trainer has the base model's names, or those
of a peft folder. Invariant: nothing is ever merged into the module that trains.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from data.texts import say
from training.config import ModelConfig
from workers.ranks.distributed import full_tensor

# The adapter's, which no model's own tensors have in theirs.
NAME = "ppo_core"
BASE = ".base_layer."


def target_layers(lm: nn.Module, wanted: Sequence[str]) -> list[str]:
    """Lists the linear layers before the head that get adapters, by the last parts of their names.

    Raises:
        ValueError: a target is no such layer; names those there are.
    """
    modules = lm.base_model.named_modules()
    there = {
        name.split(".")[-1] for name, module in modules if isinstance(module, nn.Linear | Conv1D)
    }
    targets = there if "all-linear" in wanted else {*wanted}
    if unknown := ", ".join(sorted(targets - there)):
        raise ValueError(say("no_target", unknown=unknown, there=", ".join(sorted(there))))
    return sorted(targets)


def add_adapters(lm: nn.Module, config: ModelConfig, path: str) -> nn.Module:
    """Freezes a language model that was read from `path`, and puts adapters into its `target_layers`."""
    from peft import LoraConfig, inject_adapter_in_model

    told = {
        "target_modules": target_layers(lm, config.target_modules),
        "base_model_name_or_path": path,
    }
    wanted = LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, task_type="CAUSAL_LM", **told
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        inject_adapter_in_model(wanted, lm, NAME)
    for parameter in (own for own in lm.parameters() if own.requires_grad):
        parameter.data = parameter.data.float()
    return lm


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Computes in the block what the base model does, which a module without adapters does anyway."""
    parts = (name.partition(f"{BASE}weight") for name, _ in module.named_parameters())
    layers = [module.get_submodule(layer) for layer, adapted, _ in parts if adapted]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    # What peft froze: FSDP2 looks at its first pass for what will have gradients.
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
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
        if (own := base_name(name)) is None:
            continue
        layer_name, adapted, kind = name.partition(BASE)
        if adapted and kind == "weight":
            layer = module.get_submodule(layer_name)
            a, b = (
                full_tensor(tensors[f"{layer_name}.lora_{part}.{NAME}.weight"].detach())
                for part in "AB"
            )
            product = b @ a * layer.scaling[NAME]
            weight = full_tensor(tensor.detach()).float() + (
                product.T if layer.fan_in_fan_out else product
            )
            yield own, weight.to(dtype)
        else:
            yield own, full_tensor(tensor.detach().to(dtype))


def adapter_export(folder: Path, lm: nn.Module) -> Callable[[], None]:
    """Gathers a language model's adapters, now, on every rank; returns what writes them, if any, as peft does."""
    own = [(name, tensor) for name, tensor in lm.state_dict().items() if base_name(name) is None]
    parts = {
        name.replace(f".{NAME}.", "."): full_tensor(tensor.detach()).cpu().clone()
        for name, tensor in own
    }

    def write() -> None:
        if parts:
            lm.peft_config[NAME].save_pretrained(folder)
            named = {f"base_model.model.{name}": tensor for name, tensor in parts.items()}
            save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})

    return write
