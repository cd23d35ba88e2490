"""Makes what configs/mixed.yaml trains: a tokenizer of 64 words and a two-layer Llama.

    python examples/prepare_mixed.py

The Llama is warmed up on tasks of examples/mixed_game.py with answers of a poor player: it says a
number that it was told, and guesses one that fits what is known three times in ten. So it knows the
form, and little of its sense; training teaches it the rest. Invariant: the folder is there only
when it is complete; equal seeds give equal transcripts.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from mixed_game import TASKS
from prepare_tiny_prompts import (
    IGNORED,
    completed,
    learn_rows,
    make_model,
    make_tokenizer,
    warm_up_guess,
)
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

STEPS = 600
LEARNING_RATE = 1e-3


def transcript(draw: random.Random) -> str:
    """Writes a task with an answer, as the chat template does."""
    task = draw.choice(TASKS)
    answer = task.above + 1
    if task.kind != "easy":
        answer = warm_up_guess(draw, task.above, task.below)
    return f"<|im_start|> user {task.text} <|im_end|> <|im_start|> assistant {answer} <|im_end|>"


def row_of(tokenizer: PreTrainedTokenizerFast, draw: random.Random) -> tuple[list[int], list[int]]:
    """Returns a transcript's ids, and what is to be learnt of them: the answer and its end."""
    ids = tokenizer.encode(transcript(draw))
    return ids, [IGNORED] * (len(ids) - 2) + ids[-2:]


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: random.Random,
    steps: int = STEPS,
) -> None:
    """Trains on transcripts, on the answers' tokens only."""
    learn_rows(
        model,
        lambda: row_of(tokenizer, draw),
        steps,
        learning_rate=LEARNING_RATE,
        decays=False,
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
    parser.add_argument("--out", type=Path, default=Path("outputs/mixed"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the warm-up")
    args = parser.parse_args()
    prepare(args.out, args.seed, args.steps)
