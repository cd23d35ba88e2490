"""The kinds of episodes that the core has: environments, and rows of a dataset with tools."""

from dataclasses import replace

from training.config.schema.agent import DATASET_ROWS, EnvironmentChoice
from training.config.schema.ppo import CoreConfig
from training.config.side_services import tool_sources
from workers.rollout.kinds import EpisodeKind


def named_environment(config: CoreConfig) -> EnvironmentChoice | None:
    """Returns `agent.environment` where it, or an agent class that may bring one, is named."""
    agent = config.agent
    if agent.environment.is_set or agent.cls.path:
        return agent.environment
    return None


def named_rows(config: CoreConfig) -> EnvironmentChoice | None:
    """Returns the environment of a dataset's rows where tools are given and nothing else plays."""
    agent = config.agent
    has_tools = agent.tools or tool_sources(config)
    if not (has_tools and config.data.train_files) or named_environment(config) is not None:
        return None
    prompt_key = {"prompt_key": config.data.prompt_key}
    return replace(agent.environment, name=DATASET_ROWS, kwargs=prompt_key)


def owns_environment(config: CoreConfig, choice: EnvironmentChoice) -> bool:
    """Checks whether something is stepped: whatever does not play by itself."""
    return not choice.plays_by_itself


DATASET_ROW = EpisodeKind(
    name="dataset row",
    named=named_rows,
    open_pool="workers.agent_pools:open_environments",
)
ENVIRONMENT = EpisodeKind(
    name="environment",
    named=named_environment,
    owns=owns_environment,
    open_pool="workers.agent_pools:open_environments",
    make_spec="workers.agent_specs:agent_spec",
    trial="training.environment_trial:try_environments",
    check="training.config.resources.agents:check_environment",
)
