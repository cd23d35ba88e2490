"""Nine errands, then the door: the environment's state, and the table that learns the game."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from errands_game import BOXES, RIGHT_DOOR, Errands, ErrandsConfig

from scripts import errands_table
from scripts.errands_tabular import (
    ARMS,
    BRANCHES,
    DOORS,
    GROUP,
    TURNS,
    Arm,
    Game,
    Sampler,
    Tasks,
    estimate,
    play,
    softmax,
    train,
)

# The environment


def played(game: Errands, actions: list[str]) -> list[tuple[str, float, bool, dict]]:
    return [game.step(action) for action in actions]


def some_actions(seed: int, turns: int = 10) -> list[str]:
    draw = random.Random(seed)
    return [draw.choice(BOXES) for _ in range(turns - 1)] + [
        draw.choice(sorted(RIGHT_DOOR.values()))
    ]


def test_the_same_seed_and_actions_give_the_same_game() -> None:
    one, other = Errands(), Errands()
    for seed in range(5):
        assert one.reset(seed) == other.reset(seed)
        assert played(one, some_actions(seed)) == played(other, some_actions(seed))


@pytest.mark.parametrize("turn", range(10))
def test_a_restored_game_goes_on_as_the_one_that_was_snapped(turn: int) -> None:
    one = Errands()
    one.reset(3)
    actions = some_actions(3)
    played(one, actions[:turn])
    state = one.snapshot()
    rest = played(one, actions[turn:])
    other = Errands()
    other.reset(99)
    other.restore(state)
    assert other.snapshot() == state
    assert played(other, actions[turn:]) == rest
    one.restore(state)
    assert played(one, actions[turn:]) == rest, "a game that is over is played again"


def test_luck_is_paid_at_the_end_and_success_is_told_apart() -> None:
    game = Errands(ErrandsConfig(sigma=2.0))
    words = game.reset(1).split()
    assert words == ["errand", game.state.cue]
    right = RIGHT_DOOR[game.state.cue]
    steps = played(game, [*["box1"] * 9, right])
    assert [reward for _, reward, _, _ in steps[:-1]] == [0.0] * 9
    assert steps[-2][0] == f"door {game.state.cue}" and steps[-1][3] == {"won": True}
    assert steps[-1][1] - 1 in range(-18, 19, 2) and steps[-1][1] != 1
    game.reset(1)
    wrong = played(game, [*["box1"] * 9, "door1" if right != "door1" else "door2"])[-1]
    assert wrong[1] == steps[-1][1] - 1 and wrong[3] == {"won": False}


def test_what_opens_nothing_neither_pays_nor_ends_the_game() -> None:
    game = Errands()
    game.reset(0)
    steps = played(game, ["door1", "", "box9", "box 1", "red", "box", "box0", "x", "y", "box1"])
    assert [done for _, _, done, _ in steps] == [False] * 9 + [True]
    assert steps[-1][1] == 0.0 and steps[-1][3] == {"won": False}


def test_the_luck_of_a_box_has_a_mean_of_zero_over_tasks_and_is_of_its_turn() -> None:
    game = Errands()
    lucks = []
    for seed in range(400):
        game.reset(seed)
        lucks.append(played(game, ["box2"] * 10)[-1][1])
    # Nine boxes: a deviation of 24, and of the mean of 400 of 1.2.
    assert abs(np.mean(lucks)) < 5 and np.std(lucks) == pytest.approx(24, rel=0.15)
    game.reset(0)
    assert len({game._luck_in(box) for box in BOXES for game.state.turn in range(10)}) == 2


def test_luck_to_come_is_drawn_anew_by_reseeding_and_what_is_known_stays() -> None:
    game = Errands()
    game.reset(5)
    played(game, some_actions(5)[:4])
    state, known, luck = game.snapshot(), game.anchor(), game.state.luck
    ends = set()
    for seed in range(20):
        game.restore(state)
        game.reseed(seed)
        assert (game.anchor(), game.state.luck) == (known, luck)
        ends.add(played(game, some_actions(5)[4:])[-1][1])
    assert len(ends) > 3


def test_what_is_known_says_nothing_of_luck() -> None:
    one, other = Errands(ErrandsConfig(sigma=1.0)), Errands(ErrandsConfig(sigma=50.0))
    for game in (one, other):
        game.reset(2)
        played(game, ["box1"] * 3)
    assert one.anchor() == other.anchor() and one.snapshot() != other.snapshot()


@pytest.mark.parametrize("state", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"cue": "red", "more": 1}'])
def test_bytes_that_are_no_state_are_refused(state: bytes) -> None:
    game = Errands()
    game.reset(0)
    before = game.snapshot()
    with pytest.raises(ValueError, match="are no state of Errands: give what snapshot"):
        game.restore(state)
    assert game.snapshot() == before


def test_the_door_may_be_asked_for_at_another_turn() -> None:
    game = Errands(ErrandsConfig(turns=4, decision=1, sigma=0.0))
    game.reset(0)
    right = RIGHT_DOOR[game.state.cue]
    steps = played(game, ["box1", right, "box2", "box3"])
    assert [words.split()[0] for words, *_ in steps[:-1]] == ["door", "errand", "errand"]
    assert steps[-1][1:] == (1.0, True, {"won": True}) and game.max_turns == 4


# The table


def sampler(decision: int = TURNS - 1, seed: int = 0) -> Sampler:
    game = Game(decision=decision)
    logits = np.random.default_rng(1).normal(size=(game.states, 4))
    return Sampler(game, softmax(logits), np.random.default_rng(seed))


def test_a_continuation_ends_with_what_was_collected_before_it() -> None:
    """With the same seeds from any turn on it is the episode itself."""
    made = sampler()
    tasks, step, seeds = made.episodes(3)
    for turn in range(TURNS):
        before = step.played
        again = play(
            made.game,
            made.policy,
            tasks,
            step.task,
            seeds,
            turn=turn,
            luck=before.luck[:, turn],
            door=before.door[:, turn],
        )
        assert np.array_equal(again.returns, before.returns)


def test_success_is_the_share_of_right_doors_and_luck_is_plus_or_minus_sigma() -> None:
    made = sampler()
    tasks, step, _ = made.episodes(4000)
    luck = step.played.luck[:, -1]
    success = step.played.returns - luck
    assert set(np.unique(success.round(9))) == {0.0, 1.0}
    assert success.mean() == pytest.approx(made.game.success(made.policy), abs=0.01)
    assert set(np.unique(np.abs(np.diff(step.played.luck, axis=1))[:, :-1])) == {8.0}
    right = step.played.door[:, -1] == tasks.cue[step.task] % DOORS
    assert np.array_equal(success.round(9), right.astype(float))


def test_sampled_turns_are_counted_with_those_of_continuations() -> None:
    made = sampler()
    assert made.plain(2).sampled == 2 * GROUP * TURNS
    assert made.vine(2).sampled == 2 * GROUP * (TURNS + TURNS * (TURNS + 1) // 2)
    assert made.tree(2).sampled == 2 * BRANCHES * (TURNS + BRANCHES - 1)
    redrawn = made.redraw(20)
    # One action in four or more is drawn again, and costs nothing.
    assert 20 * GROUP * TURNS < redrawn.sampled < 0.8 * 20 * GROUP * (TURNS + 55)
    late = sampler(decision=4).tree(2)
    assert late.sampled == 2 * BRANCHES * (TURNS + (BRANCHES - 1) * (TURNS - 4))
    for name, arm in ARMS.items():
        assert arm.sample(made, 2).sampled <= 2 * arm.most_turns, name


def test_vine_credits_the_last_turn_without_luck() -> None:
    """The own return less a continuation's from the last turn: 1, 0 or -1."""
    step = sampler().vine(4)
    advantages, _ = estimate("vine", step, np.zeros(Game().states))
    assert set(np.unique(advantages[:, -1].round(9))) <= {-1.0, 0.0, 1.0}
    assert np.abs(advantages[:, :-1]).max() >= 8


