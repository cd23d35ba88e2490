"""Which experts a mixture-of-experts model chooses for each token: read off a pass, or given to it.

A router's close choice may fall otherwise in the engine than in the trainer, whose kernels round
otherwise, and the token's log-prob is then another. So the engine's choices travel with a row, and
the trainer's passes take them in place of their own (actor.router_replay):

    routed_experts (B, P + R, layers, k)  ->  RouterPass.given (tokens, layers, k)  ->  the experts

Only the choice is given: the weights of the chosen experts are computed by the router itself, from
its own logits at these ids, so that its gradient flows. A block's own code runs as it stands; what
is replaced in it is the result of `torch.topk` over its experts' scores. `check_routers` tries that
on the model, and refuses one whose experts do not get what is given.

`layers` are the blocks with experts, in order. Tokens without a choice (`missing_choice`) are
decided by the trainer's own router.

Invariant: a pass without a `RouterPass` is computed as if this file were not there; layers whose
states are made again in the backward pass see the choices of their first pass (training_pass.py).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from workers.model.training_pass import evaluating

# The child that a block with experts has, in every family of transformers.
EXPERTS = "experts"
# A decoder layer's number, in a module's name.
LAYER = re.compile(r"\blayers\.(\d+)\b")
# Tokens that a model is tried on.
TRIED_TOKENS = 6
# The largest number that ids of so many experts are kept in one byte for.
ONE_BYTE = 255


@dataclass(frozen=True)
class Routers:
    """Describes the choices of a model's routers.

    Attributes:
        layers: the numbers of the decoder layers that have experts.
        top_k: experts that a token gets in each.
        num_experts: among which it does.
    """

    layers: tuple[int, ...]
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        """Returns the smallest type that holds an expert's id, or that there is none."""
        return torch.uint8 if self.num_experts <= ONE_BYTE else torch.int16

    def absent(self, *sizes: int) -> Tensor:
        """Makes choices of so many tokens that nobody made: (*sizes, layers, top_k)."""
        shape = (*sizes, len(self.layers), self.top_k)
        return torch.full(shape, missing_choice(self.dtype), dtype=self.dtype)


def missing_choice(dtype: torch.dtype) -> int:
    """Returns the id that says of a token that nobody chose for it."""
    return torch.iinfo(dtype).max


@dataclass(kw_only=True)
class RouterPass:
    """Holds the choices of one forward pass.

    Attributes:
        given: (tokens, layers, top_k), which the experts get; None: the model chooses.
        chosen: by layer (tokens, top_k) int64, what the experts got.
        differing: by layer (tokens,) bool, whether the model's own choice is another set.
    """

    given: Tensor | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)
    differing: dict[int, Tensor] = field(default_factory=dict)
    # What is replaced in the block that computes.
    open_modes: list[TorchFunctionMode] = field(default_factory=list)

    def choose(self, layer: int, scores: Tensor, own: Any) -> Any:
        """Returns what stands in for `torch.topk` of a block's scores (tokens, experts).

        Args:
            own: its result.
        """
        if self.given is None:
            self.chosen[layer] = own.indices
            return own
        given = self.given[:, layer]
        if given.shape != own.indices.shape:
            raise ValueError(
                f"routed_experts has choices of {tuple(given.shape)} (tokens, experts of a token), "
                f"and the model makes {tuple(own.indices.shape)}; they are of another model"
            )
        absent = given[:, :1] == missing_choice(given.dtype)
        chosen = torch.where(absent, own.indices, given.long())
        self.chosen[layer] = chosen
        same = own.indices.sort(dim=-1).values == chosen.sort(dim=-1).values
        self.differing[layer] = ~same.all(dim=-1)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def all_chosen(self) -> Tensor:
        """Returns what the experts of all layers got: (tokens, layers, top_k) int64."""
        return torch.stack([self.chosen[layer] for layer in sorted(self.chosen)], dim=1)

    def share_differing(self) -> Tensor:
        """Returns for each token the share of its layers where the choices differ: (tokens,)."""
        layers = [self.differing[layer] for layer in sorted(self.differing)]
        return torch.stack(layers).float().mean(dim=0)

    def share_absent(self) -> Tensor:
        """Returns for each token whether its choices are missing: (tokens,) float32."""
        assert self.given is not None
        return (self.given[:, 0, 0] == missing_choice(self.given.dtype)).float()


# The pass that is computed, of this thread.
CURRENT: ContextVar[RouterPass | None] = ContextVar("router_pass", default=None)


@contextmanager
def routed(router_pass: RouterPass | None) -> Iterator[None]:
    """Has the forward passes in the block choose, or record, as `router_pass` says."""
    token = CURRENT.set(router_pass)
    try:
        yield
    finally:
        CURRENT.reset(token)


class _Replaced(TorchFunctionMode):
    """Replaces the choice among a block's experts, which is a `topk` of (tokens, experts)."""

    def __init__(self, router_pass: RouterPass, layer: int, num_experts: int) -> None:
        super().__init__()
        self.router_pass = router_pass
        self.layer = layer
        self.num_experts = num_experts
        # How often it chose.
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        # Groups of experts are chosen among by scores of three dimensions, or fewer of them.
        if scores.dim() != 2 or scores.shape[1] != self.num_experts:
            return result
        self.calls += 1
        if self.calls > 1:
            raise ValueError("it chooses more than once among its experts")
        return self.router_pass.choose(self.layer, scores, result)


