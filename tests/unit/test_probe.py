"""Probes of a test's own: what they are told, what they may not cost, and what they bring."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from data.protocol import DataProto
from tests.unit.test_actor_critic import make_update, small_device
from training.config import ActorConfig, PPOConfig, UpdatePlan
from training.features import Feature
from workers.dp_actor import DataParallelPPOActor
from workers.model.attention import use_packed_attention
from workers.model.probe import (
    FAULTS,
    GroupCounts,
    Measured,
    MicroBatch,
    MiniBatch,
    ReadProbe,
    SummingProbe,
    SyncProbe,
    UpdateProbe,
)
from workers.model.probe_set import ReadProbes, SyncProbes, UpdateProbes
from workers.model.probes_of_run import open_probes, open_read_probes
from workers.ranks.dispatch import Dispatch, register
from workers.ranks.local_group import LocalWorkerGroup

OWN_OF_THE_ACTOR = ["SamplingMismatch", "TokenCounts"]
HOOKS = ("loaded", "begin", "before_backward", "before_step", "after_step", "divide", "take")
# Three micro-batches or so in each mini-batch.
SMALL = {"ppo_max_token_len_per_gpu": 24}


@pytest.fixture(scope="module")
def lm(tiny_task: Path) -> nn.Module:
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    assert use_packed_attention(lm)
    return lm


@pytest.fixture
def faults_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run: a probe's fault does not end it."""
    monkeypatch.delenv(FAULTS)


class Diary(UpdateProbe):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.gradients: list[Tensor] = []

    def loaded(self, model: Any) -> None:
        self.lines.append(f"loaded {model.name}")

    def begin(self, model: Any, mini: MiniBatch) -> None:
        assert all(p.grad is None for p in model.module.parameters())
        last = " of the last epoch" if mini.in_last_epoch else ""
        self.lines.append(f"begin {mini.number} of {mini.updates}{last}")

    def before_backward(
        self, micro: MicroBatch, fields: Any, outputs: Mapping[str, Tensor], loss: Tensor
    ) -> None:
        shape = micro.rows.batch["responses"].shape
        assert {name: value.shape for name, value in outputs.items()} == {
            "log_prob": shape,
            "entropy": shape,
        }
        assert fields["advantages"].shape == shape and loss.requires_grad
        self.lines.append("micro")

    def divide(self, by: GroupCounts) -> None:
        self.lines.append(f"divide {by.tokens:g} {by.loss:g}")

    def before_step(self, model: Any, mini: MiniBatch, loss_of: Any) -> None:
        gradients = [p.grad.flatten() for p in model.module.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(gradients))
        self.lines.append("gradient")

    def after_step(self, model: Any, outcome: str) -> None:
        self.lines.append(outcome)

    def take(self) -> Measured:
        self.lines.append("take")
        return Measured(record=list(self.lines))


class Tokens(SummingProbe):
    """Counts tokens, and reads off the backward pass how much of the loss came to them."""

    name = "counted"
    fields = ("row_number",)

    def before_backward(
        self, micro: MicroBatch, fields: Any, outputs: Mapping[str, Tensor], loss: Tensor
    ) -> None:
        self.sums.add({"probe/tokens": fields["response_mask"].sum()})
        self.sums.maximum({"probe/longest": fields["response_mask"].sum(dim=1).max().float()})
        sums = self.sums

        def weigh(gradient: Tensor) -> None:
            sums.add({"probe/weight": gradient.abs().sum()}, self.mini.weight)

        outputs["log_prob"].register_hook(self.guarded(weigh))

    def divide(self, by: GroupCounts) -> None:
        self.sums.divide(by.loss, {"probe/tokens": 1.0})

    def metrics_of(self, totals: dict[str, float]) -> dict[str, float]:
        return totals | {"probe/weight_a_token": totals["probe/weight"] / totals["probe/tokens"]}


def build(lm: nn.Module, *probes: UpdateProbe, **settings: Any) -> DataParallelPPOActor:
    module = copy.deepcopy(lm)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    config = ActorConfig(**settings)
    return DataParallelPPOActor(config, module, optimizer, probes=UpdateProbes(probes))


def weights(actor: DataParallelPPOActor) -> Tensor:
    return torch.cat([p.detach().flatten() for p in actor.module.parameters()])


def groups(data: DataProto) -> Iterator[DataProto]:
    for uid in "cab":
        rows = [row for row, own in enumerate("aaaabbc") if own == uid]
        yield data.select_idxs(torch.tensor(rows))


