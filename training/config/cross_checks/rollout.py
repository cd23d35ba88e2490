"""Checks the rollout engine and its sampling against lengths, ranks and environments."""

from collections.abc import Iterator

from training.config.schema.ppo import PPOConfig

KEY = "actor_rollout_ref.rollout"


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields what no engine could do; what one engine refuses, its class tells."""
    rollout = config.actor_rollout_ref.rollout
    row_length = config.data.row_length
    response_length = config.data.max_response_length
    ranks_per_node = config.trainer.n_gpus_per_node
    validation = rollout.val_kwargs
    # Environments may differ from one episode to the next, which greedy answers can measure.
    if validation.n > 1 and not validation.do_sample and not config.environments:
        yield (
            f"{KEY}.val_kwargs.n={validation.n} with do_sample=false repeats one "
            "greedy answer: set do_sample=true or n=1"
        )
    if config.max_model_len < row_length:
        yield (
            f"{KEY}.max_model_len={config.max_model_len} is shorter than "
            f"data.max_prompt_length + data.max_response_length = {row_length}"
        )
    if rollout.response_length not in (None, response_length):
        yield (
            f"{KEY}.response_length={rollout.response_length} contradicts "
            f"data.max_response_length={response_length}: leave the first null"
        )
    if ranks_per_node % rollout.tensor_model_parallel_size:
        yield (
            f"{KEY}.tensor_model_parallel_size={rollout.tensor_model_parallel_size} does not "
            f"divide trainer.n_gpus_per_node={ranks_per_node}: an engine's ranks share a "
            "machine"
        )


def warnings(config: PPOConfig) -> Iterator[str]:
    """Yields what of the prompts' settings nothing reads."""
    if config.data.return_raw_chat and config.environments:
        yield (
            "data.return_raw_chat=true has no effect with an environment: agent.episodes_dir "
            "keeps conversations"
        )
