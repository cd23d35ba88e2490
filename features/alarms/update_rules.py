"""Looks at what the metrics say of an update: gradients, rates, lengths, entropy, KL."""

import math
from collections.abc import Iterator

from data.protocol import DataProto
from features.alarms.catalogue import Finding
from features.alarms.history import History, Metrics
from training.config import PPOConfig

# Sections of metrics whose numbers must be finite, and how many that are not are named.
FINITE_SECTIONS = ("actor/", "critic/", "training/", "canary/")
MOST_NAMED = 5
# Advantages and value losses above it have something to teach.
SOMETHING_TO_LEARN = 1e-8
# Shares of prompts that fill theirs, where they may be cut, and of episodes without a token.
FULL_PROMPTS = 0.5
MOST_EMPTY = 0.75
# Entropy that falls below a share of what it was in the two steps before, if that was above a
# least number of nats.
ENTROPY_SHARE = 0.2
LEAST_ENTROPY = 0.1
# Nats a token.
KL_EXPLODES = 2.0
LARGEST_POLICY_KL = 0.5
LARGEST_REFERENCE_KL = 2.0
# A jump is so many times the most so far, and at least so many nats.
JUMP_FACTOR = 5
LEAST_JUMP = 0.2
# Nats a token by which a large step moves the sampled tokens, or the canaries. Small models are
# unsure of the canaries' random tokens: a step must also move them so many times the most so far.
LARGE_STEP = 1.0
LARGE_FACTOR = 5
LARGEST_FIRST_STEP = 3.0
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


def not_finite_numbers(metrics: Metrics) -> Iterator[Finding]:
    """Finds metrics that are NaN or infinite."""
    wrong = []
    for name, value in metrics.items():
        if name.startswith(FINITE_SECTIONS) and not math.isfinite(value):
            wrong.append(name)
    if wrong:
        yield Finding("not_finite", ", ".join(wrong[:MOST_NAMED]))


def gradients_and_rates(config: PPOConfig, metrics: Metrics, history: History) -> Iterator[Finding]:
    """Finds gradients that are not finite, or zero where there is something to learn, and rates of
    zero.
    """
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
        is_first_step = not history.values(f"{model}/lr")
        if metrics.get(f"{model}/lr") == 0 and rate > 0 and not is_first_step:
            yield Finding("rate_zero", f"{model}/lr is 0")


def still_parts(metrics: Metrics) -> Iterator[Finding]:
    """Finds tensors that an update with a gradient left as they were."""
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


def kept_gradients(metrics: Metrics) -> Iterator[Finding]:
    """Finds gradients that outlive their update, or are gone before it."""
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


def missing_tokens(config: PPOConfig, batch: DataProto, metrics: Metrics) -> Iterator[Finding]:
    """Finds losses that are made of other tokens, or other advantages, than the batch has."""
    if config.algorithm.use_pf_ppo:
        return
    fields = batch.batch
    plans = {"actor": config.batch_plan.actor, "critic": config.batch_plan.critic}
    for model, plan in plans.items():
        tokens = metrics.get(f"{model}/loss_tokens")
        if tokens is None:
            continue
        expected = float(fields["response_mask"].sum()) * plan.epochs
        if abs(tokens - expected) > TOKENS_LOST * expected:
            yield Finding(
                "tokens_missing",
                f"the {model}'s losses are of {tokens:.6g} tokens, the batch has {expected:.6g} in "
                f"{plan.epochs} epochs",
            )
            continue
        name = "returns" if model == "critic" else "advantages"
        targets = fields[name].double() * fields["response_mask"]
        size = float(targets.abs().sum()) * plan.epochs
        found = metrics[f"{model}/loss_targets"]
        if abs(found - float(targets.sum()) * plan.epochs) > TARGETS_LOST * size + TOKENS_LOST:
            yield Finding(
                "tokens_missing",
                f"the {model}'s losses see {name} that sum to {found:.4g}, those of the batch to "
                f"{float(targets.sum()) * plan.epochs:.4g}: rows are missing, or come twice",
            )


