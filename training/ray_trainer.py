"""The trainer: `fit()` and one short method per phase of a step.

    prompts -> generate -> reward -> log-probs, values -> advantages -> update critic, update actor -> weights

The driver holds the batch (a DataProto) and the order of things; models live in worker groups, which it only calls.
Invariant: everything random in a step derives from (run seed, step), and the data order from (run seed, epoch), so that
a checkpoint needs no generator's state.
"""

import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from data.containers import move_to_sampled_tokens, sample_ids, seed_for, step_info
from data.protocol import DataProto
from data.rl_dataset import EpochOrder, PromptCollator
from data.rl_dataset import collate_fn as default_collate_fn
from data.texts import say
from data.watch import WATCH
from training.batch.batching import EpisodeRows, arrange, collect_varied_groups, observation_mask
from training.batch.torch_functional import masked_mean
from training.config import PPOConfig
from training.config.loader import read_config
from training.config.section import anchored
from training.core_algos import compute_pf_ppo_reweight_data, get_kl_controller
from training.reward import (
    RewardFunction,
    apply_kl_penalty,
    compute_advantage,
    compute_reward,
    compute_reward_async,
)
from training.reward import compute_response_mask as compute_response_mask
from training.rollout_correction import apply_correction, measure_mismatch, read_mismatch
from training.run import checkpoint, metric_utils, roles
from training.run.ahead import Ahead, Engines, Generated, Streamed, leave_out_stale
from training.run.alarms import Alarms
from training.run.metric_utils import StepTimer
from training.run.process import EndingSignals, has_gpus, ray_cluster
from training.run.roles import ResourcePoolManager, Role
from training.run.tracking import Tracking, held, record_config
from workers.ranks.worker_group import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

logger = logging.getLogger(__name__)
Rows = dict[str, Any]
Collate = Callable[[list[dict[str, Any]]], Rows]
# verl's functions, with the roles here.
need_critic, need_reward_model = roles.need_critic, roles.need_reward_model
need_reference_policy = roles.need_reference_policy


