"""Faults that leave a run without an exception, each as an edit of one function would make it.

A fault takes the trainer (one rank in this process) at the beginning of a step and patches it for
good; `patched` sets what belongs to a module or class, and `undo_patches` takes it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from data.protocol import DataProto
from tests.features.alarms.runs import seeded_faults
from tests.features.alarms.runs.seeded_faults import (
    Fault,
    after,
    estimator,
    generated,
    scores,
    worker,
)
from tests.wrong_advantages import a_token_late, negated, rolled_index
from training import advantage
from workers import dp_actor, dp_critic, hf_rollout
from workers.model import update_loop
from workers.rollout import base_rollout, episode

PATCHES = ExitStack()


class Case(NamedTuple):
    """A fault, the alarms that name it, the kind of run, and its own settings."""

    fault: Fault
    alarms: tuple[str, ...]
    kind: str = "grpo"
    settings: tuple[str, ...] = ()


def patched(holder: Any, name: str, value: Any) -> None:
    PATCHES.enter_context(patch.object(holder, name, value))


def undo_patches() -> None:
    PATCHES.close()


# The batch


def masked_tokens(choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Fault:
    """Tokens that `choose(mask, turn_ids)` marks are left out of the mask."""

    def wrong(batch: DataProto) -> None:
        fields = batch.batch
        mask = fields["response_mask"]
        left_out = choose(mask.bool(), fields["turn_ids"])
        fields["response_mask"] = torch.where(left_out, 0, mask).to(mask.dtype)

    return generated(wrong)


def ends_of_turns(mask: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    following = torch.nn.functional.pad(turns[:, 1:], (0, 1), value=-1)
    return mask & (turns != following)


def spans_end_early(trainer: Any) -> None:
    """A turn's last token counts as not sampled, in every column alike."""
    append = episode.Row.append_sampled

    def shorter(row: Any, completion: Any, turn: int) -> None:
        append(row, completion, turn)
        span = row.spans[-1]
        if span.end - span.start > 1:
            row.spans[-1] = span._replace(end=span.end - 1)
            row.log_probs[span.end - 1] = 0.0

    patched(episode.Row, "append_sampled", shorter)


def rewards_twice(trainer: Any) -> None:
    add = episode.Episode.add_reward

    def twice(played: Any, reward: float) -> None:
        add(played, reward)
        add(played, reward)

    patched(episode.Episode, "add_reward", twice)


def later_rewards_lost(given: torch.Tensor, batch: DataProto) -> torch.Tensor:
    return torch.where(batch.batch["turn_ids"] == 0, given, 0)


def of_another_row(given: torch.Tensor, batch: DataProto) -> torch.Tensor:
    """Each row's sum is that of the row before it."""
    mask = batch.batch["response_mask"]
    last = (mask * torch.arange(given.shape[1])).argmax(1, keepdim=True)
    return torch.zeros_like(given).scatter(1, last, given.sum(1, keepdim=True).roll(1, 0))


def copied_group(batch: DataProto) -> None:
    """The second group's answers are those of the first."""
    names = list(dict.fromkeys(batch.non_tensor_batch["uid"]))
    first, second = (np.flatnonzero(batch.non_tensor_batch["uid"] == name) for name in names[:2])
    for tensor in batch.batch.values():
        tensor[second] = tensor[first]
    for name in ("episode_facts", "anchors", "ending"):
        if name in batch.non_tensor_batch:
            batch.non_tensor_batch[name][second] = batch.non_tensor_batch[name][first]


def described(change: Callable[[DataProto], None]) -> Fault:
    """A fault in the descriptions of episodes."""
    return lambda trainer: after(trainer, "prompt_batch", change)


def seeds_of_the_step_before(trainer: Any) -> None:
    held: list[np.ndarray] = []

    def same(batch: DataProto) -> None:
        held.append(batch.non_tensor_batch["env_seed"])
        batch.non_tensor_batch["env_seed"] = held[0]

    after(trainer, "prompt_batch", same)


def one_task_for_all(batch: DataProto) -> None:
    batch.non_tensor_batch["env_seed"][:] = batch.non_tensor_batch["env_seed"][0]


