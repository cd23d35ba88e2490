"""Training of programs, end to end on a tiny model: the same numbers as in an environment, faults,
helpers at once, rewards, what is refused before a run.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from data.warn_once import warn_once
from features.records.episode_files import read_episodes
from features.records.step_arrays import read_step_arrays
from scripts import replay
from tests.conftest import PROJECT
from tests.e2e.test_agents import GRPO, endings, facts_of, fit, game_config
from tests.e2e.test_resume import listen_to_ctrl_c
from tests.e2e.test_training import read_steps
from training.config.loader import ConfigError

NO_ENVIRONMENT = ("agent.environment.path=null", "agent.environment.cls=null")
GUESS = f"{sys.executable} {PROJECT}/examples/guess_program.py"
SOLVE = PROJECT / "tests/features/programs/runs/programs/solve.py"
FAULTY = PROJECT / "tests/features/programs/faulty.py"
DETERMINISTIC = "trainer.deterministic=true"
METRICS = ("actor/grad_norm", "critic/grad_norm", "actor/pg_loss", "agent/turns/max")
# Fates of tokens that the loss sees.
TRAINED = ("trained", "clipped", "no_spread", "zero_advantage")


def running(command: str) -> tuple[str, ...]:
    return (*NO_ENVIRONMENT, f"programs.command={command}")


def calling(name: str) -> tuple[str, ...]:
    return (*NO_ENVIRONMENT, f"programs.function={SOLVE}:{name}")


def trained_on(batches: list[DataProto]) -> list[dict[str, torch.Tensor]]:
    return [dict(batch.batch.items()) for batch in batches]


def test_a_program_is_trained_bitwise_as_the_same_agent_in_an_environment(
    tiny_game: Path, tmp_path: Path
) -> None:
    """As a command, and as a function where environments live: rows, advantages and gradients."""
    played = {"environment": (), "command": running(GUESS), "function": calling("solve")}
    steps = {}
    batches = {}
    for name, settings in played.items():
        config = game_config(tiny_game, tmp_path / name, DETERMINISTIC, *settings)
        _, kept = fit(config)
        batches[name] = trained_on(kept)
        steps[name] = read_steps(tmp_path / name)
    for name in ("command", "function"):
        for expected, batch in zip(batches["environment"], batches[name], strict=True):
            assert expected.keys() == batch.keys()
            for column, tensor in expected.items():
                assert torch.equal(tensor, batch[column]), (name, column)
        for expected_step, step in zip(steps["environment"], steps[name], strict=True):
            for metric in METRICS:
                assert step[metric] == expected_step[metric], (name, metric)


def test_faulty_programs_cost_their_episodes_and_never_the_run(
    tiny_game: Path, tmp_path: Path
) -> None:
    ways = ("well", "raises", "hangs", "floods", "sends_garbage", "closes_early")
    entries = ", ".join(f"{{command: [{sys.executable}, {FAULTY}, {way}]}}" for way in ways)
    config = game_config(
        tiny_game,
        tmp_path,
        *NO_ENVIRONMENT,
        *GRPO,
        f"env_template=[{entries}]",
        "agent.agent_length=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "actor_rollout_ref.rollout.n=2",
        "agent.step_timeout_s=6",
        "agent.on_failure=mask",
        "agent.max_failure_rate=1",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
    )
    _, [batch] = fit(config)
    [step] = read_steps(tmp_path)
    facts = facts_of(batch)
    assert len(facts) == 12
    by_way = Counter((ways[entry["environment"]], entry["ending"]) for entry in facts)
    expected = {"raises": "env_crash", "hangs": "env_timeout", "closes_early": "done"}
    for way, ending in expected.items():
        assert by_way[way, ending] == 2, by_way
    assert endings(step)["env_timeout"] == 2
    assert step["agent/masked"] == sum(entry["masked"] for entry in facts)


def test_a_program_that_crashed_is_started_again(tiny_game: Path, tmp_path: Path) -> None:
    script = tmp_path / "once.py"
    script.write_text(
        "import os, pathlib, runpy\n"
        f"mark = pathlib.Path({str(tmp_path)!r}, 'seen-' + os.environ['SEED'])\n"
        f"program = runpy.run_path('{PROJECT}/examples/guess_program.py')\n"
        "program['ask']([{'role': 'user', 'content': 'guess'}])\n"
        "if not mark.exists():\n"
        "    mark.touch()\n"
        "    raise RuntimeError('once')\n"
        "print(program['play'](3))\n"
    )
    config = game_config(
        tiny_game,
        tmp_path / "run",
        *running(f"{sys.executable} {script}"),
        "trainer.total_training_steps=1",
        "agent.max_failure_rate=1",
    )
    _, [batch] = fit(config)
    facts = facts_of(batch)
    assert {(entry["attempts"], entry["ending"]) for entry in facts} == {(2, "done")}
    assert all("once" in entry["error"] for entry in facts)
    assert not any(entry["masked"] for entry in facts)


def test_helpers_at_once_give_rows_that_share_their_beginnings(
    tiny_game: Path, tmp_path: Path
) -> None:
    config = game_config(
        tiny_game,
        tmp_path,
        *calling("branch"),
        *GRPO,
        "trainer.total_training_steps=1",
        f"records.folder={tmp_path}/episodes",
    )
    _, [batch] = fit(config)
    facts = facts_of(batch)
    assert {entry["turns"] for entry in facts} == {4}
    rows = Counter(batch.non_tensor_batch["episode_id"].tolist())
    assert set(rows.values()) == {3}, "the first answer, which one goes on from, and two forks"
    file = tmp_path / "episodes/1.jsonl"
    assert replay.main([str(tmp_path / "config.yaml"), str(file)]) == replay.SAME
    records = {record["episode_id"]: record for record in read_episodes(file)}
    for record in records.values():
        first, *forks = record["rows"]
        assert [turn["behind"] for turn in record["turns"]] == [None, 0, 0, 0]
        answers = int((first["turn_ids"] == 0).sum())
        for fork in forks:
            assert fork["parent"] == {"row": 0, "tokens": len(first["prompt_ids"]) + answers}
            assert (
                fork["response_ids"][:answers].tolist() == first["response_ids"][:answers].tolist()
            )
            begins = int(np.flatnonzero(fork["response_mask"])[0])
            # The template's, but for the word of the hint.
            assert fork["template_mask"][answers:begins].sum() == begins - answers - 1
    check_fates(records, tmp_path / "episodes/1.npz")


def test_a_deterministic_run_says_that_requests_at_once_are_no_fixed_rounds(
    tiny_game: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    settings = (*calling("branch"), *GRPO, "trainer.total_training_steps=1")
    fit(game_config(tiny_game, tmp_path, DETERMINISTIC, *settings))
    said = [text for text in caplog.messages if "makes requests at the same time" in text]
    assert len(said) == 1


def check_fates(records: dict[str, dict[str, Any]], file: Path) -> None:
    """Asserts that what a fork begins with is told from what it is trained on."""
    meta, columns = read_step_arrays(file)
    name_of = {int(code): fate["name"] for code, fate in meta["fates"].items()}
    for place, episode_id in enumerate(columns["episode_id"]):
        row = records[episode_id]["rows"][columns["episode_row"][place]]
        tokens = slice(*columns["offsets"][place : place + 2])
        names = np.array([name_of[code] for code in columns["fate"][tokens].tolist()])
        assert ((row["response_mask"] == 1) == np.isin(names, TRAINED)).all(), names
        assert (names == "copied").any() == (columns["episode_row"][place] > 0), names
        assert ((row["template_mask"] == 1) == np.isin(names, ["template", "over_limit"])).all()


def test_a_reward_function_sees_what_a_program_did(tiny_game: Path, tmp_path: Path) -> None:
    config = game_config(
        tiny_game,
        tmp_path,
        *running(GUESS),
        *GRPO,
        "trainer.total_training_steps=1",
        f"custom_reward_function.path={SOLVE}",
        "custom_reward_function.name=judge",
    )
    _, [batch] = fit(config)
    for entry in facts_of(batch):
        assert entry["paid"] == pytest.approx(entry["turns"] / 10)
        assert entry["reward"] == pytest.approx(entry["paid"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("programs.command=nowhere-at-all x.py",), "'nowhere-at-all' is no program"),
        ((f"programs.command={sys.executable} nowhere.py",), "there is no file nowhere.py"),
        ((f"programs.function={SOLVE}:judge",), "must be `async def judge"),
        ((f"programs.function={SOLVE}:none",), "none"),
        ((f"programs.function={SOLVE}:solve", "programs.command=ls"), "give one of them"),
        (("programs.command=ls", "agent.tools=[calculator]"), "its own tools with each request"),
        (("programs.command=ls", "mcp.servers.x.command=ls"), "its own tools with each request"),
        (
            ("programs.command=ls", "judges.models.policy={base_url: 'http://a/v1', model: m}"),
            "judges.models.policy: by this name programs ask the policy",
        ),
        (("programs.command=ls", "programs.host=node"), "set trainer.launcher=ray, or take it"),
        (("programs.host=node", "agent.environment.name=x:y"), "is a program's"),
        (
            (
                f"programs.function={SOLVE}:solve",
                "agent.environment.isolation=ray",
                "trainer.launcher=ray",
                "trainer.nnodes=2",
            ),
            "may run on another node than the server that it asks",
        ),
        (("programs.command=ls", "programs.preload=[json]"), "programs.preload forks a command"),
        (("programs.preload=[json]", "agent.environment.name=x:y"), "set programs.command"),
        (("programs.command=ls", "agent.observation_loss_coef=0.1"), "observation_loss_coef=0.1"),
    ],
)
def test_what_cannot_run_is_told_before_a_run(
    tiny_game: Path, tmp_path: Path, settings: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        game_config(tiny_game, tmp_path, *NO_ENVIRONMENT, *settings)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (f"{sys.executable} {FAULTY} asks_for_nothing", "asked for nothing"),
        (f"{sys.executable} -c 'raise SystemExit(\"broken\")'", "before it asked for anything"),
    ],
)
def test_a_program_that_cannot_play_is_told_by_its_trial(
    tiny_game: Path, tmp_path: Path, command: str, sentence: str
) -> None:
    def fail(trainer: Any) -> None:
        raise AssertionError("no model is loaded")

    config = game_config(tiny_game, tmp_path, *running(command))
    with pytest.raises(ConfigError) as caught:
        fit(config)
    assert sentence in str(caught.value)


def test_sampling_of_ones_own_is_counted_or_told_by_the_trial(
    tiny_game: Path, tmp_path: Path
) -> None:
    wants = running(f"{sys.executable} {FAULTY} wants_a_call")
    config = game_config(tiny_game, tmp_path, *wants, *GRPO, "trainer.total_training_steps=1")
    fit(config)
    [step] = read_steps(tmp_path)
    assert step["agent/info/program_overridden/mean"] == 1.0
    config = game_config(tiny_game, tmp_path, *wants, "programs.client_sampling=refuse")
    with pytest.raises(ConfigError, match=r"policy's own choice.*client_sampling=refuse"):
        fit(config)


def test_a_model_is_served_to_programs_that_somebody_starts(
    tiny_game: Path, tmp_path: Path
) -> None:
    words = ["configs/quickstart_program.yaml", "--serve", f"{tiny_game}/model"]
    # A judge that nobody asks, and that is not there.
    words += ["judges.models.judge.base_url=http://127.0.0.1:9/v1", "judges.models.judge.model=m"]
    serving = subprocess.Popen(
        [sys.executable, "main.py", *words],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_ctrl_c,
    )
    assert serving.stdout is not None
    try:
        greeting = [serving.stdout.readline() for _ in range(3)]
        url, key = re.findall(r"OPENAI_\w+=(\S+)", greeting[0])
        listed = json.load(urllib.request.urlopen(f"{url}/models"))["data"]
        assert [entry["id"] for entry in listed] == ["policy", "judge"]
        own = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "SEED": "3"}
        for earned in (0.25, 0.5):
            played = [sys.executable, str(PROJECT / "examples/guess_program.py")]
            subprocess.run(played, env=os.environ | own, check=True, timeout=60)
            body = json.dumps({"reward": earned}).encode()
            urllib.request.urlopen(f"{url.removesuffix('/v1')}/end", body).read()
            shown = ""
            while "[[" not in shown:
                shown += serving.stdout.readline()
            assert "done, " in shown and f"reward {earned:g}" in shown
        serving.send_signal(signal.SIGINT)
        assert serving.wait(30) == 0
    finally:
        serving.kill()
        serving.wait()
