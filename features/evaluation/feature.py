"""Plays and scores tasks with a model, and trains nothing: --eval MODEL."""

from training.features import Feature

FEATURE = Feature(
    modes={"--eval": "features.evaluation.command_line:evaluate_command"},
    model_options=("--eval", "--against"),
    usage=(
        "--eval MODEL_OR_CHECKPOINT [--n 16] [--against OTHER] [--out FOLDER] [--pass-reward 1]\n"
        "             play and score the validation tasks, train nothing (features/evaluation)"
    ),
    moved_modules={
        "training.evaluation": "features.evaluation.evaluation",
        "training.evaluation_command": "features.evaluation.command",
        "training.evaluation_config": "features.evaluation.config",
        "training.evaluation_summary": "features.evaluation.summary",
        "training.run.evaluated_model": "features.evaluation.evaluated_model",
        "workers.evaluation_worker": "features.evaluation.evaluation_worker",
        "workers.evaluated_weights": "features.evaluation.evaluated_weights",
    },
)
