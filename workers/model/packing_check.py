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

from workers.model.attention import NAME, use_packed_attention
from workers.model.logit_form import logit_form
from workers.model.sequences import Sequences, to_device
from workers.model.training_pass import evaluating, set_training
from workers.ranks.process_groups import max_over_ranks

logger = logging.getLogger(__name__)

# Tokens of a row that is tried.
FEW = 8
# How far states or logits may differ, relative to the largest: of what is wrong nearly all differs.
TOLERANCE = 1e-2
# How far states in training may be from those that are read, relative to the largest.
TRAINING_TOLERANCE = 1e-5
# The same, in the least steps of a type: many layers in bfloat16 round to 3 percent.
ROUNDING_STEPS = 12
# Rotary embeddings that turn positions by the longest one in a batch.
ROPE_BY_LENGTH = ("dynamic", "longrope")


@torch.no_grad()
def check_forward(lm: nn.Module) -> None:
    """Compares the forward pass with the model's own on a few tokens, where the weights are.

    Raises:
        ValueError: the model's logits are not its head's of its last hidden states, or it takes no
            positions.
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
        products = linear(_states(lm, copies=1), head.weight, head.bias)
    if _differ(expected, logit_form(lm).logits(products)):
        raise ValueError(
            f"model type '{kind}' changes its logits behind the head in a way that is not known "
            "here; add it to logit_form in workers/model/logit_form.py"
        )


def check_training(model: nn.Module) -> None:
    """Compares a few tokens' states in training with those that are read, where the weights are.

    Raises:
        ValueError: they differ, as they are random or for another reason, or evaluation mode, in
            which a model trains here, gives some of its weights no gradient.
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
            if _differ(expected, computed.detach(), TRAINING_TOLERANCE):
                raise ValueError(
                    f"model type '{kind}' computes other states in training than when it is read, "
                    "such as by dropout, and log-probs would differ where nothing has changed: set "
                    "its dropout, jitter and layerdrop to 0 in model.override_config, or "
                    "model.enable_gradient_checkpointing=false"
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

    They can if a row behind another then has the states that it has alone.

    A model may not hand its sequences on, or mix positions outside its attention: then it is left
    as it was. The rank that holds the weights tries it.

    Returns: whether the model's rows can be packed.
    """
    if not (attends_fully(lm) and use_packed_attention(lm)):
        return False
    differ = False
    if not next(lm.parameters()).is_meta:
        try:
            with evaluating(lm):
                differ = _differ(_states(lm, copies=1), _states(lm, copies=2))
        except (TypeError, ValueError) as error:
            differ = True
            logger.info("model type '%s': %s", lm.config.model_type, error)
    differ_anywhere = bool(max_over_ranks(torch.tensor([float(differ)])))
    if differ_anywhere:
        lm.set_attn_implementation("sdpa")
    return not differ_anywhere


def attends_fully(lm: nn.Module) -> bool:
    """Checks whether every layer has plain sdpa over the full context, as attention.py has."""
    config = lm.config.get_text_config()
    settings = config.to_dict()
    layers = settings.get("layer_types")
    if not layers:
        windowed = settings.get("sliding_window") and settings.get("use_sliding_window", True)
        layers = ["sliding_attention" if windowed else "full_attention"]
    plain = config._attn_implementation in ("sdpa", NAME)
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


def _few_tokens(lm: nn.Module, copies: int = 1) -> dict[str, Any]:
    """Makes a model's inputs: one row of FEW tokens, or several copies of it, packed."""
    positions = torch.arange(FEW, device=lm.device).repeat(1, copies)
    inputs = {
        "input_ids": positions % lm.config.get_text_config().vocab_size,
        "position_ids": positions,
        "use_cache": False,
    }
    if copies == 1:
        return inputs
    sequences = to_device(Sequences.of([FEW] * copies), lm.device)
    return inputs | sequences.model_inputs()


def _states(lm: nn.Module, copies: int) -> Tensor:
    """Computes the last hidden states (FEW, hidden) of a few tokens, the last of the copies."""
    return lm.base_model(**_few_tokens(lm, copies)).last_hidden_state[0, -FEW:]


def _differ(expected: Tensor, computed: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Checks whether two tensors are further apart than rounding makes them; NaN is far."""
    # Where memory is planned there are no numbers.
    if isinstance(computed, FakeTensor):
        return False
    tolerance = max(tolerance, ROUNDING_STEPS * torch.finfo(computed.dtype).eps)
    bound = tolerance * expected.abs().max().clamp(min=1)
    near = (expected.float() - computed.float()).abs().max() <= bound
    return not bool(near)
