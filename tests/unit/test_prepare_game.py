"""Tests the small model that is made for a game of one's own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from prepare_game import IGNORED, label_answers, make_tokenizer, play, prepare
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.config import PPOConfig
from training.config.loader import load_config
from workers.multi_turn_rollout import agent_specs

SHOP = """
import random

from custom.env import BaseEnvironment
from custom.tools import Tool, ToolDefinition


class Price(Tool):
    definition = ToolDefinition(
        name="price",
        description="The price of a fruit.",
        parameters={
            "type": "object",
            "properties": {"fruit": {"type": "string"}},
            "required": ["fruit"],
        },
    )

    def execute(self, fruit):
        return f"{fruit} costs 7"


class Shop(BaseEnvironment):
    def reset(self, seed=None):
        return "how much is a pear"

    def step(self, action):
        return "bye", float(action == "7"), True, {}

    def sample_action(self, generator):
        return generator.choice(["Action: price[ pear ]", "7"])


class Silent(BaseEnvironment):
    def reset(self, seed=None):
        return "say something"

    def step(self, action):
        return "", 0.0, True, {}


class Coin(BaseEnvironment):
    def reset(self, seed=None):
        self.side = random.Random(seed).choice(["heads", "tails"])
        return "heads or tails"

    def step(self, action):
        return f"it was {self.side}", float(action == self.side), True, {}

    def sample_action(self, generator):
        return generator.choice(["heads", "tails"])


class Riddle(BaseEnvironment):
    def reset(self, question, answer, seed=None):
        self.answer = answer
        return question

    def step(self, action):
        return "bye", float(action == self.answer), True, {}

    def sample_action(self, generator):
        return "an " + self.answer
"""


def config_of(folder: Path, name: str, *more: str) -> PPOConfig:
    (folder / "shop.py").write_text(SHOP)
    words = [
        f"agent.environment={{path: {folder}/shop.py, cls: {name}}}",
        f"agent.tools=['{folder}/shop.py:Price']",
        "agent.parser=react",
        "agent.max_turn=3",
        f"actor_rollout_ref.model.path={folder}/model",
        "data.max_prompt_length=24",
        "data.max_response_length=300",
        *more,
    ]
    return load_config(words, check=False).config


def test_labels_are_the_answers_and_their_ends() -> None:
    start, end, user, assistant, a, b = range(6)
    ids = [start, user, assistant, end, start, assistant, a, b, end, start, user, a, end]
    wanted = [IGNORED] * 6 + [a, b, end] + [IGNORED] * 4
    assert label_answers(ids, start, assistant, end) == wanted


@pytest.mark.seconds
def test_the_model_knows_the_games_words_its_tools_and_the_form_of_answers(tmp_path: Path) -> None:
    folder = prepare(config_of(tmp_path, "Shop"), games=40, steps=120)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.max_position_embeddings == 324
    for text in ("how much is a pear", "Action: price[ pear ]", "pear costs 7", "tool price 20"):
        assert tokenizer.unk_token_id not in tokenizer.encode(text)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "how much is a pear"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    probs = model(torch.tensor([tokenizer.encode(prompt)])).logits[0, -1].softmax(-1)
    answers = tokenizer.convert_tokens_to_ids(["Action:", "7"])
    assert probs[answers].sum() > 0.9
    assert (probs[answers] > 0.2).all()


def test_random_answers_know_nothing_of_what_the_environment_drew(tmp_path: Path) -> None:
    [spec] = agent_specs(config_of(tmp_path, "Coin"))
    agent = spec.build()
    games = [play(agent, seed, 1) for seed in range(400)]
    answers = [messages[-1]["content"] for messages in games]
    sides = [random.Random(seed).choice(["heads", "tails"]) for seed in range(400)]
    right = sum(answer == side for answer, side in zip(answers, sides, strict=True))
    # 200 are right by chance, give or take 10.
    assert 160 <= right <= 240


def test_a_folder_that_is_there_is_left_and_what_its_tokenizer_lacks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, "Coin")
    make_tokenizer(["heads or tails it was"]).save_pretrained(tmp_path / "model")
    said = "model is there already, nothing was made: delete it or give another path\n"
    assert prepare(config) == tmp_path / "model"
    assert capsys.readouterr().out == said
    with pytest.raises(SystemExit, match=r"model: its tokenizer lacks words of the game \(how, "):
        prepare(config_of(tmp_path, "Shop"))
    assert capsys.readouterr().out == said


def test_games_are_about_the_rows_of_the_data(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"question": "what barks", "answer": "dog"}\n{"question": "what flies", "answer": "owl"}'
    )
    config = config_of(tmp_path, "Riddle", f"data.train_files={rows}", "agent.tools=[]")
    folder = prepare(config, games=6, steps=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("what barks", "an dog", "what flies", "an owl"):
        assert tokenizer.unk_token_id not in tokenizer.encode(text)


def test_a_game_that_fails_is_told_with_what_it_raised(tmp_path: Path) -> None:
    match = r"game 0 failed; data\.train_files is not set.*missing 2 required .*'question'"
    with pytest.raises(SystemExit, match=match):
        prepare(config_of(tmp_path, "Riddle"))


def test_a_tool_that_no_game_calls_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(config_of(tmp_path, "Coin"), games=4, steps=1)
    assert "no game called the tool price" in capsys.readouterr().out


def test_a_tool_that_games_call_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(config_of(tmp_path, "Shop"), games=8, steps=1)
    assert "price" not in capsys.readouterr().out


def test_a_model_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert prepare(config_of(tmp_path, "Silent")) == tmp_path / "model"
    assert list((tmp_path / "model").iterdir()) == []


def test_a_game_without_random_answers_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"Silent has no sample_action\(self, generator\): it ret"):
        prepare(config_of(tmp_path, "Silent"))
    assert not (tmp_path / "model").exists()


def test_a_file_without_a_model_or_a_game_is_told_what_it_lacks() -> None:
    with pytest.raises(SystemExit, match=r"actor_rollout_ref\.model\.path is missing"):
        prepare(load_config([], check=False).config)
    with pytest.raises(SystemExit, match=r"agent\.environment is missing"):
        prepare(load_config(["actor_rollout_ref.model.path=x"], check=False).config)


def test_words_of_texts_are_tokens_of_their_own() -> None:
    tokenizer = make_tokenizer(["left or right,"])
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("left right, 20")) == [
        "left",
        "right,",
        "20",
    ]
