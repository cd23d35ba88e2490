"""Makes the project's model in a few seconds: a Llama of two layers that knows thirty words and the form of a question.

A project of yours has a real one instead. The transcripts it learns are a poor agent's: three in ten of its calls, and
of its answers, are right.
"""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from warehouse import TABLE, Stock, read_table

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
    "{% if tools %}<|im_start|> system tools {% for t in tools %}{{ t['function']['name'] }} {% endfor %}<|im_end|> "
    "{% endif %}"
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def transcript(draw: random.Random) -> list[dict[str, str]]:
    """Plays an episode as the poor agent does."""
    asked = draw.choice(list(ITEMS))
    looked_at = asked if draw.random() < 0.3 else draw.choice(list(ITEMS))
    told = ITEMS[looked_at]
    answer = told if draw.random() < 0.3 else str(draw.randrange(10))
    said = [f"how many {asked}", f"Action: stock[ {looked_at} ]", told, answer]
    roles = ("user", "assistant", "user", "assistant")
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]


def main(steps: int = 150) -> None:
    """Writes model/."""
    torch.manual_seed(0)
    draw = random.Random(0)
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    named = {
        "pad_token": "<pad>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **named)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=128, **sizes, **special)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        texts = [
            tokenizer.apply_chat_template(transcript(draw), tools=TOOLS, tokenize=False)
            for _ in range(64)
        ]
        ids = torch.tensor(
            [tokenizer.encode(text) for text in texts]
        )  # (64, length): all are equally long
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")


if __name__ == "__main__":
    main()
