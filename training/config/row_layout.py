"""What `--explain` says of how the policy's rows are laid out, from its config.json alone.

Invariant: nothing is imported or downloaded; the trial on the weights at the start of a run decides
(workers/model/packing_check.py), and the sentence says so.
"""

import json
from pathlib import Path
from typing import Any

from training.config.schema.model import ModelConfig

# Kinds of layers that hand a state from token to token, by their names in a config.json.
STATE_LAYERS = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding", "recurrent"}
# The same, by settings that only such layers have.
STATE_SETTINGS = ("mamba_", "ssm_", "linear_conv_", "conv_L_", "lru_", "n_mamba_")


def describe_layout(model: ModelConfig, share_prompts: bool) -> str | None:
    """Describes the layout of the policy's rows; None where its folder is not on this machine."""
    content = read_config_json(model)
    if content is None:
        return None
    return (
        f"rows of model type '{content.get('model_type')}' {_layout(model, content, share_prompts)}"
    )


def read_config_json(model: ModelConfig) -> dict[str, Any] | None:
    """Reads the config.json of the language model, with `override_config`; None: it is not here."""
    file = Path(str(model.path)) / "config.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    return (content.get("text_config") or content) | model.override_config


def _layout(model: ModelConfig, content: dict[str, Any], share_prompts: bool) -> str:
    """Says what becomes of the rows."""
    if names_a_state(content):
        if not model.use_remove_padding:
            return "are padded on the right alone, as its layers keep a state"
        return (
            "are padded on the right, as its layers keep a state. They are packed where a trial at "
            "the start shows that its kernels heed where packed rows begin"
        )
    if not model.use_remove_padding:
        return "keep their padding, as use_remove_padding=false says"
    shared = ""
    if share_prompts:
        shared = ", and the beginning that the rows of a group share is computed once"
    return (
        f"are packed one behind the other without padding{shared}. A trial at the start compares "
        "the model's outputs with those of padded rows; where they differ, as with windows of "
        "attention, rows are padded on the right instead"
    )


def names_a_state(content: dict[str, Any]) -> bool:
    """Checks whether a config.json names layers or settings of a state."""
    layers = content.get("layer_types") or content.get("layers_block_type") or []
    if STATE_LAYERS & set(layers):
        return True
    return any(name.startswith(STATE_SETTINGS) for name in content)
