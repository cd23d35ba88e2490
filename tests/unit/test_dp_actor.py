"""Each term of the policy's `micro_loss`, and each setting that it reads: by hand, with its sign.

Two rows of three places, with two sampled tokens and one; no model: what it gives is made up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from data.protocol import DataProto
from training.config import (
    ActorConfig,
    CriticConfig,
    PolicyLossChoice,
    RolloutCorrectionConfig,
)
from training.core_algos import GlobalBatchInfo
from workers import dp_actor
from workers.dp_actor import DataParallelPPOActor, policy_loss_config
from workers.model.forward_settings import ForwardSettings
from workers.model.loss_terms import LossTerms

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
COUNTS = GlobalBatchInfo(
    dp_size=1, batch_num_tokens=3, global_batch_size=2.0, loss_scale_factor=None
)
# What a token's loss is multiplied with.
WEIGHTS = {
    "token-mean": [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0]],
    "token-sum": [[1, 1, 0], [1, 0, 0]],
    "seq-mean-token-sum": [[1 / 2, 1 / 2, 0], [1 / 2, 0, 0]],
    "seq-mean-token-mean": [[1 / 4, 1 / 4, 0], [1 / 2, 0, 0]],
    "seq-mean-token-sum-norm": [[1 / 16, 1 / 16, 0], [1 / 16, 0, 0]],
}
BY_TOKEN = torch.tensor(WEIGHTS["token-mean"])


@dataclass
class Computed:
    """A loss, its metrics, and its gradients by what the model gives."""

    loss: float
    metrics: dict[str, float]
    log_prob: Tensor
    entropy: Tensor
    values: Tensor


class WithoutModel(DataParallelPPOActor):
    """Takes made-up outputs for the model's."""

    def __init__(self, config: ActorConfig, outputs: list[Tensor], **given: Any) -> None:
        self.config = config
        self.outputs = outputs
        self.correction = given.get("correction", RolloutCorrectionConfig())
        self.observation_loss_coef = given.get("observation_loss_coef", 0.0)
        self.critic_config = given.get("critic", CriticConfig())
        self.settings = ForwardSettings()
        self.terms = given.get("terms", LossTerms())

    def micro_forward(self, *_: Any) -> list[Tensor]:
        return self.outputs


def computed(
    config: ActorConfig,
    *,
    log_ratio: float = 0.0,
    has_values: bool = False,
    counts: GlobalBatchInfo = COUNTS,
    given: dict[str, Any] | None = None,
    **fields: Tensor,
) -> Computed:
    """Computes the loss where the policy has moved by `log_ratio` since the old log-probs."""
    old = torch.full((2, 3), -1.0)
    log_prob = (old + log_ratio).requires_grad_()
    entropy = torch.tensor([[1.0, 2.0, 50.0], [3.0, 60.0, 70.0]], requires_grad=True)
    values = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]], requires_grad=True)
    outputs = [log_prob, entropy]
    if has_values:
        outputs.append(values)
    tensors = {
        "responses": torch.ones(2, 3),
        "response_mask": MASK,
        "old_log_probs": old,
        "advantages": torch.zeros(2, 3),
        **fields,
    }
    batch = DataProto.from_dict(
        tensors={name: tensor for name, tensor in tensors.items() if tensor is not None}
    )
    batch.meta_info = {"observation_tokens": 4}
    actor = WithoutModel(config, outputs, **(given or {}))
    result = actor.micro_loss(batch, None, counts)  # type: ignore[arg-type]
    result.loss.backward()
    nothing = torch.zeros(2, 3)
    return Computed(
        loss=result.loss.item(),
        metrics={name: float(value) for name, value in result.metrics.items()},
        log_prob=nothing if log_prob.grad is None else log_prob.grad,
        entropy=nothing if entropy.grad is None else entropy.grad,
        values=nothing if values.grad is None else values.grad,
    )


def assert_close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float32))


# The policy's loss


@pytest.mark.parametrize("mode", WEIGHTS)
def test_policy_loss_pushes_up_what_has_an_advantage_by_loss_agg_mode(mode: Any) -> None:
    """At the ratio 1 the gradient is -A times the token's weight."""
    advantages = torch.tensor([[2.0, -1.0, 7.0], [3.0, 7.0, 7.0]])
    config = ActorConfig(loss_agg_mode=mode, loss_scale_factor=8)
    got = computed(config, advantages=advantages)
    weights = torch.tensor(WEIGHTS[mode])
    assert_close(got.log_prob, -advantages * weights)
    assert got.loss == pytest.approx(float((-advantages * weights).sum()))
    assert got.metrics["actor/pg_loss"] == pytest.approx(got.loss)


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_cut"),
    [
        (1.25, 1.0, False),
        (1.35, 1.0, True),
        (0.5, 1.0, False),
        (0.95, -1.0, False),
        (0.85, -1.0, True),
        (1.9, -1.0, False),
        (2.1, -1.0, True),
    ],
)
def test_clip_ratio_low_is_below_one_and_clip_ratio_high_above_and_c_the_dual_clip(
    ratio: float, advantage: float, is_cut: bool
) -> None:
    config = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0)
    advantages = torch.full((2, 3), advantage)
    got = computed(config, log_ratio=math.log(ratio), advantages=advantages)
    assert_close(got.log_prob, torch.zeros(2, 3) if is_cut else -advantage * ratio * BY_TOKEN)


