"""Runs the rules after every step and says what they find.

What stands for as many steps as its rule waits is said once, again each time it has stood twice as
long, and is counted in the metrics as alarms/NAME. Invariant: rules read and never write, so that a
run with and without them has the same numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from data.protocol import DataProto
from features.alarms import (
    advantage_rules,
    batch_rules,
    machine_rules,
    reward_rules,
    tool_rules,
    update_rules,
)
from features.alarms.catalogue import ADVICE, WAITS, Finding, view_of
from features.alarms.engine_rules import EngineRules
from features.alarms.history import History, Metrics
from features.alarms.length_rules import LengthRules
from features.alarms.rate_rules import RateRules
from features.alarms.reference_rules import ReferenceRules
from features.alarms.repeat_rules import RepeatRules
from features.alarms.reward_rules import FEWEST_EPISODES, RewardRules, ScoreRules
from features.alarms.sampling_rules import SamplingRules
from features.alarms.settings import AlarmSettings
from features.alarms.silence_rules import SilenceRules
from features.alarms.spread_rules import GroupSpread
from training.batch.episode_rows import EpisodeRows
from training.observers import Notice, ObservedRun, Observer, StepReport, StopRequest
from training.run.exit_codes import MEND

# The package's own name, as it is what users know.
logger = logging.getLogger("features.alarms")


def open_alarms(run: ObservedRun) -> Alarms | None:
    """Opens the alarms of a run; None where it wants none."""
    if run.config.section(AlarmSettings).mode == "off":
        return None
    return Alarms(run)


class Alarms(Observer):
    """Watches a run's steps.

    Args:
        run: the run; `alarms.mode` says what an alarm does.

    Attributes:
        standing: the alarms that stand, as sentences.
    """

    def __init__(self, run: ObservedRun) -> None:
        config = run.config
        tokenizer = run.tokenizer
        self.config = config
        self.stops = config.section(AlarmSettings).mode == "stop"
        self.paid_by_environment = run.paid_by_environment
        self.eos_token_id = tokenizer.eos_token_id if tokenizer is not None else None
        self.vocabulary = len(tokenizer) if tokenizer is not None else 0
        self.history = History()
        self.reward_rules = RewardRules(config.data.reward_fn_key)
        self.score_rules = ScoreRules()
        self.length_rules = LengthRules()
        self.repeat_rules = RepeatRules(run.steps_per_epoch)
        self.rate_rules = RateRules(config, run.total_steps)
        self.reference_rules = ReferenceRules(config)
        self.engine_rules = EngineRules(config)
        self.sampling_rules = SamplingRules(config)
        self.silence_rules = SilenceRules(config.data.reward_fn_key, list(run.textless_ids))
        # The step since which each finding stands.
        self.since: dict[str, int] = {}
        self.broken_rules: set[str] = set()
        self.standing: list[str] = []
        # The step whose update goes on.
        self._step: int | None = None

    def update_begins(self, batch: DataProto) -> None:
        """Notes the step, whose scores are to come."""
        self._step = batch.meta_info.get("global_steps")

    def scored(self, batch: DataProto, scores: Tensor) -> None:
        """Sees what a step's rows were given, (B, R), before anything is made of it."""
        info = batch.meta_info
        # With dynamic sampling another step's may come in between.
        if not info.get("validate") and info.get("global_steps") == self._step:
            self.score_rules.given = scores.sum(1, dtype=torch.float64)

    def step_made(self, report: StepReport) -> dict[str, float]:
        """Looks at a step.

        Returns: `alarms/count`, and alarms/NAME: for how many steps each stands.
        """
        began = time.perf_counter()
        step = report.step
        metrics = {**report.metrics, "perf/driver_memory_gib": machine_rules.driver_memory()}
        findings = self._run_rules(report.batch, metrics, step)
        self.history.add(metrics)
        self.since = {alarm: self.since.get(alarm, step) for alarm in findings}
        self.standing = []
        results: dict[str, float] = {}
        for alarm, finding in findings.items():
            steps_standing = step - self.since[alarm] + 1
            steps_due = steps_standing
            if alarm in WAITS:
                steps_due -= 1
            if steps_due == 0:
                continue
            results[f"alarms/{alarm}"] = float(steps_standing)
            sentence = (
                f"alarm {alarm}: {finding.text}, since step {self.since[alarm]}; check "
                f"{ADVICE[alarm]}"
            )
            self.standing.append(sentence)
            is_power_of_two = steps_due & (steps_due - 1) == 0
            if is_power_of_two:
                logger.warning("%s", sentence)
                report.notices.append(Notice(alarm, sentence, view_of(finding, step)))
        results["alarms/count"] = float(len(self.standing))
        results["timing_s/alarms"] = time.perf_counter() - began
        return results

    def wants_to_stop(self) -> StopRequest | None:
        """Ends the run where an alarm stands and `alarms.mode` is stop."""
        if not (self.standing and self.stops):
            return None
        advice = "alarms.mode=stop ends the run; warn goes on all the same"
        return StopRequest("\n".join([*self.standing, advice]), MEND)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {
            "template": self.engine_rules.template,
            "rewards": self.reward_rules.state_dict(),
            "spread": asdict(self.reward_rules.spread),
            "fewest_cut": self.length_rules.fewest_cut,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.engine_rules.template = state["template"]
        self.reward_rules.load_state_dict(state["rewards"])
        # An older checkpoint does not remember them.
        if "spread" in state:
            self.reward_rules.spread = GroupSpread(**state["spread"])
        if "fewest_cut" in state:
            self.length_rules.fewest_cut = state["fewest_cut"]

    def _run_rules(self, batch: DataProto, metrics: Metrics, step: int) -> dict[str, Finding]:
        """Returns each alarm's first finding, by alarm."""
        findings: dict[str, Finding] = {}
        for name, rule in self._rules(batch, metrics, step).items():
            try:
                for finding in rule:
                    findings.setdefault(finding.alarm, finding)
            # A batch or a metric of a user's own may lack or hold anything.
            except Exception as error:
                if name not in self.broken_rules:
                    logger.warning(
                        "alarms do without the rule %s: %s: %s", name, type(error).__name__, error
                    )
                self.broken_rules.add(name)
        return findings

    def _rules(self, batch: DataProto, metrics: Metrics, step: int) -> dict[str, Iterator[Finding]]:
        """Lists the rules by name, in the order in which they are run."""
        episodes = EpisodeRows(batch)
        rules = self._batch_rules(batch, metrics, episodes)
        rules |= self._update_rules(batch, metrics, step)
        is_real = episodes.real.numpy()[episodes.first]
        may_be_long = self.config.actor_rollout_ref.rollout.ignore_eos
        if is_real.sum() >= FEWEST_EPISODES and not may_be_long:
            rules["pinned_lengths"] = self.length_rules.check(metrics)
        return rules

    def _batch_rules(
        self, batch: DataProto, metrics: Metrics, episodes: EpisodeRows
    ) -> dict[str, Iterator[Finding]]:
        """Lists the rules that look at the batch."""
        config = self.config
        same_tasks = not (config.environments and config.agent.allow_different_tasks)
        rules = {
            "unsampled_tokens": batch_rules.unsampled_tokens(batch),
            "misplaced_rewards": batch_rules.misplaced_rewards(batch),
            "unpaid_rewards": reward_rules.unpaid_rewards(
                batch,
                episodes,
                are_scores=self.paid_by_environment,
                overflow_reward=config.agent.overflow_reward,
            ),
            "other_rewards": reward_rules.other_rewards(config.algorithm, batch, metrics),
            "scores": self.score_rules.check(batch, episodes),
            "equal_answers": batch_rules.equal_answers(batch, episodes),
            "other_prompts": batch_rules.other_prompts(batch, episodes),
            "mixed_groups": batch_rules.mixed_groups(batch, episodes, same_tasks),
            "uneven_groups": batch_rules.uneven_groups(
                batch, episodes, config.actor_rollout_ref.rollout.n
            ),
            "repeats": self.repeat_rules.check(batch, episodes),
            "failing_tools": tool_rules.failing_tools(batch, episodes),
            "advantages": advantage_rules.wrong_advantages(
                batch, episodes, config.algorithm.adv_estimator
            ),
            "rewards": self.reward_rules.check(batch, episodes, metrics),
            "silence": self.silence_rules.check(batch, episodes, metrics),
        }
        # A correction leaves tokens out on purpose.
        if not config.algorithm.rollout_correction.corrects:
            rules["tokens_left_out"] = batch_rules.tokens_left_out(batch, episodes)
        ends_turns = not config.actor_rollout_ref.rollout.ignore_eos
        if self.eos_token_id is not None and ends_turns:
            rules["ignored_ends"] = batch_rules.ignored_ends(batch, self.eos_token_id)
        return rules

    def _update_rules(
        self, batch: DataProto, metrics: Metrics, step: int
    ) -> dict[str, Iterator[Finding]]:
        """Lists the rules that look at engine, update and machine."""
        config = self.config
        history = self.history
        return {
            "not_finite_numbers": update_rules.not_finite_numbers(metrics),
            "engine": self.engine_rules.check(metrics),
            "samples": self.sampling_rules.check(batch, metrics, self.vocabulary),
            "reference": self.reference_rules.check(batch, metrics, step),
            "rates": self.rate_rules.check(metrics, step),
            "gradients_and_rates": update_rules.gradients_and_rates(config, metrics, history),
            "still_parts": update_rules.still_parts(metrics),
            "kept_gradients": update_rules.kept_gradients(metrics),
            "missing_tokens": update_rules.missing_tokens(config, batch, metrics),
            "further_updates": update_rules.further_updates(config, metrics),
            "constant_values": update_rules.constant_values(metrics, history),
            "lost_prompts": update_rules.lost_prompts_and_answers(config, metrics),
            "misled_gradient": update_rules.misled_gradient(config, metrics),
            "negative_kl": update_rules.negative_kl(config, metrics),
            "collapsing_entropy": self._collapsing_entropy(metrics),
            "jumping_policy": update_rules.jumping_policy(metrics, history),
            "large_step": self._large_step(metrics),
            "falling_throughput": machine_rules.falling_throughput(metrics, history),
            "growing_memory": machine_rules.growing_memory(metrics, history),
        }

    def _large_step(self, metrics: Metrics) -> Iterator[Finding]:
        """Finds a large step, which is remembered for the rewards that follow it."""
        for finding in update_rules.large_step(metrics, self.history):
            self.reward_rules.large_step = finding.text
            yield finding

    def _collapsing_entropy(self, metrics: Metrics) -> Iterator[Finding]:
        """Finds collapsing entropy, unless every episode of the step had the best reward."""
        if not self.reward_rules.solved:
            yield from update_rules.collapsing_entropy(metrics, self.history)
