"""docs/troubleshooting.md: its symptoms are produced, and the run says what the page quotes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import main
from tests.conftest import PROJECT
from tests.e2e.test_docs import TINY
from training.config.loader import ConfigError, load_config
from training.run.signals import EndingSignals

PAGE = (PROJECT / "docs/troubleshooting.md").read_text()
# What the page quotes, between backticks, and what makes a run say it.
SETTINGS = {
    "there is no such key. Did you mean 'trainer.total_training_steps'?": [
        "trainer.total_trainingsteps=3"
    ],
    "is not a file (seen from FOLDER)": ["agent.environment.path=nowhere.py"],
    "= 416 tokens, but … reads at most 256": [
        "data.max_prompt_length=16",
        "data.max_response_length=400",
    ],
    "cannot hold one row of": ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=40"],
    "must be a multiple of actor_rollout_ref.actor.ppo_mini_batch_size=5": [
        "actor_rollout_ref.actor.ppo_mini_batch_size=5"
    ],
    "vLLM is not installed": ["actor_rollout_ref.rollout.name=vllm"],
    "reward.py does not define 'three'; it has:": [
        "custom_reward_function.path=reward.py",
        "custom_reward_function.name=three",
    ],
    "takes (a, b, c); with an environment it is called as reward_fn(trajectory)": [
        "custom_reward_function.path=reward.py",
        "custom_reward_function.name=two",
    ],
    "cannot be loaded: ModuleNotFoundError in line 1: No module named": [
        "agent.environment.path=broken.py"
    ],
    "is no tool; give an instance of a Tool that has a definition": ["agent.tools=[bare.py:Bare]"],
    "may last 5 turns, agent.max_turn=3 ends it before": ["agent.max_turn=3"],
    "a first prompt has 9 tokens, data.max_prompt_length=4: raise it": ["data.max_prompt_length=4"],
    "returned ('1 2 3', 0.0, True) (tuple); allowed:": ["agent.environment.path=three.py"],
    "returned the reward 'ten' (str); allowed: a finite number": [
        "custom_reward_function.path=reward.py",
        "custom_reward_function.name=ten",
    ],
    "raised KeyError: 'solved' in": [
        "custom_reward_function.path=reward.py",
        "custom_reward_function.name=solved",
    ],
    "groups the members began differently under the same seed": [
        "agent.environment.path=unseeded.py"
    ],
    "has no chat template; prompts are rendered as ChatML": [
        "actor_rollout_ref.model.path=bare_model"
    ],
}
NIM = re.search(r"```python\n# nim.py\n(.*?)```", (PROJECT / "docs/tutorial.md").read_text(), re.S)
assert NIM is not None
FILES = {
    "nim.py": NIM[1],
    "three.py": NIM[1].replace('True, {"legal": False}', "True"),
    "unseeded.py": NIM[1].replace("Random(seed)", "Random()"),
    "broken.py": "import nothing_such\n",
    "reward.py": "def two(a, b, c):\n    return 0\n\n\n"
    "def ten(trajectory):\n    return 'ten'\n\n\n"
    "def solved(trajectory):\n    return trajectory.infos[0]['solved']\n",
    "bare.py": (
        "from custom.tools import Tool\n\n\n"
        "class Bare(Tool):\n    def execute(self):\n        return ''\n"
    ),
}


@pytest.fixture
def own(tiny_game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the command line of a small run of the tutorial's game, beside wrong files."""
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    (tmp_path / "bare_model").mkdir()
    for file in (tiny_game / "model").iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / "bare_model" / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    game = [
        "agent.environment.path=nim.py",
        "agent.environment.cls=Nim",
        "agent.max_turn=5",
        "agent.trial_episodes=1",
    ]
    saved = ["trainer.default_local_dir=run", "trainer.save_freq=1"]
    limits = [
        "data.max_prompt_length=64",
        "data.max_response_length=48",
        "actor_rollout_ref.rollout.n=2",
    ]
    model = [f"actor_rollout_ref.model.path={tiny_game / 'model'}", *saved]
    tiny = [word for word in TINY if "trial_episodes" not in word]
    return [
        str(PROJECT / "configs/quickstart.yaml"),
        *tiny,
        *game,
        *limits,
        *model,
        "algorithm.adv_estimator=grpo",
    ]


@pytest.mark.parametrize("quoted", SETTINGS)
def test_a_quoted_line_is_what_the_run_says(
    quoted: str,
    own: list[str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert quoted in PAGE
    if "vLLM" in quoted:
        monkeypatch.setitem(sys.modules, "vllm", None)
    main.run([*own, *SETTINGS[quoted]], EndingSignals())
    said = " ".join((capsys.readouterr().err + caplog.text).split())
    expected = re.escape(quoted).replace("FOLDER", ".*").replace("…", ".*")
    assert re.search(expected, said), said
    # Code of the user's comes with its file and line.
    if "returned" in quoted:
        assert re.search(r"\w \(\S*(three|reward).py:\d+\) returned", said)


def test_a_reward_function_that_fails_in_some_episodes_ends_the_run(
    own: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Played again, such episodes would give way to those for which the function works."""
    Path("some.py").write_text(
        "def reward_fn(trajectory):\n    return 1.0 if trajectory.seed % 3 else None\n"
    )
    argv = [word for word in own if "trial_episodes" not in word]
    settings = ["custom_reward_function.path=some.py", "custom_reward_function.name=reward_fn"]
    assert main.run([*argv, "agent.trial_episodes=0", *settings], EndingSignals()) == 1
    said = capsys.readouterr().err
    assert re.search(r"^reward_fn \(\S*some.py:1\) returned the reward None", said, re.M), said


def test_a_checkpoint_that_cannot_be_resumed_says_why(
    own: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main.run(own, EndingSignals()) == 0
    assert main.run(own, EndingSignals()) == 0
    assert (
        main.run(
            [*own, "algorithm.adv_estimator=gae", "trainer.total_training_steps=2"], EndingSignals()
        )
        == 3
    )
    part = next(Path("run/global_step_1/actor/model").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert main.run([*own, "trainer.total_training_steps=2"], EndingSignals()) == 3
    said = capsys.readouterr().err + caplog.text
    for quoted in (
        "nothing to train: the run is at step 1 of 1",
        "has checkpoints, but none with actor, critic as this run needs",
        "is damaged (actor/model/__0_0.distcp has changed since it was written) and left out",
    ):
        assert quoted in said and quoted.replace("step 1 of 1", "step 2 of 2") in PAGE


def test_a_config_error_has_every_problem(own: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([*own, "trainer.total_trainingsteps=3", "agent.environment.path=nowhere.py"])
    assert len(error.value.problems) == 2
