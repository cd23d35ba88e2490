"""What alarms have measured in an update: by definitions, and whatever the cut of the batch."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from data.protocol import DataProto
from features.alarms.probes.gradients import (
    GradientAlignment,
    KeptGradients,
    LostGradients,
    RepeatedBackward,
)
from features.alarms.probes.losses import FirstUpdateDifference, LossCounts
from features.alarms.probes.movement import StillTensors, layers_of
from features.alarms.probes.optimizer_state import OptimizerState
from features.alarms.probes.reference import ReferenceMovement
from features.records.token_record import TokenRecorder
from tests.unit.test_actor_critic import SPLITS, make_update, small_device
from training.config import ActorConfig, CriticConfig, UpdatePlan
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.model import update_loop
from workers.model.attention import use_packed_attention
from workers.model.policy_model import PolicyModel
from workers.model.probe import UpdateProbe
from workers.model.probe_set import ReadProbes, UpdateProbes
from workers.model.sampling_mismatch import SamplingMismatch

KINDS = (
    LossCounts,
    FirstUpdateDifference,
    GradientAlignment,
    KeptGradients,
    LostGradients,
    RepeatedBackward,
    StillTensors,
    OptimizerState,
    SamplingMismatch,
)


@pytest.fixture(scope="module")
def lm(tiny_task: Path) -> nn.Module:
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    assert use_packed_attention(lm)
    return lm


def all_probes() -> list[UpdateProbe]:
    return [kind() for kind in KINDS]


def build(
    lm: nn.Module, probes: list[UpdateProbe] | None = None, **settings: Any
) -> DataParallelPPOActor:
    module = copy.deepcopy(lm)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    probes = all_probes() if probes is None else probes
    config = ActorConfig(**settings)
    return DataParallelPPOActor(config, module, optimizer, probes=UpdateProbes(probes))


def made_data(lm: nn.Module, *, own_log_probs: bool = True) -> DataProto:
    """A batch whose log-probs before the update are not quite the model's, nor the engine's."""
    data = make_update()
    own, _ = DataParallelPPOActor(ActorConfig(), lm).compute_log_prob(data)
    noise = torch.rand(own.shape, generator=torch.Generator().manual_seed(5))
    data.batch["rollout_log_probs"] = own - 0.2 * noise * data.batch["response_mask"]
    data.batch["old_log_probs"] = own + 0.1 * noise * data.batch["response_mask"]
    if not own_log_probs:
        del data.batch["old_log_probs"]
    return data


def test_a_first_update_is_measured_by_its_definition(lm: nn.Module) -> None:
    data = made_data(lm)
    metrics = build(lm).update_policy(data)
    mask = data.batch["response_mask"]
    own, _ = DataParallelPPOActor(ActorConfig(), lm).compute_log_prob(data)
    apart = ((own - data.batch["old_log_probs"]).abs() * mask).sum() / mask.sum()
    assert metrics["actor/first_update_diff"] == pytest.approx(apart.item(), rel=1e-4)
    assert metrics["actor/loss_tokens"] == mask.sum()
    targets = (data.batch["advantages"] * mask).sum().item()
    assert metrics["actor/loss_targets"] == pytest.approx(targets, rel=1e-5)
    assert metrics["actor/kept_gradients"] == 0 == metrics["actor/missing_gradient"]
    assert metrics["actor/optimizer_steps"] == 1 and metrics["actor/still_tensors"] == 0
    # The ratio is 1 or little less, and clips nothing.
    assert 0.98 < metrics["actor/gradient_alignment"] <= 1


@pytest.mark.parametrize("own_log_probs", [True, False])
@pytest.mark.parametrize("split", SPLITS)
def test_measures_do_not_depend_on_micro_batch_size(
    lm: nn.Module, split: dict[str, int], own_log_probs: bool
) -> None:
    data = made_data(lm, own_log_probs=own_log_probs)
    expected = build(lm).update_policy(data)
    assert ("actor/first_update_diff" in expected) == own_log_probs
    assert ("training/rollout_kl" in expected) != own_log_probs
    assert build(lm, **split).update_policy(data) == pytest.approx(expected, rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-mean", "token-sum"])
def test_groups_that_come_one_by_one_are_measured_as_all_at_once(
    lm: nn.Module, loss_agg_mode: Any
) -> None:
    data = made_data(lm)
    expected = build(lm, loss_agg_mode=loss_agg_mode).update_policy(data)
    actor = build(lm, loss_agg_mode=loss_agg_mode)
    for uid in "cab":
        rows = [row for row, own in enumerate("aaaabbc") if own == uid]
        actor.add_groups(data.select_idxs(torch.tensor(rows)))
    # There are no mini-batches whose rows are known before they come.
    for name in ("given_tokens", "given_targets", "mini_batches"):
        del expected[f"actor/{name}"]
    assert actor.finish_update() == pytest.approx(expected, rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("run", [1, 3])
def test_an_update_that_ends_early_has_means_over_the_mini_batches_that_were_run(
    lm: nn.Module, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_update()
    expected = build(lm).update_policy(data, UpdatePlan.of_rows(7, 7, run))
    rows_of_updates = update_loop.rows_of_updates
    monkeypatch.setattr(
        update_loop, "rows_of_updates", lambda data, plan: rows_of_updates(data, plan)[:run]
    )
    metrics = build(lm).update_policy(data, UpdatePlan.of_rows(7, 7, 4))
    # The last of four epochs, in which tensors are looked at, was not run.
    for name in metrics:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    assert metrics["actor/mini_batches"] == run == metrics["actor/optimizer_steps"]
    tokens = data.batch["response_mask"].sum()
    assert metrics["actor/given_tokens"] == run * tokens == metrics["actor/loss_tokens"]


def test_an_update_that_stops_before_a_step_has_means_of_either(
    lm: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_update()
    expected = build(lm).update_policy(data, UpdatePlan.of_rows(7, 7, 1))
    rows_of_updates = update_loop.rows_of_updates

    def two(data: DataProto, plan: UpdatePlan) -> Any:
        return rows_of_updates(data, plan)[:2]

    monkeypatch.setattr(update_loop, "rows_of_updates", two)
    actor = build(lm)
    step = actor._step

    def first_alone(sums: Any, **arguments: Any) -> None:
        if sums.steps == 0:
            step(sums, **arguments)

    monkeypatch.setattr(actor, "_step", first_alone)
    metrics = actor.update_policy(data, UpdatePlan.of_rows(7, 7, 4))
    assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    assert 0.5 < metrics["actor/entropy"] / expected["actor/entropy"] < 1.5


def test_an_update_that_begins_anew_is_measured_once(lm: nn.Module) -> None:
    settings: dict[str, Any] = {"ppo_max_token_len_per_gpu": 1000, "ppo_epochs": 2}
    plan = UpdatePlan.of_rows(7, 7, 2)
    expected = build(lm, **settings).update_policy(made_data(lm), plan)
    actor = build(lm, **settings)
    with small_device(actor.actor_module.lm, 24):
        metrics = actor.update_policy(made_data(lm), plan)
    assert metrics == pytest.approx(expected, rel=2e-4, abs=1e-6)
    assert metrics["actor/optimizer_steps"] == 2


def test_gradients_that_are_lost_or_kept_are_found(lm: nn.Module) -> None:
    settings = {"ppo_micro_batch_size_per_gpu": 3}
    forgetful = build(lm, **settings)
    micro_loss = forgetful.micro_loss

    def after_zeroing(*args: Any) -> Any:
        forgetful.optimizer.zero_grad()
        return micro_loss(*args)

    forgetful.micro_loss = after_zeroing  # type: ignore[method-assign]
    assert forgetful.update_policy(make_update())["actor/missing_gradient"] > 0.1

    keeping = build(lm, **settings)
    keeping.optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[union-attr]
    keeping.update_policy(make_update())
    assert keeping.update_policy(make_update())["actor/kept_gradients"] > 10


def test_a_tensor_that_an_update_leaves_as_it_was_is_named(lm: nn.Module) -> None:
    actor = build(lm)
    name = "model.layers.0.mlp.down_proj.weight"
    actor.actor_module.lm.get_parameter(name).requires_grad_(False)
    metrics = actor.update_policy(make_update())
    assert metrics["actor/still_tensors"] == 1 == metrics[f"actor/still/{name}"]


def test_a_gradient_that_is_taken_twice_is_counted(lm: nn.Module) -> None:
    actor = build(lm, ppo_micro_batch_size_per_gpu=3)
    assert actor.update_policy(make_update())["actor/repeated_backward"] == 0
    own = torch.Tensor.backward

    def twice(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        own(tensor, retain_graph=True)
        own(tensor, *args, **kwargs)

    with patch.object(torch.Tensor, "backward", twice):
        assert actor.update_policy(make_update())["actor/repeated_backward"] == 3
    assert actor.update_policy(make_update())["actor/repeated_backward"] == 0


def swapped(optimizer: torch.optim.Optimizer) -> None:
    """Two parameters of one shape have each other's state."""
    by_shape: dict[torch.Size, Tensor] = {}
    for parameter in optimizer.state:
        other = by_shape.setdefault(parameter.shape, parameter)
        if other is not parameter:
            state = optimizer.state
            state[parameter], state[other] = state[other], state[parameter]
            return


