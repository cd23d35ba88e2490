"""verl's config classes for Python code: what a YAML file says is read by training.config.loader.

A class here is the section of training.config with what verl's has beside it, so that it stands
wherever the section does. Invariant: what no run reads is taken and kept, never acted on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass
from typing import Any, ClassVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from data.loading import load_object
from features.verl.rollout_presets import RolloutPresets
from training import config as sections
from training.config import AlgorithmConfig, RunLossConfig
from training.config.schema.actor import PolicyLossChoice

# The target of a config of verl's is one of its classes.
VERL = "verl."


@dataclass
class BaseConfig(Mapping[str, Any]):
    """Makes a dataclass whose fields are also had by key, and are set once.

    What `_mutable_fields` of a subclass names may be set again.
    """

    _mutable_fields: ClassVar[frozenset[str] | set[str]] = frozenset()
    _target_: str = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) and name not in self._mutable_fields:
            raise FrozenInstanceError(
                f"{type(self).__name__}.{name} is set already; name it in _mutable_fields, or make "
                "another one with dataclasses.replace"
            )
        super().__setattr__(name, value)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the field, or `default` where there is none."""
        return getattr(self, key, default)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


class _Names:
    """Makes `list(config)`, `len(config)` and `**config` of a section work as verl's do."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def keys(self) -> list[str]:
        """Returns the names of the fields."""
        return [field.name for field in fields(self)]  # type: ignore[arg-type]


class PolicyLossConfig(PolicyLossChoice, _Names):
    """Which policy loss: `actor_rollout_ref.actor.policy_loss`."""

    rollout_correction: Any = None  #: of bypass_mode: a RolloutCorrectionConfig, or a mapping


class ActorConfig(RunLossConfig, _Names):
    """The actor's section, as losses written for verl take it for `config`."""

    policy_loss: PolicyLossConfig = PolicyLossConfig()
    # Nothing reads these.
    data_loader_seed: Any = None
    engine: Any = None
    entropy_checkpointing: bool = False
    entropy_from_logits_with_chunking: bool = False
    freeze_vision_tower: bool = False
    model_config: Any = None
    ppo_infer_max_token_len_per_gpu: int | None = None
    ppo_infer_micro_batch_size_per_gpu: int | None = None
    ppo_micro_batch_size: int | None = None
    profiler: Any = None
    rollout_n: int = 1
    use_fused_kernels: bool = False
    use_remove_padding: bool = True
    use_rollout_log_probs: bool = False
    use_torch_compile: bool = True


class AlgoConfig(AlgorithmConfig, _Names):
    """The section `algorithm`, as estimators written for verl take it for `config`."""


FSDPActorConfig = ActorConfig


class RolloutCorrectionConfig(RolloutPresets, sections.RolloutCorrectionConfig, _Names):
    """The section `algorithm.rollout_correction`, with verl's default and its presets by name."""

    rollout_is: Any = "sequence"
    # Numbers stay numbers; what reads them takes both.
    rollout_is_threshold: Any = 2.0
    rollout_rs_threshold: Any = None


def omega_conf_to_dataclass(config: Any, dataclass_type: type | None = None) -> Any:
    """Makes a dataclass of a mapping.

    Args:
        config: a mapping or OmegaConf; what is neither is returned as it is.
        dataclass_type: None: what the entry `_target_` names, as in verl's YAML files. A target of
            verl's is the class of that name here.
    Raises:
        ValueError: there is no class, or nothing here has its name.
    """
    if not isinstance(config, Mapping | DictConfig | ListConfig):
        return config
    if not config:
        return dataclass_type() if dataclass_type else None
    entries = OmegaConf.to_container(OmegaConf.create(dict(config)), resolve=True)
    if dataclass_type is None and "_target_" not in entries:
        raise ValueError(
            f"{sorted(map(str, entries))} has no _target_: add it, or give dataclass_type"
        )
    return _made(entries, dataclass_type)


def _made(entries: dict[str, Any], dataclass_type: type | None) -> Any:
    """Makes a dataclass of its fields, those first that have a target of their own."""
    settings = dict(entries)
    target = settings.pop("_target_", None)
    cls = dataclass_type or _class_of(str(target))
    if not is_dataclass(cls):
        raise ValueError(f"{cls} must be a dataclass")
    for name, value in settings.items():
        if isinstance(value, dict) and "_target_" in value:
            settings[name] = _made(value, None)
    return cls(**settings)


def _class_of(target: str) -> type:
    """Finds the class of a target: of verl's the one of its name here."""
    module, _, name = target.rpartition(".")
    if not target.startswith(VERL):
        return load_object(f"{module}:{name}", "_target_")
    cls = globals().get(name) or getattr(sections, name, None)
    if cls is None:
        raise ValueError(f"_target_={target}: nothing here has that name; features/verl/names.md")
    return cls


def __getattr__(name: str) -> Any:
    """Returns what training.config has."""
    return getattr(sections, name)
