"""Finds what a well-typed configuration can still get wrong, before any model is loaded.

Every problem names the key, its value and the fix; what merely looks unusual is a warning in the log. No check
keeps another from running. Here are bounds, combinations and names; `resources` looks at what a configuration needs
outside itself.
"""

import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data.loading import load_extern_object
from training.config import resources
from training.config.algorithm_settings import CustomRewardFunctionConfig
from training.config.batch_plan import MicroBatching
from training.config.needs import estimator_needs
from training.config.section import leaves
from training.config.settings import CheckpointConfig, PPOConfig
from training.config.texts import say

log = logging.getLogger(__name__)
Reader = Callable[[str], dict[str, Any]]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def check_config(
    config: PPOConfig, *, model_config_reader: Reader = resources.read_model_config, ask_hub: bool = True
) -> list[str]:
    """Returns all problems of a config; none where it can run here.

    Args:
        model_config_reader: model path -> its config.json as a dict.
        ask_hub: also check models that are no local folders.
    """
    return [
        *(f"{key}={leaf.value} must be {wanted}" for key, leaf in leaves(config) for wanted in leaf.wanted()),
        *_batch_sizes(config),
        *_token_budgets(config),
        *_sampling(config),
        *_engine(config),
        *_algorithm(config),
        *_losses(config),
        *_reward(config),
        *_steps(config),
        *_checkpoints(config),
        *resources.check_ranks(config),
        *_not_there_yet(config),
        *resources.check_files(config),
        *resources.check_classes(config),
        *resources.check_agents(config),
        *resources.check_models(config, model_config_reader, ask_hub),
    ]


def load_custom_algorithm(path: str) -> None:
    """Runs the file that registers a user's estimators and losses; once per process, however often it is called."""
    # Any name will do: running the file is what registers.
    load_extern_object(path, "__name__")


def _batch_sizes(config: PPOConfig) -> Iterator[str]:
    """Requires that a step's prompts divide into mini-batches, those over ranks, and those into micro-batches."""
    actor, critic = config.actor_rollout_ref.actor, config.resolved_critic
    yield from _mini_batches(config, ACTOR, actor.ppo_mini_batch_size, actor.micro_batching)
    if config.need_critic:
        yield from _mini_batches(config, "critic", critic.ppo_mini_batch_size or 0, critic.micro_batching)
        smaller, larger = sorted((actor.ppo_mini_batch_size, critic.ppo_mini_batch_size or 0))
        if smaller > 0 and larger % smaller:
            yield say("do_not_nest", actor=actor.ppo_mini_batch_size, critic=critic.ppo_mini_batch_size)
    if config.data_parallel_size > 0:
        yield from _rows_over_ranks(config, _step_size(config), config.prompts_per_step)


def _mini_batches(config: PPOConfig, section: str, size: int, micro: MicroBatching) -> Iterator[str]:
    """Requires that mini-batches of `size` prompts divide the step, and divide over ranks and into micro-batches."""
    if size < 1 or config.data_parallel_size < 1:
        # Reported by its bound.
        return
    given = f"{section}.ppo_mini_batch_size={size}"
    if config.prompts_per_step % size:
        yield f"{_step_size(config)} must be a multiple of {given}: a step is cut into equal mini-batches"
    undivided = [*_rows_over_ranks(config, given, size)]
    yield from undivided
    n, most = config.actor_rollout_ref.rollout.n, micro.micro_batch_size
    rows = size * n // config.data_parallel_size
    if not undivided and most and rows % most:
        ranks = _data_parallel(config)
        yield say("rows_of_rank", section=section, size=most, rows=rows, given=given, n=n, ranks=ranks)


def _rows_over_ranks(config: PPOConfig, given: str, prompts: int) -> Iterator[str]:
    """Requires that the rows of so many prompts divide among the ranks."""
    n = config.actor_rollout_ref.rollout.n
    if prompts * n % config.data_parallel_size:
        yield f"{given} x rollout.n={n} = {prompts * n} rows do not divide among {_data_parallel(config)}"


def _step_size(config: PPOConfig) -> str:
    """Names the setting that says how many prompts or episodes a step has."""
    own = config.environments and config.agent.agent_length
    return f"agent.agent_length={own}" if own else f"data.train_batch_size={config.data.train_batch_size}"


