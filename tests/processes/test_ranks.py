"""Two ranks under FSDP2 against one process: the same log-probs, weights and metrics (fp32)."""

from __future__ import annotations

import multiprocessing.context
import os
import signal
import socket
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from data.protocol import DataProto
from tests.e2e.test_training import read_steps, tiny_config
from tests.unit.test_actor_critic import make_update
from tests.unit.test_checkpoint import save
from training.building import build_trainer
from training.config import (
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
)
from training.run.roles import ResourcePoolManager, Role
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.fsdp_workers import ActorRolloutRefWorker
from workers.model import state as model_state
from workers.model.builder import ModelSpec
from workers.model.forward_settings import ForwardSettings
from workers.model.optimizer import build_optimizer, build_scheduler
from workers.model.policy_model import PolicyModel, PolicyValueModel, ValueModel
from workers.ranks.offload import on_device
from workers.ranks.process_groups import rank, start_process_group
from workers.ranks.sharding import full_tensor, shard_model

LIMITS = {"tokens": {"ppo_max_token_len_per_gpu": 30}, "rows": {"ppo_micro_batch_size_per_gpu": 1}}
MODES = ("token-mean", "seq-mean-token-sum")


def run_rank(folder: str, number: int, world: int, port: int, kind: str = "cpu") -> None:
    """Computes all that is compared, on this rank's rows and device; rank 0 writes it down."""
    device = join_ranks(number, world, port, kind)
    settings = ForwardSettings(device=device)
    results: dict[str, Any] = {}
    # Seven rows and a dummy: rank 0 has a group of four, rank 1 two groups of other lengths and the
    # dummy.
    data = make_update().pad_with_dummies(2).chunk(world)[number]
    for limits in LIMITS:
        for mode in MODES:
            actor = DataParallelPPOActor(
                ActorConfig(
                    **LIMITS[limits],
                    loss_agg_mode=mode,
                    entropy_coeff=0.1,
                    use_kl_loss=True,
                    grad_clip=0.5,
                ),
                *build(folder, "actor", device),
                forward=settings,
            )
            before = whole_weights(actor.actor_module)
            metrics = actor.update_policy(data)
            results[f"actor {limits} {mode}"] = (change(before, actor.actor_module), metrics)
            results[f"gradients actor {limits} {mode}"] = gradients(actor.actor_module)
        critic = DataParallelPPOCritic(
            CriticConfig(**LIMITS[limits]), *build(folder, "critic", device), forward=settings
        )
        values = critic.compute_values(data)
        before = whole_weights(critic.critic_module)
        metrics = critic.update_critic(data)
        results[f"critic {limits}"] = (change(before, critic.critic_module), metrics)
        results[f"gradients critic {limits}"] = gradients(critic.critic_module)
        both = DataParallelPPOActor(
            ActorConfig(**LIMITS[limits]),
            *build(folder, "both", device),
            forward=settings,
            critic=CriticConfig(),
        )
        before = whole_weights(both.actor_module)
        metrics = both.update_policy(data)
        results[f"both {limits}"] = (change(before, both.actor_module), metrics)
        results[f"gradients both {limits}"] = gradients(both.actor_module)
    results["tied"] = tied_weights(folder, device)
    log_probs, _ = actor.compute_log_prob(data)
    rounded, results["types"] = bfloat16_log_probs(folder, device, data)
    _, own_values = both.read(data, "a test", None, "none")
    rounded["own values"] = own_values
    torch.save(
        {"log_probs": log_probs, "values": values, **rounded},
        Path(folder) / f"rows-{world}-{number}.pt",
    )
    if number == 0:
        torch.save(results, Path(folder) / f"results-{world}.pt")
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def tied_weights(folder: str, device: torch.device) -> dict[str, Tensor]:
    """Returns the weights of a model whose head is its embedding, which one rank has read."""
    spec = ModelSpec(ModelConfig(), str(Path(folder) / "tied"), device)
    model = PolicyModel(spec.causal_lm(trainable=True))
    assert all(p.is_meta == (rank() > 0) for p in model.parameters())
    shard_model(model, FSDPConfig(), torch.float32, device)
    assert model.lm.get_output_embeddings().weight is model.lm.get_input_embeddings().weight
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    return whole_weights(model) | {
        f"buffer {name}": buffer for name, buffer in model.named_buffers()
    }


