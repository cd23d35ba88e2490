"""Environments, the small API's configuration, and batches of episodes.

Invariant: a ConfigStore holds names and values alone; `settings` says in the trainer's keys what they mean, and the
trainer's own reader checks them, so that no rule stands here twice.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

from omegaconf import DictConfig, OmegaConf

from custom.env import EnvironmentConfig, Trajectory
from custom.env_dataset import CustomEnvDataset
from custom.reward_manager import EnvironmentRewardWrapper, decode_prompt
from data.protocol import DataProto
from data.rl_dataset import RLHFDataset
from data.texts import did_you_mean
from training.batch.batching import EpisodeRows
from training.config import PPOConfig
from training.config.algorithm_settings import estimator_needs
from training.config.loader import load_config, read_config, to_yaml
from training.config.section import leaves
from training.config.settings import GIVEN

__all__ = [
    "CheckpointConfig",
    "ConfigStore",
    "CustomEnvironmentDataset",
    "EnvironmentRewardWrapper",
    "InferenceConfig",
]
__all__ += ["ModelConfig", "RayConfig", "RolloutData", "TrainingConfig"]

CustomEnvironmentDataset = CustomEnvDataset

POLICY, CRITIC, ROWS = "actor_rollout_ref", "critic", "ppo_micro_batch_size_per_gpu"
# Samples of each prompt for estimators that compare a group, where the config leaves it open.
GROUP_SIZE = 8


def of(default: Any, *keys: str) -> Any:
    """Makes a field that stands for these keys of the trainer; without any, `ConfigStore.settings` says what it is."""
    return field(default=default, metadata={"keys": keys})


class Fields:
    """Refuses names that it has no field for, with the nearest one."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = [item.name for item in fields(self)]  # type: ignore[arg-type]
        if name not in known and not name.startswith("_"):
            near = did_you_mean(name, known) or f" It has: {', '.join(known)}"
            raise AttributeError(f"{type(self).__name__} has no field {name!r}.{near}")
        if isinstance(getattr(self, name, None), Fields) and not isinstance(value, Fields):
            raise TypeError(
                f"{name} is a section: set its fields, as config.{name}.FIELD = {value!r}"
            )
        super().__setattr__(name, value)


@dataclass
class ModelConfig(Fields):
    """Which weights are trained, and where."""

    model_name: str | None = of(None, f"{POLICY}.model.path")
    dtype: str = of(
        "bfloat16", f"{POLICY}.model.dtype", f"{POLICY}.rollout.dtype", f"{CRITIC}.model.dtype"
    )
    device: str | None = of(None, "trainer.device")
    tensor_parallel_size: int = of(1, f"{POLICY}.rollout.tensor_model_parallel_size")
    local_path: str | None = of(None)
    trust_remote_code: bool = of(
        False, f"{POLICY}.model.trust_remote_code", f"{CRITIC}.model.trust_remote_code"
    )


@dataclass
class InferenceConfig(Fields):
    """How the policy answers."""

    backend: str = of("vllm", f"{POLICY}.rollout.name")
    max_tokens: int = of(256)
    temperature: float = of(1.0, f"{POLICY}.rollout.temperature")
    top_p: float = of(1.0, f"{POLICY}.rollout.top_p")
    multi_turn: bool | None = of(None)
    max_turns: int = of(10, "agent.max_turn")
    max_prompt_length: int = of(512, "data.max_prompt_length")
    max_response_length: int | None = of(None)


@dataclass
class TrainingConfig(Fields):
    """What is learnt, and how fast."""

    learning_rate: float = of(1e-6, f"{POLICY}.actor.optim.lr")
    gamma: float = of(1.0, "algorithm.gamma")
    lam: float = of(1.0, "algorithm.lam")
    clip_ratio: float = of(0.2, f"{POLICY}.actor.clip_ratio")
    num_epochs: int = of(1)
    batch_size: int = of(32, "data.train_batch_size")
    adv_estimator: str = of("grpo", "algorithm.adv_estimator")
    use_kl_in_reward: bool = of(False, "algorithm.use_kl_in_reward")
    kl_coef: float = of(0.001, "algorithm.kl_ctrl.kl_coef")
    group_size: int | None = of(None)
    entropy_coeff: float = of(0.0, f"{POLICY}.actor.entropy_coeff")
    micro_batch_size: int | None = of(None, f"{POLICY}.actor.{ROWS}", f"{CRITIC}.{ROWS}")
    iterations_per_epoch: int = of(10)


@dataclass
class CheckpointConfig(Fields):
    """Where a run is kept; `save_interval` counts epochs."""

    output_dir: str = of("./checkpoints", "trainer.default_local_dir")
    save_interval: int = of(1)
    keep_last_n: int | None = of(
        2, "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"
    )


