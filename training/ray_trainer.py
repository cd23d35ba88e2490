"""The trainer: `fit` is the run, `train_step` one step of it, phase by phase.

    prompts -> generate -> reward -> log-probs, values -> advantages -> updates -> weights

The driver holds the batch (a DataProto) and the order of things; models live in worker groups,
which it only calls. What a phase does stands in `step_phases.py`. Asynchrony comes in as objects
behind the calls of `train_step`: the step source may generate steps ahead
(`async_rollout/prefetch.py`), the engines may have ranks of their own (`dedicated_engines.py`), and
groups may be trained on as they end (`group_streaming.py`). Invariant: everything random in a step
derives from (run seed, step), and the data order from (run seed, epoch), so that a checkpoint needs
no generator's state.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from data.batch_fields import GIVEN_FIELDS
from data.learning_sampler import OUTCOMES, TASK_INDEX, GroupOutcome
from data.own_names import keep_own
from data.own_process import one_process
from data.plain_state import kept_state
from data.prompt_rows import PromptCollator
from data.prompt_rows import collate_fn as default_collate_fn
from data.protocol import DataProto
from data.seeds import sample_ids, step_info
from data.texts import with_printable_names
from data.watchdog import WATCHDOG
from training.advantage import apply_kl_penalty as apply_kl_penalty
from training.advantage import compute_advantage as compute_advantage
from training.advantage import compute_response_mask as compute_response_mask
from training.async_rollout.group_streaming import stream_groups, streams_groups
from training.async_rollout.prefetch import Prefetch
from training.batch.dynamic_sampling import DROPPED, collect_varied_groups
from training.config import PPOConfig
from training.config.leaves import anchored
from training.config.loader import read_config
from training.config.side_services import side_names
from training.episode_batches import (
    as_tasks,
    close_environments,
    described,
    environment_rewards,
    metrics_of_episodes,
)
from training.greedy_baselines import add_greedy_baselines
from training.observers import ObservedRun, Observer, RunStopped, StepReport
from training.observers_of_run import open_observers
from training.outcomes import as_plain, from_plain, outcomes_of
from training.reward import RewardFunction, lend_tokenizer
from training.rollout_mismatch import read_mismatch
from training.run.checkpoint import CheckpointSaver
from training.run.checkpoint_contents import ACTOR, DriverSnapshot, DriverState, load_driver_state
from training.run.checkpoint_folders import find_checkpoint, set_aside
from training.run.data_position import (
    DataPosition,
    Rows,
    make_val_dataloader,
    open_row_stream,
)
from training.run.dumps import dump
from training.run.metrics.model_metrics import take_model_metrics
from training.run.metrics.step_metrics import compute_step_metrics
from training.run.metrics.textless_ids import textless_ids
from training.run.ray_cluster import ray_cluster
from training.run.recorded_config import record_config
from training.run.resume_changes import refusing_what_does_not_fit
from training.run.roles import (
    ResourcePoolManager,
    Role,
    default_resource_pool,
    default_role_mapping,
)
from training.run.roles import need_critic as need_critic
from training.run.roles import need_reference_policy as need_reference_policy
from training.run.roles import need_reward_model as need_reward_model
from training.run.run_lock import run_lock
from training.run.sampled_tokens import SAMPLED_TOKENS, SampledTokens
from training.run.signals import EndingSignals
from training.run.step_source import (
    GeneratedStep,
    OnDemandSource,
    PendingStep,
    StepSource,
    first_cause_told,
    warn_if_nothing_to_train,
)
from training.run.step_timer import StepTimer
from training.run.worker_group_protocol import RolloutGroup
from training.step_additions import add_all, open_step_additions
from training.step_phases import StepPhases
from training.validation import validate
from training.worker_groups import WorkerGroups, load_models, start_workers
from workers.ranks.local_group import LocalWorkerGroup
from workers.ranks.ray_group import RayWorkerGroup

logger = logging.getLogger(__name__)
Metrics = dict[str, float]
Collate = Callable[[list[dict[str, Any]]], Rows]


class PPOTrainer:
    """Trains by PPO and its relatives, over worker groups.

    Args:
        config: the run's configuration, typed, or an OmegaConf or a mapping (see `read_config`).
        tokenizer: the policy's.
        role_worker_mapping: worker class per role; None: what the config needs.
        resource_pool_manager: pool per role; None: one pool of all ranks.
        ray_worker_group_cls: how workers are run; None: as `trainer.launcher` says.
        processor, device_name: kept for subclasses, not used; for verl's sake.
        reward_fn, val_reward_fn: DataProto -> rewards, see `training.reward.compute_reward`.
        train_dataset, val_dataset: torch Datasets of prompts, as token ids or as text; None: no
            validation.
        collate_fn: list of rows -> dict of tensors and object arrays; None:
            `data.rl_dataset.collate_fn`.
        train_sampler: order of the training rows; None: as `data.shuffle` says.
        observers: what watches the run, in place of the features' observers and of
            `trainer.observers`; None: as the config says.

    Attributes:
        global_steps: the step that is being made, or was made last.
        position: the data position behind the rows that were trained on; `row_stream.position` may
            be ahead of it.
        in_step: a step's update has begun, which must come to its end before a signal ends the run.
        in_update: weights are in the midst of a step, and cannot be saved.
        multi_turn_rollout: plays the agents of a subclass, which makes it in `init_workers`.
        val_generations: the last validation's answers, as many as `trainer.log_val_generations`
            asks for.
        observers: all that watches the run (training/observers.py).
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
        observers: Sequence[Observer] | None = None,
    ) -> None:
        config = anchored(read_config(config, own_data=True)).with_correction
        if reward_fn is None or train_dataset is None:
            raise ValueError("RayPPOTrainer needs reward_fn and train_dataset")
        self.config: PPOConfig = config
        self.tokenizer = tokenizer
        self.processor = processor
        self.multi_turn_rollout: Any = None
        self.role_worker_mapping = role_worker_mapping or default_role_mapping(config)
        self.resource_pool_manager = resource_pool_manager or default_resource_pool(config)
        default_group_cls = RayWorkerGroup if config.trainer.use_ray else LocalWorkerGroup
        self.worker_group_cls = ray_worker_group_cls or default_group_cls
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn or reward_fn
        for function in (self.reward_fn, self.val_reward_fn):
            lend_tokenizer(function, tokenizer)
        self.run_dir = Path(config.trainer.run_dir).absolute()
        self.seed = config.data.run_seed
        self.plan = config.batch_plan

        self.global_steps = 0
        self.position = DataPosition()
        self.in_step = False
        self.in_update = False
        self.sampled_tokens = SampledTokens(config.trainer.total_sampled_tokens)
        # Of a step whose groups were chosen as it was generated.
        self.outcomes_of_generation: list[GroupOutcome] = []
        self.val_generations: list[dict[str, Any]] = []
        self.signals = EndingSignals(postpone=lambda: self.in_step)
        # Gives back, in the end, the run's folder, Ray and the workers' processes.
        self.resources: ExitStack | None = None
        self.groups: WorkerGroups | None = None

        collator = self._collator(collate_fn or default_collate_fn)
        self.row_stream = open_row_stream(config, train_dataset, collator, train_sampler)
        self.train_dataloader = self.row_stream.loader
        self.val_dataloader = make_val_dataloader(config, val_dataset, collator)
        batches_per_epoch = self.row_stream.batches_per_epoch
        steps_of_all_epochs = config.trainer.total_epochs * batches_per_epoch
        self.total_training_steps = config.trainer.total_training_steps or steps_of_all_epochs
        self.textless_ids = textless_ids(tokenizer) if tokenizer is not None else []
        self.observers = open_observers(self._observed_run(batches_per_epoch), observers)
        self.step_source = self._make_step_source()

    def _collator(self, collate_fn: Collate) -> Callable[..., Rows]:
        return PromptCollator(self.config.data, self.tokenizer, collate_fn)

    def _observed_run(self, batches_per_epoch: int) -> ObservedRun:
        """Says what observers may know of the run."""
        return ObservedRun(
            config=self.config,
            run_dir=self.run_dir,
            tokenizer=self.tokenizer,
            steps_per_epoch=batches_per_epoch,
            textless_ids=self.textless_ids,
            paid_by_environment=self._is_paid_by_environment(validate=False),
            val_paid_by_environment=self._is_paid_by_environment(validate=True),
            total_steps=self.total_training_steps,
            sampler=self.row_stream.order.inner,
        )

    def _is_paid_by_environment(self, *, validate: bool) -> bool:
        """Checks whether the environment's rewards are the scores, and nothing else is."""
        return False

    def _make_step_source(self) -> StepSource:
        if self.config.trainer.async_level:
            return Prefetch(self.config, self.row_stream, self.generate, self.on_restored)
        return OnDemandSource(self.row_stream, self.generate)

    # Workers

    def init_workers(self) -> None:
        """Opens the run and builds every worker group with its models; `fit` does so by itself."""
        resources = self.open_run()
        started = start_workers(
            self.config,
            self.role_worker_mapping,
            self.resource_pool_manager,
            self.worker_group_cls,
            run_dir=self.run_dir,
            resources=resources,
        )
        groups = load_models(started, self.config, self.total_training_steps)
        self.groups = groups
        self.actor_rollout_wg = groups.policy
        self.ref_policy_wg = groups.reference
        self.critic_wg = groups.critic
        self.reward_model_wg = groups.reward_model
        self.rollout_wg: RolloutGroup = groups.engines
        self.phases = StepPhases(self.config, groups, self.reward_fn)
        if streams_groups(self.config):
            self.phases, self.rollout_wg = stream_groups(self.config, groups, self.reward_fn)
        self.additions = open_step_additions(self.config, self.tokenizer)
        self.saver = CheckpointSaver(
            self.run_dir,
            groups.by_checkpoint_folder(),
            self.config.trainer,
            on_saved=self.observers.checkpoint_saved,
        )

    def open_run(self) -> ExitStack:
        """Locks the run's folder and starts Ray where the config asks for it, once.

        Returns what gives both back.
        """
        if self.resources is None:
            self.resources = ExitStack()
            self.resources.enter_context(run_lock(self.run_dir))
            self.resources.enter_context(ray_cluster(self.config))
        return self.resources

    def shutdown(self) -> None:
        """Closes environments and ends the workers' processes; the trainer is of no use then."""
        # From the last to the first, each also where another raises.
        with ExitStack() as closing:
            if self.resources is not None:
                closing.callback(self.resources.close)
                self.resources = None
            closing.callback(self.observers.closed)
            closing.callback(self.row_stream.close)
            closing.callback(self.step_source.shutdown)
            closing.callback(close_environments, self.multi_turn_rollout)

    # The loop

    def fit(self) -> Metrics:
        """Trains to `total_training_steps`, from the latest checkpoint on; returns last metrics."""
        trainer = self.config.trainer
        if self.groups is None:
            self.init_workers()
        if self.global_steps == 0:
            self.load_checkpoint()
        with self.signals, self._watched(), first_cause_told(self.step_source.in_flight):
            metrics: Metrics = {}
            if trainer.val_only or (trainer.val_before_train and self.global_steps == 0):
                metrics = self._validate()
                self.observers.step_logged(metrics)
            if trainer.val_only:
                return metrics
            warn_if_nothing_to_train(self.global_steps, self.last_step, self.sampled_tokens)
            self._end_step()
            with self.saver.ends_saves(
                lambda: None if self.in_step else self.snapshot, self._whole_behind
            ):
                for step in self.training_batches():
                    with one_process("code that ran in a step"):
                        metrics = self.train_step(step)
                    if self._validates_now():
                        metrics |= self._validate()
                    step_s = metrics["timing_s/step"]
                    if self.saver.is_due(self.global_steps, self.last_step, step_s):
                        metrics |= self.save_checkpoint()
                    self.observers.step_logged(metrics)
                    with one_process("on_step"):
                        self.on_step(metrics)
                    self.saver.poll()
                    self._end_step()
                    self.observers.stop_if_asked()
                    if self.signals.received:
                        raise KeyboardInterrupt
        return metrics

    def _whole_behind(self, error: Exception) -> DriverSnapshot | None:
        """Returns the end of the last step, where an error left its weights as they were.

        None where an observer ended the run as failed: what it saw may be the weights' fault.
        """
        is_stopped = isinstance(error, RunStopped) and error.exit_code != 0
        return None if self.in_update or is_stopped else self.snapshot

    @property
    def last_step(self) -> int:
        """Returns the number of the run's last step, as far as it is known before it is made."""
        if self.sampled_tokens.are_enough:
            return self.global_steps
        return self.total_training_steps

    def _watched(self) -> AbstractContextManager[None]:
        """Records the settings; observers hear that the steps of the block are made."""
        run = self.observers.run
        run.total_steps = self.total_training_steps
        run.changes = record_config(self.run_dir, self.config, self.global_steps)
        return self.observers.watching(self.global_steps, self._steps_in_flight())

    def _validate(self) -> Metrics:
        """Validates, and tells observers."""
        with one_process("code that ran in validation"):
            metrics = with_printable_names(self.validate())
        self.observers.validated(self.global_steps, metrics, self.val_generations)
        return metrics

    def training_batches(self) -> Iterator[PendingStep]:
        """Yields one step at a time, to be generated or under way; `global_steps` counts it."""
        while self.global_steps < self.last_step:
            number = self.global_steps + 1
            with one_process("code that gives the data's rows"):
                step = self.step_source.next_step(number, self.total_training_steps)
            self.global_steps = number
            WATCHDOG.step = number
            yield step
        self.row_stream.close()

    def train_step(self, step: PendingStep) -> Metrics:
        """Makes one step, from its prompts to new weights; returns its metrics.

        Args:
            step: what `training_batches` yields.
        """
        timer = StepTimer()
        phases = self.phases
        with timer("step"):
            with timer("gen"):
                generated = step.result()
            batch, metrics = self._begin_update(generated)
            batch = phases.arrange(batch)
            with timer("reward"):
                wait_for_reward = phases.start_reward(batch)
            if phases.needs_old_log_probs() or phases.weighs_several_rows(batch):
                with timer("old_log_prob"):
                    batch, mismatch = phases.add_old_log_probs(batch)
                    metrics |= mismatch
            if phases.needs_reference():
                with timer("ref"):
                    batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
            if self.critic_wg is not None:
                with timer("values"):
                    batch = batch.union(self.critic_wg.compute_values(batch))
            with timer("adv"):
                scores, infos = wait_for_reward()
                self.observers.scored(batch, scores)
                batch = phases.add_rewards(batch, scores, infos)
                metrics |= phases.apply_kl_penalty(batch)
                batch = phases.add_advantages(batch)
            samples = phases.resample(batch, self.global_steps)
            self.in_update = True
            if self.critic_wg is not None:
                with timer("update_critic"):
                    metrics |= self.critic_wg.update_critic(samples)
            if self.global_steps > self.config.trainer.critic_warmup:
                samples, added = add_all(self.additions, samples, self.actor_rollout_wg, timer)
                metrics |= added
                with timer("update_actor"):
                    metrics |= phases.update_actor(samples)
            with timer("update_weights"):
                metrics |= self.sync_weights()
        dump(batch, self.config.trainer.rollout_data_dir, self.global_steps, self.tokenizer)
        self.row_stream.learn(batch, self._outcomes_of_step(batch))
        self.on_batch(batch)
        metrics = with_printable_names(read_mismatch(metrics) | self._step_metrics(batch, timer))
        report = StepReport(
            step=self.global_steps,
            batch=batch,
            updated=samples,
            metrics=metrics,
            records=phases.take_probe_records(),
        )
        return metrics | self.observers.step_made(report)

    def learn(self, batch: DataProto) -> Metrics:
        """Makes a step of a batch that `generate` gave; returns its metrics."""
        return self.train_step(GeneratedStep(batch, {}, self.position))

    def _begin_update(self, generated: GeneratedStep) -> tuple[DataProto, Metrics]:
        """Marks the update as begun; returns batch, groups that are too old masked, and metrics."""
        self.position = generated.position
        # The rest of the step may fail: what is written meanwhile stays.
        self.saver.poll()
        self.in_step = True
        staleness = self.step_source.mask_stale_groups(generated.batch, self.global_steps)
        self.sampled_tokens.begin(generated.batch)
        self.observers.update_begins(generated.batch, self.global_steps)
        generated.batch.meta_info.pop(DROPPED, None)
        self.outcomes_of_generation = from_plain(generated.batch.meta_info.pop(OUTCOMES, ()))
        return generated.batch, generated.metrics | staleness

    def _outcomes_of_step(self, batch: DataProto) -> list[GroupOutcome]:
        """Says what came of the step's groups, where the sampler is to know it."""
        if not self.row_stream.learns or TASK_INDEX not in batch.non_tensor_batch:
            return []
        return self.outcomes_of_generation or outcomes_of(batch)

    def _end_step(self) -> None:
        """Keeps what a checkpoint of this step would hold of the driver."""
        self.snapshot = self.take_snapshot()
        self.in_step = False
        self.in_update = False

    def sync_weights(self) -> Metrics:
        """Brings the weights of this step to the engines; returns the canaries' metrics."""
        self.step_source.wait_for_begun_steps()
        return self.rollout_wg.sync_weights(self.global_steps)

    def on_batch(self, batch: DataProto) -> None:
        """Sees each batch once it is trained on, or scored for validation: a hook to override."""

    def on_step(self, metrics: Metrics) -> None:
        """Sees each step's metrics as they are logged: a hook to override."""

    def on_restored(self, batch: DataProto) -> None:
        """Sees each batch that a checkpoint had in flight: a hook to override."""

    # Generation

    def prompt_batch(
        self,
        rows: Rows,
        repeat: int,
        first_group: int = 0,
        validate: bool = False,
        step: int | None = None,
    ) -> DataProto:
        """Makes `repeat` rows of each collated row: B = prompts x repeat.

        They have a `uid` for each prompt, and what seeds the sampling.
        """
        own = {name: column for name, column in rows.items() if name != TASK_INDEX}
        prompts = DataProto.from_single_dict(own)
        prompts.non_tensor_batch = keep_own(
            prompts.non_tensor_batch, GIVEN_FIELDS, "the dataset's rows: a column"
        )
        if TASK_INDEX in rows:
            prompts.non_tensor_batch[TASK_INDEX] = rows[TASK_INDEX]
        batch = prompts.repeat(repeat, interleave=True)
        batch.meta_info = self._step_info(validate, step)
        groups = range(first_group, first_group + len(prompts))
        batch.non_tensor_batch |= sample_ids(
            groups, repeat, step=batch.meta_info["global_steps"], validate=validate
        )
        return batch

    def _step_info(self, validate: bool, step: int | None = None) -> dict[str, Any]:
        """Makes the meta_info of a batch of this step, by default the current one."""
        return step_info(
            step=self.global_steps if step is None else step,
            seed=self.seed,
            seeded=self.config.trainer.deterministic,
            validate=validate,
        )

    def generate(self, rows: Rows, step: int | None = None) -> tuple[DataProto, Metrics]:
        """Generates the batch of a step, by default the current one; returns batch and metrics.

        With `filter_groups` the batch is scored, and has further rows' prompts where a group's
        rewards do not differ.
        """
        number = self.global_steps if step is None else step
        with self.observers.generating(number, validate=False):
            batch, metrics = self._generate_batch(rows, step)
        batch.meta_info[SAMPLED_TOKENS] = self.sampled_tokens.take(number)
        self.rollout_wg.sleep_rollout()
        return batch, metrics

    def _generate_batch(self, rows: Rows, step: int | None) -> tuple[DataProto, Metrics]:
        settings = self.config.algorithm.filter_groups
        if not settings.enable:
            return self._answers(rows, 0, step), {}
        outcomes: list[GroupOutcome] = []
        scored_batches = self._scored_batches(rows, step, outcomes)
        batch, metrics = collect_varied_groups(
            scored_batches, settings, self.config.prompts_per_step
        )
        if outcomes:
            batch.meta_info[OUTCOMES] = as_plain(outcomes)
        return batch, metrics

    def _scored_batches(
        self, rows: Rows, step: int | None, outcomes: list[GroupOutcome]
    ) -> Iterator[DataProto]:
        """Yields the rows' prompts answered and scored, then those of further rows as asked for.

        A further batch holds further groups of the same step.

        Args:
            outcomes: what came of each group is added to it, where the sampler is to know it.
        """
        for number in itertools.count():
            batch = self._answers(rows, number * self.config.prompts_per_step, step)
            scores, infos = self.score(batch, self.reward_fn)
            scored = self.phases.add_rewards(batch, scores, infos)
            self.observers.scored(scored, scores)
            if TASK_INDEX in scored.non_tensor_batch:
                outcomes += outcomes_of(scored)
            yield scored
            number_of_step = self.global_steps if step is None else step
            rows = self.row_stream.draw(number_of_step, so_far=outcomes)

    def _answers(self, rows: Rows, first_group: int, step: int | None) -> DataProto:
        """Answers the rows' prompts `rollout.n` times each.

        Where the estimator reads that, they are answered once more greedily, for
        `reward_baselines`.
        """
        samples = self.config.actor_rollout_ref.rollout.n
        batch = self.play(self.prompt_batch(rows, samples, first_group, step=step))
        if "reward_baselines" in self.config.estimator_needs:
            add_greedy_baselines(self, batch, rows, first_group, step)
        return batch

    def play(self, prompts: DataProto) -> DataProto:
        """Answers prompts, or plays described episodes, and tells observers."""
        batch = self._generate_multi_turn_sequences(prompts)
        self.sampled_tokens.played(batch, prompts.meta_info)
        self.observers.played(batch)
        return batch

    def _generate_multi_turn_sequences(self, gen_batch: DataProto) -> DataProto:
        """Runs the rollout itself; here every prompt is answered once."""
        return self.rollout_wg.generate_sequences(gen_batch)

    def score(
        self, batch: DataProto, reward_fn: RewardFunction
    ) -> tuple[Tensor, dict[str, list[Any]]]:
        """Scores a batch by the reward function and the reward model; see `StepPhases.score`."""
        return self.phases.score(batch, reward_fn)

    # Metrics and validation

    def validate(self) -> Metrics:
        """Scores the validation prompts, see `training.validation`."""
        return validate(self)

    def _step_metrics(self, batch: DataProto, timer: StepTimer) -> Metrics:
        textless = self.textless_ids
        return {
            "training/global_step": self.global_steps,
            "training/epoch": self.position.epoch,
            "training/sampled_tokens": self.sampled_tokens.so_far,
            **compute_step_metrics(batch, timer.seconds, self.config.trainer.all_ranks, textless),
            **take_model_metrics(side_names(self.config), batch),
        }

    def _validates_now(self) -> bool:
        """Checks whether this step is the last, or one of those that `test_freq` names."""
        frequency = self.config.trainer.test_freq
        is_last = self.global_steps >= self.last_step
        return is_last or (frequency > 0 and self.global_steps % frequency == 0)

    # Checkpoints

    def save_checkpoint(self, snapshot: DriverSnapshot | None = None) -> Metrics:
        """Begins to save the run, the driver as in `snapshot`, by default as it is now.

        Returns: the time for which training waited.
        """
        timer = StepTimer()
        snapshot = snapshot or self.take_snapshot()
        with timer("save_checkpoint"):
            self.saver.begin(snapshot)
        return {"timing_s/save_checkpoint": timer.seconds["save_checkpoint"]}

    def take_snapshot(self) -> DriverSnapshot:
        """Returns what a checkpoint keeps of the driver as it is now."""
        return DriverSnapshot(self.driver_state(), self.step_source.in_flight())

    def driver_state(self) -> DriverState:
        """Returns the entries of a checkpoint's `data.pt`.

        It is called at the end of every step: an interrupted run saves the last one.

        Raises:
            CannotSave: a user's estimator or sampler keeps what no checkpoint can hold.
        """
        return DriverState(
            global_steps=self.global_steps,
            epoch=self.position.epoch,
            rows_done=self.position.rows_done,
            sampled_tokens=self.sampled_tokens.so_far,
            kl_coef=float(self.phases.kl_controller.value),
            observers=self.observers.state_dict(),
            estimator=kept_state(
                self.phases.estimator_state, "the advantage estimator's state", dicts_only=True
            ),
            sampler=kept_state(self.row_stream.order.state_dict(), "the sampler's state_dict()"),
        )

    def load_driver_state(self, state: DriverState) -> None:
        """Goes on from a checkpoint's `driver_state`."""
        self.global_steps = state.global_steps
        self.sampled_tokens.so_far = state.sampled_tokens
        self.position = state.position
        self.row_stream.seek(state.position)
        self.row_stream.order.load_state_dict(state.sampler)
        self.phases.kl_controller.value = state.kl_coef
        self.phases.estimator_state = dict(state.estimator)
        self.observers.load_state_dict(state.observers)

    def _steps_in_flight(self) -> list[int]:
        """Lists the steps that are generated whole ahead of their turn."""
        steps = []
        for step in self.step_source.in_flight():
            if step.done() and step.exception() is None:
                steps.append(int(step.result().batch.meta_info["global_steps"]))
        return steps

    def load_checkpoint(self, folder: Path | None = None) -> None:
        """Goes on from this checkpoint, or the one that the config names or finds, if any.

        A model that it lacks starts anew.
        """
        trainer = self.config.trainer
        needed = (ACTOR,) if trainer.resume_with_changes else tuple(self.saver.groups)
        checkpoint = find_checkpoint(
            self.run_dir, trainer.resume_mode, trainer.resume_from_path, needed, folder=folder
        )
        if checkpoint is None:
            if not trainer.val_only:
                set_aside(self.run_dir)
            self.observers.went_to(0)
            return
        state = load_driver_state(checkpoint)
        with refusing_what_does_not_fit(checkpoint, state.global_steps, self.config):
            self.saver.load_groups(checkpoint, state.global_steps)
        self.load_driver_state(state)
        self.step_source.restore(checkpoint)
        self.observers.went_to(self.global_steps, self._steps_in_flight())
        self.sync_weights()
        logger.info("resumed from %s", checkpoint)


