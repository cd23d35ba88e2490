"""Measures what a run takes in each phase, with the real trainer and workers.

Measured is each phase of the second step, where the optimiser has its moments: the bytes of the
tensors that stand when it begins, and the most of what operations make beyond them while it runs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

import workers.model.checkpoint_writer as checkpoint_writer
from training.building import build_trainer
from training.config import PPOConfig

PHASES = {
    "generate_sequences": "generation",
    "compute_log_prob": "log-probs",
    "compute_ref_log_prob": "reference",
    "compute_values": "values",
    "update_critic": "critic update",
    "update_actor": "actor update",
    "sync_weights": "weight sync",
}


class FullPrompts(Dataset):
    """Prompts of full length but for one, so that there is padding, as in any real batch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Any]:
        real = self.length - (i % 4 == 1)
        ids = [0] * (self.length - real) + [5 + (i + place) % 20 for place in range(real)]
        mask = [0] * (self.length - real) + [1] * real
        return {
            "input_ids": torch.tensor(ids),
            "attention_mask": torch.tensor(mask),
            "data_source": "none",
        }


KINDS = (torch.Tensor, torch.nn.Parameter)


def tensors() -> list[torch.Tensor]:
    """All tensors with memory that there are."""
    gc.collect()
    return [
        thing for thing in gc.get_objects() if type(thing) in KINDS and thing.device.type == "cpu"
    ]


def standing() -> int:
    """Their bytes, each memory once."""
    sizes = {}
    for tensor in tensors():
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class MostMade(TorchDispatchMode):
    """The bytes of what operations make in the block, while it lives, and the most of them at once.

    Of the three smallest shapes the allocator's own account (`torch.profiler`, far slower) gave the
    same to 0.1 %.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self.known = {id(thing.untyped_storage()) for thing in tensors()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if type(output) in KINDS:
                self.count(output.untyped_storage())
        self.most = max(self.most, self.now)
        return outputs

    def count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self.known:
            return
        self.known.add(key)
        self.now += storage.nbytes()
        weakref.finalize(storage, self.freed, key, storage.nbytes())

    def freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def measure(config: PPOConfig) -> dict[str, int]:
    """Runs two steps and a checkpoint; the peak of each phase of the last."""
    before = standing()
    peaks: dict[str, int] = {}
    trainer = build_trainer(
        config,
        train_dataset=FullPrompts(config.data.max_prompt_length),
        reward_fn=lambda batch: torch.rand(batch.batch["responses"].shape),
    )
    trainer.init_workers()

    def measured(method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            at_start = standing() - before
            with MostMade() as made:
                result = method(*args)
            peaks[phase] = at_start + made.most
            return result

        return call

    steps = trainer.training_batches()
    trainer.train_step(next(steps))
    # The reference's group may be the actor's.
    groups = {trainer.actor_rollout_wg, trainer.ref_policy_wg, trainer.critic_wg} - {None}
    for group in groups:
        for name, phase in PHASES.items():
            if hasattr(group.worker, name):
                setattr(group.worker, name, measured(getattr(group.worker, name), phase))
    trainer.train_step(next(steps))
    save = checkpoint_writer.dcp.save

    def measured_save(*args: Any, **kwargs: Any) -> Any:
        peaks["checkpoint"] = standing() - before
        return save(*args, **kwargs)

    with patch.object(checkpoint_writer.dcp, "save", measured_save):
        trainer.save_checkpoint()
        for group in trainer.saver.groups.values():
            group.worker.checkpoint_written(True)
    return peaks
