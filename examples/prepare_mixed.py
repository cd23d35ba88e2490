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
from prepare_tiny_prompts import completed, make_model, make_tokenizer, warm_up_guess
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

BATCH = 64
STEPS = 600
LEARNING_RATE = 1e-3
IGNORED = -100


def transcript(draw: random.Random) -> str:
    """Writes a task with an answer, as the chat template does."""
    task = draw.choice(TASKS)
    answer = task.above + 1
    if task.kind != "easy":
        answer = warm_up_guess(draw, task.above, task.below)
    return f"<|im_start|> user {task.text} <|im_end|> <|im_start|> assistant {answer} <|im_end|>"


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: random.Random,
    steps: int = STEPS,
) -> None:
    """Trains on transcripts, on the answers' tokens only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        rows = [torch.tensor(tokenizer.encode(transcript(draw))) for _ in range(BATCH)]
        learnt = [torch.cat([torch.full_like(ids[:-2], IGNORED), ids[-2:]]) for ids in rows]
        # (BATCH, length); padding lies behind all that is learnt.
        ids = pad_sequence(rows, batch_first=True)
        labels = pad_sequence(learnt, batch_first=True, padding_value=IGNORED)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


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
