"""One model for policy and values: its gradient, layouts, what leaves it, updates by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.protocol import DataProto
from setup import PolicyValueModel, PPOBatch, algo
from tests.e2e.test_training import tiny_config
from tests.unit.test_actor_critic import SPLITS, close, make_update
from tests.unit.test_checkpoint import save
from tests.unit.test_forward import LAYOUTS, plain_log_probs
from training.batch.head import logprobs_from_logits
from training.config import ActorConfig, CriticConfig, MicroBatching, OptimConfig
from training.config.loader import ConfigError
from workers.dp_actor import DataParallelPPOActor
from workers.model import state as model_state
from workers.model.attention import use_packed_attention
from workers.model.forward_settings import ForwardSettings
from workers.model.optimizer import build_optimizer, build_scheduler
from workers.model.policy_model import PolicyModel
from workers.weight_sync.manifest import iter_weights

CONFIG, CRITIC = ActorConfig(grad_clip=1e9), CriticConfig(share_backbone=True, value_loss_coef=0.7)


@pytest.fixture(scope="module")
def shared(tiny_task: Path) -> PolicyValueModel:
    model = PolicyValueModel.from_pretrained(str(tiny_task / "model"))
    assert use_packed_attention(model.lm)
    assert not model.value_head.weight.any(), "the first values are 0"
    torch.manual_seed(0)
    nn.init.normal_(model.value_head.weight, std=0.1)
    return model


def plain_values(model: PolicyValueModel, data: DataProto) -> Tensor:
    """Reads values by their definition, of the state before each token, row by row."""
    width = data.batch["prompts"].shape[1]
    values = torch.zeros(data.batch["responses"].shape)
    for row in range(len(data)):
        valid = data.batch["attention_mask"][row].bool()
        ids = torch.cat([data.batch["prompts"][row], data.batch["responses"][row]])[valid][None]
        states = model.lm.base_model(ids).last_hidden_state[0]
        start = int(valid[:width].sum())
        for column in data.batch["response_mask"][row].nonzero().flatten().tolist():
            values[row, column] = states[start + column - 1] @ model.value_head.weight[0]
    return values


def changed(
    model: PolicyValueModel, data: DataProto, config: ActorConfig, **settings: object
) -> tuple[Tensor, dict]:
    """Makes one SGD step of size 0.1; returns the change of every weight."""
    module = copy.deepcopy(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    actor = DataParallelPPOActor(
        config, module, optimizer, forward=ForwardSettings(**settings), critic=CRITIC
    )  # type: ignore[arg-type]
    metrics = actor.update_policy(data)
    change = [p - q for p, q in zip(module.parameters(), model.parameters(), strict=True)]
    return torch.cat([c.detach().flatten() for c in change]), metrics


def gradient(model: PolicyValueModel, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(
        loss, list(model.parameters()), retain_graph=True, allow_unused=True
    )
    return torch.cat(
        [
            torch.zeros(p.numel()) if g is None else g.flatten()
            for g, p in zip(found, model.parameters(), strict=True)
        ]
    )


def test_the_gradient_is_the_policys_and_so_much_of_the_values(shared) -> None:
    data, model = make_update(), copy.deepcopy(shared)
    advantages, mask = data.batch["advantages"], data.batch["response_mask"]
    old, returns = data.batch["values"], data.batch["returns"]
    ratio = (plain_log_probs(model.lm, data, 1.0)[0] - data.batch["old_log_probs"]).exp()
    clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    losses = torch.where(advantages < 0, torch.minimum(clipped, -3.0 * advantages), clipped)
    values = plain_values(model, data)
    near = values.clamp(old - 0.5, old + 0.5)
    errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    policy_loss, value_loss = (
        (losses * mask).sum() / mask.sum(),
        0.5 * (errors * mask).sum() / mask.sum(),
    )
    expected = -0.1 * (gradient(model, policy_loss) + 0.7 * gradient(model, value_loss))
    got, metrics = changed(shared, data, CONFIG)
    assert close(got, expected)
    assert metrics["actor/pg_loss"] == pytest.approx(policy_loss.item(), rel=1e-5)
    assert metrics["critic/vf_loss"] == pytest.approx(value_loss.item(), rel=1e-5)
    assert metrics["critic/vpred_mean"] == pytest.approx(
        values.sum().item() / mask.sum().item(), rel=1e-5
    )
    assert 0 < metrics["critic/vf_clipfrac"] < 1
    assert not close(got, -0.1 * gradient(model, policy_loss)), (
        "the values move the transformer too"
    )


@pytest.mark.parametrize("split", SPLITS[1:])
def test_gradient_and_metrics_do_not_depend_on_micro_batch_size(shared, split) -> None:
    data, config = make_update(), replace(CONFIG, entropy_coeff=0.1, use_kl_loss=True)
    expected, expected_metrics = changed(shared, data, replace(config, **SPLITS[0]))
    got, metrics = changed(shared, data, replace(config, **split))
    assert close(got, expected)
    assert metrics == pytest.approx(expected_metrics, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_come_with_the_log_probs_in_every_layout(shared, layout) -> None:
    data = make_update()
    actor = DataParallelPPOActor(CONFIG, shared, forward=ForwardSettings(**LAYOUTS[layout]))
    limits = MicroBatching(max_token_len=24)
    log_probs, entropies, squares, values = actor.read(data, "a test", limits, "squares")
    torch.testing.assert_close(values, plain_values(shared, data).detach(), rtol=1e-5, atol=1e-6)
    alone = DataParallelPPOActor(CONFIG, shared.lm, forward=ForwardSettings(**LAYOUTS[layout]))
    for own, other in zip(
        (log_probs, entropies, squares), alone.read(data, "a test", limits, "squares"), strict=True
    ):
        assert torch.equal(own, other)
    assert actor.compute_log_prob(data, limits=limits)[1] is None
    assert torch.equal(actor.compute_log_prob(data, True, limits)[1], entropies)


def test_an_update_without_values_to_regress_on_is_refused(shared) -> None:
    data = make_update()
    del data.batch["returns"]
    with pytest.raises(KeyError, match=r"critic\.share_backbone needs 'returns'"):
        changed(shared, data, CONFIG)


def test_an_export_and_the_engine_get_the_language_model_alone(shared, tiny_task, tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    model = PolicyModel(shared)
    model_state.huggingface_export(tmp_path, model, tokenizer, weights=True)()
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not (info["missing_keys"] or info["unexpected_keys"])
    sent = dict(iter_weights(model.lm, torch.float32))
    assert exported.state_dict().keys() == shared.lm.state_dict().keys() == sent.keys()


def test_a_checkpoint_holds_the_head(shared, tmp_path) -> None:
    models = [PolicyModel(copy.deepcopy(shared)) for _ in range(2)]
    states = [(model, build_optimizer(model, OptimConfig(lr=0.01))) for model in models]
    whole = [(*state, build_scheduler(state[1], OptimConfig(lr=0.01), 10)) for state in states]
    DataParallelPPOActor(CONFIG, *states[0], critic=CRITIC).update_policy(make_update())
    parts = ("model", "optimizer", "extra")
    save(tmp_path, whole[0], parts)
    model_state.load(tmp_path, whole[1], parts)
    for one, other in zip(*(model.named_parameters() for model in models), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert not torch.equal(models[1].value_head.weight, shared.value_head.weight)
    with pytest.raises(ValueError, match="was saved by another model"):
        lm = copy.deepcopy(shared.lm)
        optimizer = build_optimizer(lm, OptimConfig())
        model_state.load(
            tmp_path, (lm, optimizer, build_scheduler(optimizer, OptimConfig(), 1)), ("model",)
        )


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["algorithm.adv_estimator=grpo"],
            "algorithm.adv_estimator=grpo reads no values; take it out",
        ),
        (["critic.model.path=other"], "critic.model.path=other is not the actor's"),
        (["trainer.critic_warmup=1"], "there is no critic to warm up"),
    ],
)
def test_settings_that_a_shared_model_contradicts_are_refused(
    overrides, problem, tiny_task, tmp_path
) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny_config(tiny_task, tmp_path, "critic.share_backbone=true", *overrides)
    assert any(problem in told for told in refused.value.problems)


# What guides written for verl do


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_temperature_it_is_one(shared, layout) -> None:
    data = make_update()
    actor = DataParallelPPOActor(
        CONFIG, shared.lm.eval(), forward=ForwardSettings(**LAYOUTS[layout])
    )
    expected = actor.compute_log_prob(data, calculate_entropy=True)
    del data.meta_info["temperature"]
    for own, other in zip(
        actor.compute_log_prob(data, calculate_entropy=True), expected, strict=True
    ):
        assert torch.equal(own, other)
    data.meta_info["temperature"] = 0.5
    assert not torch.allclose(actor.compute_log_prob(data)[0], expected[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_gives_log_probs_and_entropies_with_a_gradient(shared, layout) -> None:
    data, lm = make_update(), copy.deepcopy(shared.lm)
    del data.meta_info["temperature"]
    actor = DataParallelPPOActor(CONFIG, lm, forward=ForwardSettings(**LAYOUTS[layout]))
    found, expected = actor.forward(data), plain_log_probs(lm, data, 1.0)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=2e-6)
    weights = torch.arange(found[0].numel()).view(found[0].shape) / 10
    gradients = [
        torch.autograd.grad((a * weights + b).sum(), list(lm.parameters()))
        for a, b in (found, expected)
    ]
    one, other = (torch.cat([g.flatten() for g in gradient]) for gradient in gradients)
    assert close(one, other)


# By hand


def test_logits_and_values_do_not_depend_on_padding(shared) -> None:
    ids = torch.tensor([[5, 8, 16, 9]])
    logits, values = shared.eval()(ids)
    assert logits.shape == (1, 4, logits.shape[-1]) and values.shape == (1, 4)
    padded, mask = torch.tensor([[0, 0, 5, 8, 16, 9, 0]]), torch.tensor([[0, 0, 1, 1, 1, 1, 0]])
    other_logits, other_values = shared(padded, mask)
    torch.testing.assert_close(other_logits[:, 2:6], logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other_values[:, 2:6], values, rtol=1e-5, atol=1e-5)
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 4]])
    torch.testing.assert_close(
        shared(padded, mask, positions)[1][:, 2:6], values, rtol=1e-5, atol=1e-5
    )
    written = shared.lm.generate(ids, max_new_tokens=2, do_sample=False)
    assert written.shape[1] <= 6 and torch.equal(written[:, 4], logits[:, -1].argmax(-1))


def test_a_batch_of_tensors_is_the_trainers_and_back(shared) -> None:
    data = make_update()
    batch = PPOBatch.from_dataproto(data).to("cpu")
    assert batch.input_ids.shape == batch.attention_mask.shape == (
        7,
        11,
    ) and batch.responses.shape == (7, 5)
    back = batch.to_dataproto()
    assert {*back.batch.keys()} == {*data.batch.keys()}
    assert all(torch.equal(back.batch[name], data.batch[name]) for name in back.batch.keys())  # noqa: SIM118
    few = PPOBatch.from_dataproto(
        data.select(["prompts", "responses", "attention_mask", "response_mask"])
    )
    assert few.values is None and "values" not in few.to_dataproto().batch


def test_an_update_by_hand_is_the_actors(shared) -> None:
    data, model = make_update(), copy.deepcopy(shared)
    batch = PPOBatch.from_dataproto(data)
    logits, values = model(batch.input_ids, batch.attention_mask)
    before_each = slice(-batch.responses.shape[1] - 1, -1)
    log_probs = logprobs_from_logits(logits[:, before_each], batch.responses)
    policy_loss, _ = algo.compute_policy_loss(
        batch.old_log_probs, log_probs, batch.advantages, batch.response_mask
    )
    value_loss, _ = algo.compute_value_loss(
        values[:, before_each], batch.returns, batch.values, batch.response_mask
    )
    expected, _ = changed(shared, data, CONFIG)
    assert close(-0.1 * gradient(model, policy_loss + 0.7 * value_loss), expected)
