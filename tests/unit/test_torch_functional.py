"""Tests log-probs, masked reductions, padding and learning-rate schedules."""

import math
import pkgutil
import runpy
import sys

import pytest
import torch

from training import batch
from training.batch.torch_functional import log_probs_and_entropy


def test_log_probs_match_numbers_worked_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)]]])
    torch.testing.assert_close(
        batch.logprobs_from_logits(logits, torch.tensor([[1]])), torch.tensor([[math.log(0.75)]])
    )


def test_log_probs_are_computed_in_float32_from_bfloat16_logits():
    logits = torch.randn(4, 7, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(28).view(4, 7)
    log_probs = batch.logprobs_from_logits(logits, labels)
    exact = torch.log_softmax(logits.double(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), exact, rtol=1e-6, atol=1e-6)


def test_log_probs_of_huge_logits_are_exact():
    logits = torch.tensor([[1e4, 1e4 + 1, -1e4], [3e38, 0.0, -3e38]])
    expected = torch.tensor([-math.log1p(math.exp(-1)), 0.0])
    torch.testing.assert_close(batch.logprobs_from_logits(logits, torch.tensor([1, 0])), expected)


def test_log_prob_gradient_is_one_hot_minus_softmax():
    logits = torch.tensor([[0.0, math.log(3.0)]], requires_grad=True)
    batch.logprobs_from_logits(logits, torch.tensor([1])).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.25, 0.25]]))


def test_entropy_of_known_distributions():
    impossible = -math.inf
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, impossible, impossible], [1e4, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(batch.entropy_from_logits(logits), torch.tensor([math.log(4), math.log(2), 0.0]))


def test_entropy_has_a_finite_gradient_with_impossible_tokens():
    logits = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    batch.entropy_from_logits(logits).sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_chunked_entropy_is_the_same(chunk_size):
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        batch.entropy_from_logits_with_chunking(logits, chunk_size), batch.entropy_from_logits(logits)
    )


VALUES = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, 9.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])


def test_masked_reductions_match_numbers_worked_by_hand():
    assert batch.masked_sum(VALUES, MASK).item() == 16
    assert batch.masked_mean(VALUES, MASK).item() == 4
    torch.testing.assert_close(batch.masked_mean(VALUES, MASK, axis=-1), torch.tensor([1.5, 6.5]))
    assert batch.masked_var(VALUES, MASK).item() == pytest.approx((9 + 4 + 0 + 25) / 3)
    assert batch.masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(38 / 4)


def test_whitened_values_have_mean_zero_and_unit_variance():
    whitened = batch.masked_whiten(VALUES, MASK)
    std = math.sqrt(38 / 3)
    torch.testing.assert_close(whitened, torch.tensor([[-3 / std, -2 / std, 0.0], [0.0, 0.0, 5 / std]]))
    kept = batch.masked_whiten(VALUES, MASK, shift_mean=False)
    torch.testing.assert_close(kept, torch.tensor([[4 - 3 / std, 4 - 2 / std, 0.0], [4.0, 0.0, 4 + 5 / std]]))


@pytest.mark.parametrize("valid", [0, 1])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_over_zero_or_one_token_gives_zeros(valid, shift_mean):
    mask = torch.zeros(2, 3)
    mask[0, :valid] = 1
    assert torch.equal(batch.masked_whiten(VALUES, mask, shift_mean), torch.zeros(2, 3))
    assert batch.masked_var(VALUES, mask).item() == 0


def test_whitening_equal_values_gives_exact_zeros():
    assert torch.equal(batch.masked_whiten(torch.full((300, 7), 0.1), torch.ones(300, 7)), torch.zeros(300, 7))


def test_empty_reductions_are_zero():
    assert batch.masked_mean(VALUES, torch.zeros(2, 3)).item() == 0
    assert batch.masked_sum(VALUES, torch.zeros(2, 3)).item() == 0


def test_response_mask_ends_with_the_first_end_token():
    responses = torch.tensor([[5, 2, 2, 0], [2, 5, 5, 5], [5, 5, 5, 5], [5, 7, 2, 0]])
    expected = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]])
    assert torch.equal(batch.get_response_mask(responses, 2), expected)
    expected[3] = torch.tensor([1, 1, 0, 0])
    mask = batch.get_response_mask(responses, [2, 7], torch.float32)
    assert mask.dtype == torch.float32 and torch.equal(mask, expected.float())


def test_padding_to_a_length():
    rows = torch.tensor([[1, 2]])
    assert batch.pad_sequence_to_length(rows, 4, 9).tolist() == [[1, 2, 9, 9]]
    assert batch.pad_sequence_to_length(rows, 4, 9, left_pad=True).tolist() == [[9, 9, 1, 2]]
    assert batch.pad_sequence_to_length(rows, 1, 9).tolist() == [[1, 2]]
    assert batch.pad_2d_list_to_length([[1], [2, 3]], 0).tolist() == [[1, 0], [2, 3]]
    assert batch.pad_2d_list_to_length([[1], [2, 3]], 0, max_length=3).tolist() == [[1, 0, 0], [2, 3, 0]]
    assert batch.pad_2d_list_to_length([[1], [2, 3]], 0, max_length=1).tolist() == [[1, 0], [2, 3]]


