"""Checks what a model's folder says of the model, before a model is built of it.

Invariant: a folder's config.json neither has code fetched, as kernels of the hub, nor a model built
for minutes that nobody has; what the user's own config overrides is not looked at.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

# The deepest models have a few hundred layers.
MOST_LAYERS = 2000
# How many of something a model has, each built by itself.
COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
ATTENTION = "attn_implementation"


def require_plain_config(
    config: PretrainedConfig, folder: str, overrides: Mapping[str, Any] | None = None
) -> None:
    """Checks a configuration that was read from a folder.

    Args:
        overrides: `model.override_config`, which is the user's.
    Raises:
        ValueError: it names attention of the hub, or has more layers than any model.
    """
    asked = {} if overrides is None else overrides
    for part in (config, config.get_text_config()):
        named = getattr(part, "_attn_implementation", None)
        names = list(named.values()) if isinstance(named, dict) else [named]
        for name in names:
            if name is not None and not str(name).isidentifier() and ATTENTION not in asked:
                raise ValueError(
                    f"{folder}: its config.json asks for {ATTENTION}={name}, which is code of "
                    f"the hub; if you trust that, set model.override_config.{ATTENTION}={name}"
                )
        for key in COUNTS:
            count = getattr(part, key, 0)
            if isinstance(count, int) and count > MOST_LAYERS and key not in asked:
                raise ValueError(
                    f"{folder}: its config.json has {key}={count}; allowed: up to {MOST_LAYERS}"
                )