class RayPPOTrainer(PPOTrainer):
    """The trainer that users extend, as verl's guides do: a subclass may play agents by itself.

    A subclass that overrides `_generate_multi_turn_sequences` needs no train_dataset (it plays
    `agent.agent_length` tasks a step), nor a reward_fn (the environments' rewards). What its
    `multi_turn_rollout` plays, a `SyncMultiTurnRollout`, is described to it and measured.
    """

    plays_by_itself = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_generate_multi_turn_sequences" in vars(cls):
            cls.plays_by_itself = True

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
        **kwargs: Any,
    ) -> None:
        self.plays_tasks = self.plays_by_itself and train_dataset is None
        if self.plays_tasks:
            config = read_config(config, own_data=True, own_agents=True)
            train_dataset = range(config.prompts_per_step)
            reward_fn = reward_fn or environment_rewards
        super().__init__(
            config,
            tokenizer,
            role_worker_mapping,
            resource_pool_manager,
            ray_worker_group_cls,
            processor,
            reward_fn,
            val_reward_fn,
            train_dataset,
            **kwargs,
        )

    def _collator(self, collate_fn: Collate) -> Callable[..., Rows]:
        return as_tasks if self.plays_tasks else super()._collator(collate_fn)

    def prompt_batch(
        self,
        rows: Rows,
        repeat: int,
        first_group: int = 0,
        validate: bool = False,
        step: int | None = None,
    ) -> DataProto:
        """Makes `repeat` rows of each collated row: prompts, or what a rollout is to play."""
        prompts = super().prompt_batch(rows, repeat, first_group, validate, step)
        return described(prompts, repeat, first_group, rollout=self.multi_turn_rollout)

    def _step_metrics(self, batch: DataProto, timer: StepTimer) -> Metrics:
        episodes = metrics_of_episodes(self.multi_turn_rollout, self.global_steps)
        return super()._step_metrics(batch, timer) | episodes
