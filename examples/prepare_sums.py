"""Makes what configs/sums.yaml trains and learns from: a small model, and episodes of a script.

    python examples/prepare_sums.py

The model knows the words of examples/sums_game.py and that answers are numbers, and cannot add. The
script plays twenty games, all of them right; as many others are held out. Invariant: the folder is
there only when it is complete; equal seeds give equal episodes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from prepare_game import make_tokenizer, warm_up
from prepare_tiny_prompts import completed, make_model
from sums_game import HIGHEST, SUMS, Sums

EPISODES = 20
# Games of random answers, from which the model learns their form.
GAMES = 1000
STEPS = 200

Message = dict[str, str]


def scripted_episode(seed: int) -> list[Message]:
    """Plays a game by the script, which adds; returns the conversation."""
    game = Sums()
    observation, done = game.reset(seed), False
    messages: list[Message] = []
    while not done:
        answer = game.answer
        messages.append({"role": "user", "content": observation})
        messages.append({"role": "assistant", "content": answer})
        observation, reward, done, _ = game.step(answer)
    assert reward == 1.0
    return messages


def random_episode(draw: random.Random) -> list[Message]:
    """Returns a conversation whose answers are any numbers."""
    game = Sums()
    observation, done = game.reset(draw.randrange(1 << 30)), False
    messages: list[Message] = []
    while not done:
        answer = game.sample_action(draw)
        messages.append({"role": "user", "content": observation})
        messages.append({"role": "assistant", "content": answer})
        observation, _, done, _ = game.step(answer)
    return messages


def write_episodes(path: Path, seeds: range) -> None:
    """Writes the script's games of these seeds, a conversation a line."""
    lines = [json.dumps({"messages": scripted_episode(seed)}) + "\n" for seed in seeds]
    path.write_text("".join(lines), encoding="utf-8")


def prepare(folder: Path, seed: int, steps: int = STEPS) -> None:
    """Writes model/, scripted.jsonl and held_out.jsonl; a folder that is there stays."""
    if (folder / "model").exists():
        return
    texts = [str(number) for number in range(2 * HIGHEST + 1)]
    texts += [message["content"] for message in scripted_episode(seed)]
    with completed(folder) as temporary:
        torch.manual_seed(seed)
        tokenizer = make_tokenizer(texts)
        model = make_model(tokenizer)
        draw = random.Random(seed)
        games = [random_episode(draw) for _ in range(GAMES)]
        told = [tokenizer.apply_chat_template(game, tokenize=False) for game in games]
        warm_up(model, tokenizer, told, steps)
        model.save_pretrained(temporary / "model")
        tokenizer.save_pretrained(temporary / "model")
        write_episodes(temporary / "scripted.jsonl", range(EPISODES))
        write_episodes(temporary / "held_out.jsonl", range(EPISODES, 2 * EPISODES))
    print(f"{folder}: a model, and {EPISODES} games of {SUMS} sums by the script")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/sums"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the warm-up")
    args = parser.parse_args()
    prepare(args.out, args.seed, args.steps)
