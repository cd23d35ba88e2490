"""What a model allows: to be trained here, to have its rows packed, and its sequences shared.

All of it is tried or read off before training. Invariant: the rank that holds the weights tries;
all ranks come to the same answer.
"""

import inspect
import logging
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import linear
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from workers.model.attention import NAME, use_packed_attention
from workers.model.logit_form import logit_form
from workers.model.sequences import Sequences, to_device
from workers.model.training_pass import evaluating, set_training
from workers.ranks.process_groups import max_over_ranks

logger = logging.getLogger(__name__)

# Stands in the names of adapters' tensors, behind the layer's.
LORA = ".lora_"
# Tokens of a row that is tried.
FEW = 8
# How far states or logits may differ, relative to the largest: of what is wrong nearly all differs.
TOLERANCE = 1e-2
# How far states in training may be from those that are read, relative to the largest.
TRAINING_TOLERANCE = 1e-5
# The same, in the least steps of a type: many layers in bfloat16 round to 3 percent.
ROUNDING_STEPS = 12
# How far a packed row's states may move with the row before it, relative to the largest: not at
# all, but that experts then have other tokens and round otherwise.
LEAK_TOLERANCE = 1e-5
LEAK_ROUNDING_STEPS = 2
# Rotary embeddings that turn positions by the longest one in a batch.
ROPE_BY_LENGTH = ("dynamic", "longrope")


@torch.no_grad()
def check_forward(lm: nn.Module) -> None:
    """Compares the forward pass with the model's own on a few tokens, where the weights are.

    Raises:
        ValueError: the model's logits are not its head's of its last hidden states, a state depends
            on what comes behind it, or the model takes no positions.
    """
    if next(lm.parameters()).is_meta:
        return
    kind = lm.config.model_type
    if "position_ids" not in inspect.signature(lm.base_model.forward).parameters:
        raise ValueError(
            f"model type '{kind}' takes no position_ids; only decoder-only models can be "
            "trained here"
        )
    head = lm.get_output_embeddings()
    with evaluating(lm):
        # Its own choice of positions, too, is compared.
        expected = lm(input_ids=_few_tokens(lm)["input_ids"], use_cache=False).logits[0]
        states = _states(lm, copies=1)
        products = linear(states, head.weight, head.bias)
        followed = _followed_states(lm)
    gap = _gap(expected, logit_form(lm).logits(products))
    if not gap <= _tolerance(products):
        raise ValueError(
            f"model type '{kind}' changes its logits behind the head in a way that is not known "
            f"here (they differ by {gap:.1e} of the largest); add it to logit_form in "
            "workers/model/logit_form.py"
        )
    gap = _gap(states, followed)
    if not gap <= _tolerance(states):
        raise ValueError(
            f"model type '{kind}' lets a token's state depend on tokens behind it (by {gap:.1e} of "
            "the largest), so that a row's log-probs would depend on how it goes on; only models "
            "that read from left to right can be trained here"
        )


def check_training(model: nn.Module) -> None:
    """Compares a few tokens' states in training with those that are read, where the weights are.

    Raises:
        ValueError: they differ, as they are random or for another reason, or evaluation mode, in
            which a model trains here, gives some of its weights no gradient, or no adapter of a
            kind of layer has one.
    """
    if next(model.parameters()).is_meta:
        return
    kind = model.config.model_type
    with evaluating(model):
        # With gradients too, as kernels are chosen by whether there are any.
        expected = _states(model, copies=1).detach()
        set_training(model, True)
        # Twice, as noise may miss a few tokens.
        for _ in range(2):
            computed = _states(model, copies=1)
            gap = _gap(expected, computed.detach())
            if not gap <= _tolerance(computed, TRAINING_TOLERANCE):
                raise ValueError(
                    f"model type '{kind}' computes other states in training than when it is read "
                    f"(they differ by {gap:.1e} of the largest), such as by dropout, and log-probs "
                    "would differ where nothing has changed: set its dropout, jitter and layerdrop "
                    "to 0 in model.override_config, or model.enable_gradient_checkpointing=false"
                )
        idle = _adapters_without_gradient(model, computed)
        if idle:
            raise ValueError(
                f"model type '{kind}' computes nothing with the adapters of {', '.join(idle)}: its "
                "kernels read the layers' weights past them, and they would learn nothing; leave "
                "these out of actor_rollout_ref.model.target_modules"
            )
        lost = _weights_without_gradient(model, computed)
    if lost:
        raise ValueError(
            f"model type '{kind}' gives no gradient to {', '.join(lost)} in evaluation mode, in "
            "which a model trains here so that nothing in it is random: its code must compute "
            "gradients whether or not it is in training mode"
        )


