"""What an update records of each token, against the loss's own inputs and gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from data.protocol import DataProto
from features.records.token_record import TokenRecorder, UpdateRecord, token_records
from tests.unit.test_actor_critic import make_update
from training.config import ActorConfig, UpdatePlan
from training.core_algos import POLICY_LOSS_REGISTRY, agg_loss, get_policy_loss_fn
from workers.dp_actor import DataParallelPPOActor
from workers.model.attention import use_packed_attention
from workers.model.probe_set import UpdateProbes

SPLITS = [{"ppo_max_token_len_per_gpu": 24}, {"ppo_micro_batch_size_per_gpu": 3}]


@pytest.fixture(scope="module")
def lm(tiny_task: Path) -> nn.Module:
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    assert use_packed_attention(lm)
    return lm


def numbered(data: DataProto) -> DataProto:
    """Numbers the rows, not in their order."""
    data.batch["row_number"] = torch.tensor([30, 10, 20, 5, 7, 6, 8])[: len(data)]
    return data


def build(
    lm: nn.Module, *, records: bool = True, gradients: bool = False, **settings: Any
) -> DataParallelPPOActor:
    module = copy.deepcopy(lm)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    probes = UpdateProbes([TokenRecorder(records_gradients=gradients)] if records else [])
    return DataParallelPPOActor(ActorConfig(**settings), module, optimizer, probes=probes)


def taken(actor: DataParallelPPOActor) -> UpdateRecord | None:
    """The record of the last update."""
    [record] = token_records([actor.probes.take_records()])
    return record


def by_row(record: UpdateRecord, name: str) -> dict[tuple[int, int], np.ndarray]:
    """The values of each row's tokens, by mini-batch and row."""
    ends = record.lengths.cumsum()
    values = {}
    for number, mini_batch, end, length in zip(
        record.row_numbers, record.passes, ends, record.lengths, strict=True
    ):
        values[int(mini_batch), int(number)] = record.tokens[name][end - length : end]
    return values


@pytest.mark.parametrize("split", SPLITS)
def test_it_is_what_the_loss_was_given_whatever_the_order_and_the_cut(
    lm: nn.Module, monkeypatch: pytest.MonkeyPatch, split: dict[str, int]
) -> None:
    vanilla = get_policy_loss_fn("vanilla")
    seen: list[dict[str, Tensor]] = []

    def capturing(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: Any,
        config: Any,
    ) -> Any:
        log_prob.retain_grad()
        seen.append({"advantages": advantages, "log_prob": log_prob, "mask": response_mask})
        return vanilla(
            old_log_prob,
            log_prob,
            advantages,
            response_mask,
            loss_agg_mode=loss_agg_mode,
            config=config,
        )

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "vanilla", capturing)
    data = numbered(make_update()).pad_with_dummies(8)
    actor = build(lm, ppo_epochs=2, shuffle=True, use_kl_loss=True, kl_loss_coef=0.3, **split)
    actor.update_policy(data, UpdatePlan.of_rows(8, 4, 2, shuffle=True))
    record = taken(actor)
    assert record.times_trained == dict.fromkeys([5, 6, 7, 8, 10, 20, 30], 2)
    # Two mini-batches in each of two epochs, of which the last one is kept.
    assert set(record.passes.tolist()) == {2, 3}
    weights, log_probs = by_row(record, "policy_weight"), by_row(record, "log_prob")
    assert {row for _, row in weights} == set(record.times_trained)
    rows_seen = [
        (row, loss["log_prob"][place], loss["log_prob"].grad[place])
        for loss in seen
        for place, row in enumerate(loss["advantages"])
        # The dummy is a copy of row 0.
        if loss["mask"][place].any()
    ]
    for place, row_number in enumerate(data.batch["row_number"][:7].tolist()):
        [key] = [key for key in weights if key[1] == row_number]
        advantages = data.batch["advantages"][place]
        if not data.batch["response_mask"][place].any():
            continue
        matches = [seen for seen in rows_seen if torch.equal(seen[0], advantages)]
        assert len(matches) >= 2
        _, log_prob, gradient = matches[-1]
        count = len(log_probs[key])
        attended = data.batch["attention_mask"][place, -len(advantages) :].sum()
        assert count == attended
        assert np.array_equal(log_probs[key], log_prob[:count].detach().numpy())
        assert np.array_equal(weights[key], -gradient[:count].numpy())
        assert (weights[key] != 0).any()


