"""Alarms: what a run says of itself in one line when something silently goes wrong.

After every step the rules look at the batch (`batch_faults`), at the step's metrics and at those of the steps before.
What stands for as many steps as its rule waits is said once, again each time it has stood twice as long, and is counted
in the metrics as alarms/NAME. Invariant: rules read and never write, so that a run with and without them has the same
numbers.
"""

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows
from training.batch.torch_functional import masked_mean
from training.config import PPOConfig
from training.core_algos import AdvantageEstimator, estimator_needs
from training.run import batch_faults as faults
from training.run.batch_faults import FEWEST_EPISODES, UNLIKELY, Finding, finding

logger = logging.getLogger(__name__)
Metrics = Mapping[str, float]
_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
# What to check, by alarm; findings that must stand for two steps; how far engine and trainer may be apart, and in what.
ADVICE, WAITS, LIMITS, ABOVE = _TABLE["advice"], frozenset(_TABLE["waits"]), _TABLE["limits"], _TABLE["above"]
# A step that takes so many seconds more than usual is no accident.
LONGER_S = 1.0
# Rewards of a source that are remembered, and the chance below which their constancy is no accident.
PAST_REWARDS, CHANCE = 256, 1e-4
# Steps that are remembered.
MEMORY = 20


class AlarmStop(RuntimeError):
    """Ends a run with `trainer.alarms=stop`; says what stands."""


