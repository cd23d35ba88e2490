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
from prepare_tiny_prompts import CHAT_TEMPLATE, SPECIAL, completed, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.utils.rnn import pad_sequence
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
BATCH = 64
STEPS = 3000
LEARNING_RATE = 2e-3
# The chance of the lazy player's sub-agent to find the clue that is looked for.
FINDS = 0.4
# The chance of what it finds to be any clue.
MADE_UP = 0.05
IGNORED = -100
TOLD_EVERY = 500

# Texts that are read and texts that are said, in turn.
Conversation = list[tuple[str, str]]


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


def row_of(tokenizer: PreTrainedTokenizerFast, turns: Conversation) -> tuple[list[int], ...]:
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for step in range(steps):
        played = [draw.choice([reader, player])(draw) for _ in range(BATCH)]
        rows = [row_of(tokenizer, turns) for turns in played]
        # (BATCH, length); padding lies behind all that is learnt.
        ids = pad_sequence([torch.tensor(row[0]) for row in rows], batch_first=True)
        labels = pad_sequence(
            [torch.tensor(row[1]) for row in rows], batch_first=True, padding_value=IGNORED
        )
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % TOLD_EVERY == 0:
            print(f"learning the form: step {step} of {steps}, loss {loss:.2f}", flush=True)


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
