"""Runs updates and passes on the meta device up to where the host reads a result.

A tensor of that device has no numbers. What asks for one in between, as `item`, `bool` or a mask as
an index do, would make a GPU's host wait for every micro-batch or chunk, and a tensor left on the
CPU would be copied each time, or fail.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from tests.unit.test_actor_critic import make_update
from tests.unit.test_forward import LAYOUTS
from training.config import ActorConfig, CriticConfig
from training.config.schema.actor import PolicyLossChoice
from training.core_algos import POLICY_LOSS_REGISTRY
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.model import policy_model
from workers.model.attention import use_packed_attention
from workers.model.forward_settings import ForwardSettings

META = torch.device("meta")
# transformers itself asks whether padded rows are packed.
PACKED_LAYOUTS = pytest.mark.parametrize("layout", ["shared", "packed"])
SMALL = {"ppo_max_token_len_per_gpu": 24, "grad_clip": 1.0}


class OneDevice(TorchDispatchMode):
    """Refuses what computes with tensors of both devices, but copies between them."""

    COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim]
        if len({x.device.type for x in tensors}) > 1 and func not in self.COPIES:
            raise AssertionError(f"{func} computes with tensors of two devices")
        return func(*args, **(kwargs or {}))


def first_reader(call: Callable[[], Any]) -> str:
    """Returns the name of the function of ours that first wanted a number of the meta device."""
    with OneDevice(), pytest.raises((NotImplementedError, RuntimeError), match="meta") as caught:
        call()
    ours = [
        f
        for f in traceback.extract_tb(caught.value.__traceback__)
        if "/site-packages/" not in f.filename
    ]
    return ours[-1].name if "test_meta_device" not in ours[-1].filename else ours[-2].name


def model(folder: Path, auto_class: Any, **changes: Any) -> nn.Module:
    with META:
        module = auto_class.from_config(AutoConfig.from_pretrained(folder, **changes))
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert use_packed_attention(module)
    return module


def actor(folder: Path, layout: str, **config: Any) -> DataParallelPPOActor:
    module = model(folder / "model", AutoModelForCausalLM)
    settings = ForwardSettings(device=META, **LAYOUTS[layout])
    optimizer = torch.optim.AdamW(module.parameters(), fused=False)
    return DataParallelPPOActor(ActorConfig(**SMALL | config), module, optimizer, forward=settings)


@pytest.mark.seconds
@PACKED_LAYOUTS
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("entropy_coeff", [0.0, 0.1])
def test_a_policy_update_reads_only_the_gradients_norm(
    tiny_task: Path,
    layout: str,
    chunked: bool,
    entropy_coeff: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if chunked:
        monkeypatch.setattr(policy_model, "LOGITS_CHUNK_BYTES", 2 * 64 * 3)
    policy = actor(tiny_task, layout, use_kl_loss=True, entropy_coeff=entropy_coeff)
    assert first_reader(lambda: policy.update_policy(make_update())) == "clip_grad_norm"


# They choose tokens, or count them.
READERS = {"clip_cov", "kl_cov", "bypass_mode"}


@pytest.mark.seconds
@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSS_REGISTRY.keys() - READERS))
def test_no_policy_loss_reads_anything(tiny_task: Path, loss_mode: str) -> None:
    policy = actor(
        tiny_task, "shared", policy_loss=PolicyLossChoice(loss_mode=loss_mode, dro_beta=0.1)
    )
    assert first_reader(lambda: policy.update_policy(make_update())) == "clip_grad_norm"


@PACKED_LAYOUTS
@pytest.mark.parametrize("with_entropy", [False, True])
def test_log_probs_are_read_once_all_are_computed(
    tiny_task: Path, layout: str, with_entropy: bool
) -> None:
    policy = actor(tiny_task, layout)
    assert first_reader(lambda: policy.compute_log_prob(make_update(), with_entropy)) == "read_rows"


@pytest.mark.seconds
@PACKED_LAYOUTS
def test_the_critic_reads_its_values_once_and_in_an_update_the_norm(
    tiny_task: Path, layout: str
) -> None:
    module = model(tiny_task / "model", AutoModelForTokenClassification, num_labels=1)
    settings = ForwardSettings(device=META, **LAYOUTS[layout])
    optimizer = torch.optim.AdamW(module.parameters(), fused=False)
    critic = DataParallelPPOCritic(CriticConfig(**SMALL), module, optimizer, forward=settings)
    assert first_reader(lambda: critic.compute_values(make_update())) == "read_rows"
    assert first_reader(lambda: critic.update_critic(make_update())) == "clip_grad_norm"


def test_what_would_wait_is_found(tiny_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `item` in the loss, and an index left on the CPU."""
    policy = actor(tiny_task, "shared")
    own = DataParallelPPOActor.micro_forward

    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        log_probs, entropies = own(self, *args, **kwargs)
        return log_probs * log_probs.mean().item(), entropies

    def left_behind(self: Any, *args: Any, **kwargs: Any) -> Any:
        log_probs, entropies = own(self, *args, **kwargs)
        return log_probs[torch.arange(len(log_probs))], entropies

    monkeypatch.setattr(DataParallelPPOActor, "micro_forward", waiting)
    assert first_reader(lambda: policy.update_policy(make_update())) != "clip_grad_norm"
    monkeypatch.setattr(DataParallelPPOActor, "micro_forward", left_behind)
    with pytest.raises(AssertionError, match=r"index.* computes with tensors of two devices"):
        first_reader(lambda: policy.update_policy(make_update()))
