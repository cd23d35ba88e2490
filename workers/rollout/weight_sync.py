"""From the trainer's parameters to a rollout engine's: what is sent, under which names, and the check before that.

Engines fail silently or fatally on a wrong stream of weights: a missing tensor keeps its old values, part of a fused
matrix corrupts it, a wrong shape kills the engine. Invariant: before the first tensor moves, the names and shapes that
are announced (the manifest) are known to fill the engine's model; what then comes is what was announced.

Canaries are a few fixed sequences that the actor and the engine score after every sync: an engine that keeps old
weights, or gets a tensor wrong, still writes fluent text; nothing but its numbers tells. They are the same in every run
of a model, and scoring them changes no generator and no weight.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from data.protocol import DataProto
from workers.model.lora import base_name, whole_weights
from workers.ranks.distributed import max_over_ranks
from workers.rollout.base import BaseRollout

Manifest = dict[str, torch.Size]
# How loaders write to a parameter.
WRITES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def weight_manifest(module: nn.Module) -> Manifest:
    """Lists names and shapes of everything `iter_weights` yields, tied copies included."""
    return {
        own: tensor.shape
        for name, tensor in module.state_dict().items()
        if (own := base_name(name)) is not None
    }


def iter_weights(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor) one by one, cast to `dtype`: never a second full copy of the model on a rank.

    Adapters are merged into what is sent, which has the base model's names.
    A tied `lm_head.weight` is yielded as well: vLLM's CPU backend keeps a packed copy of it, which would go stale.
    """
    yield from whole_weights(module, module.state_dict(), dtype)


def check_manifest(sent: Manifest, expected: Manifest) -> None:
    """Raises ValueError that names every tensor that is missing or unknown; one of another shape is both."""
    missing = [f"missing: {name} {tuple(shape)}" for name, shape in expected.items() - sent.items()]
    refuse(
        missing
        + [f"unknown: {name} {tuple(shape)}" for name, shape in sent.items() - expected.items()]
    )


def refuse(problems: Iterable[str]) -> None:
    """Raises ValueError that lists the problems, if there are any."""
    if listed := "\n  ".join(sorted(problems)):
        raise ValueError(f"weights do not fit the rollout engine; nothing was sent:\n  {listed}")


def as_announced(
    weights: Iterable[tuple[str, Tensor]], manifest: Manifest
) -> Iterator[tuple[str, Tensor]]:
    """Passes the weights on as long as they are what the manifest announces.

    Raises:
        ValueError: naming the tensor that is not in it, of another shape or sent twice; or those that never came.
    """
    awaited = dict(manifest)
    for name, tensor in weights:
        if awaited.pop(name, None) != tensor.shape:
            sent = f"{name} {tuple(tensor.shape)}"
            raise ValueError(
                f"{sent} was not announced, or comes twice; the rollout engine is of no use now"
            )
        yield name, tensor
    if awaited:
        raise ValueError(f"{', '.join(awaited)} never came; the rollout engine is of no use now")


class SavedForm:
    """Turns a model's tensors into those of its checkpoint on disk, which engines of their own code read.

    transformers holds a layer's experts as one tensor, and has names of its own for some models.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)
        saved = revert_weight_conversion(self.model, self.model.state_dict())
        held = self.model.state_dict().items()
        self.converted = {
            name for name, tensor in held if name not in saved or saved[name].shape != tensor.shape
        }

    def of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor as it is saved, or the several that it is saved as."""
        for name, tensor in weights:
            held = {name: tensor}
            yield from (
                revert_weight_conversion(self.model, held) if name in self.converted else held
            ).items()


