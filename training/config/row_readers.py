"""What of a run's settings makes a gradient depend on how an episode is cut into rows.

An episode has several rows where its history was cut, rewritten or branched. With
`actor.loss_agg_counts=episodes` its gradient is that of the same turns in any other rows; settings
that read rows, and not episodes or tokens, cannot keep this, and are refused: by the config where a
run's episodes will have several rows, else at the first batch with such an episode
(`StepPhases.arrange`). With `loss_agg_counts=rows` each row counts by itself, and nothing is
refused.
"""

from collections.abc import Iterator

from training.config.schema.actor import ActorConfig
from training.config.schema.critic import CriticConfig
from training.config.schema.ppo import PPOConfig
from training.core_algos.built_in import ESTIMATORS_THAT_READ_ROWS, LOSSES_THAT_READ_ROWS

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


def row_reader_sentences(config: PPOConfig, who: str) -> Iterator[str]:
    """Yields a sentence for each setting that reads rows; none with `loss_agg_counts=rows`.

    Args:
        who: what the sentence begins with: that there are episodes of several rows.
    """
    if config.actor_rollout_ref.actor.loss_agg_counts == "rows":
        return
    for setting, reason in _row_readers(config):
        why, _, fix = reason.partition("; ")
        fixes = f"{fix}, or set" if fix else "set"
        yield (
            f"{who}, and {setting} {why}: the gradient would depend on how an episode is cut into "
            f"rows; {fixes} {ACTOR}.loss_agg_counts=rows, with which each row counts by itself"
        )


def _row_readers(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """Yields each setting that reads rows, with `why; what to do`."""
    yield from _estimators(config)
    yield from _losses(config)
    if config.algorithm.rollout_correction.bypass_mode:
        yield from _corrections_in_the_loss(config)
    yield from _shuffled_updates(config)
    coefficient = config.agent.observation_loss_coef
    if coefficient:
        yield (
            f"agent.observation_loss_coef={coefficient}",
            "learns what was observed inside a row, and not what a row begins with; set it to 0",
        )
    if config.algorithm.use_pf_ppo:
        yield "algorithm.use_pf_ppo=true", "draws rows and not episodes; set it to false"


def _estimators(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """Yields the estimator, or the one of distillation's task."""
    algorithm = config.algorithm
    chosen = {"algorithm.adv_estimator": algorithm.adv_estimator}
    if algorithm.adv_estimator == "on_policy_distillation" and algorithm.distillation_task:
        chosen["algorithm.distillation_task"] = algorithm.distillation_task
    for key, name in chosen.items():
        if name in ESTIMATORS_THAT_READ_ROWS:
            yield f"{key}={name}", ESTIMATORS_THAT_READ_ROWS[name]


def _losses(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """Yields the policy loss; gspo's ratio of a row is 1 where a step has a single update."""
    name = config.loss_mode
    setting = f"{ACTOR}.policy_loss.loss_mode={name}"
    if name in LOSSES_THAT_READ_ROWS:
        yield setting, LOSSES_THAT_READ_ROWS[name]
    actor = config.actor_rollout_ref.actor
    if name == "gspo" and actor.ppo_epochs * _mini_batches(actor, config) > 1:
        yield (
            setting,
            "clips the ratio of a row behind a step's first update; set "
            f"{ACTOR}.ppo_epochs=1 and ppo_mini_batch_size=null, or take vanilla",
        )


def _corrections_in_the_loss(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """Yields what bypass_mode corrects, which it does row by row, a micro-batch at a time."""
    correction = config.algorithm.rollout_correction
    fix = "set bypass_mode=false, which corrects whole episodes, or leave it out"
    if correction.loss_type == "reinforce":
        if correction.rollout_is == "sequence":
            yield f"{CORRECTION}.rollout_is=sequence", f"weighs a row in bypass_mode; {fix}"
        if correction.rollout_is and correction.rollout_is_batch_normalize:
            yield (
                f"{CORRECTION}.rollout_is_batch_normalize=true",
                f"divides by a micro-batch's mean in bypass_mode; {fix}",
            )
    if correction.rollout_token_veto_threshold is not None:
        yield (
            f"{CORRECTION}.rollout_token_veto_threshold={correction.rollout_token_veto_threshold}",
            f"leaves a row out in bypass_mode; {fix}",
        )
    # What is left of each episode is then counted in its rows.
    averages = config.actor_rollout_ref.actor.aggregation == "seq-mean-token-mean"
    if correction.rollout_rs and (averages or "seq_" in correction.rollout_rs):
        yield (
            f"{CORRECTION}.rollout_rs={correction.rollout_rs}",
            f"leaves tokens out by the row in bypass_mode; {fix}",
        )


def _shuffled_updates(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """Yields a model whose mini-batches are cut by rows, through the midst of episodes."""
    models: dict[str, ActorConfig | CriticConfig] = {ACTOR: config.actor_rollout_ref.actor}
    if config.need_critic:
        models["critic"] = config.resolved_critic
    for key, model in models.items():
        mini_batches = _mini_batches(model, config)
        if model.shuffle and mini_batches > 1:
            yield (
                f"{key}.shuffle=true",
                f"cuts {mini_batches} mini-batches by rows, through the midst of episodes; set it "
                "to false",
            )


def _mini_batches(model: ActorConfig | CriticConfig, config: PPOConfig) -> int:
    """Counts the mini-batches of a step, also where they do not divide it, which others say."""
    prompts = config.prompts_per_step
    return prompts // min(model.ppo_mini_batch_size or prompts, prompts)