def test_a_tree_compares_four_doors_of_one_state() -> None:
    made = sampler()
    step = made.tree(3)
    advantages, _ = estimate("tree_grpo", step, np.zeros(Game().states))
    mains = step.episodes
    assert (advantages[mains:, :-1] == 0).all()
    branches = np.column_stack(
        [advantages[:mains, -1], advantages[mains:, -1].reshape(mains, BRANCHES - 1)]
    )
    assert np.allclose(branches.sum(1), 0), "what is subtracted is what the others have"
    assert np.abs(branches).max() <= 1 / BRANCHES


@pytest.mark.parametrize(
    "name", ["vine, a continuation of every turn", "vine_redraw of every turn"]
)
def test_branches_learn_the_door_behind_nine_errands(name: str) -> None:
    torch.set_num_threads(1)
    outcome = train(Game(), ARMS[name], budget=50_000, rate=1.0, seed=0)
    assert outcome.success >= 0.9 and outcome.to_goal is not None
    assert outcome.sampled <= 50_000


def test_equal_seeds_give_equal_runs_and_the_budget_is_kept() -> None:
    arm: Arm = ARMS["turn_gae"]
    one, other = (train(Game(), arm, budget=5_000, rate=0.3, seed=2) for _ in range(2))
    assert one == other and 5_000 - arm.most_turns < one.sampled <= 5_000
    assert train(Game(), arm, budget=arm.most_turns - 1, rate=0.3, seed=2).steps == 0


def test_the_table_goes_on_where_it_was_broken_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--out", str(tmp_path), "--seeds", "0", "--budget", "2000"]
    assert errands_table.main(argv) == 0
    table = capsys.readouterr().out.split("| arm |")[1]
    file = tmp_path / "runs.jsonl"
    whole = file.read_text()
    lines = whole.splitlines()
    assert len(lines) == len(errands_table.DECISIONS) * len(ARMS) * len(errands_table.RATES)
    # Cut in the middle of the last line, and one line is no run.
    file.write_text("\n".join(["{}", *lines[1:]])[:-20])
    assert errands_table.main(argv) == 0
    told = capsys.readouterr()
    assert told.out.split("| arm |")[1] == table
    assert told.out.count("rate ") == 2 and told.err.count("is made again") == 2
    assert errands_table.main([*argv, "--table"]) == 0
    assert capsys.readouterr().out.split("| arm |")[1] == table


def test_tasks_have_no_luck_at_the_door() -> None:
    tasks = Tasks.draw(Game(decision=4), np.random.default_rng(0), 5)
    assert not tasks.luck[:, 4].any() and (np.abs(tasks.luck[:, :4]) == 8).all()
