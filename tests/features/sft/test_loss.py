"""The loss of given rows: cross-entropy by hand, its gradient, alone and beside a policy's."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from data.epoch_order import EpochOrder
from data.protocol import DataProto
from features.sft.batches import batch_of, rows_of_update
from features.sft.beside import SFTRows
from features.sft.loss import cross_entropy
from features.sft.turns import TrainedRow
from features.sft.worker import SFTActor
from tests.processes.test_ranks import build, change, join_ranks, spawn_ranks, whole_weights
from tests.unit.test_actor_critic import SPLITS, make_update
from training.config import ActorConfig, UpdatePlan
from training.core_algos import GlobalBatchInfo
from workers.dp_actor import DataParallelPPOActor
from workers.model.attention import use_packed_attention
from workers.model.forward_settings import ForwardSettings

PAD = 0
COEF = 0.3
LAYOUTS = ({"pack_rows": True}, {}, {"strip_padding": False})


@pytest.fixture(scope="module")
def lm(tiny_task: Path) -> nn.Module:
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    assert use_packed_attention(lm)
    return lm


def make_rows(seed: int = 0, count: int = 6) -> list[TrainedRow]:
    """Rows of 4 to 12 tokens; some are learnt, the first never."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        length = draw.randint(4, 12)
        mask = [0, *(draw.choice((0, 1)) for _ in range(length - 2)), 1]
        rows.append(TrainedRow([draw.randrange(4, 40) for _ in range(length)], mask))
    return rows


def by_hand(lm: nn.Module, rows: list[TrainedRow]) -> Tensor:
    """The mean of -log softmax over the learnt tokens, row by row, by transformers alone."""
    losses = []
    for row in rows:
        logits = lm(torch.tensor([row.ids])).logits[0].float()
        for place, is_learnt in enumerate(row.mask):
            if is_learnt:
                scores = logits[place - 1]
                losses.append(scores.exp().sum().log() - scores[row.ids[place]])
    return torch.stack(losses).mean()


def gradient_by_hand(lm: nn.Module, rows: list[TrainedRow]) -> tuple[Tensor, float]:
    module = copy.deepcopy(lm)
    module.set_attn_implementation("eager")
    loss = by_hand(module, rows)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()]), loss.item()


def step_of(
    lm: nn.Module, kind: type[DataParallelPPOActor], data: DataProto, **settings: Any
) -> tuple[Tensor, dict[str, float]]:
    """The change of the weights in a step of SGD with rate 1, and the metrics."""
    module = copy.deepcopy(lm)
    further = settings.pop("further", ())
    layout = settings.pop("layout", {})
    plan = settings.pop("plan", None)
    actor = kind(
        ActorConfig(grad_clip=1e9, **settings),
        module,
        torch.optim.SGD(module.parameters(), lr=1.0),
        forward=ForwardSettings(**layout),
    )
    actor.further_rows = further
    metrics = actor.update_policy(data, plan)
    changes = [p - q for p, q in zip(module.parameters(), lm.parameters(), strict=True)]
    return torch.cat([each.detach().flatten() for each in changes]), metrics


def assert_close(one: Tensor, other: Tensor) -> None:
    assert other.norm() > 1e-3
    assert (one - other).norm() <= 2e-5 * other.norm()


@pytest.mark.seconds
@pytest.mark.parametrize("layout", LAYOUTS, ids=("packed", "stripped", "padded"))
@pytest.mark.parametrize("split", SPLITS)
def test_loss_and_gradient_are_cross_entropy_by_hand(
    lm: nn.Module, layout: dict[str, Any], split: dict[str, int]
) -> None:
    rows = make_rows()
    gradient, loss = gradient_by_hand(lm, rows)
    changed, metrics = step_of(lm, SFTActor, batch_of(rows, PAD), layout=layout, **split)
    assert metrics["actor/sft_loss"] == pytest.approx(loss, rel=1e-5)
    assert_close(changed, -gradient)


@pytest.mark.seconds
def test_rows_that_begin_alike_share_it_and_the_loss_stays(lm: nn.Module) -> None:
    begin = [5, 6, 7, 8, 9, 10]
    rows = [TrainedRow([*begin, 11 + n, 20], [0] * 6 + [1, 1]) for n in range(4)]
    gradient, loss = gradient_by_hand(lm, rows)
    layout = {"pack_rows": True, "key_cost": 0.01}
    changed, metrics = step_of(lm, SFTActor, batch_of(rows, PAD), layout=layout)
    assert metrics["actor/sft_loss"] == pytest.approx(loss, rel=1e-5)
    assert_close(changed, -gradient)


def further_rows(rows: list[TrainedRow], size: int) -> SFTRows:
    return SFTRows(rows, EpochOrder(rows, seed=0, shuffle=True), COEF, size, PAD)


@pytest.mark.seconds
@pytest.mark.parametrize("split", SPLITS)
def test_beside_a_policy_the_gradients_add_up(lm: nn.Module, split: dict[str, int]) -> None:
    rows = make_rows(1, count=8)
    alone, without = step_of(lm, DataParallelPPOActor, make_update(), **split)
    source = further_rows(rows, size=5)
    both, metrics = step_of(lm, DataParallelPPOActor, make_update(), further=[source], **split)
    learnt = [rows[number] for number in rows_of_update(source.order, 5, 0)]
    gradient, loss = gradient_by_hand(lm, learnt)
    assert metrics["actor/sft_loss"] == pytest.approx(loss, rel=1e-5)
    assert_close(both - alone, -COEF * gradient)
    assert metrics["actor/pg_loss"] == without["actor/pg_loss"]
    assert "actor/sft_loss" not in without


