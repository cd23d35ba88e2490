"""Checks what a model's folder says of the model, before a model is built of it.

Invariant: a folder's config.json neither has code fetched, as kernels of the hub, nor a model built
for minutes that nobody has; what the user's own config overrides is not looked at.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from training.config.plain_files import open_plain

# The deepest models have a few hundred layers.
MOST_LAYERS = 2000
# How many of something a model has, each built by itself.
COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
ATTENTION = "attn_implementation"
# Bytes of a list of a model's weights; that of 100,000 tensors has a tenth.
MAX_INDEX_BYTES = 128 << 20


def require_plain_config(
    config: PretrainedConfig, folder: str, overrides: Mapping[str, Any] | None = None
) -> None:
    """Checks a configuration that was read from a folder.

    Args:
        overrides: `model.override_config`, which is the user's.
    Raises:
        ValueError: it names attention of the hub, or has more layers than any model; or the
            folder's weights are said to lie outside of it.
    """
    require_own_weights(Path(folder))
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


def require_own_weights(folder: Path) -> None:
    """Checks that an index of weights names files of its folder.

    Raises:
        ValueError: it names others, such as a device, which would be read without an end.
        OSError: it cannot be read.
    """
    for index in sorted(folder.glob("*.index.json")):
        with open(open_plain(index), "rb") as file:
            content = file.read(MAX_INDEX_BYTES + 1)
        try:
            names = set(json.loads(content[:MAX_INDEX_BYTES])["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{index} lists no weights: {type(error).__name__}: {error}"
            ) from error
        for name in sorted(map(str, names)):
            place = folder / name
            is_outside = Path(name).is_absolute() or ".." in Path(name).parts
            if is_outside or (place.exists() and not place.is_file()):
                raise ValueError(f"{index} names {name}, which is no file of {folder}")
