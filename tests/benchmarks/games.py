"""Measures whether garbage ever pays, in games that nobody has tuned for.

Each is trained for a few steps, with SmolLM2 on the real vLLM.

For each game: what random, unreadable and quitting answers get (the trial before a run), and what
the policy's greedy answers get before and after training. `make smollm2-game` makes the model's
folder.

python -m tests.benchmarks.games [--steps 20] [--only Taxi]
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from training.run.validation_names import is_validation_reward

GAMES: dict[str, str] = {
    "FrozenLake": "{name: 'gymnasium:FrozenLake-v1', kwargs: {is_slippery: false}}",
    "CliffWalking": "{name: 'gymnasium:CliffWalking-v1'}",
    "Taxi": "{name: 'gymnasium:Taxi-v4'}",
    "Blackjack": "{name: 'gymnasium:Blackjack-v1'}",
    "MountainCar": "{name: 'gymnasium:MountainCar-v0'}",
    "Mastermind": "{name: 'textarena:Mastermind-v0'}",
    "Sokoban": "{name: 'textarena:Sokoban-v0'}",
    "prime_factorization": "{name: 'reasoning_gym:prime_factorization'}",
}
CLEARED = (
    "~agent.environment.name",
    "~agent.environment.kwargs",
    "~agent.environment.prompt_template",
)
SETTINGS = (
    *(
        "agent.max_turn=3",
        "agent.max_turn_tokens=8",
        "agent.val_length=8",
        "data.train_batch_size=2",
    ),
    *("data.max_prompt_length=900", "data.max_response_length=1100"),
    *(
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "trainer.val_before_train=true",
    ),
    *(
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=false",
    ),
    *(
        "trainer.logger=[console,file]",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "trainer.resume_mode=disable",
    ),
)
TRIAL = re.compile(
    r"mean reward of random answers (\S+) .*?, unreadable ones (\S+) .*?, "
    r"one and then unreadable ones (\S+)"
)


def play(name: str, steps: int, folder: Path) -> bool:
    """Trains on a game and prints a line; returns whether garbage paid no more than play."""
    command = [
        sys.executable,
        "main.py",
        "configs/smollm2_guess.yaml",
        *CLEARED,
        f"agent.environment={GAMES[name]}",
    ]
    command += SETTINGS
    command += [
        f"trainer.default_local_dir={folder / name}",
        f"trainer.total_training_steps={steps}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    (folder / f"{name}.log").write_text(done.stdout + done.stderr)
    found = TRIAL.search(done.stderr)
    if done.returncode or not found:
        print(f"{name:20} failed, exit code {done.returncode}: {done.stderr[-500:]}")
        return False
    paid, garbage, quitting = map(float, found.groups())
    lines = [
        json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()
    ]
    greedy = [value for line in lines for key, value in line.items() if is_validation_reward(key)]
    trained = [line for line in lines if "critic/score/mean" in line]
    failed = sum(line["agent/failed"] for line in trained)
    print(
        f"{name:20} random {paid:8.3f}  garbage {garbage:8.3f}  quitting {quitting:8.3f}  "
        f"greedy {greedy[0]:8.3f} -> {greedy[-1]:8.3f}  "
        f"reward {trained[0]['critic/score/mean']:8.3f} -> "
        f"{trained[-1]['critic/score/mean']:8.3f}  "
        f"failed {failed:.0f}",
        flush=True,
    )
    return garbage <= max(paid, greedy[-1])


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=list(GAMES), choices=list(GAMES))
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="games-"))
    folder.mkdir(parents=True, exist_ok=True)
    results = [play(name, options.steps, folder) for name in options.only]
    print(f"garbage never wins: {all(results)}; runs and logs in {folder}")
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
