"""What vLLM's own code needs so that every model it plays has the trainer's log-probs.

Some of it holds anywhere (classes of transformers, loaders that write by themselves), some on a CPU
alone, where vLLM has kernels of its own. Each repair names what it is for and what it costs; none
reaches further than the engine that it is made for.

Invariant: once an engine is built, transformers' classes and vLLM's are as they were.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from workers.weight_sync.load_trial import Part, part_of, storage_of

# Classes of transformers that vLLM changed, each with its own form for the engine's modules.
OwnClasses = dict[type[nn.Module], type[nn.Module]]
# Where vLLM has its classes that choose experts.
ROUTERS = "vllm.model_executor.layers.fused_moe.router"


def missing_settings(content: dict[str, Any]) -> dict[str, Any]:
    """Returns what vLLM reads otherwise than transformers does in a config.json.

    Ministral 3 scales queries behind its first positions, which vLLM else leaves out. Cohere 2's
    windows have a token more in vLLM than in transformers, with which the trainer computes.
    """
    if content.get("model_type") == "cohere2" and content.get("sliding_window"):
        return {"sliding_window": content["sliding_window"] - 1}
    rope = content.get("rope_parameters") or {}
    if "llama_4_scaling_beta" not in rope or "llama_4_scaling" in content:
        return {}
    scaling = {
        "beta": rope["llama_4_scaling_beta"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
    }
    return {"llama_4_scaling": scaling}


@contextmanager
def built_as_by_transformers(content: dict[str, Any]) -> Iterator[None]:
    """Mends what vLLM's code does otherwise than transformers' while an engine is built.

    Apertus' activation gets its parameters in the model's type, not in bfloat16 whatever that is;
    and Zamba 2's head that is apart from the embedding stays so.

    Args:
        content: of the language part's config.json.
    """
    from vllm.model_executor.layers.activation import XIELU
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    stays_apart = content.get("model_type") == "zamba2" and not content.get("tie_word_embeddings")
    initialize = XIELU.__init__
    tie = ParallelLMHead.tie_weights

    def initialize_in_type(activation: Any, *args: Any, **kwargs: Any) -> None:
        initialize(activation, *args, **{"dtype": torch.get_default_dtype()} | kwargs)

    def tie_where_tied(head: Any, embedding: Any) -> Any:
        return head if stays_apart else tie(head, embedding)

    XIELU.__init__ = initialize_in_type
    ParallelLMHead.tie_weights = tie_where_tied
    try:
        yield
    finally:
        XIELU.__init__ = initialize
        ParallelLMHead.tie_weights = tie


@contextmanager
def kept_classes() -> Iterator[OwnClasses]:
    """Keeps transformers' classes as they are where vLLM plays a model by transformers' code.

    vLLM then decorates the model's class itself (OLMo, SmolLM3, Seed-OSS), so that the trainer's
    model, of the same class, would lack what the engine's has. In the block it may; behind it the
    class is restored, and what is yielded has a class of the engine's own for each: give it to
    `take_own_classes`.
    """
    from vllm.compilation import decorators

    decorate = decorators._support_torch_compile
    before: dict[type[nn.Module], tuple[tuple[type, ...], dict[str, Any]]] = {}
    own_classes: OwnClasses = {}

    def remember(cls: type[nn.Module], *args: Any, **kwargs: Any) -> type[nn.Module]:
        if issubclass(cls, PreTrainedModel) and cls not in before:
            before[cls] = (cls.__bases__, dict(vars(cls)))
        return decorate(cls, *args, **kwargs)

    decorators._support_torch_compile = remember
    try:
        yield own_classes
    finally:
        decorators._support_torch_compile = decorate
        for cls, (bases, members) in before.items():
            own_classes[cls] = _restored(cls, bases, members)


def _restored(
    cls: type[nn.Module], bases: tuple[type, ...], members: dict[str, Any]
) -> type[nn.Module]:
    """Takes from a class what it was given since; returns a subclass that has it."""
    added = [base for base in cls.__bases__ if base not in bases]
    given = {}
    for name, value in dict(vars(cls)).items():
        if name not in members or members[name] is not value:
            given[name] = value
    cls.__bases__ = bases
    for name in given:
        if name in members:
            setattr(cls, name, members[name])
        else:
            delattr(cls, name)
    return type(cls.__name__, (cls, *added), given | {"__module__": cls.__module__})


def take_own_classes(model: nn.Module, own_classes: OwnClasses) -> None:
    """Gives an engine's modules the classes that `kept_classes` made for them."""
    for module in model.modules():
        own_class = own_classes.get(type(module))
        if own_class is not None:
            module.__class__ = own_class


# On a CPU.