class RayPPOTrainer:
    """Trains by PPO and its relatives, over worker groups.

    Args:
        config: the run's configuration, typed, or an OmegaConf or a mapping (see `read_config`).
        tokenizer: the policy's.
        role_worker_mapping: worker class per role; None: what the config needs.
        resource_pool_manager: pool per role; None: one pool of all ranks.
        ray_worker_group_cls: how workers are run; None: as `trainer.launcher` says.
        processor, device_name: not used here, for verl's sake.
        reward_fn, val_reward_fn: DataProto -> rewards, see `training.reward.compute_reward`.
        train_dataset, val_dataset: torch Datasets of prompts, as token ids or as text; None: no validation.
        collate_fn: list of rows -> dict of tensors and object arrays; None: `data.rl_dataset.collate_fn`.
        train_sampler: order of the training rows; None: as `data.shuffle` says.
    """

    def __init__(
        self,
        config: PPOConfig | Any,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: Mapping[Role, type] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        ray_worker_group_cls: type[LocalWorkerGroup | RayWorkerGroup] | None = None,
        processor: object = None,
        reward_fn: RewardFunction | None = None,
        val_reward_fn: RewardFunction | None = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        collate_fn: Collate | None = None,
        train_sampler: Sampler[int] | None = None,
        device_name: str | None = None,
    ) -> None:
        if reward_fn is None or train_dataset is None:
            raise ValueError("RayPPOTrainer needs reward_fn and train_dataset")
        self.config = config = anchored(read_config(config, own_data=True)).with_correction
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping or roles.default_role_mapping(config)
        self.resource_pool_manager = resource_pool_manager or roles.default_resource_pool(config)
        self.worker_group_cls = ray_worker_group_cls or (
            RayWorkerGroup if config.trainer.use_ray else LocalWorkerGroup
        )
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn or reward_fn
        for function in (self.reward_fn, self.val_reward_fn):
            # It has a place for a tokenizer, and none in it.
            if getattr(function, "tokenizer", tokenizer) is None:
                function.tokenizer = tokenizer  # type: ignore[attr-defined]
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.run_dir = Path(config.trainer.run_dir).absolute()
        self.seed = config.data.run_seed
        self.plan = config.batch_plan
        self.global_steps = self.epoch = self.rows_done = 0
        # Epoch and rows up to which the data was drawn: generation may be ahead of what was trained on.
        self.drawn_to = 0, 0
        # Past generation, where a step must come to its end; and whether the run is to end then.
        self.in_step = False
        # An estimator's own, of the whole run.
        self.estimator_state: dict[str, Any] = {}
        self.signals = EndingSignals()
        self.signals.postpone = lambda: self.in_step
        self.row_stream = self.endless_rows()
        self.pools: list[Any] = []
        self.ahead = Ahead(self) if config.trainer.async_level else None
        # What is taken at the start and given back in the end: the run's folder, and Ray.
        self.taken: ExitStack | None = None
        self._make_dataloaders(
            train_dataset, val_dataset, collate_fn or default_collate_fn, train_sampler
        )
        self.alarms = Alarms(config)

    def _make_dataloaders(
        self,
        train_dataset: Dataset,
        val_dataset: Dataset | None,
        collate_fn: Collate,
        sampler: Sampler[int] | None,
    ) -> None:
        data, trainer, prompts = self.config.data, self.config.trainer, self.config.prompts_per_step
        workers = 0 if self.config.environments else data.dataloader_num_workers
        load = partial(DataLoader, collate_fn=self._collator(collate_fn), num_workers=workers)
        self.order = EpochOrder(train_dataset, self.seed, data.shuffle, sampler)
        self.train_dataloader = load(
            train_dataset, batch_size=prompts, sampler=self.order, drop_last=True
        )
        self.steps_per_epoch = len(self.order) // prompts
        if self.steps_per_epoch == 0:
            raise ValueError(say("few_rows", size=data.train_batch_size, rows=self.order.num_rows))
        self.total_training_steps = (
            trainer.total_training_steps or trainer.total_epochs * self.steps_per_epoch
        )
        self.val_dataloader = None
        if val_dataset is not None:
            order = EpochOrder(val_dataset, self.seed, data.validation_shuffle)
            self.val_dataloader = load(
                val_dataset, batch_size=data.val_batch_size or order.num_rows, sampler=order
            )

    def _collator(self, collate_fn: Collate) -> Callable[..., Rows]:
        return PromptCollator(self.config.data, self.tokenizer, collate_fn)

    def take_places(self) -> None:
        """Takes the run's folder, and starts Ray where the config asks for it; once."""
        if self.taken is None:
            self.taken = ExitStack()
            self.taken.enter_context(held(self.run_dir))
            self.taken.enter_context(ray_cluster(self.config))

    def init_workers(self) -> None:
        """Takes the run's places and builds every worker group with its models; `fit` does it where nobody has."""
        self.take_places()
        groups: dict[Role, Any] = {}
        gpus = has_gpus(self.config.trainer)
        for pool, placed in self.resource_pool_manager.pools(
            self.role_worker_mapping, use_gpu=gpus
        ):
            colocated = create_colocated_worker_cls(
                {role.value: self._worker_class(role) for role in placed}
            )
            started = self.worker_group_cls.start(pool, colocated)
            groups |= {role: started[role.value] for role in placed}
            self.pools.append(started[placed[0].value])
            self.pools[-1].require_shared(self.run_dir / "owner.json")
        policies = (Role.ActorRolloutRef, Role.ActorRollout, Role.ActorRef, Role.Actor)
        self.actor_rollout_wg = next(groups[role] for role in policies if role in groups)
        self.critic_wg, self.reward_model_wg = groups.get(Role.Critic), groups.get(Role.RewardModel)
        if self.reward_model_wg is not None:
            self.reward_model_wg.init_model()
        self.ref_policy_wg = groups.get(Role.RefPolicy, self.actor_rollout_wg)
        for group in (groups[role] for role in (Role.Critic, Role.RefPolicy) if role in groups):
            group.init_model(self.total_training_steps, self.plan)
        # The rollout engine comes last: it sizes its cache by what the others left free.
        trainer = self.config.trainer
        self.actor_rollout_wg.init_model(
            max(self.total_training_steps - trainer.critic_warmup, 1), self.plan
        )
        self.rollout_wg = self.actor_rollout_wg
        if Role.Rollout in groups:
            groups[Role.Rollout].init_model(self.total_training_steps, self.plan)
            self.rollout_wg = Engines(groups[Role.Rollout], self.actor_rollout_wg)
            self.sync_weights()
        if trainer.train_finished_groups and not trainer.deterministic:
            self.rollout_wg = Streamed(self.rollout_wg, self)
        parts = {"actor": self.actor_rollout_wg, "critic": self.critic_wg}
        self.parts = {name: group for name, group in parts.items() if group is not None}
        self.saver = checkpoint.CheckpointSaver(self.run_dir, self.parts, trainer)

    def shutdown(self) -> None:
        """Ends the workers' processes and frees their places; the trainer cannot be used afterwards."""
        if self.ahead is not None:
            self.ahead.threads.shutdown(wait=False, cancel_futures=True)
        with self.taken or ExitStack():
            for pool in self.pools:
                pool.shutdown()
        self.pools, self.taken = [], None

    def _worker_class(self, role: Role) -> ClassWithInitArgs:
        arguments = (
            (self.config,) if role in (Role.Critic, Role.RewardModel) else (self.config, role.value)
        )
        return ClassWithInitArgs(self.role_worker_mapping[role], *arguments)

    # The loop

    def fit(self) -> dict[str, float]:
        """Trains to `total_training_steps`, from the latest checkpoint if there is one; returns the last metrics."""
        trainer = self.config.trainer
        if not self.pools:
            self.init_workers()
        if self.global_steps == 0:
            self.load_checkpoint()
        record_config(self.run_dir, self.config, self.global_steps)
        # A validation alone must not cut the run's files back.
        backends = ["console"] if trainer.val_only else list(trainer.trackers)
        told = (
            trainer.project_name,
            trainer.experiment_name,
            backends,
            asdict(self.config),
            self.run_dir,
        )
        with (
            self.signals,
            Tracking(*told, self.global_steps, self.total_training_steps) as tracking,
        ):
            metrics: dict[str, float] = {}
            first = trainer.val_only or (trainer.val_before_train and self.global_steps == 0)
            if first and (metrics := self.validate()):
                tracking.log(metrics, step=self.global_steps)
            if trainer.val_only:
                return metrics
            if self.global_steps >= self.total_training_steps:
                logger.warning(
                    say("nothing_to_train", step=self.global_steps, last=self.total_training_steps)
                )
            state, self.in_step = self.driver_state(), False
            try:
                for rows in self.training_batches():
                    metrics = self.train_step(rows)
                    last, often = (
                        self.global_steps >= self.total_training_steps,
                        trainer.test_freq > 0,
                    )
                    if last or (often and self.global_steps % trainer.test_freq == 0):
                        metrics |= self.validate()
                    if self.saver.is_due(
                        self.global_steps, self.total_training_steps, metrics["timing_s/step"]
                    ):
                        metrics |= self.save_checkpoint()
                    tracking.log(metrics, step=self.global_steps)
                    self.on_step(metrics)
                    self.saver.poll()
                    state, self.in_step = self.driver_state(), False
                    self.alarms.stop_if_asked()
                    if self.signals.received:
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                self._save_at_the_end(state)
                raise
            self.saver.close()
        return metrics

    def training_batches(self) -> Iterator[Rows | Future[Generated]]:
        """Yields rows, or what is generated of them ahead, for one step at a time, which `global_steps` counts."""
        self.row_stream = self.endless_rows()
        while self.global_steps < self.total_training_steps:
            step, last = self.global_steps + 1, self.total_training_steps
            rows = self.next_rows() if self.ahead is None else self.ahead.take(step, last)
            WATCH.step = self.global_steps = step
            yield rows
        self.row_stream.close()

    def next_rows(self) -> Rows:
        """Draws a step's number of rows."""
        return next(self.row_stream)

    def endless_rows(self) -> Generator[Rows]:
        """Yields a step's number of rows at a time, from `drawn_to` on."""
        while True:
            self.order.start(*self.drawn_to)
            for rows in self.train_dataloader:
                self.drawn_to = self.drawn_to[0], self.drawn_to[1] + self.config.prompts_per_step
                yield rows
            if self.drawn_to[1] == 0:
                raise ValueError(
                    say("no_batch", epoch=self.drawn_to[0], size=self.config.data.train_batch_size)
                )
            self.drawn_to = self.drawn_to[0] + 1, 0

    def train_step(self, rows: Rows | Future[Generated]) -> dict[str, float]:
        """Goes one step on collated rows, from prompts to new weights; returns its metrics."""
        timer = StepTimer()
        with timer("gen"):
            generated = (
                rows.result()
                if isinstance(rows, Future)
                else Generated(*self.generate(rows), self.drawn_to)
            )
        batch, drawn, (self.epoch, self.rows_done) = generated
        return self.learn(batch, timer) | drawn

    def learn(self, batch: DataProto, timer: StepTimer | None = None) -> dict[str, float]:
        """Goes through a step from what `generate` gave to new weights; returns its metrics."""
        timer, metrics = timer or StepTimer(), dict[str, float]()
        # What is written meanwhile is to be there where the rest of the step fails.
        self.saver.poll()
        self.in_step = True
        if "weight_versions" in batch.batch:
            metrics |= leave_out_stale(batch, self.global_steps, self.config.trainer.async_level)
        with timer("step"):
            if isinstance(self.rollout_wg, Streamed):
                batch, own = self.rollout_wg.finish(timer)
            else:
                batch, own = self.with_advantages(batch, timer)
                own |= self._update(batch, timer)
            with timer("update_weights"):
                metrics |= own | self.sync_weights()
        timer.seconds["step"] += timer.seconds.get("gen", 0.0)
        metric_utils.dump(
            batch, self.config.trainer.rollout_data_dir, self.global_steps, self.tokenizer
        )
        self.on_batch(batch)
        metrics = read_mismatch(metrics) | self._step_metrics(batch, timer)
        return metrics | self.alarms.check(batch, metrics, self.global_steps)

    def with_advantages(
        self, batch: DataProto, timer: StepTimer
    ) -> tuple[DataProto, dict[str, float]]:
        """Makes of what was generated what is trained on: rewards, log-probs, values, advantages; with metrics."""
        metrics: dict[str, float] = {}
        batch = arrange(batch, self.plan)
        with timer("reward"):
            wait_for_reward = self._start_reward(batch)
        if self.needs_old_log_probs():
            with timer("old_log_prob"):
                batch, metrics = self._add_old_log_probs(batch, metrics)
        if self.config.need_reference:
            with timer("ref"):
                batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
        if self.critic_wg is not None:
            with timer("values"):
                batch = batch.union(self.critic_wg.compute_values(batch))
        with timer("adv"):
            batch = self.add_rewards(batch, *wait_for_reward())
            metrics |= self._set_rewards(batch)
            return self._add_advantages(batch), metrics

    def _update(self, batch: DataProto, timer: StepTimer) -> dict[str, float]:
        """Updates the critic, and after its warm-up the policy; metrics and alarms are of the batch itself."""
        metrics, learnt = dict[str, float](), batch
        if self.config.algorithm.use_pf_ppo:
            own = self.config.algorithm.pf_ppo
            # No group of prompts has this number.
            seed = seed_for(self.seed, self.global_steps, -2)
            learnt = compute_pf_ppo_reweight_data(batch, own.reweight_method, own.weight_pow, seed)
        if self.critic_wg is not None:
            with timer("update_critic"):
                metrics |= self.critic_wg.update_critic(learnt)
        if self.global_steps > self.config.trainer.critic_warmup:
            policy, shares = self.actor_rollout_wg, self.config.critic.share_backbone
            with timer("update_actor"):
                metrics |= (policy.update_actor_and_values if shares else policy.update_actor)(
                    learnt
                )
        return metrics

    def sync_weights(self) -> dict[str, float]:
        """Sends the weights of this step to the engines; returns what the canaries tell."""
        if self.ahead is not None and self.config.trainer.deterministic:
            # In a run that is to be repeated they come between two batches.
            wait(self.ahead.begun)
        return self.rollout_wg.sync_weights(self.global_steps)

    def on_batch(self, batch: DataProto) -> None:
        """Sees each batch with all its fields, once it is trained on, or scored for validation: a hook to override."""

    def on_step(self, metrics: dict[str, float]) -> None:
        """Sees each step's metrics as they are logged: a hook to override."""

    # The phases of a step

    def prompt_batch(
        self,
        rows: Rows,
        repeat: int,
        first_group: int = 0,
        validate: bool = False,
        step: int | None = None,
    ) -> DataProto:
        """Makes one row per sample of collated rows, with `uid` and what seeds the sampling: B = prompts x repeat."""
        prompts = DataProto.from_single_dict(rows)
        batch, groups = (
            prompts.repeat(repeat, interleave=True),
            range(first_group, first_group + len(prompts)),
        )
        batch.meta_info = self._step_info(validate, step)
        step = batch.meta_info["global_steps"]
        batch.non_tensor_batch |= sample_ids(groups, repeat, step=step, validate=validate)
        return batch

    def _step_info(self, validate: bool, step: int | None = None) -> dict[str, Any]:
        seeded, step = (
            self.config.trainer.deterministic,
            self.global_steps if step is None else step,
        )
        return step_info(step=step, seed=self.seed, seeded=seeded, validate=validate)

    def generate(self, rows: Rows, step: int | None = None) -> tuple[DataProto, dict[str, float]]:
        """Answers the rows' prompts for a step, by default the current one; returns the batch and metrics.

        With `filter_groups` the batch is scored, and has further rows' prompts where a group's rewards do not differ.
        """
        settings = self.config.algorithm.filter_groups
        if settings.enable:
            scored, wanted = self._scored_batches(rows, step), self.config.prompts_per_step
            batch, drawn = collect_varied_groups(scored, settings, wanted)
        else:
            batch, drawn = self._answers(rows, 0, step), {}
        if not self.config.trainer.rollout_n_gpus:
            self.actor_rollout_wg.sleep_rollout()
        return batch, drawn

    def _scored_batches(self, rows: Rows, step: int | None) -> Iterator[DataProto]:
        """Yields the rows' prompts answered and scored, then those of further rows, as they are asked for."""
        for number in itertools.count():
            batch = self._answers(rows, number * self.config.prompts_per_step, step)
            yield self.add_rewards(batch, *self.score(batch, self.reward_fn))
            rows = self.next_rows()

    def _answers(self, rows: Rows, first_group: int, step: int | None) -> DataProto:
        """Answers the rows' prompts `rollout.n` times, and once more greedily where the estimator reads that."""
        prompts = self.prompt_batch(
            rows, self.config.actor_rollout_ref.rollout.n, first_group, step=step
        )
        batch = self._generate_multi_turn_sequences(prompts)
        if "reward_baselines" in self.config.estimator_needs:
            once = self.prompt_batch(rows, 1, first_group, step=step)
            once.meta_info["do_sample"] = False
            greedy = self._generate_multi_turn_sequences(once)
            episodes = EpisodeRows(greedy)
            rewards = episodes.join(self.score(greedy, self.reward_fn)[0]).sum(dim=1).tolist()
            of_group = dict(
                zip(greedy.non_tensor_batch["uid"][episodes.first], rewards, strict=True)
            )
            batch.batch["reward_baselines"] = torch.tensor(
                [of_group[uid] for uid in batch.non_tensor_batch["uid"]]
            )
        return batch

    def _generate_multi_turn_sequences(self, gen_batch: DataProto) -> DataProto:
        """Does the rollout itself; here every prompt is answered once."""
        return self.rollout_wg.generate_sequences(gen_batch)

    def _start_reward(self, batch: DataProto) -> Callable[[], tuple[Tensor, dict[str, list[Any]]]]:
        """Scores the batch, with `launch_reward_fn_async` beside the passes that follow; calling the result waits."""
        # Scored already, to be filtered.
        if "token_level_scores" in batch.batch:
            return lambda: (batch.batch["token_level_scores"], {})
        if self.config.reward_model.launch_reward_fn_async and self.reward_model_wg is None:
            return compute_reward_async(batch, self.reward_fn).result
        done = self.score(batch, self.reward_fn)
        return lambda: done

    def score(
        self, batch: DataProto, reward_fn: RewardFunction
    ) -> tuple[Tensor, dict[str, list[Any]]]:
        """Scores by the reward function, and by the reward model, whose scores are added, or stand alone.

        It stands alone where neither `custom_reward_function` nor an environment gives rewards.
        """
        if self.reward_model_wg is None:
            return compute_reward(batch, reward_fn)
        # Of several rows of an episode the last one's score is the episode's.
        last = [rows[-1] for rows in EpisodeRows(batch).rows]
        modelled = torch.zeros(batch.batch["response_mask"].shape)
        modelled[last] = self.reward_model_wg.compute_rm_score(batch).batch["rm_scores"][last]
        if self.config.custom_reward_function.path is None and not self.config.environments:
            return modelled, {}
        scores, infos = compute_reward(batch, reward_fn)
        return scores + modelled, infos

    def needs_old_log_probs(self) -> bool:
        """Says whether something reads them: in a step of a single update its own log-probs are the old ones."""
        algorithm, correction = self.config.algorithm, self.config.algorithm.rollout_correction
        needed = {"old_log_probs", "sum_pi_squared", "rollout_is_weights"} & {
            *self.config.estimator_needs
        }
        corrected = correction.corrects and not correction.weighs_alone
        read = needed or algorithm.use_kl_in_reward or corrected or self.plan.actor.updates > 1
        # Values of a shared model come from the same pass.
        return self.config.critic.share_backbone or (read and not correction.bypass_mode)

    def _add_old_log_probs(
        self, batch: DataProto, metrics: dict[str, float]
    ) -> tuple[DataProto, dict[str, float]]:
        """Adds `old_log_probs`; measures the entropy, and how far the engine's probabilities are from the trainer's.

        Tokens are then weighed, or left out, as `algorithm.rollout_correction` says.
        """
        batch.meta_info["sum_pi_squared"] = "sum_pi_squared" in self.config.estimator_needs
        result = self.actor_rollout_wg.compute_log_prob(batch)
        entropies = result.pop(batch_keys=["entropys"]).batch["entropys"]
        batch = batch.union(result)
        tensors, mask = batch.batch, batch.batch["response_mask"]
        metrics["actor/old_entropy"] = masked_mean(entropies, mask).item()
        if "rollout_log_probs" in tensors:
            compared = tensors["old_log_probs"], tensors["rollout_log_probs"], mask
            shares, largest = measure_mismatch(*compared, turn_ids=tensors.get("turn_ids"))
            metrics |= {name: value.item() for name, value in (shares | largest).items()}
        if (
            correction := self.config.algorithm.rollout_correction
        ).corrects and not correction.bypass_mode:
            metrics |= apply_correction(batch, correction)
        return batch, metrics

    def add_rewards(
        self, batch: DataProto, scores: Tensor, infos: dict[str, list[Any]]
    ) -> DataProto:
        """Sets `token_level_scores` (B, R), and what the reward function said beside them as columns."""
        if self.config.algorithm.rollout_correction.corrects:
            # What was left out since they were given must not take them along.
            scores = move_to_sampled_tokens(scores, batch.batch["response_mask"])
        batch.batch["token_level_scores"] = scores  # (B, R)
        batch.non_tensor_batch |= {
            f"reward_info/{name}": np.array(own, dtype=object) for name, own in infos.items()
        }
        return batch

    def _set_rewards(self, batch: DataProto) -> dict[str, float]:
        """Sets `token_level_rewards`, the scores less the KL where `use_kl_in_reward` asks for it; returns metrics."""
        if self.config.algorithm.use_kl_in_reward:
            return apply_kl_penalty(batch, self.kl_controller, self.config.algorithm.kl_penalty)[1]
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        return {}

    def _add_advantages(self, batch: DataProto) -> DataProto:
        algorithm, actor = self.config.algorithm, self.config.actor_rollout_ref.actor
        if (
            actor.loss_agg_counts == "episodes"
            and (shares := EpisodeRows(batch).shares()) is not None
        ):
            batch.batch["episode_share"] = shares
        if self.config.agent.observation_loss_coef:
            batch.batch["observation_mask"] = observation_mask(batch)
        if (
            algorithm.rollout_correction.bypass_mode
            and "old_log_probs" in self.config.estimator_needs
        ):
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        settings = algorithm.gamma, algorithm.lam, self.config.actor_rollout_ref.rollout.n
        own = algorithm.norm_adv_by_std_in_grpo, algorithm, self.estimator_state
        return compute_advantage(batch, algorithm.adv_estimator, *settings, *own)

    def _step_metrics(self, batch: DataProto, timer: StepTimer) -> dict[str, float]:
        metrics: dict[str, float] = {
            "training/global_step": self.global_steps,
            "training/epoch": self.epoch,
        }
        metrics |= metric_utils.compute_data_metrics(batch, use_critic="values" in batch.batch)
        metrics |= metric_utils.compute_timing_metrics(batch, timer.seconds)
        return metrics | metric_utils.compute_throughout_metrics(
            batch, timer.seconds, self.config.trainer.all_ranks
        )

    def validate(self) -> dict[str, float]:
        """Scores the validation prompts, see `metric_utils.validate`."""
        return metric_utils.validate(self)

    # Checkpoints

    def _save_at_the_end(self, state: dict[str, Any]) -> None:
        """Saves a run that is interrupted, unless the weights are in the midst of a step, and says how it goes on."""
        if self.in_step:
            return
        if self.saver.step < state["global_steps"]:
            self.save_checkpoint(state)
        self.saver.close()
        if self.saver.step:
            logger.warning(say("goes_on", step=self.saver.step, run_dir=self.run_dir))

    def save_checkpoint(self, state: dict[str, Any] | None = None) -> dict[str, float]:
        """Begins to save the run as it is now, the driver as in `state`; returns the time that training waited."""
        timer, state = StepTimer(), state or self.driver_state()
        with timer("save_checkpoint"):
            self.saver.begin(state["global_steps"], state)
        return {"timing_s/save_checkpoint": timer.seconds["save_checkpoint"]}

    def driver_state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the driver, as JSON holds it."""
        place = {
            "global_steps": self.global_steps,
            "epoch": self.epoch,
            "rows_done": self.rows_done,
        }
        moved = {"kl_coef": float(self.kl_controller.value), "alarms": self.alarms.state_dict()}
        in_flight = {} if self.ahead is None else {"in_flight": list(self.ahead.begun)}
        return place | moved | {"estimator": dict(self.estimator_state)} | in_flight

    def load_driver_state(self, state: Mapping[str, Any]) -> None:
        """Takes a checkpoint's `driver_state` over."""
        self.global_steps, self.epoch = state["global_steps"], state["epoch"]
        self.rows_done, self.kl_controller.value = state["rows_done"], state["kl_coef"]
        self.drawn_to = self.epoch, self.rows_done
        self.estimator_state = dict(state.get("estimator", {}))
        if "alarms" in state:
            self.alarms.load_state_dict(state["alarms"])

    def load_checkpoint(self, folder: Path | None = None) -> None:
        """Goes on from this checkpoint, or that of the config, if there is one; a part that it lacks starts anew."""
        trainer = self.config.trainer
        needs = ("actor",) if trainer.resume_with_changes else tuple(self.parts)
        mode, path = (
            (trainer.resume_mode, trainer.resume_from_path)
            if folder is None
            else ("resume_path", str(folder))
        )
        folder = checkpoint.find_checkpoint(self.run_dir, mode, path, needs)
        if folder is None:
            if not trainer.val_only:
                checkpoint.set_aside(self.run_dir)
            return
        for name, group in self.parts.items():
            if (folder / name).exists():
                group.load_checkpoint(str(folder / name))
            else:
                logger.warning("%s holds no %s, which starts anew", folder, name)
        self.load_driver_state(checkpoint.load_driver_state(folder))
        if self.ahead is not None:
            self.ahead.restore(folder)
        self.row_stream = self.endless_rows()
        self.sync_weights()
        logger.info("resumed from %s", folder)
