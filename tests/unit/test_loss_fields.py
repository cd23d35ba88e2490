"""The one list of fields that reach a loss: what is sent, and what a loss finds, follow from it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.unit.test_actor_critic import make_update
from training.config import ActorConfig, PolicyLossChoice
from training.core_algos import POLICY_LOSS_REGISTRY, agg_loss
from workers.dp_actor import DataParallelPPOActor
from workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from workers.model import loss_fields
from workers.ranks.dispatch import registered_methods

CPU = torch.device("cpu")


def test_an_update_is_sent_the_forward_pass_fields_and_every_listed_field_once() -> None:
    forward = set(loss_fields.FORWARD_FIELDS)
    # The policy's passes alone get the engine's experts; the reference chooses for itself.
    policy = {*loss_fields.POLICY_LOSS_FIELDS, "routed_experts"}
    values = set(loss_fields.VALUE_LOSS_FIELDS)
    actor, critic = registered_methods(ActorRolloutRefWorker), registered_methods(CriticWorker)
    sent = {
        "update_actor": (actor["update_actor"].reads, forward | policy),
        "add_groups": (actor["add_groups"].reads, forward | policy),
        "update_actor_and_values": (
            actor["update_actor_and_values"].reads,
            forward | policy | values,
        ),
        "update_critic": (critic["update_critic"].reads, forward | values),
    }
    assert set(actor["compute_log_prob"].reads) == {*forward, "routed_experts"}
    assert set(actor["compute_ref_log_prob"].reads) == forward
    for name, (reads, expected) in sent.items():
        assert set(reads) == expected and len(reads) == len(expected), name
        registered = critic if name == "update_critic" else actor
        assert registered[name].further_reads == "further_fields", "and what probes need"


def test_a_loss_finds_the_listed_fields_that_the_batch_has_and_no_others() -> None:
    data = make_update()
    data.batch["something_else"] = torch.zeros(len(data))
    fields = loss_fields.loss_fields(data, CPU)
    listed = {"advantages", "old_log_probs", "ref_log_prob", "values", "returns"}
    assert fields.keys() == {"response_mask"} | listed


def test_a_registered_loss_gets_a_listed_field_by_the_name_of_its_parameter(
    tiny_task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def weighted(
        log_prob: Tensor, response_mask: Tensor, loss_agg_mode: Any, token_weights: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        seen.append(token_weights)
        return agg_loss(-log_prob * token_weights, response_mask, loss_agg_mode), {}

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "weighted", weighted)
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    config = ActorConfig(
        policy_loss=PolicyLossChoice(loss_mode="weighted"), ppo_micro_batch_size_per_gpu=7
    )
    data = make_update()
    data.batch["token_weights"] = torch.rand(data.batch["responses"].shape)

    def update() -> None:
        module = copy.deepcopy(lm)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        DataParallelPPOActor(config, module, optimizer).update_policy(data)

    with pytest.raises(ValueError, match="takes token_weights, which no batch brings"):
        update()
    with_weights = (*loss_fields.POLICY_LOSS_FIELDS, "token_weights")
    monkeypatch.setattr(loss_fields, "POLICY_LOSS_FIELDS", with_weights)
    update()
    [weights] = seen
    assert sorted(weights.flatten().tolist()) == sorted(
        data.batch["token_weights"].flatten().tolist()
    )
