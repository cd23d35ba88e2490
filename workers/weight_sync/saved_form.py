"""The names and shapes that a model's weights have in its checkpoint on disk."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from workers.model.language_part import WholeModel, language_config


class SavedForm:
    """Turns a model's tensors into those of its checkpoint on disk.

    Engines with model code of their own read that form: transformers holds a layer's experts as one
    tensor, and has names of its own for some models. Of a configuration that is a whole model's,
    whose language part is trained, the tensors are the part's and the form is the whole's.

    Attributes:
        config: of the model that the form is of.
        model: what is trained, without memory.
        whole: the model that the form is of, likewise.
        names: the names that the tensors of `model` have in `whole`.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        own_config = language_config(config)
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(own_config)
        self.ties_head: bool = config.get_text_config().tie_word_embeddings
        tensors = self.model.state_dict()
        self.names = {name: name for name in tensors}
        self.whole = self.model
        if own_config is not config:
            whole = WholeModel(config)
            self.names = whole.names
            self.whole = whole.module
        named = {self.names[name]: tensor for name, tensor in tensors.items()}
        saved = revert_weight_conversion(self.whole, dict(named))
        self.converted = {
            name
            for name, tensor in named.items()
            if name not in saved or saved[name].shape != tensor.shape
        }

    def of(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor as it is saved, or the several that it is saved as.

        A name that is not the model's stays, for an engine to refuse.
        """
        for own_name, tensor in weights:
            name = self.names.get(own_name, own_name)
            if name in self.converted:
                yield from revert_weight_conversion(self.whole, {name: tensor}).items()
            else:
                yield name, tensor
