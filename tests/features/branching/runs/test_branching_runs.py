"""Whole runs that continue from states of episodes: numbers, faults, kills, several contexts."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from main import run
from scripts.replay import main as replay
from tests.conftest import PROJECT
from tests.e2e.test_resume import finish, run_and_kill, tensors
from tests.e2e.test_training import read_steps
from training.ray_trainer import RayPPOTrainer
from training.run.signals import EndingSignals
from workers.rollout.begin import Begin

STEPS = 2
GAMES = PROJECT / "tests/features/branching/games.py"
SUMMARISE = (
    "agent.context=summarise",
    "context.after_turns=1",
    "context.most_turns=2",
    "context.keep_turns=0",
    "context.request=guess",
    "context.summary_text='number {summary}'",
    "context.summary_tokens=3",
)
VINE = ("algorithm.adv_estimator=vine", "branching.at=every", "branching.samples=2")
TIMES = ("timing", "perf/", "alarms/")


def words(
    game: Path, run_dir: Path, *more: str, cls: str = "Held", steps: int = STEPS
) -> list[str]:
    """A small run of the quickstart's game with states."""
    return [
        str(PROJECT / "configs/quickstart.yaml"),
        f"actor_rollout_ref.model.path={game}/model",
        f"agent.environment.path={GAMES}",
        f"agent.environment.cls={cls}",
        f"trainer.default_local_dir={run_dir}",
        "agent.val_length=4",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.deterministic=true",
        "trainer.logger=[file]",
        *more,
    ]


def train(argv: list[str]) -> int:
    return run(argv, EndingSignals())


def numbers_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step, those of time apart."""
    return [
        {
            name: value
            for name, value in step.items()
            if not name.startswith(TIMES) and "seconds" not in name
        }
        for step in read_steps(folder)
    ]


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The facts of all episodes that runs train on."""
    kept: list[dict[str, Any]] = []

    def keep(self: RayPPOTrainer, batch: Any) -> None:
        if batch.meta_info["validate"]:
            return
        kept.extend(each for each in batch.non_tensor_batch["episode_facts"] if each is not None)

    monkeypatch.setattr(RayPPOTrainer, "on_batch", keep)
    return kept


@pytest.mark.seconds
def test_numbers_do_not_depend_on_how_a_state_is_had(tiny_game: Path, tmp_path: Path) -> None:
    numbers = []
    for way in ("snapshot", "copy", "replay"):
        folder = tmp_path / way
        assert train(words(tiny_game, folder, *VINE, f"branching.state={way}")) == 0
        numbers.append(numbers_of(folder))
    assert numbers[0] == numbers[1] == numbers[2]
    step = numbers[0][-1]
    assert step["branching/continuations"] > 0 and step["branching/left_out"] == 0
    assert step["training/sampled_tokens"] > step["branching/sampled_tokens"] > 0


@pytest.mark.seconds
@pytest.mark.parametrize("context", [(), SUMMARISE], ids=["one context", "several"])
@pytest.mark.parametrize("way", ["snapshot", "replay"])
def test_a_branch_with_the_episodes_seeds_is_the_episode(
    way: str,
    context: tuple[str, ...],
    tiny_game: Path,
    tmp_path: Path,
    facts: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Begin, "word_of", lambda self, turn: None)
    first = "branching.first_turn=true"
    argv = words(tiny_game, tmp_path, *VINE, f"branching.state={way}", first, *context, steps=1)
    assert train(argv) == 0
    assert len(facts) == 8
    compared = 0
    for fact in facts:
        branches = fact["branches"]
        rewards = branches["rewards"]
        for turn, returns in enumerate(branches["returns"]):
            assert returns == [pytest.approx(sum(rewards[turn:]))] * 2
            compared += 1
    assert compared > 16
    if context:
        assert any(fact["turns"] < len(fact["branches"]["rewards"]) for fact in facts)


@pytest.mark.seconds
def test_one_turn_is_drawn_and_weighed(
    tiny_game: Path, tmp_path: Path, facts: list[dict[str, Any]]
) -> None:
    for at in ("random", "entropy"):
        more = ("algorithm.adv_estimator=vine_redraw", f"branching.at={at}", "branching.samples=2")
        assert train(words(tiny_game, tmp_path / at, *more, steps=1)) == 0
    for fact in facts:
        assert sum(bool(returns) for returns in fact["branches"]["returns"]) == 1


