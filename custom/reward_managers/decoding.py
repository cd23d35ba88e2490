"""From token ids to the texts that scoring functions and environments read.

Invariant: only sampled tokens (response_mask 1) are decoded, so that an environment's text never
counts as the policy's.
"""

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase


def mask_of_responses(tensors: TensorDict) -> torch.Tensor:
    """Returns `response_mask` (batch, response_len), else the attention mask's part, else ones.

    Only a batch that was made by hand lacks the first.
    """
    responses = tensors["responses"]
    if "response_mask" in tensors:
        return tensors["response_mask"]
    if "attention_mask" in tensors:
        return tensors["attention_mask"][:, -responses.shape[1] :]
    return torch.ones_like(responses)


def decode_sampled(tokenizer: PreTrainedTokenizerBase, tensors: TensorDict) -> list[str]:
    """Decodes the sampled tokens of each row, without special tokens."""
    responses = tensors["responses"].cpu()  # (batch, response_len)
    is_sampled = mask_of_responses(tensors).bool().cpu()  # (batch, response_len)
    texts = []
    # Row by row: the ids of a whole batch as Python's numbers would be many times the batch.
    for token_ids, keep in zip(responses, is_sampled, strict=True):
        texts.append(tokenizer.decode(token_ids[keep].tolist(), skip_special_tokens=True))
    return texts


def decode_prompt(tokenizer: PreTrainedTokenizerBase, tensors: TensorDict, row: int) -> str:
    """Decodes the prompt of a row, without padding and special tokens."""
    token_ids = tensors["prompts"][row]  # (prompt_len,)
    is_real = tensors["attention_mask"][row, : len(token_ids)] > 0
    return tokenizer.decode(token_ids[is_real], skip_special_tokens=True)