class LoadTrial(TorchDispatchMode):
    """Sees which parts of an engine's parameters a manifest would be written to: in its block, nothing is written.

    A part is told by its offset, shape and stride.
    """

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.manifest, self.sending = manifest, ""
        # By storage: which tensor wrote to which part.
        self.written: dict[int, set[tuple[str, Any]]] = defaultdict(set)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the manifest's tensors, without memory."""
        for name, shape in self.manifest.items():
            self.sending = name
            yield name, torch.empty(shape, device="meta")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes a write in its stead."""
        if func not in WRITES:
            return func(*args, **(kwargs or {}))
        if args[0].numel() > 0:
            part = args[0].storage_offset(), tuple(args[0].shape), args[0].stride()
            self.written[args[0].untyped_storage()._cdata].add((self.sending, part))
        return args[0]

    def problems(self, parameters: dict[str, Tensor]) -> list[str]:
        """Names the parameters that would not be written whole and once, and the tensors without use."""
        found, used = [], set()
        for name, parameter in parameters.items():
            writes = self.written[parameter.untyped_storage()._cdata]
            senders = sorted({sender for sender, _ in writes})
            used.update(senders)
            count = sum(math.prod(shape) for _, (_, shape, _) in writes)
            if len({part for _, part in writes}) < len(writes):
                found.append(f"written twice: {name}, by {', '.join(senders)}")
            elif count != parameter.numel():
                given = f"{count:,} of its {parameter.numel():,} elements"
                found.append(
                    f"missing: {name} gets {given}, from {', '.join(senders) or 'no tensor'}"
                )
        return found + [
            f"unused: {name} {tuple(self.manifest[name])}" for name in self.manifest.keys() - used
        ]


SEQUENCES = 4
LENGTH = 24
CONVERSATION = [
    {"role": role, "content": f"the {role} speaks"}
    for role in ("system", "user", "assistant", "user")
]


class Canary:
    """Compares what the two make of the sequences, and how far each moved since they were last compared.

    Args:
        max_model_len: tokens of the longest row that the engine holds.
        vocab_size: ids are drawn below it.
        render: conversation -> token ids, by the rank's own chat template.
    """

    def __init__(
        self, max_model_len: int, vocab_size: int, render: Callable[..., list[int]]
    ) -> None:
        self.render = render
        # A place is left for the token that an engine samples behind what it scores.
        length = min(LENGTH, max_model_len - 1)
        self.ids = torch.randint(
            vocab_size, (SEQUENCES, length), generator=torch.Generator().manual_seed(0)
        )
        self.last: tuple[Tensor, Tensor] | None = None

    def batch(self) -> DataProto:
        """Returns the sequences as rows, whose first token is the prompt; at temperature 1."""
        ids = self.ids.int()
        mask = torch.ones_like(ids, dtype=torch.int8)
        tensors = {
            "prompts": ids[:, :1],
            "responses": ids[:, 1:],
            "response_mask": mask[:, 1:],
            "attention_mask": mask,
        }
        return DataProto.from_dict(tensors=tensors, meta_info={"temperature": 1.0})

    def compare(self, engine: BaseRollout, actor: Tensor) -> dict[str, float]:
        """Scores the sequences with the engine and compares with the actor's log-probs of `batch`, (rows, length - 1).

        Returns: means over tokens in nats, of the rank that is worst: `canary/difference` between the two, and from
            the second time on `canary/actor_moved`, `canary/engine_moved` (of the rank that moved least) and
            `canary/lag`, the difference between the two movements; `canary/template`, a number that stands for the chat
            template; `perf/rank_memory_gib`, the host memory of the largest rank.
        """
        scored = torch.tensor(engine.score(self.ids.tolist()))
        found = {"canary/difference": distance(scored, actor)}
        if self.last is not None:
            moved, actor_moved = scored - self.last[0], actor - self.last[1]
            found |= {
                "canary/lag": distance(moved, actor_moved),
                "canary/actor_moved": distance(actor_moved),
            }
            found["canary/engine_moved"] = -distance(moved)
        self.last = scored, actor
        rendered: list[int] = []
        # A tokenizer without a template, or one that refuses such a conversation.
        with suppress(Exception):
            rendered = self.render(CONVERSATION)
        found["canary/template"] = float(zlib.crc32(str(rendered).encode()) % 2**24)
        found["perf/rank_memory_gib"] = psutil.Process().memory_info().rss / 2**30
        worst = dict(
            zip(found, max_over_ranks(torch.tensor([*found.values()])).tolist(), strict=True)
        )
        return {
            name: abs(value) if name == "canary/engine_moved" else value
            for name, value in worst.items()
        }


def distance(one: Tensor, other: Tensor | float = 0.0) -> float:
    """Returns the mean absolute difference; infinite where a number is not one."""
    value = (one - other).abs().mean().item()
    return value if value == value else float("inf")
