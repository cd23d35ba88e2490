"""vLLM for the language part of a model that also sees or hears.

vLLM has the language parts as models of their own: it is given the part's configuration in place of
the folder's, builds that model, and gets its weights from the trainer, under the part's names.
"""

import copy
from typing import Any

from transformers import AutoModelForCausalLM

from workers.model.builder import ModelSpec


def text_part_args(spec: ModelSpec) -> dict[str, Any]:
    """Derives what vLLM must know of a model whose language part alone is played.

    Nothing is read of the folder: its names are the whole model's.
    """
    if spec.whole_model is None:
        return {}
    config = copy.deepcopy(spec.hf_config)
    config.architectures = architectures(spec)
    return {"hf_overrides": lambda _: config, "load_format": "dummy"}


def architectures(spec: ModelSpec) -> list[str]:
    """Names the classes that vLLM is to have for what is played."""
    config = spec.hf_config
    if spec.whole_model is None:
        return list(config.architectures or ())
    return [AutoModelForCausalLM._model_mapping[type(config)].__name__]
