"""Recorded episodes played again.

A real run's are the same, and whatever was changed in a record, or does not repeat itself, is
named.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from data.json_lines import strict_json
from data.seeds import step_info
from data.turn_tokens import CHATML_TEMPLATE
from examples.prepare_quickstart import warm_up
from examples.prepare_tiny_prompts import make_model, make_tokenizer
from features.records.episode_files import write_episodes
from scripts.replay import Player, compare, main, read_episodes
from tests.conftest import PROJECT
from tests.e2e.test_tools_training import ScriptedEngine, call, qwen_tokenizer
from training.building import build_trainer
from training.config import AgentConfig, DataConfig, EnvironmentChoice, PPOConfig
from training.config.loader import load_config
from training.config.reference import to_yaml
from workers.multi_turn_rollout import AgentRollout, agent_specs, describe_episodes

Change = Callable[[dict[str, Any]], None]
FAULTY = '''
import random, time
from custom.env import BaseEnvironment

class Moody(BaseEnvironment):
    """By seed it plays on, crashes or hangs in its second step, or crashes at once."""

    def reset(self, seed=None):
        self.mood, self.turn = seed % 4, 0
        if self.mood == 3:
            raise RuntimeError("not today")
        return "guess"

    def step(self, action):
        self.turn += 1
        if self.turn == 2 and self.mood == 1:
            raise RuntimeError("no more")
        if self.turn == 2 and self.mood == 2:
            time.sleep(2)
        return self.word(), 0.25, self.turn == 3, {}

    def word(self):
        return "higher"

class Fickle(Moody):
    """Draws from a generator that nobody seeded."""

    def reset(self, seed=None):
        return super().reset(0)

    def word(self):
        return " ".join(random.SystemRandom().choices(["higher", "lower"], k=6))

def by_turns(trajectory, environment):
    return 0.5 + len(trajectory)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small player of the quickstart's game."""
    folder = tmp_path_factory.mktemp("player")
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    network = make_model(tokenizer)
    warm_up(network, tokenizer, random.Random(0), steps=60)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(model: Path, run_dir: Path, *overrides: str) -> Path:
    """Two steps of the quickstart, small.

    The run's folder, with config.yaml and episodes/1.jsonl.
    """
    argv = [
        "configs/quickstart.yaml",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={run_dir}",
        f"records.folder={run_dir}/episodes",
        "agent.val_length=4",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=2",
        "trainer.logger=file",
        *overrides,
    ]
    config = load_config(argv).config
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    trainer = build_trainer(config)
    trainer.init_workers()
    trainer.fit()
    trainer.shutdown()
    return run_dir


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # With this seed a policy that was not trained wins a game of its first step.
    return train(model, tmp_path_factory.mktemp("run"), "data.seed=3")


def replay(run: Path, file: Path, *options: str) -> int:
    # Its games may lie anywhere.
    return main([str(run / "config.yaml"), str(file), *options])


def changed(run: Path, tmp_path: Path, change: Change) -> Path:
    """Step 1's episodes, the longest one first and changed; their arrays are lists here."""
    lines = read_episodes(run / "episodes/1.jsonl")
    lines.sort(key=lambda episode: -len(episode["turns"]))
    change(lines[0])
    file = tmp_path / "changed.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    return file


