"""The court as a command: its files, what it refuses, and that a call goes on where one ended."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from features.branching.judging_words import read_words
from main import run
from tests.features.branching.runs.test_branching_runs import train, words
from training.config.loader import ConfigError
from training.features import features
from training.run.signals import EndingSignals

COURT = ("--samples", "2", "--estimators", "grpo,rloo,turn_return,vine")


def judge(game: Path, run_dir: Path, *more: str, cls: str = "Held") -> int:
    """Holds a court over the quickstart's model."""
    argv = [*words(game, run_dir, cls=cls), "--judge-credit", f"{game}/model", *COURT, *more]
    return run(argv, EndingSignals())


@pytest.fixture(scope="module")
def court(tiny_game: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("court")
    assert judge(tiny_game, folder, "--episodes", "24") == 0
    return folder / "credit/model"


@pytest.mark.seconds
def test_a_court_writes_a_table_a_page_and_what_it_cost(court: Path) -> None:
    result = json.loads((court / "credit.json").read_text())
    assert set(result["estimators"]) == {"grpo", "rloo", "turn_return", "vine"}
    assert result["episodes"] == 24 and result["tasks"] == 12 and not result["left_out"]
    assert result["sampled_tokens"] > result["tokens_of_continuations"] > 0
    assert "the luck that the episode had" in result["truth"]
    page = (court / "credit.html").read_text()
    assert page.count("<svg") == 8 and "most wrongly credited" in page
    assert "http" not in page.replace('href="episodes', "")
    linked = re.findall(r'href="(viewer/index\.html)#episode/0/train/(\d)/([^?]+)\?turn=\d"', page)
    assert bool(linked) == ("viewer" in features())
    for file, step, name in linked:
        assert (court / file).is_file()
        assert f'"episode_id":"{name}"' in (court / f"episodes/{step}.jsonl").read_text()
    assert (court / "episodes/tokenizer").is_dir() and (court / "config.yaml").is_file()
    assert {path.name for path in (court / "episodes").iterdir()} >= {
        "1.jsonl",
        "2.jsonl",
        "3.jsonl",
    }


@pytest.mark.seconds
def test_a_court_goes_on_where_an_earlier_call_ended(
    court: Path, tiny_game: Path, tmp_path: Path
) -> None:
    assert judge(tiny_game, tmp_path, "--episodes", "8") == 0
    first = (tmp_path / "credit/model/judged.jsonl").read_text()
    assert len(first.splitlines()) == 1
    assert judge(tiny_game, tmp_path, "--episodes", "24") == 0
    assert (tmp_path / "credit/model/judged.jsonl").read_text().startswith(first)
    for name in ("judged.jsonl", "credit.json"):
        here = (tmp_path / "credit/model" / name).read_text()
        assert here == (court / name).read_text(), f"{name} as of a court that was held at once"


@pytest.mark.seconds
def test_another_question_begins_anew(tiny_game: Path, tmp_path: Path) -> None:
    assert judge(tiny_game, tmp_path, "--episodes", "12") == 0
    assert judge(tiny_game, tmp_path, "--episodes", "12", "--estimators", "grpo") == 0
    lines = (tmp_path / "credit/model/judged.jsonl").read_text().splitlines()
    assert all(set(json.loads(line)["credit"]) == {"grpo"} for line in lines)


@pytest.mark.seconds
def test_an_environment_whose_states_differ_is_refused_with_1(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(tiny_game, tmp_path, "--episodes", "8", cls="Clocked") == 1
    told = capsys.readouterr().err
    assert "every branch is refused" in told and "0 of 8 episodes were branched" in told


@pytest.mark.seconds
def test_values_are_read_of_a_checkpoint_that_has_a_critic(
    tiny_game: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = ("trainer.save_freq=1",)
    for name, estimator in (("with", "gae"), ("without", "grpo")):
        run_dir = tmp_path / name
        chosen = f"algorithm.adv_estimator={estimator}"
        assert train(words(tiny_game, run_dir, chosen, *saved, steps=1)) == 0
    asked = ("--episodes", "8", "--samples", "2", "--estimators", "gae,turn_gae,grpo")
    for name, code in (("with", 0), ("without", 3)):
        checkpoint = tmp_path / name / "global_step_1"
        argv = [*words(tiny_game, tmp_path / name), "--judge-credit", str(checkpoint), *asked]
        assert run(argv, EndingSignals()) == code
    assert "has no critic, whose values gae, turn_gae would read" in capsys.readouterr().err
    assert (tmp_path / "with/credit/global_step_1/credit.json").is_file()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--samples", "3"), "give an even number, 2 or more"),
        (("--episodes", "0"), "give 1 or more"),
        (("--samples", "two"), "invalid int value"),
    ],
)
def test_numbers_that_cannot_be_are_refused(more: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_words(["config.yaml", "--judge-credit", "model", *more])
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--estimators", "grop"), "Did you mean 'grpo'"),
        (("algorithm.use_kl_in_reward=true",), "continuations have none"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    more: tuple[str, ...],
    told: str,
    tiny_game: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert judge(tiny_game, tmp_path, *more) == 2
    assert told in capsys.readouterr().err
