"""Every command that README and docs show is run.

As it stands, with a tiny model in place of the reader's own.

Where it needs a hub, a GPU or other machines, it is run as far as it goes here.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import main
from features.export.export import main as export
from features.viewer.command import main as make_viewer
from scripts.docs_links import feature_pages
from tests.conftest import PROJECT
from training.run.signals import EndingSignals

FILES = [*(PROJECT / "docs").glob("*.md"), *feature_pages()]
DOCS = sorted(str(path.relative_to(PROJECT)) for path in FILES)
# Pages whose commands need each other are run by tests/e2e/test_tutorial.py and test_pages_run.py.
WALKED = ("docs/tutorial.md", "docs/rewards.md", "features/records/README.md")
PAGES = ("README.md", *(page for page in DOCS if page not in WALKED))
# Beginnings of indented lines that are commands, and of commands within a text.
STARTS = (
    "python ",
    "make ",
    "ray ",
    "export ",
    "source ",
    "GPU_TESTS_DEVICE=",
    "OMP_NUM_THREADS=1 ",
)
INLINE = re.compile(rf"`((?:{'|'.join(STARTS)})[^`]+)`")
TINY = (
    *(
        "trainer.total_training_steps=1",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ),
    *(
        "agent.val_length=0",
        "trainer.val_before_train=false",
        "trainer.logger=[console,file]",
        "agent.trial_episodes=0",
    ),
    *("trainer.n_gpus_per_node=1", "critic.model.path=null"),
)
# Commands that cannot run here as they stand: their beginning, and what is run or checked in their
# stead.
ELSEWHERE = {
    "python examples/prepare_gsm8k.py": "--help",
    "python examples/prepare_quickstart.py": "--help",
    "python examples/prepare_tiny_prompts.py": "--help",
    "python examples/prepare_game.py": "tests/unit/test_prepare_game.py",
    "python examples/prepare_zoo_game.py": "tests/e2e/test_zoo_game.py",
    "python main.py configs/qwen3_5_tools.yaml": "tests/e2e/test_zoo_game.py",
    "python examples/prepare_clues.py": "tests/features/context/runs/test_clues_run.py",
    "python main.py configs/clues.yaml": "tests/features/context/runs/test_clues_run.py",
    "python scripts/contexts_table.py": "tests/features/context/test_clues.py",
    "python scripts/court_coverage.py": "tests/features/branching/test_court.py",
    "python scripts/errands_table.py": "tests/features/branching/test_errands.py",
    "python scripts/errands_curve.py": "tests/features/branching/runs/test_errands_curve.py",
    "python main.py configs/errands.yaml": "tests/features/branching/runs/test_errands_run.py",
    "python main.py CONFIG.yaml --judge-credit": (
        "tests/features/branching/runs/test_judging_runs.py"
    ),
    "python main.py CONFIG.yaml data.sampler.name=difficulty": (
        "tests/features/difficulty/runs/test_difficulty_runs.py"
    ),
    "python examples/prepare_mixed.py": "tests/features/difficulty/runs/test_mixed_run.py",
    "OMP_NUM_THREADS=1 python main.py configs/mixed.yaml": (
        "tests/features/difficulty/runs/test_mixed_run.py"
    ),
    "python scripts/difficulty_table.py": "tests/features/difficulty/runs/test_mixed_run.py",
    "python main.py CONFIG.yaml teacher.model=policy": (
        "tests/features/teacher/runs/test_teacher_runs.py"
    ),
    "python examples/prepare_codes.py": "tests/features/teacher/runs/test_teacher_runs.py",
    "python main.py configs/codes.yaml": "tests/features/teacher/runs/test_teacher_runs.py",
    "python scripts/teacher_table.py": "tests/features/teacher/runs/test_teacher_runs.py",
    "python main.py CONFIG --sft": "tests/features/sft/runs/test_sft_runs.py",
    "python examples/prepare_sums.py": "tests/features/sft/runs/test_sums_run.py",
    "python main.py configs/sums.yaml": "tests/features/sft/runs/test_sums_run.py",
    "python scripts/warm_start_table.py": "tests/features/sft/test_sums.py",
    "python main.py CONFIG.yaml --sft": "tests/features/sft/runs/test_sft_runs.py",
    "python main.py CONFIG.yaml actor_rollout_ref.model.path=RUN_DIR/sft": (
        "tests/features/sft/runs/test_sft_runs.py"
    ),
    "python main.py CONFIG.yaml sft.files=": "tests/features/sft/runs/test_sft_runs.py",
    "python -m features.records.select": "tests/features/records/test_select.py",
    "python main.py CONFIG.yaml agent.context=mine.py": (
        "tests/features/context/runs/test_clues_run.py"
    ),
    "python examples/prepare_pages.py": "tests/features/policy_calls/runs/test_pages_run.py",
    "python main.py configs/pages.yaml": "tests/features/policy_calls/runs/test_pages_run.py",
    "python scripts/policy_calls_table.py": "tests/features/policy_calls/test_pages.py",
    "python main.py CONFIG.yaml policy_calls.enable=true": (
        "tests/features/policy_calls/runs/test_pages_run.py"
    ),
    "python scripts/verl_imports.py": "tests/features/verl/test_verl_modules.py",
    "python main.py algorithm.adv_estimator=grpo data.train_files=": "tests/e2e/test_docs.py",
    "OMP_NUM_THREADS=1 python main.py count.yaml": "tests/features/run_page/runs/test_pages_run.py",
    "python main.py CONFIG.yaml programs.command=": "tests/features/programs/runs/test_programs.py",
    "python main.py ages.yaml": "tests/e2e/test_tools_guide.py",
    "python main.py CONFIG.yaml data.train_files=rows.jsonl agent.environment.path=tutor.py": (
        "tests/features/verl/test_verl_page.py"
    ),
    "python main.py CONFIG.yaml programs.function=search_loop.py:run": (
        "tests/features/verl/test_verl_page.py"
    ),
    "python main.py CONFIG.yaml --serve": "tests/features/programs/runs/test_programs.py",
    "python main.py CONFIG.yaml agent.tools=[python]": (
        "tests/features/sandbox/test_python_walls.py"
    ),
    'python main.py CONFIG.yaml "trainer.observers=': "docs/observers.md",
    "python own_template.py": "tests/unit/test_faq.py",
    "python main.py CONFIG.yaml custom_algorithm=careful.py": "tests/unit/test_faq.py",
    "python FOLDER_OF_THE_CLONE/main.py mine.yaml": "docs/faq.md",
    "python -m features.viewer.command outputs/mine": "docs/faq.md",
    "python main.py configs/quickstart.yaml actor_rollout_ref.actor.optim.optimizer=lion.py": (
        "tests/unit/test_faq.py"
    ),
    "python -m pytest tests/features/": "docs/features.md",
    "python scripts/feature_index.py": "tests/unit/test_features.py",
    "python scripts/replay.py outputs/count": "tests/features/run_page/runs/test_pages_run.py",
    "python main.py CONFIG.yaml mcp.servers.": "tests/features/adapters/runs/test_worlds.py",
    "python main.py CONFIG.yaml judges.models.": "tests/features/judges/runs/test_side_models.py",
    "python main.py CONFIG.yaml trainer.launcher=ray programs.": (
        "tests/features/programs/runs/test_ray_programs.py"
    ),
    "python main.py CONFIG.yaml agent.environment.name=openenv:": (
        "tests/features/adapters/runs/test_worlds.py"
    ),
    "python main.py CONFIG.yaml programs.verifiers.": (
        "tests/features/programs/runs/test_verifiers_programs.py"
    ),
    "python main.py ARGS": "tests/features/verl/test_verl_keys.py",
    "python main.py configs/tiny_prompts.yaml custom_algorithm=": "tests/e2e/test_trainer.py",
    "python -m training.run.metric_names": "tests/unit/test_metric_names.py",
    "python scripts/bias_table.py": "tests/unit/test_bias.py",
    "python main.py configs/gsm8k_grpo.yaml": "--explain",
    "python main.py configs/smollm2_arithmetic.yaml": "--explain",
    "ray ": "tests/e2e/test_nodes.py",
    "export RAY_AUTH_MODE": "tests/e2e/test_nodes.py",
    "source .venv/bin/activate": "scripts/setup_env.sh",
    "python -m sglang.launch_server": "tests/e2e/test_sglang.py",
    "python scripts/replay.py RUN_DIR/chats": "tests/features/chat/runs/test_chat.py",
    "python -m venv": "features/trackers/README.md",
}
# Parts of commands for a run that has ended, and the words that stand for the run.
AFTER_TRAINING = ("features.viewer.command", "features.export.export", "--eval", "--chat")
RUNS = re.compile(
    r"^(outputs/quickstart/run|outputs/one|outputs/other|RUN_DIR)(/global_step_130|/config.yaml)?$"
)


def commands() -> Iterator[tuple[str, str]]:
    """Yields (page, command), comments and continued lines taken care of."""
    for page in PAGES:
        text = (PROJECT / page).read_text().replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
        found = [line for line in lines if line.startswith(STARTS)]
        found += [command.replace("\n", " ") for command in INLINE.findall(text)]
        for command in dict.fromkeys(
            re.sub(r"\s+", " ", line.partition(" #")[0]).strip() for line in found
        ):
            yield page, command


COMMANDS = [*commands()]


def run(*words: str, folder: Path = PROJECT) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (
        f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )
    return done.stdout


def words_of(command: str) -> list[str]:
    """Splits a command; one of Python's runs under the interpreter of the tests."""
    words = shlex.split(command.partition(" > ")[0])
    words = [word for word in words if not re.match(r"[A-Z_]+=", word) or words[0] == "make"]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