def samplers_without_the_step(trainer: Any) -> None:
    own = base_rollout.turn_seed

    def without_step(meta_info: dict[str, Any], played: Any, turn: int | None = None) -> int:
        return own(meta_info | {"global_steps": 0}, played, turn)

    patched(base_rollout, "turn_seed", without_step)


# Advantages


# Models


def frozen(part: str, model: str = "actor") -> Fault:
    """Parameters whose names have `part` in them need no gradient."""

    def wrong(trainer: Any) -> None:
        holder = worker(trainer) if model == "actor" else trainer.critic_wg.worker
        for name, parameter in holder.module.named_parameters():
            if part in name:
                parameter.requires_grad_(False)

    return wrong


def cut_off(trainer: Any) -> None:
    """No gradient goes back beyond the second layer."""
    worker(trainer).module.model.layers[0].register_forward_hook(
        lambda module, inputs, output: (
            output.detach() if torch.is_tensor(output) else (output[0].detach(), *output[1:])
        )
    )


def critic_stands_still(trainer: Any) -> None:
    trainer.critic_wg.worker.optimizer.step = lambda *args: None


def group_of_rate_zero(trainer: Any) -> None:
    """The optimiser has a second group of parameters, which the schedule forgets."""
    optimizer = worker(trainer).optimizer
    group = optimizer.param_groups[0]
    half = len(group["params"]) // 2
    rest = {name: value for name, value in group.items() if name != "params"}
    moved = group["params"][half:]
    group["params"] = group["params"][:half]
    optimizer.param_groups.append({**rest, "params": moved, "lr": 0.0})
    scheduler = worker(trainer).scheduler
    scheduler.base_lrs.append(0.0)
    scheduler.lr_lambdas.append(lambda step: 0.0)


def gradients_kept(trainer: Any) -> None:
    worker(trainer).optimizer.zero_grad = lambda *args, **kwargs: None


def reference_is_the_policy(trainer: Any) -> None:
    worker(trainer).ref.module = worker(trainer).actor.module
    worker(trainer).ref.actor_module = worker(trainer).actor.actor_module


def reference_follows(trainer: Any) -> None:
    """After each update the reference goes a hundredth of the way to the policy."""
    own = worker(trainer)

    def follow(metrics: Any) -> None:
        pairs = zip(
            own.ref.actor_module.parameters(), own.actor.actor_module.parameters(), strict=True
        )
        with torch.no_grad():
            for reference, policy in pairs:
                reference.lerp_(policy, 0.01)

    after(own, "update_actor", follow)


def negative_kl(trainer: Any) -> None:
    own = dp_actor.algos.kl_penalty
    patched(dp_actor.algos, "kl_penalty", lambda *args: -own(*args))


def negative_kl_in_reward(trainer: Any) -> None:
    own = advantage.algos.kl_penalty
    patched(advantage.algos, "kl_penalty", lambda *args: own(*args) - 0.5)


def schedule_by_mini_batches(trainer: Any) -> None:
    """The schedule goes on with every optimiser step, too."""
    own = worker(trainer)
    own.optimizer.register_step_post_hook(lambda *args: own.scheduler.step())


def rate_ten_times(trainer: Any) -> None:
    for group in worker(trainer).optimizer.param_groups:
        group["lr"] *= 10
    own = worker(trainer)
    own.scheduler.base_lrs = [10 * rate for rate in own.scheduler.base_lrs]
    own.scheduler._last_lr = [10 * rate for rate in own.scheduler._last_lr]


def every_second_micro_batch(trainer: Any) -> None:
    own = update_loop.iter_micro_batches

    def half(data: DataProto, *args: Any) -> Iterator[Any]:
        for rows, micro, inputs in own(data, *args):
            micro.batch["response_mask"][::2] = 0
            yield rows, micro, inputs

    patched(update_loop, "iter_micro_batches", half)


def first_mini_batch_again(trainer: Any) -> None:
    own = update_loop.rows_of_updates

    def first(data: DataProto, plan: Any) -> list[torch.Tensor]:
        parts = own(data, plan)
        return [parts[0]] * len(parts)

    patched(update_loop, "rows_of_updates", first)


# The engine


