"""Finds what a configuration needs outside itself and does not find: ranks, files, folders, environments, models.

Gives problems as `checks` reports them; whatever a user's file raises when it is loaded is one of them.
"""

import importlib.util
import inspect
import logging
import os
import re
import traceback
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from custom.adapters import ENVIRONMENT_NAMES, LIBRARIES
from custom.adapters.base import taker_of
from custom.tools import load_tools
from data.loading import load_extern_object, load_object
from data.texts import did_you_mean, say, say_where
from training.config.settings import GIVEN, CriticModelConfig, EnvironmentChoice, PPOConfig

log = logging.getLogger(__name__)
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
LARGE_FILES = 64 << 20  # bytes


# Ranks, their devices and their cluster.


def check_ranks(config: PPOConfig) -> Iterator[str]:
    """Requires that the launcher can start the ranks, and that they divide among engines and shared sequences."""
    # Late: what imports this module needs no torch.
    import torch

    rollout, trainer, ray_settings = (
        config.actor_rollout_ref.rollout,
        config.trainer,
        config.ray_kwargs.ray_init,
    )
    engine, critic = (
        rollout.tensor_model_parallel_size,
        config.critic.ulysses_sequence_parallel_size,
    )
    size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    own_ranks, has_ray = trainer.rollout_n_gpus, importlib.util.find_spec("ray") is not None
    joins = ray_settings.get("address") not in (None, "local")
    wrong = {
        # The nodes of a cluster may have what this machine has not.
        "no_cuda": trainer.device == "cuda"
        and not (trainer.use_ray and joins)
        and not torch.cuda.is_available(),
        "tensor_parallel": trainer.n_gpus_per_node % engine,
        "one_rank_an_engine": engine > 1 and rollout.name != "vllm",
        "one_local_rank": trainer.launcher == "local" and trainer.all_ranks > 1,
        "no_own_engines": trainer.async_level > 0 and not trainer.rollout_n_gpus,
        "two_environments": config.env_template and config.agent.environment.is_set,
        "ray_isolation": config.environments
        and config.agent.environment.isolation == "ray"
        and not trainer.use_ray,
        "engines_not_placed": own_ranks % engine > 0
        or own_ranks % min(own_ranks or 1, trainer.n_gpus_per_node) > 0,
        "no_ray": trainer.use_ray and not has_ray,
        "no_cluster": trainer.use_ray and trainer.nnodes > 1 and not joins,
        "ranks_share": trainer.num_ranks % size,
        "critic_shares": config.need_critic and critic not in (None, size),
    }
    yield from say_where(wrong, config=config, size=size, critic=critic)
    for key, model in trained_models(config).items():
        unfit = {
            "no_packing": size > 1 and not model.use_remove_padding,
            "no_loss_scaling": model.dtype == "float16",
        }
        yield from say_where(unfit, key=key, size=size)


# Files and folders.


def missing_file(key: str, path: str) -> Iterator[str]:
    """Says that there is no such file, and from where it was looked for."""
    if not Path(path).is_file():
        yield f"{key}={path} is not a file (seen from {Path.cwd()})"


def unwritable(key: str, folder: str) -> Iterator[str]:
    """Says what stands in the way of making a folder and writing into it."""
    path = Path(folder).absolute()
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        yield f"{key}={folder}: {nearest} is not a folder that can be written; name another folder"


def user_file(key: str, path: str, name_key: str = "", name: str | None = None) -> Iterator[str]:
    """Runs a user's file, as the run will, and says what stands in the way of taking `name` from it, if it has one."""
    if name_key and name is None:
        yield f"{name_key} is missing: which class of {path}?"
    load = load_extern_object
    unusable = [*missing_file(key, path)] or [*failure(f"{key}={path}", load, path, "__name__")]
    unusable = unusable or [
        f"{name_key}={name}: {said}" for said in refused(load, path, name or "__name__")
    ]
    yield from unusable
    if name is not None and not unusable and not callable(found := load(path, name)):
        yield f"{name_key}={name}: in {path} it is a {type(found).__name__}; it must be a function or a class"


def failure(given: str, load: Callable[..., Any], source: Any, *arguments: Any) -> Iterator[str]:
    """Loads what was given; says what a user's code raised at it, and in which line where the source is a file."""
    try:
        load(source, *arguments)
    # Whatever such code does.
    except (Exception, SystemExit) as error:
        own = str(Path(re.sub(r":\w+$", "", str(source))).expanduser().resolve())
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == own
        ]
        where = f" in line {lines[-1]}" if lines else ""
        yield f"{given} cannot be loaded: {type(error).__name__}{where}: {error}; mend the file, or take it out"


