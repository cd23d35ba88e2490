"""Who plays, as specs that a config's environments give; and reward functions that are tried.

Invariant: a spec is data; what it describes is built where its episodes are played.
"""

from collections.abc import Sequence
from dataclasses import replace

from custom.agent import AgentSpec
from custom.env import Task
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.config.schema.agent import PASSED_AS_OBJECT, EnvironmentChoice
from training.config.schema.reward import CustomRewardFunctionConfig
from training.config.side_services import side_services, tool_sources
from workers.agent_pools import open_pool
from workers.environments.names import environment_name
from workers.environments.pool import EnvironmentPool
from workers.rollout.kinds import EpisodeSpec, kind_of_choice


def agent_specs(config: PPOConfig, agent_cls: type | None = None) -> list[EpisodeSpec]:
    """Returns how the config's environments are played, one spec each.

    `agent_cls` wins over `agent.cls`. ValueError where there is nothing to act in.
    """
    if agent_cls is not None:
        config = config.acting_in_given
    if not config.environments:
        raise ValueError(
            "there is nothing to act in: set agent.environment or agent.cls, or give agent_cls or "
            "specs"
        )
    specs: list[EpisodeSpec] = []
    for choice in config.environments:
        kind = kind_of_choice(config, choice)
        if kind is None or kind.make_spec is None:
            raise ValueError(f"{choice} is played by no kind of episodes that is here")
        spec = kind.load(kind.make_spec)(config, choice)
        if agent_cls is not None and isinstance(spec, AgentSpec):
            spec = replace(spec, agent_path=None, agent_cls=agent_cls)
        specs.append(spec)
    return specs


def agent_spec(config: PPOConfig, environment: EnvironmentChoice) -> AgentSpec:
    """Returns how an environment's agents are built."""
    agent = config.agent
    reward = config.custom_reward_function
    if config.plays_dataset_rows:
        # It scores rows, not trajectories.
        reward = CustomRewardFunctionConfig()
    return AgentSpec(
        _source(environment),
        kwargs=environment.kwargs,
        agent_path=agent.cls.path,
        agent_name=agent.cls.name or "Agent",
        tools=(*agent.tools, *tool_sources(config)),
        parser=agent.parser,
        include_state=agent.include_state,
        prompt_template=environment.prompt_template,
        max_observation_chars=agent.max_observation_chars,
        reward_path=reward.path,
        reward_name=reward.name,
        reward_kwargs=reward.reward_kwargs,
        max_turn=environment.max_turn,
        max_turn_tokens=environment.max_turn_tokens,
        services=side_services(config),
    )


def _source(environment: EnvironmentChoice) -> str | None:
    """Returns what an environment is made from; None where the agent class brings its own."""
    if environment.path is not None:
        return f"{environment.path}:{environment.cls}"
    return None if environment.name == PASSED_AS_OBJECT else environment.name


def try_reward_functions(config: PPOConfig, specs: Sequence[EpisodeSpec]) -> None:
    """Has each agent with a reward function of its own play an episode of one turn, and be paid.

    Raises:
        ConfigError: a function raises, returns no reward, or takes other arguments.
    """
    agents = [spec for spec in specs if isinstance(spec, AgentSpec)]
    if not any(spec.reward_fn or spec.reward_path for spec in agents):
        return
    problems = []
    with open_pool(config, agents) as pool:
        for index in range(len(agents)):
            problems += reward_problems(pool, agents, index, config.data.run_seed)
    if problems:
        raise ConfigError(problems)


def reward_problems(
    pool: EnvironmentPool,
    specs: Sequence[AgentSpec],
    index: int,
    seed: int,
    task: Task | None = None,
) -> list[str]:
    """Says what is wrong with a spec's reward function, if it has one, after an episode of a turn.

    Args:
        task: what the reset is given beside the seed.
    What else fails in the episode shows when it is played.
    """
    spec = specs[index]
    if spec.reward_fn is None and spec.reward_path is None:
        return []
    pool.trial(index, index, seed, episodes=1, max_turn=1, task=task)
    reply = pool.wait_for_reply()
    if reply.failure != "reward_fault":
        return []
    name = environment_name(spec.source)
    return [f"{reply.error}; seen before the first step, in an episode of {name}"]
