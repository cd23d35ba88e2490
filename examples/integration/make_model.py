"""Makes the project's model in a few seconds: a Llama of two layers that knows thirty words.

A project of yours has a real one instead. The transcripts it learns are a poor agent's: three in
ten of its calls, and of its answers, are right.
"""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from warehouse import TABLE, Stock, read_table

BATCH = 64
ITEMS = {row["item"]: row["left"] for row in read_table(TABLE)}
WORDS = [
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<unk>",
    "system",
    "user",
    "assistant",
    *map(str, range(10)),
]
WORDS += ["how", "many", "right", "wrong", "tools", "stock", "Action:", "stock[", "]", *ITEMS]
TOOLS = [Stock.definition.schema()]
TEMPLATE = (
    "{% if tools %}<|im_start|> system tools "
    "{% for t in tools %}{{ t['function']['name'] }} {% endfor %}<|im_end|> {% endif %}"
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def transcript(draw: random.Random) -> list[dict[str, str]]:
    """Plays an episode as the poor agent does."""
    asked = draw.choice(list(ITEMS))
    looked_up = asked if draw.random() < 0.3 else draw.choice(list(ITEMS))
    left = ITEMS[looked_up]
    answer = left if draw.random() < 0.3 else str(draw.randrange(10))
    return [
        {"role": "user", "content": f"how many {asked}"},
        {"role": "assistant", "content": f"Action: stock[ {looked_up} ]"},
        {"role": "user", "content": left},
        {"role": "assistant", "content": answer},
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of whole words."""
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Makes a Llama with random weights."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        max_position_embeddings=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def main(steps: int = 150) -> None:
    """Writes model/."""
    torch.manual_seed(0)
    draw = random.Random(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        texts = [
            tokenizer.apply_chat_template(transcript(draw), tools=TOOLS, tokenize=False)
            for _ in range(BATCH)
        ]
        # (BATCH, length): all are equally long
        ids = torch.tensor([tokenizer.encode(text) for text in texts])
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")


if __name__ == "__main__":
    main()
