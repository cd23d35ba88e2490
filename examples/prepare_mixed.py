"""Makes what configs/mixed.yaml trains: a tokenizer of whole words and a two-layer Llama.

    python examples/prepare_mixed.py

The Llama is warmed up on questions of examples/mixed_game.py with answers: those to easy questions
are right; to all others three in ten are, and every second one is the same wrong one. So it knows
the form, and seldom says what it half knows; training teaches it that. Invariant: the folder is
there only when it is complete; equal seeds give equal questions.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from mixed_game import ANSWERS, QUESTIONS, answer_to, kind_of, wrong_answer_to
from prepare_tiny_prompts import CHAT_TEMPLATE, SPECIAL, completed, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [
    "system",
    "user",
    "assistant",
    "question",
    *ANSWERS,
    *(f"q{number}" for number in range(QUESTIONS)),
]
BATCH = 240
STEPS = 800
LEARNING_RATE = 2e-3
# How often an answer is right, the same wrong one, or any, where a question is not easy.
SHARES = (0.25, 0.5, 0.25)
IGNORED = -100


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of whole words, with a chat template."""
    words = SPECIAL + WORDS
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def transcript(draw: random.Random, question: int) -> str:
    """Writes a question with an answer, as the chat template does."""
    answer = answer_to(question)
    if kind_of(question) != "easy":
        choices = (answer, wrong_answer_to(question), draw.choice(ANSWERS))
        [answer] = draw.choices(choices, weights=SHARES)
    asked = f"<|im_start|> user question q{question} <|im_end|>"
    return f"{asked} <|im_start|> assistant {answer} <|im_end|>"


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: random.Random,
    steps: int = STEPS,
) -> None:
    """Trains on every question, on the answers' tokens only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        questions = [number % QUESTIONS for number in range(BATCH)]
        rows = [tokenizer.encode(transcript(draw, question)) for question in questions]
        ids = torch.tensor(rows)  # (BATCH, length): every transcript has the same length
        labels = torch.full_like(ids, IGNORED)
        labels[:, -2:] = ids[:, -2:]
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        schedule.step()
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