@pytest.mark.long
@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[command for _, command in COMMANDS])
def test_a_command_of_the_docs_runs(
    page: str,
    command: str,
    tiny_game: Path,
    ended_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, how = (
        words_of(command),
        next((how for start, how in ELSEWHERE.items() if command.startswith(start)), None),
    )
    if words[0] == "make":
        # Its target's program is there, and make knows it; quickstart, test and check run in CI.
        run("make", "-n", *words[1:])
    elif how is not None and how.startswith("--"):
        refused = subprocess.run(
            [*words, how], cwd=PROJECT, capture_output=True, text=True, timeout=300
        )
        # Files that the step before it would have made are missing; nothing else may be.
        left = [
            line
            for line in refused.stderr.splitlines()
            if line.startswith("  ") and "is not a f" not in line
        ]
        assert refused.returncode in (0, 2) and not left, refused.stderr
    elif how is not None:
        assert (PROJECT / how).is_file()
    elif "tests.benchmarks" in command or "tests.zoo" in command:
        assert "usage" in run(*words, "--help")
    elif "training.config.reference" in command:
        assert run(*words) == (PROJECT / "configs/ppo_trainer.yaml").read_text()
    elif "features.programs.protocols.fields" in command:
        assert run(*words) == (PROJECT / "features/programs/fields.md").read_text()
    elif "features.run_page.report" in command:
        assert "page: " in run(*with_own_runs(words, tmp_path))
    elif any(part in command for part in AFTER_TRAINING):
        # The person leaves at once.
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        run_after_training(words, ended_run, tiny_game, tmp_path)
    else:
        assert words[1] == "main.py", f"{page}: {command} has no way to be run here: give it one"
        run_training(words, tiny_game, tmp_path)


@pytest.fixture(scope="module")
def ended_run(tiny_game: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the quickstart's settings, which has made one step and a checkpoint."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    own = [f"actor_rollout_ref.model.path={tiny_game}/model", f"trainer.default_local_dir={folder}"]
    assert main.run(["configs/quickstart.yaml", *own, *TINY], EndingSignals()) == 0
    return folder


def run_after_training(words: list[str], ended_run: Path, game: Path, folder: Path) -> None:
    """Does what a command does, with another run in the place of its own."""
    given = []
    runs = 0
    for word in words[1:]:
        of_run = RUNS.match(word)
        if of_run:
            run_dir = folder / f"run{runs}"
            runs += 1
            shutil.copytree(ended_run, run_dir)
            parts = {"/global_step_130": "global_step_1", "/config.yaml": "config.yaml"}
            word = str(run_dir / parts[of_run[2]] if of_run[2] else run_dir)
        elif word == "outputs/quickstart/task/model":
            word = str(game / "model")
        elif word in ("exported", "my_model", "my_model_at_130", "outputs/both", "to_send"):
            word = str(folder / word)
        given.append(word)
    if words[1] == "main.py":
        tiny = ["agent.val_length=6", f"actor_rollout_ref.model.path={game}/model"]
        assert main.run([*given[1:], "--out", str(folder / "out"), *tiny], EndingSignals()) == 0
    elif "features.viewer.command" in words:
        assert make_viewer(given[2:]) == 0
    else:
        assert export(given[2:]) == 0


def with_own_runs(words: list[str], folder: Path) -> list[str]:
    """Puts runs of one step, and a page of the test's own, in the place of a command's."""
    own = []
    for word in words:
        if word.startswith(("outputs/", "RUN_")):
            run_dir = folder / word
            run_dir.mkdir(parents=True)
            (run_dir / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
            word = str(run_dir)
        own.append(str(folder / word) if word.endswith(".html") else word)
    return own


def run_training(words: list[str], game: Path, folder: Path) -> None:
    """Trains for a step as the command says, on the tiny model."""
    coin = re.search(r"    # mine.py\n((?:    .*\n|\n)+)", (PROJECT / "docs/agents.md").read_text())
    assert coin is not None
    source = re.sub(r"^    ", "", coin[1], flags=re.M).partition("python main.py")[0]
    (folder / "mine.py").write_text(source + "\nMyEnvironment = Coin\n")
    given = [word.replace("=mine.py", f"={folder}/mine.py") for word in words]
    own = [f"actor_rollout_ref.model.path={game}/model", f"trainer.default_local_dir={folder}/run"]
    if "CONFIG.yaml" in words:
        own += [
            "actor_rollout_ref.rollout.name=hf",
            "data.max_prompt_length=512",
            "data.max_response_length=1024",
        ]
        own += ["actor_rollout_ref.model.override_config={max_position_embeddings: 4096}"]
        own += ["critic.model.override_config={max_position_embeddings: 4096}"]
        own += [
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
            "critic.ppo_max_token_len_per_gpu=8192",
        ]
    given = ["configs/quickstart.yaml" if word == "CONFIG.yaml" else word for word in given]
    assert given[1] == "main.py"
    if "--plan" in words:
        assert "actor update" in run(*given, *own)
        return
    if any(word.startswith(("--explain", "trainer.nnodes")) for word in words):
        # Only the settings of several machines are looked at.
        assert "trainer.default_local_dir" in run(*given, *own, "--explain")
        return
    # In this process: the imports are most of a command's time.
    assert main.run([*given[2:], *own, *TINY], EndingSignals()) == 0
    assert (folder / "run/metrics.jsonl").is_file()


def test_the_launch_command_of_the_verl_page_trains(tiny_task: Path, tmp_path: Path) -> None:
    guide = "features/verl/README.md"
    (command,) = [text for page, text in COMMANDS if page == guide and "n=4" in text]
    words = words_of(command.replace("outputs/tiny_prompts/task", str(tiny_task)))
    own = [f"trainer.default_local_dir={tmp_path}/run"]
    assert main.run([*words[2:], *own, *TINY], EndingSignals()) == 0
    assert (tmp_path / "run/metrics.jsonl").is_file()


def test_there_are_commands_and_each_exception_is_needed() -> None:
    assert len(COMMANDS) > 20
    assert all(any(command.startswith(start) for _, command in COMMANDS) for start in ELSEWHERE)
