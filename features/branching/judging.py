"""Judges estimators on one's own environment: python main.py CONFIG.yaml --judge-credit CHECKPOINT.

    batch of episodes, as training plays it     each estimator's advantages
      each turn's state continued k times       credit measured by two halves
        judged.jsonl, a line a batch      ->    table, page, one sentence

Invariant: weights never change; what was judged is on disk before the next batch is played, so that
a court that was killed goes on where it stood, with the same numbers.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.protocol import DataProto
from data.watchdog import watching
from features.branching.court import Court
from features.branching.credit import BranchedEpisode, JudgedTurns
from features.branching.files import PAGE, RESULT
from features.branching.judged import JudgedBatch, judge_batch
from features.branching.judged_file import append, read_judged
from features.branching.judging_page import write_page
from features.branching.judging_words import (
    LEAST_GROUPS,
    WantedCourt,
    judging_config,
    name_that_needs,
)
from features.branching.settings import BranchingSettings
from training.building import build_trainer
from training.config import PPOConfig
from training.config.checks import check_config
from training.config.loader import ConfigError
from training.config.resources.user_code import load_custom_algorithm
from training.core_algos import estimator_needs, get_adv_estimator_fn, register_adv_est
from training.features import features
from training.ray_trainer import RayPPOTrainer
from training.run.abort_policy import EnvironmentsFail
from training.run.checkpoint_contents import CRITIC
from training.run.files import write_atomically
from training.run.leftovers import ends_leftovers
from training.run.named_model import CannotUse, find_named_model
from training.run.recorded_config import record_config
from training.run.run_lock import is_held
from training.run.signals import EndingSignals

logger = logging.getLogger(__name__)


def judge_credit(config: PPOConfig, wanted: WantedCourt, signals: EndingSignals) -> int:
    """Judges the estimators, prints a table and a sentence; returns the exit code.

    Raises:
        ConfigError, CannotUse: it cannot be done; says what to do.
    """
    trained_by = config.algorithm.adv_estimator
    needs = _require_estimators(config, wanted)
    config, checkpoint = _find_weights(config, wanted, needs)
    asked = config
    out = _output_folder(config, wanted, checkpoint)
    register_adv_est(name_that_needs(needs), needs=needs)(_rewards)
    config = judging_config(config, wanted, out, checkpoint, needs)
    problems = [*check_config(config), *_court_problems(config, wanted, out)]
    if problems:
        raise ConfigError(problems)
    # By this its episodes can be played again.
    record_config(out, asked, 0)
    try:
        batches = _play(config, wanted, out, signals, trained_by)
    except EnvironmentsFail as error:
        print(f"{error}\n0 of {wanted.episodes} episodes were branched", file=sys.stderr)
        return 1
    return _tell(config, wanted, batches, out)


def _rewards(token_level_rewards: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Stands for all estimators that are judged: it is asked what they need, and trains nothing."""
    return token_level_rewards, token_level_rewards


def _require_estimators(config: PPOConfig, wanted: WantedCourt) -> tuple[str, ...]:
    """Returns all that the estimators read.

    Raises:
        ConfigError: one is unknown, or what the config adds to rewards no continuation has.
    """
    if config.custom_algorithm:
        load_custom_algorithm(config.custom_algorithm)
    problems = []
    needs: dict[str, None] = {}
    for name in wanted.estimators:
        try:
            get_adv_estimator_fn(name)
        except ValueError as error:
            problems.append(f"--estimators {name}: {error}")
        needs |= dict.fromkeys(estimator_needs(name))
    if config.algorithm.use_kl_in_reward:
        problems.append(
            "algorithm.use_kl_in_reward=true puts a KL into the rewards that estimators see, and "
            "continuations have none: set it to false"
        )
    if problems:
        raise ConfigError(problems)
    return tuple(needs)


def _court_problems(config: PPOConfig, wanted: WantedCourt, out: Path) -> Iterator[str]:
    """Yields that the court would have too few tasks, or that its folder is another's."""
    tasks = _batches_of(config, wanted) * config.prompts_per_step
    if tasks < LEAST_GROUPS:
        n = config.actor_rollout_ref.rollout.n
        yield (
            f"--episodes {wanted.episodes}, {n} of each task (rollout.n), are of {tasks} tasks, "
            f"and the intervals need {LEAST_GROUPS}: give --episodes {LEAST_GROUPS * n} or more"
        )
    if (out / "metrics.jsonl").exists() or any(out.glob("global_step_*")):
        yield f"--out {out} is the folder of a training run: name another, {out / 'credit'} say"
    if is_held(out):
        yield f"{out} is held by a court at work: wait for its end, or name another with --out"