def test_an_update_tells_each_hook_in_its_order(lm: nn.Module) -> None:
    diary = Diary()
    actor = build(lm, diary, **SMALL, ppo_epochs=2)
    assert diary.lines == ["loaded actor"]
    data = make_update().select_idxs(torch.arange(6))
    actor.update_policy(data, UpdatePlan.of_rows(6, 3, 2, False))
    lines = [line for line in diary.lines if line != "micro"]
    expected = ["loaded actor"]
    for number, last in enumerate(("", "", " of the last epoch", " of the last epoch")):
        expected += [f"begin {number} of 4{last}", "gradient", "made"]
    assert lines == [*expected, "take"]
    assert diary.lines.count("micro") > 4
    assert all(
        diary.lines[place - 1].startswith(("begin", "micro"))
        for place, line in enumerate(diary.lines)
        if line == "micro"
    )
    assert actor.probes.take_records() == {"Diary": diary.lines}
    assert actor.probes.take_records() == {}, "it is there once"


def test_groups_that_come_one_by_one_tell_the_same_hooks(lm: nn.Module) -> None:
    diary = Diary()
    actor = build(lm, diary)
    data = make_update()
    for part in groups(data):
        actor.add_groups(part)
    actor.finish_update()
    tokens = int(data.batch["response_mask"].sum())
    assert diary.lines == [
        "loaded actor",
        "begin 0 of 1 of the last epoch",
        *["micro"] * 3,
        f"divide {tokens} {tokens}",
        "gradient",
        "made",
        "take",
    ]


@pytest.mark.parametrize("by_groups", [False, True])
def test_the_gradient_that_is_shown_is_whole_and_not_yet_clipped(
    lm: nn.Module, by_groups: bool
) -> None:
    whole = Diary()
    build(lm, whole, ppo_max_token_len_per_gpu=1000).update_policy(make_update())
    parts = Diary()
    actor = build(lm, parts, **SMALL, grad_clip=1e-3)
    if by_groups:
        for part in groups(make_update()):
            actor.add_groups(part)
        actor.finish_update()
    else:
        actor.update_policy(make_update())
    [expected] = whole.gradients
    [shown] = parts.gradients
    assert shown.norm() > 1e-2
    torch.testing.assert_close(shown, expected, rtol=1e-4, atol=1e-6)


def test_a_mini_batch_that_begins_anew_is_counted_once(lm: nn.Module) -> None:
    settings = {"ppo_max_token_len_per_gpu": 1000, "ppo_epochs": 2}
    plan = UpdatePlan.of_rows(7, 7, 2)
    expected = build(lm, Tokens(), **settings).update_policy(make_update(), plan)
    diary = Diary()
    actor = build(lm, Tokens(), diary, **settings)
    with small_device(actor.actor_module.lm, 24):
        metrics = actor.update_policy(make_update(), plan)
    begun = [line for line in diary.lines if line.startswith("begin")]
    assert len(begun) > 2 and begun[0] == begun[1], "once more"
    assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-7)
    assert metrics["probe/tokens"] == 2 * make_update().batch["response_mask"].sum()


def test_what_groups_sum_up_is_what_the_whole_batch_does(lm: nn.Module) -> None:
    data = make_update()
    expected = build(lm, Tokens()).update_policy(data)
    actor = build(lm, Tokens())
    for _ in range(2):
        actor.module.load_state_dict(build(lm).module.state_dict())
        for part in groups(data):
            actor.add_groups(part)
        assert actor.finish_update() == pytest.approx(expected, rel=2e-5, abs=1e-7)


def test_probes_leave_weights_and_metrics_bitwise_as_they_are(lm: nn.Module) -> None:
    settings = {**SMALL, "ppo_epochs": 2, "entropy_coeff": 0.1, "use_kl_loss": True}
    plan = UpdatePlan.of_rows(7, 7, 2)
    plain = build(lm, **settings)
    expected = plain.update_policy(make_update(), plan)
    probed = build(lm, Tokens(), Diary(), **settings)
    metrics = probed.update_policy(make_update(), plan)
    assert torch.equal(weights(plain), weights(probed))
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["probe/longest"] == make_update().batch["response_mask"].sum(dim=1).max()


def raising(hook: str, error: BaseException) -> UpdateProbe:
    """A probe that counts its calls, and raises in one of its hooks."""

    class Raising(UpdateProbe):
        name = "raising"
        calls = 0

    def fail(self: Any, *args: Any) -> Any:
        type(self).calls += 1
        raise error

    setattr(Raising, hook, fail)
    return Raising()