@pytest.mark.parametrize(("truncation", "kept"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])])
def test_postprocessing_truncates_or_pads(truncation, kept):
    ids, mask = torch.tensor([[1, 2, 3, 4, 5]]), torch.ones(1, 5, dtype=torch.int64)
    assert batch.postprocess_data(ids, mask, 3, 0, truncation=truncation)[0].tolist() == [kept]
    padded, padded_mask = batch.postprocess_data(ids, mask, 7, 9, left_pad=True, truncation=truncation)
    assert padded.tolist() == [[9, 9, 1, 2, 3, 4, 5]] and padded_mask.tolist() == [[0, 0, 1, 1, 1, 1, 1]]


def test_postprocessing_refuses_what_is_too_long_unless_told_how_to_cut():
    ids = torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="5 tokens exceeds max_length=3; raise it, or set truncation"):
        batch.postprocess_data(ids, ids, 3, 0)
    with pytest.raises(ValueError, match="truncation='centre' is unknown; allowed: left, right, middle, error"):
        batch.postprocess_data(ids, ids, 3, 0, truncation="centre")


def rates(make, steps, **settings):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = make(optimizer, **settings)
    result = []
    for _ in range(steps):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return result


def test_constant_schedule_is_full_from_the_first_step_without_warmup():
    assert rates(batch.get_constant_schedule_with_warmup, 3, num_warmup_steps=0, num_training_steps=9) == [
        2.0,
        2.0,
        2.0,
    ]
    assert rates(batch.get_constant_schedule_with_warmup, 4, num_warmup_steps=2) == [0.0, 1.0, 2.0, 2.0]


def test_cosine_schedule_falls_to_its_floor_and_rises_again_behind_its_last_step():
    settings = {"num_warmup_steps": 2, "num_training_steps": 6, "min_lr_ratio": 0.1}
    half = 2 * (0.1 + 0.9 / 2)
    quarter = 2 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    measured = rates(batch.get_cosine_schedule_with_warmup, 8, **settings)
    assert measured == pytest.approx([0, 1, 2, quarter, half, 2 * (1.1) - quarter, 0.2, 2 * (1.1) - quarter])


def test_wsd_schedule_stays_full_and_then_decays():
    settings = {"num_warmup_steps": 2, "num_training_steps": 12, "stable_ratio": 0.8}
    measured = rates(batch.get_wsd_schedule_with_warmup, 14, **settings)
    assert measured == pytest.approx([0, 1, *[2] * 9, 1, 0, 0])


def test_wsd_schedule_warms_up_from_its_floor_and_ends_there():
    settings = {"num_warmup_steps": 2, "num_training_steps": 12, "stable_ratio": 0.8, "min_lr_ratio": 0.1}
    measured = rates(batch.get_wsd_schedule_with_warmup, 14, **settings)
    # The rate is 2, its floor 0.2, and half way between them 1.1.
    assert measured == pytest.approx([0.2, 1.1, *[2] * 9, 1.1, 0.2, 0.2])


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(batch.__path__)])
def test_no_file_of_the_package_imports_transformers_when_it_is_imported(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    runpy.run_module(f"training.batch.{name}")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_log_probs_and_entropy_match_autograd_through_the_plain_formulas(temperature):
    torch.manual_seed(0)
    # A row's float32 copy has 256 bytes, so a block of 8 MiB has 32,768 rows, and these make three blocks.
    rows, vocabulary = 80_000, 64
    logits, labels = 3 * torch.randn(rows, vocabulary), torch.randint(vocabulary, (rows,))
    a, b = torch.randn(rows), torch.randn(rows)
    results = []
    for fused in (True, False):
        z = logits.clone().requires_grad_()
        if fused:
            log_probs, entropies = log_probs_and_entropy(z, labels, temperature)
        else:
            log_probs = batch.logprobs_from_logits(z / temperature, labels)
            entropies = batch.entropy_from_logits(z / temperature)
        (log_probs @ a + entropies @ b).backward()
        assert torch.equal(z, logits), "neither pass writes into the logits"
        results.append((log_probs, entropies, z.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6)


def test_fused_log_probs_keep_the_dtype_of_bfloat16_logits_in_the_gradient():
    logits = torch.randn(5, 9, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = log_probs_and_entropy(logits, torch.arange(5))
    assert log_probs.dtype == torch.float32
    log_probs.sum().backward()
    expected = torch.eye(5, 9) - logits.detach().float().softmax(-1)
    torch.testing.assert_close(logits.grad.float(), expected, rtol=0.01, atol=0.004)


def test_fused_log_probs_of_no_tokens_are_empty():
    logits = torch.zeros(0, 9, requires_grad=True)
    log_probs, entropies = log_probs_and_entropy(logits, torch.zeros(0, dtype=torch.long))
    (log_probs.sum() + entropies.sum()).backward()
    assert log_probs.shape == entropies.shape == (0,)
    assert logits.grad.shape == (0, 9)