def _data_parallel(config: PPOConfig) -> str:
    """Names what a step's rows are divided among."""
    size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    return f"{config.data_parallel_size} " + ("ranks" if size == 1 else f"groups of {size} ranks that share sequences")


def _token_budgets(config: PPOConfig) -> Iterator[str]:
    """Requires that every pass is cut by tokens or by rows, and that a token budget holds at least one full row."""
    policy = config.actor_rollout_ref
    passes = {f"{ACTOR}.ppo": policy.actor.micro_batching, f"{ROLLOUT}.log_prob": policy.log_prob_micro_batching}
    if config.need_reference:
        passes["actor_rollout_ref.ref.log_prob"] = policy.ref_micro_batching
    if config.need_critic:
        passes["critic.ppo"] = config.critic.micro_batching
    for key, micro in passes.items():
        if micro.max_token_len is not None and micro.max_token_len < config.data.row_length:
            given = f"{key}_max_token_len_per_gpu={micro.max_token_len}"
            yield f"{given} cannot hold one row of {resources.row_length(config)} tokens"
        if micro == MicroBatching():
            yield f"{key}_micro_batch_size_per_gpu=null: give a number of rows, or use_dynamic_bsz=true"


def _sampling(config: PPOConfig) -> Iterator[str]:
    """Requires that training samples, that validation means what it says, and that lengths agree."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    val, name = rollout.val_kwargs, f"{ROLLOUT}.val_kwargs"
    if rollout.temperature == 0:
        yield f"{ROLLOUT}.temperature=0.0: training samples; set it above 0"
    if val.n > 1 and not val.do_sample:
        yield f"{name}.n={val.n} with do_sample=false repeats one greedy answer: set do_sample=true or n=1"
    if val.do_sample and val.temperature == 0:
        yield f"{name}.do_sample=true needs {name}.temperature above 0"
    if config.max_model_len < data.row_length:
        yield f"{ROLLOUT}.max_model_len={rollout.max_model_len} is shorter than {resources.row_length(config)}"
    if rollout.response_length not in (None, data.max_response_length):
        yield say("two_lengths", own=rollout.response_length, data=data.max_response_length)


def _engine(config: PPOConfig) -> Iterator[str]:
    """Requires that the rollout engine is installed and takes its limits."""
    rollout = config.actor_rollout_ref.rollout
    for engine, settings in rollout.engine_kwargs.items():
        if engine != rollout.name:
            log.warning("%s.engine_kwargs.%s has no effect with rollout.name=%s", ROLLOUT, engine, rollout.name)
        elif not isinstance(settings, dict):
            yield f"{ROLLOUT}.engine_kwargs.{engine}={settings!r} must be a mapping, as in {{key: value}}"
    if rollout.name != "vllm":
        return
    if importlib.util.find_spec("vllm") is None:
        yield say("no_vllm")
    # What is passed on wins: vLLM itself judges it.
    own = rollout.engine_kwargs.get("vllm")
    passed_on = isinstance(own, dict) and not own.keys().isdisjoint({"max_num_batched_tokens", "max_num_seqs"})
    if rollout.max_num_batched_tokens < rollout.max_num_seqs and not passed_on:
        yield say("few_tokens", tokens=rollout.max_num_batched_tokens, sequences=rollout.max_num_seqs)


def _algorithm(config: PPOConfig) -> Iterator[str]:
    """Requires that the loss and the estimator exist, once the user's own are registered."""
    if config.custom_algorithm is not None:
        failure = [*resources.user_file("custom_algorithm", config.custom_algorithm)]
        yield from failure
        if failure:
            # What the file would have registered is not known.
            return
    # Imports torch: late.
    from training.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    yield from _unknown(get_policy_loss_fn, config.actor_rollout_ref.actor.policy_loss.loss_mode)
    yield from _unknown(get_adv_estimator_fn, config.algorithm.adv_estimator) or _estimator(config)


def _unknown(find: Callable[[str], Any], name: str) -> list[str]:
    """Says what is wrong with a name that a registry does not find."""
    try:
        find(name)
    except ValueError as error:
        return [str(error)]
    return []


