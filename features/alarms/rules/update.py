"""Looks at what an update did: learning rates, gradients, tensors, tokens, KL."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from features.alarms.finding import Finding
from features.alarms.rule import RulesWithMemory, rule
from features.alarms.seen_step import SeenStep
from training.config import OptimConfig, UpdatePlan
from training.observers import ObservedRun
from workers.model.optimizer import build_optimizer, build_scheduler

# Sections of metrics whose numbers must be finite, and how many that are not are named.
FINITE_SECTIONS = ("actor/", "critic/", "training/", "canary/")
MOST_NAMED = 5
# Advantages and value losses above it have something to teach.
SOMETHING_TO_LEARN = 1e-8
# Nats a token.
KL_EXPLODES = 2.0
LARGEST_POLICY_KL = 0.5
LARGEST_REFERENCE_KL = 2.0
# A jump is so many times the most so far, and at least so many nats.
JUMP_FACTOR = 5
LEAST_JUMP = 0.2
# Shares of the batch's tokens, and of its advantages, that rounding may lose.
TOKENS_LOST = 1e-4
TARGETS_LOST = 1e-3
# The same of a gradient, which adds up in the parameters' type.
GRADIENT_LOST = 1e-2
# Cosine of the first gradient with the advantages; where other terms of the loss reach the
# log-probs, only one that goes the other way is a fault.
LEAST_ALIGNMENT = 0.1
LEAST_ALIGNMENT_WITH_OTHERS = -0.5
# Estimates of a KL that may be negative.
SIGNED_ESTIMATES = ("kl", "k1")
MOST_NEGATIVE = -1e-6
# Share by which a learning rate may differ from its schedule.
RATE_TOLERANCE = 1e-5
SMALLEST_RATE = 1e-15
# Ends of settings that say how far a step may move the policy.
STEP_SETTINGS = (
    "actor.optim.lr",
    "actor.optim.optimizer",
    "actor.ppo_epochs",
    "actor.ppo_mini_batch_size",
    "actor.grad_clip",
    "actor.clip_ratio",
    "actor.clip_ratio_low",
    "actor.clip_ratio_high",
    "actor.clip_ratio_c",
    "policy_loss.loss_mode",
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
)
# The same of what is added to the loss.
KL_SETTINGS = ("kl_loss_coef", "use_kl_loss", "use_kl_in_reward", "ref.model.path")
NUMBER_SETTINGS = (*STEP_SETTINGS, "model.dtype", "loss_agg_mode")


@rule(
    "not_finite",
    advice="the learning rate, the dtype, and what gave that number",
    view="sort=-mismatch",
    settings=NUMBER_SETTINGS,
    order=170,
)
def not_finite_numbers(seen: SeenStep) -> Iterator[Finding]:
    """Finds metrics that are NaN or infinite."""
    wrong = []
    for name, value in seen.metrics.items():
        if name.startswith(FINITE_SECTIONS) and not math.isfinite(value):
            wrong.append(name)
    if wrong:
        yield Finding("not_finite", ", ".join(wrong[:MOST_NAMED]))


class RateRules(RulesWithMemory):
    """Compares how the learning rates of policy and critic move with how their schedules do.

    The schedule is that of `build_scheduler` for an optimiser of `build_optimizer`, whatever both
    are by now. A metric is the rate of the first group of parameters, and groups may have rates of
    their own: what is compared is a rate's share of its schedule, which stays. Schedules go over
    all steps of the run; where their number is not known, nothing is watched.
    """

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        config = run.config
        total_steps = run.total_steps
        self.schedules: dict[str, Callable[[int], float]] = {}
        self.warmup = {"actor": config.trainer.critic_warmup, "critic": 0}
        # Updates that this process has seen.
        self.updates: Counter[str] = Counter()
        # The share that a rate has of its schedule: one for the place that follows from the step,
        # one for the place of a schedule that has begun anew with this process.
        self.shares: dict[tuple[str, str], float] = {}
        if total_steps is None:
            return
        sections = {
            "actor": config.actor_rollout_ref.actor.optim,
            "critic": config.critic.optim,
        }
        for model, optim in sections.items():
            steps = max(total_steps - self.warmup[model], 1)
            self.schedules[model] = schedule(optim, steps)

    @rule(
        "rate_differs",
        advice="the scheduler: which base rate has it, and how often is it stepped?",
        order=210,
    )
    def other_rates(self, seen: SeenStep) -> Iterator[Finding]:
        """Looks at a step's rates; a schedule may have begun anew with this process."""
        for model, rate_at in self.schedules.items():
            rate = seen.metrics.get(f"{model}/lr")
            if rate is None:
                continue
            by_step = rate_at(seen.step - 1 - self.warmup[model])
            anew = rate_at(self.updates[model])
            self.updates[model] += 1
            follows_step = self._keeps_share((model, "by step"), rate, by_step)
            follows_process = self._keeps_share((model, "anew"), rate, anew)
            if not follows_step and not follows_process:
                share = self.shares.get((model, "by step"), 1.0)
                yield Finding(
                    "rate_differs",
                    f"{model}/lr is {rate:.4g}, and its schedule says {share * by_step:.4g} in "
                    "this step",
                )

    def _keeps_share(self, key: tuple[str, str], rate: float, planned: float) -> bool:
        """Tells whether a rate is the share of its schedule that the first one was."""
        if key not in self.shares:
            if planned == 0 or rate == 0:
                return planned == rate
            self.shares[key] = rate / planned
        return math.isclose(
            rate, self.shares[key] * planned, rel_tol=RATE_TOLERANCE, abs_tol=SMALLEST_RATE
        )


