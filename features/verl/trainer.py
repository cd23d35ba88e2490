"""verl's trainer methods that subclasses override, around the trainer that is here.

`RayPPOTrainer` trains prompts and `AgentTrainer` episodes, as those of `training` do; each phase of
a step goes through a method of verl's name, whose default does what the trainer does anyway:

    use_critic, use_reference_policy, use_rm     which models take part
    _create_dataloader                           datasets and sampler, before loaders are made
    _get_gen_batch                               what is generated from
    _balance_batch                               the order of rows among ranks
    _compute_or_extract_reward                   scores, in training and validation
    _compute_old_log_prob, _compute_ref_log_prob, _compute_values
    _update_critic, _update_actor
    _validate, _maybe_log_val_generations, _log_rollout_data, _dump_generations
    _save_checkpoint, _load_checkpoint, _start_profiling, _stop_profiling

Invariant: without overrides numbers are those of `training.ray_trainer`, bit for bit.
"""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

from data.protocol import DataProto
from training import agent_trainer, ray_trainer
from training.async_rollout.group_streaming import streams_groups

Metrics = dict[str, Any]


class VerlMethods(ray_trainer.PPOTrainer):
    """Calls a method of verl's name in each phase; see the top of this file.

    A method may return what verl's returns: a DataProto, or a tuple that begins with it; None
    where it has changed its batch in place. Metrics of an update may be a dict, or
    `meta_info["metrics"]` of a DataProto.
    """

    def __init__(self, config: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        names = ("train_dataset", "val_dataset", "collate_fn", "train_sampler")
        chosen = self._create_dataloader(*(kwargs.get(name) for name in names))
        if chosen is not None:
            given = dict(zip(names, chosen, strict=True))
            kwargs |= {name: value for name, value in given.items() if value is not None}
        super().__init__(config, tokenizer, *args, **kwargs)
        if streams_groups(self.config):
            raise ValueError(
                f"{type(self).__name__}: with trainer.train_finished_groups=true groups are "
                "trained on as they end, in no phase of a whole step: take it out, or subclass "
                "training.ray_trainer.RayPPOTrainer"
            )

    # What takes part

    @property
    def use_critic(self) -> bool:
        """Says whether values are computed and a critic is trained."""
        return self.groups is not None and self.groups.critic is not None

    @property
    def use_reference_policy(self) -> bool:
        """Says whether the reference policy's log-probs are computed."""
        return bool(self.config.need_reference)

    @property
    def use_rm(self) -> bool:
        """Says whether a reward model scores."""
        return self.groups is not None and self.groups.reward_model is not None

    @property
    def hybrid_engine(self) -> bool:
        """Says whether engines share the actor's ranks."""
        return not self.config.trainer.rollout_n_gpus

    # The phases of a step, by verl's names

    def _create_dataloader(
        self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any
    ) -> tuple[Any, Any, Any, Any] | None:
        """Returns what the loaders are made of; None: what was given."""
        return None

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """Returns what is generated from."""
        return batch

    def _balance_batch(self, batch: DataProto, metrics: Metrics) -> DataProto | None:
        """Orders the rows for the ranks; entries of `metrics` are logged."""
        return self._inner_phases.arrange(batch)

    def _compute_or_extract_reward(self, batch: DataProto, reward_fn: Any = None) -> Any:
        """Returns scores (B, R) and further values by name."""
        return self._inner_phases.score(batch, reward_fn or self.reward_fn)

    def _compute_old_log_prob(self, batch: DataProto) -> Any:
        """Returns `old_log_probs` and `entropys` (B, R)."""
        return self._inner_groups.policy.compute_log_prob(batch)

    def _compute_ref_log_prob(self, batch: DataProto) -> Any:
        """Returns `ref_log_prob` (B, R)."""
        return self._inner_groups.reference.compute_ref_log_prob(batch)

    def _compute_values(self, batch: DataProto) -> Any:
        """Returns `values` (B, R)."""
        assert self._inner_groups.critic is not None
        return self._inner_groups.critic.compute_values(batch)

    def _update_critic(self, batch: DataProto) -> Any:
        """Updates the critic and returns metrics."""
        assert self._inner_groups.critic is not None
        return self._inner_groups.critic.update_critic(batch)

    def _update_actor(self, batch: DataProto) -> Any:
        """Updates the policy and returns metrics."""
        return self._inner_phases.update_actor(batch)

    # Around a step

    def _log_rollout_data(
        self, batch: DataProto, reward_extra_infos_dict: Any, timing_raw: Any, rollout_data_dir: Any
    ) -> None:
        """Sees a step's batch, with its advantages; the trainer itself writes the dumps."""

    def _dump_generations(
        self,
        inputs: list[str],
        outputs: list[str],
        gts: list[Any],
        scores: list[float],
        reward_extra_infos_dict: Any,
        dump_path: str,
    ) -> None:
        """Sees a step's texts where `trainer.rollout_data_dir` is set; the trainer dumps them."""

    def _maybe_log_val_generations(
        self, inputs: list[str], outputs: list[str], scores: list[float]
    ) -> None:
        """Sees validation's texts, as many as `trainer.log_val_generations`; observers log them."""

    def _save_checkpoint(self) -> Any:
        """Saves the run; None or metrics."""
        return super().save_checkpoint()

    def _load_checkpoint(self) -> Any:
        """Goes on from the checkpoint that the config names or finds."""
        return super().load_checkpoint()

    def _start_profiling(self, do_profile: bool) -> None:
        """Is called before a step; nothing here profiles."""

    def _stop_profiling(self, do_profile: bool) -> None:
        """Is called behind a step."""

    # How the trainer comes to them

    def init_workers(self) -> None:
        """Builds the workers, and puts the methods in the way to them."""
        super().init_workers()
        assert self.groups is not None
        self._inner_groups = self.groups
        self._inner_phases = self.phases
        self._balance_metrics: Metrics = {}
        policy: Any = _Hooked(self.groups.policy, compute_log_prob=self._old_log_probs)
        reference: Any = _Hooked(self.groups.reference, compute_ref_log_prob=self._ref_log_probs)
        critic: Any = None
        if self.use_critic:
            critic = _Hooked(
                self.groups.critic, compute_values=self._values, update_critic=self._train_critic
            )
        reward_model = self.groups.reward_model if self.use_rm else None
        self._inner_phases.groups = replace(
            self.groups,
            policy=policy,
            reference=reference,
            critic=critic,
            reward_model=reward_model,
        )
        self.ref_policy_wg = reference
        self.critic_wg = critic
        phases: Any = _Hooked(
            self._inner_phases,
            arrange=self._arranged,
            start_reward=self._begin_reward,
            update_actor=self._train_actor,
            needs_reference=lambda: self.use_reference_policy,
        )
        self.phases = phases

    def play(self, prompts: DataProto) -> DataProto:
        """Answers prompts, or plays described episodes."""
        return super().play(self._get_gen_batch(prompts))

    def score(self, batch: DataProto, reward_fn: Any) -> Any:
        """Scores a batch."""
        return self._compute_or_extract_reward(batch, reward_fn)

    def train_step(self, step: Any) -> Metrics:
        """Makes one step, between the calls that begin and end a profile."""
        self._balance_metrics = {}
        self._start_profiling(False)
        metrics = super().train_step(step)
        self._stop_profiling(False)
        return metrics | self._balance_metrics

    def validate(self) -> Metrics:
        """Scores the validation prompts, and shows their texts."""
        metrics = super().validate()
        shown = self.val_generations
        self._maybe_log_val_generations(
            [entry["input"] for entry in shown],
            [entry["output"] for entry in shown],
            [entry["score"] for entry in shown],
        )
        return metrics

    def on_batch(self, batch: DataProto) -> None:
        """Sees each batch; of training's the methods that log see it."""
        super().on_batch(batch)
        if batch.meta_info.get("validate"):
            return
        folder = self.config.trainer.rollout_data_dir
        self._log_rollout_data(batch, {}, {}, folder)
        if folder is None:
            return
        texts = self.tokenizer.batch_decode
        self._dump_generations(
            texts(batch.batch["prompts"], skip_special_tokens=True),
            texts(batch.batch["responses"], skip_special_tokens=True),
            [None] * len(batch),
            batch.batch["token_level_scores"].sum(dim=1).tolist(),
            {},
            folder,
        )

    def save_checkpoint(self, snapshot: Any = None) -> Metrics:
        """Begins to save the run."""
        if snapshot is not None:
            return super().save_checkpoint(snapshot)
        return self._save_checkpoint() or {}

    def load_checkpoint(self, folder: Any = None) -> None:
        """Goes on from a checkpoint."""
        if folder is not None:
            super().load_checkpoint(folder)
        else:
            self._load_checkpoint()

    def _arranged(self, batch: DataProto) -> DataProto:
        arranged = self._balance_batch(batch, self._balance_metrics)
        return batch if arranged is None else arranged

    def _begin_reward(self, batch: DataProto) -> Any:
        own = type(self)._compute_or_extract_reward is not VerlMethods._compute_or_extract_reward
        if not own or "token_level_scores" in batch.batch:
            return self._inner_phases.start_reward(batch)
        scores = self._compute_or_extract_reward(batch, self.reward_fn)
        return lambda: scores

    def _old_log_probs(self, batch: DataProto) -> DataProto:
        return _first(self._compute_old_log_prob(batch))

    def _ref_log_probs(self, batch: DataProto) -> DataProto:
        return _first(self._compute_ref_log_prob(batch))

    def _values(self, batch: DataProto) -> DataProto:
        return _first(self._compute_values(batch))

    def _train_critic(self, batch: DataProto) -> Metrics:
        return _metrics_of(self._update_critic(batch))

    def _train_actor(self, batch: DataProto) -> Metrics:
        return _metrics_of(self._update_actor(batch))


class RayPPOTrainer(VerlMethods, ray_trainer.RayPPOTrainer):
    """Trains on prompts, through methods of verl's names."""


class AgentTrainer(VerlMethods, agent_trainer.AgentTrainer):
    """Trains on episodes, through methods of verl's names."""


class _Hooked:
    """Stands for an object, some of whose methods are others."""

    def __init__(self, inner: Any, **methods: Any) -> None:
        self._inner = inner
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return self._methods[name]
        return getattr(self._inner, name)


def _first(result: Any) -> Any:
    """Returns the first of a tuple, as newer versions of verl return further values."""
    return result[0] if isinstance(result, tuple) else result


def _metrics_of(result: Any) -> Metrics:
    """Returns metrics that a method returned, or put into a DataProto's meta_info."""
    found = _first(result)
    if isinstance(found, DataProto):
        found = found.meta_info.get("metrics")
    return dict(found or {})


class _Trainer(ModuleType):
    """Has the names of training.ray_trainer, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ray_trainer, name)


sys.modules[__name__].__class__ = _Trainer
