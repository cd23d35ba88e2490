"""Alarms: what a run says of itself in one line when something silently goes wrong.

After every step the rules look at the batch, at the step's metrics and at those of the steps before. Those of the batch
alone, at the end of this file, find what cannot be, whatever the policy does; a batch of a user's own that lacks a
column is not judged by it.
What stands for as many steps as its rule waits is said once, again each time it has stood twice as long, and is counted
in the metrics as alarms/NAME. Invariant: rules read and never write, so that a run with and without them has the same
numbers.
"""

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as nnf
from torch import Tensor

from data.protocol import DataProto
from data.texts import say, table
from training.batch.batching import EpisodeRows, rows_by_key
from training.config import PPOConfig

logger = logging.getLogger(__name__)
Metrics = Mapping[str, float]
# The name of an alarm (see ADVICE), and what was seen, with the episode and the token.
Finding = tuple[str, str]
_TABLE: dict[str, Any] = table(__file__)
# What to check, by alarm; findings that must stand for two steps; how far engine and trainer may be apart, and in what.
ADVICE, WAITS, LIMITS, ABOVE = (
    _TABLE["advice"],
    frozenset(_TABLE["waits"]),
    _TABLE["limits"],
    _TABLE["above"],
)
# A step that takes so many seconds more than usual is no accident.
LONGER_S = 1.0
# Rewards of a source that are remembered, and the chance below which their constancy is no accident.
PAST_REWARDS, CHANCE = 256, 1e-4
# Steps that are remembered.
MEMORY = 20
# Nats by which it must be unlikely that samples agree by chance: one in 10^10.
UNLIKELY = 23.0
FEWEST_EPISODES = 8


class AlarmStop(RuntimeError):
    """Ends a run with `trainer.alarms=stop`; says what stands."""