def refused(call: Callable[..., Any], *arguments: Any, **by_name: Any) -> list[str]:
    """Makes a call and says why its arguments are refused (ValueError), if they are."""
    try:
        call(*arguments, **by_name)
    except ValueError as error:
        return [str(error)]
    return []


def not_taken(
    key: str, by: str, parameters: Collection[inspect.Parameter], given: Iterable[str]
) -> Iterator[str]:
    """Says which of the arguments that are given by name a function with these parameters does not take."""
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in (str(name) for name in given if name not in takes):
        said = f"{by} takes {', '.join(takes) or 'none'}"
        yield f"{key}.{name}: there is no such argument; {said}.{did_you_mean(name, takes)}"


def check_files(config: PPOConfig) -> Iterator[str]:
    """Requires that the data files are there, and hold rows that can be used.

    Whether their prompts fit is known once there is a tokenizer. Large files are read, and checked, only where the run
    reads them.
    """
    # Imports torch: late.
    from data.rl_dataset import RLHFDataset

    data, untokenized = (
        config.data,
        replace(config.data, truncation="right", filter_overlong_prompts=False),
    )
    for kind in () if config.environments else ("train", "val"):
        key, files, most = f"data.{kind}_files", data[f"{kind}_files"], data[f"{kind}_max_samples"]
        for path in files:
            yield from missing_file(key, path)
        readable = [path for path in files if Path(path).is_file()]
        small = sum(Path(path).stat().st_size for path in readable) <= LARGE_FILES
        if readable and small and data.custom_cls.path is None:
            for problem in refused(RLHFDataset, readable, None, untokenized, max_samples=most):
                yield f"{key}: {problem}; files of another form are read by data.custom_cls"


def check_classes(config: PPOConfig) -> Iterator[str]:
    """Requires that the user's dataset, sampler, agent and suite can be had from their files."""
    for start in ("data.custom_cls.", "data.sampler.class_", "agent.suite.", "agent.cls."):
        path_key, name_key = f"{start}path", f"{start}name"
        path, name = attrgetter(path_key, name_key)(config)
        if path is not None:
            yield from user_file(path_key, path, name_key, name)
        elif name is not None and start.startswith("agent."):
            yield f"{path_key} and {name_key} go together: the file, and the class in it"


# Agents and their environments.


def check_agents(config: PPOConfig) -> Iterator[str]:
    """Finds the problems of `agent` and `env_template`, where environments are named, and in one of them."""
    agent = config.agent
    if not config.environments or (config.env_template and agent.environment.is_set):
        return
    for i, environment in enumerate(config.environments):
        yield from _environment(
            f"env_template[{i}]" if config.env_template else "agent.environment", environment
        )
    yield from failure(f"agent.tools=[{', '.join(agent.tools)}]", load_tools, agent.tools)
    if "python" in agent.tools:
        yield from _walls(agent.tools_unsafe)
    if agent.episodes_dir is not None:
        yield from unwritable("agent.episodes_dir", agent.episodes_dir)


def _environment(key: str, environment: EnvironmentChoice) -> Iterator[str]:
    """Requires that an environment is named once, and that its class or function takes `kwargs`; makes none."""
    name, path, template = environment.name, environment.path, environment.prompt_template
    source, (kind, _, rest) = (
        f"{path}:{environment.cls}" if path else name,
        (name or "").partition(":"),
    )
    if name and path:
        yield f"{key}.name and {key}.path both name an environment: give one of them"
    elif name == GIVEN:
        yield say("given_environment", key=key)
    elif name and not rest:
        yield f"{key}.name={name} must be one of {ENVIRONMENT_NAMES}"
    elif source and kind not in LIBRARIES:
        of_file = user_file(f"{key}.path", path, f"{key}.cls", environment.cls) if path else ()
        unusable = [*of_file] or [
            *failure(f"{key}.name={name}", load_object, source, "environment")
        ]
        yield from unusable
        kwargs = environment.kwargs | ({} if template is None else {"prompt_template": template})
        if not unusable and kwargs and callable(make := load_object(source, "environment")):
            yield from (f"{key}.kwargs: {problem}" for problem in refused(taker_of, make, kwargs))
    elif not source and key.startswith("env_template"):
        yield f"{key} names no environment: give name, or path and cls"


