"""Edits in place, as users make them, train in silence: no alarm knows a formula.

Each edit is made in a clone of the last commit, where the README's Count then trains for a few
steps with `trainer.alarms=stop`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import PROJECT
from tests.e2e.test_training import read_steps
from training.run.exit_codes import MEND

STEPS = 4
ALARM_PREFIX = "alarms/"


class Edit(NamedTuple):
    """What is replaced by what in a file, and the settings of the run that meets it."""

    file: str
    old: str
    new: str
    settings: tuple[str, ...] = ()


GROUPS = "training/core_algos/group_advantages.py"
GRPO_BODY = """    advantages = groups.deviations  # (batch,)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.score_std() + epsilon)
    return groups.advantages(advantages)
"""
HALVED = Edit(GROUPS, GRPO_BODY, GRPO_BODY.replace("groups.score_std()", "2 * groups.score_std()"))
EDITS = {
    "a loss that clips on both sides": Edit(
        "training/core_algos/policy_losses.py",
        "torch.where(is_negative, ratio.clamp(1 - low, bound), ratio.clamp(max=1 + high))",
        "ratio.clamp(1 - low, 1 + high)",
    ),
    "an estimator with the median for a baseline": Edit(
        GROUPS,
        GRPO_BODY,
        """    advantages = groups.scores.clone()
    for group in groups.ids.unique():
        members = groups.ids == group
        advantages[members] -= groups.scores[members].median()
    return groups.advantages(advantages)
""",
    ),
    "an estimator that ranks": Edit(
        GROUPS,
        GRPO_BODY,
        """    advantages = torch.zeros_like(groups.scores)
    for group in groups.ids.unique():
        members = groups.ids == group
        own = groups.scores[members]
        beaten = (own[:, None] > own).sum(1) - (own[:, None] < own).sum(1)
        advantages[members] = beaten.double() / len(own)
    return groups.advantages(advantages)
""",
    ),
    "gae without whitening": Edit(
        "training/core_algos/token_advantages.py",
        "        advantages = masked_whiten(advantages, mask)\n",
        "        advantages = advantages * 1.0\n",
        ("algorithm.adv_estimator=gae",),
    ),
    "a schedule that falls with the root of the step": Edit(
        "training/batch/schedules.py",
        "    return transformers.get_constant_schedule_with_warmup(optimizer, num_warmup_steps, "
        "last_epoch)",
        "    return torch.optim.lr_scheduler.LambdaLR(\n"
        "        optimizer, lambda step: (1 + step) ** -0.5, last_epoch\n    )",
    ),
    "a sampler that inverts the distribution function": Edit(
        "workers/hf_rollout.py",
        """        row.exponential_(generator=generator)
    tokens = (log_probs - noise.log()).argmax(dim=-1)
""",
        """        row.uniform_(generator=generator)
    below = log_probs.exp().cumsum(dim=-1) < noise[:, :1]
    tokens = below.sum(dim=-1).clamp(max=logits.shape[-1] - 1)
""",
    ),
}


def train_edited(edit: Edit, model: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Makes the edit in a clone, and trains Count there; the run's folder is `folder`/run."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "-q", str(PROJECT), str(clone)], check=True)
    readme = (clone / "README.md").read_text()
    for name in ("count.py", "count.yaml"):
        _, _, after = readme.partition(f"# {name}\n")
        (clone / name).write_text(after.partition("```")[0])
    file = clone / edit.file
    text = file.read_text()
    assert text.count(edit.old) == 1, f"{edit.file} has changed: name the passage anew"
    file.write_text(text.replace(edit.old, edit.new))
    command = [
        sys.executable,
        "main.py",
        "count.yaml",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.alarms=stop",
        f"trainer.default_local_dir={folder}/run",
        *edit.settings,
    ]
    return subprocess.run(
        command,
        cwd=clone,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(clone)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def assert_silent(edit: Edit, model: Path, folder: Path) -> None:
    done = train_edited(edit, model, folder)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "alarm " not in done.stdout, done.stdout[-3000:]
    steps = read_steps(folder / "run")
    # The README's Count validates before its first step, too.
    assert [step["step"] for step in steps] == list(range(STEPS + 1))
    rang = {name for step in steps for name in step if name.startswith(ALARM_PREFIX)}
    assert rang <= {"alarms/count"}
    assert not any(step.get("alarms/count") for step in steps)


@pytest.fixture(autouse=True)
def needs_git() -> None:
    if shutil.which("git") is None or not (PROJECT / ".git").exists():
        pytest.skip("the project is no git repository that could be cloned")


@pytest.mark.long
def test_halving_grpos_normaliser_rings_nothing(tiny_game: Path, tmp_path: Path) -> None:
    assert_silent(HALVED, tiny_game / "model", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("what", EDITS)
def test_a_legitimate_edit_rings_nothing(what: str, tiny_game: Path, tmp_path: Path) -> None:
    assert_silent(EDITS[what], tiny_game / "model", tmp_path)


@pytest.mark.slow
def test_an_edit_of_the_wrong_sign_rings(tiny_game: Path, tmp_path: Path) -> None:
    """So that the silence of the others says something."""
    edit = Edit(GROUPS, GRPO_BODY, GRPO_BODY.replace("(advantages)\n", "(-advantages)\n"))
    done = train_edited(edit, tiny_game / "model", tmp_path)
    assert done.returncode == MEND, done.stdout[-3000:]
    assert "alarm advantages_wrong" in done.stdout