class Alarms:
    """Watches a run's steps.

    Args:
        config: the run's; `trainer.alarms` says what an alarm does.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        policy = config.actor_rollout_ref
        self.whole = policy.model.dtype == policy.rollout.dtype == "float32"
        self.limits = {name: limits[0 if self.whole else 1] for name, limits in LIMITS.items()}
        self.past: deque[Metrics] = deque(maxlen=MEMORY)
        # By data source: the best reward, the last rewards of steps in which they varied, and for how many episodes
        # they have not now.
        self.rewards: dict[str, tuple[float, list[float], int]] = defaultdict(
            lambda: (float("-inf"), [], 0)
        )
        self.solved = False
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
        for rule in self._rules(batch, metrics):
            try:
                for name, what in rule:
                    found.setdefault(name, what)
            # A batch or a metric of a user's own may lack or hold anything.
            except Exception as error:
                if rule.__name__ not in self.broken:
                    logger.warning(
                        "alarms do without the rule %s: %s: %s",
                        rule.__name__,
                        type(error).__name__,
                        error,
                    )
                self.broken.add(rule.__name__)
        self.past.append(metrics)
        self.since = {name: self.since.get(name, step) for name in found}
        ages = {name: step - since + 1 for name, since in self.since.items()}
        due = {name: age for name, age in ages.items() if age >= 2 or name not in WAITS}
        self.standing = []
        for name, age in due.items():
            self.standing += [
                f"alarm {name}: {found[name]}, since step {self.since[name]}; check {ADVICE[name]}"
            ]
            told = age - (name in WAITS)
            if told & (told - 1) == 0:
                logger.warning("%s", self.standing[-1])
        metered = {
            "alarms/count": float(len(due)),
            **{f"alarms/{name}": float(age) for name, age in due.items()},
        }
        return metered | {"timing_s/alarms": time.perf_counter() - began}

    def stop_if_asked(self) -> None:
        """Raises AlarmStop where an alarm stands and `trainer.alarms` is stop."""
        if self.standing and self.config.trainer.alarms == "stop":
            raise AlarmStop(
                "\n".join(
                    [*self.standing, "trainer.alarms=stop ends the run; warn goes on all the same"]
                )
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {
            "template": self.template,
            "rewards": {name: list(own) for name, own in self.rewards.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.template = state["template"]
        self.rewards.update({name: tuple(own) for name, own in state["rewards"].items()})

    def _rules(self, batch: DataProto, metrics: Metrics) -> list[Any]:
        """Lists the rules, as generators."""
        same_tasks = not (self.config.environments and self.config.agent.allow_different_tasks)
        episodes = EpisodeRows(batch)
        enough = int(episodes.real.numpy()[episodes.first].sum()) >= FEWEST_EPISODES
        rules = [wrong_tokens(batch), misplaced_rewards(batch), equal_answers(batch, episodes)]
        rules += [
            wrong_groups(batch, episodes, same_tasks),
            self._rewards(batch, episodes, metrics),
        ]
        rules += [
            self._numbers(metrics),
            self._engine(metrics),
            self._update(metrics),
            self._jumps(metrics),
        ]
        return [*rules, self._machine(metrics), *([self._lengths(metrics)] if enough else [])]

    def _of_past(self, name: str) -> list[float]:
        return [metrics[name] for metrics in self.past if name in metrics]

    # What the batch says beside the batches before it

    def _rewards(
        self, batch: DataProto, episodes: EpisodeRows, metrics: Metrics
    ) -> Iterator[Finding]:
        """Finds sources of data whose rewards do not vary, but for those that are at their best."""
        columns, real = batch.non_tensor_batch, episodes.real.tolist()
        scores, live = (
            batch.batch["token_level_scores"].sum(1).tolist(),
            batch.batch["response_mask"].any(1).tolist(),
        )
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
        self.solved = all(
            max(own) == min(own) == self.rewards[name][0] for name, own in by_source.items()
        )
        if constant:
            yield "reward_constant", "; ".join(constant)
        largest = max(abs(metrics.get(f"critic/advantages/{kind}", 1.0)) for kind in ("min", "max"))
        enough = sum(map(len, by_source.values())) >= FEWEST_EPISODES
        if largest < 1e-8 and not constant and not self.solved and enough:
            yield "advantages_zero", "every advantage of the batch is 0"

    # What the metrics say

    def _numbers(self, metrics: Metrics) -> Iterator[Finding]:
        parts = ("actor/", "critic/", "training/", "canary/")
        if wrong := [
            name
            for name, value in metrics.items()
            if name.startswith(parts) and not math.isfinite(value)
        ]:
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
                text = (
                    "kept its old weights"
                    if kept or lag > 0.95 * moved
                    else "did not move as the actor did"
                )
                yield finding("engine_stale", how=text, moved=moved, lag=lag)
            if moved == 0 and learned and not metrics.get("actor/skipped_updates"):
                yield (
                    "policy_still",
                    "an update with a gradient left the policy's log-probs bitwise as they were",
                )
        rollout = self.config.actor_rollout_ref.rollout
        # Or sampled with older weights.
        filtered = (
            rollout.top_k > 0 or rollout.top_p < 1 or metrics.get("async/staleness_max", 0.0) > 0
        )
        for name, (limit, alarm, where) in ABOVE.items():
            # Not a number is above any limit.
            if (
                name in metrics
                and not metrics[name] <= self.limits[limit]
                and not (filtered and limit != "ratio")
            ):
                yield alarm, f"{name}={metrics[name]:.3g}{where} is above {self.limits[limit]:g}"
        template = metrics.get("canary/template", self.template)
        self.template = template if self.template is None else self.template
        if template != self.template:
            yield (
                "template_changed",
                "the chat template writes the same conversation in another way",
            )

    def _update(self, metrics: Metrics) -> Iterator[Finding]:
        """Looks at gradients, rates and values."""
        for part in ("actor", "critic"):
            norm = metrics.get(f"{part}/grad_norm", 1.0)
            if metrics.get(f"{part}/skipped_updates") or norm != norm:
                yield "gradient_not_finite", f"{part}/grad_norm={norm:g}"
            largest = max(
                abs(metrics.get(f"critic/advantages/{kind}", 0.0)) for kind in ("min", "max")
            )
            if (
                norm == 0
                and (metrics.get("critic/vf_loss", 0.0) if part == "critic" else largest) > 1e-8
            ):
                yield "gradient_zero", f"{part}/grad_norm is 0"
            own = (
                self.config.actor_rollout_ref.actor.optim
                if part == "actor"
                else self.config.critic.optim
            )
            if metrics.get(f"{part}/lr") == 0 < own.lr and self._of_past(f"{part}/lr"):
                yield "rate_zero", f"{part}/lr is 0"

    def _lengths(self, metrics: Metrics) -> Iterator[Finding]:
        if not self.config.actor_rollout_ref.rollout.ignore_eos:
            episodes = max(metrics.get("agent/episodes", 0.0), 1.0)
            turns = episodes * metrics.get("agent/turns/mean", 1.0)
            for what, share in {
                "answers fill data.max_response_length": metrics.get(
                    "response_length/clip_ratio", 0.0
                ),
                "episodes overflow it": metrics.get("agent/ending/overflow", 0.0) / episodes,
                "turns were cut at their limit": metrics.get("agent/cut_turns", 0.0) / turns,
            }.items():
                if share >= (0.95 if "turns" in what else 0.7):
                    yield "length_pinned", f"{share:.0%} of {what}"

    def _jumps(self, metrics: Metrics) -> Iterator[Finding]:
        """Looks for entropy that collapses and for a policy that jumps."""
        entropy, before = metrics.get("actor/entropy"), self._of_past("actor/entropy")[-2:]
        if (
            entropy is not None
            and before
            and max(before) > 0.1
            and entropy < 0.2 * max(before)
            and not self.solved
        ):
            yield (
                "entropy_collapse",
                f"actor/entropy fell from {max(before):.3g} to {entropy:.3g} nats in two steps",
            )
        for name in ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"):
            value, past = metrics.get(name, 0.0), self._of_past(name)
            most = max(map(abs, past)) if len(past) >= 2 else float("inf")
            if abs(value) > 2.0 and name == "actor/ppo_kl":
                yield "kl_explodes", f"a step moved the policy by {value:.3g} nats a token"
            if abs(value) > (0.5 if name == "actor/ppo_kl" else 2.0) or abs(value) > max(
                0.2, 5 * most
            ):
                yield "kl_jump", f"{name}={value:.3g}, {most:.2g} was the most so far"

    def _machine(self, metrics: Metrics) -> Iterator[Finding]:
        """Looks for throughput that falls and host memory that grows."""
        past, now = self._of_past("perf/throughput"), metrics.get("perf/throughput", 0.0)
        took, seconds = metrics.get("timing_s/step", 0.0), self._of_past("timing_s/step") or [0.0]
        # Of short steps the machine's other work makes more.
        if len(past) >= 3 and 0 < now < median(past) / 3 and took > median(seconds) + LONGER_S:
            yield "throughput_falls", f"{now:.3g} tokens/s, {median(past):.3g} is usual"
        for name in ("perf/driver_memory_gib", "perf/rank_memory_gib"):
            sizes = [*self._of_past(name), metrics.get(name, 0.0)]
            jump = len(sizes) > 3 and sizes[-1] - sizes[-2] > max(0.5, 0.1 * sizes[-2])
            creeps = len(sizes) > MEMORY and sizes == sorted(set(sizes))
            if jump or (creeps and sizes[-1] - sizes[0] > max(1.0, 0.2 * sizes[0])):
                yield (
                    "memory_grows",
                    f"{name} grew from {sizes[0]:.3g} to {sizes[-1]:.3g} in {len(sizes) - 1} steps",
                )


# What the batch itself says


def finding(alarm: str, /, **facts: Any) -> Finding:
    """Makes the finding of an alarm whose text is in data/texts.yaml."""
    return alarm, say(alarm, **facts)


def place(batch: DataProto, row: int, token: int) -> str:
    """Names a token of a row."""
    ids = batch.non_tensor_batch.get("episode_id", batch.non_tensor_batch.get("uid"))
    return f"token {token} of the response of " + (
        f"row {row}" if ids is None else f"episode {ids[row]}"
    )


def first_place(batch: DataProto, wrong: Tensor) -> str:
    """Names the first token where `wrong`, (B, R) bool."""
    return place(batch, *wrong.nonzero()[0].tolist())


def turn_goes_on(turns: Tensor) -> Tensor:
    """Says of which tokens the next one belongs to the same turn: (B, R) bool of turn_ids."""
    return nnf.pad(turns[:, :-1] == turns[:, 1:], (0, 1))


def wrong_tokens(batch: DataProto) -> Iterator[Finding]:
    """Finds tokens that are trained on and were not sampled."""
    tensors, turns = batch.batch, batch.batch.get("turn_ids")
    mask = tensors["response_mask"].bool()  # (B, R)
    unsampled = mask & ~tensors["attention_mask"][:, -mask.shape[1] :].bool()
    if turns is not None:
        unsampled |= mask & (turns < 0)
    if count := int(unsampled.sum()):
        yield finding(
            "unsampled_tokens", count=count, of=int(mask.sum()), first=first_place(batch, unsampled)
        )


def misplaced_rewards(batch: DataProto) -> Iterator[Finding]:
    """Finds rewards on tokens that were not sampled, or that do not end what they pay for.

    An environment's reward stands on the last token of its turn, a score of a whole answer on the answer's last. Scores
    of single tokens may stand anywhere among the sampled ones.
    """
    tensors = batch.batch
    mask, scores = tensors["response_mask"].bool(), tensors["token_level_scores"]  # (B, R)
    given = scores != 0
    if (off := given & ~mask & mask.any(1, keepdim=True)).any():
        yield (
            "reward_misplaced",
            f"a reward stands on a token that was not sampled: {first_place(batch, off)}",
        )
        return
    rows = given.any(1)
    if "environment_rewards" in tensors and torch.equal(scores, tensors["environment_rewards"]):
        if (off := given & turn_goes_on(tensors["turn_ids"])).any():
            yield (
                "reward_misplaced",
                f"an environment's reward stands within a turn: {first_place(batch, off)}",
            )
    elif rows.sum() > 1 and (given.sum(1)[rows] == 1).all():
        last = (mask * torch.arange(mask.shape[1])).amax(1, keepdim=True)
        if not given.gather(1, last)[rows].any():
            yield (
                "reward_misplaced",
                f"no reward stands on the last sampled token, but on {first_place(batch, given)}",
            )


def wrong_groups(batch: DataProto, episodes: EpisodeRows, same_tasks: bool) -> Iterator[Finding]:
    """Finds groups that mix prompts."""
    groups = grouped(batch, episodes)
    prompts, tasks = batch.batch["prompts"].numpy(), batch.non_tensor_batch.get("group_index")
    columns = [*([prompts] if same_tasks else []), *([] if tasks is None else [tasks])]
    if mixed := [
        uid
        for uid, rows in groups.items()
        if any((own[rows] != own[rows[0]]).any() for own in columns)
    ]:
        yield (
            "groups_mixed",
            f"{len(mixed)} of {len(groups)} groups have episodes of different prompts, as {mixed[0]}",
        )


def grouped(batch: DataProto, episodes: EpisodeRows) -> dict[str, list[int]]:
    """Lists the first rows of each group's episodes by its uid, dummies left out."""
    first = episodes.first[episodes.real.numpy()[episodes.first]]
    groups = rows_by_key(map(str, batch.non_tensor_batch["uid"][first]))
    return {uid: first[members].tolist() for uid, members in groups.items()}


