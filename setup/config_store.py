"""The configuration of the small API: a ConfigStore, and how it is read and written.

Invariant: a ConfigStore holds names and values alone; `settings` says in the trainer's keys what
they mean, and the trainer's own reader checks them, so that no rule stands here twice.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from custom.env import EnvironmentConfig
from setup.config_sections import (
    CheckedFields,
    CheckpointConfig,
    InferenceConfig,
    ModelConfig,
    RayConfig,
    TrainerField,
    TrainingConfig,
    trainer_fields,
)
from setup.import_paths import import_paths
from training.config import PPOConfig
from training.config.leaves import leaves
from training.config.loader import load_config, read_config
from training.config.reference import to_yaml
from training.core_algos.built_in import estimator_needs

# Samples of each prompt for estimators that compare a group, where the config leaves it open.
GROUP_SIZE = 8
# Tokens of an environment's reply to a turn, for which an episode has room where the config leaves
# its length open.
REPLY_TOKENS = 256


@dataclass
class ConfigStore(CheckedFields):
    """Holds the settings of a run in sections, all optional.

    docs/python.md has the table of fields and defaults. `overrides` takes any further setting by
    the trainer's own dotted key, and wins.

    Raises:
        AttributeError: a field is misspelt; names the nearest.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    overrides: dict[str, Any] = field(default_factory=dict)
    # Those of environment, reward_fn and dataset that a trainer has; see `bind_objects`.
    _objects: dict[str, Any] = field(default_factory=dict, repr=False)

    # The trainer's settings

    def settings(self, iterations: int | None = None) -> dict[str, Any]:
        """Returns the trainer's settings by dotted key.

        Args:
            iterations: steps of an epoch; None: `training.iterations_per_epoch`.
        """
        steps_per_epoch = iterations or self.training.iterations_per_epoch
        settings = {item.key: item.value for item in self._trainer_fields()}
        settings["actor_rollout_ref.model.path"] = self.model.local_path or self.model.model_name
        settings |= self._response_lengths()
        if self.inference.multi_turn is False:
            settings["agent.max_turn"] = 1
        settings["actor_rollout_ref.rollout.n"] = self._group_size()
        settings["trainer.total_training_steps"] = self.training.num_epochs * steps_per_epoch
        settings["trainer.save_freq"] = self.checkpoint.save_interval * steps_per_epoch
        settings["trainer.launcher"] = "ray" if self.ray.use_ray else "local"
        settings["trainer.logger"] = ["file"]
        settings["data.dataloader_num_workers"] = 0
        return settings | self.overrides

    def plays_episodes(self) -> bool:
        """Checks whether episodes are played in an environment, rather than prompts answered."""
        names_environment = self.overrides.get("agent.environment.name")
        names_file = self.overrides.get("agent.environment.path")
        return "environment" in self._objects or bool(names_environment or names_file)

    def bind_objects(self, objects: Mapping[str, Any]) -> None:
        """Takes over which objects a trainer has, by "environment", "reward_fn" and "dataset".

        With an environment episodes are played, and `save` writes where the objects are defined.
        """
        self._objects = dict(objects)

    def _group_size(self) -> int:
        """Returns the samples of each prompt: those set, or as many as the estimator needs."""
        if self.training.group_size:
            return self.training.group_size
        compares_groups = "index" in estimator_needs(self.training.adv_estimator)
        return GROUP_SIZE if compares_groups else 1

    def _response_lengths(self) -> dict[str, int]:
        """Returns the settings that bound a turn and a response, in tokens."""
        inference = self.inference
        longest = inference.max_response_length
        if not self.plays_episodes():
            return {"data.max_response_length": longest or inference.max_tokens}
        if not longest and inference.multi_turn is False:
            longest = inference.max_tokens
        if not longest:
            longest = inference.max_turns * (inference.max_tokens + REPLY_TOKENS)
        return {
            "agent.max_turn_tokens": min(inference.max_tokens, longest),
            "data.max_response_length": longest,
        }

    def _trainer_fields(self) -> list[TrainerField]:
        """Lists what the fields of all sections set of the trainer's keys."""
        listed: list[TrainerField] = []
        for name, section in vars(self).items():
            if isinstance(section, CheckedFields):
                listed.extend(trainer_fields(name, section))
        return listed

    def with_field_names(self, text: str) -> str:
        """Returns a text with `config.SECTION.FIELD` in the place of the trainer's keys."""
        for item in self._trainer_fields():
            text = text.replace(item.key, f"config.{item.section}.{item.name}")
        return text

    # Reading and writing

    def to_omegaconf(self) -> DictConfig:
        """Returns the trainer's full config.

        `RayPPOTrainer`, `AgentTrainer` and `python main.py` take it.
        """
        return OmegaConf.create(asdict(read_config(self.settings(), check=False)))

    def save(self, path: str | Path) -> None:
        """Writes the trainer's YAML, which `python main.py` runs and `load` reads.

        Environment, reward function and dataset, which the trainer was given, stand in it by their
        import paths; what has none, the file's first lines name: its reader must supply it.
        """
        settings = self.settings()
        header = ""
        for role, import_path in import_paths(self._objects).items():
            settings |= import_path.settings
            if import_path.missing:
                header += (
                    f"# {role} has no import path, and must be supplied: {import_path.missing}\n"
                )
        environment_kwargs = asdict(self.environment)
        if environment_kwargs:
            settings["agent.environment.kwargs"] = environment_kwargs
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(header + to_yaml(read_config(settings, check=False)))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a YAML of the trainer's; what no field stands for is in `overrides`."""
        return cls.of(load_config([str(path)], check=False).config)

    @classmethod
    def of(cls, config: PPOConfig | Mapping[str, Any] | DictConfig) -> Self:
        """Makes one of a trainer's config; what no field stands for is in `overrides`."""
        typed = read_config(config, check=False)
        values = {key: leaf.value for key, leaf in leaves(typed)}
        store = cls()
        for item in store._trainer_fields():
            setattr(getattr(store, item.section), item.name, values[item.key])
        store.training.group_size = values["actor_rollout_ref.rollout.n"]
        store.inference.max_response_length = values["data.max_response_length"]
        defaults = {key: leaf.value for key, leaf in leaves(PPOConfig())}
        expressed = defaults | store.settings()
        store.overrides = {key: value for key, value in values.items() if value != expressed[key]}
        return store
