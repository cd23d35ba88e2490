"""Looks at what the metrics say of an update: gradients, rates, lengths, entropy, KL."""

import math
from collections.abc import Iterator

from training.config import PPOConfig
from training.run.alarms.catalogue import Finding
from training.run.alarms.history import History, Metrics

# Sections of metrics whose numbers must be finite, and how many that are not are named.
FINITE_SECTIONS = ("actor/", "critic/", "training/", "canary/")
MOST_NAMED = 5
# Advantages and value losses above it have something to teach.
SOMETHING_TO_LEARN = 1e-8
# Shares of answers that fill their limit, and of turns that are cut.
FULL_ANSWERS = 0.7
CUT_TURNS = 0.95
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


def pinned_lengths(metrics: Metrics) -> Iterator[Finding]:
    """Finds answers, episodes and turns that end at their limits."""
    episodes = max(metrics.get("agent/episodes", 0.0), 1.0)
    turns = episodes * metrics.get("agent/turns/mean", 1.0)
    full = metrics.get("response_length/clip_ratio", 0.0)
    overflowing = metrics.get("agent/ending/overflow", 0.0) / episodes
    cut = metrics.get("agent/cut_turns", 0.0) / turns
    if full >= FULL_ANSWERS:
        yield Finding("length_pinned", f"{full:.0%} of answers fill data.max_response_length")
    if overflowing >= FULL_ANSWERS:
        yield Finding("length_pinned", f"{overflowing:.0%} of episodes overflow it")
    if cut >= CUT_TURNS:
        yield Finding("length_pinned", f"{cut:.0%} of turns were cut at their limit")


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
