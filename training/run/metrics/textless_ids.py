"""Tells which tokens say nothing, so that "empty" means the same in metrics, alarms and viewer."""

from transformers import PreTrainedTokenizerBase

# As vocabularies write blanks: as they are, as byte-level BPE has them, as sentencepiece, in bytes.
BLANKS = " \t\n\rĠĊĉč▁"
BYTES = ("<0x09>", "<0x0A>", "<0x0D>", "<0x20>")


def textless_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Lists the ids of special tokens, as the end of a turn, and of tokens of blanks alone."""
    found = set(tokenizer.all_special_ids)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    for number, token in enumerate(tokens):
        # Vocabularies may have gaps.
        if token is not None and (not token.strip(BLANKS) or token in BYTES):
            found.add(number)
    return sorted(found)
