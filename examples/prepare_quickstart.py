"""Makes what configs/quickstart.yaml trains: a tokenizer of 24 words and a two-layer Llama.

The Llama is warmed up on transcripts of the game. The game takes several turns: a number from 1 to
10 is hidden, and each guess is answered by `higher` or `lower`. The transcripts are a poor
player's: three in ten guesses respect what was answered so far, the others are any number. So the
model knows the form of the game and little of its sense; PPO teaches the rest. Invariant: the
folder is there only when it is complete.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from prepare_tiny_prompts import HIGHEST, completed, make_model, make_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

TURNS = 4
BATCH = 64


def transcript(rng: random.Random) -> list[dict[str, str]]:
    """Plays one game of a poor player, always of four turns so that all rows have one length."""
    hidden = rng.randint(1, HIGHEST)
    # The bounds of the hidden number after the answers so far.
    low = 1
    high = HIGHEST
    messages = [{"role": "user", "content": "guess"}]
    for turn in range(TURNS):
        if rng.random() < 0.3:
            guess = rng.randint(low, high)
        else:
            guess = rng.randint(1, HIGHEST)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess < hidden:
            answer = "higher"
            low = max(low, guess + 1)
        else:
            answer = "lower"
            high = min(high, guess - 1)
        if turn < TURNS - 1:
            messages.append({"role": "user", "content": answer})
        # Where the number itself was guessed, any answer will do.
        if low > high:
            low = 1
            high = HIGHEST
    return messages


def answers_only(ids: torch.Tensor, assistant: int) -> torch.Tensor:
    """Labels the two tokens after each `assistant`, the guess and the end of the turn.

    All others get -100, which the loss ignores. ids and labels: (batch, length).
    """
    opens_turn = ids == assistant
    is_answer = opens_turn.roll(1, dims=1) | opens_turn.roll(2, dims=1)
    return torch.where(is_answer, ids, -100)


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    steps: int = 300,
) -> None:
    """Trains on transcripts, on the answers' tokens only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assistant = tokenizer.convert_tokens_to_ids("assistant")
    for _ in range(steps):
        texts = [
            tokenizer.apply_chat_template(transcript(rng), tokenize=False) for _ in range(BATCH)
        ]
        ids = torch.tensor([tokenizer.encode(text) for text in texts])  # (BATCH, length)
        output = model(input_ids=ids, labels=answers_only(ids, assistant))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def prepare(folder: Path, seed: int) -> None:
    """Writes model/; a folder that is there is complete and stays."""
    if folder.exists():
        return
    with completed(folder) as temporary:
        torch.manual_seed(seed)
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        warm_up(model, tokenizer, random.Random(seed))
        model.save_pretrained(temporary / "model")
        tokenizer.save_pretrained(temporary / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart/task"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prepare(args.out, args.seed)
