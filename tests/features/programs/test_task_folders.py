"""The folder in which a program works, and the task in the words of its command."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from custom.confine import remove_folder
from features.programs import task_folders
from features.programs.exchange import Asked
from features.programs.spec import ProgramSpec
from features.programs.task_folders import TaskFolders, with_whole_paths
from features.programs.task_words import MAX_WORD_BYTES, NoSuchWord, with_task
from tests.features.programs.test_pool import exit_of, play, pool_of
from training.config.loader import load_config
from workers.environments.reply import StepReply

ASKS = """
import json, os, urllib.request
assert os.getcwd() == os.path.realpath(os.environ["TASK_DIR"]), os.getcwd()
assert os.listdir() == [], "it is empty"
assert os.environ["START_DIR"] != os.getcwd()
open("answer.txt", "w").write(os.environ["SEED"])
body = json.dumps({"messages": [{"role": "user", "content": os.getcwd()}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
request.add_header("Content-Type", "application/json")
urllib.request.urlopen(request).read()
"""
JUDGE = """
import os

def compute_score(task_dir):
    return float(open(os.path.join(task_dir, "answer.txt")).read())
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of all temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(task_folders.tempfile, "tempdir", str(folder))
    return folder


def folder_of(told: list[Any]) -> Path:
    [asked] = [heard for heard in told if isinstance(heard, Asked)]
    return Path(asked.messages[0]["content"])


def is_gone(folder: Path) -> bool:
    until = time.monotonic() + 10
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return not folder.exists()


@pytest.mark.parametrize("preload", [(), ("json",)])
def test_each_episode_works_in_an_empty_folder_which_the_reward_function_sees(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, preload: tuple[str, ...]
) -> None:
    (tmp_path / "agent.py").write_text(ASKS)
    (tmp_path / "judge.py").write_text(JUDGE)
    monkeypatch.chdir(tmp_path)
    spec = ProgramSpec(
        command=(sys.executable, "agent.py"),
        preload=preload,
        reward_path=str(tmp_path / "judge.py"),
        reward_name="compute_score",
    )
    with pool_of(spec) as pool:
        folders = []
        for key in range(2):
            told = play(pool, key)
            assert exit_of(told).error == ""
            assert isinstance(told[-1], StepReply) and told[-1].reward == 7.0
            folders.append(folder_of(told))
            assert is_gone(folders[-1])
    assert folders[0] != folders[1]
    assert not list(temporary.iterdir())


def test_a_module_beside_the_trainer_is_found(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_agent").mkdir()
    (tmp_path / "my_agent/__init__.py").write_text("")
    (tmp_path / "my_agent/__main__.py").write_text(f"{ASKS}\nprint(0.5)")
    monkeypatch.chdir(tmp_path)
    with pool_of(ProgramSpec(command=(sys.executable, "-m", "my_agent"))) as pool:
        exited = exit_of(play(pool))
    assert (exited.reward, exited.error) == (0.5, "")


def test_a_function_has_a_folder_too(tmp_path: Path, temporary: Path) -> None:
    path = tmp_path / "game.py"
    path.write_text(
        "import os\n"
        "async def solve(task, client, task_dir):\n"
        "    open(os.path.join(task_dir, 'answer.txt'), 'w').write('x')\n"
        "    messages = [{'role': 'user', 'content': task_dir}]\n"
        "    await client.chat.completions.create(model='m', messages=messages)\n"
        "    return len(os.listdir(task_dir))\n"
    )
    with pool_of(ProgramSpec(function=f"{path}:solve")) as pool:
        told = play(pool)
        assert exit_of(told).reward == 1.0
        assert is_gone(folder_of(told))


def test_what_a_killed_trainer_left_goes_with_the_next_start(temporary: Path) -> None:
    killed, runs = TaskFolders(), TaskFolders()
    kept = [killed.make(), runs.make()]
    # What a kill closes.
    os.close(killed._lock)
    other = TaskFolders()
    assert [os.path.exists(folder) for folder in kept] == [False, True]
    for folders in (runs, other):
        folders.close()
    assert not list(temporary.iterdir())


@pytest.mark.seconds
def test_a_folder_goes_whatever_is_in_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    folder = tmp_path / "folder"
    (folder / "locked/inner").mkdir(parents=True)
    (folder / "locked/inner/file").write_text("")
    (folder / "link").symlink_to(outside)
    os.chmod(folder / "locked", 0)
    here = os.getcwd()
    os.chdir(folder)
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    remove_folder(folder)
    assert not folder.exists() and (outside / "kept").exists()


def test_words_that_name_what_is_beside_the_trainer_are_whole_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("agent.py", "bin/run", "python"):
        (tmp_path / name).write_text("")
    words = ["python", "agent.py", "bin/run", "bin", "--config", "none.yaml", "a/b", "Say agent.py"]
    here = str(tmp_path)
    assert with_whole_paths(words) == [
        "python",
        f"{here}/agent.py",
        f"{here}/bin/run",
        *words[3:],
    ]
    assert with_whole_paths(["bin/run"]) == [f"{here}/bin/run"]


ROW = {"question": 'Is "a b" $HOME\n{task.n} 7?', "n": 3, "lists": [1], "odd name": "x"}


def test_a_task_stays_within_its_word() -> None:
    command = ["agent", "{task.question}", "--n={task.n}", "{task.lists}{task.odd name}", "{tasks}"]
    assert with_task(command, json.dumps(ROW)) == [
        "agent",
        ROW["question"],
        "--n=3",
        "[1]x",
        "{tasks}",
    ]
    assert json.loads(with_task(["{task}"], json.dumps(ROW))[0]) == ROW


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"n": 1}, "no field 'question'; it has n"),
        ({}, "it has none"),
        ({"question": "a\0b"}, "NUL"),
        ({"question": "x" * MAX_WORD_BYTES + "y"}, "standard input"),
    ],
)
def test_a_task_that_no_word_can_be_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(NoSuchWord, match=said):
        with_task(["agent", "{task.question}"], json.dumps(row))
    with pool_of(ProgramSpec(command=("true", "{task.question}"))) as pool:
        exited = exit_of(play(pool, task=row))
    assert exited.failure == "env_crash" and said in exited.error


def test_a_program_gets_its_task_by_its_command(temporary: Path) -> None:
    code = (
        "import json, os, sys; asked = json.loads(os.environ['TASK'])['question']; "
        "print(float(sys.argv[1:] == [asked]))"
    )
    spec = ProgramSpec(command=(sys.executable, "-c", code, "{task.question}"))
    with pool_of(spec) as pool:
        assert exit_of(play(pool, task=ROW)).reward == 1.0


def test_the_command_line_takes_a_place_for_the_task() -> None:
    loaded = load_config(["programs.command=agent -t {task.question} {task}"], check=False)
    [words] = [choice.command for choice in loaded.config.environments]
    assert words == ("agent", "-t", "{task.question}", "{task}")