def _batches_of(config: PPOConfig, wanted: WantedCourt) -> int:
    """Counts the batches that have the episodes that are wanted, at least."""
    return -(-wanted.episodes // (config.prompts_per_step * config.actor_rollout_ref.rollout.n))


def _find_weights(
    config: PPOConfig, wanted: WantedCourt, needs: Sequence[str]
) -> tuple[PPOConfig, Path | None]:
    """Finds what is judged: a checkpoint, or a model as it is.

    Raises:
        CannotUse: there is none, or estimators read values and it has no critic.
    """
    named = find_named_model(wanted.model)
    if named.kind != "checkpoint":
        from training.config.leaves import build

        return build(config, {"actor_rollout_ref.model.path": named.path}), None
    checkpoint = Path(named.path)
    has_critic = (checkpoint / CRITIC).exists() or config.critic.share_backbone
    if "values" in needs and not has_critic:
        readers = [name for name in wanted.estimators if "values" in estimator_needs(name)]
        raise CannotUse(
            f"{wanted.model} has no critic, whose values {', '.join(readers)} would read: leave "
            "these out of --estimators, or name a checkpoint of a run with a critic"
        )
    return config, checkpoint


def _output_folder(config: PPOConfig, wanted: WantedCourt, checkpoint: Path | None) -> Path:
    """Returns the folder of the results: OUT, or RUN_DIR/credit/NAME."""
    if wanted.out is not None:
        return wanted.out.absolute()
    name = Path(wanted.model).name if checkpoint is None else checkpoint.name
    return Path(config.trainer.run_dir).absolute() / "credit" / name


# Playing


def _play(
    config: PPOConfig,
    wanted: WantedCourt,
    out: Path,
    signals: EndingSignals,
    trained_by: str,
) -> list[JudgedBatch]:
    """Plays and judges batches until there are enough episodes; tells what they cost.

    Args:
        trained_by: the estimator of the run, of which the checkpoint has the state.
    """
    batches = read_judged(config, wanted, out)
    count = _batches_of(config, wanted)
    size = config.prompts_per_step * config.actor_rollout_ref.rollout.n
    _tell_cost_before(config, wanted, count * size)
    if len(batches) >= count:
        return batches[:count]
    name = "driver" if config.trainer.use_ray else "rank_0"
    with ends_leftovers(), watching(config.trainer.stall_timeout_s, out / "stalls", name):
        trainer = build_trainer(config, observers=())
        try:
            trainer.init_workers()
            trainer.load_checkpoint()
            first_step = trainer.global_steps + 1
            kept = dict(trainer.phases.estimator_state)
            for number in range(count):
                rows = trainer.row_stream.draw(first_step + number)
                if number < len(batches):
                    continue
                states = batches[-1].states if batches else {trained_by: kept}
                batch = _play_batch(trainer, rows, first_step + number, wanted, out, states)
                batches.append(batch)
                append(batch, out)
                _tell_cost_so_far(batches, count)
        finally:
            signals.close()
            trainer.shutdown()
    return batches


def _play_batch(
    trainer: RayPPOTrainer,
    rows: Any,
    step: int,
    wanted: WantedCourt,
    out: Path,
    states: Mapping[str, Mapping[str, Any]],
) -> JudgedBatch:
    """Plays a batch as the training's step would, and judges the estimators on it.

    Args:
        states: of estimators, behind the batch before.
    """
    trainer.sync_weights()
    batch, _ = trainer.generate(rows, step)
    _write_records(batch, out, trainer.tokenizer)
    return judge_batch(trainer, batch, wanted.estimators, wanted.samples, states)


def _write_records(batch: DataProto, out: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the batch's episodes to OUT/episodes, where records are a feature."""
    if "records" not in features():
        return
    from features.records.feature import write_episodes

    write_episodes(out / "episodes", batch, tokenizer)


# Telling


def _tell_cost_before(config: PPOConfig, wanted: WantedCourt, episodes: int) -> None:
    """Says what the court will cost at most."""
    turns = config.agent.max_turn
    response = config.data.max_response_length
    turn_tokens = min(config.agent.max_turn_tokens or response, response)
    samples = config.section(BranchingSettings).samples
    own = min(response, turns * turn_tokens)
    # A continuation from turn t has the turns from there on.
    of_branches = samples * sum(min(own, (turns - turn) * turn_tokens) for turn in range(turns))
    print(
        f"{episodes} episodes of at most {turns} turns, {samples} continuations of each turn's "
        f"state: at most {episodes * (own + of_branches):,} sampled tokens, of which "
        f"{episodes * own:,} are the episodes' own",
        flush=True,
    )


def _tell_cost_so_far(batches: Sequence[JudgedBatch], count: int) -> None:
    """Says what was sampled, and about how much the whole court will have sampled."""
    own = sum(batch.own_tokens for batch in batches)
    branches = sum(batch.branch_tokens for batch in batches)
    prefilled = sum(batch.prefilled_tokens for batch in batches)
    about = (own + branches) * count // len(batches)
    ahead = f", about {about:,} in all" if len(batches) < count else ""
    print(
        f"batch {len(batches)} of {count}: {own + branches:,} tokens sampled{ahead}, "
        f"{branches:,} of them by continuations; {prefilled:,} prefilled",
        flush=True,
    )


def _tell(config: PPOConfig, wanted: WantedCourt, batches: Sequence[JudgedBatch], out: Path) -> int:
    """Prints and writes the court; returns the exit code."""
    entries = [entry for batch in batches for entry in batch.episodes]
    left_out: dict[str, int] = {}
    for batch in batches:
        for reason, times in batch.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + times
    for reason, times in left_out.items():
        print(f"left out: {times} episodes: {reason}", flush=True)
    groups = {entry["group"] for entry in entries}
    if len(groups) < LEAST_GROUPS:
        print(
            f"{len(entries)} episodes of {len(groups)} tasks can be judged, and the intervals need "
            f"{LEAST_GROUPS} tasks: give more --episodes, or mend what left them out",
            file=sys.stderr,
        )
        return 1
    dropped = sum(batch.dropped for batch in batches)
    if dropped:
        played = sum(batch.continuations for batch in batches)
        print(f"left out: {dropped} of {played} continuations, by the failure policy", flush=True)
    failed = _told_failures(batches)
    names = [name for name in wanted.estimators if name not in failed]
    if not names:
        print("no estimator can be judged: mend one of them", file=sys.stderr)
        return 1
    turns = JudgedTurns.of(
        [BranchedEpisode(**entry) for entry in entries], config.algorithm.turn_gamma
    )
    credits = {
        name: np.concatenate([np.array(batch.credit[name], np.float64) for batch in batches])
        for name in names
    }
    court = Court.of(turns, credits)
    truth = truth_of(config)
    print(f"\n{court.table()}\n\n{court.sentence()}\n{truth}")
    result = _result(court, batches, left_out, failed, truth)
    write_atomically(out / RESULT, json.dumps(result, indent=1))
    write_page(out / PAGE, court, batches, truth)
    if _make_viewer(out):
        from features.viewer.feature import episode_address

        write_page(out / PAGE, court, batches, truth, episode_address)
    print(f"  {out / PAGE}\n  {out / RESULT}", flush=True)
    return 0


def _told_failures(batches: Sequence[JudgedBatch]) -> dict[str, str]:
    """Prints which estimators failed in any batch; returns the first reason of each."""
    failed: dict[str, str] = {}
    for batch in batches:
        failed |= {name: why for name, why in batch.failed.items() if name not in failed}
    for name, why in failed.items():
        times = sum(name in batch.failed for batch in batches)
        reason = why.partition("\n")[0]
        print(f"not judged: {name}: it failed in {times} of {len(batches)} batches: {reason}")
    return failed


def truth_of(config: PPOConfig) -> str:
    """Says which truth the continuations measured."""
    if config.section(BranchingSettings).luck == "fresh":
        return (
            "The truth is a turn's credit on its task, on average over the environment's luck to "
            "come (branching.luck=fresh)."
        )
    return (
        "The truth is a turn's credit on its task with the luck that the episode had: the "
        "environment's draws to come are those of the episode (branching.luck=same)."
    )


def _result(
    court: Court,
    batches: Sequence[JudgedBatch],
    left_out: Mapping[str, int],
    failed: Mapping[str, str],
    truth: str,
) -> dict[str, Any]:
    """Returns what credit.json holds."""
    return {
        "sentence": court.sentence(),
        "truth": truth,
        "turns": len(court.turns),
        "episodes": len(court.turns.episode_names),
        "tasks": len(court.turns.group_names),
        "left_out": dict(left_out),
        "failed": dict(failed),
        "continuations": sum(batch.continuations for batch in batches),
        "continuations_left_out": sum(batch.dropped for batch in batches),
        "sampled_tokens": sum(batch.own_tokens + batch.branch_tokens for batch in batches),
        "tokens_of_continuations": sum(batch.branch_tokens for batch in batches),
        "prefilled_tokens": sum(batch.prefilled_tokens for batch in batches),
        "estimators": {
            judged.estimator: {
                name: [str(number) for number in vars(interval).values()]
                for name, interval in vars(judged.agreement).items()
            }
            for judged in court.judgements
        },
    }


def _make_viewer(out: Path) -> bool:
    """Makes the viewer of the court's episodes, where that is a feature; says whether it did."""
    if not {"records", "viewer"} <= features().keys():
        return False
    from features.viewer.feature import make_viewer

    problem = make_viewer(out)
    if problem:
        print(f"the court has no viewer of its episodes: {problem}", file=sys.stderr)
    return not problem