def positions_off_by_one(trainer: Any) -> None:
    rollout = worker(trainer).rollout

    def later(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "position_ids" in kwargs and kwargs["input_ids"].shape[1] == 1:
            kwargs = kwargs | {"position_ids": kwargs["position_ids"] + 1}
        return args, kwargs

    rollout.module.register_forward_pre_hook(later, with_kwargs=True)


def sync_one_step_late(trainer: Any) -> None:
    rollout = worker(trainer).rollout
    update = rollout.update_weights
    held: list[dict[str, torch.Tensor]] = []

    def late(weights: Any, manifest: Any) -> None:
        held.append({name: tensor.clone() for name, tensor in weights})
        update(iter(held[-2 if len(held) > 1 else -1].items()), manifest)

    rollout.update_weights = late


def adapter_lost(trainer: Any) -> None:
    """What is sent to the engine is the base model."""
    from workers.weight_sync import manifest

    own = manifest.whole_weights

    def base(module: Any, tensors: Any, dtype: torch.dtype, casts: bool) -> Any:
        zero = {
            name: torch.zeros_like(tensor) if "lora_B" in name else tensor
            for name, tensor in tensors.items()
        }
        return own(module, zero, dtype, casts)

    patched(manifest, "whole_weights", base)


def one_large_step(trainer: Any) -> None:
    """A single update of a far too high rate."""
    own = worker(trainer)
    step = own.optimizer.step

    def large(*args: Any) -> None:
        for group in own.optimizer.param_groups:
            group["lr"] *= 100
        step(*args)
        for group in own.optimizer.param_groups:
            group["lr"] /= 100
        own.optimizer.step = step

    own.optimizer.step = large


# Further ones, thought of once the alarms were written.


def loss_of_wrong_sign(trainer: Any) -> None:
    own = worker(trainer).actor
    policy_loss = own._policy_loss

    def negative(*args: Any) -> Any:
        loss, metrics = policy_loss(*args)
        return -loss, metrics

    own._policy_loss = negative


def loss_of_other_rows(trainer: Any) -> None:
    own = worker(trainer).actor
    policy_loss = own._policy_loss

    def rolled(fields: Any, *args: Any) -> Any:
        return policy_loss(fields | {"advantages": fields["advantages"].roll(1, 0)}, *args)

    own._policy_loss = rolled


def later_turns_are_cooler(trainer: Any) -> None:
    rollout = worker(trainer).rollout
    sampler = rollout.sampler

    def other_sampler(meta_info: dict[str, Any]) -> Any:
        own = sampler(meta_info)
        return lambda played: replace(own(played), temperature=0.8 if played.turns else 1.0)

    rollout.sampler = other_sampler


def adapters_at_another_scale(trainer: Any) -> None:
    from workers.weight_sync import manifest

    own = manifest.whole_weights

    def unscaled(module: Any, tensors: Any, dtype: torch.dtype, casts: bool) -> Any:
        other = {
            name: tensor / 2 if "lora_B" in name else tensor for name, tensor in tensors.items()
        }
        return own(module, other, dtype, casts)

    patched(manifest, "whole_weights", unscaled)


def values_of_other_rows(trainer: Any) -> None:
    def roll(result: DataProto) -> None:
        result.batch["values"] = result.batch["values"].roll(1, 0)

    after(trainer.critic_wg.worker, "compute_values", roll)


def two_steps_each(trainer: Any) -> None:
    optimizer = worker(trainer).optimizer
    step = optimizer.step

    def twice(*args: Any) -> None:
        step(*args)
        step(*args)

    optimizer.step = twice


def uids_collide(uids: np.ndarray) -> np.ndarray:
    """Groups are numbered modulo 4."""
    short = [f"{uid.rsplit('.', 1)[0]}.{int(uid.rsplit('.', 1)[1]) % 4}" for uid in uids]
    return np.array(short, dtype=object)


def last_token_cut(batch: DataProto) -> None:
    fields = batch.batch
    mask = fields["response_mask"].bool()
    last = (mask * torch.arange(mask.shape[1])).argmax(1, keepdim=True)
    fields["responses"] = fields["responses"].scatter(1, last, 0)


# Faults for alarms that look at something of their own.


def other_reference(trainer: Any) -> None:
    """The reference differs from the first step on."""
    with torch.no_grad():
        [*worker(trainer).ref.actor_module.parameters()][-1].mul_(1.5)
    worker(trainer).ref_numbers = {}


def endless_turns(trainer: Any) -> None:
    after(worker(trainer).rollout, "sampling", lambda made: replace(made, stop_token_ids=()))


def masked_away(batch: DataProto) -> None:
    batch.batch["response_mask"][: int(0.9 * len(batch))] = 0


def full_prompts(batch: DataProto) -> None:
    width = batch.batch["prompts"].shape[1]
    batch.batch["attention_mask"][:, :width] = 1


def blind_critic(trainer: Any) -> None:
    def zero(result: DataProto) -> None:
        result.batch["values"] = torch.zeros_like(result.batch["values"])

    after(trainer.critic_wg.worker, "compute_values", zero)


def prompts_of_the_step_before(trainer: Any) -> None:
    describe = trainer.prompt_batch
    held: list[Any] = []

    def same(rows: Any, *args: Any, **kwargs: Any) -> DataProto:
        held.append(rows)
        return describe(held[0], *args, **kwargs)

    trainer.prompt_batch = same


# Faults that a third look found.


def tasks_of_their_own(batch: DataProto) -> None:
    """Each member of a group has a task of its own; how the game begins does not show it."""
    batch.non_tensor_batch["env_seed"] = (
        batch.non_tensor_batch["env_seed"] + batch.non_tensor_batch["sample_index"]
    )


def value_loss_negated(trainer: Any) -> None:
    own = dp_critic.value_loss

    def negative(*args: Any) -> Any:
        loss, metrics = own(*args)
        return -loss, metrics

    patched(dp_critic, "value_loss", negative)
    patched(dp_actor, "value_loss", negative)


def zeroed_between_micro_batches(trainer: Any) -> None:
    own = worker(trainer).actor
    micro_loss = own.micro_loss

    def after_zeroing(*args: Any) -> Any:
        own.optimizer.zero_grad()
        return micro_loss(*args)

    own.micro_loss = after_zeroing


def sharper_than_it_says(trainer: Any) -> None:
    """The engine samples at another temperature than that of the log-probs that it reports."""
    own = hf_rollout.sample_tokens

    def sharper(logits: torch.Tensor, sampling: Any, generators: Any) -> Any:
        tokens, _ = own(logits, replace(sampling, temperature=0.25), generators)
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)

    patched(hf_rollout, "sample_tokens", sharper)


