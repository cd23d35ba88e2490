"""Reads verl's keys that say something of a run only together, and sets what they are here.

These are engines with ranks of their own, runs whose generation goes on while training runs, and a
teacher to distil from. Invariant: it runs after all layers, so that the order of keys does not
matter, and leaves a key of ours that is given and not at rest as it is.
"""

import math
from typing import Any

from features.verl.verl_keys import OWN_ENGINES
from training.config.layers import Layers

RANKS_OF_ENGINES = "trainer.rollout_n_gpus"
STEP_PROMPTS = "data.train_batch_size"
ESTIMATOR = "algorithm.adv_estimator"
DISTILLING = "on_policy_distillation"
DISTILLATION_LOSS = "distillation.distillation_loss"
# verl's defaults of async_training, which a script may leave out.
BATCHES_PER_SYNC = 4
UPDATES_PER_BATCH = 1


def set_runs_of_verl(layers: Layers) -> None:
    """Sets what verl's keys say together; adds a sentence for each, or a problem."""
    _set_ranks_of_engines(layers)
    _set_asynchronous_run(layers)
    _set_distillation(layers)


def _set_ranks_of_engines(layers: Layers) -> None:
    """Sets how many ranks the engines have beside the trainer's."""
    nodes = _number(layers, *OWN_ENGINES["nodes"])
    if nodes:
        # A value that is no number is reported where it is read.
        ranks_per_node = _number(layers, *OWN_ENGINES["ranks_per_node"]) or _number(
            layers, "trainer.n_gpus_per_node"
        )
        ranks = int(nodes * (ranks_per_node or 1))
        _set(layers, RANKS_OF_ENGINES, ranks, "verl's rollout.nnodes")
    shared = OWN_ENGINES["shared"]
    is_apart = any(str(layers.foreign_values.get(key)).lower() == "false" for key in shared)
    if is_apart and not nodes and _at_rest(layers, RANKS_OF_ENGINES):
        layers.problems.append(
            f"{shared[0]}=False gives engines ranks of their own: set how many, {RANKS_OF_ENGINES}"
        )


def _set_asynchronous_run(layers: Layers) -> None:
    """Sets the steps of a run that is asynchronous in verl's way.

    There a batch of ppo_mini_batch_size x require_batches prompts is trained on at a time, and
    weights are sent after trigger_parameter_sync_step of them: that many prompts are a step here.
    """
    source = "verl's async_training"
    staleness = _number(layers, "async_training.staleness_threshold")
    batches = _number(layers, "async_training.trigger_parameter_sync_step")
    updates = _number(layers, "async_training.require_batches")
    if staleness is None and batches is None and updates is None:
        return
    if staleness:
        _set(layers, "trainer.async_level", math.ceil(staleness), source)
    prompts_per_update = _number(layers, "actor_rollout_ref.actor.ppo_mini_batch_size")
    if prompts_per_update and not _number(layers, STEP_PROMPTS):
        batches = BATCHES_PER_SYNC if batches is None else batches
        updates = UPDATES_PER_BATCH if updates is None else updates
        _set(layers, STEP_PROMPTS, int(prompts_per_update * updates * batches), source)
    all_prompts = _number(layers, "rollout.total_rollout_steps")
    step_prompts = _number(layers, STEP_PROMPTS)
    if all_prompts and step_prompts:
        steps = max(1, int(all_prompts // step_prompts))
        _set(layers, "trainer.total_training_steps", steps, "verl's rollout.total_rollout_steps")


def _set_distillation(layers: Layers) -> None:
    """Sets the estimator that learns from a teacher, and the task's beside it."""
    source = "distillation.enabled=True"
    if not _is_true(layers, "distillation.enabled"):
        return
    task = layers.value_of(ESTIMATOR)
    if task == DISTILLING:
        return
    is_given = ESTIMATOR in layers.values
    layers.replace(ESTIMATOR, DISTILLING, source)
    rewards_count = layers.foreign_values.get(f"{DISTILLATION_LOSS}.use_task_rewards")
    if is_given and str(rewards_count).lower() != "false":
        _set(layers, "algorithm.distillation_task", task, source)
        weight = layers.foreign_values.get(f"{DISTILLATION_LOSS}.distillation_loss_coef")
        if weight is not None:
            layers.replace("algorithm.distillation_coef", weight, source)
    is_loss = str(layers.foreign_values.get(f"{DISTILLATION_LOSS}.use_policy_gradient")).lower()
    kl_kind = layers.foreign_values.get(f"{DISTILLATION_LOSS}.loss_mode")
    if is_loss == "false" or kl_kind not in (None, "k1", "kl"):
        layers.note(
            f"{DISTILLATION_LOSS}: here the teacher's log-ratio is each token's advantage, as with "
            "use_policy_gradient=true and loss_mode=k1, and no term of the loss",
            source,
        )


def _set(layers: Layers, key: str, value: Any, source: str) -> None:
    """Sets a key of ours that is at rest."""
    if _at_rest(layers, key):
        layers.replace(key, value, source)


def _at_rest(layers: Layers, key: str) -> bool:
    """Checks whether a key of ours has its default, 0 or null."""
    value = layers.value_of(key)
    return value == layers.schema[key].value or str(value).lower() in ("0", "none", "null", "")


def _number(layers: Layers, *keys: str) -> float | None:
    """Returns the number that was given for the first of the keys with one, of verl's or ours."""
    for key in keys:
        if key in layers.schema:
            value = layers.value_of(key)
        else:
            value = layers.foreign_values.get(key)
        try:
            number = float(str(value))
        except ValueError:
            continue
        if math.isfinite(number) and number >= 0:
            return number
    return None


def _is_true(layers: Layers, verl_key: str) -> bool:
    return str(layers.foreign_values.get(verl_key)).lower() == "true"
