"""Makes what configs/clues.yaml trains: a tokenizer of whole words and a two-layer Llama.

    python examples/prepare_clues.py

The Llama is warmed up on the contexts of a player with a poor memory, of examples/clues_game.py
with agent.context=summarise: each summary has each known clue with a chance of `KEEPS` alone, and
an answer is what the context says, where it says it. So the model knows the form and how to read,
and forgets on the way; training teaches it what to keep. Invariant: the folder is there only when
it is complete; equal seeds give equal contexts.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from clues_game import CLUES, COLOURS, FILLERS, NEXT, TASK, CluesConfig
from prepare_tiny_prompts import IGNORED, SPECIAL, completed, learn_rows, make_model, word_tokenizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# configs/clues.yaml says the same to the policy.
REQUEST = "sum up"
KNOWN = "known"
NOTHING = "nothing"
WORDS = [
    "system",
    "user",
    "assistant",
    *TASK.split(),
    NEXT,
    "clue",
    "question",
    *REQUEST.split(),
    KNOWN,
    NOTHING,
    *COLOURS,
    *(clue for clues in CLUES.values() for clue in clues),
    *FILLERS,
]
STEPS = 5000
LEARNING_RATE = 2e-3
# The chance of the poor player's summary to have a clue.
KEEPS = 0.6

Message = dict[str, str]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of whole words, with a chat template."""
    return word_tokenizer(SPECIAL + WORDS)


def user(text: str) -> Message:
    """Returns a message of the environment's."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """Returns a turn of the policy's."""
    return {"role": "assistant", "content": text}


def long(draw: random.Random, text: str) -> str:
    """Returns a text with fillers behind it, as the game has them."""
    return " ".join([text, *draw.choices(FILLERS, k=CluesConfig().filler)])


def told(clues: list[str]) -> str:
    """Writes clues as a summary."""
    return " ".join(clues) or NOTHING


def context(draw: random.Random) -> list[Message]:
    """Plays one context of the poor player: any of a game's, from the first to the last."""
    number = draw.randrange(len(COLOURS) + 1)
    clues = [draw.choice(CLUES[colour]) for colour in draw.sample(COLOURS, len(COLOURS))]
    # The earlier ones, as far as summaries kept them.
    known = [clue for clue in clues[:number] if draw.random() < KEEPS]
    beginning = f"{TASK} {KNOWN} {told(known)}"
    if number == len(COLOURS):
        colour = draw.choice(COLOURS)
        answer = next((clue for clue in known if clue in CLUES[colour]), None)
        question = long(draw, f"question {colour}")
        turn = assistant(answer or draw.choice(CLUES[colour]))
        return [user(f"{beginning} {question}"), turn]
    text = long(draw, f"clue {clues[number]}")
    kept = [each for each in [*known, clues[number]] if draw.random() < KEEPS]
    end = [assistant(NEXT), user(REQUEST), assistant(told(kept))]
    if number == 0:
        return [user(TASK), assistant(NEXT), user(text), *end]
    return [user(f"{beginning} {text}"), *end]


def row_of(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message]
) -> tuple[list[int], list[int]]:
    """Returns a context's ids, and what is to be learnt of them: the policy's turns."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        header = tokenizer.encode(f"<|im_start|> {message['role']}", add_special_tokens=False)
        content = tokenizer.encode(f"{message['content']} <|im_end|>", add_special_tokens=False)
        is_learnt = message["role"] == "assistant"
        ids += header + content
        labels += [IGNORED] * len(header) + (content if is_learnt else [IGNORED] * len(content))
    return ids, labels


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: random.Random,
    steps: int = STEPS,
) -> None:
    """Trains on contexts, on the policy's turns only."""
    learn_rows(
        model,
        lambda: row_of(tokenizer, context(draw)),
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
    parser.add_argument("--out", type=Path, default=Path("outputs/clues"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the warm-up")
    args = parser.parse_args()
    prepare(args.out, args.seed, args.steps)
