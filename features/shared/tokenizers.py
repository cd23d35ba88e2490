"""Tells one tokenizer from another, so that ids are read by the one that wrote them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Hexadecimal digits of a fingerprint.
DIGITS = 16


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a short text that is equal for tokenizers of one vocabulary, and for no others."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    digest = hashlib.sha256(json.dumps(vocabulary).encode())
    return digest.hexdigest()[:DIGITS]
