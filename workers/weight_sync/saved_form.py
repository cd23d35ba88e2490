"""The names and shapes that a model's weights have in its checkpoint on disk."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion


class SavedForm:
    """Turns a model's tensors into those of its checkpoint on disk.

    Engines with model code of their own read that form: transformers holds a layer's experts as one
    tensor, and has names of its own for some models.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)
        self.ties_head: bool = config.get_text_config().tie_word_embeddings
        tensors = self.model.state_dict()
        saved = revert_weight_conversion(self.model, self.model.state_dict())
        self.converted = {
            name
            for name, tensor in tensors.items()
            if name not in saved or saved[name].shape != tensor.shape
        }

    def of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor as it is saved, or the several that it is saved as."""
        for name, tensor in weights:
            if name in self.converted:
                yield from revert_weight_conversion(self.model, {name: tensor}).items()
            else:
                yield name, tensor
