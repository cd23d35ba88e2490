"""The parts of a config that a plan needs: the run as planned, on a CPU and with a plain loss.

Invariant: the sizes are those of the config as it was given; only what fake tensors cannot do, and
what does not change the memory, is replaced.
"""

from dataclasses import dataclass
from typing import Self

import torch

from training.config import BatchPlan, PPOConfig, RolloutConfig
from training.config.leaves import build
from workers.model.builder import ModelSpec

REPLACED_SETTINGS = {
    # Devices differ in attention alone, which a pass lays out for CUDA.
    "trainer.device": "cpu",
    "trainer.deterministic": False,
    # Ranks that share sequences share what a pass makes, which is divided afterwards.
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
    # The memory of every loss is small, and some read numbers, of which fake tensors have none.
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
}


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Holds what the parts of a rank are planned from.

    Args:
        config: with REPLACED_SETTINGS in it.
        rollout: the section with what it takes over from others.
        batch_plan: how a step's rows are cut, with the run's own sequence-parallel groups.
        on_cuda: the run is on CUDA.
        num_ranks: that train.
        num_engine_ranks: that have engines alone; 0: engines are on the ranks that train.
        spec: the policy's model.
        vocab_size, num_layers: the policy's.
    """

    config: PPOConfig
    rollout: RolloutConfig
    batch_plan: BatchPlan
    on_cuda: bool
    num_ranks: int
    num_engine_ranks: int
    spec: ModelSpec
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, config: PPOConfig) -> Self:
        """Reads a config, and its model's configuration."""
        trainer = config.trainer
        device = trainer.device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = config.actor_rollout_ref.model
        spec = ModelSpec(model, str(model.path), torch.device("cpu"))
        text_config = spec.hf_config.get_text_config()
        planned_config: PPOConfig = build(config, REPLACED_SETTINGS)
        return cls(
            config=planned_config,
            rollout=planned_config.resolved_rollout,
            batch_plan=config.batch_plan,
            on_cuda=device == "cuda",
            num_ranks=trainer.num_ranks,
            num_engine_ranks=trainer.rollout_n_gpus,
            spec=spec,
            vocab_size=text_config.vocab_size,
            num_layers=text_config.num_hidden_layers,
        )

    @property
    def rows_per_step(self) -> int:
        """Counts the rows of a step: each prompt is answered `rollout.n` times."""
        return self.batch_plan.prompts * self.rollout.n
