"""Episodes of agents as training batches, the driver's side.

    driver   SyncMultiTurnRollout   reset() -> rollout() -> build_update_batch()
                                        | descriptions         ^ rows
    worker   AgentRollout               v batch_of -> TurnLoop -> rows_of       (agent_rollout.py)

The driver describes episodes (who plays, with which seed) and gets rows back.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from custom.env_suite import EnvironmentSuite
from custom.model_usage import USAGE
from data.protocol import DataProto
from data.seeds import step_info
from training.config import PPOConfig
from workers.environments.names import environment_name
from workers.rollout.episode_descriptions import describe_episodes as describe_episodes
from workers.rollout.kinds import EpisodeSpec

if TYPE_CHECKING:
    from workers.agent_pools import open_pool as open_pool
    from workers.agent_rollout import AgentRollout as AgentRollout
    from workers.agent_specs import agent_specs as agent_specs
    from workers.agent_specs import reward_problems as reward_problems

# Names that once stood here; they bring what plays, which the driver does without.
MOVED = {
    "AgentRollout": "workers.agent_rollout",
    "open_pool": "workers.agent_pools",
    "reward_problems": "workers.agent_specs",
    "agent_specs": "workers.agent_specs",
}


def __getattr__(name: str) -> Any:
    """Finds a name that has moved where it stands now."""
    if name not in MOVED:
        raise AttributeError(f"module {__name__} has no {name}")
    return getattr(importlib.import_module(MOVED[name]), name)


class SyncMultiTurnRollout:
    """Lets the workers play episodes, and hands their rows to the trainer: the driver's side.

    Args:
        actor_rollout_wg: the policy's worker group.
        cfg: the run's config.
        tokenizer, processor: for those who override this class; the workers have their own.
        agent_cls: an agent class of one's own; None: `agent.cls`, or the built-in one.
        specs: how the agents are built; None: as the config says.

    Attributes:
        wanted: what the trainer described last, which `reset` takes where it is given nothing.
        facts: of sampled episodes, also of those that are filtered out, by (whether it is
            validation, step).
    """

    def __init__(
        self,
        actor_rollout_wg: Any,
        cfg: PPOConfig,
        tokenizer: Any = None,
        processor: object = None,
        agent_cls: type | None = None,
        specs: Sequence[EpisodeSpec] | None = None,
    ) -> None:
        self.actor_rollout_wg = actor_rollout_wg
        self.config = cfg
        self.tokenizer = tokenizer
        self.processor = processor
        self.resets = 0
        self.wanted: DataProto | None = None
        self.facts: dict[tuple[bool, int], list[dict[str, Any]]] = {}
        self.episodes: DataProto | None = None
        self.batch: DataProto | None = None
        if specs is None:
            # It opens pools of environments, which a trainer with specs of its own has tried.
            from workers.agent_specs import agent_specs, try_reward_functions

            specs = agent_specs(cfg, agent_cls)
            try_reward_functions(cfg, specs)
        names = [environment_name(spec.source) for spec in specs]
        self.suite = EnvironmentSuite(names, [1.0] * len(names))
        actor_rollout_wg.start_agents(specs)

    def reset(self, gen_batch: DataProto | None = None) -> None:
        """Chooses what is played next: `gen_batch`, or what the trainer wants.

        `gen_batch` is as `describe_episodes` makes it. Without a trainer
        `agent.agent_length` x `rollout.n` fresh episodes are played, of each environment in turn.
        """
        self.batch = None
        self.episodes = gen_batch or self.wanted
        if self.episodes is not None:
            return
        self.resets += 1
        info = step_info(
            step=self.resets,
            seed=self.config.data.run_seed,
            seeded=self.config.trainer.deterministic,
        )
        self.episodes = describe_episodes(
            self.config.prompts_per_step,
            self.config.actor_rollout_ref.rollout.n,
            info,
            suite=self.suite,
        )

    def rollout(self) -> list[dict[str, Any]]:
        """Plays what `reset` chose.

        Returns:
            Each episode's facts (see `episode_facts`), in order.
        """
        if self.episodes is None:
            raise ValueError("nothing to play: call reset() first")
        self.batch = self.actor_rollout_wg.run_episodes(self.episodes)
        column = self.batch.non_tensor_batch["episode_facts"]
        facts = [entry for entry in column if entry is not None]
        for episode in facts:
            USAGE.add(episode["models"])
        info = self.episodes.meta_info
        if info.get("do_sample", True):
            key = (bool(info["validate"]), info["global_steps"])
            self.facts.setdefault(key, []).extend(facts)
        return facts

    def take_facts(self, validate: bool = False, step: int | None = None) -> list[dict[str, Any]]:
        """Returns the facts of sampled episodes since the last time.

        They are of training or of validation; with `step` of that step alone.
        """
        facts = []
        for key in list(self.facts):
            of_validation, of_step = key
            if of_validation == validate and step in (None, of_step):
                facts += self.facts.pop(key)
        return facts

    def build_update_batch(self) -> DataProto:
        """Returns what was played, as rows to train on; see `AgentRollout.rows_of`."""
        if self.batch is None:
            raise ValueError("nothing was played: call rollout() first")
        return self.batch

    def close(self) -> None:
        """Closes the workers' environment pools."""
        self.actor_rollout_wg.close_agents()