@pytest.mark.seconds
@pytest.mark.parametrize("at", ["last", "[0, 2]"])
def test_a_tree_branches_where_it_is_told(
    at: str, tiny_game: Path, tmp_path: Path, facts: list[dict[str, Any]]
) -> None:
    more = ("algorithm.adv_estimator=tree_grpo", f"branching.at={at}", "branching.luck=fresh")
    assert train(words(tiny_game, tmp_path, *more, steps=1)) == 0
    for fact in facts:
        returns = fact.get("branches", {"returns": [[]]})["returns"]
        branched = [turn for turn, values in enumerate(returns) if values]
        wanted = [turn for turn in (0, 2) if turn < len(returns)]
        if at == "last":
            wanted = [turn for turn in [len(returns) - 1] if turn > 0]
        assert branched == wanted


@pytest.mark.seconds
@pytest.mark.parametrize("policy", ["refill", "mask", "zero"])
@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_branches_that_fail_cost_themselves(
    fault: str,
    policy: str,
    tiny_game: Path,
    tmp_path: Path,
    facts: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setenv("RESTORES", "0")
    more = (
        f"agent.on_failure={policy}",
        "agent.max_refills=1",
        "agent.step_timeout_s=0.5",
        "agent.environment.isolation=thread",
    )
    assert train(words(tiny_game, tmp_path, *VINE, *more, cls="LateFaults", steps=1)) == 0
    endings: dict[str, int] = {}
    left_out = 0
    for fact in facts:
        assert fact["ending"] in ("done", "max_turns"), "the episodes themselves end well"
        for ending, times in fact.get("branches", {"endings": {}})["endings"].items():
            endings[ending] = endings.get(ending, 0) + times
        left_out += fact.get("branches", {"left_out": 0})["left_out"]
    failed = endings.get("env_crash" if fault == "raise" else "env_timeout", 0)
    assert failed > 0
    # A timeout may be the policy's doing, and is masked with `mask` alone.
    is_masked = policy == "mask" or (policy == "refill" and fault == "raise")
    assert left_out == (failed if is_masked else 0)


@pytest.mark.seconds
def test_an_environment_whose_states_differ_ends_the_run_before_its_first_step(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(words(tiny_game, tmp_path, *VINE, cls="Clocked")) == 3
    assert "every branch is refused" in capsys.readouterr().err
    assert not (tmp_path / "global_step_1").exists()


@pytest.mark.slow
def test_a_killed_run_ends_bitwise_like_one_that_was_not(tiny_game: Path, tmp_path: Path) -> None:
    more = (*VINE, "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    main = str(PROJECT / "main.py")
    finish([sys.executable, main, *words(tiny_game, whole, *more, steps=3)])
    argv = [sys.executable, main, *words(tiny_game, broken, *more, steps=3)]
    run_and_kill(argv, broken, random.Random(3))
    finish(argv)
    for part in ("actor/model", "actor/optimizer"):
        one, other = (tensors(each / f"global_step_3/{part}") for each in (whole, broken))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), part
    assert numbers_of(whole) == numbers_of(broken)


@pytest.mark.seconds
def test_the_episodes_of_a_run_that_branches_are_replayed_alike(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(words(tiny_game, tmp_path, *VINE, steps=1)) == 0
    config, episodes = tmp_path / "config.yaml", tmp_path / "episodes/1.jsonl"
    assert replay([str(config), str(episodes)]) == 0, capsys.readouterr().out
    assert "all the same" in capsys.readouterr().out


TRAINED = (*VINE, "branching.train=true")


@pytest.mark.seconds
@pytest.mark.parametrize("context", [(), SUMMARISE], ids=["one context", "several"])
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("algorithm.adv_estimator=tree_grpo", "branching.at=[0,1]"),
        # The log-probs before the first of two updates are those of the old policy.
        ("actor_rollout_ref.actor.ppo_mini_batch_size=2",),
    ],
    ids=["vine", "tree_grpo", "two updates"],
)
def test_continuations_are_trained_on_and_seen_nowhere_else(
    more: tuple[str, ...], context: tuple[str, ...], tiny_game: Path, tmp_path: Path
) -> None:
    argv = words(tiny_game, tmp_path / "run", *TRAINED, *context, *more, "alarms.mode=stop")
    assert train(argv) == 0
    measured = [word for word in argv if word != "branching.train=true"]
    beside = [word.replace(str(tmp_path / "run"), str(tmp_path / "measured")) for word in measured]
    assert train(beside) == 0
    first, again = numbers_of(tmp_path / "run")[0], numbers_of(tmp_path / "measured")[0]
    assert first["branching/trained_tokens"] == first["branching/sampled_tokens"] > 0
    assert first["branching/trained_rows"] >= first["branching/continuations"]
    # Of the first step, whose weights are the same, all that is not the update's.
    of_update = ("actor/", "canary/", "critic/advantages")
    kept = [name for name in again if not name.startswith(of_update)]
    assert {name: first[name] for name in kept} == {name: again[name] for name in kept}
    assert first["actor/grad_norm"] != again["actor/grad_norm"]
