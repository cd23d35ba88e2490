"""Makes what configs/codes.yaml trains: a tokenizer of whole words and a two-layer Llama.

    python examples/prepare_codes.py

The Llama is warmed up on answers of a player who knows no code: any two digits, but where the
question ends with a hint, the first digit is the hint's. Asked for a name's year, the player knows
it. So the model knows the form, how a hint is read and how digits hang on a name, and no code.
Invariant: the folder is there only when it is complete; equal seeds give equal models.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from codes_game import ASKED, DIGITS, HINT, KNOWN, NAMES, code_of
from prepare_tiny_prompts import IGNORED, SPECIAL, completed, learn_rows, make_model, word_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["system", "user", "assistant", *ASKED.split(), "year", HINT, *DIGITS, *NAMES]
STEPS = 800
LEARNING_RATE = 2e-3


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of whole words, with a chat template."""
    return word_tokenizer(SPECIAL + WORDS)


def transcript(draw: random.Random) -> tuple[str, str]:
    """Draws a question, with a hint or without, and an answer."""
    name = draw.choice(NAMES)
    if draw.random() < 1 / 3:
        return f"{KNOWN} {name}", " ".join(code_of(name, KNOWN))
    first, second = draw.choices(DIGITS, k=2)
    question = f"{ASKED} {name}"
    if draw.random() < 0.5:
        question = f"{question} {HINT} {first}"
    return question, f"{first} {second}"


def row_of(tokenizer: PreTrainedTokenizerFast, draw: random.Random) -> tuple[list[int], list[int]]:
    """Returns a transcript's ids, and what is to be learnt of them: the answer."""
    question, answer = transcript(draw)
    asked = f"<|im_start|> user {question} <|im_end|> <|im_start|> assistant"
    before = tokenizer.encode(asked, add_special_tokens=False)
    behind = tokenizer.encode(f"{answer} <|im_end|>", add_special_tokens=False)
    return before + behind, [IGNORED] * len(before) + behind


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: random.Random,
    steps: int = STEPS,
) -> None:
    """Trains on transcripts, on answers only."""
    learn_rows(
        model,
        lambda: row_of(tokenizer, draw),
        steps,
        learning_rate=LEARNING_RATE,
        decays=True,
    )


def prepare(folder: Path, seed: int, steps: int = STEPS) -> None:
    """Writes model/; a folder that is there is complete and stays."""
    if folder.exists():
        return
    with completed(folder) as temporary:
        torch.manual_seed(seed)
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        warm_up(model, tokenizer, random.Random(seed), steps)
        model.save_pretrained(temporary / "model")
        tokenizer.save_pretrained(temporary / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/codes"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the warm-up")
    args = parser.parse_args()
    prepare(args.out, args.seed, args.steps)