def further_updates(config: PPOConfig, metrics: Metrics) -> Iterator[Finding]:
    """Finds more optimiser steps than the batch has mini-batches, over all epochs."""
    plans = {"actor": config.batch_plan.actor, "critic": config.batch_plan.critic}
    for model, plan in plans.items():
        made = metrics.get(f"{model}/optimizer_steps", 0.0)
        if made > plan.updates:
            yield Finding(
                "updates_differ",
                f"the {model}'s optimiser made {made:g} steps, and {plan.mini_batches} "
                f"mini-batches in {plan.epochs} epochs make {plan.updates}",
            )


def constant_values(metrics: Metrics, history: History) -> Iterator[Finding]:
    """Finds values that are all equal, once the critic has learned."""
    rates = history.values("critic/lr")
    norms = history.values("critic/grad_norm")
    has_learned = any(rate > 0 and norm > 0 for rate, norm in zip(rates, norms, strict=False))
    highest = metrics.get("critic/values/max", 1.0)
    if has_learned and highest == metrics.get("critic/values/min", 0.0):
        yield Finding("values_constant", f"every value is {highest:g}")


def misled_gradient(config: PPOConfig, metrics: Metrics) -> Iterator[Finding]:
    """Finds a gradient that does not go where the advantages, or the returns, point."""
    has_other_terms = (
        config.actor_rollout_ref.actor.use_kl_loss or config.agent.observation_loss_coef > 0
    )
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


def negative_kl(config: PPOConfig, metrics: Metrics) -> Iterator[Finding]:
    """Finds a negative KL of an estimate that is never negative."""
    kinds = {
        "actor/kl_loss": config.actor_rollout_ref.actor.kl_loss_type,
        "actor/reward_kl_penalty": config.algorithm.kl_penalty,
    }
    for name, kind in kinds.items():
        value = metrics.get(name, 0.0)
        if value < MOST_NEGATIVE and kind.removesuffix("+") not in SIGNED_ESTIMATES:
            yield Finding("kl_negative", f"{name}={value:.3g}, and {kind} is never negative")


def large_step(metrics: Metrics, history: History) -> Iterator[Finding]:
    """Finds a step that moves the policy far, at once and without a second one."""
    moved = metrics.get("canary/actor_moved", 0.0)
    past = history.values("canary/actor_moved")
    limit = LARGEST_FIRST_STEP
    if past:
        limit = max(LARGE_STEP, LARGE_FACTOR * max(past))
    sampled_moved = abs(metrics.get("actor/ppo_kl", 0.0))
    if moved > limit or sampled_moved > LARGE_STEP:
        yield Finding(
            "large_step",
            f"one step moved the policy by {max(moved, sampled_moved):.2g} nats a token",
        )


def lost_prompts_and_answers(config: PPOConfig, metrics: Metrics) -> Iterator[Finding]:
    """Finds prompts that are cut, and episodes that nothing is learned from."""
    cuts = config.data.truncation != "error" and not config.environments
    full = metrics.get("prompt_length/clip_ratio", 0.0)
    if cuts and full >= FULL_PROMPTS:
        yield Finding("prompts_pinned", f"{full:.0%} of prompts fill data.max_prompt_length")
    empty = metrics.get("response/aborted_ratio", 0.0)
    if empty > MOST_EMPTY:
        yield Finding("nothing_sampled", f"{empty:.0%} of episodes have no token to train on")


def collapsing_entropy(metrics: Metrics, history: History) -> Iterator[Finding]:
    """Finds entropy that falls to a fraction within two steps."""
    entropy = metrics.get("actor/entropy")
    before = history.values("actor/entropy")[-2:]
    if entropy is None or not before:
        return
    highest = max(before)
    if highest > LEAST_ENTROPY and entropy < ENTROPY_SHARE * highest:
        yield Finding(
            "entropy_collapse",
            f"actor/entropy fell from {highest:.3g} to {entropy:.3g} nats in two steps",
        )


def jumping_policy(metrics: Metrics, history: History) -> Iterator[Finding]:
    """Finds steps that move the policy far from the old one, or from the reference."""
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
        past = history.values(name)
        most = math.inf
        if len(past) >= 2:
            most = max(map(abs, past))
        if abs(value) > limit or abs(value) > max(LEAST_JUMP, JUMP_FACTOR * most):
            yield Finding("kl_jump", f"{name}={value:.3g}, {most:.2g} was the most so far")
