"""Makes what configs/qwen3_5_tools.yaml trains: a tiny Qwen3.5 that also sees, and a tokenizer.

    python examples/prepare_zoo_game.py                                   # Qwen3.5
    python examples/prepare_zoo_game.py --family gpt_oss --form harmony --out outputs/gpt_oss_tools

Families are those of tests/zoo/families.py, chat templates those of tests/zoo/tool_forms.py.
The model is warmed up on games of a poor player: it thinks, calls the tool and answers in the
form of its family; every second call is for the name that was asked for, and every second answer
is what the tool said, the others are any. One turn in five thinks of a call, which is none. So the
model knows the form and little of its sense; training teaches the rest.
Invariant: the folder is there only when it is complete; equal seeds give equal games.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from look_up_game import HIGHEST, NAMES, LookUp, Numbers
from prepare_tiny_prompts import completed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from custom.tools import FamilyParser, ToolCall, ToolRegistry, get_parser
from custom.tools.chat_form import call_message, under_template
from custom.tools.families.family import THINKING_KEYS
from data.turn_tokens import TurnTokens
from tests.zoo.families import FAMILIES, Family, WholeFamily
from tests.zoo.tool_forms import TOOL_FORMS, ToolForm, make_byte_tokenizer

TURNS = 3
VOCABULARY = 512
GAMES = 1000
STEPS = 1200
BATCH = 16
LEARNING_RATE = 3e-3
# Shares of the poor player's turns.
CALLS_FIRST = 0.8
CALLS_AGAIN = 0.1
SENSIBLE = 0.5
THINKS_OF_A_CALL = 0.2
# Steps between two lines that say how far it is.
TOLD_EVERY = 50
IGNORED = -100
NUMBERS = [str(number) for number in range(1, HIGHEST + 1)]
QUESTION = {"role": "user", "content": "What?"}
TOOLS = ToolRegistry([LookUp()]).schemas()


class Turn(NamedTuple):
    """Holds what a turn saw, the whole conversation with the generation prompt, and wrote."""

    seen: str
    written: str


@dataclass
class PoorPlayer:
    """Plays the game in a family's form.

    Attributes:
        tokenizer: with the form's chat template.
        games: the turns of every game that was played.
    """

    form: ToolForm
    tokenizer: PreTrainedTokenizerFast
    draw: random.Random
    games: list[list[Turn]] = field(default_factory=list)

    def __post_init__(self) -> None:
        parser = get_parser(self.form.parser)
        assert isinstance(parser, FamilyParser)
        stops: Any = self.tokenizer.convert_tokens_to_ids(list(self.form.stops))
        self.tokens = TurnTokens(self.tokenizer, template_kwargs={}, eos_token_ids=stops)
        self.parser = under_template(parser, self.tokens)

    def play(self, seed: int) -> None:
        """Plays a game."""
        game = Numbers()
        self.games.append([])
        history = [{"role": "user", "content": game.reset(seed)}]
        found = ""
        for turn in range(TURNS):
            chance = CALLS_AGAIN if found else CALLS_FIRST
            if turn == TURNS - 1 or self.draw.random() > chance:
                number = self._choose(found, NUMBERS)
                answer = {"role": "assistant", "content": number}
                self._write(history, answer | self._thinking("I know it"))
                return
            name = self._choose(game.asked, NAMES)
            found = str(game.numbers[name])
            call = self._call(name) | self._thinking("I look it up")
            reply = self._reply(call, f"{name} has {found}")
            self._write(history, call, reply)
            history += [call, reply]

    def _choose(self, sensible: str, others: list[str]) -> str:
        """Chooses what makes sense every second time, where there is such, and else any."""
        if sensible and self.draw.random() < SENSIBLE:
            return sensible
        return self.draw.choice(others)

    def _call(self, name: str) -> dict[str, Any]:
        """Returns the message that calls the tool."""
        arguments: Any = {"name": name}
        call_id = self.parser.call_id(ToolCall("look_up", arguments), 0)
        if self.parser.facts.arguments_as_text:
            arguments = json.dumps(arguments)
        return call_message("look_up", arguments, call_id)

    def _reply(self, call: dict[str, Any], content: str) -> dict[str, Any]:
        """Returns the message that answers a call."""
        call_id = call["tool_calls"][0]["id"]
        return {"role": "tool", "content": content, "name": "look_up", "tool_call_id": call_id}

    def _thinking(self, thought: str) -> dict[str, str]:
        """Returns a thought as templates take it; one in five is of a call."""
        if self.form.thinking is None:
            return {}
        # Harmony's calls end a turn wherever they stand.
        if self.form.parser != "harmony" and self.draw.random() < THINKS_OF_A_CALL:
            message = self._call(self.draw.choice(NAMES))
            call = self.tokens.written_turn([QUESTION], message, TOOLS)
            thought = through_stop(call, self.form.stops)[0].strip()
        return dict.fromkeys(THINKING_KEYS, thought)

    def _write(
        self,
        history: list[dict[str, Any]],
        answer: dict[str, Any],
        reply: dict[str, Any] | None = None,
    ) -> None:
        """Keeps a turn as the policy would have sampled it, through what ends it."""
        seen = self._rendered(history, True)
        text, stop = self._behind(seen, [*history, answer])
        # Where the role that answers ends a turn.
        if not stop and reply is not None:
            text, stop = self._behind(seen, [*history, answer, reply])
        self.games[-1].append(Turn(seen, text + (stop or self.form.stops[0])))

    def _behind(self, seen: str, messages: list[dict[str, Any]]) -> tuple[str, str]:
        whole = self._rendered(messages, False)
        assert whole.startswith(seen), "the template writes a turn otherwise than it begins"
        return through_stop(whole[len(seen) :], self.form.stops)

    def _rendered(self, messages: list[dict[str, Any]], goes_on: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=TOOLS, tokenize=False, add_generation_prompt=goes_on
        )


def through_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """Returns a text up to the first of the stops, and that stop; "": there is none."""
    found = re.search("|".join(map(re.escape, stops)), text)
    return (text[: found.start()], found.group()) if found else (text, "")


def make_tokenizer(form: ToolForm, texts: list[str], placeholders: list[str]) -> Any:
    """Makes a tokenizer of bytes and of what is frequent in some texts, with the form's template.

    Args:
        placeholders: special tokens that no text has, which stand for pictures.
    """
    specials = [*form.specials, *placeholders]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", *specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    parts = [re.split("|".join(map(re.escape, specials)), text) for text in texts]
    core.train_from_iterator(parts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token=form.stops[0],
        extra_special_tokens=[special for special in specials if special != form.stops[0]],
        chat_template=form.template,
    )


def read_back(made: Any, config: PretrainedConfig, place: Path, text: str) -> Any:
    """Returns a tokenizer as a run reads it: by the model's type, which may split texts otherwise.

    Args:
        place: where it is written, with the configuration.
        text: that it must keep.
    """
    made.save_pretrained(place)
    config.save_pretrained(place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    kept = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    if kept != text:
        sys.exit(
            f"the tokenizer class of {config.model_type}, {type(tokenizer).__name__}, does not "
            f"read a tokenizer of bytes: {text[-40:]!r} becomes {kept[-40:]!r}; take another family"
        )
    return tokenizer


def shallow(family: Family) -> Family:
    """Returns a family with two layers, one of each kind where it has two kinds."""
    if isinstance(family, WholeFamily):
        return replace(family, part=shallow(family.part))
    kinds = family.settings.get("layer_types")
    if not kinds:
        return family
    settings = {"num_hidden_layers": 2, "layer_types": [kinds[0], kinds[-1]]}
    return replace(family, settings=family.settings | settings)


def fit_config(family: Family, tokenizer: Any, placeholders: dict[str, str]) -> PretrainedConfig:
    """Makes a family's configuration with a tokenizer's size and ids."""
    config = family.config()
    text = config.get_text_config()
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if hasattr(text, key):
            setattr(text, key, len(tokenizer))
    text.bos_token_id = None
    text.eos_token_id = tokenizer.eos_token_id
    text.pad_token_id = tokenizer.pad_token_id
    for key, token in placeholders.items():
        setattr(config, key, tokenizer.convert_tokens_to_ids(token))
    return config


def make_rows(tokenizer: Any, games: list[list[Turn]]) -> list[tuple[Tensor, Tensor]]:
    """Makes the rows that a rollout would have of games: token ids, and what is to be learnt.

    A turn that saw what the turn before saw and wrote goes on in its row; others begin one.
    """
    rows: list[tuple[list[int], list[int]]] = []
    for turns in games:
        text = ""
        for turn in turns:
            if not text or not turn.seen.startswith(text):
                rows.append(([], []))
                text = ""
            ids, labels = rows[-1]
            seen = tokenizer.encode(turn.seen[len(text) :], add_special_tokens=False)
            written = tokenizer.encode(turn.written, add_special_tokens=False)
            ids += seen + written
            labels += [IGNORED] * len(seen) + written
            text = turn.seen + turn.written
    return [(torch.tensor(ids), torch.tensor(labels)) for ids, labels in rows]


def warm_up(model: PreTrainedModel, rows: list[tuple[Tensor, Tensor]], steps: int) -> None:
    """Trains on what the poor player wrote, and on none of what it saw."""
    # (rows, length); padding lies behind the answers, which do not see it.
    ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
    labels = pad_sequence([each for _, each in rows], batch_first=True, padding_value=IGNORED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for number in range(steps):
        chosen = torch.randint(len(rows), (BATCH,))
        loss = model(input_ids=ids[chosen], labels=labels[chosen], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % TOLD_EVERY == 0:
            print(f"learning the form: step {number} of {steps}, loss {loss:.2f}", flush=True)


def prepare(folder: Path, family: Family, form: ToolForm, seed: int, steps: int = STEPS) -> None:
    """Writes model/; a folder that is there is complete and stays."""
    if folder.exists():
        return
    placeholders: dict[str, str] = {}
    if isinstance(family, WholeFamily):
        placeholders = {key: f"<|{key}|>" for key in family.placeholders}
    player = PoorPlayer(form, make_byte_tokenizer(form), random.Random(seed))
    for number in range(GAMES):
        player.play(number)
    texts = [turn.seen + turn.written for turns in player.games for turn in turns]
    with completed(folder) as temporary:
        place = temporary / "model"
        made = make_tokenizer(form, texts, list(placeholders.values()))
        config = fit_config(family, made, placeholders)
        tokenizer = read_back(made, config, place, texts[0])
        model = family.build(config, seed)
        model.generation_config.eos_token_id = made.convert_tokens_to_ids(list(form.stops))
        warm_up(model, make_rows(tokenizer, player.games), steps)
        family.write(place, model, made)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/qwen3_5_tools"))
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_5_vision")
    parser.add_argument("--form", choices=TOOL_FORMS, default="qwen3_xml")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the warm-up")
    parser.add_argument("--vllm", action="store_true", help="sizes that vLLM knows on a CPU")
    args = parser.parse_args()
    family = shallow(FAMILIES[args.family])
    if args.vllm:
        family = family.for_vllm()
    prepare(args.out, family, TOOL_FORMS[args.form], args.seed, args.steps)