@pytest.mark.usefixtures("faults_are_told")
def test_a_probe_that_calls_sys_exit_costs_itself(
    lm: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    expected = build(lm, Tokens()).update_policy(make_update())
    actor = build(lm, raising("before_step", SystemExit("enough")), Tokens())
    assert actor.update_policy(make_update()) == expected
    assert "probe raising is switched off" in caplog.text and "SystemExit: enough" in caplog.text


@pytest.mark.usefixtures("faults_are_told")
@pytest.mark.parametrize("hook", [*HOOKS, "metrics_of"])
def test_a_probe_that_raises_costs_itself_and_is_told_of_once(
    lm: nn.Module, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = build(lm, Tokens())
    metrics = [expected.update_policy(make_update()) for _ in range(3)]
    for part in groups(make_update()):
        expected.add_groups(part)
    metrics.append(expected.finish_update())
    probe: Any = raising(hook, ZeroDivisionError("a fault of the probe's own"))
    with caplog.at_level(logging.WARNING):
        actor = build(lm, probe, Tokens())
        got = [actor.update_policy(make_update()) for _ in range(2)]
        if hook == "divide":
            for part in groups(make_update()):
                actor.add_groups(part)
            actor.finish_update()
            actor.module.load_state_dict(expected.module.state_dict())
        got.append(actor.update_policy(make_update()))
    assert probe.calls == 1
    assert got[:2] == metrics[:2], "the other goes on, and so does the update"
    [said] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "probe raising is switched off for the rest of the run" in said
    assert "ZeroDivisionError: a fault of the probe's own" in said


def measuring(measured: Any, metrics: Any = None) -> UpdateProbe:
    """A probe that returns this of an update."""

    class Measuring(UpdateProbe):
        name = "measuring"

        def take(self) -> Any:
            return measured

        def metrics_of(self, totals: Any) -> Any:
            return totals if metrics is None else metrics

    return Measuring()


@pytest.mark.usefixtures("faults_are_told")
@pytest.mark.parametrize(
    "probe",
    [
        measuring(None),
        measuring(Measured(sums={"mine/number": 1.0})),  # type: ignore[dict-item]
        measuring(Measured(maxima={"mine/vector": torch.ones(2)})),
        measuring(Measured(sums={3: torch.ones(())})),  # type: ignore[dict-item]
        measuring(Measured(sums={"actor/grad_norm": torch.tensor(99.0)})),
        measuring(Measured(sums={"mine/a": torch.ones(())}), metrics={"mine/a": "text"}),
    ],
    ids=["nothing", "number", "vector", "no name", "the update's own", "text"],
)
def test_a_probe_that_measures_what_it_may_not_costs_itself(
    lm: nn.Module, probe: UpdateProbe
) -> None:
    expected = build(lm, Tokens()).update_policy(make_update())
    got = build(lm, probe, Tokens()).update_policy(make_update())
    assert got == expected


@pytest.mark.usefixtures("faults_are_told")
def test_what_a_probe_raises_in_a_backward_pass_costs_the_probe(
    lm: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    class OfGradients(UpdateProbe):
        def before_backward(self, micro: Any, fields: Any, outputs: Any, loss: Any) -> None:
            outputs["log_prob"].register_hook(self.guarded(lambda gradient: 1 // 0))

    actor = build(lm, OfGradients(), **SMALL)
    actor.update_policy(make_update())
    actor.update_policy(make_update())
    plain = build(lm, **SMALL)
    plain.update_policy(make_update())
    plain.update_policy(make_update())
    assert torch.equal(weights(actor), weights(plain))
    assert caplog.text.count("probe OfGradients is switched off") == 1


@pytest.mark.usefixtures("faults_are_told")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("CUDA: none left")])
def test_ctrl_c_and_out_of_memory_pass_through(lm: nn.Module, error: BaseException) -> None:
    with pytest.raises(type(error)):
        build(lm, raising("before_step", error)).update_policy(make_update())


@pytest.mark.usefixtures("faults_are_told")
def test_a_probe_without_memory_has_the_mini_batch_begin_anew(lm: nn.Module) -> None:
    class Large(UpdateProbe):
        def before_backward(self, micro: Any, fields: Any, outputs: Any, loss: Any) -> None:
            if len(micro.places) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    large = Large()
    settings = {"ppo_micro_batch_size_per_gpu": 7}
    expected = build(lm, Tokens(), **settings).update_policy(make_update())
    metrics = build(lm, Tokens(), large, **settings).update_policy(make_update())
    assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-7) and large.fault is None


def test_in_tests_a_probe_that_raises_fails_its_test(lm: nn.Module) -> None:
    with pytest.raises(ZeroDivisionError):
        build(lm, raising("after_step", ZeroDivisionError())).update_policy(make_update())


def test_two_probes_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two probes are called counted: .*`name` of its own"):
        UpdateProbes([Tokens(), Tokens()])


def test_a_rank_is_sent_the_fields_that_its_probes_need() -> None:
    class Worker:
        probes = UpdateProbes([Tokens(), Diary()])

        @register(Dispatch.RANK_ZERO)
        def probe_fields(self) -> tuple[str, ...]:
            return self.probes.fields()

        @register(Dispatch.DP_COMPUTE_PROTO, reads=("responses",), further_reads="probe_fields")
        def update(self, data: DataProto) -> list[str]:
            return sorted(data.batch.keys())

    data = make_update()
    data.batch["row_number"] = torch.arange(7)
    assert LocalWorkerGroup(Worker()).update(data) == ["responses", "row_number"]


@pytest.mark.usefixtures("faults_are_told")
def test_a_read_model_is_shown_when_it_is_loaded_and_behind_each_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Sums(ReadProbe):
        first: float | None = None

        def read(self, module: nn.Module) -> Measured:
            total = float(module.weight.detach().sum())
            if self.first is None:
                self.first = total
                return Measured()
            return Measured(maxima={"moved": torch.tensor(total - self.first)})

    module = nn.Linear(2, 1, bias=False)
    probes = ReadProbes([Sums()])
    assert probes.read(module) == {}
    with torch.no_grad():
        module.weight += 1
    assert probes.read(module) == {"moved": pytest.approx(2.0)}
    del module.weight
    assert probes.read(module) == {} == probes.read(module)
    assert caplog.text.count("probe Sums is switched off") == 1


@pytest.mark.usefixtures("faults_are_told")
def test_what_was_seen_of_the_policy_is_compared_with_the_engine_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Numbers(SyncProbe):
        def weights_sent(self, actor: Any) -> Tensor | None:
            return None if actor == 0 else torch.tensor([float(actor)])

        def weights_taken(self, engine: Any, sent: Tensor) -> Measured:
            return Measured(maxima={"apart": (engine - sent).abs().max()})

    # Of the policy's ranks, and of the engines'.
    policy = SyncProbes([Numbers()])
    engines = SyncProbes([Numbers()])
    assert engines.weights_taken(5, policy.weights_sent(3)) == {"apart": 2.0}
    assert engines.weights_taken(5, policy.weights_sent(0)) == {}, "nothing to compare with"
    assert policy.weights_sent("no number") == {}
    assert engines.weights_taken(5, policy.weights_sent(3)) == {}
    assert caplog.text.count("probe Numbers is switched off") == 1


@pytest.mark.usefixtures("faults_are_told")
def test_probes_that_cannot_be_made_cost_themselves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = "features.nothing_such:update_probes"
    brought = {"missing": Feature(probes=missing)}
    monkeypatch.setattr("training.features.features", lambda: brought)
    config = PPOConfig()
    assert [probe.name for probe in open_probes(config, "actor")] == OWN_OF_THE_ACTOR
    assert [probe.name for probe in open_probes(config, "critic")] == ["TokenCounts"]
    assert f"the probes of {missing} could not be made" in caplog.text
    monkeypatch.setenv(FAULTS, "raise")
    with pytest.raises(ValueError, match=r"there is no module 'features\.nothing_such'"):
        open_probes(config, "actor")


@pytest.mark.usefixtures("faults_are_told")
@pytest.mark.parametrize("returned", [None, [1], "probes"])
def test_a_function_that_returns_no_probes_is_told_with_what_it_may_return(
    returned: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brought = {"mine": Feature(probes="mine:update_probes")}
    monkeypatch.setattr("training.features.features", lambda: brought)
    monkeypatch.setattr("workers.model.probes_of_run.OWN_PROBES", ())
    monkeypatch.setattr(
        "workers.model.probes_of_run.load_object", lambda source, key: lambda *arguments: returned
    )
    assert open_probes(PPOConfig(), "actor") == []
    assert f"{returned!r} was returned: return a list of UpdateProbe" in caplog.text


def test_without_features_nothing_measures_but_the_core(no_features: Path) -> None:
    alone = PPOConfig()
    assert [probe.name for probe in open_probes(alone, "actor")] == OWN_OF_THE_ACTOR
    assert [probe.name for probe in open_probes(alone, "critic")] == ["TokenCounts"]
    assert open_read_probes(alone, "ref") == []
