"""Finds what a well-typed configuration can still get wrong, before any model is loaded.

Every problem names the key, its value and the fix; no check keeps another from running. Here are combinations and
names; bounds are in the types of settings, and `resources` looks at what a configuration needs outside itself.
"""

import importlib.util
import inspect
import logging
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from data.loading import load_extern_object
from data.texts import say, say_where
from training.config import resources
from training.config.algorithm_settings import (
    OF_ONE_GROUP,
    OF_TOKENS,
    MicroBatching,
    estimator_needs,
)
from training.config.settings import ActorConfig, CriticConfig, EnvironmentHome, PPOConfig

log = logging.getLogger(__name__)
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def check_config(config: PPOConfig, *, ask_hub: bool = True, own_data: bool = False) -> list[str]:
    """Returns all problems of a config; none where it can run here.

    Args:
        ask_hub: also check models that are no local folders.
        own_data: datasets and environments are given as objects.
    """
    # Each begins where the one before it ends: what a user's file registers is known to those that follow.
    own = (
        _algorithm(config),
        _batch_sizes(config),
        _token_budgets(config),
        _combinations(config, own_data),
    )
    there = (
        resources.check_ranks,
        resources.check_files,
        resources.check_classes,
        resources.check_agents,
    )
    found = [problem for problems in own for problem in problems]
    found += [
        problem
        for check in (_trackers, _by_group, _reward, _checkpoints, *there)
        for problem in check(config)
    ]
    # Actor and critic may have the same.
    return list(dict.fromkeys([*found, *resources.check_models(config, ask_hub)]))


def load_custom_algorithm(path: str) -> None:
    """Runs the file that registers a user's estimators and losses; once per process, however often it is called."""
    # Any name will do: running the file is what registers.
    load_extern_object(path, "__name__")


def _updated(config: PPOConfig) -> dict[str, ActorConfig | CriticConfig]:
    """Lists the models that the run updates, with what the critic takes over from the actor filled in."""
    return {ACTOR: config.actor_rollout_ref.actor} | (
        {"critic": config.resolved_critic} if config.need_critic else {}
    )


def _batch_sizes(config: PPOConfig) -> Iterator[str]:
    """Requires that a step's prompts divide into mini-batches, those over ranks, and those into micro-batches."""
    actor, prompts, n = (
        config.actor_rollout_ref.actor,
        config.prompts_per_step,
        config.actor_rollout_ref.rollout.n,
    )
    # None where they do not divide, which is reported too.
    ranks, sharing = config.data_parallel_size or 1, actor.ulysses_sequence_parallel_size
    among = f"{ranks} " + (
        "ranks" if sharing == 1 else f"groups of {sharing} ranks that share sequences"
    )
    own = config.environments and config.agent.agent_length
    step = (
        f"agent.agent_length={own}"
        if own
        else f"data.train_batch_size={config.data.train_batch_size}"
    )
    for section, model in _updated(config).items():
        given = model.ppo_mini_batch_size
        told, size = (
            (step, prompts) if given is None else (f"{section}.ppo_mini_batch_size={given}", given)
        )
        larger, smaller = sorted((size, actor.ppo_mini_batch_size or prompts), reverse=True)
        if larger % smaller:
            yield say("do_not_nest", actor=actor.ppo_mini_batch_size, critic=given)
        if prompts % size:
            yield f"{step} must be a multiple of {told}: a step is cut into equal mini-batches"
        rows, most = size * n // ranks, model.micro_batching.micro_batch_size
        if size * n % ranks:
            yield f"{told} x rollout.n={n} = {size * n} rows do not divide among {among}"
        elif most and rows % most:
            yield say(
                "rows_of_rank", section=section, size=most, rows=rows, given=told, n=n, ranks=among
            )