def test_recording_leaves_weights_and_metrics_bitwise_as_they_are(lm: nn.Module) -> None:
    results = []
    for records in (True, False):
        actor = build(lm, records=records, gradients=True, ppo_epochs=2, entropy_coeff=0.1)
        metrics = actor.update_policy(numbered(make_update()), UpdatePlan.of_rows(7, 7, 2, False))
        results.append((metrics, [p.detach().clone() for p in actor.module.parameters()]))
    (one, weights), (other, same_weights) = results
    assert one == other
    assert all(torch.equal(a, b) for a, b in zip(weights, same_weights, strict=True))


@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-mean", "token-sum"])
def test_groups_that_come_one_by_one_are_recorded_as_all_at_once(
    lm: nn.Module, loss_agg_mode: Any
) -> None:
    data = numbered(make_update())
    whole = build(lm, loss_agg_mode=loss_agg_mode)
    whole.update_policy(data)
    parts = build(lm, loss_agg_mode=loss_agg_mode)
    for uid in "cab":
        rows = [i for i, own in enumerate("aaaabbc") if own == uid]
        parts.add_groups(data.select_idxs(torch.tensor(rows)))
    parts.finish_update()
    record, expected = taken(parts), taken(whole)
    for name in ("log_prob", "entropy", "policy_weight"):
        got, wanted = by_row(record, name), by_row(expected, name)
        assert got.keys() == wanted.keys()
        for key, values in got.items():
            np.testing.assert_allclose(values, wanted[key], rtol=1e-4, atol=1e-7)
    assert taken(parts) is None


def test_an_update_with_a_gradient_that_is_not_finite_is_marked(lm: nn.Module) -> None:
    data = numbered(make_update())
    data.batch["advantages"][0, 0] = torch.nan
    data.batch["response_mask"][0, 0] = 1
    actor = build(lm)
    actor.update_policy(data, UpdatePlan.of_rows(7, 7, 1, False))
    assert taken(actor).skipped == (0,)


def test_shares_of_the_gradient_add_up_to_one_and_are_those_of_plain_autograd(
    lm: nn.Module,
) -> None:
    data = numbered(make_update())
    actor = build(lm, gradients=True, grad_clip=1e-3, entropy_coeff=0.1, use_kl_loss=True)
    actor.update_policy(data, UpdatePlan.of_rows(7, 7, 1, False))
    shares = taken(actor).gradient_shares
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-5)

    def gradient_of(rows: list[int]) -> Tensor:
        """The gradient of a loss of one's own words, of these rows of the mini-batch."""
        module = copy.deepcopy(lm)
        own = DataParallelPPOActor(ActorConfig(), module, None)
        fields = data.batch
        log_prob, entropy = own.forward(data)
        mask = fields["response_mask"].bool()
        ratio = (log_prob - fields["old_log_probs"]).exp()
        gain = torch.minimum(
            ratio * fields["advantages"], ratio.clamp(0.8, 1.2) * fields["advantages"]
        )
        lower = torch.maximum(-gain, torch.zeros(()) - gain)
        bound = torch.where(
            fields["advantages"] < 0, torch.minimum(lower, -3.0 * fields["advantages"]), lower
        )
        difference = fields["ref_log_prob"] - log_prob
        kl = (difference.exp() - difference - 1).clamp(-10, 10)
        token_losses = bound - 0.1 * entropy + 0.001 * kl
        loss = torch.where(mask, token_losses, 0)[rows].sum() / mask.sum()
        gradients = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
        return torch.cat([g.flatten() for g in gradients if g is not None]).double()

    whole = gradient_of(list(range(7)))
    for place, row_number in enumerate(data.batch["row_number"].tolist()):
        expected = float(gradient_of([place]) @ whole / (whole @ whole))
        assert shares[row_number] == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_a_loss_of_ones_own_that_adds_up_otherwise_is_recorded_too(
    lm: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_no_advantage(log_prob: Tensor, response_mask: Tensor, loss_agg_mode: Any) -> Any:
        return agg_loss(-2.0 * log_prob, response_mask, loss_agg_mode), {}

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "vanilla", of_no_advantage)
    data = numbered(make_update())
    actor = build(lm)
    actor.update_policy(data)
    tokens = int(data.batch["response_mask"].sum())
    record = taken(actor)
    weights = np.unique(record.tokens["policy_weight"])
    np.testing.assert_allclose(weights[weights != 0], 2.0 / tokens, rtol=1e-6)