def _walls(unsafe: bool) -> Iterator[str]:
    """Requires that the kernel keeps what the python tool runs from files, network and processes."""
    from custom.tools.walls import missing_walls

    missing = "; ".join(missing_walls())
    if missing and not unsafe:
        yield say("no_walls", missing=missing)
    elif missing:
        log.warning("agent.tools_unsafe=true, and on this machine %s", missing)


# Models.


def read_model_config(path: str) -> dict[str, Any]:
    """Reads a model's config.json, from a local folder or, for a hub name (org/name), from the hub.

    Raises:
        OSError, ValueError: there is no such folder or hub model, or it has no config.json with settings.
    """
    # A hub is not asked for what is misspelt in a folder that is there.
    if not Path(path).is_dir() and (
        not HUB_NAME.fullmatch(path) or ("/" in path and Path(path).parent.is_dir())
    ):
        raise ValueError(f"is not a folder (seen from {Path.cwd()}) and cannot be a hub name")
    from transformers import PretrainedConfig

    entries = PretrainedConfig.get_config_dict(path)[0]
    if not entries or not isinstance(entries, dict):
        raise ValueError("holds no config.json with settings; is it a Hugging Face model folder?")
    return entries


def check_models(config: PPOConfig, ask_hub: bool) -> Iterator[str]:
    """Requires that the models exist, and that a full row fits those that train; the hub's only with `ask_hub`."""
    trained, scorer = trained_models(config), config.reward_model
    paths = {key: model.path for key, model in trained.items()}
    paths["actor_rollout_ref.ref.model"] = config.actor_rollout_ref.ref.model.path
    paths["reward_model.model"] = scorer.model.path if scorer.enable else None
    # Each once, under the first of its keys.
    for path in dict.fromkeys(filter(None, paths.values())):
        key = next(key for key in paths if paths[key] == path)
        if not ask_hub and not Path(path).is_dir() and HUB_NAME.fullmatch(path):
            log.info(
                "%s.path=%s is no folder here: left unchecked, as the hub is not asked", key, path
            )
            continue
        try:
            entries = read_model_config(path)
        except (OSError, ValueError) as error:
            yield f"{key}.path={path}: {(str(error) or repr(error)).splitlines()[0]}"
            continue
        # transformers would make an empty tokenizer; missing weights it names itself.
        if (
            key == "actor_rollout_ref.model"
            and Path(path).is_dir()
            and not any(Path(path).glob("tokenizer*"))
        ):
            yield f"{key}.path={path}: the folder holds no tokenizer; save it there"
        if key in trained:
            yield from _fitting(config, key, trained[key], entries)


def trained_models(config: PPOConfig) -> dict[str, CriticModelConfig]:
    """Lists the models of the run that have settings of their own."""
    critic = {"critic.model": config.critic.model} if config.need_critic else {}
    return {"actor_rollout_ref.model": config.actor_rollout_ref.model, **critic}


def _fitting(
    config: PPOConfig, key: str, model: CriticModelConfig, entries: dict[str, Any]
) -> Iterator[str]:
    """Requires that a full row, in tokens, and the ranks that share sequences fit the model.

    Its `override_config` counts before `entries`, its config.json, and those before their text_config, where models
    that also see images keep the language model's.
    """
    inner = (entries | model.override_config).get("text_config")
    known = ChainMap(model.override_config, entries, inner if isinstance(inner, dict) else {})
    size, heads = (
        config.actor_rollout_ref.actor.ulysses_sequence_parallel_size,
        known.get("num_attention_heads"),
    )
    if size > 1 and isinstance(heads, int) and heads > 0 and heads % size:
        yield say("heads_not_divided", size=size, heads=heads, key=key, path=model.path)
    row, context = config.data.row_length, known.get("max_position_embeddings")
    limit = (
        config.actor_rollout_ref.rollout.max_model_len if key == "actor_rollout_ref.model" else None
    )
    what = f"actor_rollout_ref.rollout.max_model_len={limit}"
    what = what if limit else f"data.max_prompt_length + data.max_response_length = {row}"
    if isinstance(context, int) and (limit or row) > context:
        yield f"{what} tokens, but {key}.path={model.path} reads at most {context}"