def _estimator(config: PPOConfig) -> Iterator[str]:
    """Requires that a registered estimator has the values or the groups that it reads."""
    from training.core_algos import AdvantageEstimator, get_adv_estimator_fn

    name, n, algorithm = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n, config.algorithm
    needs = config.estimator_needs
    if name == "gdpo" and not algorithm.gdpo_reward_keys:
        yield "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys: numbers that the reward function gives"
    if algorithm.gdpo_reward_weights and len(algorithm.gdpo_reward_weights) != len(algorithm.gdpo_reward_keys):
        yield "algorithm.gdpo_reward_weights must be as many as algorithm.gdpo_reward_keys, or empty"
    if algorithm.distillation_task is not None:
        yield from _unknown(get_adv_estimator_fn, algorithm.distillation_task)
        if set(estimator_needs(algorithm.distillation_task)) - {"index"}:
            yield f"algorithm.distillation_task={algorithm.distillation_task}: one that compares scores (grpo)"
    if name == "grpo_passk" and n == 1:
        yield f"algorithm.adv_estimator=grpo_passk compares the two best of a group: set {ROLLOUT}.n above 1"
    if "values" in needs and not config.need_critic:
        yield f"algorithm.adv_estimator={name} reads a critic's values: set critic.enable=true, or null"
    if name in set(AdvantageEstimator) and "index" in needs and n == 1:
        log.warning(say("one_of_a_group", name=name))
    if config.algorithm.filter_groups.enable and n == 1:
        yield f"algorithm.filter_groups.enable=true: a group of {ROLLOUT}.n=1 never differs within itself; raise n"


def _losses(config: PPOConfig) -> Iterator[str]:
    """Requires that the policy loss and the rollout correction have what they need."""
    import torch

    from training.core_algos.policy_losses import correct_as

    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    if config.loss_mode == "dro" and actor.policy_loss.dro_beta is None:
        yield f"{ACTOR}.policy_loss.dro_beta=null: loss_mode=dro needs it, above 0"
    if config.loss_mode == "bypass_mode" and not correction.bypass_mode:
        yield f"{ACTOR}.policy_loss.loss_mode=bypass_mode: set algorithm.rollout_correction.bypass_mode=true instead"
    reads_engine = correction.corrects or correction.bypass_mode
    if reads_engine and not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield f"algorithm.rollout_correction reads the engine's log-probs: set {ROLLOUT}.calculate_log_probs=true"
    if correction.bypass_mode and (config.algorithm.use_kl_in_reward or "sum_pi_squared" in config.estimator_needs):
        yield "algorithm.rollout_correction.bypass_mode makes no pass that use_kl_in_reward or the estimator reads"
    try:
        token = torch.zeros(1, 1)
        correct_as(correction, token, token, token + 1)
    except ValueError as error:
        yield f"algorithm.rollout_correction.{error}"


def _reward(config: PPOConfig) -> Iterator[str]:
    """Requires that the scoring function loads, and that the manager, which its file may register, finds its needs."""
    custom = config.custom_reward_function
    key, unusable = "custom_reward_function", list[str]()
    if custom.path is not None:
        unusable = [*resources.user_file(f"{key}.path", custom.path, f"{key}.name", custom.name)]
        yield from unusable
    elif custom.name != CustomRewardFunctionConfig.name:
        log.warning("custom_reward_function.name=%s has no effect without custom_reward_function.path", custom.name)
    # Imports torch: late.
    from custom.reward_manager import get_reward_manager_cls

    name = config.reward_model.reward_manager
    unknown = _unknown(get_reward_manager_cls, name)
    yield from unknown
    if not unknown and callable(check := getattr(get_reward_manager_cls(name), "check_config", None)):
        unknown = [*check(config)]
        yield from unknown
    if not unknown and not unusable:
        yield from _reward_arguments(config, get_reward_manager_cls(name))


def _reward_arguments(config: PPOConfig, manager: type) -> Iterator[str]:
    """Requires that function and manager take their reward_kwargs; a manager may hand its own on to the function."""
    from custom.reward_manager import NaiveRewardManager
    from custom.reward_score import default_compute_score

    custom, function = config.custom_reward_function, default_compute_score
    if custom.path is not None:
        function = load_extern_object(custom.path, custom.name)
        yield from resources.not_taken("custom_reward_function.reward_kwargs", function, custom.reward_kwargs)
    parameters = inspect.signature(manager).parameters.values()
    hands_on = issubclass(manager, NaiveRewardManager) and any(p.kind is p.VAR_KEYWORD for p in parameters)
    filled = () if hands_on else ("tokenizer", "num_examine", "compute_score", "reward_fn_key")
    own = {p.name for p in parameters if hands_on and p.kind is p.KEYWORD_ONLY}
    given = {name: value for name, value in config.reward_model.reward_kwargs.items() if name not in own}
    yield from resources.not_taken("reward_model.reward_kwargs", function if hands_on else manager, given, filled)


