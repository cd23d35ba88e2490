"""Faults to seed into a running trainer: each breaks one thing that no exception tells of.

A fault takes the trainer (one rank in this process) at the beginning of a step and patches it for
good.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from data.protocol import DataProto
from training import core_algos

Fault = Callable[[Any], None]
LEAK: list[bytearray] = []


def worker(trainer: Any) -> Any:
    return trainer.actor_rollout_wg.worker


def after(holder: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Has a method's result changed; what `change` returns counts, if it returns something."""
    method = getattr(holder, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        other = change(result)
        return result if other is None else other

    setattr(holder, name, changed)


def generated(change: Callable[[DataProto], DataProto | None]) -> Fault:
    """A fault in what generation returns."""
    return lambda trainer: after(trainer, "_generate_multi_turn_sequences", change)


def field(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """A fault in one field that generation returns."""

    def wrong(batch: DataProto) -> None:
        batch.batch[name] = change(batch.batch[name])

    return generated(wrong)


def column(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    def wrong(batch: DataProto) -> None:
        batch.non_tensor_batch[name] = change(batch.non_tensor_batch[name])

    return generated(wrong)


def engine_weights(
    change: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None],
) -> Fault:
    """A fault in the engine's weights after each sync: given those before it and those after it."""

    def wrong(trainer: Any) -> None:
        rollout = worker(trainer).rollout
        update = rollout.update_weights

        def patched(*args: Any) -> None:
            before = {name: tensor.clone() for name, tensor in rollout.module.state_dict().items()}
            update(*args)
            change(before, rollout.module.state_dict())

        rollout.update_weights = patched

    return wrong


def deaf_engine(trainer: Any) -> None:
    worker(trainer).rollout.update_weights = lambda weights, manifest: None


def sampling(**settings: Any) -> Fault:
    return lambda trainer: after(
        worker(trainer).rollout, "sampling", lambda made: replace(made, **settings)
    )


def kept(*names: str) -> Fault:
    """Named tensors, or all, keep their old weights."""

    def change(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
        for name in names or now:
            now[name].copy_(before[name])

    return engine_weights(change)


def swapped(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
    one, other = (now[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
    first = one.clone()
    one.copy_(other)
    other.copy_(first)


def noisy(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
    now["lm_head.weight"].mul_(1.01)


def short_type(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> None:
    for tensor in now.values():
        tensor.copy_(tensor.bfloat16())


def no_end(trainer: Any) -> None:
    """The engine never samples what ends a turn."""
    end = worker(trainer).spec.tokenizer.eos_token_id

    def without(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[..., end] = -1e4
        return logits

    worker(trainer).rollout.module.lm_head.register_forward_hook(without)


def other_temperature(trainer: Any) -> None:
    own = worker(trainer)
    own._with_temperature = lambda data: replace(
        data, meta_info=data.meta_info | {"temperature": 2.0}
    )


def equal_seeds(trainer: Any) -> None:
    rollout = worker(trainer).rollout
    sampler = rollout.sampler

    def patched(meta_info: dict[str, Any]) -> Any:
        own = sampler(meta_info)
        return lambda episode: own(replace(episode, sample=0))

    rollout.sampler = patched


def estimator(change: Callable[..., Any]) -> Fault:
    """A fault in the estimator: `change(original, **arguments)`."""

    def wrong(trainer: Any) -> None:
        name = trainer.config.algorithm.adv_estimator
        own = core_algos.ADV_ESTIMATOR_REGISTRY[name]

        def patched(*args: Any, **kwargs: Any) -> Any:
            return change(own, *args, **kwargs)

        patched.__signature__ = __import__("inspect").signature(own)
        core_algos.ADV_ESTIMATOR_REGISTRY[name] = patched

    return wrong


def nothing(own: Any, *args: Any, **kwargs: Any) -> Any:
    advantages, returns = own(*args, **kwargs)
    return advantages * 0, returns


def poisoned_gradient(trainer: Any) -> None:
    parameter = next(worker(trainer).module.parameters())
    parameter.register_hook(lambda gradient: gradient * float("nan"))


def no_gradient(trainer: Any) -> None:
    for parameter in worker(trainer).module.parameters():
        parameter.register_hook(torch.zeros_like)


def idle_optimizer(trainer: Any) -> None:
    worker(trainer).optimizer.step = lambda *args: None


def rate(value: float) -> Fault:
    """The schedule gives another learning rate."""

    def wrong(trainer: Any) -> None:
        scheduler = worker(trainer).scheduler
        scheduler.lr_lambdas = [lambda step: value / scheduler.base_lrs[0]]
        scheduler._last_lr = [value]
        for group in worker(trainer).optimizer.param_groups:
            group["lr"] = value

    return wrong


def sharpened(trainer: Any) -> None:
    with torch.no_grad():
        worker(trainer).module.lm_head.weight.mul_(60)


def dropout(trainer: Any) -> None:
    layer = worker(trainer).module.model.layers[0].mlp
    chance = torch.nn.Dropout(0.2)
    # Modules are never in training mode here, so that it asks whether there is a gradient.
    layer.register_forward_hook(
        lambda module, inputs, output: chance(output) if torch.is_grad_enabled() else output
    )


def rows_of_another_order(trainer: Any) -> None:
    def roll(result: DataProto) -> None:
        result.batch["old_log_probs"] = result.batch["old_log_probs"].roll(1, 0)

    after(worker(trainer), "compute_log_prob", roll)


def slow(trainer: Any) -> None:
    after(trainer, "_generate_multi_turn_sequences", lambda batch: time.sleep(3))


def leak(trainer: Any) -> None:
    after(
        trainer,
        "_generate_multi_turn_sequences",
        lambda batch: LEAK.append(bytearray(b"x") * (700 << 20)),
    )


def poisoned_critic(trainer: Any) -> None:
    next(trainer.critic_wg.worker.module.parameters()).register_hook(
        lambda gradient: gradient * float("inf")
    )


def template(trainer: Any) -> None:
    tokenizer = worker(trainer).spec.tokenizer
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"


def scores(change: Callable[[torch.Tensor, DataProto], torch.Tensor]) -> Fault:
    """A fault in what the reward phase returns."""

    def wrong(trainer: Any) -> None:
        add = trainer.phases.add_rewards

        def add_changed(batch: DataProto, given: torch.Tensor, infos: dict[str, Any]) -> DataProto:
            return add(batch, change(given, batch), infos)

        trainer.phases.add_rewards = add_changed

    return wrong


def one_source_constant(given: torch.Tensor, batch: DataProto) -> torch.Tensor:
    rows = torch.from_numpy(batch.non_tensor_batch["agent_index"] == 0)
    last = (batch.batch["response_mask"] * torch.arange(given.shape[1])).argmax(1)
    given = given.clone()
    given[rows] = 0
    given[rows, last[rows]] = 0.5
    return given


def constant(given: torch.Tensor, batch: DataProto) -> torch.Tensor:
    last = (batch.batch["response_mask"] * torch.arange(given.shape[1])).argmax(1, keepdim=True)
    return torch.zeros_like(given).scatter(1, last, 0.5)


def by_group(given: torch.Tensor, batch: DataProto) -> torch.Tensor:
    last = (batch.batch["response_mask"] * torch.arange(given.shape[1])).argmax(1, keepdim=True)
    groups = torch.tensor([int(uid.rsplit(".", 1)[1]) % 3 for uid in batch.non_tensor_batch["uid"]])
    return torch.zeros_like(given).scatter(1, last, groups[:, None].float())


def token_earlier(given: torch.Tensor, batch: DataProto) -> torch.Tensor:
    return given.roll(-1, 1)


def on_first_tokens(given: torch.Tensor, batch: DataProto) -> torch.Tensor:
    wrong = torch.zeros_like(given)
    wrong[:, 0] = given.sum(1)
    return wrong


def at_the_end(given: torch.Tensor, batch: DataProto) -> torch.Tensor:
    wrong = torch.zeros_like(given)
    wrong[:, -1] = given.sum(1)
    return wrong


def attended(batch: DataProto) -> None:
    width = batch.batch["responses"].shape[1]
    batch.batch["response_mask"] = batch.batch["attention_mask"][:, -width:].clone()


def other_observations(batch: DataProto) -> None:
    tensors = batch.batch
    width = tensors["responses"].shape[1]
    told = tensors["attention_mask"][:, -width:].bool() & (tensors["turn_ids"] < 0)
    tensors["responses"] = torch.where(told, (tensors["responses"] + 3) % 20, tensors["responses"])


def retokenised(ids: torch.Tensor) -> torch.Tensor:
    ids = ids.clone()
    ids[:, 0] = (ids[:, 0] + 1) % 20
    return ids


def lost_member(uids: np.ndarray) -> np.ndarray:
    uids = uids.copy()
    uids[0] = uids[-1]
    return uids
