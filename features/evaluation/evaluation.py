"""Evaluates a model: its validation tasks are played and scored, and nothing is trained.

    find_model -> evaluation_config -> evaluate_model -> summarise -> eval.json, metrics.jsonl

Invariant: the same code plays and scores as in a training run's validation, so that the same
weights and seeds give the same numbers.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from yaml import YAMLError

from features.evaluation.config import PASS_REWARD, evaluation_config
from features.evaluation.evaluated_model import EvaluatedModel
from features.evaluation.evaluation_worker import EvaluationWorker
from features.evaluation.summary import Pairing, score_metrics, summarise
from training.agent_trainer import AgentTrainer, validation_endings
from training.building import build_trainer
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.config.plain_files import read_plain_text
from training.config.reference import to_yaml
from training.features import features
from training.ray_trainer import RayPPOTrainer
from training.run.checkpoint_contents import ACTOR, LATEST, MANIFEST, SAVED_STEPS
from training.run.files import write_atomically
from training.run.metrics_file import METRICS_FILE, LineFile, as_record, read_records
from training.run.named_model import CannotUse
from training.run.recorded_config import flat_settings
from training.run.roles import Role
from training.run.signals import EndingSignals
from training.validation import ValidationSamples, play_validation
from workers.fsdp_workers import RewardModelWorker

RESULT = "eval.json"
CONFIG = "config.yaml"


@dataclass
class Evaluation:
    """Holds what was played of one model.

    Attributes:
        samples: what each episode got.
        facts: of each episode of environments; none in an evaluation on prompts.
        step: that seeded the sampling.
        seconds: for playing and scoring.
        metrics: of the kind that a training run's validation logs.
    """

    model: EvaluatedModel
    config: PPOConfig
    samples: ValidationSamples
    facts: list[Mapping[str, Any]]
    step: int
    seconds: float
    metrics: dict[str, float]

    def pairing(self) -> Pairing:
        """Returns what tells whether another model got the same tasks."""
        begins: dict[str, str] = {}
        for uid, fact in zip(self.samples.uids, self.facts, strict=False):
            if fact["begins"]:
                begins.setdefault(uid, fact["begins"])
        return Pairing(tuple(zip(self.samples.sources, self.samples.uids, strict=True)), begins)


def output_folder(config: PPOConfig, model: EvaluatedModel) -> Path:
    """Returns RUN_DIR/eval/NAME, the folder of a model's evaluation unless another is named."""
    return Path(config.trainer.run_dir).absolute() / "eval" / name_in(config, model)


def name_in(config: PPOConfig, model: EvaluatedModel) -> str:
    """Names a model as this run does: with the name of its own run, where it has another."""
    run_dir = Path(config.trainer.run_dir).absolute()
    if model.run_dir is None or model.run_dir == run_dir:
        return model.name
    return f"{model.run_dir.name}_{model.name}"


def require_no_run(out: Path) -> None:
    """Raises ConfigError where a folder is a training run's, or has somebody else's config.yaml.

    Their files are not to be touched.
    """
    for folder in (out, *out.parents):
        if (folder / MANIFEST).is_file() and (folder / ACTOR).is_dir():
            raise ConfigError([f"--out {out} lies in the checkpoint {folder}: name another folder"])
    has_checkpoints = any((out / name).exists() for name in (LATEST, SAVED_STEPS))
    has_metrics = (out / "metrics.jsonl").exists() and not (out / RESULT).exists()
    if has_checkpoints or has_metrics or any(out.glob("global_step_*")):
        raise ConfigError(
            [f"--out {out} is the folder of a training run: name another, {out / 'eval'} say"]
        )
    settings = out / CONFIG
    if settings.exists() and not _is_of_evaluation(settings):
        raise ConfigError(
            [f"--out {out} has a config.yaml that no evaluation wrote: name another folder"]
        )


def _is_of_evaluation(settings: Path) -> bool:
    """Checks whether a config.yaml is that of an evaluation, which trains nothing."""
    try:
        found = flat_settings(read_plain_text(settings, errors="replace"))
    except (OSError, ValueError, YAMLError):
        return False
    return found.get("trainer.val_only") is True


def evaluate_model(
    config: PPOConfig,
    model: EvaluatedModel,
    out: Path,
    *,
    step: int | None = None,
    signals: EndingSignals | None = None,
    **objects: Any,
) -> Evaluation:
    """Plays and scores the validation tasks with a model; episodes go to OUT/episodes.

    Args:
        config: a training's; see `evaluation_config`.
        step: that seeds sampling, as a training's validation at that step has it; None: the
            model's own.
        signals: are not listened to any more once the workers are shut down.
    Raises:
        ConfigError: `out` has files that are not an evaluation's.
        objects: arguments of the trainer's, as of `build_trainer`.
    """
    require_no_run(out)
    trainer = _build_trainer(evaluation_config(config, model, out), model, objects)
    try:
        trainer.global_steps = model.step if step is None else step
        _require_vocabulary(trainer, model)
        _require_rows(trainer)
        trainer.init_workers()
        # Those of an earlier evaluation may be of another model, and of its tokenizer.
        _set_records_aside(out)
        set_result_aside(out)
        write_atomically(out / CONFIG, to_yaml(trainer.config))
        engines: Any = trainer.rollout_wg
        engines.load_weights(model.weights)
        evaluation = _play(trainer, model)
        # Gives the device's memory back, which another model may need.
        engines.sleep_rollout()
    except Exception as error:
        _require_still_there(model, error)
        raise
    finally:
        if signals is not None:
            signals.close()
        trainer.shutdown()
    del trainer, engines
    gc.collect()
    return evaluation