def _steps(config: PPOConfig) -> Iterator[str]:
    """Requires that what is resumed from, warm-up, validation and trackers have what they need."""
    trainer = config.trainer
    mode, path = trainer.resume_mode, trainer.resume_from_path
    if mode != "resume_path" and path is not None:
        log.warning("trainer.resume_from_path has no effect with trainer.resume_mode=%s: set it to resume_path", mode)
    elif mode == "resume_path" and path is None:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path: a global_step_N folder"
    elif mode == "resume_path" and not Path(str(path)).is_dir():
        yield f"trainer.resume_from_path={path} is not a folder"
    warmup, steps = trainer.critic_warmup, trainer.total_training_steps
    if warmup > 0 and not config.need_critic:
        yield f"trainer.critic_warmup={warmup}: there is no critic to warm up; set it to 0, or critic.enable=true"
    elif steps is not None and warmup >= steps > 0:
        yield f"trainer.critic_warmup={warmup} leaves no step to the actor: trainer.total_training_steps={steps}"
    if not config.data.val_files and not (config.environments and config.agent.val_length):
        source = "agent.val_length" if config.environments else "data.val_files"
        for key, wanted in {"val_only": trainer.val_only, "test_freq": trainer.test_freq > 0}.items():
            if wanted:
                yield f"trainer.{key} has nothing to validate on: set {source}"
    for package in (name for name in trainer.logger if name not in trainer.trackers):
        missing = f"trainer.logger has {package}, which is not installed: `pip install {package}`, or take it out"
        if trainer.trackers:
            log.warning("%s; this run goes without it", missing)
        else:
            yield missing


def _checkpoints(config: PPOConfig) -> Iterator[str]:
    """Requires that a resumed run goes on with its weights, and that the run's folder can be made and written."""
    if "hf_model" in config.critic.checkpoint.save_contents:
        yield "critic.checkpoint.save_contents has hf_model: only the actor is exported; take it out"
    yield from _contents(config, f"{ACTOR}.checkpoint", config.actor_rollout_ref.actor.checkpoint)
    if config.need_critic:
        yield from _contents(config, "critic.checkpoint", config.critic.checkpoint)
    key = "trainer.default_local_dir" + ("" if config.trainer.default_local_dir else "=null, so the run's folder")
    yield from resources.unwritable(key, config.trainer.run_dir)


def _contents(config: PPOConfig, name: str, parts: CheckpointConfig) -> Iterator[str]:
    """Requires that what is to be read on resume is written, the weights among it."""
    load, save = (f"[{', '.join(contents)}]" for contents in (parts.load_contents, parts.save_contents))
    given = f"{name}.load_contents={load}"
    if "hf_model" in parts.load_contents:
        yield f"{given}: hf_model is written for others and not read back; use model"
    if config.trainer.resume_mode == "disable":
        return
    if "model" not in parts.load_contents:
        yield f"{given} has no model: a resumed run would count on with fresh weights; add model"
    unsaved = ", ".join(part for part in parts.load_contents if part not in (*parts.save_contents, "hf_model"))
    if config.trainer.save_freq != -1 and unsaved:
        fix = f"take {unsaved} out, or " if "model" in parts.save_contents else ""
        fix += f"add {unsaved} there, or set trainer.resume_mode=disable"
        yield f"{given} is more than {name}.save_contents={save}: {fix}"


def _not_there_yet(config: PPOConfig) -> Iterator[str]:
    """Refuses what the settings can name and this project does not have."""
    policy = config.actor_rollout_ref
    if policy.rollout.name == "sglang":
        yield f"{ROLLOUT}.name=sglang is not there yet: use vllm or hf"
    for key, model in resources.trained_models(config).items():
        if model.dtype == "float16":
            yield say("no_loss_scaling", key=key)
    if policy.model.lora_rank > 0:
        yield f"actor_rollout_ref.model.lora_rank={policy.model.lora_rank}: LoRA is not there yet; use 0"