def schedule(optim: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Makes the function of an update's number, from 0 on, that gives the first group's rate.

    It steps a scheduler of the run's own making as the run does, so that it may be any. No random
    draw of the run changes.
    """
    with torch.random.fork_rng(devices=[]):
        optimizer = build_optimizer(torch.nn.Linear(2, 2), optim)
        scheduler = build_scheduler(optimizer, optim, total_steps)
    rates = [float(optimizer.param_groups[0]["lr"])]

    def rate_at(number: int) -> float:
        with warnings.catch_warnings():
            # The optimiser makes no step.
            warnings.simplefilter("ignore")
            while len(rates) <= number:
                scheduler.step()
                rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates[number]

    return rate_at


@rule(
    "gradient_not_finite",
    advice="the learning rate, the dtype, rewards of extreme size; such updates are skipped",
    view="sort=-gradient",
    settings=NUMBER_SETTINGS,
    order=220,
)
@rule(
    "gradient_zero",
    advice="what the loss is made of: there is something to learn, and no gradient comes of it",
    view="sort=-advantage",
)
@rule(
    "rate_zero",
    advice="the scheduler and its total steps: nothing is learned at a learning rate of 0",
    waits=True,
    settings=("optim.lr", "optim.scheduler", "lr_warmup_steps", "lr_warmup_steps_ratio"),
)
def gradients_and_rates(seen: SeenStep) -> Iterator[Finding]:
    """Finds gradients that are not finite, or zero where there is something to learn, and rates of
    zero.
    """
    config = seen.config
    metrics = seen.metrics
    lowest = metrics.get("critic/advantages/min", 0.0)
    highest = metrics.get("critic/advantages/max", 0.0)
    something_to_learn = {
        "actor": max(abs(lowest), abs(highest)) > SOMETHING_TO_LEARN,
        "critic": metrics.get("critic/vf_loss", 0.0) > SOMETHING_TO_LEARN,
    }
    rates = {
        "actor": config.actor_rollout_ref.actor.optim.lr,
        "critic": config.critic.optim.lr,
    }
    for model, rate in rates.items():
        norm = metrics.get(f"{model}/grad_norm", 1.0)
        if metrics.get(f"{model}/skipped_updates") or math.isnan(norm):
            yield Finding("gradient_not_finite", f"{model}/grad_norm={norm:g}")
        if norm == 0 and something_to_learn[model]:
            yield Finding("gradient_zero", f"{model}/grad_norm is 0")
        is_first_step = not seen.history.values(f"{model}/lr")
        # The metric is the first group's rate, and others may have rates of their own.
        has_moved = model == "actor" and metrics.get("canary/actor_moved", 0.0) > 0
        is_zero = metrics.get(f"{model}/lr") == 0 and rate > 0
        if is_zero and not is_first_step and not has_moved:
            yield Finding("rate_zero", f"{model}/lr is 0")


@rule(
    "part_still",
    advice=(
        "requires_grad, detach and no_grad on the way to these tensors, and the optimiser's groups"
    ),
    waits=True,
    view="sort=-advantage",
    order=230,
)
def still_parts(seen: SeenStep) -> Iterator[Finding]:
    """Finds tensors that an update with a gradient left as they were."""
    metrics = seen.metrics
    for model in ("actor", "critic"):
        has_learned = metrics.get(f"{model}/grad_norm", 0.0) > 0 and metrics[f"{model}/lr"] > 0
        count = metrics.get(f"{model}/still_tensors", 0.0)
        if count and has_learned and not metrics.get(f"{model}/skipped_updates"):
            prefix = f"{model}/still/"
            names = [name.removeprefix(prefix) for name in metrics if name.startswith(prefix)]
            yield Finding(
                "part_still",
                f"{count:g} tensors of the {model} are as they were before the update, as "
                f"{', '.join(names)}",
            )


@rule(
    "gradients_kept",
    advice="optimizer.zero_grad: each update adds its gradient to that of the last one",
    view="sort=-gradient",
    order=240,
)
@rule(
    "gradients_lost",
    advice="what zeroes or scales gradients between micro-batches: they add up",
    view="sort=-gradient",
)
def kept_gradients(seen: SeenStep) -> Iterator[Finding]:
    """Finds gradients that outlive their update, or are gone before it."""
    metrics = seen.metrics
    for model in ("actor", "critic"):
        count = metrics.get(f"{model}/kept_gradients", 0.0)
        if count:
            yield Finding(
                "gradients_kept",
                f"{count:g} gradients of the {model} were not zero when an update began",
            )
        missing = metrics.get(f"{model}/missing_gradient", 0.0)
        if missing > GRADIENT_LOST:
            yield Finding(
                "gradients_lost",
                f"an update of the {model} lacks {missing:.2g} of the gradient that its "
                "micro-batches gave",
            )


@rule(
    "gradients_doubled",
    advice="what calls backward: each loss has one pass, and a second adds its gradient once more",
    view="sort=-gradient",
    order=242,
)
def doubled_gradients(seen: SeenStep) -> Iterator[Finding]:
    """Finds losses whose gradient was taken more than once."""
    for model in ("actor", "critic"):
        passes = seen.metrics.get(f"{model}/repeated_backward", 0.0)
        if passes > 0:
            yield Finding(
                "gradients_doubled",
                f"losses of the {model} had {passes:g} backward passes behind their first one",
            )


@rule(
    "optimizer_changed",
    advice=(
        "what resets, loads or replaces the optimiser or its state between two updates; a "
        "parameter that is replaced has none"
    ),
    view="sort=-gradient",
    order=244,
)
def changed_optimizer(seen: SeenStep) -> Iterator[Finding]:
    """Finds optimisers whose state is not what their last update left."""
    for model in ("actor", "critic"):
        count = seen.metrics.get(f"{model}/optimizer_state_changed", 0.0)
        if count:
            yield Finding(
                "optimizer_changed",
                f"the optimiser's state of {count:g} tensors of the {model} is not what the update "
                "before left",
            )


@rule(
    "tokens_missing",
    advice="how a batch is cut into mini-batches and micro-batches",
    view="sort=-advantage",
    order=250,
)
def missing_tokens(seen: SeenStep) -> Iterator[Finding]:
    """Finds losses of other tokens, or other advantages, than the rows that the update was given.

    Where an edit runs fewer mini-batches than are planned, or more, they are compared with what
    those that were run have.
    """
    config = seen.config
    plans = {"actor": config.batch_plan.actor, "critic": config.batch_plan.critic}
    for model, plan in plans.items():
        if f"{model}/loss_tokens" in seen.metrics:
            yield from _missing_of(model, plan, seen)


def _missing_of(model: str, plan: UpdatePlan, seen: SeenStep) -> Iterator[Finding]:
    """Compares a model's losses with its rows, or its mini-batches: tokens, then targets."""
    metrics = seen.metrics
    fields = seen.updated.batch
    name = "returns" if model == "critic" else "advantages"
    targets = fields[name].double() * fields["response_mask"]
    expected_tokens = float(fields["response_mask"].sum()) * plan.epochs
    expected_sum = float(targets.sum()) * plan.epochs
    size = float(targets.abs().sum()) * plan.epochs
    whose = f"its rows have {expected_tokens:.6g} in {plan.epochs} epochs"
    # Groups that come one by one are one mini-batch, and there is no such metric.
    mini_batches = round(metrics.get(f"{model}/mini_batches", plan.updates))
    if mini_batches != plan.updates:
        expected_tokens = metrics[f"{model}/given_tokens"]
        expected_sum = metrics[f"{model}/given_targets"]
        whose = f"its {mini_batches} mini-batches of {plan.updates} have {expected_tokens:.6g}"
    tokens = metrics[f"{model}/loss_tokens"]
    found = metrics[f"{model}/loss_targets"]
    if abs(tokens - expected_tokens) > TOKENS_LOST * expected_tokens:
        yield Finding("tokens_missing", f"the {model}'s losses are of {tokens:.6g} tokens, {whose}")
    elif abs(found - expected_sum) > TARGETS_LOST * size + TOKENS_LOST:
        yield Finding(
            "tokens_missing",
            f"the {model}'s losses see {name} that sum to {found:.4g}, those that it was given to "
            f"{expected_sum:.4g}: rows are missing, or come twice",
        )


@rule(
    "updates_differ",
    advice="what else calls optimizer.step: each mini-batch is one update",
    order=260,
)
def further_updates(seen: SeenStep) -> Iterator[Finding]:
    """Finds more optimiser steps than mini-batches were run, over all epochs."""
    config = seen.config
    plans = {"actor": config.batch_plan.actor, "critic": config.batch_plan.critic}
    for model, plan in plans.items():
        made = seen.metrics.get(f"{model}/optimizer_steps", 0.0)
        mini_batches = round(seen.metrics.get(f"{model}/mini_batches", plan.updates))
        if round(made) > mini_batches:
            yield Finding(
                "updates_differ",
                f"the {model}'s optimiser made {made:g} steps in {mini_batches} mini-batches, "
                f"over {plan.epochs} epochs",
            )


@rule(
    "values_constant",
    advice="the critic: its head, its learning rate, its inputs",
    waits=True,
    view="sort=-advantage",
    order=270,
)
def constant_values(seen: SeenStep) -> Iterator[Finding]:
    """Finds values that are all equal, once the critic has learned."""
    metrics = seen.metrics
    history = seen.history
    rates = history.values("critic/lr")
    norms = history.values("critic/grad_norm")
    has_learned = any(rate > 0 and norm > 0 for rate, norm in zip(rates, norms, strict=False))
    highest = metrics.get("critic/values/max", 1.0)
    if has_learned and highest == metrics.get("critic/values/min", 0.0):
        yield Finding("values_constant", f"every value is {highest:g}")


@rule(
    "gradient_misled",
    advice="the loss: its sign, and which rows' advantages, or returns, it reads",
    view="sort=-advantage",
    order=290,
)
def misled_gradient(seen: SeenStep) -> Iterator[Finding]:
    """Finds a gradient that does not go where the advantages, or the returns, point."""
    metrics = seen.metrics
    # Such as a KL, observations, and terms that features bring.
    losses = {name for name in metrics if name.startswith("actor/") and name.endswith("_loss")}
    has_other_terms = bool(losses - {"actor/pg_loss"})
    least = LEAST_ALIGNMENT_WITH_OTHERS if has_other_terms else LEAST_ALIGNMENT
    alignment = metrics.get("actor/gradient_alignment", 1.0)
    if alignment < least:
        yield Finding(
            "gradient_misled",
            f"the first gradient's cosine with the advantages is {alignment:.2g}; 1, or not much "
            "less, is normal",
        )
    of_critic = metrics.get("critic/gradient_alignment", 1.0)
    if of_critic < LEAST_ALIGNMENT:
        yield Finding(
            "gradient_misled",
            f"the cosine of the critic's first gradient with what its values lack to the returns "
            f"is {of_critic:.2g}; 1, or not much less, is normal",
        )


@rule(
    "kl_negative",
    advice="the KL's estimate, and the order of its arguments: policy, then reference",
    view="sort=-kl",
    order=300,
)
def negative_kl(seen: SeenStep) -> Iterator[Finding]:
    """Finds a negative KL of an estimate that is never negative."""
    config = seen.config
    kinds = {
        "actor/kl_loss": config.actor_rollout_ref.actor.kl_loss_type,
        "actor/reward_kl_penalty": config.algorithm.kl_penalty,
    }
    for name, kind in kinds.items():
        value = seen.metrics.get(name, 0.0)
        if value < MOST_NEGATIVE and kind.removesuffix("+") not in SIGNED_ESTIMATES:
            yield Finding("kl_negative", f"{name}={value:.3g}, and {kind} is never negative")


@rule(
    "kl_explodes",
    advice="the learning rate and grad_clip: after one such step a policy hardly recovers",
    view="sort=-ratio",
    settings=STEP_SETTINGS,
    order=320,
)
@rule(
    "kl_jump",
    advice="the learning rate, ppo_epochs, grad_clip: one step changes the policy too much",
    waits=True,
    view="sort=-kl",
    settings=(*STEP_SETTINGS, *KL_SETTINGS),
)
def jumping_policy(seen: SeenStep) -> Iterator[Finding]:
    """Finds steps that move the policy far from the old one, or from the reference."""
    metrics = seen.metrics
    moved = metrics.get("actor/ppo_kl", 0.0)
    if abs(moved) > KL_EXPLODES:
        yield Finding("kl_explodes", f"a step moved the policy by {moved:.3g} nats a token")
    limits = {
        "actor/ppo_kl": LARGEST_POLICY_KL,
        "actor/kl_loss": LARGEST_REFERENCE_KL,
        "actor/reward_kl_penalty": LARGEST_REFERENCE_KL,
    }
    for name, limit in limits.items():
        value = metrics.get(name, 0.0)
        past = seen.history.values(name)
        most = math.inf
        if len(past) >= 2:
            most = max(map(abs, past))
        if abs(value) > limit or abs(value) > max(LEAST_JUMP, JUMP_FACTOR * most):
            yield Finding("kl_jump", f"{name}={value:.3g}, {most:.2g} was the most so far")