class Alarms:
    """Watches a run's steps.

    Args:
        config: the run's; `trainer.alarms` says what an alarm does.
        eos_token_id: ends a turn.
        steps_per_epoch: after how many steps prompts come again.
        paid_by_environment: scores are the environment's rewards, and nothing else.
    """

    def __init__(
        self, config: PPOConfig, eos_token_id: int | None, steps_per_epoch: int, paid_by_environment: bool = False
    ) -> None:
        self.config, self.steps_per_epoch, self.paid_by_environment = config, steps_per_epoch, paid_by_environment
        policy = config.actor_rollout_ref
        self.eos_token_id = None if policy.rollout.ignore_eos else eos_token_id
        self.whole = policy.model.dtype == policy.rollout.dtype == "float32"
        self.limits = {name: limits[0 if self.whole else 1] for name, limits in LIMITS.items()}
        self.past: deque[Metrics] = deque(maxlen=MEMORY)
        # By data source: the best reward, the last rewards of steps in which they varied, and for how many episodes
        # they have not now.
        self.rewards: dict[str, tuple[float, list[float], int]] = defaultdict(lambda: (float("-inf"), [], 0))
        self.solved, self.last_batch, self.last_prompts, self.last_seeds = False, 0, 0, 0
        self.template: float | None = None
        self.since, self.noise = dict[str, int](), dict[str, float]()
        self.broken, self.standing = set[str](), list[str]()

    def check(self, batch: DataProto, metrics: Metrics, step: int) -> dict[str, float]:
        """Looks at a step, once it is made; returns `alarms/count`, and alarms/NAME: for how many steps each stands."""
        if self.config.trainer.alarms == "off":
            return {}
        began = time.perf_counter()
        metrics = {**metrics, "perf/driver_memory_gib": psutil.Process().memory_info().rss / 2**30}
        found: dict[str, str] = {}
        for rule in self._rules(batch, metrics, step):
            try:
                for name, what in rule:
                    found.setdefault(name, what)
            # A batch or a metric of a user's own may lack or hold anything.
            except Exception as error:
                if rule.__name__ not in self.broken:
                    logger.warning("alarms do without the rule %s: %s: %s", rule.__name__, type(error).__name__, error)
                self.broken.add(rule.__name__)
        self.past.append(metrics)
        self.since = {name: self.since.get(name, step) for name in found}
        ages = {name: step - since + 1 for name, since in self.since.items()}
        due = {name: age for name, age in ages.items() if age >= 2 or name not in WAITS}
        self.standing = []
        for name, age in due.items():
            self.standing += [f"alarm {name}: {found[name]}, since step {self.since[name]}; check {ADVICE[name]}"]
            told = age - (name in WAITS)
            if told & (told - 1) == 0:
                logger.warning("%s", self.standing[-1])
        metered = {"alarms/count": float(len(due)), **{f"alarms/{name}": float(age) for name, age in due.items()}}
        return metered | {"timing_s/alarms": time.perf_counter() - began}

    def stop_if_asked(self) -> None:
        """Raises AlarmStop where an alarm stands and `trainer.alarms` is stop."""
        if self.standing and self.config.trainer.alarms == "stop":
            raise AlarmStop("\n".join([*self.standing, "trainer.alarms=stop ends the run; warn goes on all the same"]))

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"template": self.template, "rewards": {name: list(own) for name, own in self.rewards.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.template = state["template"]
        self.rewards.update({name: tuple(own) for name, own in state["rewards"].items()})

    def _rules(self, batch: DataProto, metrics: Metrics, step: int) -> list[Any]:
        """Lists the rules, as generators; those about advantages where it is known what an estimator makes of rewards.

        An estimator of a user's may weigh rewards in its own way, but hardly against them.
        """
        name, group_size = self.config.algorithm.adv_estimator, self.config.actor_rollout_ref.rollout.n
        needs, own = estimator_needs(name), name not in set(AdvantageEstimator)
        by_group = "index" in needs
        known = not {"values", "turn_ids", "ref_log_prob"}.intersection(needs) and (by_group or not own)
        same_tasks = not (self.config.environments and self.config.agent.allow_different_tasks)
        episodes = EpisodeRows(batch)
        enough = int(episodes.real.numpy()[episodes.first].sum()) >= FEWEST_EPISODES
        rules = [faults.not_finite(batch), faults.wrong_tokens(batch, self.eos_token_id)]
        rules += [faults.misplaced_rewards(batch), faults.equal_answers(batch, episodes)]
        rules += [faults.other_rewards(batch, episodes, self.paid_by_environment)]
        rules += [faults.wrong_groups(batch, episodes, group_size, same_tasks)]
        if known:
            rules += [faults.other_advantages(batch, episodes, by_group, own)]
        if group_size > 1 and name in _TABLE["one_an_episode"]:
            rules += [faults.uneven_advantages(batch, episodes, name in _TABLE["cancel_out"])]
        rules += [self._repeats(batch), self._rewards(batch, episodes, metrics), self._numbers(metrics)]
        rules += [self._engine(metrics), self._update(metrics), self._reference(batch, metrics, step)]
        return [*rules, self._jumps(metrics), self._machine(metrics), *([self._lengths(metrics)] if enough else [])]

    def _of_past(self, name: str) -> list[float]:
        return [metrics[name] for metrics in self.past if name in metrics]

    # What the batch says beside the batches before it

    def _repeats(self, batch: DataProto) -> Iterator[Finding]:
        tensors = batch.batch
        prompts = hash(tensors["prompts"].numpy().tobytes())
        answers = hash((prompts, tensors["responses"].numpy().tobytes()))
        log_probs = tensors.get("rollout_log_probs")
        if answers == self.last_batch and (log_probs is None or -log_probs.sum() > UNLIKELY):
            yield "batch_repeats", "every prompt and every answer equals those of the step before"
        seeds = batch.non_tensor_batch.get("env_seed")
        drawn = hash(tuple(seeds.tolist())) if seeds is not None else 0
        varied = bool((tensors["prompts"] != tensors["prompts"][:1]).any()) and seeds is None
        if prompts == self.last_prompts and varied and self.steps_per_epoch > 1:
            yield "prompts_repeat", f"all prompts equal those of the step before, in epochs of {self.steps_per_epoch}"
        elif drawn and drawn == self.last_seeds:
            yield "prompts_repeat", "every episode has the seed of one of the step before"
        self.last_batch, self.last_prompts, self.last_seeds = answers, prompts, drawn

    def _rewards(self, batch: DataProto, episodes: EpisodeRows, metrics: Metrics) -> Iterator[Finding]:
        """Finds sources of data whose rewards do not vary, but for those that are at their best."""
        columns, real = batch.non_tensor_batch, episodes.real.tolist()
        scores, live = batch.batch["token_level_scores"].sum(1).tolist(), batch.batch["response_mask"].any(1).tolist()
        names = columns.get(self.config.data.reward_fn_key, ["all"] * len(batch))
        by_source: dict[str, list[float]] = defaultdict(list)
        for rows in episodes.rows:
            if real[rows[0]] and any(live[row] for row in rows):
                by_source[str(names[rows[0]])].append(sum(scores[row] for row in rows))
        constant = []
        for name, rewards in by_source.items():
            best, past, count = self.rewards[name]
            best, same = max(best, *rewards), max(rewards) == min(rewards)
            count = count + len(rewards) if same and not (past and rewards[0] == best) else 0
            self.rewards[name] = best, past if same else (past + rewards)[-PAST_REWARDS:], count
            # Where few episodes earn anything, several steps may well go without.
            others = sum(reward != rewards[0] for reward in past) / len(past) if past else 1.0
            if count >= 2 * FEWEST_EPISODES and count * others > -math.log(CHANCE):
                constant.append(f"all {count} episodes of {name} got {rewards[0]:g}")
        self.solved = all(max(own) == min(own) == self.rewards[name][0] for name, own in by_source.items())
        if constant:
            yield "reward_constant", "; ".join(constant)
        largest = max(abs(metrics.get(f"critic/advantages/{kind}", 1.0)) for kind in ("min", "max"))
        enough = sum(map(len, by_source.values())) >= FEWEST_EPISODES
        if largest < 1e-8 and not constant and not self.solved and enough:
            yield "advantages_zero", "every advantage of the batch is 0"

    # What the metrics say

    def _numbers(self, metrics: Metrics) -> Iterator[Finding]:
        parts = ("actor/", "critic/", "training/", "canary/")
        if wrong := [name for name, value in metrics.items() if name.startswith(parts) and not math.isfinite(value)]:
            yield "not_finite", ", ".join(wrong[:5])

    def _limit(self, name: str, value: float) -> float:
        limit = self.limits[name]
        return limit if self.whole else min(limit, self.noise.setdefault(name, 4 * value + 0.01))

    def _engine(self, metrics: Metrics) -> Iterator[Finding]:
        """Compares what engine and trainer make of the same tokens."""
        difference = metrics.get("canary/difference", 0.0)
        if difference > (most := self._limit("canary", difference)):
            yield finding("engine_differs", difference=difference, limit=most)
        moved, lag = metrics.get("canary/actor_moved"), metrics.get("canary/lag", 0.0)
        if moved is not None:
            learned = metrics.get("actor/grad_norm", 0.0) > 0 and metrics.get("actor/lr", 0.0) > 0
            # In a short type the least change of a weight moves the actor, and may be rounded away by the engine.
            kept = metrics["canary/engine_moved"] == 0 < moved and learned
            if kept or lag > max(0.05 * moved, self._limit("lag", lag)):
                text = "kept its old weights" if kept or lag > 0.95 * moved else "did not move as the actor did"
                yield finding("engine_stale", how=text, moved=moved, lag=lag)
            if moved == 0 and learned and not metrics.get("actor/skipped_updates"):
                yield "policy_still", "an update with a gradient left the policy's log-probs bitwise as they were"
        rollout = self.config.actor_rollout_ref.rollout
        filtered = rollout.top_k > 0 or rollout.top_p < 1
        for name, (limit, alarm, where) in ABOVE.items():
            # Not a number is above any limit.
            if name in metrics and not metrics[name] <= self.limits[limit] and not (filtered and limit != "ratio"):
                yield alarm, f"{name}={metrics[name]:.3g}{where} is above {self.limits[limit]:g}"
        template = metrics.get("canary/template", self.template)
        self.template = template if self.template is None else self.template
        if template != self.template:
            yield "template_changed", "the chat template writes the same conversation in another way"

    def _update(self, metrics: Metrics) -> Iterator[Finding]:
        """Looks at gradients, rates and values."""
        for part in ("actor", "critic"):
            norm = metrics.get(f"{part}/grad_norm", 1.0)
            if metrics.get(f"{part}/skipped_updates") or norm != norm:
                yield "gradient_not_finite", f"{part}/grad_norm={norm:g}"
            largest = max(abs(metrics.get(f"critic/advantages/{kind}", 0.0)) for kind in ("min", "max"))
            if norm == 0 and (metrics.get("critic/vf_loss", 0.0) if part == "critic" else largest) > 1e-8:
                yield "gradient_zero", f"{part}/grad_norm is 0"
            own = self.config.actor_rollout_ref.actor.optim if part == "actor" else self.config.critic.optim
            if metrics.get(f"{part}/lr") == 0 < own.lr and self._of_past(f"{part}/lr"):
                yield "rate_zero", f"{part}/lr is 0"
        rates, norms = self._of_past("critic/lr"), self._of_past("critic/grad_norm")
        learned = any(rate > 0 and norm > 0 for rate, norm in zip(rates, norms, strict=False))
        if learned and metrics.get("critic/values/max", 1.0) == metrics.get("critic/values/min", 0.0):
            yield "values_constant", f"every value is {metrics['critic/values/max']:g}"

    def _reference(self, batch: DataProto, metrics: Metrics, step: int) -> Iterator[Finding]:
        tensors = batch.batch
        reference, own, mask = tensors.get("ref_log_prob"), tensors.get("old_log_probs"), tensors["response_mask"]
        if reference is None:
            return
        # Without log-probs of its own a step is a single update, whose KL is that before it.
        apart = metrics.get("actor/kl_loss", 0.0) if own is None else masked_mean((own - reference).abs(), mask).item()
        if step == 1 and not apart <= self.limits["ratio"]:
            yield "reference_differs", f"before the first update it is {apart:.2g} nats a token from the policy"
        moved = sum(self._of_past("canary/actor_moved"))
        if step > 1 and apart == 0 < moved:
            yield "reference_moves", f"the policy has moved by {moved:.2g} nats a token, and is 0 from the reference"

    def _lengths(self, metrics: Metrics) -> Iterator[Finding]:
        if self.eos_token_id is not None:
            episodes = max(metrics.get("agent/episodes", 0.0), 1.0)
            turns = episodes * metrics.get("agent/turns/mean", 1.0)
            for what, share in {
                "answers fill data.max_response_length": metrics.get("response_length/clip_ratio", 0.0),
                "episodes overflow it": metrics.get("agent/ending/overflow", 0.0) / episodes,
                "turns were cut at their limit": metrics.get("agent/cut_turns", 0.0) / turns,
            }.items():
                if share >= (0.95 if "turns" in what else 0.7):
                    yield "length_pinned", f"{share:.0%} of {what}"
        cuts = self.config.data.truncation != "error" and not self.config.environments
        if cuts and (share := metrics.get("prompt_length/clip_ratio", 0.0)) >= 0.5:
            yield "prompts_pinned", f"{share:.0%} of prompts fill data.max_prompt_length"
        if (share := metrics.get("response/aborted_ratio", 0.0)) > 0.75:
            yield "nothing_sampled", f"{share:.0%} of episodes have no token to train on"

    def _jumps(self, metrics: Metrics) -> Iterator[Finding]:
        """Looks for entropy that collapses and for a policy that jumps."""
        entropy, before = metrics.get("actor/entropy"), self._of_past("actor/entropy")[-2:]
        if entropy is not None and before and max(before) > 0.1 and entropy < 0.2 * max(before) and not self.solved:
            yield "entropy_collapse", f"actor/entropy fell from {max(before):.3g} to {entropy:.3g} nats in two steps"
        for name in ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"):
            value, past = metrics.get(name, 0.0), self._of_past(name)
            most = max(map(abs, past)) if len(past) >= 2 else float("inf")
            if abs(value) > 2.0 and name == "actor/ppo_kl":
                yield "kl_explodes", f"a step moved the policy by {value:.3g} nats a token"
            if abs(value) > (0.5 if name == "actor/ppo_kl" else 2.0) or abs(value) > max(0.2, 5 * most):
                yield "kl_jump", f"{name}={value:.3g}, {most:.2g} was the most so far"

    def _machine(self, metrics: Metrics) -> Iterator[Finding]:
        """Looks for throughput that falls and host memory that grows."""
        past, now = self._of_past("perf/throughput"), metrics.get("perf/throughput", 0.0)
        sections = [name for name in metrics if name.startswith("timing_s/")]
        longer = {name: metrics[name] - median(self._of_past(name) or [metrics[name]]) for name in sections}
        # Of short steps the machine's other work makes more.
        if len(past) >= 3 and 0 < now < median(past) / 3 and longer.pop("timing_s/step", 0.0) > LONGER_S:
            most = max(longer, key=lambda name: longer[name])
            yield finding("throughput_falls", now=now, usual=median(past), most=most, at=metrics[most], by=longer[most])
        for name in ("perf/driver_memory_gib", "perf/rank_memory_gib"):
            sizes = [*self._of_past(name), metrics.get(name, 0.0)]
            jump = len(sizes) > 3 and sizes[-1] - sizes[-2] > max(0.5, 0.1 * sizes[-2])
            creeps = len(sizes) > MEMORY and sizes == sorted(set(sizes))
            if jump or (creeps and sizes[-1] - sizes[0] > max(1.0, 0.2 * sizes[0])):
                yield "memory_grows", f"{name} grew from {sizes[0]:.3g} to {sizes[-1]:.3g} in {len(sizes) - 1} steps"