@dataclass
class RayConfig(Fields):
    """How many ranks there are, and whether Ray places them."""

    use_ray: bool = of(False)
    num_actors: int = of(1, "trainer.n_gpus_per_node")


@dataclass
class ConfigStore(Fields):
    """Holds the settings of a run in sections, all optional; docs/python.md has the table of fields and defaults.

    `overrides` takes any further setting by the trainer's own dotted key, and wins.

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
    # Environment, reward function and dataset that a trainer was given.
    _objects: dict[str, Any] = field(default_factory=dict, repr=False)

    def settings(self, iterations: int | None = None) -> dict[str, Any]:
        """Returns the trainer's settings by dotted key; an epoch has `iterations` steps."""
        model, own, train = self.model, self.inference, self.training
        found = {key: value for key, _, value in self._mapped()}
        found[f"{POLICY}.model.path"] = model.local_path or model.model_name
        length = own.max_response_length
        if self.plays():
            # Room for what the environment says between the turns.
            length = length or own.max_turns * (own.max_tokens + 256)
            found["agent.max_turn_tokens"] = min(own.max_tokens, length)
        found["data.max_response_length"] = length or own.max_tokens
        by_group = "index" in estimator_needs(train.adv_estimator)
        found[f"{POLICY}.rollout.n"] = train.group_size or (GROUP_SIZE if by_group else 1)
        steps = iterations or train.iterations_per_epoch
        found["trainer.total_training_steps"] = train.num_epochs * steps
        found["trainer.save_freq"] = self.checkpoint.save_interval * steps
        found["trainer.launcher"] = "ray" if self.ray.use_ray else "local"
        return (
            found | {"trainer.logger": ["file"], "data.dataloader_num_workers": 0} | self.overrides
        )

    def plays(self) -> bool:
        """Says whether episodes are played, of several turns."""
        named = any(self.overrides.get(f"agent.environment.{key}") for key in ("name", "path"))
        told = self.inference.multi_turn
        return ("environment" in self._objects or named) if told is None else told

    def to_omegaconf(self) -> DictConfig:
        """Returns the full config of the trainer, as `RayPPOTrainer`, `AgentTrainer` and `python main.py` take it."""
        return OmegaConf.create(asdict(read_config(self.settings(), check=False)))

    def save(self, path: str | Path) -> None:
        """Writes the trainer's YAML, which `python main.py` runs and `load` reads.

        Environment, reward function and dataset, which the trainer was given, stand in it by their import paths; what
        has none, the file's first lines name: its reader must supply it.
        """
        settings, missing = self.settings(), ""
        for what, (keys, unknown) in import_paths(self._objects).items():
            settings |= keys
            missing += (
                f"# {what} has no import path, and must be supplied: {unknown}\n" if unknown else ""
            )
        if kwargs := asdict(self.environment):
            settings["agent.environment.kwargs"] = kwargs
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(missing + to_yaml(read_config(settings, check=False)))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a YAML of the trainer's; what no field stands for is in `overrides`."""
        return cls.of(load_config([str(path)], check=False).config)

    @classmethod
    def of(cls, config: PPOConfig | Mapping[str, Any] | DictConfig) -> Self:
        """Makes one of a trainer's config; what no field stands for is in `overrides`."""
        typed, store = read_config(config, check=False), cls()
        values = {key: leaf.value for key, leaf in leaves(typed)}
        for key, (section, name), _ in list(store._mapped()):
            setattr(getattr(store, section), name, values[key])
        store.training.group_size = values[f"{POLICY}.rollout.n"]
        store.inference.max_response_length = values["data.max_response_length"]
        ours, defaults = store.settings(), {key: leaf.value for key, leaf in leaves(PPOConfig())}
        store.overrides = {
            key: value for key, value in values.items() if value != ours.get(key, defaults[key])
        }
        return store

    def _mapped(self) -> list[tuple[str, tuple[str, str], Any]]:
        """Lists (trainer's key, (section, field), value) of the fields that stand for keys."""
        return [
            (key, (name, item.name), getattr(section, item.name))
            for name, section in vars(self).items()
            if isinstance(section, Fields)
            for item in fields(section)  # type: ignore[arg-type]
            for key in item.metadata.get("keys", ())
        ]

    def in_our_words(self, text: str) -> str:
        """Puts `config.SECTION.FIELD` in the place of the trainer's keys in a text."""
        for key, (section, name), _ in self._mapped():
            text = text.replace(key, f"config.{section}.{name}")
        return text


