"""A game whose credit is enumerated exactly, and estimators that are given it: right, and wrong.

    guess   the policy: one token    three times; each token adds luck of +1 or -1, paid at the end

The luck is of the task, the turn and the token, and nothing of it is told, so that what the policy
reads follows from its own answers alone: its probabilities after all 1 + V + V² answers are the
game's whole tree.
"""

from __future__ import annotations

import os
import random
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from custom.env import BaseEnvironment
from data.turn_tokens import TurnTokens
from training.core_algos import register_adv_est

TURNS = 3


def luck_of(seed: int, turn: int, answer: str) -> float:
    """The luck that an answer adds."""
    return random.Random(f"{seed} {turn} {answer}").choice((-1.0, 1.0))


class Hidden(BaseEnvironment):
    """Adds the luck of three answers up, and pays it at the end."""

    def reset(self, seed: int | None = None) -> str:
        self.seed = seed or 0
        self.turn = 0
        self.luck = 0.0
        return "guess"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.luck += luck_of(self.seed, self.turn, action)
        self.turn += 1
        done = self.turn == TURNS
        return "guess", self.luck * done, done, {}

    def sample_action(self, generator: random.Random) -> str:
        return str(generator.randint(1, 10))


class Tree:
    """Holds the policy's probabilities in the whole game.

    Attributes:
        chances: by turn, those of each token behind each way there: (V ** turn, V) float64.
        answers: by token, as the game reads it.
        joins: by token, the row's ids from there to the next turn, that token first.
    """

    def __init__(self, model: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        end = tokenizer.eos_token_id
        tokens = TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=[end])
        question = [{"role": "user", "content": "guess"}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
        self.size = len(tokenizer)
        self.answers = [tokens.text([token]) for token in range(self.size)]
        behind = tokenizer.convert_tokens_to_ids(["<|im_end|>"]) + list(prompt)
        self.joins = [
            [token, *(behind[1:] if token == end else behind)] for token in range(self.size)
        ]
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        contexts = [list(prompt)]
        self.chances: list[np.ndarray] = []
        for turn in range(TURNS):
            if turn:
                contexts = [ids + join for ids in contexts for join in self.joins]
            self.chances.append(self._chances(network, contexts))

    def _chances(self, network: Any, contexts: list[list[int]]) -> np.ndarray:
        """Returns the probabilities of the token behind each context."""
        chances = np.empty((len(contexts), self.size))
        lengths = np.array([len(ids) for ids in contexts])
        for length in np.unique(lengths):
            places = np.nonzero(lengths == length)[0]
            ids = torch.tensor([contexts[place] for place in places])
            with torch.no_grad():
                logits = network(ids).logits[:, -1, : self.size].double()
            chances[places] = logits.softmax(-1).numpy()
        return chances

    def credit(self, seed: int, tokens: list[int]) -> list[float]:
        """Returns the exact credit of each answer: what it is worth less what the turn was."""
        luck = [
            np.array([luck_of(seed, turn, answer) for answer in self.answers])
            for turn in range(TURNS)
        ]
        # Of each way to a turn, what is still to come on average.
        ahead = np.zeros(self.size**TURNS)
        worth = []
        for turn in reversed(range(TURNS)):
            of_answers = luck[turn] + ahead.reshape(-1, self.size)
            worth.append(of_answers)
            ahead = (self.chances[turn] * of_answers).sum(-1)
        way = 0
        credit = []
        for turn, (token, of_answers) in enumerate(zip(tokens, reversed(worth), strict=True)):
            value = (self.chances[turn][way] * of_answers[way]).sum()
            credit.append(float(of_answers[way, token] - value))
            way = way * self.size + token
        return credit


@cache
def tree() -> Tree:
    """Returns the tree of the model that PLANTED_MODEL names."""
    return Tree(os.environ["PLANTED_MODEL"])


def planted_credit(batch: dict[str, Tensor], seeds: Any) -> np.ndarray:
    """Returns the exact credit: (rows, TURNS); zeros in rows that are none.

    Raises:
        ValueError: a row is not what the tree takes it for.
    """
    credit = np.zeros((len(seeds), TURNS))
    mask = batch["response_mask"].bool()
    for row, seed in enumerate(seeds):
        tokens = batch["responses"][row][mask[row]].tolist()
        if not tokens:
            continue
        known = tree()
        joined = [each for token in tokens for each in known.joins[token]]
        length = len(joined) - len(known.joins[tokens[-1]]) + 1
        paid = sum(luck_of(seed, turn, known.answers[token]) for turn, token in enumerate(tokens))
        scored = batch["token_level_rewards"][row].sum().item()
        if batch["responses"][row][:length].tolist() != joined[:length] or paid != scored:
            raise ValueError(f"row {row} is not the tree's: paid {scored}, and there {paid}")
        credit[row] = known.credit(int(seed), tokens)
    return credit


def on_tokens(credit: np.ndarray, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Lays credit of turns on their tokens."""
    turns = batch["turn_ids"].clamp(min=0).long()
    wide = torch.from_numpy(credit).gather(1, turns) * batch["response_mask"]
    return wide, wide


@register_adv_est("planted")
def planted(batch: dict[str, Tensor], non_tensor_batch: Any, **_: Any) -> tuple[Tensor, Tensor]:
    return on_tokens(planted_credit(batch, non_tensor_batch["env_seed"]), batch)


@register_adv_est("twice")
def twice(batch: dict[str, Tensor], non_tensor_batch: Any, **_: Any) -> tuple[Tensor, Tensor]:
    return on_tokens(2 * planted_credit(batch, non_tensor_batch["env_seed"]), batch)


@register_adv_est("sign")
def sign(batch: dict[str, Tensor], non_tensor_batch: Any, **_: Any) -> tuple[Tensor, Tensor]:
    return on_tokens(-planted_credit(batch, non_tensor_batch["env_seed"]), batch)


@register_adv_est("shifted")
def shifted(batch: dict[str, Tensor], non_tensor_batch: Any, **_: Any) -> tuple[Tensor, Tensor]:
    credit = planted_credit(batch, non_tensor_batch["env_seed"])
    return on_tokens(np.roll(credit, 1, axis=1), batch)


@register_adv_est("other_episode")
def other_episode(
    batch: dict[str, Tensor], non_tensor_batch: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    credit = planted_credit(batch, non_tensor_batch["env_seed"])
    return on_tokens(np.roll(credit, 1, axis=0), batch)


@register_adv_est("shuffled")
def shuffled(batch: dict[str, Tensor], non_tensor_batch: Any, **_: Any) -> tuple[Tensor, Tensor]:
    credit = planted_credit(batch, non_tensor_batch["env_seed"])
    drawn = np.random.default_rng(0).permutation(credit.ravel()).reshape(credit.shape)
    return on_tokens(drawn, batch)
