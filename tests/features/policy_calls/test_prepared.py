"""A small model can be made for a game whose code asks the policy."""

from __future__ import annotations

from pathlib import Path

from prepare_game import prepare
from transformers import AutoTokenizer

from training.config.loader import load_config

HELPED = """
import random

from custom.env import BaseEnvironment
from features.policy_calls import policy


class Helped(BaseEnvironment):
    def reset(self, seed=None):
        self.side = random.Random(seed).choice(["heads", "tails"])
        return "which side"

    def step(self, action):
        reply = policy.ask(f"sheet {self.side} read it", name="reader")
        if self.side == "heads":
            reply.reward = 1.0
        assert str(reply) in ("heads", "tails")
        return f"reader said {reply}", 0.0, False, {}

    def sample_action(self, generator):
        return generator.choice(["heads", "tails"])
"""


def test_the_model_knows_the_words_of_questions_and_their_answers_are_of_the_game(
    tmp_path: Path,
) -> None:
    (tmp_path / "helped.py").write_text(HELPED)
    words = [
        f"agent.environment={{path: {tmp_path}/helped.py, cls: Helped}}",
        "agent.max_turn=2",
        "policy_calls.enable=true",
        f"actor_rollout_ref.model.path={tmp_path}/model",
    ]
    folder = prepare(load_config(words, check=False).config, games=8, steps=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("sheet heads read it", "reader said tails"):
        assert tokenizer.unk_token_id not in tokenizer.encode(text)
