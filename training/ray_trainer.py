"""The trainer: `fit()` and one short method per phase of a step.

    prompts -> generate -> reward -> log-probs, values -> advantages -> update critic, update actor -> new weights to the engine

The driver holds the batch (a DataProto) and the order of things; models live in worker groups, which it only calls. Everything random in a step
derives from (run seed, step), and the data order from (run seed, epoch), so that a checkpoint needs no generator's state.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from data.data_order import EpochOrder, PromptCollator, num_rows
from data.prompts import pad_token_id
from data.protocol import DataProto
from data.rl_dataset import collate_fn as default_collate_fn
from training import checkpoint
from training.batching import get_seqlen_balanced_partitions, plan_mini_batches
from training.config import PPOConfig
from training.core_algos import (
    AdaptiveKLController,
    FixedKLController,
    call_adv_estimator,
    estimator_needs,
    get_kl_controller,
    kl_penalty,
)
from training.metric_utils import (
    StepTimer,
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    flatten_validation_metrics,
    process_validation_metrics,
)
from training.reward import RewardFunction, compute_reward, compute_reward_async
from training.roles import (
    ResourcePoolManager,
    Role,
    default_resource_pool,
    default_role_mapping,
    need_critic,
    need_reference_policy,
    need_reward_model,
)
from training.torch_functional import masked_mean
from training.tracking import Tracking
from workers.worker_group import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

__all__ = [
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
    "default_resource_pool",
    "default_role_mapping",
    "need_critic",
    "need_reference_policy",
    "need_reward_model",
]
logger = logging.getLogger(__name__)

KLController = AdaptiveKLController | FixedKLController


class RayPPOTrainer:
    """PPO and its relatives over worker groups.

    Args:
        config: the run's typed configuration.
        tokenizer: the policy's.
        role_worker_mapping: worker class per role; None: what the config needs.
        resource_pool_manager: pool per role; None: one pool of all ranks.
        ray_worker_group_cls: how workers are run; None: as `trainer.launcher` says.
        processor: not used for text.
        reward_fn, val_reward_fn: DataProto -> rewards, see `training.reward.compute_reward`.
        train_dataset, val_dataset: torch Datasets of prompts; validation is left out without one.
        collate_fn: list of rows -> dict of tensors and object arrays.
        train_sampler: order of the training rows; None: as `data.shuffle` says.
        device_name: overrides nothing here; workers follow `trainer.device`.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: Mapping[Role, type] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        ray_worker_group_cls: type[LocalWorkerGroup | RayWorkerGroup] | None = None,
        processor: object = None,
        reward_fn: RewardFunction | None = None,
        val_reward_fn: RewardFunction | None = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        collate_fn: Callable[[list[dict[str, Any]]], dict[str, Any]] = default_collate_fn,
        train_sampler: Sampler[int] | None = None,
        device_name: str | None = None,
    ) -> None:
        if reward_fn is None or train_dataset is None:
            raise ValueError("RayPPOTrainer needs reward_fn and train_dataset")
        self.config = config
        self.tokenizer = tokenizer
        self.role_worker_mapping = role_worker_mapping or default_role_mapping(config)
        self.resource_pool_manager = resource_pool_manager or default_resource_pool(config)
        self.worker_group_cls = ray_worker_group_cls or (RayWorkerGroup if config.trainer.use_ray else LocalWorkerGroup)
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn or reward_fn
        self.kl_controller: KLController = get_kl_controller(config.algorithm.kl_ctrl)
        self.run_dir = Path(config.trainer.run_dir)
        self.seed = config.data.run_seed
        self.global_steps = self.epoch = self.batches_done = 0
        self._make_dataloaders(train_dataset, val_dataset, collate_fn, train_sampler)

    # Set-up

    def _make_dataloaders(
        self,
        train_dataset: Dataset,
        val_dataset: Dataset | None,
        collate_fn: Callable[[list[dict[str, Any]]], dict[str, Any]],
        train_sampler: Sampler[int] | None,
    ) -> None:
        data = self.config.data
        collate = PromptCollator(data.max_prompt_length, pad_token_id(self.tokenizer), data.truncation, collate_fn)
        common = {"collate_fn": collate, "num_workers": data.dataloader_num_workers}
        rows = num_rows(train_dataset)
        self.order = EpochOrder(rows, self.seed, data.shuffle, train_sampler)
        self.train_dataloader = DataLoader(
            train_dataset, batch_size=data.train_batch_size, sampler=self.order, drop_last=True, **common
        )
        self.steps_per_epoch = len(self.order) // data.train_batch_size
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"data.train_batch_size={data.train_batch_size} is more than the {rows} training rows; make it smaller or give more rows"
            )
        self.total_training_steps = (
            self.config.trainer.total_training_steps or self.config.trainer.total_epochs * self.steps_per_epoch
        )
        self.val_dataloader = None
        if val_dataset is not None:
            val_rows = num_rows(val_dataset)
            order = EpochOrder(val_rows, self.seed, data.validation_shuffle)
            self.val_dataloader = DataLoader(
                val_dataset, batch_size=data.val_batch_size or val_rows, sampler=order, **common
            )

    def init_workers(self) -> None:
        """Builds every worker group and its models."""
        groups: dict[Role, Any] = {}
        use_gpu = self.config.trainer.device != "cpu" and torch.cuda.is_available()
        for pool, roles in self.resource_pool_manager.pools(self.role_worker_mapping, use_gpu=use_gpu):
            colocated = create_colocated_worker_cls({role.value: self._worker_class(role) for role in roles})
            started = self.worker_group_cls.start(pool, colocated)
            groups |= {role: started[role.value] for role in roles}
        policy = Role.ActorRolloutRef if Role.ActorRolloutRef in groups else Role.ActorRollout
        self.actor_rollout_wg = groups[policy]
        self.critic_wg = groups.get(Role.Critic)
        self.ref_policy_wg = groups.get(Role.RefPolicy, self.actor_rollout_wg)
        if self.critic_wg is not None:
            self.critic_wg.init_model(self.total_training_steps)
        # The rollout engine comes last: it sizes its cache by what the others left free.
        self.actor_rollout_wg.init_model(max(self.total_training_steps - self.config.trainer.critic_warmup, 1))

    def _worker_class(self, role: Role) -> ClassWithInitArgs:
        arguments = (self.config,) if role is Role.Critic else (self.config, role.value)
        return ClassWithInitArgs(self.role_worker_mapping[role], arguments)

    # The loop

    def fit(self) -> dict[str, float]:
        """Trains to `total_training_steps`, from the latest checkpoint where there is one; returns the last step's metrics."""
        trainer = self.config.trainer
        self._load_checkpoint()
        with self._tracking() as tracking:
            metrics: dict[str, float] = {}
            if trainer.val_only or (trainer.val_before_train and self.global_steps == 0):
                metrics = self._validate()
                tracking.log(metrics, step=self.global_steps)
            if trainer.val_only:
                return metrics
            for rows in self._training_batches():
                metrics = self.train_step(rows)
                if self._is_due(trainer.test_freq):
                    metrics |= self._validate()
                tracking.log(metrics, step=self.global_steps)
                if self._is_due(trainer.save_freq) and trainer.save_freq > 0:
                    self._save_checkpoint()
        return metrics

    def _training_batches(self) -> Iterator[dict[str, Any]]:
        """Rows for one step at a time; `global_steps`, `epoch` and `batches_done` already count the batch that is given."""
        while self.global_steps < self.total_training_steps:
            self.order.start(self.epoch, self.batches_done * self.config.data.train_batch_size)
            for rows in self.train_dataloader:
                self.global_steps += 1
                self.batches_done += 1
                yield rows
                if self.global_steps >= self.total_training_steps:
                    return
            self.epoch, self.batches_done = self.epoch + 1, 0

    def _is_due(self, frequency: int) -> bool:
        """Every `frequency` steps (never where that is not positive), and on the last step."""
        return self.global_steps >= self.total_training_steps or (frequency > 0 and self.global_steps % frequency == 0)

    def train_step(self, rows: dict[str, Any]) -> dict[str, float]:
        """One step on collated rows: from prompts to new weights. Returns its metrics."""
        timer = StepTimer()
        metrics: dict[str, float] = {}
        with timer("step"):
            prompts = self._prompt_batch(rows, self.config.actor_rollout_ref.rollout.n)
            with timer("gen"):
                batch = self._generate(prompts)
            batch = self._arrange(batch)
            with timer("reward"):
                reward = self._start_reward(batch)
            if self._needs_old_log_probs():
                with timer("old_log_prob"):
                    batch, metrics = self._add_old_log_probs(batch, metrics)
            if self.config.need_reference:
                with timer("ref"):
                    batch = batch.union(self.ref_policy_wg.compute_ref_log_prob(batch))
            if self.critic_wg is not None:
                with timer("values"):
                    batch = batch.union(self.critic_wg.compute_values(batch))
            with timer("adv"):
                batch = self._add_rewards(batch, reward)
                batch, metrics = self._apply_kl(batch, metrics)
                batch = self._add_advantages(batch)
            if self.critic_wg is not None:
                with timer("update_critic"):
                    metrics |= self.critic_wg.update_critic(batch)
            if self.global_steps > self.config.trainer.critic_warmup:
                with timer("update_actor"):
                    metrics |= self.actor_rollout_wg.update_actor(batch)
            with timer("update_weights"):
                self.actor_rollout_wg.sync_weights()
        self._dump(batch, self.config.trainer.rollout_data_dir)
        return metrics | self._step_metrics(batch, timer)

    # The phases of a step

    def _prompt_batch(self, rows: dict[str, Any], repeat: int, validate: bool = False) -> DataProto:
        """Collated rows -> one row per sample, `uid` per prompt, and what seeds the sampling: B = prompts x repeat."""
        batch = DataProto.from_single_dict(rows)
        groups = np.arange(len(batch))
        batch.non_tensor_batch["uid"] = np.array([f"{self.global_steps}.{group}" for group in groups], dtype=object)
        batch.non_tensor_batch["group_index"] = groups
        batch = batch.repeat(repeat, interleave=True)
        samples = np.tile(np.arange(repeat), len(groups))
        batch.non_tensor_batch["sample_index"] = samples
        batch.non_tensor_batch["episode_id"] = np.array(
            [f"{uid}.{sample}" for uid, sample in zip(batch.non_tensor_batch["uid"], samples, strict=True)],
            dtype=object,
        )
        batch.meta_info = {
            "global_steps": self.global_steps,
            "seed": self.seed,
            "seeded": self.config.trainer.deterministic,
            "validate": validate,
        }
        return batch

    def _generate(self, prompts: DataProto) -> DataProto:
        batch = self.actor_rollout_wg.generate_sequences(prompts)
        self.actor_rollout_wg.sleep_rollout()
        return batch

    def _arrange(self, batch: DataProto) -> DataProto:
        """Orders rows for the ranks, each of which gets a consecutive chunk; nothing to do for one.

        A mini-batch of several ranks then has the rows that it has on one, and with `balance_batch` its ranks about the same number of tokens.
        """
        ranks, actor = self.config.trainer.num_ranks, self.config.actor_rollout_ref.actor
        if ranks == 1:
            return batch
        lengths = batch.batch["attention_mask"].sum(dim=1).tolist()
        mini_batch = min(actor.ppo_mini_batch_size, self.config.resolved_critic.ppo_mini_batch_size or len(batch))
        rows_of_rank: list[list[int]] = [[] for _ in range(ranks)]
        for rows in plan_mini_batches(len(batch), mini_batch * self.config.actor_rollout_ref.rollout.n):
            if self.config.trainer.balance_batch:
                parts = get_seqlen_balanced_partitions([lengths[row] for row in rows], ranks, equal_size=True)
            else:
                parts = [list(part) for part in np.array_split(np.arange(len(rows)), ranks)]
            for rank, part in enumerate(parts):
                rows_of_rank[rank] += [rows[k] for k in part]
        return batch.select_idxs(torch.tensor([row for rows in rows_of_rank for row in rows]))

    def _start_reward(self, batch: DataProto) -> Callable[[], tuple[Tensor, dict[str, list[Any]]]]:
        """Scores the batch, beside the passes that follow where `launch_reward_fn_async`; calling the result waits for it."""
        if self.config.reward_model.launch_reward_fn_async:
            return compute_reward_async(batch, self.reward_fn).result
        done = compute_reward(batch, self.reward_fn)
        return lambda: done

    def _needs_old_log_probs(self) -> bool:
        """Whether something reads them: with a single mini-batch and epoch the update's own log-probs are the old ones."""
        actor, algorithm = self.config.actor_rollout_ref.actor, self.config.algorithm
        one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size == self.config.data.train_batch_size
        read = algorithm.use_kl_in_reward or "old_log_probs" in estimator_needs(algorithm.adv_estimator)
        return read or not one_update

    def _add_old_log_probs(self, batch: DataProto, metrics: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """`old_log_probs`, the policy's entropy, and how far the engine's probabilities are from the trainer's."""
        result = self.actor_rollout_wg.compute_log_prob(batch)
        entropies = result.pop(batch_keys=["entropys"]).batch["entropys"]
        batch = batch.union(result)
        mask = batch.batch["response_mask"]
        metrics["actor/old_entropy"] = masked_mean(entropies, mask).item()
        if "rollout_log_probs" in batch.batch:
            metrics |= mismatch_metrics(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"], mask)
        return batch, metrics

    def _add_rewards(self, batch: DataProto, reward: Callable[[], tuple[Tensor, dict[str, list[Any]]]]) -> DataProto:
        scores, infos = reward()
        batch.batch["token_level_scores"] = scores  # (B, R)
        for name, values in infos.items():
            batch.non_tensor_batch[f"reward_{name}"] = np.array(values, dtype=object)
        return batch

    def _apply_kl(self, batch: DataProto, metrics: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        algorithm = self.config.algorithm
        if not algorithm.use_kl_in_reward:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            return batch, metrics
        batch, kl_metrics = apply_kl_penalty(batch, self.kl_controller, algorithm.kl_penalty)
        return batch, metrics | kl_metrics

    def _add_advantages(self, batch: DataProto) -> DataProto:
        algorithm = self.config.algorithm
        return compute_advantage(
            batch,
            algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )

    def _step_metrics(self, batch: DataProto, timer: StepTimer) -> dict[str, float]:
        progress = {"training/global_step": self.global_steps, "training/epoch": self.epoch}
        return {
            **progress,
            **compute_data_metrics(batch, use_critic=self.critic_wg is not None),
            **compute_timing_metrics(batch, timer.seconds),
            **compute_throughout_metrics(batch, timer.seconds, n_gpus=self.config.trainer.num_ranks),
        }

    # Validation

    def _validate(self) -> dict[str, float]:
        """Scores the validation prompts, `val_kwargs.n` answers each; metrics as `val-core/SOURCE/REWARD/mean@N`."""
        if self.val_dataloader is None:
            return {}
        sources: list[str] = []
        uids: list[str] = []
        infos: dict[str, list[Any]] = {}
        offset = 0
        for rows in self.val_dataloader:
            batch, scored = self._validate_batch(rows, offset)
            offset = len(uids)
            names = batch.non_tensor_batch.get(self.config.data.reward_fn_key, np.full(len(batch), "unknown"))
            sources += [str(name) for name in names]
            uids += list(batch.non_tensor_batch["uid"])
            for name, values in scored.items():
                infos.setdefault(name, []).extend(values)
        nested = process_validation_metrics(sources, uids, infos, seed=self.seed)
        return flatten_validation_metrics(nested)

    def _validate_batch(self, rows: dict[str, Any], offset: int) -> tuple[DataProto, dict[str, list[Any]]]:
        prompts = self._prompt_batch(rows, self.config.actor_rollout_ref.rollout.val_kwargs.n, validate=True)
        prompts.non_tensor_batch["group_index"] = prompts.non_tensor_batch["group_index"] + offset
        prompts.non_tensor_batch["uid"] = np.array(
            [f"val.{g}" for g in prompts.non_tensor_batch["group_index"]], dtype=object
        )
        batch = self.actor_rollout_wg.generate_sequences(prompts)
        scores, infos = compute_reward(batch, self.val_reward_fn)
        batch.batch["token_level_scores"] = scores
        self._dump(batch, self.config.trainer.validation_data_dir)
        self._show_generations(batch, self.config.trainer.log_val_generations if offset == 0 else 0)
        return batch, {"reward": scores.sum(dim=1).tolist(), **infos}

    def _show_generations(self, batch: DataProto, count: int) -> None:
        for row in self._readable_rows(batch.slice(0, min(count, len(batch)))) if count else []:
            logger.info("validation, reward %.3f\n%s\n--> %s", row["score"], row["input"], row["output"])

    def _dump(self, batch: DataProto, folder: str | None) -> None:
        """Appends the batch's text and scores to FOLDER/STEP.jsonl."""
        if folder is None:
            return
        path = Path(folder) / f"{self.global_steps}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in self._readable_rows(batch))

    def _readable_rows(self, batch: DataProto) -> Iterator[dict[str, Any]]:
        width = batch.batch["prompts"].shape[1]
        mask = batch.batch["attention_mask"].bool()
        scores = batch.batch["token_level_scores"].sum(dim=1).tolist()
        for i, score in enumerate(scores):
            ids = batch.batch["input_ids"][i]
            yield {
                "step": self.global_steps,
                "uid": batch.non_tensor_batch["uid"][i],
                "input": self.tokenizer.decode(ids[:width][mask[i, :width]]),
                "output": self.tokenizer.decode(ids[width:][mask[i, width:]]),
                "score": score,
            }

    # Checkpoints

    @property
    def _checkpoint_parts(self) -> dict[str, Any]:
        critic = {} if self.critic_wg is None else {"critic": self.critic_wg}
        return {"actor": self.actor_rollout_wg, **critic}

    def _save_checkpoint(self) -> None:
        trainer = self.config.trainer
        with checkpoint.new_checkpoint(self.run_dir, self.global_steps) as folder:
            for name, group in self._checkpoint_parts.items():
                group.save_checkpoint(str(folder / name))
            state = {
                "global_steps": self.global_steps,
                "epoch": self.epoch,
                "batches_done": self.batches_done,
                "kl_coef": float(self.kl_controller.value),
            }
            checkpoint.save_driver_state(folder, state)
        keep = {"keep_actor": trainer.max_actor_ckpt_to_keep, "keep_critic": trainer.max_critic_ckpt_to_keep}
        checkpoint.prune(self.run_dir, **keep)

    def _load_checkpoint(self) -> None:
        trainer = self.config.trainer
        folder = checkpoint.find_checkpoint(
            self.run_dir, trainer.resume_mode, trainer.resume_from_path, tuple(self._checkpoint_parts)
        )
        if folder is None:
            return
        for name, group in self._checkpoint_parts.items():
            group.load_checkpoint(str(folder / name))
        state = checkpoint.load_driver_state(folder)
        self.global_steps, self.epoch = state["global_steps"], state["epoch"]
        self.batches_done, self.kl_controller.value = state["batches_done"], state["kl_coef"]
        self.actor_rollout_wg.sync_weights()
        logger.info("resumed from %s", folder)

    def _tracking(self) -> Tracking:
        trainer = self.config.trainer
        return Tracking(
            trainer.project_name,
            trainer.experiment_name,
            default_backend=list(trainer.logger),
            config=asdict(self.config),
            local_dir=str(self.run_dir),
            resume_step=self.global_steps,
            total_steps=self.total_training_steps,
        )


def compute_response_mask(data: DataProto) -> Tensor:
    """(B, R): the attention mask over the responses; for batches whose every response token was sampled."""
    width = data.batch["responses"].shape[1]
    return data.batch["attention_mask"][:, -width:]


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty_kind: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """token_level_rewards = token_level_scores - coefficient x KL per token; then the controller sees the mean KL.

    The mean is over sampled tokens of each row, then over rows that have any (nats per token).
    """
    data.require("token_level_scores", "old_log_probs", "ref_log_prob", by="apply_kl_penalty")
    mask = data.batch["response_mask"]
    kl = kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty_kind) * mask  # (B, R)
    coefficient = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - coefficient * kl
    lengths = mask.sum(dim=1)
    rows = int((lengths > 0).sum())
    mean = (kl.sum(dim=1) / lengths.clamp(min=1)).sum().item() / max(rows, 1)
    kl_ctrl.update(current_kl=mean, n_steps=rows)
    return data, {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": float(coefficient)}


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Adds `advantages` and `returns` (B, R) by the estimator of that name, from `token_level_rewards` and what it asks for."""
    data.require("token_level_rewards", "response_mask", *_tensor_needs(adv_estimator), by=f"estimator {adv_estimator}")
    advantages, returns = call_adv_estimator(
        adv_estimator,
        **{name: data.batch[name] for name in data.batch.keys()},  # noqa: SIM118  (a TensorDict iterates over rows)
        index=data.non_tensor_batch["uid"],
        gamma=gamma,
        lam=lam,
        num_repeat=num_repeat,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        config=config,
    )
    data.batch["advantages"], data.batch["returns"] = advantages, returns
    return data


def _tensor_needs(adv_estimator: str) -> list[str]:
    return [name for name in estimator_needs(adv_estimator) if name in ("values", "old_log_probs", "reward_baselines")]


def mismatch_metrics(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the rollout engine's probabilities of its own samples are from the trainer's; `rollout_kl` in nats per token."""
    difference = (log_probs.exp() - rollout_log_probs.exp()).abs()[mask.bool()]
    if difference.numel() == 0:
        return {}
    return {
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_kl": (rollout_log_probs - log_probs)[mask.bool()].mean().item(),
    }
