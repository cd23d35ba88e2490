"""What a configuration can get wrong about its ranks: their number, the machines, Ray's cluster, and how they share work.

`check_ranks` and `check_heads` give problems as `config_checks` reports them: the key, its value and the fix.
"""

import importlib.util
import inspect
import logging
import re
import socket
from collections.abc import Iterator
from math import gcd
from operator import attrgetter
from typing import Any

from data.names import did_you_mean
from training.config.settings import CriticModelConfig, ModelConfig, PPOConfig

log = logging.getLogger(__name__)
ULYSSES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
ADDRESS = "ray_kwargs.ray_init.address"
ANSWER_S = 3.0  # for a Ray cluster to answer


def check_ranks(config: PPOConfig) -> Iterator[str]:
    """All problems with the ranks, but those that depend on the model."""
    yield from _ranks(config)
    if config.trainer.use_ray:
        yield from _cluster(config)
    yield from _sequence_parallel(config)


def check_heads(config: PPOConfig, model: str, heads: Any) -> Iterator[str]:
    """Ranks that share sequences divide the attention heads; `model` is `key=path`, `heads` what its config.json says, or None."""
    size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    if size > 1 and isinstance(heads, int) and heads > 0 and heads % size:
        yield f"{ULYSSES}={size} does not divide the {heads} attention heads of {model}: use {_divisors(heads)}"


def _cluster(config: PPOConfig) -> Iterator[str]:
    """Several machines need a cluster that is there already, and ray.init its own arguments."""
    nodes, settings = config.trainer.nnodes, config.ray_kwargs.ray_init
    address = settings.get("address")
    if nodes > 1 and address in (None, "local"):
        yield (
            f"trainer.nnodes={nodes} needs {ADDRESS}: run `ray start --head` on the first machine, `ray start --address=HOST:6379` "
            f"on the others, and set {ADDRESS}=auto; for ranks on this machine alone set trainer.n_gpus_per_node"
        )
    if settings and importlib.util.find_spec("ray") is not None:
        yield from _ray_arguments(settings)
    if address not in (None, "auto", "local") and "://" not in str(address):
        yield from _answering(str(address))


def _ray_arguments(settings: dict[str, Any]) -> Iterator[str]:
    import ray

    parameters = inspect.signature(ray.init).parameters.values()
    known = [item.name for item in parameters if item.kind is not inspect.Parameter.VAR_KEYWORD]
    for name in map(str, settings):
        if name not in known and not name.startswith("_"):  # such are Ray's private ones
            hint = did_you_mean(name, known) or f" It takes: {', '.join(known)}"
            yield f"ray_kwargs.ray_init.{name}: ray.init takes no such argument.{hint}"


def _answering(address: str) -> Iterator[str]:
    """Something listens at HOST:PORT."""
    parts = re.fullmatch(r"\[?(.+?)\]?:(\d{1,5})", address)
    if parts is None or int(parts[2]) > 65535:
        yield f"{ADDRESS}={address} must be HOST:PORT, as `ray start --head` prints it, or auto for this machine's cluster"
        return
    try:
        socket.create_connection((parts[1], int(parts[2])), timeout=ANSWER_S).close()
    except OSError as error:
        yield (
            f"{ADDRESS}={address}: nothing answers there ({error}); run `ray start --head` there, or name the address that it printed"
        )


def _ranks(config: PPOConfig) -> Iterator[str]:
    """The devices are there, and the launcher can start a rank on each."""
    policy, trainer = config.actor_rollout_ref, config.trainer
    if trainer.device == "cuda":
        import torch  # late: the other values need no torch here

        if not torch.cuda.is_available():
            yield "trainer.device=cuda: torch finds no CUDA device here; use cpu, or null for what there is"
    size = policy.rollout.tensor_model_parallel_size
    if size > 0 and trainer.n_gpus_per_node % size:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: an engine's ranks share a machine"
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
    if config.ray_kwargs.ray_init and not trainer.use_ray:
        log.warning("ray_kwargs.ray_init has no effect with trainer.launcher=local")
    if trainer.num_ranks > 1:
        return
    for key in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        if not attrgetter(f"{key}.fsdp_config.reshard_after_forward")(config):
            log.warning("%s.fsdp_config.reshard_after_forward has no effect on one rank", key)
    if policy.actor.strategy == "fsdp":
        log.info("actor_rollout_ref.actor.strategy=fsdp: several ranks are sharded by FSDP2")


def _sequence_parallel(config: PPOConfig) -> Iterator[str]:
    """The ranks divide into groups that share sequences, the same for actor and critic, which must lay rows out without padding."""
    policy, ranks = config.actor_rollout_ref, config.trainer.num_ranks
    size, critic_size = policy.actor.ulysses_sequence_parallel_size, config.critic.ulysses_sequence_parallel_size
    given = f"{ULYSSES}={size}"
    if size > 0 and ranks > 0 and ranks % size:
        yield (
            f"{given} does not divide trainer.nnodes x trainer.n_gpus_per_node = {ranks} ranks: set trainer.n_gpus_per_node "
            f"to a multiple of {size // gcd(size, config.trainer.nnodes)}, or {ULYSSES} to {_divisors(ranks)}"
        )
    if config.need_critic and critic_size not in (None, size):
        yield (
            f"critic.ulysses_sequence_parallel_size={critic_size} differs from the actor's {size}: "
            "both read a step's rows in one order; leave it null"
        )
    models: dict[str, ModelConfig | CriticModelConfig] = {"actor_rollout_ref.model": policy.model}
    if config.need_critic:
        models["critic.model"] = config.critic.model
    for key, model in models.items():
        if size > 1 and not model.use_remove_padding:
            yield f"{given} needs {key}.use_remove_padding=true"


def _divisors(number: int) -> str:
    *others, last = [str(n) for n in range(1, number + 1) if number % n == 0]
    return f"{', '.join(others)} or {last}" if others else last
