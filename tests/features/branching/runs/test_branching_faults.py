"""Faults of environments that come once a run is under way: each costs its own continuations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.features.branching.runs.test_branching_runs import (
    SUMMARISE,
    VINE,
    numbers_of,
    train,
    words,
)

pytestmark = pytest.mark.seconds
NAMES = ("continuations", "left_out", "overflow", "refused_states")


def counts_of(folder: Path) -> dict[str, float]:
    """The counts of a run's last step."""
    return {name: numbers_of(folder)[-1][f"branching/{name}"] for name in NAMES}


@pytest.fixture(autouse=True)
def counters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESTORES", "TAKEN"):
        monkeypatch.setenv(name, "0")


def test_states_of_100_megabytes_are_refused_and_counted(
    tiny_game: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert train(words(tiny_game, tmp_path, *VINE, cls="LateHeavy", steps=1)) == 0
    counts = counts_of(tmp_path)
    assert counts["refused_states"] > 0
    assert "has 100.0 MB, and branching.max_state_mb allows 16" in caplog.text


@pytest.mark.parametrize("policy", ["mask", "refill", "zero"])
def test_steps_that_raise_in_continuations_alone_are_counted_and_told(
    policy: str, tiny_game: Path, tmp_path: Path
) -> None:
    more = (f"agent.on_failure={policy}", "agent.max_refills=1")
    assert train(words(tiny_game, tmp_path, *VINE, *more, cls="OnceOnly", steps=1)) == 0
    counts = counts_of(tmp_path)
    assert counts["continuations"] > 0
    assert counts["left_out"] == (0 if policy == "zero" else counts["continuations"])
    prefilled = numbers_of(tmp_path)[-1]["branching/prefilled_tokens"]
    assert prefilled > 0, "what failed was prefilled all the same"


@pytest.mark.parametrize("bound", ["", "branching.max_tokens=4"])
def test_a_branch_that_never_ends_is_ended_by_the_runs_bounds(
    bound: str, tiny_game: Path, tmp_path: Path
) -> None:
    more = (*VINE, bound) if bound else VINE
    assert train(words(tiny_game, tmp_path, *more, cls="Endless", steps=1)) == 0
    counts = counts_of(tmp_path)
    assert counts["continuations"] > 0 and counts["left_out"] == 0
    assert (counts["overflow"] > 0) == bool(bound)


def test_tokens_of_groups_that_dynamic_sampling_leaves_out_are_counted(
    tiny_game: Path, tmp_path: Path
) -> None:
    filters = "algorithm.filter_groups.enable=true"
    assert train(words(tiny_game, tmp_path, *VINE, filters, steps=1)) == 0
    step = numbers_of(tmp_path)[-1]
    assert step["agent/episodes"] > 8, "some groups were left out"
    own = step["training/sampled_tokens"] - step["branching/sampled_tokens"]
    # A token of each turn, at least.
    assert own >= step["agent/episodes"] * step["agent/turns/mean"]


@pytest.mark.parametrize("home", ["process", "ray"])
def test_numbers_are_the_same_wherever_environments_live(
    home: str, tiny_game: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    launcher = "ray" if home == "ray" else "local"
    if launcher == "ray":
        request.getfixturevalue("cluster")
    numbers = []
    for each in ("thread", home):
        folder = tmp_path / each
        where = (f"agent.environment.isolation={each}", f"trainer.launcher={launcher}")
        assert train(words(tiny_game, folder, *VINE, *where, steps=1)) == 0
        numbers.append(numbers_of(folder))
    assert numbers[0] == numbers[1]


OTHERS: dict[str, tuple[str, ...]] = {
    "adapters": ("actor_rollout_ref.model.lora_rank=4",),
    "tools": ("agent.tools=[calculator]",),
    "micro-batches of a row": ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",),
    "a sampler by difficulty": ("data.sampler.name=difficulty", "difficulty.seeds=8"),
    "a teacher": ("teacher.model=ema",),
    "what environments say is learnt": ("agent.observation_loss_coef=0.1",),
    "several contexts, summaries untrained": (*SUMMARISE, "context.train_summaries=false"),
    "other aggregation": ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",),
    "validation between": ("trainer.val_before_train=true", "trainer.test_freq=1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_continuations_go_with(name: str, tiny_game: Path, tmp_path: Path) -> None:
    assert train(words(tiny_game, tmp_path, *VINE, *OTHERS[name], steps=1)) == 0
    counts = counts_of(tmp_path)
    assert counts["continuations"] > 0 and counts["left_out"] == 0


def test_continuations_go_with_transcripts_beside(tiny_game: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": "5"}]
    file = tmp_path / "said.jsonl"
    file.write_text("".join(f"{json.dumps({'messages': said})}\n" for _ in range(8)))
    beside = (f"sft.files=[{file}]", "sft.loss_coef=0.1")
    assert train(words(tiny_game, tmp_path / "run", *VINE, *beside, steps=1)) == 0
    assert counts_of(tmp_path / "run")["continuations"] > 0


def test_a_run_goes_on_with_other_settings_of_branching(tiny_game: Path, tmp_path: Path) -> None:
    changes = (
        VINE,
        (*VINE, "branching.samples=4"),
        ("algorithm.adv_estimator=grpo", "branching.at=never"),
        ("algorithm.adv_estimator=tree_grpo", "branching.at=last"),
        (*VINE, "branching.state=replay"),
    )
    for steps, more in enumerate(changes, start=1):
        saved = "trainer.save_freq=1"
        assert train(words(tiny_game, tmp_path, *more, saved, steps=steps)) == 0
    steps_made = numbers_of(tmp_path)
    assert len(steps_made) == len(changes)
    before = 0.0
    for step in steps_made:
        so_far = step["training/sampled_tokens"]
        # The episodes' own are above 0.
        assert so_far - before > step.get("branching/sampled_tokens", 0.0)
        before = so_far
