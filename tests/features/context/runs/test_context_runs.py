"""Whole runs whose episodes have several contexts: credit, records, replay, the viewer, --eval,
kills and sampling ahead.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from features.records.episode_files import read_episodes
from features.records.step_arrays import read_step_arrays
from features.viewer.build import build_viewer
from features.viewer.command import find_run
from main import run
from scripts.browser import Browser
from scripts.replay import main as replay
from tests.conftest import PROJECT
from tests.e2e.test_resume import finish, run_and_kill, tensors
from tests.e2e.test_training import read_steps
from tests.viewer_pages import open_viewer, show
from training.run.signals import EndingSignals

STEPS = 3
SUMMARISE = (
    "agent.context=summarise",
    "context.after_turns=1",
    "context.most_turns=2",
    "context.keep_turns=0",
    "context.request=guess",
    "context.summary_text='number {summary}'",
    "context.summary_tokens=3",
)
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")


def words(game: Path, run_dir: Path, *more: str, steps: int = STEPS) -> list[str]:
    """A small run of the quickstart's game, with room for several contexts."""
    return [
        str(PROJECT / "configs/quickstart.yaml"),
        f"actor_rollout_ref.model.path={game}/model",
        f"agent.environment.path={PROJECT}/examples/quickstart_game.py",
        f"trainer.default_local_dir={run_dir}",
        "agent.val_length=8",
        "data.train_batch_size=16",
        "data.max_prompt_length=24",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        "trainer.deterministic=true",
        "trainer.logger=[file]",
        *more,
    ]


def train(argv: list[str]) -> int:
    return run(argv, EndingSignals())