def _token_budgets(config: PPOConfig) -> Iterator[str]:
    """Requires that every pass is cut by tokens or by rows, and that a token budget holds at least one full row."""
    passes = {f"{key}.ppo": model.micro_batching for key, model in _updated(config).items()}
    passes[f"{ROLLOUT}.log_prob"] = config.actor_rollout_ref.log_prob_micro_batching
    if config.need_reference:
        passes["actor_rollout_ref.ref.log_prob"] = config.actor_rollout_ref.ref_micro_batching
    for key, micro in passes.items():
        if micro.max_token_len is not None and micro.max_token_len < config.data.row_length:
            yield say(
                "small_budget", key=key, tokens=micro.max_token_len, row=config.data.row_length
            )
        if micro == MicroBatching():
            yield f"{key}_micro_batch_size_per_gpu=null: give a number of rows, or use_dynamic_bsz=true"


def _by_group(config: PPOConfig) -> Iterator[str]:
    """Requires, to train on groups one by one, that no number but the last counts is of the whole batch."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    correction = config.with_correction.algorithm.rollout_correction
    of_correction = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold", "bypass_mode")
    wrong = {
        f"algorithm.rollout_correction.{name}": bool(correction[name]) for name in of_correction
    } | {
        "algorithm.adv_estimator": algorithm.adv_estimator not in OF_ONE_GROUP,
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "algorithm.use_pf_ppo": algorithm.use_pf_ppo,
        "algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        "agent.observation_loss_coef": config.agent.observation_loss_coef > 0,
        "critic.enable": bool(config.critic.enable),
        "trainer.async_level": config.trainer.async_level > 0,
        f"{ACTOR}.ppo_epochs": (actor.ppo_epochs or 1) > 1,
        f"{ACTOR}.ppo_mini_batch_size": actor.ppo_mini_batch_size
        not in (None, config.prompts_per_step),
        f"{ACTOR}.fsdp_config.param_offload": actor.fsdp_config.param_offload,
        f"{ACTOR}.policy_loss.loss_mode": config.loss_mode not in OF_TOKENS,
    }
    if config.trainer.train_finished_groups and (
        keys := [key for key, is_wrong in wrong.items() if is_wrong]
    ):
        given = ", ".join(f"{key}={attrgetter(key)(config)}" for key in keys)
        yield say(
            "not_by_group",
            given=given,
            estimators=", ".join(OF_ONE_GROUP),
            losses=", ".join(OF_TOKENS),
        )


def _combinations(config: PPOConfig, own_data: bool) -> Iterator[str]:
    """Requires that settings have what they need, and do not contradict each other."""
    policy, algorithm, trainer, agent = (
        config.actor_rollout_ref,
        config.algorithm,
        config.trainer,
        config.agent,
    )
    rollout, actor, scorer, data = policy.rollout, policy.actor, config.reward_model, config.data
    val, needs = rollout.val_kwargs, config.estimator_needs
    correction = config.with_correction.algorithm.rollout_correction
    acts, vllm, resumes = (
        bool(config.environments),
        rollout.name == "vllm",
        trainer.resume_mode == "resume_path",
    )
    nothing_to_validate = not (own_data or data.val_files or (acts and agent.val_length))
    buffer, needs_teacher = (
        scorer.overlong_buffer,
        algorithm.adv_estimator == "on_policy_distillation",
    )
    # What is passed on wins: vLLM itself judges it.
    passed_on = {"max_num_batched_tokens", "max_num_seqs"} & rollout.engine_kwargs.get(
        "vllm", {}
    ).keys()
    sglang = rollout.name == "sglang" and not rollout.engine_kwargs.get("sglang", {}).get(
        "base_url"
    )
    given = {
        name
        for entry in config.env_template
        for name, value in vars(entry).items()
        if value is not None
    }
    for_all = ", ".join(given & {*EnvironmentHome._fields})
    adapts = vllm and not trainer.rollout_n_gpus
    wrong = {
        "no_sampling": rollout.temperature == 0,
        "val_temperature": val.do_sample and val.temperature == 0,
        "short_context": config.max_model_len < data.row_length,
        "two_lengths": rollout.response_length not in (None, data.max_response_length),
        "no_vllm": vllm and importlib.util.find_spec("vllm") is None,
        "few_tokens": vllm
        and rollout.max_num_batched_tokens < rollout.max_num_seqs
        and not passed_on,
        "no_gdpo_keys": algorithm.adv_estimator == "gdpo" and not algorithm.gdpo_reward_keys,
        "gdpo_weights": len(algorithm.gdpo_reward_weights)
        not in (0, len(algorithm.gdpo_reward_keys)),
        "no_values": "values" in needs and not config.need_values,
        "values_unread": config.critic.share_backbone and not config.need_values,
        "two_backbones": config.critic.share_backbone
        and config.critic.model.path not in (None, policy.model.path),
        "no_dro_beta": config.loss_mode == "dro" and actor.policy_loss.dro_beta is None,
        "bypass_elsewhere": config.loss_mode == "bypass_mode" and not correction.bypass_mode,
        "no_engine_log_probs": (correction.corrects or correction.bypass_mode)
        and not rollout.calculate_log_probs,
        "bypassed_loss": correction.bypass_mode
        and actor.policy_loss.loss_mode not in ("vanilla", "bypass_mode"),
        "bypassed_pass": correction.bypass_mode
        and (algorithm.use_kl_in_reward or "sum_pi_squared" in needs),
        "no_resume_path": resumes and trainer.resume_from_path is None,
        "no_resume_folder": resumes and not Path(trainer.resume_from_path or ".").is_dir(),
        "no_critic_to_warm": trainer.critic_warmup > 0 and not config.need_critic,
        "val_only_of_nothing": trainer.val_only and nothing_to_validate,
        "test_freq_of_nothing": trainer.test_freq > 0 and nothing_to_validate,
        "critic_exported": "hf_model" in config.critic.checkpoint.save_contents,
        "no_sglang": sglang and importlib.util.find_spec("sglang") is None,
        "no_peft": policy.model.lora_rank > 0 and importlib.util.find_spec("peft") is None,
        "no_adapters": rollout.lora_as_adapter and not (adapts and policy.model.lora_rank),
        "no_teacher": needs_teacher and not (policy.ref.model.path or algorithm.distillation_task),
        "observes_nothing": agent.observation_loss_coef and not acts,
        "overlong_buffer": buffer.enable and not 0 < buffer.len <= data.max_response_length,
        "no_reward_model": scorer.enable and scorer.model.path is None,
        "no_raw_chat": scorer.enable
        and scorer.model.input_tokenizer
        and (acts or not data.return_raw_chat),
        "no_model": policy.model.path is None,
        "no_train_files": not (own_data or acts or data.train_files),
        "no_environment": not (own_data or acts) and agent.tools,
        "one_for_all": for_all,
    }
    source = "agent.val_length" if acts else "data.val_files"
    yield from say_where(wrong, config=config, source=source, for_all=for_all)


def _trackers(config: PPOConfig) -> Iterator[str]:
    """Requires that the package of one logger is there; the others may be missing, with a warning."""
    lacking = " ".join(
        name for name in config.trainer.logger if name not in config.trainer.trackers
    )
    if lacking and config.trainer.trackers:
        log.warning(say("tracker_left_out", lacking=lacking))
    elif lacking:
        yield say("no_tracker", lacking=lacking)


def _algorithm(config: PPOConfig) -> Iterator[str]:
    """Requires that loss, estimator and rollout correction exist, once the user's own are registered."""
    # Imports torch: late.
    import torch

    from training.core_algos import get_adv_estimator_fn, get_policy_loss_fn, taken
    from training.core_algos.policy_losses import correct_as

    algorithm, token = config.algorithm, torch.zeros(1, 1)
    correction = config.with_correction.algorithm.rollout_correction
    for problem in resources.refused(correct_as, correction, token, token, token + 1):
        yield f"algorithm.rollout_correction.{problem}"
    failure = (
        [*resources.user_file("custom_algorithm", config.custom_algorithm)]
        if config.custom_algorithm
        else []
    )
    yield from failure
    # What the file would have registered is not known.
    if failure:
        return
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    yield from (unknown := resources.refused(get_policy_loss_fn, mode))
    if (
        correction.rollout_is
        and not unknown
        and not taken(get_policy_loss_fn(mode), {"rollout_is_weights": None})
    ):
        yield say("unweighed_loss", mode=mode, rollout_is=correction.rollout_is)
    yield from resources.refused(get_adv_estimator_fn, algorithm.adv_estimator)
    if (task := algorithm.distillation_task) is not None:
        yield from resources.refused(get_adv_estimator_fn, task)
        if set(estimator_needs(task)) - {"index"}:
            yield f"algorithm.distillation_task={task} must be an estimator that compares a group's scores, as grpo"