def test_clip_ratio_stands_for_both_bounds_that_are_not_set() -> None:
    given = policy_loss_config(ActorConfig(clip_ratio=0.15), RolloutCorrectionConfig(), COUNTS)
    assert given.clip_ratio_low == given["clip_ratio_high"] == 0.15
    given = policy_loss_config(ActorConfig(clip_ratio_low=0.05), RolloutCorrectionConfig(), COUNTS)
    assert (given["clip_ratio_low"], given["clip_ratio_high"]) == (0.05, 0.2)
    assert given.global_batch_info == COUNTS and given.loss_agg_mode == "token-mean"


def test_loss_mode_chooses_the_loss_and_custom_settings_reach_it() -> None:
    """dro: -A log pi + beta / 2 (log ratio)^2, whose gradient is -A + beta log ratio."""
    config = ActorConfig(policy_loss=PolicyLossChoice(loss_mode="dro", dro_beta=0.5))
    got = computed(config, log_ratio=0.4, advantages=torch.ones(2, 3))
    assert_close(got.log_prob, (-1 + 0.5 * 0.4) * BY_TOKEN)


def test_without_old_log_probs_the_policy_itself_is_the_old_one() -> None:
    got = computed(ActorConfig(), old_log_probs=None, advantages=torch.ones(2, 3))  # type: ignore[arg-type]
    assert_close(got.log_prob, -BY_TOKEN)
    assert got.metrics["actor/ppo_kl"] == 0


def test_rollout_is_weights_multiply_each_tokens_loss() -> None:
    weights = torch.tensor([[2.0, 0.5, 9.0], [3.0, 9.0, 9.0]])
    got = computed(ActorConfig(), advantages=torch.ones(2, 3), rollout_is_weights=weights)
    assert_close(got.log_prob, -weights * BY_TOKEN)


def test_rollout_is_threshold_truncates_the_weights_of_a_single_update() -> None:
    """The policy gives each token twice the engine's probability."""
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="1.5")
    got = computed(
        ActorConfig(),
        given={"correction": correction},
        old_log_probs=None,  # type: ignore[arg-type]
        advantages=torch.ones(2, 3),
        rollout_log_probs=torch.full((2, 3), -1.0 - math.log(2)),
    )
    assert_close(got.log_prob, -1.5 * BY_TOKEN)
    assert got.metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.5)


@pytest.mark.parametrize(("loss_type", "expected"), [("ppo_clip", -2.0), ("reinforce", -1.0)])
def test_bypass_mode_takes_the_engines_log_probs_by_its_loss_type(
    loss_type: Any, expected: float
) -> None:
    correction = RolloutCorrectionConfig(bypass_mode=True, loss_type=loss_type)
    got = computed(
        ActorConfig(clip_ratio_high=2.0),
        given={"correction": correction},
        advantages=torch.ones(2, 3),
        rollout_log_probs=torch.full((2, 3), -1.0 - math.log(2)),
    )
    assert_close(got.log_prob, expected * BY_TOKEN)


# Entropy and KL


@pytest.mark.parametrize("mode", WEIGHTS)
def test_entropy_coeff_takes_the_bonus_off_the_loss_by_loss_agg_mode(mode: Any) -> None:
    got = computed(ActorConfig(entropy_coeff=0.1, loss_agg_mode=mode, loss_scale_factor=8))
    weights = torch.tensor(WEIGHTS[mode])
    assert_close(got.entropy, -0.1 * weights)
    shown = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    assert got.loss == pytest.approx(-0.1 * float((shown * weights).sum()))
    # It is shown as a mean over tokens, whatever is trained on.
    assert got.metrics["actor/entropy"] == pytest.approx(2.0)


def test_without_a_coefficient_there_is_no_entropy_and_no_kl_in_the_loss() -> None:
    got = computed(ActorConfig(), ref_log_prob=torch.zeros(2, 3))
    assert got.loss == 0 and not got.entropy.any() and not got.log_prob.any()
    assert "actor/kl_loss" not in got.metrics


