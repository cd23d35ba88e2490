"""LoRA (arXiv:2106.09685) by peft: weights stay as they are, and small adapters train beside them.

    y = W x + alpha / rank * B A x

    W (out, in)                          frozen, of the compute type
    A (rank, in) and B (out, rank)       trained, float32

B is zero at first, and A is the same in every run. peft calls a layer's tensors
`LAYER.base_layer.weight`, `LAYER.lora_A.NAME.weight` and `LAYER.lora_B.NAME.weight`; what leaves
the trainer has the base model's names, or those of a peft folder. Invariant: nothing is ever merged
into the module that trains.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from data.disk_errors import as_os_errors
from training.config import ModelConfig
from workers.model.training_pass import evaluating
from workers.ranks.process_groups import max_over_ranks, rank
from workers.ranks.sharding import full_tensor

logger = logging.getLogger(__name__)

# The adapter's name, which no model's own tensors have in theirs.
NAME = "ppo_core"
BASE = ".base_layer."
# Tokens of a row that is tried.
FEW = 8


def target_layers(lm: nn.Module, wanted: Sequence[str]) -> list[str]:
    """Lists the linear layers before the head that get adapters, by the last parts of their names.

    Raises:
        ValueError: a target is no such layer; names those there are.
    """
    linear_layers: set[str] = set()
    others: set[str] = set()
    for name, module in lm.base_model.named_modules():
        # A number, say, may be the name of a layer and of a block.
        is_linear = isinstance(module, nn.Linear | Conv1D) and _is_plain(module)
        kinds = linear_layers if is_linear else others
        kinds.add(name.split(".")[-1])
    linear_layers -= others
    kinds_without = {
        "peft takes {} for parts of its experts": _names_of_experts(lm, sorted(linear_layers)),
        "peft adapts no {}": _names_that_peft_refuses(lm, linear_layers),
        "its code reads the weight of {} past the adapters": _names_read_past(lm, linear_layers),
    }
    allowed = linear_layers.difference(*kinds_without.values())
    if "all-linear" in wanted:
        return sorted(allowed)
    for reason, names in kinds_without.items():
        refused = ", ".join(sorted(names.intersection(wanted)))
        if refused:
            raise ValueError(
                f"actor_rollout_ref.model.target_modules={list(wanted)}: model type "
                f"'{lm.config.model_type}': {reason.format(refused)}, so that it gets none here; "
                f"allowed: {', '.join(sorted(allowed))}, or all-linear"
            )
    unknown = set(wanted) - linear_layers
    if unknown:
        raise ValueError(
            "actor_rollout_ref.model.target_modules: no linear layer before the head is called "
            f"{', '.join(sorted(unknown))}; there are "
            f"{', '.join(sorted(linear_layers))}, or all-linear"
        )
    return sorted(set(wanted))


def _is_plain(layer: nn.Module) -> bool:
    """Checks whether a linear layer computes a product alone; some routers also choose experts."""
    return type(layer).forward in (nn.Linear.forward, Conv1D.forward)


def _names_of_experts(lm: nn.Module, names: Sequence[str]) -> set[str]:
    """Lists the names that peft reads as parts of fused experts, in this type of model.

    It then leaves the layers of that name out, such as those of shared experts, whenever it makes
    or loads adapters.
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    # An older peft takes names as they are.
    except ImportError:
        return set()
    config = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(config, model=lm, conversions=None)
    return set(names) - set(config.target_modules)


def _names_that_peft_refuses(lm: nn.Module, names: Collection[str]) -> set[str]:
    """Lists the names that peft adapts in no model of this type: kernels read their weights."""
    from peft import LoraConfig
    from peft.tuners import tuners_utils

    # An older peft asks nothing.
    check = vars(tuners_utils).get("_check_lora_target_modules_mamba")
    refused = set()
    for name in names:
        try:
            if check is not None:
                check(LoraConfig(), lm, name)
        except ValueError:
            refused.add(name)
    return refused


@torch.no_grad()
def _names_read_past(lm: nn.Module, names: Collection[str]) -> set[str]:
    """Lists the names of layers that a pass does not call: it reads their weights, as Jamba's does.

    An adapter beside such a weight would count in the merged model alone. The rank that holds the
    weights tries it; a model whose numbers are fake, or that is only looked at, is not tried.
    """
    if detect_fake_mode():
        return set()
    ordered = sorted(names)
    called = set()
    hooks = []
    for place, module in lm.base_model.named_modules():
        name = place.split(".")[-1]
        if name in names:
            hooks.append(module.register_forward_hook(lambda *_, name=name: called.add(name)))
    is_tried = not next(lm.parameters()).is_meta
    if is_tried:
        ids = torch.arange(FEW, device=lm.device)[None] % lm.config.get_text_config().vocab_size
        with evaluating(lm):
            lm.base_model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    past = torch.tensor([float(is_tried and name not in called) for name in ordered])
    seen = max_over_ranks(past).tolist()
    return {name for name, is_past in zip(ordered, seen, strict=True) if is_past}


def warn_of_weights_without(lm: nn.Module) -> None:
    """Logs how much of a model has no adapters, though all linear layers were to have some.

    Experts that are held as one tensor are the largest part of most models that have them.
    """
    sizes: Counter[str] = Counter()
    total = 0
    for place, module in lm.base_model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            # The adapters themselves.
            if parameter.requires_grad:
                continue
            total += parameter.numel()
            is_matrix = parameter.ndim > 1 and not isinstance(module, nn.Embedding)
            # An adapted layer's own weight is called LAYER.base_layer.
            if is_matrix and not f".{place}.".endswith(BASE):
                sizes[".".join([*place.split(".")[-1:], name])] += parameter.numel()
    if not sizes or rank() > 0:
        return
    parts = [f"{name} ({size / total:.1%})" for name, size in sizes.most_common()]
    logger.warning(
        "LoRA: %.1f %% of the weights before the head get no adapters and stay as they are, as "
        "they are no linear layers that peft adapts here: %s",
        100 * sizes.total() / total,
        ", ".join(parts),
    )


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
    if "all-linear" in config.target_modules:
        warn_of_weights_without(lm)
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
    module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, casts: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yields a module's `tensors` by their base names, whole, one by one, cast to `dtype`.

    An adapter is added to the weight that it stands beside.

    Args:
        casts: False leaves a tensor that no rank holds a shard of as it is; a sharded one is cast
            before it is gathered, which moves fewer bytes.
    """
    for name, tensor in tensors.items():
        name_in_base = base_name(name)
        if name_in_base is None:
            continue
        layer_name, adapted, kind = name.partition(BASE)
        if adapted and kind == "weight":
            weight = _merged_weight(module, tensors, layer_name, tensor)
            yield name_in_base, weight.to(dtype)
        elif casts or isinstance(tensor, DTensor):
            yield name_in_base, full_tensor(tensor.detach().to(dtype))
        else:
            yield name_in_base, tensor.detach()


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
            file = folder / "adapter_model.safetensors"
            with as_os_errors(file):
                save_file(adapters, file, metadata={"format": "pt"})

    return write


def write_adapter_settings(folder: Path, lm: nn.Module) -> None:
    """Writes peft's config of a language model's adapters, if it has any."""
    if any(base_name(name) is None for name, _ in lm.named_parameters()):
        lm.peft_config[NAME].save_pretrained(folder)