def equal_answers(batch: DataProto, episodes: EpisodeRows) -> Iterator[Finding]:
    """Finds groups whose members say the same more often than independent draws would.

    Of the first turns, all of which answer one prompt, the others equal a group's first with its own probability: the
    number that do is compared with the sum of these, by Chernoff's bound for a Poisson number.
    """
    tensors = batch.batch
    log_probs = tensors.get("rollout_log_probs", tensors.get("old_log_probs"))
    if log_probs is None:
        return
    said = tensors["response_mask"].numpy().astype(bool)
    said = said & (tensors["turn_ids"].numpy() == 0) if "turn_ids" in tensors else said
    ids, chances = (
        tensors["responses"].numpy(),
        np.where(said, log_probs.float().numpy(), 0).sum(1, dtype=np.float64),
    )
    equal, expected, worst = 0, 0.0, ""
    for uid, rows in grouped(batch, episodes).items():
        first, *others = (ids[row][said[row]].tobytes() for row in rows)
        same = sum(answer == first for answer in others) if first else 0
        expected += math.exp(min(chances[rows[0]], 0.0)) * len(others) if first else 0.0
        equal, worst = equal + same, worst or (uid if same else "")
    if (
        equal > expected
        and equal * math.log(equal / max(expected, 1e-300)) - equal + expected > UNLIKELY
    ):
        yield finding("equal_answers", equal=equal, expected=expected, worst=worst)
