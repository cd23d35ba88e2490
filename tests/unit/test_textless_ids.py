"""Which tokens say nothing."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.run.metrics.textless_ids import textless_ids


def test_special_tokens_and_blanks_say_nothing(tiny_task: Path) -> None:
    words = ["a", "Ġ", "ĠĠĊ", "Ġa", "<end>", "", "▁", "<0x0A>", "<0x41>"]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "a"))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>")
    assert textless_ids(tokenizer) == [1, 2, 4, 5, 6, 7]
    task = AutoTokenizer.from_pretrained(tiny_task / "model")
    for number in range(len(task)):
        text = task.decode([number], skip_special_tokens=True)
        assert (number in textless_ids(task)) == (not text.strip())
