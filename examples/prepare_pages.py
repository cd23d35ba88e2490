"""Makes what configs/pages.yaml trains: a tokenizer of whole words and a two-layer Llama.

    python examples/prepare_pages.py

The Llama is warmed up on both roles of examples/pages_game.py as a lazy player has them: its
sub-agents find the clue of their page with a chance of `FINDS` alone, and else say that there is
nothing. So the model knows the form, and how to read; training teaches it to look. Invariant: the
folder is there only when it is complete; equal seeds give equal texts.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from pages_game import (
    CLUES,
    COLOURS,
    FILLERS,
    NOTHING,
    PAGES,
    PagesConfig,
    found_text,
    page_text,
)
from prepare_tiny_prompts import IGNORED, SPECIAL, completed, learn_rows, make_model, word_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [
    "system",
    "user",
    "assistant",
    "look",
    "page",
    "find",
    "question",
    "found",
    NOTHING,
    *COLOURS,
    *(clue for clues in CLUES.values() for clue in clues),
    *FILLERS,
]
STEPS = 3000
LEARNING_RATE = 2e-3
# The chance of the lazy player's sub-agent to find the clue that is looked for.
FINDS = 0.4
# The chance of what it finds to be any clue.
MADE_UP = 0.05

# Texts that are read and texts that are said, in turn.
Conversation = list[tuple[str, str]]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of whole words, with a chat template."""
    return word_tokenizer(SPECIAL + WORDS)


def any_clue(draw: random.Random) -> str:
    """Draws a clue of any colour."""
    return draw.choice(CLUES[draw.choice(COLOURS)])


def reader(draw: random.Random) -> Conversation:
    """Plays the lazy player's sub-agent."""
    clue = any_clue(draw)
    colour = next(colour for colour, clues in CLUES.items() if clue in clues)
    asked = colour if draw.random() < 0.5 else draw.choice(COLOURS)
    answer = clue if asked == colour and draw.random() < FINDS else NOTHING
    if draw.random() < MADE_UP:
        answer = any_clue(draw)
    return [(page_text(draw, clue, PagesConfig().filler, asked), answer)]


def player(draw: random.Random) -> Conversation:
    """Plays the lazy player itself."""
    asked = draw.choice(COLOURS)
    found = [draw.choice([NOTHING, any_clue(draw)]) for _ in range(PAGES)]
    if draw.random() < 0.7:
        found[draw.randrange(PAGES)] = draw.choice(CLUES[asked])
    answer = next((each for each in found if each in CLUES[asked]), draw.choice(CLUES[asked]))
    return [(f"question {asked}", "look"), (found_text(found), answer)]


def row_of(tokenizer: PreTrainedTokenizerFast, turns: Conversation) -> tuple[list[int], list[int]]:
    """Returns a conversation's ids, and what is to be learnt of them: what is said."""
    ids: list[int] = []
    labels: list[int] = []
    for read, said in turns:
        before = f"<|im_start|> user {read} <|im_end|> <|im_start|> assistant"
        given = tokenizer.encode(before, add_special_tokens=False)
        answer = tokenizer.encode(f"{said} <|im_end|>", add_special_tokens=False)
        ids += given + answer
        labels += [IGNORED] * len(given) + answer
    return ids, labels


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: random.Random,
    steps: int = STEPS,
) -> None:
    """Trains on what both roles say."""
    learn_rows(
        model,
        lambda: row_of(tokenizer, draw.choice([reader, player])(draw)),
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
    parser.add_argument("--out", type=Path, default=Path("outputs/pages"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the warm-up")
    args = parser.parse_args()
    prepare(args.out, args.seed, args.steps)
