"""Evaluates a model from a script: what `python main.py CONFIG.yaml --eval MODEL` does.

Invariant: without features/evaluation the rest of `setup` works. This reads a config's objects
alone, and calls `features.evaluation.evaluation`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setup.trainer import RayPPOTrainer
from training.config.loader import read_config
from training.features import require_feature

# Tasks of an environment that has no rows, unless another number is asked for.
TASKS = 100


def evaluate(
    config: Any,
    model: str | Path,
    environment: Any = None,
    reward_fn: Any = None,
    dataset: Any = None,
    *,
    n: int | None = None,
    tasks: int = TASKS,
    out: str | Path | None = None,
    pass_reward: float | None = None,
) -> dict[str, Any]:
    """Plays and scores tasks with a model, and trains nothing (features/evaluation/README.md).

    Args:
        config, environment, reward_fn, dataset: as of `RayPPOTrainer`; each row is a task.
        model: a folder, a checkpoint or a run; see features/evaluation/README.md.
        n: samples of each task; None: one, greedy.
        tasks: of an environment without a dataset.
        out: folder of the results; None: `checkpoint.output_dir`/eval/NAME.
        pass_reward: an episode passes from this reward on; None: 1.
    Returns:
        what eval.json holds: `result["sources"][NAME]["mean"]` has value, low and high.
    Raises:
        ConfigError, CannotUse, ImportError: it cannot be done; says what to do.
    """
    require_feature("evaluation", "setup.evaluate")
    from features.evaluation.config import with_samples
    from features.evaluation.evaluated_model import find_model
    from features.evaluation.evaluation import (
        PASS_REWARD,
        evaluate_model,
        output_folder,
        write_evaluation,
    )

    if pass_reward is None:
        pass_reward = PASS_REWARD
    trainer = RayPPOTrainer(config, environment, reward_fn, dataset)
    acts = environment is not None
    settings = {"agent.val_length": tasks} if acts else {}
    read = read_config(
        trainer.config.settings() | settings, own_data=True, own_agents=acts, check=False
    )
    sampled = with_samples(read, n)
    found = find_model(str(model), sampled)
    folder = Path(out).absolute() if out is not None else output_folder(sampled, found)
    rows = trainer._rows()
    evaluation = evaluate_model(
        sampled,
        found,
        folder,
        train_dataset=rows,
        val_dataset=rows,
        specs=trainer._agent_specs() if acts else None,
        reward_fn=None if acts else trainer._batch_reward_fn(),
    )
    return write_evaluation(evaluation, folder, pass_reward=pass_reward)