@contextmanager
def built_for_cpu() -> Iterator[None]:
    """Mends vLLM's classes while an engine for a CPU is built in the block."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    def describe_plainly(mixer: Any, config: Any) -> Any:
        # Its scan on a CPU returns the states at the ends of what it reads, and none before: a
        # prompt is then read up to the end of a block.
        return super(MambaMixer2, mixer).get_kv_cache_spec(config)

    describe_state = MambaMixer2.get_kv_cache_spec
    MambaMixer2.get_kv_cache_spec = describe_plainly
    try:
        with _whole_routers():
            yield
    finally:
        MambaMixer2.get_kv_cache_spec = describe_state


@contextmanager
def _whole_routers() -> Iterator[None]:
    """Makes each router that is made in the block choose experts as the model says.

    vLLM 0.26 has no such class: what it routes otherwise is found when an engine is compared with
    the model at the start.
    """
    if find_spec(f"{ROUTERS}.cpu_router") is None:
        yield
        return
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    initialize = CPURouter.__init__

    def initialize_whole(router: Any, *args: Any, **kwargs: Any) -> None:
        initialize(router, *args, **kwargs)
        choose_as_one_group(router)

    CPURouter.__init__ = initialize_whole
    try:
        yield
    finally:
        CPURouter.__init__ = initialize


def choose_as_one_group(router: Any) -> None:
    """Makes a router choose experts as the model says, where it does not by itself.

    vLLM's router for a CPU ignores the correction of the scores unless experts are grouped (ERNIE
    4.5), and refuses sigmoid scores (MiniMax M2). With one group it heeds both.
    """
    if router.use_grouped_topk or router.custom_routing_function is not None:
        return
    corrects = router.e_score_correction_bias is not None
    if router.scoring_func == "sigmoid" or (router.scoring_func == "softmax" and corrects):
        router.use_grouped_topk = True
        router.num_expert_group = 1
        router.topk_group = 1


def rotate_by_heads(model: nn.Module) -> None:
    """Makes rotary embeddings take queries of three dimensions (LFM2, MLA).

    vLLM's kernel for a CPU misreads these; its code in PyTorch, which is slower, does not.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for module in model.modules():
        is_plain = isinstance(module, RotaryEmbedding)
        if is_plain and type(module).forward_cpu is RotaryEmbedding.forward_cpu:
            module._forward_method = _rotation(module)


def _rotation(embedding: Any) -> Callable[..., Any]:
    """Makes an embedding's forward pass that chooses by the query's dimensions."""

    def rotate(positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if query.dim() == 3:
            return embedding.forward_native(positions, query, key)
        return embedding.forward_cpu(positions, query, key)

    return rotate


def keep_generators(worker: Any) -> None:
    """Lets seeded prompts be read in parts.

    Behind a part vLLM samples a token that it throws away, and then turns the request's generator
    back, which a generator on a CPU does not know. Here those that throw away are sampled by
    another's draws, and keep their generator as it was.
    """
    runner = worker.worker.model_runner
    sample = runner.sample_tokens

    def sample_tokens(grammar_output: Any) -> Any:
        batch = runner.input_batch
        thrown_away = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        kept = {}
        for place in thrown_away:
            if place in batch.generators:
                kept[place] = batch.generators.pop(place)
        try:
            return sample(grammar_output)
        finally:
            batch.generators.update(kept)

    runner.sample_tokens = sample_tokens


def forget_packed_experts(model: nn.Module) -> None:
    """Makes vLLM pack experts again when they are loaded next.

    On a CPU it does so only where they have no kernel yet.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


# Weights.


def name_loaders(model: nn.Module) -> None:
    """Gives loaders of parameters a name where they have none (MiniMax M2).

    vLLM's reload asks a loader for it, and `functools.partial` makes one without.
    """
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial) and "__name__" not in vars(loader):
            vars(loader)["__name__"] = getattr(loader.func, "__name__", "partial")


class DirectWrites(TorchDispatchMode):
    """Makes vLLM's reload see what a model's loader writes to parameters by itself.

    The reload gives a model parameters without memory, and learns from their `weight_loader` what
    came. A model that copies by itself (gpt-oss its experts and sinks) would copy to nothing, and
    keep its old weights.

    Args:
        model: behind `initialize_layerwise_reload`.
        names: of the parameters that are written so.
    """

    def __init__(self, model: nn.Module, names: set[str]) -> None:
        super().__init__()
        from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader

        self.parameters: dict[int, nn.Parameter] = {}
        for name in names:
            layer_name, _, own_name = name.rpartition(".")
            layer = model.get_submodule(layer_name)
            parameter = getattr(layer, own_name)
            parameter.weight_loader = write_part
            parameter.weight_loader = make_online_process_loader(layer, own_name)
            self.parameters[storage_of(parameter)] = parameter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Hands a write on to the parameter's loader."""
        if func is torch.ops.aten.copy_.default:
            parameter = self.parameters.get(storage_of(args[0]))
            if parameter is not None:
                parameter.weight_loader(parameter, args[1], part_of(args[0]))
                return args[0]
        return func(*args, **(kwargs or {}))


def with_direct_writes(
    weights: Iterable[tuple[str, Tensor]], model: nn.Module, names: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yields weights to a loader, whose own writes to these parameters count while it reads them.

    The first one is asked for when the model has its parameters for the reload, and not before.
    """
    with DirectWrites(model, names):
        yield from weights


def write_part(param: Tensor, loaded_weight: Tensor, part: Part) -> None:
    """Writes a part of a parameter; the arguments' names are those that vLLM's reload knows."""
    param.data.as_strided(part.shape, part.stride, part.offset).copy_(loaded_weight)
