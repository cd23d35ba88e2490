"""The settings of agents and their environments; a part of `training/config.py`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from training.config_base import CustomClassConfig, Section


@dataclass(frozen=True, kw_only=True)
class EnvironmentChoice(Section):
    """What the agent acts in. Give `name`, or `path` and `cls`."""

    name: str | None = None  #: gymnasium:ID, reasoning_gym:DATASET, textarena:ID, or PACKAGE.MODULE:CLASS
    path: str | None = None  #: Python file with a class of your own
    cls: str | None = None  #: name of the class in that file
    kwargs: dict[str, Any] = field(default_factory=dict)  #: its settings
    isolation: Literal["thread", "process", "ray"] = "thread"  #: where it runs; only process and ray can be killed
    num_workers: int | None = None  #: calls (threads) or environments at once; null = no limit
    prompt_template: str | None = None  #: how an adapter words its observations; null = its own

    @property
    def is_set(self) -> bool:
        """An environment is named."""
        return self.name is not None or self.path is not None


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Section):
    """Episodes of several turns in an environment, beside the rollout engine."""

    cls: CustomClassConfig = CustomClassConfig()
    environment: EnvironmentChoice = EnvironmentChoice()
    agent_length: int | None = None  #: episodes of a step before ×n; null = data.train_batch_size
    val_length: int = 0  #: episodes of a validation, the same every time; 0 = no validation
    max_turn: int = 10  #: turns of an episode
    max_turn_tokens: int | None = None  #: tokens of a turn; a longer one is closed and played
    include_state: bool = True  #: add get_state_description() to observations that lack it
    max_observation_chars: int = 20000  #: a longer observation is cut in its middle
    tools: tuple[str, ...] = ()  #: FILE.py:NAME of a Tool, or calculator, python
    parser: Literal["json", "react", "function"] = "function"  #: how tool calls are written in the model's text
    step_timeout_s: float | None = 120.0  #: seconds for one call of the environment; null = no deadline
    episode_timeout_s: float | None = None  #: seconds for all of an episode's calls; null = no deadline
    on_failure: Literal["zero", "mask", "refill"] = "zero"  #: failed: reward 0, left out, or retried
    max_refills: int = 3  #: refill: how often one episode is tried again, before it is masked
    episodes_dir: str | None = None  #: write every episode, for replay, to STEP.jsonl in this folder
