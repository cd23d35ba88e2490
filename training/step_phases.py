"""What each phase of a step does to its batch; `RayPPOTrainer.train_step` has their order.

    arrange -> reward -> old log-probs -> KL in the reward -> advantages -> resample -> update

Reference and critic are a call of their worker group each, which stands in `train_step` itself.
Invariant: a phase reads fields of the batch and adds its own; what a phase is to compute is decided
by the config, and by whether episodes have several rows, never by the batch's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from custom.reward_managers.unscored import UNSCORED
from data.protocol import DUMMY_UID, DataProto
from data.seeds import seed_for
from training.advantage import apply_kl_penalty, compute_advantage
from training.batch.episode_rows import (
    REWARD_INFO,
    EpisodeRows,
    observation_mask,
    scores_on_trained_tokens,
)
from training.batch.policy_filtration import compute_pf_ppo_reweight_data
from training.batch.rank_layout import arrange
from training.config import PPOConfig
from training.config.row_readers import row_reader_sentences
from training.config.side_services import side_names
from training.core_algos import get_kl_controller
from training.core_algos.masked_ops import masked_mean
from training.reward import (
    RewardFunction,
    RewardInfos,
    compute_reward,
    compute_reward_of_rows,
    run_beside,
)
from training.rollout_correction import apply_correction
from training.rollout_mismatch import measure_mismatch
from training.run.abort_policy import PartsOfBatch, UnscoredWatch
from training.worker_groups import WorkerGroups

Metrics = dict[str, float]
# Rewards (B, R), and further values by name, one a row.
Scores = tuple[Tensor, RewardInfos]
# Estimators that need one of these read what the policy made of its own samples.
READ_FROM_POLICY = frozenset({"old_log_probs", "sum_pi_squared", "rollout_is_weights"})
# In the place of a group's number in seeds: no group of prompts has it.
RESAMPLING_GROUP = -2


class StepPhases:
    """Runs the phases of a step.

    Args:
        config: the run's.
        groups: whose models the phases call.
        reward_fn: DataProto -> rewards, see `training.reward.compute_reward`.

    Attributes, which a checkpoint keeps:
        kl_controller: the coefficient of the KL in the reward.
        estimator_state: what the advantage estimator keeps over the run.
    """

    def __init__(self, config: PPOConfig, groups: WorkerGroups, reward_fn: RewardFunction) -> None:
        self.config = config
        self.groups = groups
        self.reward_fn = reward_fn
        self.plan = config.batch_plan
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.estimator_state: dict[str, Any] = {}
        # Rows of the run so far, which number those to come.
        self.rows_so_far = 0
        self.unscored: UnscoredWatch | PartsOfBatch = UnscoredWatch(config.agent.max_failure_rate)

    def arrange(self, batch: DataProto) -> DataProto:
        """Orders the rows for the ranks; see `training.batch.rank_layout.arrange`.

        Raises:
            ValueError: episodes have several rows, and the gradient would depend on how they are
                cut (training/config/row_readers.py).
        """
        self._refuse_what_reads_rows(batch)
        return arrange(batch, self.plan)

    def _refuse_what_reads_rows(self, batch: DataProto) -> None:
        episodes = EpisodeRows(batch)
        if episodes.one_row_each:
            return
        several = sum(len(rows) > 1 for rows in episodes.rows)
        who = f"{several} of {_real_episodes(batch)} episodes have several rows"
        for sentence in row_reader_sentences(self.config, who):
            raise ValueError(sentence)

    # Rewards

    def start_reward(self, batch: DataProto) -> Callable[[], Scores]:
        """Scores the batch; calling the result waits for the scores.

        With `launch_reward_fn_async` the reward function runs beside the passes that follow. What
        dynamic sampling has scored keeps its scores.
        """
        if "token_level_scores" in batch.batch:
            scores: Scores = (batch.batch["token_level_scores"], {})
            return lambda: scores
        runs_beside = self.config.reward_model.launch_reward_fn_async
        if runs_beside and self.groups.reward_model is None:
            score = partial(self._function_scores, batch.select(), self.reward_fn)
            return run_beside(score).result
        scores = self.score(batch, self.reward_fn)
        return lambda: scores

    def score(self, batch: DataProto, reward_fn: RewardFunction) -> Scores:
        """Scores by the reward function and by the reward model, whose scores are added.

        Where neither `custom_reward_function` nor an environment gives rewards, the model's stand
        alone.

        Returns:
            scores (B, R) float32 on sampled tokens, and further values of the reward function by
            name, one a row.
        """
        if self.groups.reward_model is None:
            return self._function_scores(batch, reward_fn)
        scored = self.groups.reward_model.compute_rm_score(batch)
        modelled = scores_of_last_rows(batch, scored.batch["rm_scores"])
        pays_by_itself = self.config.environments and not self.config.plays_dataset_rows
        if self.config.custom_reward_function.path is None and not pays_by_itself:
            return modelled, {}
        scores, infos = self._function_scores(batch, reward_fn)
        return scores + modelled, infos

    def _function_scores(self, batch: DataProto, reward_fn: RewardFunction) -> Scores:
        """Scores by the reward function: an environment's rows are all paid, a dataset's once.

        Of a dataset's episode of several rows the function sees the one with the last turn alone;
        the others have score 0 and no further values (None).
        """
        if not self.config.plays_dataset_rows:
            return compute_reward(batch, reward_fn)
        counts = torch.zeros(len(batch), dtype=torch.bool)
        counts[EpisodeRows(batch).last] = True
        return compute_reward_of_rows(batch, reward_fn, counts)

    def add_rewards(self, batch: DataProto, scores: Tensor, infos: RewardInfos) -> DataProto:
        """Sets `token_level_scores` (B, R), and the reward function's further values as columns.

        Episodes that a model beside the policy did not judge are left out, unless
        `agent.on_failure` is zero. What dynamic sampling has scored was counted and treated then.
        """
        if UNSCORED in infos:
            self._leave_out_unscored(batch, scores, infos[UNSCORED])
        elif side_names(self.config) and "token_level_scores" not in batch.batch:
            self.unscored.count(tried=_real_episodes(batch), failed=0)
        if self.config.algorithm.rollout_correction.corrects:
            # Tokens that were left out since the batch was scored must not take their scores along.
            scores = scores_on_trained_tokens(batch, scores)
        batch.batch["token_level_scores"] = scores
        for name, values in infos.items():
            batch.non_tensor_batch[REWARD_INFO + name] = np.array(values, dtype=object)
        return batch

    def _leave_out_unscored(
        self, batch: DataProto, scores: Tensor, unscored: Sequence[bool | None]
    ) -> None:
        """Masks, in place, the rows of episodes that have a row without a score."""
        episodes = EpisodeRows(batch).rows
        missed = [rows for rows in episodes if any(unscored[row] for row in rows)]
        self.unscored.count(tried=_real_episodes(batch), failed=len(missed))
        if self.config.agent.on_failure == "zero":
            return
        left_out = [row for rows in missed for row in rows]
        mask = batch.batch["response_mask"].clone()
        mask[left_out] = 0
        batch.batch["response_mask"] = mask
        scores[left_out] = 0.0

    def apply_kl_penalty(self, batch: DataProto) -> Metrics:
        """Sets `token_level_rewards` (B, R): the scores, less the KL with `use_kl_in_reward`."""
        algorithm = self.config.algorithm
        if not algorithm.use_kl_in_reward:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            return {}
        _, metrics = apply_kl_penalty(batch, self.kl_controller, algorithm.kl_penalty)
        return metrics

    # Log-probs

    def needs_old_log_probs(self) -> bool:
        """Checks whether something reads them.

        In a step of a single update its own log-probs are the old ones.
        """
        algorithm = self.config.algorithm
        correction = algorithm.rollout_correction
        if self.config.critic.share_backbone:
            # Values of a shared model come from the same pass.
            return True
        if correction.bypass_mode:
            return False
        return (
            not READ_FROM_POLICY.isdisjoint(self.config.estimator_needs)
            or algorithm.use_kl_in_reward
            or (correction.corrects and not correction.weighs_alone)
            or self.plan.actor.updates > 1
        )

    def weighs_several_rows(self, batch: DataProto) -> bool:
        """Checks whether importance weights are those of episodes of which some have several rows.

        Such weights need the log-probs of all rows, before the update takes the rows apart.
        """
        correction = self.config.algorithm.rollout_correction
        if correction.rollout_is != "sequence" or correction.bypass_mode:
            return False
        return not EpisodeRows(batch).one_row_each

    def add_old_log_probs(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Adds `old_log_probs` (B, R); measures entropy, and how far engine and trainer differ.

        Tokens are then weighed, or left out, as `algorithm.rollout_correction` says.
        """
        batch.meta_info["sum_pi_squared"] = "sum_pi_squared" in self.config.estimator_needs
        computed = self.groups.policy.compute_log_prob(batch)
        entropies = computed.pop(batch_keys=["entropys"]).batch["entropys"]  # (B, R)
        batch = batch.union(computed)
        entropy = masked_mean(entropies, batch.batch["response_mask"])
        metrics = {"actor/old_entropy": entropy.item()}
        if "rollout_log_probs" in batch.batch:
            metrics |= self._measure_mismatch(batch)
        correction = self.config.algorithm.rollout_correction
        if correction.corrects and not correction.bypass_mode:
            metrics |= apply_correction(batch, correction)
        return batch, metrics

    def _measure_mismatch(self, batch: DataProto) -> Metrics:
        """Measures how far the engine's log-probs are from the trainer's, for `read_mismatch`."""
        shares, largest = measure_mismatch(
            batch.batch["old_log_probs"],
            batch.batch["rollout_log_probs"],
            batch.batch["response_mask"],
            turn_ids=batch.batch.get("turn_ids"),
        )
        return {name: value.item() for name, value in (shares | largest).items()}

    def needs_reference(self) -> bool:
        """Checks whether loss, reward or estimator read the reference policy's log-probs."""
        return self.config.need_reference

    # Advantages

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Adds `advantages` and `returns` (B, R), and fields that the loss reads beside them."""
        algorithm = self.config.algorithm
        self._add_loss_fields(batch)
        return compute_advantage(
            batch,
            algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
            state=self.estimator_state,
        )

    def _add_loss_fields(self, batch: DataProto) -> None:
        """Adds what is read of `episode_share` (B,), `observation_mask`, `old_log_probs` (B, R).

        And `row_number` (B,), by which probes' records find their rows again.
        """
        numbers = torch.arange(len(batch)) + self.rows_so_far
        is_dummy = batch.non_tensor_batch["uid"].astype(object) == DUMMY_UID
        numbers[torch.from_numpy(is_dummy)] = -1
        batch.batch["row_number"] = numbers
        self.rows_so_far += len(batch)
        if self.config.actor_rollout_ref.actor.loss_agg_counts == "episodes":
            shares = EpisodeRows(batch).shares()
            if shares is not None:
                batch.batch["episode_share"] = shares
        if self.config.agent.observation_loss_coef:
            batch.batch["observation_mask"] = observation_mask(batch)
        bypasses = self.config.algorithm.rollout_correction.bypass_mode
        if bypasses and "old_log_probs" in self.config.estimator_needs:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]

    # Updates

    def resample(self, batch: DataProto, step: int) -> DataProto:
        """Draws the rows that the updates learn from, by their scores, with `use_pf_ppo`.

        Without it, returns the batch itself.
        """
        if not self.config.algorithm.use_pf_ppo:
            return batch
        pf_ppo = self.config.algorithm.pf_ppo
        seed = seed_for(self.config.data.run_seed, step, RESAMPLING_GROUP)
        return compute_pf_ppo_reweight_data(batch, pf_ppo.reweight_method, pf_ppo.weight_pow, seed)

    def update_actor(self, batch: DataProto) -> Metrics:
        """Makes the updates of the policy, and of values that share its model; returns metrics."""
        if self.config.critic.share_backbone:
            return self.groups.policy.update_actor_and_values(batch)
        return self.groups.policy.update_actor(batch)

    def take_probe_records(self) -> list[dict[str, Any]]:
        """Returns the records of the last updates by probe, a mapping a rank, policy and critic."""
        records = self.groups.policy.take_probe_records()
        if self.groups.critic is not None:
            records = records + self.groups.critic.take_probe_records()
        return records


def _real_episodes(batch: DataProto) -> int:
    """Counts a batch's episodes, without dummy rows."""
    episodes = EpisodeRows(batch)
    return int(episodes.real[torch.from_numpy(episodes.first)].sum())


def scores_of_last_rows(batch: DataProto, row_scores: Tensor) -> Tensor:
    """Returns scores (B, R) in which of an episode's rows that of its last turn counts, float32."""
    last_rows = EpisodeRows(batch).last
    scores = torch.zeros(batch.batch["response_mask"].shape)
    scores[last_rows] = row_scores[last_rows]
    return scores