def blocks_with_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Returns a model's blocks with experts, by name, in order."""
    blocks = {}
    for name, module in model.named_modules():
        if EXPERTS in dict(module.named_children()):
            blocks[name] = module
    return blocks


def open_routers(model: nn.Module) -> Routers:
    """Makes a model heed the `RouterPass` of its passes; returns what its routers choose.

    Raises:
        ValueError: it has no experts, or not those of a family that is known.
    """
    layers: list[int] = []
    counts = set()
    for name, block in blocks_with_experts(model).items():
        number = LAYER.search(name)
        num_experts = _count_experts(block)
        top_k = _top_k(block)
        if number is None or num_experts is None or top_k is None:
            raise _unknown(model, f"its block '{name}' is not built as those that are known")
        block.register_forward_pre_hook(partial(_before, len(layers), num_experts))
        block.register_forward_hook(_behind, always_call=True)
        layers.append(int(number[1]))
        counts.add((top_k, num_experts))
    if not layers:
        raise _unknown(model, "it has no experts")
    if len(counts) > 1:
        raise _unknown(model, f"its layers choose differently: {sorted(counts)}")
    [(top_k, num_experts)] = counts
    return Routers(tuple(layers), top_k, num_experts)


def _before(layer: int, num_experts: int, block: nn.Module, args: Any) -> None:
    """Begins to replace a block's choice."""
    current = CURRENT.get()
    if current is not None:
        mode = _Replaced(current, layer, num_experts)
        mode.__enter__()
        current.open_modes.append(mode)


def _behind(block: nn.Module, args: Any, output: Any) -> None:
    """Ends it, also where the block did not come to its end."""
    current = CURRENT.get()
    if current is not None and current.open_modes:
        current.open_modes.pop().__exit__(None, None, None)


def _count_experts(block: nn.Module) -> int | None:
    """Returns how many experts a block has: the first size of their stacked weights."""
    for parameter in block.get_submodule(EXPERTS).parameters():
        if parameter.dim() == 3:
            return len(parameter)
    return None


def _top_k(block: nn.Module) -> int | None:
    """Returns how many experts a token gets, by the name that every router has it under."""
    for module in block.modules():
        top_k = vars(module).get("top_k")
        if isinstance(top_k, int):
            return top_k
    return None


def _unknown(model: nn.Module, reason: str) -> ValueError:
    """Makes the refusal of a model."""
    kind = model.config.model_type
    return ValueError(
        f"actor_rollout_ref.actor.router_replay.mode=R3 cannot replay routing in model type "
        f"'{kind}': {reason}; set it to disabled (docs/algorithms.md lists the families that "
        "it was tried with)"
    )


@torch.no_grad()
def check_routers(model: nn.Module) -> None:
    """Tries an opened model where its weights are: its experts must get what is given.

    Raises:
        ValueError: they do not, or some of them have no weight.
    """
    if next(model.parameters()).is_meta:
        return
    vocabulary = model.config.get_text_config().vocab_size
    device = next(model.parameters()).device
    ids = torch.arange(TRIED_TOKENS, device=device)[None] % vocabulary
    blocks = blocks_with_experts(model)
    received: dict[int, list[Any]] = {}
    handles = []
    for layer, block in enumerate(blocks.values()):
        record = partial(_record_arguments, received, layer)
        experts = block.get_submodule(EXPERTS)
        handles.append(experts.register_forward_pre_hook(record, with_kwargs=True))
    try:
        with evaluating(model):
            own = RouterPass()
            _run(model, ids, own)
            missing = [name for i, name in enumerate(blocks) if i not in own.chosen]
            if missing:
                raise _unknown(model, f"the router of '{missing[0]}' chooses otherwise")
            count = _count_experts(next(iter(blocks.values())))
            assert count is not None
            # Each token's choices move on by one, so that they stay different.
            given = ((own.all_chosen() + 1) % count).short()
            _run(model, ids, RouterPass(given=given))
    finally:
        for handle in handles:
            handle.remove()
    for layer, name in enumerate(blocks):
        if not _got(received[layer], given[:, layer]):
            raise _unknown(model, f"the experts of '{name}' do not get what is given")


def _run(model: nn.Module, ids: Tensor, router_pass: RouterPass) -> None:
    """Computes a pass over ids (1, tokens)."""
    try:
        with routed(router_pass):
            model(input_ids=ids, use_cache=False)
    except ValueError as error:
        raise _unknown(model, str(error)) from error


def _record_arguments(
    received: dict[int, list[Any]], layer: int, module: nn.Module, args: Any, kwargs: Any
) -> None:
    received[layer] = [*args, *kwargs.values()]


def _got(arguments: list[Any], given: Tensor) -> bool:
    """Checks whether experts were called with given ids (tokens, k), and a weight for each."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    same_size = [each for each in tensors if each.shape == given.shape]
    ids = [each for each in same_size if not each.is_floating_point()]
    weights = [each for each in same_size if each.is_floating_point()]
    got_ids = any(torch.equal(each.long(), given.long()) for each in ids)
    return got_ids and any(bool((each.isfinite() & (each != 0)).all()) for each in weights)
