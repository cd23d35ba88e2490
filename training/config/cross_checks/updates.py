"""Checks how a step's batch is cut for the updates of policy and critic, and their resuming."""

from collections.abc import Iterator

from training.config.schema.actor import ActorConfig
from training.config.schema.critic import CriticConfig
from training.config.schema.ppo import PPOConfig


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields what keeps the policy from being updated on these ranks."""
    key = "actor_rollout_ref.actor"
    actor = config.actor_rollout_ref.actor
    if config.trainer.num_ranks % actor.ulysses_sequence_parallel_size:
        yield (
            f"{key}.ulysses_sequence_parallel_size="
            f"{actor.ulysses_sequence_parallel_size} does not divide trainer.nnodes x "
            f"trainer.n_gpus_per_node = {config.trainer.num_ranks} ranks: take one of its "
            "divisors"
        )
    yield from update_problems(key, actor, config)


def update_problems(
    key: str, model: ActorConfig | CriticConfig, config: PPOConfig
) -> Iterator[str]:
    """Yields what keeps a model, whose section is called `key`, from being updated and resumed.

    Args:
        model: the actor's section, or the critic's with what it takes over from the actor.
    """
    yield from _mini_batch_problems(key, model, config)
    yield from model.micro_batching.problems_of_pass(f"{key}.ppo", config.data.row_length)
    if config.trainer.resume_mode != "disable":
        yield from model.checkpoint.resume_problems(f"{key}.checkpoint")


def _mini_batch_problems(
    key: str, model: ActorConfig | CriticConfig, config: PPOConfig
) -> Iterator[str]:
    """Requires that a step divides into mini-batches, those over ranks and into micro-batches."""
    n = config.actor_rollout_ref.rollout.n
    prompts = config.prompts_per_step
    # Where ranks do not divide there is no group of them, which is reported too.
    groups_of_ranks = max(config.data_parallel_size, 1)
    ranks_per_sequence = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    among = f"{groups_of_ranks} ranks"
    if ranks_per_sequence > 1:
        among = f"{groups_of_ranks} groups of {ranks_per_sequence} ranks that share sequences"

    step_setting = f"data.train_batch_size={config.data.train_batch_size}"
    if config.environments and config.agent.agent_length:
        step_setting = f"agent.agent_length={config.agent.agent_length}"
    mini_batch = prompts
    mini_batch_setting = step_setting
    if model.ppo_mini_batch_size is not None:
        mini_batch = model.ppo_mini_batch_size
        mini_batch_setting = f"{key}.ppo_mini_batch_size={mini_batch}"

    if prompts % mini_batch:
        yield (
            f"{step_setting} must be a multiple of {mini_batch_setting}: a step is cut into equal "
            "mini-batches"
        )
    rows_per_rank, rest = divmod(mini_batch * n, groups_of_ranks)
    micro_batch = model.micro_batching.micro_batch_size
    if rest:
        yield (
            f"{mini_batch_setting} x rollout.n={n} = {mini_batch * n} rows do not divide among "
            f"{among}"
        )
    elif micro_batch and rows_per_rank % micro_batch:
        yield (
            f"{key}.ppo_micro_batch_size_per_gpu={micro_batch} does not divide the "
            f"{rows_per_rank} rows of a mini-batch on a rank ({mini_batch_setting} x "
            f"rollout.n={n} / {among})"
        )
