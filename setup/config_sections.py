"""The sections of a ConfigStore: their fields, defaults, and the trainer's keys that they set.

Invariant: a section holds names and values alone. Bounds and combinations are checked by the
trainer's own reader of configs, so that no rule stands here twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from data.names import did_you_mean

# Where a field's metadata name the trainer's keys that it sets.
TRAINER_KEYS = "trainer_keys"


def trainer_field(default: Any, *keys: str) -> Any:
    """Makes a field whose value goes to each of these keys of the trainer."""
    return field(default=default, metadata={TRAINER_KEYS: keys})


@dataclass
class CheckedFields:
    """Refuses to set what is no field, and names the nearest field."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = [item.name for item in fields(self)]
        if name not in known and not name.startswith("_"):
            hint = did_you_mean(name, known) or f" It has: {', '.join(known)}"
            raise AttributeError(f"{type(self).__name__} has no field {name!r}.{hint}")
        current = getattr(self, name, None)
        if isinstance(current, CheckedFields) and not isinstance(value, CheckedFields):
            raise TypeError(
                f"{name} is a section: set its fields, as config.{name}.FIELD = {value!r}"
            )
        super().__setattr__(name, value)


@dataclass(frozen=True)
class TrainerField:
    """Links a field of a section, and its value, to one of the trainer's keys that it sets."""

    key: str
    section: str
    name: str
    value: Any


def trainer_fields(section_name: str, section: CheckedFields) -> Iterator[TrainerField]:
    """Yields a TrainerField for each of the trainer's keys that the section sets."""
    for item in fields(section):
        for key in item.metadata.get(TRAINER_KEYS, ()):
            yield TrainerField(
                key=key,
                section=section_name,
                name=item.name,
                value=getattr(section, item.name),
            )


@dataclass
class ModelConfig(CheckedFields):
    """Chooses which weights are trained, and where."""

    #: name on the hub
    model_name: str | None = trainer_field(None, "actor_rollout_ref.model.path")
    #: compute type of trainer and engine: bfloat16, float32 (float16: engine only)
    dtype: str = trainer_field(
        "bfloat16",
        "actor_rollout_ref.model.dtype",
        "actor_rollout_ref.rollout.dtype",
        "critic.model.dtype",
    )
    #: cuda or cpu; None = cuda where there is one
    device: str | None = trainer_field(None, "trainer.device")
    #: ranks that share an engine
    tensor_parallel_size: int = trainer_field(
        1, "actor_rollout_ref.rollout.tensor_model_parallel_size"
    )
    #: folder of the weights; wins over model_name
    local_path: str | None = None
    #: run Python code that comes with the model
    trust_remote_code: bool = trainer_field(
        False,
        "actor_rollout_ref.model.trust_remote_code",
        "critic.model.trust_remote_code",
    )


@dataclass
class InferenceConfig(CheckedFields):
    """Sets how the policy answers."""

    #: vllm, sglang or hf
    backend: str = trainer_field("vllm", "actor_rollout_ref.rollout.name")
    #: tokens of a turn, or of an answer
    max_tokens: int = 256
    #: of sampling
    temperature: float = trainer_field(1.0, "actor_rollout_ref.rollout.temperature")
    #: sample among the likeliest tokens of this total probability
    top_p: float = trainer_field(1.0, "actor_rollout_ref.rollout.top_p")
    #: False: one turn in an environment; True needs one; None = as max_turns says
    multi_turn: bool | None = None
    #: turns of an episode
    max_turns: int = trainer_field(10, "agent.max_turn")
    #: tokens of the prompt, or of the first messages
    max_prompt_length: int = trainer_field(512, "data.max_prompt_length")
    #: tokens of an episode, replies included; None = as ConfigStore.settings makes it
    max_response_length: int | None = None


@dataclass
class TrainingConfig(CheckedFields):
    """Sets what is learnt, and how fast."""

    learning_rate: float = trainer_field(1e-6, "actor_rollout_ref.actor.optim.lr")
    gamma: float = trainer_field(1.0, "algorithm.gamma")
    lam: float = trainer_field(1.0, "algorithm.lam")
    clip_ratio: float = trainer_field(0.2, "actor_rollout_ref.actor.clip_ratio")
    num_epochs: int = 1
    #: prompts or tasks of a step
    batch_size: int = trainer_field(32, "data.train_batch_size")
    #: docs/algorithms.md lists them
    adv_estimator: str = trainer_field("grpo", "algorithm.adv_estimator")
    #: the reference model is loaded only then
    use_kl_in_reward: bool = trainer_field(False, "algorithm.use_kl_in_reward")
    kl_coef: float = trainer_field(0.001, "algorithm.kl_ctrl.kl_coef")
    #: samples of each prompt; None = as ConfigStore.settings makes it
    group_size: int | None = None
    entropy_coeff: float = trainer_field(0.0, "actor_rollout_ref.actor.entropy_coeff")
    #: rows of a forward pass; None = by tokens
    micro_batch_size: int | None = trainer_field(
        None,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
    )
    #: steps of an epoch, where there is no dataset
    iterations_per_epoch: int = 10


@dataclass
class CheckpointConfig(CheckedFields):
    """Sets where a run is kept, and how often."""

    #: folder of the run
    output_dir: str = trainer_field("./checkpoints", "trainer.default_local_dir")
    #: epochs between checkpoints
    save_interval: int = 1
    #: how many checkpoints stay; None = all
    keep_last_n: int | None = trainer_field(
        2, "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"
    )


@dataclass
class RayConfig(CheckedFields):
    """Sets how many ranks there are, and whether Ray places them."""

    use_ray: bool = False
    #: ranks
    num_actors: int = trainer_field(1, "trainer.n_gpus_per_node")
