"""From token ids to the texts that scoring functions and environments read.

Invariant: only sampled tokens (response_mask 1) are decoded, so that an environment's text never
counts as the policy's.
"""

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase


def decode_sampled(tokenizer: PreTrainedTokenizerBase, tensors: TensorDict) -> list[str]:
    """Decodes the sampled tokens of each row, without special tokens."""
    responses = tensors["responses"].cpu()  # (batch, response_len)
    is_sampled = tensors["response_mask"].bool().cpu()  # (batch, response_len)
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
