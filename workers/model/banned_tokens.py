"""The token ids that are never sampled, by the policy's engine, trainer and reference alike.

    placeholders    of pictures, films and sounds, where the model also sees or hears: the ids that
                    its configuration and its tokenizer name
    rollout.banned_token_ids    the user's

All three renormalise over the other ids, so that log-probs and entropies stay those of the
distribution that was sampled. Invariant: a model of text alone, without the setting, bans nothing,
and its numbers are bitwise those without this file.
"""

import re
from collections.abc import Iterator

from training.config import RolloutConfig
from workers.model.builder import ModelSpec

# Names under which configurations and tokenizers keep placeholders.
PLACEHOLDER = re.compile(
    r"(image|video|audio|vision|boi|eoi|boa|eoa|bov|eov)(_\w+)?_token(_id|_index|_idx)?"
)
SETTING = "actor_rollout_ref.rollout.banned_token_ids"


def banned_token_ids(config: RolloutConfig, spec: ModelSpec) -> tuple[int, ...]:
    """Lists the ids that are never sampled, in ascending order.

    Raises:
        ValueError: the setting has an id that the model does not know, or that ends turns.
    """
    if spec.whole_model is None and not config.banned_token_ids:
        return ()
    size = spec.hf_config.vocab_size
    unknown = [token for token in config.banned_token_ids if not 0 <= token < size]
    if unknown:
        raise ValueError(
            f"{SETTING} has {unknown[0]}, which {spec.path} does not know; allowed: 0 to {size - 1}"
        )
    ends = sorted(set(config.banned_token_ids).intersection(spec.eos_token_ids))
    if ends:
        raise ValueError(
            f"{SETTING} has {ends[0]}, which ends the turns of {spec.path}: no answer would end; "
            "take it out"
        )
    placeholders = {token for token in placeholder_ids(spec) if token < size}
    banned = placeholders.difference(spec.eos_token_ids).union(config.banned_token_ids)
    if len(banned) == size:
        raise ValueError(f"{SETTING} has all ids of {spec.path}: nothing could be sampled")
    return tuple(sorted(banned))


def placeholder_ids(spec: ModelSpec) -> Iterator[int]:
    """Yields what stands for pictures, films and sounds; nothing of a model that reads text."""
    if spec.whole_model is None:
        return
    for name, value in spec.whole_config.to_dict().items():
        if PLACEHOLDER.fullmatch(name) and isinstance(value, int):
            yield value
    for name, text in spec.tokenizer.special_tokens_map.items():
        if PLACEHOLDER.fullmatch(name):
            yield spec.tokenizer.convert_tokens_to_ids(text)