def import_paths(objects: Mapping[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Says for each object the trainer's settings that name it and, where it has no import path, what it is."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for what, thing in objects.items():
        made = thing if hasattr(thing, "__qualname__") else type(thing)
        module, name = sys.modules.get(made.__module__), made.__qualname__
        known = made.__module__ != "__main__" and getattr(module, name, None) is made
        file = str(module.__file__) if known and module else GIVEN
        if what == "environment":
            keys = {"path": file, "cls": name} if known else {"name": GIVEN}
            settings = {f"agent.environment.{key}": value for key, value in keys.items()}
        elif what == "reward_fn":
            # An object that is called is made by its program.
            known &= made is thing
            settings = {
                "custom_reward_function.path": file if known else GIVEN,
                "custom_reward_function.name": name,
            }
        else:
            known &= isinstance(thing, RLHFDataset) and hasattr(thing, "data_files")
            settings = {"data.train_files": list(map(str, thing.data_files)) if known else [GIVEN]}
            if known and made is not RLHFDataset:
                settings |= {"data.custom_cls.path": file, "data.custom_cls.name": name}
        found[what] = settings, "" if known else f"{name} of {made.__module__}"
    return found


class RolloutTurn(NamedTuple):
    """Holds a turn: what the policy saw and wrote, the token ids of that and of the reply to it, and what it was paid.

    `log_probs` are in nats and `mask` is 1 on the ids that the policy sampled; both are 0 on the reply's.
    """

    observation: str
    text: str
    tokens: list[int]
    log_probs: list[float]
    mask: list[int]
    reward: float


def _of_turns(name: str, data: Any) -> list[list[Any]]:
    return [[getattr(turn, name) for turn in turns] for turns in data.episodes]


@dataclass
class RolloutData:
    """Holds a batch of episodes, as `RayPPOTrainer.rollout` plays them and `train_step` trains on them.

    `texts`, `tokens`, `log_probs`, `masks` and `rewards` are lists by episode and, inside, by turn (see RolloutTurn).
    `batch` is what is trained on, `facts` what its metrics are made of.
    """

    batch: DataProto
    episodes: list[list[RolloutTurn]]
    endings: list[str]
    facts: list[dict[str, Any]]

    @classmethod
    def of(cls, batch: DataProto, tokenizer: Any, facts: Sequence[dict[str, Any]] = ()) -> Self:
        """Reads the episodes off a batch that is scored."""
        rows_of = EpisodeRows(batch).rows
        episodes = [
            [turn for row in rows for turn in turns_of(batch, row, tokenizer)] for rows in rows_of
        ]
        endings = batch.non_tensor_batch["ending"]
        return cls(batch, episodes, [str(endings[rows[0]]) for rows in rows_of], list(facts))

    def __len__(self) -> int:
        return len(self.episodes)

    texts, tokens, log_probs, masks, rewards = (
        property(partial(_of_turns, name))
        for name in ("text", "tokens", "log_probs", "mask", "reward")
    )

    @property
    def trajectories(self) -> list[Trajectory]:
        """Returns the episodes as trajectories, whose states are what the model read; infos are empty."""
        found = []
        for turns, ending in zip(self.episodes, self.endings, strict=True):
            states: list[Any] = [*(turn.observation for turn in turns), ""]
            dones = [turn is turns[-1] and ending == "done" for turn in turns]
            texts, rewards = [turn.text for turn in turns], [turn.reward for turn in turns]
            found.append(
                Trajectory(states, texts, rewards, dones, [{} for _ in turns], ending=ending)
            )
        return found


def turns_of(batch: DataProto, row: int, tokenizer: Any) -> Iterator[RolloutTurn]:
    """Yields the turns of a row."""
    tensors, decode = batch.batch[row], partial(tokenizer.decode, skip_special_tokens=True)
    ids, turns, mask = (tensors[name] for name in ("responses", "turn_ids", "response_mask"))
    log_probs = tensors.get("rollout_log_probs", mask * float("nan"))
    starts = [
        int((turns == number).nonzero()[0]) for number in turns.unique().tolist() if number >= 0
    ]
    seen = decode_prompt(tokenizer, batch.batch, row)
    for start, stop in pairwise([*starts, int(tensors["attention_mask"][-len(ids) :].sum())]):
        own, sampled = slice(start, stop), mask[start:stop] > 0
        text, paid = decode(ids[own][sampled]), float(tensors["token_level_scores"][own].sum())
        lists = [values[own].tolist() for values in (ids, log_probs, mask)]
        yield RolloutTurn(seen, text, *lists, paid)  # type: ignore[call-arg]
        seen = decode(ids[own][~sampled])
