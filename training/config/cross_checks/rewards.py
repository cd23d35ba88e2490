"""Checks who scores a response against what there is to score."""

from collections.abc import Iterator

from training.config.schema.ppo import PPOConfig


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields what a reward model or a penalty lacks."""
    settings = config.reward_model
    penalty = settings.overlong_buffer
    longest = config.data.max_response_length
    if penalty.enable and not 0 < penalty.len <= longest:
        yield (
            f"reward_model.overlong_buffer.len={penalty.len} must be 1 to "
            f"data.max_response_length tokens, {longest}"
        )
    has_chats = config.data.return_raw_chat and not config.environments
    if settings.enable and settings.model.input_tokenizer and not has_chats:
        yield (
            "reward_model.model.input_tokenizer tells prompts anew: it needs "
            "data.return_raw_chat=true and prompts"
        )