SLOW = ("actor_rollout_ref.actor.optim.lr=1e-6",)
KL = ("actor_rollout_ref.actor.use_kl_loss=true",)
KL_REWARD = ("algorithm.use_kl_in_reward=true",)
down_proj = "model.layers.0.mlp.down_proj.weight"

CASES: dict[str, Case] = {
    "ends of turns left out of the mask": Case(masked_tokens(ends_of_turns), ("tokens_left_out",)),
    "first turns left out of the mask": Case(
        masked_tokens(lambda mask, turns: turns == 0), ("tokens_left_out",)
    ),
    "spans end a token early": Case(spans_end_early, ("tokens_left_out",)),
    "an answer's end left out of the mask": Case(
        masked_tokens(ends_of_turns), ("tokens_left_out",), "prompts"
    ),
    "rewards count twice": Case(rewards_twice, ("reward_differs",)),
    "rewards of later turns lost": Case(scores(later_rewards_lost), ("reward_differs",)),
    "rewards of another row": Case(scores(of_another_row), ("reward_differs",)),
    "scores of another row": Case(scores(of_another_row), ("reward_differs",), "prompts"),
    "tasks of the step before": Case(seeds_of_the_step_before, ("tasks_repeat",)),
    "one task for all groups": Case(described(one_task_for_all), ("tasks_repeat",)),
    "sampling seeds of the step before": Case(samplers_without_the_step, ("answers_repeat",)),
    "a copied group": Case(generated(copied_group), ("groups_copied",)),
    "a copied group of answers": Case(
        generated(copied_group), ("groups_copied", "prompt_differs"), "prompts"
    ),
    "advantages negated": Case(estimator(negated), ("advantages_wrong",)),
    "groups shuffled": Case(estimator(rolled_index), ("advantages_wrong",)),
    "gae negated": Case(estimator(negated), ("advantages_wrong",), "gae"),
    "critic frozen": Case(critic_stands_still, ("part_still",), "gae"),
    "embedding frozen": Case(frozen("embed_tokens"), ("part_still",)),
    "gradient cut off": Case(cut_off, ("part_still",)),
    "optimiser group of rate 0": Case(group_of_rate_zero, ("part_still",)),
    "gradients not zeroed": Case(gradients_kept, ("gradients_kept",)),
    "reference is the policy": Case(reference_is_the_policy, ("reference_moves",), settings=KL),
    "reference follows": Case(reference_follows, ("reference_moves",), settings=KL),
    "negative KL": Case(
        negative_kl, ("kl_negative",), settings=(*KL, "actor_rollout_ref.actor.kl_loss_type=k3")
    ),
    "schedule by mini-batches": Case(schedule_by_mini_batches, ("rate_differs",)),
    "half of the rows missing": Case(every_second_micro_batch, ("tokens_missing",)),
    "positions off by one": Case(positions_off_by_one, ("log_probs_differ", "turn_differs")),
    "a stale tensor, tiny updates": Case(
        seeded_faults.kept(down_proj), ("engine_stale",), settings=SLOW
    ),
    "one large step": Case(one_large_step, ("large_step", "kl_explodes")),
}

