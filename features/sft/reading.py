"""Makes what reads rows for a config: by the tokens that the policy's rollouts have."""

from __future__ import annotations

from data.chat_templates import require_template
from features.sft.config import max_length_of
from features.sft.data_files import RowReader
from features.sft.settings import SFTSettings
from training.config import PPOConfig
from workers.model.banned_tokens import banned_token_ids
from workers.model.builder import ModelSpec
from workers.turn_reading import turn_tokens


def row_reader(config: PPOConfig, spec: ModelSpec) -> RowReader:
    """Makes the reader of the policy's rows."""
    require_template(spec.tokenizer, config.data.apply_chat_template_kwargs)
    return RowReader(
        settings=config.section(SFTSettings),
        tokens=turn_tokens(config, spec.tokenizer, spec.eos_token_ids),
        max_length=max_length_of(config),
        vocabulary=spec.hf_config.get_text_config().vocab_size,
        never_sampled=frozenset(banned_token_ids(config.actor_rollout_ref.rollout, spec)),
    )
