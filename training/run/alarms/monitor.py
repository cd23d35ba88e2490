"""Runs the rules after every step and says what they find.

What stands for as many steps as its rule waits is said once, again each time it has stood twice as
long, and is counted in the metrics as alarms/NAME. Invariant: rules read and never write, so that a
run with and without them has the same numbers.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows
from training.config import PPOConfig
from training.run.alarms import batch_rules, machine_rules, update_rules
from training.run.alarms.catalogue import ADVICE, WAITS, Finding
from training.run.alarms.engine_rules import EngineRules
from training.run.alarms.history import History, Metrics
from training.run.alarms.reward_rules import FEWEST_EPISODES, RewardRules

# The package's own name, as it is what users know.
logger = logging.getLogger("training.run.alarms")


class AlarmStop(RuntimeError):
    """Ends a run with `trainer.alarms=stop`; says what stands."""


class Alarms:
    """Watches a run's steps.

    Args:
        config: the run's; `trainer.alarms` says what an alarm does.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.history = History()
        self.reward_rules = RewardRules(config.data.reward_fn_key)
        self.engine_rules = EngineRules(config)
        # The step since which each finding stands.
        self.since: dict[str, int] = {}
        self.broken_rules: set[str] = set()
        # What stands now, as sentences.
        self.standing: list[str] = []

    def check(self, batch: DataProto, metrics: Metrics, step: int) -> dict[str, float]:
        """Looks at a step, once it is made.

        Returns: `alarms/count`, and alarms/NAME: for how many steps each stands.
        """
        if self.config.trainer.alarms == "off":
            return {}
        began = time.perf_counter()
        metrics = {**metrics, "perf/driver_memory_gib": machine_rules.driver_memory()}
        findings = self._run_rules(batch, metrics)
        self.history.add(metrics)
        self.since = {alarm: self.since.get(alarm, step) for alarm in findings}
        self.standing = []
        results: dict[str, float] = {}
        for alarm, text in findings.items():
            steps_standing = step - self.since[alarm] + 1
            steps_due = steps_standing
            if alarm in WAITS:
                steps_due -= 1
            if steps_due == 0:
                continue
            results[f"alarms/{alarm}"] = float(steps_standing)
            sentence = (
                f"alarm {alarm}: {text}, since step {self.since[alarm]}; check {ADVICE[alarm]}"
            )
            self.standing.append(sentence)
            is_power_of_two = steps_due & (steps_due - 1) == 0
            if is_power_of_two:
                logger.warning("%s", sentence)
        results["alarms/count"] = float(len(self.standing))
        results["timing_s/alarms"] = time.perf_counter() - began
        return results

    def stop_if_asked(self) -> None:
        """Raises AlarmStop where an alarm stands and `trainer.alarms` is stop."""
        if self.standing and self.config.trainer.alarms == "stop":
            advice = "trainer.alarms=stop ends the run; warn goes on all the same"
            raise AlarmStop("\n".join([*self.standing, advice]))

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {
            "template": self.engine_rules.template,
            "rewards": self.reward_rules.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self.engine_rules.template = state["template"]
        self.reward_rules.load_state_dict(state["rewards"])

    def _run_rules(self, batch: DataProto, metrics: Metrics) -> dict[str, str]:
        """Returns what each alarm's first finding says, by alarm."""
        findings: dict[str, str] = {}
        for name, rule in self._rules(batch, metrics).items():
            try:
                for finding in rule:
                    findings.setdefault(finding.alarm, finding.text)
            # A batch or a metric of a user's own may lack or hold anything.
            except Exception as error:
                if name not in self.broken_rules:
                    logger.warning(
                        "alarms do without the rule %s: %s: %s", name, type(error).__name__, error
                    )
                self.broken_rules.add(name)
        return findings

    def _rules(self, batch: DataProto, metrics: Metrics) -> dict[str, Iterator[Finding]]:
        """Lists the rules by name, in the order in which they are run."""
        config = self.config
        history = self.history
        same_tasks = not (config.environments and config.agent.allow_different_tasks)
        episodes = EpisodeRows(batch)
        rules = {
            "unsampled_tokens": batch_rules.unsampled_tokens(batch),
            "misplaced_rewards": batch_rules.misplaced_rewards(batch),
            "equal_answers": batch_rules.equal_answers(batch, episodes),
            "mixed_groups": batch_rules.mixed_groups(batch, episodes, same_tasks),
            "rewards": self.reward_rules.check(batch, episodes, metrics),
            "not_finite_numbers": update_rules.not_finite_numbers(metrics),
            "engine": self.engine_rules.check(metrics),
            "gradients_and_rates": update_rules.gradients_and_rates(config, metrics, history),
            "collapsing_entropy": self._collapsing_entropy(metrics),
            "jumping_policy": update_rules.jumping_policy(metrics, history),
            "falling_throughput": machine_rules.falling_throughput(metrics, history),
            "growing_memory": machine_rules.growing_memory(metrics, history),
        }
        is_real = episodes.real.numpy()[episodes.first]
        may_be_long = config.actor_rollout_ref.rollout.ignore_eos
        if is_real.sum() >= FEWEST_EPISODES and not may_be_long:
            rules["pinned_lengths"] = update_rules.pinned_lengths(metrics)
        return rules

    def _collapsing_entropy(self, metrics: Metrics) -> Iterator[Finding]:
        """Finds collapsing entropy, unless every episode of the step had the best reward."""
        if not self.reward_rules.solved:
            yield from update_rules.collapsing_entropy(metrics, self.history)