@pytest.fixture(scope="module")
def summarised(tiny_game: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("summarised")
    assert train(words(tiny_game, folder, *SUMMARISE)) == 0
    return folder


def several(folder: Path, name: str = "1.jsonl") -> list[dict[str, Any]]:
    """The recorded episodes of several contexts."""
    episodes = read_episodes(folder / "episodes" / name)
    found = [episode for episode in episodes if len(episode["rows"]) > 1]
    assert found
    return found


def test_contexts_are_rows_of_one_episode_and_counted(summarised: Path) -> None:
    steps = read_steps(summarised)
    assert all(1 < step["context/per_episode/mean"] <= 4 for step in steps[1:])
    assert all(step["context/summaries"] > 0 for step in steps[1:])
    assert all(1 <= step["context/summary_tokens/mean"] <= 3 for step in steps[1:])
    assert all(0 < step["context/summary_tokens/share"] < 1 for step in steps[1:])
    for episode in several(summarised):
        seams = [row.get("seam") for row in episode["rows"]]
        assert seams[0] is None and all(seam["reason"] == "summary" for seam in seams[1:])
        turn_ids = np.concatenate([row["turn_ids"] for row in episode["rows"]])
        sampled = turn_ids[turn_ids >= 0]
        assert (np.diff(sampled) >= 0).all(), "turns keep their order over rows"
        assert set(sampled) == set(range(len(episode["turns"])))
        written = [turn for turn in episode["turns"] if turn.get("writes")]
        assert len(written) == len(seams) - 1
        assert all(turn["trained"] and turn["done"] is None for turn in written)
        assert all(turn["asked"] == [{"role": "user", "content": "guess"}] for turn in written)


def test_an_episode_of_several_contexts_has_its_groups_credit_once(
    tiny_game: Path, tmp_path: Path
) -> None:
    assert train(words(tiny_game, tmp_path, *SUMMARISE, *GRPO, steps=1)) == 0
    meta, columns = read_step_arrays(tmp_path / "episodes/1.npz")
    rewards = {each["episode_id"]: each for each in read_episodes(tmp_path / "episodes/1.jsonl")}
    groups: dict[str, list[float]] = {}
    for each in rewards.values():
        groups.setdefault(each["uid"], []).append(each["reward"])
    assert any(len(each["rows"]) > 1 for each in rewards.values())
    compared = 0
    for row, episode_id in enumerate(columns["episode_id"]):
        # The row pads the batch.
        if episode_id not in rewards:
            continue
        episode = rewards[episode_id]
        scores = np.array(groups[episode["uid"]])
        wanted = (episode["reward"] - scores.mean()) / (scores.std(ddof=1) + 1e-6)
        begin, end = columns["offsets"][row : row + 2]
        sampled = columns["response_mask"][begin:end] > 0
        advantages = columns["advantages"][begin:end][sampled]
        assert advantages == pytest.approx(wanted, abs=1e-4)
        compared += len(advantages)
    assert compared > 0 and meta["step"] == 1


def test_summaries_that_are_not_trained_on_have_mask_zero(tiny_game: Path, tmp_path: Path) -> None:
    masked = "context.train_summaries=false"
    assert train(words(tiny_game, tmp_path, *SUMMARISE, masked, steps=1)) == 0
    meta, columns = read_step_arrays(tmp_path / "episodes/1.npz")
    names = {int(code): fate["name"] for code, fate in meta["fates"].items()}
    untrained = np.array([names[code] == "untrained" for code in columns["fate"]])
    assert untrained.any() and not columns["response_mask"][untrained].any()
    tokens = sum(
        int(np.isin(row["turn_ids"], written_turns(episode)).sum())
        for episode in several(tmp_path)
        for row in episode["rows"]
    )
    assert untrained.sum() == tokens
    assert (
        replay([str(tmp_path / "config.yaml"), str(tmp_path / "episodes/1.jsonl"), "--loss"]) == 0
    )


def written_turns(episode: dict[str, Any]) -> list[int]:
    return [number for number, turn in enumerate(episode["turns"]) if turn.get("writes")]


def test_recorded_episodes_are_the_same_again(summarised: Path, capsys) -> None:
    for name in ("1.jsonl", "val-0.jsonl"):
        file = summarised / "episodes" / name
        assert replay([str(summarised / "config.yaml"), str(file)]) == 0, capsys.readouterr().out
    assert "all the same" in capsys.readouterr().out


def test_the_viewer_has_a_seam_where_a_context_begins(
    summarised: Path, tmp_path: Path, browser: Browser
) -> None:
    episode = several(summarised)[0]
    build_viewer([find_run(summarised, 0)], tmp_path / "viewer")
    open_viewer(browser, (tmp_path / "viewer/index.html").as_uri())
    show(browser, f"episode/0/train/1/{episode['episode_id']}")
    seams = browser.run("return [...document.querySelectorAll('.seam')].map((e) => e.textContent)")
    assert len(seams) == len(episode["rows"]) - 1
    assert all(text.startswith("a new context begins (summary): ") for text in seams)
    text = browser.run("return document.body.textContent")
    assert "writes a summary" in text and "The program" not in text


def test_an_evaluation_plays_contexts(summarised: Path, tiny_game: Path, tmp_path: Path) -> None:
    out = tmp_path / "evaluation"
    argv = [*words(tiny_game, summarised, *SUMMARISE), f"--eval={summarised}/global_step_{STEPS}"]
    assert run([*argv, f"--out={out}"], EndingSignals()) == 0
    result = json.loads((out / "eval.json").read_text())
    last = read_steps(summarised)[-1]
    rewards = [name for name in last if name.startswith("val-core/") and name.endswith("mean@1")]
    assert rewards
    contexts = [name for name in last if name.startswith("val-aux/context/")]
    assert "val-aux/context/per_episode/mean" in contexts
    assert last["val-aux/context/summaries"] == sum(
        turn.get("writes") == "summary"
        for episode in read_episodes(summarised / f"episodes/val-{STEPS}.jsonl")
        for turn in episode["turns"]
    )
    told = [*rewards, *contexts]
    assert all(result["metrics"][name] == last[name] for name in told), "as the run's own"


@pytest.mark.parametrize("masked", ["true", "false"])
def test_a_killed_run_ends_bitwise_like_one_that_was_not(
    tiny_game: Path, tmp_path: Path, masked: str
) -> None:
    more = (*SUMMARISE, f"context.train_summaries={masked}", "trainer.max_actor_ckpt_to_keep=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish([sys.executable, str(PROJECT / "main.py"), *words(tiny_game, whole, *more)])
    argv = [sys.executable, str(PROJECT / "main.py"), *words(tiny_game, broken, *more)]
    run_and_kill(argv, broken, random.Random(3))
    finish(argv)
    for part in ("actor/model", "actor/optimizer", "critic/model", "critic/optimizer"):
        one, other = (tensors(each / f"global_step_{STEPS}" / part) for each in (whole, broken))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), part
    assert numbers_of(whole) == numbers_of(broken)
    for name in ("1.jsonl", "3.jsonl"):
        assert told_in(whole, name) == told_in(broken, name), "the same contexts, too"


def numbers_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step, those of time apart."""
    times = ("timing", "perf/", "alarms/")
    return [
        {
            name: value
            for name, value in step.items()
            if not name.startswith(times) and "seconds" not in name
        }
        for step in read_steps(folder)
    ]


def told_in(folder: Path, name: str) -> list[Any]:
    """What was said in each recorded episode, and where its contexts begin."""
    return [
        [
            [turn["text"] for turn in episode["turns"]],
            [row.get("seam") for row in episode["rows"]],
        ]
        for episode in read_episodes(folder / "episodes" / name)
    ]


def test_keep_is_bitwise_what_a_history_that_always_goes_on_is(
    tiny_game: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    def next_context(self, standing):\n        return None\n")
    runs = []
    for name, context in (("keep", "keep"), ("own", f"{file}:Mine")):
        assert train(words(tiny_game, tmp_path / name, f"agent.context={context}", steps=2)) == 0
        runs.append(tmp_path / name)
    numbers = [
        [
            {name: value for name, value in step.items() if "context/" not in name}
            for step in numbers_of(folder)
        ]
        for folder in runs
    ]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 3
    assert not any(name.startswith("context/") for name in read_steps(runs[0])[1])


def test_a_class_that_raises_ends_the_run_with_its_line(
    tiny_game: Path, tmp_path: Path, capsys
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    def next_context(self, standing):\n        return 1 / 0\n")
    assert train(words(tiny_game, tmp_path / "run", f"agent.context={file}:Mine")) == 1
    errors = capsys.readouterr().err
    assert (
        f"agent.context={file}:Mine: Mine.next_context ({file}:2) raised ZeroDivisionError"
        in errors
    )
    assert f"in {file}:3" in errors


REFUSED = """
class Mine:
    def next_context(self, standing):
        if standing.turns == 1:
            return [{"role": "assistant", "content": "5"}]
"""
STRICT = (
    "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('the user begins') }}{% endif %}"
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def test_messages_that_the_template_refuses_end_the_episode_with_a_sentence(
    tiny_game: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REFUSED)
    argv = words(
        tiny_game,
        tmp_path / "run",
        f"agent.context={file}:Mine",
        f'data.apply_chat_template_kwargs={{chat_template: "{STRICT}"}}',
        "agent.on_failure=zero",
        "agent.max_failure_rate=1",
        steps=1,
    )
    assert train(argv) == 0
    failed = [
        episode
        for episode in read_episodes(tmp_path / "run/episodes/1.jsonl")
        if episode["ending"] == "env_crash"
    ]
    assert failed
    assert all("the new context (own) is refused" in episode["error"] for episode in failed)


MODES: dict[str, tuple[str, ...]] = {
    "last_turns": ("context.after_turns=1", "context.keep_turns=1"),
    "drop_tool_results": ("context.after_turns=2", "context.dropped_text=the"),
    "drop_thinking": ("context.after_turns=1", "context.thinking=[number,is]"),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_other_modes_play_and_replay(tiny_game: Path, tmp_path: Path, mode: str) -> None:
    argv = words(tiny_game, tmp_path, f"agent.context={mode}", *MODES[mode], steps=1)
    assert train(argv) == 0
    reasons = {
        row["seam"]["reason"]
        for episode in read_episodes(tmp_path / "episodes/1.jsonl")
        for row in episode["rows"]
        if row.get("seam")
    }
    assert reasons == (set() if mode == "drop_thinking" else {mode})
    assert replay([str(tmp_path / "config.yaml"), str(tmp_path / "episodes/1.jsonl")]) == 0


def test_episodes_of_several_contexts_are_sampled_ahead(tiny_game: Path, tmp_path: Path) -> None:
    ahead = ("trainer.async_level=1", "trainer.rollout_n_gpus=1", "trainer.deterministic=false")
    assert train(words(tiny_game, tmp_path, *SUMMARISE, *GRPO, *ahead)) == 0
    steps = read_steps(tmp_path)
    assert all(step["context/per_episode/mean"] > 1 for step in steps[1:])