INVENTED: dict[str, Case] = {
    "loss of the wrong sign": Case(loss_of_wrong_sign, ("gradient_misled",)),
    "loss of other rows": Case(loss_of_other_rows, ("gradient_misled",)),
    "later turns are cooler": Case(later_turns_are_cooler, ("turn_differs", "log_probs_differ")),
    "adapters at another scale": Case(
        adapters_at_another_scale, ("engine_stale", "engine_differs"), "lora"
    ),
    "values of other rows": Case(values_of_other_rows, ("values_differ",), "gae"),
    "two optimiser steps each": Case(two_steps_each, ("updates_differ",)),
    "uids collide": Case(seeded_faults.column("uid", uids_collide), ("group_size", "groups_mixed")),
    "last tokens cut off": Case(generated(last_token_cut), ("log_probs_differ", "turn_differs")),
}

MORE: dict[str, Case] = {
    "turns go on behind their end": Case(endless_turns, ("end_ignored",)),
    "most episodes masked": Case(generated(masked_away), ("nothing_sampled",)),
    "prompts cut": Case(
        generated(full_prompts), ("prompts_pinned",), "prompts", ("data.truncation=left",)
    ),
    "a blind critic": Case(blind_critic, ("values_constant",), "gae"),
    "advantages a token late": Case(estimator(a_token_late), ("advantages_wrong",)),
    "prompts of the step before": Case(prompts_of_the_step_before, ("tasks_repeat",), "prompts"),
    "a lost member": Case(seeded_faults.column("uid", seeded_faults.lost_member), ("group_size",)),
    "policy's rate ten times": Case(rate_ten_times, ("rate_differs",)),
    "no adapter arrives": Case(adapter_lost, ("engine_stale",), "lora", SLOW),
    "the engine is a step late": Case(sync_one_step_late, ("engine_stale",), settings=SLOW),
    "a KL below zero in the reward": Case(
        negative_kl_in_reward, ("kl_negative",), settings=(*KL_REWARD, "algorithm.kl_penalty=k3")
    ),
    "rows come twice": Case(
        first_mini_batch_again,
        ("tokens_missing",),
        settings=("actor_rollout_ref.actor.ppo_mini_batch_size=4",),
    ),
    "tasks differ within a group": Case(described(tasks_of_their_own), ("groups_mixed",)),
    "the critic's loss negated": Case(value_loss_negated, ("gradient_misled",), "gae"),
    "a shared critic's loss negated": Case(value_loss_negated, ("gradient_misled",), "shared"),
    "gradients zeroed between micro-batches": Case(
        zeroed_between_micro_batches,
        ("gradients_lost",),
        settings=("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",),
    ),
    "samples are sharper than reported": Case(
        sharper_than_it_says, ("samples_biased",), settings=("data.train_batch_size=16",)
    ),
    "an embedding of the critic": Case(frozen("embed_tokens", "critic"), ("part_still",), "gae"),
}
