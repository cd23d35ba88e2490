"""Whole chats: a person as environment, policy and watcher, recorded so that replay agrees."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from features.chat.command import chat_command
from scripts import replay
from scripts.replay_episodes import read_episodes
from tests.conftest import PROJECT
from tests.e2e.test_resume import listen_to_ctrl_c
from tests.needed_features import needs_features
from training.config.loader import ConfigError
from training.run.signals import EndingSignals

GAME = ("configs/quickstart.yaml", "data.max_prompt_length=30", "data.max_response_length=60")
ENGINES = ["hf", pytest.param("vllm", marks=pytest.mark.vllm)]


class Person:
    """Types into chats, and reads what they wrote."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out = tmp_path / "chat"
        self.monkeypatch = monkeypatch

    def chat(self, model: Path, typed: str, *words: str) -> int:
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        argv = [*GAME, "--chat", str(model), "--out", str(self.out), *words]
        return chat_command(argv, EndingSignals())

    @property
    def file(self) -> Path:
        return self.out / "episodes/val-0.jsonl"

    def episode(self) -> dict[str, Any]:
        (episode,) = read_episodes(self.file)
        return episode

    def replay(self) -> int:
        return replay.main([str(self.out / "config.yaml"), str(self.file)])


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Person:
    return Person(tmp_path, monkeypatch)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_person_is_the_environment_of_a_model_that_samples_as_in_training(
    person: Person, tiny_game: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    model = tiny_game / "model"
    typed = "guess\nhigher\n/reward 0.25\nlower\n/reward 1.0\n/done correct\n"
    words = ("--as", "environment", f"actor_rollout_ref.rollout.name={engine}")
    assert person.chat(model, typed, *words) == 0
    shown = capsys.readouterr().out
    assert "turn 3 of 4" in shown and "(reward 1, the episode is done)" in shown
    episode = person.episode()
    assert [turn["reward"] for turn in episode["turns"]] == [0.0, 0.25, 1.0]
    assert (episode["ending"], episode["reward"]) == ("done", 1.25)
    assert [turn["observation"][0]["content"] for turn in episode["turns"]] == [
        "higher",
        "lower",
        "correct",
    ]
    (row,) = episode["rows"]
    # What the model's own log-probs are on that conversation.
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
    with torch.no_grad():
        log_probs = lm(ids).logits[0, :-1].log_softmax(-1)
    start = len(row["prompt_ids"])
    sampled = [place for place, mask in enumerate(row["response_mask"]) if mask]
    assert len(sampled) >= 3
    for place in sampled:
        best = int(log_probs[start + place - 1].argmax())
        assert row["response_ids"][place] == best, "validation samples greedily"
    assert person.replay() == replay.SAME
    assert (person.out / "tokenizer/tokenizer.json").exists()


def test_a_person_is_the_policy_and_no_weights_are_read(
    person: Person, tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "no_weights"
    model.mkdir()
    for file in (tiny_game / "model").iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    assert person.chat(model, "5\n9 <eos> 9 9 9 9 9\n1\n", "--as", "policy") == 0
    shown = capsys.readouterr().out
    assert "You are the policy" in shown and "(the environment reads:" in shown
    episode = person.episode()
    assert episode["turns"][0]["text"] == "5"
    assert episode["turns"][1]["finish_reason"] == "length", "a turn has three tokens here"
    assert set(episode["rows"][0]["log_probs"]) == {0.0}
    assert person.replay() == replay.SAME


def test_who_leaves_as_the_policy_leaves_a_record_whatever_a_run_would_keep(
    person: Person, tiny_game: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--as", "policy", "records.keep_gib=0")
    assert person.chat(tiny_game / "model", "5\n", *words) == 0
    episode = person.episode()
    assert (episode["ending"], episode["error"]) == ("left", "")
    assert "the person left; recorded in" in capsys.readouterr().out
    assert person.replay() == replay.SAME


def test_a_watcher_sees_each_turn_and_the_end_of_input_lets_it_go_on(
    person: Person, tiny_game: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert person.chat(tiny_game / "model", "\n", "--episode", "2") == 0
    shown = capsys.readouterr().out
    assert "The policy plays" in shown and "turn 1 of 4" in shown
    episode = person.episode()
    assert episode["uid"] == "val.0.2" and episode["data_source"] == "TerseGuessNumber"
    assert person.replay() == replay.SAME


@needs_features("context")
def test_a_person_who_is_the_policy_is_asked_for_a_summary_and_sees_the_new_context(
    person: Person, tiny_game: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("agent.context=summarise", "context.after_turns=1", "context.keep_turns=0")
    words += ("context.request=correct", "context.summary_text='number {summary}'")
    words += ("context.summary_tokens=4", "--as", "policy")
    assert person.chat(tiny_game / "model", "1\nhigher\n1\nlower\n", *words) == 0
    shown = capsys.readouterr().out
    request, rest = shown.split("user:\n  correct\n", 1)
    assert request.count("tokens)>") == 1, "the first turn alone was taken before"
    assert "(a new context begins: summary. The policy reads)" in rest
    assert "number higher" in rest
    assert person.replay() == replay.SAME


@needs_features("context")
def test_a_watcher_sees_summaries(
    person: Person, tiny_game: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("agent.context=summarise", "context.after_turns=1", "context.keep_turns=0")
    words += ("context.request=guess", "context.summary_text='number {summary}'")
    assert person.chat(tiny_game / "model", "\n", *words, "context.summary_tokens=4") == 0
    shown = capsys.readouterr().out
    assert "user:\n  guess\npolicy, summary:\n" in shown
    written = [turn for turn in person.episode()["turns"] if turn.get("writes") == "summary"]
    assert shown.count("policy, summary:") == len(written) > 0
    assert "(a new context begins: summary" in shown


@needs_features("policy_calls")
@pytest.mark.parametrize("role", ["policy", "watcher"])
def test_what_the_environment_asks_is_shown_before_it_is_answered(
    person: Person, tiny_game: Path, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    game = PROJECT / "tests/features/policy_calls/guess_with_help.py"
    words = (f"agent.environment.path={game}", "agent.environment.cls=GuessWithHelp")
    words += ("policy_calls.enable=true", "policy_calls.max_tokens=4", "--as", role)
    assert person.chat(tiny_game / "model", "5\n" + "1\n" * 30, *words) == 0
    shown = capsys.readouterr().out
    asked = [turn for turn in person.episode()["turns"] if turn.get("aside")]
    assert asked
    if role == "policy":
        assert shown.count("the environment asks:") == len(asked)
    else:
        assert shown.count("user, to critic:") + shown.count("user, to hint:") == len(asked)
        assert shown.count("policy, asked by the environment:") == len(asked)


def test_who_leaves_before_the_first_message_leaves_nothing(
    person: Person, tiny_game: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert person.chat(tiny_game / "model", "", "--as", "environment") == 0
    assert "no turn was played" in capsys.readouterr().out
    assert not person.out.exists()


def test_wrong_words_are_told_before_anything_is_loaded(
    person: Person, tiny_game: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_game / "model"
    assert person.chat(Path("/nowhere/at/all"), "") == 2
    assert "there is no /nowhere/at/all" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="0 is the first"):
        person.chat(model, "", "--episode", "-1")
    with pytest.raises(ConfigError, match="'--turns' is no option"):
        person.chat(model, "", "--turns", "3")
    with pytest.raises(ConfigError, match="needs an environment"):
        person.chat(model, "", "--as", "policy", "~agent.environment")
    person.out.mkdir()
    (person.out / "mine").write_text("")
    with pytest.raises(ConfigError, match="is there already"):
        person.chat(model, "")


def test_ctrl_c_ends_a_chat_with_its_record(tiny_game: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "main.py", *GAME, "--chat", str(tiny_game / "model")]
    argv += ["--as", "environment", f"trainer.default_local_dir={tmp_path}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        argv,
        cwd=PROJECT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_ctrl_c,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("guess\n")
        process.stdin.flush()
        # The policy has answered, and the person is asked.
        shown = ""
        while not ("turn 1 of 4" in shown and shown.endswith("environment> ")):
            character = process.stdout.read(1)
            assert character, shown
            shown += character
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) == 0
    assert "ending: done; recorded in" in rest
    (file,) = tmp_path.glob("chats/*/episodes/val-0.jsonl")
    assert json.loads(file.read_text())["turns"][0]["done"] is True