def test_a_runs_episodes_are_the_same_again(run: Path, capsys) -> None:
    files = sorted((run / "episodes").glob("*.jsonl"))
    assert [file.name for file in files] == ["1.jsonl", "2.jsonl", "val-0.jsonl", "val-2.jsonl"]
    for file, count in zip(files, (16, 16, 4, 4), strict=True):
        assert replay(run, file) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{count} episodes (") and out.endswith("all the same\n")
    assert max(len(episode["turns"]) for episode in read_episodes(files[0])) > 1
    assert replay(run, files[0], "--first", "5") == 0
    assert capsys.readouterr().out.startswith("5 episodes (")


@pytest.mark.slow
def test_a_step_is_replayed_by_its_own_settings(run: Path, tmp_path: Path, capsys) -> None:
    resumed = tmp_path / "run"
    shutil.copytree(run, resumed)
    config = (run / "config.yaml").read_text()
    (resumed / "config.1.yaml").write_text(f"# steps 1 to 1\n{config}")
    game = "{path: examples/quickstart_game.py, cls: TerseGuessNumber, kwargs: {high: 3}}"
    other = load_config([str(run / "config.yaml"), f"agent.environment={game}"]).config
    (resumed / "config.yaml").write_text(to_yaml(other))
    # The folder knows which settings a step had.
    assert main([str(resumed), str(resumed / "episodes/1.jsonl")]) == 0
    assert "all the same" in capsys.readouterr().out
    assert replay(resumed, resumed / "episodes/2.jsonl") == 1
    assert "differences" in capsys.readouterr().out
    both = tmp_path / "both.jsonl"
    texts = [(resumed / f"episodes/{step}.jsonl").read_text() for step in (1, 2)]
    both.write_text("".join(texts))
    assert main([str(resumed), str(both)]) == 2
    assert "different settings (config.1.yaml, config.yaml)" in capsys.readouterr().err


@pytest.mark.long
def test_it_runs_from_any_folder(run: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        PROJECT / "scripts/replay.py",
        run,
        run / "episodes/1.jsonl",
        "--first",
        "1",
        "--loss",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "all the same" in done.stdout and "actor/grad_norm" in done.stdout


def sampled(episode: dict[str, Any], turn: int) -> int:
    return episode["rows"][0]["turn_ids"].index(turn)


def joined(episode: dict[str, Any]) -> int:
    return episode["rows"][0]["response_mask"].index(0)


def edit(name: str, place: Callable[[dict[str, Any]], int], value: Any) -> Change:
    def change(episode: dict[str, Any]) -> None:
        episode["rows"][0][name][place(episode)] = value

    return change


def edit_turn(name: str, value: Any) -> Change:
    return lambda episode: episode["turns"][1].__setitem__(name, value)


def won_at_once(episode: dict[str, Any]) -> None:
    """A seed whose hidden number is the first guess."""
    guess = int(episode["turns"][0]["text"])
    episode["env_seed"] = next(
        seed for seed in range(1000) if random.Random(seed).randint(1, 10) == guess
    )


CHANGES: dict[str, tuple[Change, list[str]]] = {
    "a turn's reward": (edit_turn("reward", 0.25), ["turn 2, reward: recorded 0.25, replayed"]),
    "a row's reward": (
        edit("rewards", lambda e: sampled(e, 0), 0.25),
        ["row 0, rewards[0]: recorded 0.25, replayed 0.0"],
    ),
    "an observation": (
        edit_turn("observation", [{"role": "user", "content": "correct"}]),
        ["turn 2, observation: recorded 'correct', replayed", "row 0, response_ids["],
    ),
    "the initial messages": (
        lambda e: e.__setitem__("initial_messages", [{"role": "user", "content": "number"}]),
        ["initial messages: recorded 'number', replayed 'guess'", "row 0, prompt_ids["],
    ),
    "a sampled id": (
        edit("response_ids", lambda e: sampled(e, 1), 30),
        ["turn 2, text of its ids: recorded"],
    ),
    "a joined id": (edit("response_ids", joined, 30), ["row 0, response_ids["]),
    "a prompt's id": (
        lambda e: e["rows"][0]["prompt_ids"].__setitem__(0, 30),
        ["row 0, prompt_ids[0]: recorded 30"],
    ),
    "a mask off": (edit("response_mask", lambda e: sampled(e, 1), 0), ["row 0, response_mask["]),
    "a mask on": (edit("response_mask", joined, 1), ["row 0, response_mask["]),
    "a text": (edit_turn("text", "10 10"), ["turn 2, text of its ids: recorded '10 10', replayed"]),
    "done": (edit_turn("done", True), ["turn 2, done: recorded True, replayed False"]),
    "the ending": (
        lambda e: e.__setitem__("ending", "overflow"),
        ["ending: recorded overflow, replayed"],
    ),
    "the seed": (won_at_once, ["turn 1, observation: recorded", "replayed 'correct'"]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_record_is_caught(run: Path, tmp_path: Path, capsys, kind: str) -> None:
    change, expected = CHANGES[kind]
    assert replay(run, changed(run, tmp_path, change)) == 1
    *lines, summary = capsys.readouterr().out.splitlines()
    assert all(any(text in line for line in lines) for text in expected), lines
    assert all(
        line.startswith("changed.jsonl line 1: TerseGuessNumber, episode 1.") for line in lines
    )
    assert "differences" in summary and "not reproducible" not in "".join(lines)


def faulty(run_dir: Path, model: Path, cls: str, *overrides: str) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / "faulty.py"
    file.write_text(FAULTY)
    named = (f"agent.environment.path={file}", f"agent.environment.cls={cls}")
    return train(
        model, run_dir, *named, "trainer.total_training_steps=1", "agent.val_length=0", *overrides
    )


@pytest.mark.long
def test_failures_are_replayed_as_far_as_they_go(model: Path, tmp_path: Path, capsys) -> None:
    run = faulty(
        tmp_path,
        model,
        "Moody",
        "agent.step_timeout_s=0.3",
        "agent.on_failure=refill",
        "agent.max_refills=1",
    )
    file = run / "episodes/1.jsonl"
    episodes = read_episodes(file)
    assert {episode["ending"] for episode in episodes} >= {"env_crash", "env_timeout", "done"}
    assert any(not episode["initial_messages"] for episode in episodes)
    assert replay(run, file) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "timed out, replayed up to that call" in out and "were tried again" in out
    (run / "mended.py").write_text(FAULTY.replace('raise RuntimeError("no more")', "pass"))
    assert replay(run, file, f"agent.environment.path={run}/mended.py") == 1
    out = capsys.readouterr().out
    assert "turn 2: not answered in the record, answered 'higher' in the replay" in out
    assert (
        "ending: recorded env_crash (RuntimeError: no more), replayed: the episode goes on" in out
    )


def test_an_environment_that_is_not_reproducible_is_named(
    model: Path, tmp_path: Path, capsys
) -> None:
    run = faulty(tmp_path, model, "Fickle")
    assert replay(run, run / "episodes/1.jsonl", "--first", "3") == 1
    out = capsys.readouterr().out
    assert (
        "Fickle, episode 1.0.0: the environment is not reproducible: two replays with env_seed="
        in out
    )
    assert "response_ids" not in out and "text of its ids" not in out  # its tokens are in order


def test_a_reward_functions_value_is_checked(model: Path, tmp_path: Path, capsys) -> None:
    named = (
        f"custom_reward_function.path={tmp_path}/faulty.py",
        "custom_reward_function.name=by_turns",
    )
    run = faulty(tmp_path, model, "Moody", *named, "agent.step_timeout_s=0.3")
    file = run / "episodes/1.jsonl"
    assert replay(run, file) == 0, capsys.readouterr().out
    episodes = read_episodes(file)
    for episode in episodes:
        for row in episode["rows"]:
            row["rewards"] = [3.25 if reward == 3.5 else reward for reward in row["rewards"]]
    file.write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
    assert replay(run, file) == 1
    assert "rewards[" in capsys.readouterr().out


@pytest.mark.long
def test_episodes_of_several_rows_are_replayed_and_their_loss_taken(
    tiny_task: Path, tmp_path: Path, capsys
) -> None:
    model = (
        tmp_path / "model"
    )  # says `guess 4`, of which its template keeps `4` once the conversation goes on
    shutil.copytree(tiny_task / "model", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML_TEMPLATE.replace(
        "message['content']", "message['content'].split('guess ')[-1]"
    )
    tokenizer.save_pretrained(model)
    limits = ("data.max_prompt_length=60", "data.max_response_length=20", "agent.max_turn_tokens=4")
    grpo = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2")
    run = faulty(
        tmp_path,
        model,
        "Moody",
        "agent.step_timeout_s=0.3",
        "agent.on_failure=mask",
        *limits,
        *grpo,
    )
    file = run / "episodes/1.jsonl"
    assert max(len(episode["rows"]) for episode in read_episodes(file)) > 1
    assert replay(run, file, "--loss") == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "row 1: " in out and "nothing to train on" in out and "actor/grad_norm" in out


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_the_loss_follows_from_the_file(run: Path, capsys, estimator: str) -> None:
    options = [f"algorithm.adv_estimator={estimator}", "algorithm.use_kl_in_reward=true"]
    assert any(
        sum(row["rewards"]) for e in read_episodes(run / "episodes/1.jsonl") for row in e["rows"]
    )
    assert replay(run, run / "episodes/1.jsonl", "--loss", *options) == 0
    out = capsys.readouterr().out
    numbers = {
        line.split()[0]: float(line.split()[1])
        for line in out.splitlines()
        if line.startswith("actor/")
    }
    assert numbers["actor/grad_norm"] > 0 and numbers.keys() == {"actor/pg_loss", "actor/grad_norm"}
    gaps = [float(line.rsplit("max ", 1)[1]) for line in out.splitlines() if ", max " in line]
    assert len(gaps) == 16 and max(gaps) < 1e-4, "step 1 was played by the config's own model"
    assert ("gae reads a critic's values" in out) == (estimator == "gae")


def test_tool_calls_are_made_again(tmp_path: Path) -> None:
    scripts = [
        [call("calculator", expression="2 * 21"), "42"],
        [call("calculator", expression="nonsense"), "I give up"],
    ]
    engine = ScriptedEngine(qwen_tokenizer(), scripts)
    environment = EnvironmentChoice(name="custom.envs.tool_arithmetic:ToolArithmetic")
    agent = AgentConfig(environment=environment, tools=("calculator",), max_turn=2)
    config = PPOConfig(
        data=DataConfig(max_prompt_length=2048, max_response_length=1024), agent=agent
    )
    rollout = AgentRollout(config, engine, engine.tokenizer, agent_specs(config), None)
    try:
        write_episodes(tmp_path, rollout.run(describe_episodes(2, 1, step_info(step=1, seed=3))))
    finally:
        rollout.close()
    episodes = read_episodes(tmp_path / "1.jsonl")
    assert "42" in episodes[0]["turns"][0]["observation"][0]["content"]
    names = {name: getattr(engine, name) for name in ("tokenizer", "eos_token_ids", "pad_token_id")}
    player = Player(config, SimpleNamespace(**names), agent_specs(config))  # type: ignore[arg-type]
    assert compare(player, episodes) == []
    episodes[0]["turns"][0]["observation"][0]["content"] = "43"
    assert len(compare(player, episodes)) == 2


def test_a_file_that_was_cut_short_is_read_up_to_there(run: Path, tmp_path: Path, capsys) -> None:
    content = (run / "episodes/1.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    file = tmp_path / "cut.jsonl"
    file.write_bytes(b"".join(lines[:2]) + lines[2][:-30])
    assert replay(run, file) == 0
    out = capsys.readouterr().out
    assert out.startswith("cut.jsonl line 3 is cut short") and "2 episodes" in out
    file.write_bytes(lines[0][:-30] + b"\n" + lines[1])
    assert replay(run, file) == 2
    assert "cut.jsonl line 1 is no episode" in capsys.readouterr().err


def test_what_cannot_be_replayed_is_said(run: Path, tmp_path: Path, capsys) -> None:
    assert replay(run, changed(run, tmp_path, lambda e: e.pop("env_seed"))) == 2
    assert "changed.jsonl line 1: lacks env_seed" in capsys.readouterr().err
    assert replay(run, changed(run, tmp_path, lambda e: e["rows"][0]["log_probs"].pop())) == 2
    assert "line 1: row 0 has" in capsys.readouterr().err
    assert replay(run, run / "episodes/1.jsonl", "agent.environment.path=null") == 2
    assert "names no environment" in capsys.readouterr().err
    assert replay(run, run / "nowhere.jsonl") == 2


def test_an_episode_goes_on_from_a_turn_with_a_model(run: Path, model: Path, capsys) -> None:
    file = run / "episodes/1.jsonl"
    episode = max(read_episodes(file), key=lambda e: len(e["turns"]))
    options = ("--episode", episode["episode_id"], "--until-turn")
    texts = [turn["text"] for turn in episode["turns"]]
    assert len(texts) > 2
    # From the first turn on the model that played then plays: it samples as it did, but for the
    # seed, which is of the group's place in the step.
    for until_turn in (1, 3, len(texts) + 1):
        assert replay(run, file, *options, str(until_turn), "--model", str(model)) == 0
        out = capsys.readouterr().out
        for number, text in enumerate(texts[: until_turn - 1], start=1):
            assert f"[turn {number}, record] assistant: {text}\n" in out
        assert "otherwise" not in out, "the environment answers as it did"
        assert ("model] assistant: " in out) == (until_turn <= len(texts))
        assert f"the record: {episode['ending']} after {len(texts)} turns" in out
    assert replay(run, file, *options, "2", "data.seed=11") == 0
    first = capsys.readouterr().out
    assert replay(run, file, *options, "2", "data.seed=11") == 0
    assert capsys.readouterr().out == first, "it is reproducible"


def test_what_an_episode_cannot_go_on_from_is_said(run: Path, tmp_path: Path, capsys) -> None:
    file = run / "episodes/1.jsonl"
    assert replay(run, file, "--episode", "1.77.0", "--until-turn", "1") == 2
    assert "--episode 1.77.0 is not in the file, which has 1.0.0, 1.1.0" in capsys.readouterr().err
    assert replay(run, file, "--until-turn", "9") == 2
    assert "--until-turn 9: episode 1.0.0 has the turns 1 to" in capsys.readouterr().err
    assert replay(run, file, "--until-turn", "1", "--model", str(tmp_path)) == 2
    assert "is no model: give a Hugging Face folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        replay(run, file, "--model", str(tmp_path))


def test_a_checkpoints_weights_go_on(model: Path, tmp_path: Path, capsys) -> None:
    learns = ("actor_rollout_ref.actor.optim.lr=0.05", "trainer.save_freq=2")
    run = train(model, tmp_path, *learns)
    file = run / "episodes/1.jsonl"
    options = ("--until-turn", "1", "actor_rollout_ref.rollout.temperature=0.01")
    played = []
    for extra in ((), ("--model", str(run / "global_step_2"))):
        assert replay(run, file, *options, *extra) == 0
        played.append(capsys.readouterr().out)
    assert played[0] != played[1], "the weights of step 2 are others"


def test_records_are_strict_json() -> None:
    line = strict_json(
        {
            "log_probs": [float("nan"), float("-inf"), -0.5],
            "made": {1, 2}.__class__,
            "text": "é\ud800",
        }
    )
    assert "\n" not in line
    assert json.loads(line, parse_constant=pytest.fail)["log_probs"] == [None, None, -0.5]