def bfloat16_log_probs(
    folder: str, device: torch.device, data: DataProto
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns log-probs of a policy and its frozen reference in bfloat16, and weights' types."""
    config = ModelConfig(dtype="bfloat16", enable_gradient_checkpointing=False)
    spec = ModelSpec(config, str(Path(folder) / "rounded"), device)
    settings = ForwardSettings(device=device, dtype=torch.bfloat16)
    log_probs, types = {}, {}
    for name, trainable in (("policy", True), ("reference", False)):
        model = PolicyModel(spec.causal_lm(trainable=trainable))
        shard_model(model, FSDPConfig(), torch.bfloat16, device)
        types[name] = str({p.dtype for p in model.parameters()})
        actor = DataParallelPPOActor(
            ActorConfig(ppo_micro_batch_size_per_gpu=1), model, forward=settings
        )
        log_probs[name], _ = actor.compute_log_prob(data)
    return log_probs, types


def join_ranks(number: int, world: int, port: int, kind: str) -> torch.device:
    """Does what a launcher does for a process; returns its device."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    device = torch.device(kind, number) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    start_process_group(device)
    return device


def gradients(module: torch.nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.grad is not None]


def change(before: dict[str, Tensor], module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor - before[name] for name, tensor in whole_weights(module).items()}


def build(
    folder: str, kind: str, device: torch.device
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    path = str(Path(folder) / "model")
    if kind in ("actor", "both"):
        spec = ModelSpec(ModelConfig(enable_gradient_checkpointing=False), path, device)
        lm = spec.causal_lm(trainable=True)
        module: torch.nn.Module = PolicyModel(lm if kind == "actor" else PolicyValueModel(lm))
    else:
        spec = ModelSpec(CriticModelConfig(enable_gradient_checkpointing=True), path, device)
        transformer = spec.value_model()
        torch.nn.init.constant_(transformer.score.weight, 0.01)
        module = ValueModel(transformer)
    shard_model(module, FSDPConfig(), torch.float32, device)
    # The change is then the gradient, to scale.
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def whole_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p.detach()).cpu().clone() for name, p in module.named_parameters()}


@pytest.fixture(scope="module")
def folder(tiny_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    compare_ranks(tiny_task, folder, "cpu")
    return folder


def compare_ranks(tiny_task: Path, folder: Path, kind: str) -> None:
    """Runs everything in one process and in two, on devices of that kind; leaves the results."""
    (folder / "model").symlink_to(tiny_task / "model")
    config = AutoConfig.from_pretrained(tiny_task / "model", tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "tied")
    rounded = AutoModelForCausalLM.from_pretrained(tiny_task / "model", dtype=torch.bfloat16)
    rounded.save_pretrained(folder / "rounded")
    for world in (1, 2):
        spawn_ranks(run_rank, str(folder), world, kind)


def rank_context() -> multiprocessing.context.ForkServerContext:
    """Returns what starts ranks: forks of a process that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    forget_server_that_is_gone()
    return context


def forget_server_that_is_gone() -> None:
    """Has another fork server start where somebody else waited for the one that has ended.

    multiprocessing starts another one by itself only where it can wait for the first. Runs of other
    tests in this process, over Ray, say, may have ended that one and waited for it.
    """
    server = forkserver._forkserver
    try:
        server.ensure_running()
    except ChildProcessError:
        os.close(server._forkserver_alive_fd)
        server._forkserver_address = None
        server._forkserver_alive_fd = None
        server._forkserver_pid = None


def spawn_ranks(
    body: Callable[[str, int, int, int, str], None], folder: str, world: int, kind: str
) -> None:
    """Runs body(folder, rank, world, port, kind) in `world` processes, which must end well."""
    start_ranks(body, [(folder, rank, world) for rank in range(world)], (kind,))


def start_ranks(
    body: Callable[..., None], arguments: Sequence[tuple[Any, ...]], further: tuple[Any, ...] = ()
) -> None:
    """Runs body(*arguments[rank], port, *further) in processes, which must end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = rank_context()
    ranks = [context.Process(target=body, args=(*given, port, *further)) for given in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0] * len(ranks)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    scale = max(float(tensor.abs().max()) for tensor in one.values())
    assert scale > 1e-4
    return max(float((one[name] - other[name]).abs().max()) for name in one) / scale


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_make_the_policy_update_of_one(folder: Path, limits: str, mode: str) -> None:
    (one, one_metrics), (two, two_metrics) = (
        torch.load(folder / f"results-{world}.pt")[f"actor {limits} {mode}"] for world in (1, 2)
    )
    assert largest_difference(one, two) < 1e-5
    assert two_metrics == pytest.approx(one_metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("limits", LIMITS)
def test_two_ranks_make_the_value_update_of_one(folder: Path, limits: str) -> None:
    (one, one_metrics), (two, two_metrics) = (
        torch.load(folder / f"results-{world}.pt")[f"critic {limits}"] for world in (1, 2)
    )
    assert largest_difference(one, two) < 1e-5
    assert two_metrics == pytest.approx(one_metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("limits", LIMITS)
def test_two_ranks_make_the_update_of_policy_and_values_in_one_model(
    folder: Path, limits: str
) -> None:
    (one, one_metrics), (two, two_metrics) = (
        torch.load(folder / f"results-{world}.pt")[f"both {limits}"] for world in (1, 2)
    )
    assert one["value_head.weight"].any() and largest_difference(one, two) < 1e-5
    assert {"actor/pg_loss", "critic/vf_loss", "critic/vpred_mean"} <= one_metrics.keys()
    assert two_metrics == pytest.approx(one_metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("world", [1, 2])
def test_updates_leave_no_gradient_in_memory(folder: Path, world: int) -> None:
    results = torch.load(folder / f"results-{world}.pt")
    left = {name: value for name, value in results.items() if name.startswith("gradients")}
    assert len(left) == 8 and not any(left.values())


def saved_before_the_first_step(folder: str, number: int, world: int, port: int, kind: str) -> None:
    """Makes an update plainly, after saving, after loading into a fresh and a used optimiser."""
    device = join_ranks(number, world, port, kind)
    data = make_update().pad_with_dummies(2).chunk(world)[number]
    parts, optim = ("model", "optimizer", "extra"), OptimConfig(lr=1e-3)
    ends = []
    for way in ("plain", "saved", "fresh", "used"):
        module, _ = build(folder, "actor", device)
        optimizer = build_optimizer(module, optim)
        actor = DataParallelPPOActor(
            ActorConfig(), module, optimizer, forward=ForwardSettings(device=device)
        )
        state = (module, optimizer, build_scheduler(optimizer, optim, 10))
        if way == "used":
            actor.update_policy(data)
        if way == "saved":
            save(Path(folder) / "checkpoint", state, parts)
        elif way != "plain":
            model_state.load(Path(folder) / "checkpoint", state, parts)
        assert not optimizer.state
        actor.update_policy(data)
        ends.append(whole_weights(module))
    for end in ends[1:]:
        assert [name for name in end if not torch.equal(end[name], ends[0][name])] == []
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_saving_before_the_first_step_changes_no_step_of_two_ranks(
    tiny_task: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").symlink_to(tiny_task / "model")
    spawn_ranks(saved_before_the_first_step, str(tmp_path), 2, "cpu")


def test_a_reference_in_a_pool_of_its_own_gives_the_run_of_one_beside_the_policy(
    tiny_task: Path, tmp_path: Path
) -> None:
    steps, placed = (
        [],
        (
            {Role.ActorRolloutRef: "policy"},
            {Role.ActorRollout: "policy", Role.RefPolicy: "reference"},
        ),
    )
    for mapping in placed:
        folder = tmp_path / str(len(mapping))
        config = tiny_config(
            tiny_task,
            folder,
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "data.val_files=null",
            "trainer.deterministic=true",
        )
        trainer = build_trainer(config)
        trainer.role_worker_mapping = dict.fromkeys(mapping, ActorRolloutRefWorker)
        trainer.resource_pool_manager = ResourcePoolManager(
            {"policy": [1], "reference": [1]}, mapping
        )
        trainer.init_workers()
        trainer.fit()
        steps.append(
            [
                {k: v for k, v in step.items() if "/kl_loss" in k or "norm" in k}
                for step in read_steps(folder)
            ]
        )
    assert steps[0] == steps[1] and steps[0][-1]["actor/kl_loss"] > 0


def test_the_first_ranks_weights_reach_all_and_stay_tied(folder: Path) -> None:
    one, two = (torch.load(folder / f"results-{world}.pt")["tied"] for world in (1, 2))
    assert one.keys() == two.keys() and any(name.startswith("buffer") for name in one)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_head_that_is_not_the_embedding_though_the_configuration_says_so_is_refused(
    tiny_task: Path,
) -> None:
    spec = ModelSpec(
        ModelConfig(override_config={"tie_word_embeddings": True}),
        str(tiny_task / "model"),
        torch.device("cpu"),
    )
    with pytest.raises(
        ValueError, match="tie_word_embeddings is true, but its weights hold another lm_head"
    ):
        spec.causal_lm(trainable=True)


def test_two_ranks_compute_the_log_probs_and_values_of_one(folder: Path) -> None:
    one = torch.load(folder / "rows-1-0.pt")
    halves = [torch.load(folder / f"rows-2-{rank}.pt") for rank in range(2)]
    for name in ("log_probs", "values", "own values"):
        both = torch.cat([half[name] for half in halves])
        torch.testing.assert_close(both, one[name], rtol=1e-5, atol=1e-5)


def test_two_ranks_compute_in_bfloat16_what_one_does_bitwise_and_so_does_the_reference(
    folder: Path,
) -> None:
    """Weights are bfloat16 numbers: FSDP2 rounds the norms' too, which one rank has in float32."""
    one = torch.load(folder / "rows-1-0.pt")
    halves = [torch.load(folder / f"rows-2-{rank}.pt") for rank in range(2)]
    assert (one["policy"] != one["log_probs"]).any()
    for name in ("policy", "reference"):
        assert torch.equal(torch.cat([half[name] for half in halves]), one["policy"]), name
        assert torch.equal(one[name], one["policy"]), name


@pytest.mark.parametrize("world", [1, 2])
def test_a_policy_has_float32_weights_and_its_reference_those_of_the_compute_type(
    folder: Path, world: int
) -> None:
    types = torch.load(folder / f"results-{world}.pt")["types"]
    assert types == {"policy": "{torch.float32}", "reference": "{torch.bfloat16}"}


def test_only_the_sharded_root_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 would go on with the old embedding and head of a root that was moved from within."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    inner, config = torch.nn.Linear(2, 2), FSDPConfig(param_offload=True)
    with (
        pytest.raises(AssertionError, match="only the sharded root"),
        on_device(inner, None, torch.device("cpu"), config),
    ):
        pass


def leave_at_once(folder: str, rank: int, world: int, port: int, kind: str) -> None:
    """Is a rank that has nothing to do."""


def test_ranks_start_also_where_the_server_that_forks_them_was_ended_and_waited_for() -> None:
    spawn_ranks(leave_at_once, "", 1, "cpu")
    number = forkserver._forkserver._forkserver_pid
    assert number is not None
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    spawn_ranks(leave_at_once, "", 1, "cpu")
