"""Makes a model compute in training what it computes when it is read.

Invariant: in no pass does it matter which id pads: what is padding stands in a mask, or is not
there at all.
"""

from torch import nn


def learn_all_embeddings(model: nn.Module) -> None:
    """Lets every token's embedding learn, the padding token's too.

    transformers gives embeddings the `padding_idx` of their config, whose row then gets no
    gradient. Many models pad with the token that ends their turns, which every row of several turns
    reads.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
