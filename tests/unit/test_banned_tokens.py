"""Ids that are never sampled: engine, trainer and reference renormalise over the same others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.zoo import proofs
from tests.zoo.families import FAMILIES, WHOLE
from tests.zoo.proofs import Subject
from training.batch.head import BANNED, EntropyMode, LogitForm, head_log_probs
from training.config import ModelConfig, RolloutConfig
from workers.dp_actor import mean_observation_loss
from workers.hf_rollout import sample_tokens
from workers.model.banned_tokens import banned_token_ids
from workers.model.builder import ModelSpec
from workers.rollout.engine import Sampling

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NEVER = (3, 11, 16)
FORMS = {"plain": LogitForm(), "divided": LogitForm(0.7), "capped": LogitForm(1.3, cap=2.0)}


def plain_head(states: Tensor, weight: Tensor, labels: Tensor, form: LogitForm) -> list[Tensor]:
    """What autograd makes of all logits, the banned ones left out of the softmax."""
    logits = linear(states, weight) / form.divisor
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    allowed = torch.ones(len(weight), dtype=torch.bool)
    allowed[list(NEVER)] = False
    log_p = logits[:, allowed].log_softmax(-1)
    place = (allowed.cumsum(0) - 1)[labels]
    log_probs = log_p.gather(1, place[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p).sum(-1)
    return [log_probs, entropies, log_p.exp().square().sum(-1)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [1 << 20, 34])
def test_log_probs_entropies_and_gradients_are_those_over_the_other_ids(
    form: str, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(9, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(17, 8, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 4, 5, 9, 10, 15, 12])
    penalty = torch.zeros(17)
    penalty[list(NEVER)] = BANNED
    results = []
    for ours in (True, False):
        inputs = [states.clone().requires_grad_(), weight.clone().requires_grad_()]
        if ours:
            outputs = head_log_probs(
                inputs[0], inputs[1], None, labels, FORMS[form], "grad", chunk, penalty
            )
        else:
            outputs = plain_head(inputs[0], inputs[1], labels, FORMS[form])[:2]
        factors = torch.linspace(0.5, 2, len(labels), dtype=torch.float64)
        (outputs[0] * factors + 0.3 * outputs[1]).sum().backward()
        results.append([*outputs, inputs[0].grad, inputs[1].grad])
    for computed, expected in zip(*results, strict=True):
        torch.testing.assert_close(computed.double(), expected, rtol=1e-9, atol=1e-9)
    assert not results[0][3][list(NEVER)].any()


@pytest.mark.parametrize("mode", ["none", "value", "grad", "squares"])
def test_a_penalty_of_zeros_changes_no_bit_and_a_banned_label_has_no_gradient(
    mode: EntropyMode,
) -> None:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(5, 8, generator=generator)
    weight = torch.randn(17, 8, generator=generator)
    labels = torch.tensor([3, 1, 0, 16, 5])
    given = (states, weight, None, labels, LogitForm(0.7), mode)
    one = head_log_probs(*given)
    other = head_log_probs(*given, penalty=torch.zeros(17))
    assert torch.equal(one[0], other[0])
    assert mode == "none" or torch.equal(one[1], other[1])
    penalty = torch.zeros(17)
    penalty[list(NEVER)] = BANNED
    states.requires_grad_()
    log_probs, more = head_log_probs(
        states, weight, None, labels, LogitForm(0.7), mode, penalty=penalty
    )
    assert (log_probs < BANNED / 2).tolist() == [True, False, False, True, False]
    assert more is None or more.isfinite().all()
    log_probs[labels == 3].sum().backward()
    assert states.grad is not None and not states.grad.isnan().any()


def test_what_no_policy_can_say_adds_nothing_to_the_loss_of_observations() -> None:
    log_prob = torch.tensor([[-1.0, BANNED, -2.0]])
    loss = mean_observation_loss(log_prob, torch.tensor([[1, 1, 0]]), tokens=2)
    assert loss.item() == 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["qwen3"].make(tmp_path_factory.mktemp("banned"))


def test_engine_and_trainer_agree_and_a_likely_id_is_never_sampled(folder: Path) -> None:
    subject = Subject.load(FAMILIES["qwen3"], folder)
    data = proofs.as_batch(subject, subject.play(range(len(proofs.PROMPTS))))
    mask = data.batch["response_mask"].bool()
    likely = data.batch["responses"][mask].unique().tolist()[:20]
    subject.engine.banned_token_ids = likely
    subject.engine.config = replace(subject.engine.config, banned_token_ids=likely)
    assert proofs.engine_is_trainer(subject) <= 1e-5
    assert proofs.trainer_is_row_alone(subject) <= 1e-5
    data = proofs.as_batch(subject, subject.play(range(len(proofs.PROMPTS))))
    assert not set(data.batch["responses"][mask].tolist()) & set(likely) - {0}
    ids = [token for token in range(10, 60) if token not in likely][:12]
    [scores] = subject.engine.score([ids])
    logits = subject.lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    logits[:, likely] = -torch.inf
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}])
def test_a_banned_id_is_not_sampled_in_any_way(settings: dict[str, float]) -> None:
    logits = torch.tensor([[5.0, -torch.inf, 4.0, 3.0]])
    sampling = Sampling(max_tokens=1, **settings)
    for seed in range(50):
        tokens, log_probs = sample_tokens(logits, sampling, [torch.Generator().manual_seed(seed)])
        assert tokens.item() != 1 and log_probs.isfinite().all()


def spec_of(folder: Path) -> ModelSpec:
    return ModelSpec(ModelConfig(dtype="float32"), str(folder), torch.device("cpu"))


@pytest.mark.seconds
def test_text_bans_nothing_and_placeholders_are_banned_beside_the_users_ids(
    folder: Path, tmp_path: Path
) -> None:
    assert banned_token_ids(RolloutConfig(), spec_of(folder)) == ()
    assert banned_token_ids(RolloutConfig(banned_token_ids=[7, 5]), spec_of(folder)) == (5, 7)
    for name, expected in {
        "qwen3_5_vision": (90, 91, 92, 93),
        "gemma3_vision": (90, 91, 92),
        "gemma4_vision": (90, 91, 92, 93, 94),
    }.items():
        spec = spec_of(WHOLE[name].make(tmp_path / name))
        assert banned_token_ids(RolloutConfig(), spec) == expected
        assert banned_token_ids(RolloutConfig(banned_token_ids=[7]), spec) == (7, *expected)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([96], r"has 96, which .* does not know; allowed: 0 to 95"),
        ([-1], "has -1"),
        ([2], "has 2, which ends the turns"),
    ],
)
def test_ids_that_cannot_be_banned_are_refused(folder: Path, ids: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        banned_token_ids(RolloutConfig(banned_token_ids=ids), spec_of(folder))
