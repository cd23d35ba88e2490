"""Whole runs whose environments ask the policy: credit, records, replay, the viewer, --eval, kills,
sampling ahead, several ranks.
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
from tests.needed_features import needs_features
from tests.viewer_pages import open_viewer, show
from training.run.signals import EndingSignals

STEPS = 3
GAME = PROJECT / "tests/features/policy_calls/guess_with_help.py"
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")


def words(game: Path, run_dir: Path, *more: str, steps: int = STEPS) -> list[str]:
    """A small run of the quickstart's game, whose steps ask the policy."""
    return [
        str(PROJECT / "configs/quickstart.yaml"),
        f"actor_rollout_ref.model.path={game}/model",
        f"agent.environment.path={GAME}",
        "agent.environment.cls=GuessWithHelp",
        f"trainer.default_local_dir={run_dir}",
        "policy_calls.enable=true",
        "policy_calls.max_tokens=4",
        "agent.val_length=8",
        "data.train_batch_size=16",
        "data.max_prompt_length=16",
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
def asked(tiny_game: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    assert train(words(tiny_game, folder, *GRPO)) == 0
    return folder


def played(folder: Path, name: str = "1.jsonl") -> list[dict[str, Any]]:
    return read_episodes(folder / "episodes" / name)


def test_answers_are_rows_of_their_episodes_and_counted(asked: Path) -> None:
    steps = read_steps(asked)[1:]
    assert all(step["policy_calls/per_episode/mean"] >= 3 for step in steps)
    assert all(step["policy_calls/refused"] == 0 for step in steps)
    assert all(0 < step["policy_calls/tokens/share"] < 1 for step in steps)
    for episode in played(asked):
        turns = [turn for turn in episode["turns"] if not turn.get("aside")]
        aside = [turn for turn in episode["turns"] if turn.get("aside")]
        assert len(aside) == 3 * len(turns)
        assert {turn["writes"] for turn in aside} == {"hint", "critic"}
        assert all(turn["trained"] == (turn["writes"] == "critic") for turn in aside)
        assert [row.get("aside") for row in episode["rows"]] == [None] + [True] * len(aside)
        sampled = np.concatenate([row["turn_ids"] for row in episode["rows"]])
        assert set(sampled[sampled >= 0]) == set(range(len(episode["turns"])))


def test_each_token_has_the_advantage_of_what_pays_it(asked: Path) -> None:
    _, columns = read_step_arrays(asked / "episodes/1.npz")
    episodes = {each["episode_id"]: each for each in played(asked)}
    sums: dict[tuple[str, str], list[float]] = {}
    rows_of: dict[str, int] = {}
    paid: dict[int, tuple[str, str, float]] = {}
    for row, episode_id in enumerate(columns["episode_id"]):
        if episode_id not in episodes:
            continue
        number = rows_of.get(episode_id, 0)
        rows_of[episode_id] = number + 1
        episode = episodes[episode_id]
        record = episode["rows"][number]
        speaker = record.get("speaker", "")
        own = [each for each in episode["rows"] if not each.get("speaker")]
        reward = float(sum(np.sum(each["rewards"]) for each in own))
        if speaker:
            reward = float(np.sum(record["rewards"]))
        paid[row] = (episode["uid"], speaker, reward)
        # An episode counts once, each conversation with a reward of its own for itself.
        if speaker or number == 0:
            sums.setdefault((episode["uid"], speaker), []).append(reward)
    compared = {"": 0, "critic": 0}
    for row, (uid, speaker, reward) in paid.items():
        scores = np.array(sums[uid, speaker])
        spread = scores.std(ddof=1) if len(scores) > 1 else 0.0
        wanted = (reward - scores.mean()) / (spread + 1e-6) if len(scores) > 1 else reward
        begin, end = columns["offsets"][row : row + 2]
        sampled = columns["response_mask"][begin:end] > 0
        advantages = columns["advantages"][begin:end][sampled]
        assert advantages == pytest.approx(wanted, abs=1e-4)
        compared[speaker] += len(advantages)
    assert all(compared.values()), compared


def test_masked_answers_are_not_trained_on(asked: Path) -> None:
    meta, columns = read_step_arrays(asked / "episodes/1.npz")
    names = {int(code): fate["name"] for code, fate in meta["fates"].items()}
    untrained = np.array([names[code] == "untrained" for code in columns["fate"]])
    hints = 0
    for episode in played(asked):
        turns = episode["turns"]
        hints += sum(turn.get("writes") == "hint" for turn in turns)
    assert untrained.sum() >= hints and not columns["response_mask"][untrained].any()


@pytest.mark.parametrize("name", ["1.jsonl", "val-0.jsonl"])
def test_recorded_episodes_are_the_same_again(asked: Path, name: str, capsys) -> None:
    words = [str(asked / "config.yaml"), str(asked / "episodes" / name)]
    assert replay(words) == 0, capsys.readouterr().out
    assert "all the same" in capsys.readouterr().out
    assert replay([*words, "--loss"]) == 0


@needs_features("context")
def test_episodes_of_several_contexts_that_ask_are_the_same_again(
    tiny_game: Path, tmp_path: Path, capsys
) -> None:
    """What was asked draws no other contexts, and counts for the episode's tokens."""
    contexts = (
        "agent.context=summarise",
        "context.after_turns=1",
        "context.most_turns=2",
        "context.keep_turns=0",
        "context.request=guess",
        "context.summary_text='number {summary}'",
        "context.summary_tokens=3",
        "agent.max_episode_tokens=40",
        "data.max_prompt_length=40",
    )
    assert train(words(tiny_game, tmp_path, *GRPO, *contexts, steps=1)) == 0
    episodes = played(tmp_path)
    assert any(row.get("seam") for episode in episodes for row in episode["rows"])
    assert any(episode["ending"] == "overflow" for episode in episodes)
    for name in ("1.jsonl", "val-0.jsonl"):
        files = [str(tmp_path / "config.yaml"), str(tmp_path / "episodes" / name)]
        assert replay(files) == 0, capsys.readouterr().out


def test_the_viewer_shows_what_was_asked_before_what_was_then_said(
    asked: Path, tmp_path: Path, browser: Browser
) -> None:
    episode = next(each for each in played(asked) if len(each["rows"]) > 4)
    build_viewer([find_run(asked, 0)], tmp_path / "viewer")
    open_viewer(browser, (tmp_path / "viewer/index.html").as_uri())
    show(browser, f"episode/0/train/1/{episode['episode_id']}")
    asides = browser.run("return document.querySelectorAll('.aside-turn').length")
    assert asides == sum(bool(turn.get("aside")) for turn in episode["turns"])
    text = browser.run("return document.body.textContent")
    assert "the environment asked critic" in text and "The program" not in text
    kinds = browser.run(
        "return [...document.querySelector('.aside-turn').parentElement.children]"
        ".map((e) => e.className)"
    )
    # The first prompt, the policy's turn, three answers to its environment, and what that said.
    assert kinds[:2] == ["bubble env", "bubble policy"]
    assert kinds[2:5] == ["aside-turn"] * 3 and kinds[5] == "bubble env"


def test_an_evaluation_asks_too(asked: Path, tiny_game: Path, tmp_path: Path) -> None:
    argv = [*words(tiny_game, asked, *GRPO), f"--eval={asked}/global_step_{STEPS}"]
    assert run([*argv, f"--out={tmp_path}/evaluation"], EndingSignals()) == 0
    result = json.loads((tmp_path / "evaluation/eval.json").read_text())
    last = read_steps(asked)[-1]
    rewards = [name for name in last if name.startswith("val-core/") and name.endswith("mean@1")]
    assert rewards
    assert last["val-aux/policy_calls/per_episode/mean"] >= 3
    told = [*rewards, *(name for name in last if name.startswith("val-aux/policy_calls/"))]
    assert all(result["metrics"][name] == last[name] for name in told), "as the run's own"


@pytest.mark.parametrize("home", ["thread", "process"])
def test_a_killed_run_ends_bitwise_like_one_that_was_not(
    tiny_game: Path, tmp_path: Path, home: str
) -> None:
    more = (
        f"agent.environment.isolation={home}",
        "trainer.max_actor_ckpt_to_keep=2",
        f"custom_reward_function.path={GAME}",
        "custom_reward_function.name=judged",
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish([sys.executable, str(PROJECT / "main.py"), *words(tiny_game, whole, *more)])
    argv = [sys.executable, str(PROJECT / "main.py"), *words(tiny_game, broken, *more)]
    run_and_kill(argv, broken, random.Random(3))
    finish(argv)
    for part in ("actor/model", "actor/optimizer", "critic/model", "critic/optimizer"):
        one, other = (tensors(each / f"global_step_{STEPS}" / part) for each in (whole, broken))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), part
    for name in ("1.jsonl", "3.jsonl"):
        assert told_in(whole, name) == told_in(broken, name)


def told_in(folder: Path, name: str) -> list[Any]:
    """What was said in each recorded episode, and what was asked."""
    return [
        [
            [(turn["text"], turn["asked"], turn.get("aside")) for turn in episode["turns"]],
            [(row.get("speaker"), list(row["rewards"])) for row in episode["rows"]],
        ]
        for episode in played(folder, name)
    ]


def test_episodes_that_ask_are_sampled_ahead(tiny_game: Path, tmp_path: Path) -> None:
    ahead = ("trainer.async_level=1", "trainer.rollout_n_gpus=1", "trainer.deterministic=false")
    assert train(words(tiny_game, tmp_path, *GRPO, *ahead)) == 0
    assert all(step["policy_calls/per_episode/mean"] >= 3 for step in read_steps(tmp_path)[1:])


@pytest.mark.parametrize(
    ("define", "asks"),
    [("def", "policy.ask('guess')"), ("async def", "(await policy.chat('guess'))")],
)
def test_a_function_that_scores_rows_is_refused_with_the_sentence(
    tiny_task: Path, tmp_path: Path, capsys, define: str, asks: str
) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "from features.policy_calls import policy\n\n\n"
        f"{define} compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    return float(len({asks}.text))\n"
    )
    argv = [
        str(PROJECT / "configs/tiny_prompts.yaml"),
        f"data.train_files={tiny_task}/train.parquet",
        f"data.val_files={tiny_task}/val.parquet",
        f"actor_rollout_ref.model.path={tiny_task}/model",
        f"custom_reward_function.path={rewards}",
        f"trainer.default_local_dir={tmp_path}/run",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=1",
        "trainer.logger=[file]",
    ]
    assert train(argv) != 0
    assert "runs on the driver while the engines sleep" in capsys.readouterr().err


@pytest.mark.usefixtures("cluster")
def test_two_ranks_give_the_numbers_of_one(tiny_game: Path, tmp_path: Path) -> None:
    """On episodes of several rows, some of them paid by themselves."""
    assert train(words(tiny_game, tmp_path / "one", *GRPO, steps=2)) == 0
    ranks = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2")
    assert train(words(tiny_game, tmp_path / "two", *GRPO, *ranks, steps=2)) == 0
    assert told_in(tmp_path / "one", "1.jsonl") == told_in(tmp_path / "two", "1.jsonl")
    for one, two in zip(read_steps(tmp_path / "one"), read_steps(tmp_path / "two"), strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
            if name in one:
                assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
        asked = [
            {name: value for name, value in step.items() if name.startswith("policy_calls/")}
            for step in (one, two)
        ]
        assert asked[1] == pytest.approx(asked[0])