def set_result_aside(out: Path) -> None:
    """Renames the result of an earlier evaluation to FILE.old.

    One that is broken off leaves none then, in place of another model's.
    """
    for name in (RESULT, METRICS_FILE):
        with suppress(FileNotFoundError):
            (out / name).replace(out / f"{name}.old")


def _set_records_aside(out: Path) -> None:
    """Moves the records of an earlier evaluation out of the way, where records are a feature."""
    if "records" not in features():
        return
    from features.records.feature import set_records_aside

    set_records_aside(out / "episodes")


def _build_trainer(
    config: PPOConfig, model: EvaluatedModel, objects: Mapping[str, Any]
) -> RayPPOTrainer:
    """Builds a trainer that has an engine, and a reward model where rewards need one."""
    roles: dict[Role, type] = {Role.ActorRollout: EvaluationWorker}
    if config.reward_model.enable:
        roles[Role.RewardModel] = RewardModelWorker
    try:
        return build_trainer(config, role_worker_mapping=roles, **objects)
    except Exception as error:
        _require_still_there(model, error)
        raise


def _require_still_there(model: EvaluatedModel, error: Exception) -> None:
    """Raises CannotUse where a run that goes on has removed the checkpoint meanwhile."""
    if model.run_dir is not None and not Path(model.weights.folder).exists():
        raise CannotUse(
            f"{model.given}: step {model.step} is gone: its run has removed it for newer ones, or "
            "somebody else has. Evaluate again, or let the run keep more "
            "(trainer.max_actor_ckpt_to_keep, trainer.save_freq)"
        ) from error


def _play(trainer: RayPPOTrainer, model: EvaluatedModel) -> Evaluation:
    """Plays and scores the validation's tasks; they are seeded as of the trainer's step."""
    begun = time.monotonic()
    samples = play_validation(trainer)
    seconds = time.monotonic() - begun
    metrics = samples.metrics(trainer.seed)
    facts: list[Mapping[str, Any]] = []
    if isinstance(trainer, AgentTrainer):
        facts += trainer.multi_turn_rollout.take_facts(validate=True)
        metrics |= validation_endings(facts, trainer.suite.names)
    return Evaluation(
        model=model,
        config=trainer.config,
        samples=samples,
        facts=facts,
        step=trainer.global_steps,
        seconds=seconds,
        metrics=metrics,
    )


def _require_rows(trainer: RayPPOTrainer) -> None:
    """Raises ConfigError where the validation set is empty."""
    loader: Any = trainer.val_dataloader
    if loader is None or len(loader.dataset) == 0:
        raise ConfigError(
            ["there is nothing to evaluate on: data.val_files hold no row that fits the prompts"]
        )


def _require_vocabulary(trainer: RayPPOTrainer, model: EvaluatedModel) -> None:
    """Raises ConfigError where the tokenizer has tokens that the model does not know."""
    from transformers import AutoConfig

    settings = trainer.config.actor_rollout_ref.model
    entries = AutoConfig.from_pretrained(
        settings.path, trust_remote_code=settings.trust_remote_code, **settings.override_config
    )
    known = entries.get_text_config().vocab_size
    tokens = trainer.tokenizer.vocab_size
    if tokens > known:
        raise ConfigError(
            [
                f"{model.given}: its tokenizer has {tokens} tokens, the model knows {known}: "
                "the tokenizer is another model's; save the right one into the folder"
            ]
        )


def write_evaluation(
    evaluation: Evaluation, out: Path, *, pass_reward: float = PASS_REWARD
) -> dict[str, Any]:
    """Writes eval.json and metrics.jsonl; returns what the first one holds.

    Args:
        pass_reward: an episode passes from this reward on.
    """
    samples = evaluation.samples
    rollout = evaluation.config.actor_rollout_ref.rollout
    summary = summarise(samples, evaluation.facts, pass_reward)
    metrics = evaluation.metrics | score_metrics(summary["sources"])
    result = {
        "model": evaluation.model.given,
        "weights": asdict(evaluation.model.weights),
        "step": evaluation.model.step,
        "seed": evaluation.config.data.run_seed,
        "seeded_as_step": evaluation.step,
        "engine": rollout.name,
        "sampling": asdict(rollout.val_kwargs),
        "seconds": round(evaluation.seconds, 3),
        "tokens_per_second": round(sum(samples.tokens) / max(evaluation.seconds, 1e-9), 1),
        **summary,
        "metrics": metrics,
    }
    write_json(out / RESULT, result)
    file = LineFile(out / METRICS_FILE, 0, read_records)
    file.append(as_record(metrics, evaluation.model.step))
    file.close()
    return result


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a file of JSON, so that a reader finds the old one or the new one.

    Numbers that are not finite are words, as in metrics.jsonl: JSON has none for them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_with_words(result), indent=1, default=str, allow_nan=False)
    write_atomically(path, text + "\n")


def _with_words(value: Any) -> Any:
    """Returns a JSON value whose numbers that are not finite are words."""
    if isinstance(value, Mapping):
        return {key: _with_words(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_with_words(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value