@pytest.mark.parametrize(
    ("change", "tensors"),
    [
        (lambda optimizer: None, 0),
        (swapped, 2),
        (lambda optimizer: optimizer.state.clear(), 21),
        (lambda optimizer: [s["exp_avg_sq"].zero_() for s in optimizer.state.values()], 21),
    ],
)
def test_a_state_that_is_not_what_the_update_left_is_counted(
    lm: nn.Module, change: Any, tensors: int
) -> None:
    module = copy.deepcopy(lm)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    probes = UpdateProbes([OptimizerState()])
    actor = DataParallelPPOActor(ActorConfig(), module, optimizer, probes=probes)
    assert len(list(module.parameters())) == 21
    for _ in range(2):
        metrics = actor.update_policy(make_update())
        assert metrics["actor/optimizer_state_changed"] == 0
    change(optimizer)
    assert actor.update_policy(make_update())["actor/optimizer_state_changed"] == tensors
    assert actor.update_policy(make_update())["actor/optimizer_state_changed"] == 0


def test_how_far_each_layer_moved_is_a_share_of_its_size(lm: nn.Module) -> None:
    actor = build(lm)
    lm_of_actor = actor.actor_module.lm
    before = {name: own.detach().clone() for name, own in lm_of_actor.named_parameters()}
    metrics = actor.update_policy(make_update())
    distance = 0.0
    size = 0.0
    for name, own in before.items():
        if ".layers.1." in name:
            now = lm_of_actor.get_parameter(name).detach()
            distance += float((now - own).square().sum())
            size += float(own.square().sum())
    assert metrics["actor/moved/layer_1"] == pytest.approx((distance / size) ** 0.5, rel=0.05)
    assert {"actor/moved/embedding", "actor/moved/head", "actor/moved/rest"} <= set(metrics)