def _weights_without_gradient(model: nn.Module, states: Tensor) -> list[str]:
    """Lists what gets a gradient in the model's own training mode, and not from these states.

    Experts have one name, as noise may send tokens to others.
    """
    reached = _leaves(states)
    missing = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in reached:
            missing[parameter] = _name_of_all_experts(name)
    if not missing or isinstance(states, FakeTensor):
        return []
    kinds = set()
    for name, parameter in model.named_parameters():
        if parameter in reached:
            kinds.add(_name_of_all_experts(name))
    # What is random there must not move the random numbers of the run.
    devices = [states.device] if states.is_cuda else []
    with torch.random.fork_rng(devices):
        model.train()
        reached = _leaves(_states(model, copies=1))
    lost = {name for parameter, name in missing.items() if parameter in reached}
    return sorted(lost - kinds)


def _adapters_without_gradient(model: nn.Module, states: Tensor) -> list[str]:
    """Lists the kinds of layers, by the last part of their names, no adapter of which is reached.

    Of experts a few tokens reach some.
    """
    kinds: dict[str, bool] = {}
    reached: set[Tensor] | None = None
    for name, parameter in model.named_parameters():
        layer, is_adapter, _ = name.partition(LORA)
        if not is_adapter:
            continue
        if reached is None:
            reached = _leaves(states)
        kind = layer.split(".")[-1]
        kinds[kind] = kinds.get(kind, False) or parameter in reached
    return sorted(kind for kind, is_reached in kinds.items() if not is_reached)


