"""Makes what configs/tiny_prompts.yaml trains: a tokenizer of 24 words, a small Llama, and prompts.

The task is one turn of a guessing game: a number from 1 to 10 is hidden, the prompt says what is
known (`above 3 below 8`), and the best guess halves what is left. The Llama of two layers is warmed
up on transcripts, which teaches it the form of an answer (`guess 5`) and only a little of its
sense; PPO teaches the rest. Invariant: the folder is there only when it is complete.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIGHEST = 10
BATCH = 64
# In the place of a token that is not to be learnt.
IGNORED = -100
# Steps.
TOLD_EVERY = 500
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
WORDS = [
    "system",
    "user",
    "assistant",
    "guess",
    "above",
    "below",
    "higher",
    "lower",
    "correct",
    "the",
    "number",
    "is",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of these words, `SPECIAL` among them, and a chat template."""
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of whole words, 64 with what fills it up, and a chat template."""
    words = SPECIAL + WORDS + [str(n) for n in range(HIGHEST + 2)]
    words += [f"<extra_{i}>" for i in range(64 - len(words))]
    return word_tokenizer(words)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Makes a Llama of about 90,000 parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def learn_rows(
    model: LlamaForCausalLM,
    draw_row: Callable[[], tuple[list[int], list[int]]],
    steps: int,
    *,
    learning_rate: float,
    decays: bool,
) -> None:
    """Trains on rows, `BATCH` a step, and tells how far it is.

    Args:
        draw_row: returns a row's ids, and the same with IGNORED for what is not to be learnt.
        decays: the learning rate falls to a twentieth.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    last = 0.05 if decays else 1.0
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, last, steps)
    for step in range(steps):
        rows = [draw_row() for _ in range(BATCH)]
        # (BATCH, length); padding lies behind all that is learnt.
        ids = pad_sequence([torch.tensor(row) for row, _ in rows], batch_first=True)
        labels = pad_sequence(
            [torch.tensor(learnt) for _, learnt in rows], batch_first=True, padding_value=IGNORED
        )
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % TOLD_EVERY == 0:
            print(f"learning the form: step {step} of {steps}, loss {loss:.2f}", flush=True)


def sample_bounds(rng: random.Random) -> tuple[int, int]:
    """Draws what is known of the hidden number: it is above the first and below the second."""
    above = rng.randrange(0, HIGHEST)
    return above, rng.randrange(above + 2, HIGHEST + 2)


def prompt_text(above: int, below: int) -> str:
    """Writes the prompt."""
    return f"above {above} below {below}"


def warm_up_guess(rng: random.Random, above: int, below: int) -> int:
    """Draws a guess: three in ten respect what is known, the others are any number."""
    if rng.random() < 0.3:
        return rng.randrange(above + 1, below)
    return rng.randrange(1, HIGHEST + 1)


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    steps: int = 300,
) -> None:
    """Trains on transcripts of a poor player, on the answers' tokens only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        rows = []
        for _ in range(BATCH):
            above, below = sample_bounds(rng)
            messages = [{"role": "user", "content": prompt_text(above, below)}]
            prompt = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            guess = warm_up_guess(rng, above, below)
            rows.append(tokenizer.encode(f"{prompt} guess {guess} <|im_end|>"))
        ids = torch.tensor(rows)  # (BATCH, length): every transcript has the same length
        labels = ids.clone()
        labels[:, :-3] = -100
        output = model(input_ids=ids, labels=labels)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def write_prompts(path: Path, count: int, rng: random.Random) -> None:
    """Writes rows in verl's form, `count` in all."""
    rows = []
    for i in range(count):
        above, below = sample_bounds(rng)
        rows.append(
            {
                "data_source": "guess_the_number",
                "prompt": [{"role": "user", "content": prompt_text(above, below)}],
                "ability": "game",
                "reward_model": {"style": "rule", "ground_truth": f"{above} {below}"},
                "extra_info": {"index": i},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


@contextmanager
def completed(folder: Path) -> Iterator[Path]:
    """Lends a temporary folder, which becomes `folder` where the block ends without an error."""
    temporary = folder.with_name(folder.name + ".incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    temporary.rename(folder)


def prepare(folder: Path, seed: int) -> None:
    """Writes model/, train.parquet and val.parquet.

    A folder that is there is complete and stays.
    """
    if folder.exists():
        return
    with completed(folder) as temporary:
        torch.manual_seed(seed)
        rng = random.Random(seed)
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        warm_up(model, tokenizer, rng)
        model.save_pretrained(temporary / "model")
        tokenizer.save_pretrained(temporary / "model")
        write_prompts(temporary / "train.parquet", 4096, rng)
        write_prompts(temporary / "val.parquet", 128, rng)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/tiny_prompts/task"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prepare(args.out, args.seed)