def test_layers_are_named_in_the_order_of_their_numbers() -> None:
    names = ["model.embed_tokens.weight", "model.layers.2.mlp.weight", "model.layers.11.x.weight"]
    assert list(layers_of(names).values()) == ["embedding", "layer_02", "layer_11"]


def test_a_sign_that_is_wrong_turns_the_gradient_round(lm: nn.Module) -> None:
    actor = build(lm)
    policy_loss = actor._policy_loss

    def negated(*args: Any) -> Any:
        loss, metrics = policy_loss(*args)
        return -loss, metrics

    actor._policy_loss = negated  # type: ignore[method-assign]
    assert actor.update_policy(made_data(lm))["actor/gradient_alignment"] < -0.98


def test_a_critic_is_measured_by_its_values(tiny_task: Path) -> None:
    module = AutoModelForTokenClassification.from_pretrained(tiny_task / "model", num_labels=1)
    # As `ModelSpec.value_model` has it.
    module.dropout = nn.Identity()
    assert use_packed_attention(module)
    module.score.reset_parameters()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    probes = UpdateProbes(all_probes())
    critic = DataParallelPPOCritic(CriticConfig(), module, optimizer, probes=probes)
    data = make_update()
    data.batch["values"] = critic.compute_values(data)
    metrics = critic.update_critic(data)
    mask = data.batch["response_mask"]
    returns = (data.batch["returns"] * mask).sum().item()
    assert metrics["critic/loss_targets"] == pytest.approx(returns, rel=1e-5)
    assert metrics["critic/first_update_diff"] < 1e-5
    assert metrics["critic/gradient_alignment"] == pytest.approx(1.0, abs=1e-4)
    assert not any(name.startswith("actor/") for name in metrics)


def test_the_reference_is_compared_with_what_was_loaded(lm: nn.Module) -> None:
    model = PolicyModel(copy.deepcopy(lm))
    probes = ReadProbes([ReferenceMovement()])
    assert probes.read(model) == {}
    assert probes.read(model) == {"ref_tensors_moved": 0}
    with torch.no_grad():
        model.lm.lm_head.weight += 1e-3
    assert probes.read(model) == {"ref_tensors_moved": 1}


@pytest.mark.seconds
@pytest.mark.parametrize("own_log_probs", [True, False])
def test_no_update_leaves_tensors_behind(lm: nn.Module, own_log_probs: bool) -> None:
    """A hook that holds the graph it is hooked to would keep it for ever."""
    data = made_data(lm, own_log_probs=own_log_probs)
    data.batch["row_number"] = torch.arange(7)
    recorder = TokenRecorder(records_gradients=True)
    actor = build(lm, [*all_probes(), recorder], ppo_micro_batch_size_per_gpu=3)

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    live = []
    for _ in range(6):
        actor.update_policy(data)
        live.append(live_tensors())
    assert live[5] == live[2]