def _reward(config: PPOConfig) -> Iterator[str]:
    """Requires that the scoring function loads, that the manager finds its needs, and that both take reward_kwargs.

    The function's file may register the manager, and a manager may hand its reward_kwargs on to the function.
    """
    # Imports torch: late.
    from custom.reward_manager import NaiveRewardManager, get_reward_manager_cls
    from custom.reward_score import default_compute_score

    custom, key, name = (
        config.custom_reward_function,
        "custom_reward_function",
        config.reward_model.reward_manager,
    )
    unusable = (
        [*resources.user_file(f"{key}.path", custom.path, f"{key}.name", custom.name)]
        if custom.path
        else []
    )
    unfit = resources.refused(get_reward_manager_cls, name)
    if not unfit and callable(check := getattr(get_reward_manager_cls(name), "check_config", None)):
        unfit = [*check(config)]
    yield from (*unusable, *unfit)
    if unusable or unfit:
        return
    manager, function, by = (
        get_reward_manager_cls(name),
        default_compute_score,
        "default_compute_score",
    )
    if custom.path is not None:
        function, by = load_extern_object(custom.path, custom.name), custom.name
        takes = inspect.signature(function).parameters.values()
        needed = [
            p.name for p in takes if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty
        ]
        if config.environments and len(set(needed) - custom.reward_kwargs.keys()) > 2:
            yield say("reward_takes", name=custom.name, needed=", ".join(needed))
        yield from resources.not_taken(f"{key}.reward_kwargs", by, takes, custom.reward_kwargs)
    filled = ("tokenizer", "num_examine", "compute_score", "reward_fn_key")
    own = [p for p in inspect.signature(manager).parameters.values() if p.name not in filled]
    if issubclass(manager, NaiveRewardManager) and any(p.kind is p.VAR_KEYWORD for p in own):
        own = [p for p in own if p.kind is p.KEYWORD_ONLY]
        own += inspect.signature(function).parameters.values()
    else:
        by = manager.__name__
    yield from resources.not_taken(
        "reward_model.reward_kwargs", by, own, config.reward_model.reward_kwargs
    )


def _checkpoints(config: PPOConfig) -> Iterator[str]:
    """Requires that a resumed run goes on with its weights, and that the run's folder can be made and written.

    What is to be read on resume must be written, the weights among it.
    """
    for key, model in _updated(config).items() if config.trainer.resume_mode != "disable" else ():
        load, save = model.checkpoint.load_contents, model.checkpoint.save_contents
        if not {"model"} <= {*load} <= {*save} - {"hf_model"}:
            yield say("not_resumed", key=key, load=", ".join(load), save=", ".join(save))
    key = "trainer.default_local_dir" + (
        "" if config.trainer.default_local_dir else "=null, so the run's folder"
    )
    yield from resources.unwritable(key, config.trainer.run_dir)
