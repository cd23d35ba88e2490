"""README, docs/rewards.md, the pages of records and viewer: their files and commands, few steps.

Each page's commands need the files that it shows, so that they are run together, in one folder.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import PROJECT
from tests.e2e.test_docs import run
from tests.e2e.test_tutorial import carry_out, written
from training.core_algos import registry

README = (PROJECT / "README.md").read_text()
REWARDS = (PROJECT / "docs/rewards.md").read_text()
RECORDS = (PROJECT / "features/records/README.md").read_text()
VIEWER = (PROJECT / "features/viewer/README.md").read_text()
# The episodes of records are played again as the viewer's page says.
EPISODES = RECORDS + VIEWER[VIEWER.index("## Play episodes again") :]
SMALL = {
    "train_batch_size: 16, max_prompt": "train_batch_size: 8, max_prompt",
    "total_training_steps: 100": "total_training_steps: 2",
    "total_training_steps=20": "total_training_steps=2",
    "20.jsonl": "2.jsonl",
    "20.npz": "2.npz",
    "--episode 20.3.0": "--episode 2.3.0",
    "global_step_20": "global_step_2",
}
FEW_STEPS = [
    "trainer.total_training_steps=2",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.logger=[console,file]",
    "trainer.resume_mode=disable",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, importable as the project's would be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    # A file that a page's file imports is another folder's in the next test.
    monkeypatch.delitem(sys.modules, "scores", raising=False)
    return tmp_path


@pytest.fixture
def game_folder(folder: Path, tiny_game: Path) -> Path:
    (folder / "outputs/quickstart").mkdir(parents=True)
    (folder / "outputs/quickstart/task").symlink_to(tiny_game)
    return folder


def small(page: str) -> str:
    for given, less in SMALL.items():
        page = page.replace(given, less)
    return page


def test_the_readmes_environment_trains_and_its_episodes_are_read(
    game_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(given in README + EPISODES for given in SMALL)
    own = [
        command
        for command in written(small(README), game_folder)
        if "main.py count.yaml" in command
    ]
    commands = written(small(EPISODES), game_folder)
    assert len(own) == 1 and len(commands) == 6
    carry_out(own[0], game_folder)
    for command in commands:
        if "count.yaml" in command:
            command += " trainer.resume_mode=disable"
        carry_out(command, game_folder)
    said = capsys.readouterr().out
    assert re.search(r"2.jsonl line \d+: reward \d\.\d\d, ending done\n  user: the number is", said)
    assert "all the same" in said and "actor/pg_loss" in said
    assert "The loss moved this token's log-prob." in said
    assert "[turn 1, record] assistant: " in said and "[turn 2, model] assistant: " in said


def test_every_entry_of_an_episode_is_on_its_page(game_folder: Path) -> None:
    written(small(README), game_folder)
    written(small(EPISODES), game_folder)
    carry_out("python main.py count.yaml records.folder=episodes", game_folder)
    line = (game_folder / "episodes/2.jsonl").read_text().splitlines()[0]
    episode = json.loads(line)
    # Those that only the checks of a step read.
    entries = set(episode) - {"observation", "done", "group", "begins"}
    entries |= set(episode["rows"][0]) | set(episode["turns"][0])
    assert [entry for entry in sorted(entries) if f"`{entry}`" not in EPISODES] == []


def test_the_managers_and_samplers_of_the_page_train(
    folder: Path, tiny_task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "outputs/tiny_prompts").mkdir(parents=True)
    (folder / "outputs/tiny_prompts/task").symlink_to(tiny_task)
    commands = [command for command in written(REWARDS, folder) if "main.py" in command]
    assert len(commands) == 5
    for command in commands:
        # The variable before the command is the folder that is importable here.
        words = shlex.split(command.removeprefix("PYTHONPATH=. "))
        carry_out(shlex.join([*words, *FEW_STEPS]), folder)


def test_the_estimator_of_the_page_gives_advantages() -> None:
    page = (PROJECT / "docs/custom_algorithm.md").read_text()
    source = re.search(r"```python\n(.*?)```", page, re.S)
    assert source is not None
    names: dict[str, Any] = {}
    exec(source[1], names)
    registries = (registry.ADV_ESTIMATOR_REGISTRY, registry.ESTIMATOR_NEEDS)
    for table in (*registries, registry.ESTIMATOR_FACTS):
        table.pop("centred", None)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    mask = torch.tensor([[1, 1], [0, 1]])
    advantages, _ = names["centred"](rewards, mask, index=["a", "a"])
    assert advantages.tolist() == [[-1, -1], [0, 1]]


def test_the_loss_of_the_page_is_a_mini_batchs_share() -> None:
    page = (PROJECT / "docs/custom_algorithm.md").read_text()
    source = re.findall(r"```python\n(.*?)```", page, re.S)[1]
    names: dict[str, Any] = {}
    exec(source, names)
    registry.POLICY_LOSS_REGISTRY.pop("plain")
    counts = {"dp_size": 1, "batch_num_tokens": 8, "global_batch_size": 4}
    mask = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    loss, metrics = names["plain"](
        torch.zeros(2, 2),
        torch.zeros(2, 2),
        torch.tensor([[1.0, 2.0], [9.0, 5.0]]),
        mask,
        "token-mean",
        SimpleNamespace(global_batch_info=counts),
    )
    assert loss.item() == metrics["actor/plain"].item() == -1.0


@pytest.mark.slow
def test_the_readmes_environment_is_learnt(tmp_path: Path) -> None:
    model = str(tmp_path / "outputs/quickstart/task")
    run(sys.executable, "examples/prepare_quickstart.py", "--out", model)
    written(README, tmp_path)
    said = run(sys.executable, str(PROJECT / "main.py"), "count.yaml", folder=tmp_path)
    last_steps = re.search(r"(?m)^reward +\S+ +(\S+)$", said)
    assert last_steps is not None and float(last_steps[1]) > 0.85