@pytest.mark.seconds
def test_a_batch_without_a_sampled_token_still_learns_the_rows(lm: nn.Module) -> None:
    data = make_update()
    data.batch["response_mask"].zero_()
    rows = make_rows(1, count=4)
    changed, _ = step_of(lm, DataParallelPPOActor, data, further=[further_rows(rows, 4)])
    gradient, _ = gradient_by_hand(lm, rows)
    assert_close(changed, -COEF * gradient)


@pytest.mark.seconds
def test_each_mini_batch_of_a_step_has_the_next_rows(lm: nn.Module) -> None:
    """Two steps of two mini-batches: rows 0 to 3, of two each, in their order."""

    class Remembered(SFTRows):
        seen: list[int]

        def batch(self, update: int, share: int, shares: int) -> DataProto:
            self.seen.append(update)
            return super().batch(update, share, shares)

    rows = make_rows(2, count=8)
    source = Remembered(rows, EpochOrder(rows, seed=0, shuffle=False), COEF, 2, PAD)
    source.seen = []
    data = make_update().slice(0, 6)
    for step in (1, 2):
        data.meta_info["global_steps"] = step
        plan = UpdatePlan(mini_batches=2)
        step_of(lm, DataParallelPPOActor, data, further=[source], plan=plan)
    assert source.seen == [0, 1, 2, 3]


def test_updates_go_through_the_rows_epoch_by_epoch() -> None:
    rows = list(range(5))
    order = EpochOrder(rows, seed=3, shuffle=True)
    given = [number for update in range(5) for number in rows_of_update(order, 3, update)]
    for epoch in range(3):
        assert sorted(given[epoch * 5 : epoch * 5 + 5]) == rows
    assert given[:5] != given[5:10], "each epoch has an order of its own"
    assert rows_of_update(order, 3, 4) == given[12:15], "an order follows from the number alone"
    more_than_all = rows_of_update(EpochOrder(rows, seed=3, shuffle=False), 12, 0)
    assert more_than_all == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_shares_of_ranks_are_all_rows_of_an_update_once() -> None:
    rows = [TrainedRow([4, 5 + number], [0, 1]) for number in range(7)]
    source = further_rows(rows, size=5)
    whole = source.batch(3, 0, 1).batch["responses"].flatten().tolist()
    parts = [source.batch(3, share, 2).batch["responses"].flatten().tolist() for share in (0, 1)]
    assert sorted(parts[0] + parts[1]) == sorted(whole)
    lonely = further_rows(rows, size=1).batch(0, 1, 2)
    assert len(lonely) == 1 and not lonely.batch["response_mask"].any()


# Two ranks


def run_rank(folder: str, number: int, world: int, port: int, kind: str = "cpu") -> None:
    """Makes updates of given rows alone, and beside a policy's; rank 0 writes down the changes."""
    device = join_ranks(number, world, port, kind)
    settings = ForwardSettings(device=device)
    rows = make_rows()
    results = {}
    whole = batch_of(rows, PAD)
    actor = SFTActor(ActorConfig(grad_clip=1e9), *build(folder, "actor", device), forward=settings)
    before = whole_weights(actor.actor_module)
    metrics = actor.update_policy(whole.chunk(world)[number])
    results["alone"] = (change(before, actor.actor_module), metrics)
    for size in (1, 5):
        beside = DataParallelPPOActor(
            ActorConfig(grad_clip=1e9), *build(folder, "actor", device), forward=settings
        )
        beside.further_rows = [further_rows(rows, size)]
        before = whole_weights(beside.actor_module)
        data = make_update().pad_with_dummies(2).chunk(world)[number]
        metrics = beside.update_policy(data)
        results[f"beside {size}"] = (change(before, beside.actor_module), metrics)
    if number == 0:
        torch.save(results, Path(folder) / f"results-{world}.pt")
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@pytest.mark.seconds
def test_two_ranks_make_the_update_of_one(tiny_task: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(tiny_task / "model")
    for world in (1, 2):
        spawn_ranks(run_rank, str(tmp_path), world, "cpu")
    one, two = (torch.load(tmp_path / f"results-{world}.pt") for world in (1, 2))
    assert one.keys() == two.keys() == {"alone", "beside 1", "beside 5"}
    for name, (changes, metrics) in one.items():
        others, other_metrics = two[name]
        scale = max(float(tensor.abs().max()) for tensor in changes.values())
        assert scale > 1e-4
        for parameter, tensor in changes.items():
            assert float((tensor - others[parameter]).abs().max()) < 1e-5 * scale, name
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)


def test_a_loss_that_is_no_number_is_not_taken_for_none() -> None:
    mask = torch.tensor([[1, 1, 0]])
    counts = GlobalBatchInfo(dp_size=1, batch_num_tokens=2)
    banned = torch.tensor([[-1.0, -1e15, 0.0]])
    assert cross_entropy(banned, mask, counts).item() == pytest.approx(0.5)
    lost = torch.tensor([[-1.0, float("nan"), 0.0]])
    assert cross_entropy(lost, mask, counts).isnan()