@pytest.mark.parametrize("mode", WEIGHTS)
@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        # log pi - log pi_ref = 0.5.
        ("kl", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("mse", 0.125, 0.5),
        ("low_var_kl", math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5)),
        ("kl+", 0.5, 0.5),
    ],
)
def test_kl_loss_coef_adds_the_kl_of_kl_loss_type_by_loss_agg_mode(
    kind: Any, value: float, gradient: float, mode: Any
) -> None:
    config = ActorConfig(
        use_kl_loss=True,
        kl_loss_coef=0.2,
        kl_loss_type=kind,
        loss_agg_mode=mode,
        loss_scale_factor=8,
    )
    got = computed(config, ref_log_prob=torch.full((2, 3), -1.5))
    weights = torch.tensor(WEIGHTS[mode])
    assert_close(got.log_prob, 0.2 * gradient * weights)
    assert got.loss == pytest.approx(0.2 * value * float(weights.sum()), rel=1e-5)
    assert got.metrics["actor/kl_loss"] == pytest.approx(value * float(weights.sum()), rel=1e-5)


@pytest.mark.parametrize("term", ["policy", "entropy", "kl"])
def test_episode_share_weighs_the_rows_of_an_episode_in_each_term(term: str) -> None:
    """Both rows are one episode, of whose tokens the first has two thirds."""
    shares = torch.tensor([2 / 3, 1 / 3])
    counts = GlobalBatchInfo(
        dp_size=1, batch_num_tokens=3, global_batch_size=1.0, loss_scale_factor=None
    )
    config = ActorConfig(
        loss_agg_mode="seq-mean-token-mean",
        entropy_coeff=0.1 if term == "entropy" else 0.0,
        use_kl_loss=term == "kl",
        kl_loss_coef=1.0,
        kl_loss_type="kl",
    )
    advantages = -torch.ones(2, 3) if term == "policy" else torch.zeros(2, 3)
    got = computed(
        config,
        counts=counts,
        episode_share=shares,
        advantages=advantages,
        ref_log_prob=torch.zeros(2, 3),
    )
    weights = torch.tensor([[1 / 3, 1 / 3, 0], [1 / 3, 0, 0]])
    if term == "entropy":
        assert_close(got.entropy, -0.1 * weights)
    else:
        assert_close(got.log_prob, weights)


# Values and observations


def test_value_loss_coef_weighs_the_values_of_a_shared_model() -> None:
    """Half the squared error; cliprange_value keeps the last value, which moved by 4, at 0.5."""
    critic = CriticConfig(cliprange_value=0.5, value_loss_coef=0.25)
    got = computed(
        ActorConfig(),
        has_values=True,
        given={"critic": critic},
        values=torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]),
        returns=torch.tensor([[3.0, 2.0, 0.0], [9.0, 0.0, 0.0]]),
    )
    # Errors 2 and 0; of the third the clipped one, 8.5, is the larger: it has no gradient.
    assert_close(got.values, 0.25 * torch.tensor([[-2 / 3, 0, 0], [0, 0, 0]]))
    value_loss = 0.5 * (4 + 0 + 8.5**2) / 3
    assert got.loss == pytest.approx(0.25 * value_loss)
    assert got.metrics["critic/vf_loss"] == pytest.approx(value_loss)
    assert got.metrics["critic/vf_clipfrac"] == pytest.approx(1 / 3)
    assert got.metrics["critic/vpred_mean"] == pytest.approx(7 / 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_observation_loss_coef_learns_what_the_environment_said(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Of the mini-batch's four such tokens two are here; ranks average their gradients."""
    monkeypatch.setattr(dp_actor, "world_size", lambda: ranks)
    observed = torch.tensor([[0, 0, 1], [0, 1, 0]])
    given = {"observation_loss_coef": 0.5}
    got = computed(ActorConfig(), given=given, observation_mask=observed)
    assert_close(got.log_prob, -0.5 * ranks * observed / 4)
    assert got.metrics["actor/observation_loss"] == pytest.approx(2 / 4)


def test_metrics_are_divided_by_the_ranks_and_losses_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dp_actor, "world_size", lambda: 2)
    counts: Any = COUNTS | {"dp_size": 2}
    config = ActorConfig(use_kl_loss=True, kl_loss_type="kl", kl_loss_coef=1.0)
    got = computed(
        config,
        counts=counts,
        advantages=-torch.ones(2, 3),
        ref_log_prob=torch.full((2, 3), -1.5),
    )
    assert_close(got.log_prob, 2 * (1 + 1) * BY_TOKEN)
    assert got.metrics["actor/pg_loss"] == pytest.approx(1.0)
    assert got.metrics["actor/kl_loss"] == pytest.approx(0.5)
    assert got.metrics["actor/entropy"] == pytest.approx(2.0)
