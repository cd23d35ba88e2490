"""Holds the settings of the models that are trained: `actor_rollout_ref.model`, `critic.model`."""

import importlib.util
from collections.abc import Iterator
from dataclasses import field
from typing import Any

from training.config.schema.common import Dtype
from training.config.section import InputPath, NonNegativeInt, PositiveInt, Section


class CriticModelConfig(Section):
    """The critic's weights: a language model with a value head."""

    path: InputPath | None = None  #: model folder or hub name; null = the actor's
    dtype: Dtype = "bfloat16"  #: autocast compute type; master weights stay float32
    #: recompute activations in backward: less memory, more time
    enable_gradient_checkpointing: bool = True
    #: strip the padding from rows before the forward pass, and pack them where the model's layers
    #: allow it (docs/models.md)
    use_remove_padding: bool = True
    trust_remote_code: bool = False  #: run Python code that comes with the model
    #: entries of the model's config.json to replace
    override_config: dict[str, Any] = field(default_factory=dict)

    def training_problems(self, key: str, ranks_per_sequence: int) -> Iterator[str]:
        """Yields what keeps this model, whose section is called `key`, from being trained."""
        if ranks_per_sequence > 1 and not self.use_remove_padding:
            yield (
                f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={ranks_per_sequence} "
                f"needs {key}.use_remove_padding=true"
            )
        if self.dtype == "float16":
            yield (
                f"{key}.dtype=float16 would train without loss scaling, which small gradients "
                "need in float16: use bfloat16 or float32; actor_rollout_ref.rollout.dtype may be "
                "float16"
            )


class ModelConfig(CriticModelConfig):
    """The actor's weights (the reference policy and the rollout start from the same)."""

    # The critic's settings and LoRA's, which is the policy's alone; `path` stands here for its
    # documentation.
    path: InputPath | None = None  #: model folder or hub name; required
    lora_rank: NonNegativeInt = 0  #: rank of LoRA adapters; 0 = train all weights
    lora_alpha: PositiveInt = 16  #: what they compute counts lora_alpha / lora_rank times
    #: layers that have one, by name; all-linear = all but the head
    target_modules: tuple[str, ...] = ("all-linear",)

    def problems(self) -> Iterator[str]:
        """Yields what keeps the policy from being trained."""
        if self.path is None:
            yield (
                "actor_rollout_ref.model.path is missing: give a model folder or a hub name "
                "(org/name)"
            )
        if self.lora_rank > 0 and importlib.util.find_spec("peft") is None:
            yield (
                f"actor_rollout_ref.model.lora_rank={self.lora_rank}: LoRA needs peft; "
                '`pip install "peft>=0.17,<1"`, or use 0'
            )
