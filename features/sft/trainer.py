"""Trains on rows that are given: the run, its checkpoints and its page are those of any run.

    rows -> a step's rows, in the order of the data -> one update of the policy -> metrics

Invariant: a step's rows follow from the data position and the run's seed, so that a run that was
killed goes on bitwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.chat_templates import pad_token_id
from data.protocol import DataProto
from data.seeds import step_info
from data.texts import with_printable_names
from features.sft.batches import batch_of
from features.sft.data_files import fingerprint
from features.sft.loss import LOSS
from features.sft.turns import TrainedRow
from features.sft.worker import SFTWorker
from training.config import PPOConfig
from training.observers import RunStopped, StepReport
from training.ray_trainer import PPOTrainer
from training.run.checkpoint_contents import DriverState
from training.run.checkpoint_folders import CannotResume
from training.run.exit_codes import MEND
from training.run.metrics.step_metrics import compute_throughout_metrics, compute_timing_metrics
from training.run.roles import TRAINING_POOL, ResourcePoolManager, Role
from training.run.step_source import PendingStep
from training.run.step_timer import StepTimer

Metrics = dict[str, float]
# So many steps in a row without a finite gradient end the run.
MOST_LOST = 5
# In the checkpoint's state of the data: which rows the run learns.
ROWS = "sft_rows"


class SFTTrainer(PPOTrainer):
    """Trains the policy on rows.

    Args:
        config: as `sft_config` makes it.
        rows: what is learnt; val_rows: what is held out, maybe nothing.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[TrainedRow],
        val_rows: Sequence[TrainedRow],
    ) -> None:
        self.pad_id = pad_token_id(tokenizer)
        self.rows_fingerprint = fingerprint(rows)
        self.val_rows = val_rows
        self.lost_steps = 0
        ranks = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
        super().__init__(
            config,
            tokenizer,
            role_worker_mapping={Role.Actor: SFTWorker},
            resource_pool_manager=ResourcePoolManager(
                {TRAINING_POOL: ranks}, {Role.Actor: TRAINING_POOL}
            ),
            reward_fn=_no_rewards,
            train_dataset=rows,
        )

    def _collator(self, collate_fn: Any) -> Callable[..., dict[str, Any]]:
        return _as_rows

    def generate(
        self, rows: Mapping[str, Any], step: int | None = None
    ) -> tuple[DataProto, Metrics]:
        """Lays a step's rows out; returns the batch, and no metrics."""
        batch = batch_of(rows[ROWS], self.pad_id)
        number = self.global_steps if step is None else step
        deterministic = self.config.trainer.deterministic
        batch.meta_info = step_info(
            step=number, seed=self.seed, seeded=deterministic, validate=False
        )
        return batch, {}

    def train_step(self, step: PendingStep) -> Metrics:
        """Makes one step: an update of the policy by a step's rows; returns its metrics."""
        timer = StepTimer()
        with timer("step"):
            batch, metrics = self._begin_update(step.result())
            batch = self.phases.arrange(batch)
            self.in_update = True
            with timer("update_actor"):
                metrics |= self.phases.update_actor(batch)
        self._require_a_gradient(metrics)
        self.on_batch(batch)
        metrics = with_printable_names(metrics | self._metrics_of(batch, timer))
        report = StepReport(
            step=self.global_steps,
            batch=batch,
            updated=batch,
            metrics=metrics,
            records=self.phases.take_probe_records(),
        )
        return metrics | self.observers.step_made(report)

    def _require_a_gradient(self, metrics: Metrics) -> None:
        """Ends a run in which nothing is learnt any more.

        Raises:
            RunStopped: so many steps in a row had a gradient that is not finite.
        """
        self.lost_steps = self.lost_steps + 1 if metrics["actor/skipped_updates"] else 0
        if self.lost_steps == MOST_LOST:
            raise RunStopped(
                f"step {self.global_steps}: the gradient of {MOST_LOST} steps in a row is not "
                f"finite, and none of them was made (actor/grad_norm={metrics['actor/grad_norm']}, "
                f"{LOSS}={metrics[LOSS]}): lower sft.lr, or go on from an earlier checkpoint",
                MEND,
            )

    def _metrics_of(self, batch: DataProto, timer: StepTimer) -> Metrics:
        ranks = self.config.trainer.all_ranks
        return {
            "training/global_step": self.global_steps,
            "training/epoch": self.position.epoch,
            "sft/tokens": int(batch.batch["response_mask"].sum()),
            **compute_timing_metrics(batch, timer.seconds),
            **compute_throughout_metrics(batch, timer.seconds, ranks),
        }

    def sync_weights(self) -> Metrics:
        """Returns no metrics: there is no engine that takes the weights."""
        return {}

    def validate(self) -> Metrics:
        """Measures the loss of the held-out rows, a mean over their tokens, in nats."""
        if not self.val_rows:
            return {}
        size = self.config.data.train_batch_size
        total = 0.0
        tokens = 0
        for begin in range(0, len(self.val_rows), size):
            batch = batch_of(self.val_rows[begin : begin + size], self.pad_id)
            read = self.actor_rollout_wg.compute_log_prob(batch)
            mask = batch.batch["response_mask"].bool()
            log_probs = read.batch["old_log_probs"][: len(mask)]
            total -= float(log_probs[mask].double().sum())
            tokens += int(mask.sum())
        return {"sft/val_loss": total / tokens}

    def driver_state(self) -> DriverState:
        """Returns the entries of a checkpoint's `data.pt`, with which rows these are."""
        return replace(super().driver_state(), sampler={ROWS: self.rows_fingerprint})

    def load_driver_state(self, state: DriverState) -> None:
        """Goes on from a checkpoint.

        Raises:
            CannotResume: it learnt other rows, or none.
        """
        learnt = state.sampler.get(ROWS)
        changed = self.config.trainer.resume_with_changes
        if learnt != self.rows_fingerprint and not changed:
            raise CannotResume(
                f"the checkpoint of step {state.global_steps} in {self.run_dir} was trained on "
                "other rows than those of sft.files now: put the files back, give the run another "
                "folder (sft.folder), begin anew by trainer.resume_mode=disable, or go on with the "
                "new rows by trainer.resume_with_changes=true"
            )
        super().load_driver_state(replace(state, sampler={}))


def _as_rows(rows: Sequence[TrainedRow]) -> dict[str, Any]:
    return {ROWS: list(rows)}


def _no_rewards(batch: DataProto) -> Any:
    raise NotImplementedError("supervised training scores nothing")