def _leaves(output: Tensor) -> set[Tensor]:
    """Collects the parameters that a gradient of `output` would reach."""
    found = set()
    seen = set()
    nodes = [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # A node that adds up a parameter's gradient knows the parameter.
        if node.name() == "torch::autograd::AccumulateGrad":
            found.add(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return found


def _name_of_all_experts(name: str) -> str:
    """Leaves the expert's number out of a parameter's name."""
    return re.sub(r"(?<=experts\.)\d+", "*", name)


@torch.no_grad()
def pack_rows(lm: nn.Module) -> bool:
    """Makes a model attend through attention.py, if its rows can be packed.

    They can if a row behind another then has the states that it has alone, whichever row that is.
    Layers that keep a state are told where rows begin, and must heed it: kernels do, transformers'
    own code for a CPU does not.

    A model may not hand its sequences on, or mix positions outside its attention: then it is left
    as it was, and a line says so. The rank that holds the weights tries it.

    Returns: whether the model's rows can be packed.
    """
    obstacle = padding_reason(lm.config)
    own_attention = lm.config.get_text_config()._attn_implementation
    if obstacle is None and not use_packed_attention(lm):
        obstacle = "its code has its attention built in"
    if obstacle is not None:
        _tell_padding(lm, obstacle)
        return False
    if not next(lm.parameters()).is_meta:
        obstacle = _try_packing(lm)
    differ_anywhere = bool(max_over_ranks(torch.tensor([float(obstacle is not None)])))
    if differ_anywhere:
        lm.set_attn_implementation(own_attention)
        _tell_padding(lm, obstacle or "a trial on another rank says so")
    return not differ_anywhere


def _try_packing(lm: nn.Module) -> str | None:
    """Packs few tokens behind others; returns what speaks against packing."""
    states = keeps_state(lm.config)
    try:
        with evaluating(lm):
            alone = _states(lm, copies=1)
            packed = _states(lm, copies=2)
            behind_others = _states(lm, copies=2, shift=1)
    except (TypeError, ValueError) as error:
        return str(error)
    if isinstance(packed, FakeTensor):
        return "whether a layer's state stays in its row shows in numbers alone" if states else None
    gap = _gap(alone, packed)
    if not gap <= _tolerance(packed):
        return f"a packed row's states differ from the row's alone by {gap:.1e} of the largest"
    leak = _gap(packed, behind_others)
    rounding = LEAK_ROUNDING_STEPS * torch.finfo(packed.dtype).eps
    if not leak <= max(LEAK_TOLERANCE, rounding):
        return f"a packed row's states depend on the row before it, by {leak:.1e} of the largest"
    return None


def _tell_padding(lm: nn.Module, reason: str) -> None:
    """Says that rows are padded, and why."""
    logger.info(
        "model type '%s': rows are padded on the right, not packed: %s",
        lm.config.model_type,
        reason,
    )


def padding_reason(config: PretrainedConfig) -> str | None:
    """Returns what in a configuration keeps rows from being packed; None: a trial will tell."""
    config = config.get_text_config()
    if keeps_state(config):
        # Only a trial tells whether its kernels take the rows' boundaries.
        return None
    if not attends_fully(config):
        return "it does not attend over the full context by plain sdpa in every layer"
    return None


def keeps_state(config: PretrainedConfig) -> bool:
    """Checks whether a layer hands a state from token to token, beside keys and values.

    Linear attention, Mamba and convolutions do. transformers' cache of the model has a layer of
    that kind, where the configuration itself may not name it.
    """
    cache = DynamicCache(config=config.get_text_config())
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def attends_fully(config: PretrainedConfig) -> bool:
    """Checks whether every layer has plain sdpa over the full context, as attention.py has."""
    config = config.get_text_config()
    if keeps_state(config):
        return False
    settings = config.to_dict()
    layers = settings.get("layer_types")
    if not layers:
        windowed = settings.get("sliding_window") and settings.get("use_sliding_window", True)
        layers = ["sliding_attention" if windowed else "full_attention"]
    # A configuration whose model is not built yet has none.
    plain = config._attn_implementation in (None, "sdpa", NAME)
    return plain and set(layers) == {"full_attention"}


def check_shared_sequences(module: nn.Module, ranks: int) -> None:
    """Raises ValueError where `ranks` ranks cannot share this model's sequences."""
    config = module.config.get_text_config()
    setting = f"ulysses_sequence_parallel_size={ranks}"
    heads = config.num_attention_heads
    if heads % ranks:
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"{setting} does not divide the model's {heads} attention heads; use one of {allowed}"
        )
    if config._attn_implementation != NAME:
        raise ValueError(
            f"{setting}: model type '{config.model_type}' does not have plain sdpa attention over "
            "the full context, or use_remove_padding=false keeps padding: its sequences cannot be "
            "shared; use 1"
        )
    if keeps_state(config):
        raise ValueError(
            f"{setting}: layers of model type '{config.model_type}' hand a state from token to "
            "token, which ranks that hold a part of the positions each would lose; use 1"
        )
    rope_type = varies_with_length(module)
    if rope_type:
        raise ValueError(
            f"{setting}: rope_type={rope_type} depends on the longest position, which ranks see "
            "otherwise; use 1"
        )


def varies_with_length(module: nn.Module) -> str | None:
    """Returns the rope_type of a model that turns positions by a batch's longest; else None."""
    rope = module.config.get_text_config().to_dict().get("rope_parameters") or {}
    rope_type = rope.get("rope_type")
    return rope_type if rope_type in ROPE_BY_LENGTH else None


def _few_tokens(lm: nn.Module, copies: int = 1, shift: int = 0) -> dict[str, Any]:
    """Makes a model's inputs: one row of FEW tokens, or several copies of it, packed.

    Args:
        shift: what is added to the ids of all copies but the last.
    """
    positions = torch.arange(FEW, device=lm.device).repeat(1, copies)
    ids = positions.clone()
    ids[:, :-FEW] += shift
    inputs = {
        "input_ids": ids % lm.config.get_text_config().vocab_size,
        "position_ids": positions,
        "use_cache": False,
    }
    if copies == 1:
        return inputs
    tells_boundaries = keeps_state(lm.config)
    sequences = Sequences.of([FEW] * copies, tells_boundaries=tells_boundaries)
    return inputs | to_device(sequences, lm.device).model_inputs()


def _states(lm: nn.Module, copies: int, shift: int = 0) -> Tensor:
    """Computes the last hidden states (FEW, hidden) of a few tokens, the last of the copies."""
    return lm.base_model(**_few_tokens(lm, copies, shift)).last_hidden_state[0, -FEW:]


def _followed_states(lm: nn.Module) -> Tensor:
    """Computes the states (FEW, hidden) of a few tokens that others follow."""
    positions = torch.arange(2 * FEW, device=lm.device)[None]
    ids = positions % lm.config.get_text_config().vocab_size
    output = lm.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    return output.last_hidden_state[0, :FEW]


def _gap(expected: Tensor, computed: Tensor) -> float:
    """Returns how far two tensors are apart, relative to the largest number, or to 1."""
    # Where memory is planned there are no numbers.
    if isinstance(computed, FakeTensor):
        return 0.0
    scale = expected.float().abs().max().clamp(min=1)
    return float((expected.float() - computed.float()).abs().max() / scale)


def _tolerance(computed: Tensor, tolerance: float = TOLERANCE) -> float:
    """Returns how far rounding may bring numbers of this type apart, as `_gap` measures."""
    return max(tolerance, ROUNDING_STEPS * torch.finfo(computed.dtype).eps)
