"""Tests log-probs, masked reductions, padding and learning-rate schedules."""

import math
import pkgutil
import runpy
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch._inductor import config as inductor_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import training.batch
from training.batch import head as head_module
from training.batch import masked_ops, schedules, sequence_padding
from training.batch.head import LogitForm, compiled_on, head_log_probs


def test_log_probs_match_numbers_worked_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)]]])
    torch.testing.assert_close(
        head_module.logprobs_from_logits(logits, torch.tensor([[1]])),
        torch.tensor([[math.log(0.75)]]),
    )


def test_log_probs_are_computed_in_float32_from_bfloat16_logits():
    logits = torch.randn(4, 7, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(28).view(4, 7)
    log_probs = head_module.logprobs_from_logits(logits, labels)
    exact = torch.log_softmax(logits.double(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), exact, rtol=1e-6, atol=1e-6)


def test_log_probs_of_huge_logits_are_exact():
    logits = torch.tensor([[1e4, 1e4 + 1, -1e4], [3e38, 0.0, -3e38]])
    expected = torch.tensor([-math.log1p(math.exp(-1)), 0.0])
    torch.testing.assert_close(
        head_module.logprobs_from_logits(logits, torch.tensor([1, 0])), expected
    )


def test_log_prob_gradient_is_one_hot_minus_softmax():
    logits = torch.tensor([[0.0, math.log(3.0)]], requires_grad=True)
    head_module.logprobs_from_logits(logits, torch.tensor([1])).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.25, 0.25]]))


def test_entropy_of_known_distributions():
    impossible = -math.inf
    logits = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, impossible, impossible], [1e4, 0.0, 0.0, 0.0]]
    )
    torch.testing.assert_close(
        head_module.entropy_from_logits(logits), torch.tensor([math.log(4), math.log(2), 0.0])
    )


def test_entropy_has_a_finite_gradient_with_impossible_tokens():
    logits = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    head_module.entropy_from_logits(logits).sum().backward()
    assert logits.grad.isfinite().all()


VALUES = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, 9.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])


def test_masked_reductions_match_numbers_worked_by_hand():
    assert masked_ops.masked_sum(VALUES, MASK).item() == 16
    assert masked_ops.masked_mean(VALUES, MASK).item() == 4
    torch.testing.assert_close(
        masked_ops.masked_mean(VALUES, MASK, axis=-1), torch.tensor([1.5, 6.5])
    )
    assert masked_ops.masked_var(VALUES, MASK).item() == pytest.approx((9 + 4 + 0 + 25) / 3)
    assert masked_ops.masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(38 / 4)


def test_whitened_values_have_mean_zero_and_unit_variance():
    whitened = masked_ops.masked_whiten(VALUES, MASK)
    std = math.sqrt(38 / 3)
    torch.testing.assert_close(
        whitened, torch.tensor([[-3 / std, -2 / std, 0.0], [0.0, 0.0, 5 / std]])
    )
    kept = masked_ops.masked_whiten(VALUES, MASK, shift_mean=False)
    torch.testing.assert_close(
        kept, torch.tensor([[4 - 3 / std, 4 - 2 / std, 0.0], [4.0, 0.0, 4 + 5 / std]])
    )


@pytest.mark.parametrize("valid", [0, 1])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_over_zero_or_one_token_gives_zeros(valid, shift_mean):
    mask = torch.zeros(2, 3)
    mask[0, :valid] = 1
    assert torch.equal(masked_ops.masked_whiten(VALUES, mask, shift_mean), torch.zeros(2, 3))
    assert masked_ops.masked_var(VALUES, mask).item() == 0


def test_whitening_equal_values_gives_exact_zeros():
    assert torch.equal(
        masked_ops.masked_whiten(torch.full((300, 7), 0.1), torch.ones(300, 7)), torch.zeros(300, 7)
    )


def test_empty_reductions_are_zero():
    assert masked_ops.masked_mean(VALUES, torch.zeros(2, 3)).item() == 0
    assert masked_ops.masked_sum(VALUES, torch.zeros(2, 3)).item() == 0


def test_response_mask_ends_with_the_first_end_token():
    responses = torch.tensor([[5, 2, 2, 0], [2, 5, 5, 5], [5, 5, 5, 5], [5, 7, 2, 0]])
    expected = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]])
    assert torch.equal(sequence_padding.get_response_mask(responses, 2), expected)
    expected[3] = torch.tensor([1, 1, 0, 0])
    mask = sequence_padding.get_response_mask(responses, [2, 7], torch.float32)
    assert mask.dtype == torch.float32 and torch.equal(mask, expected.float())


def test_padding_to_a_length():
    rows = torch.tensor([[1, 2]])
    assert sequence_padding.pad_sequence_to_length(rows, 4, 9).tolist() == [[1, 2, 9, 9]]
    assert sequence_padding.pad_sequence_to_length(rows, 4, 9, left_pad=True).tolist() == [
        [9, 9, 1, 2]
    ]
    assert sequence_padding.pad_sequence_to_length(rows, 1, 9).tolist() == [[1, 2]]
    assert sequence_padding.pad_2d_list_to_length([[1], [2, 3]], 0).tolist() == [[1, 0], [2, 3]]
    assert sequence_padding.pad_2d_list_to_length([[1], [2, 3]], 0, max_length=3).tolist() == [
        [1, 0, 0],
        [2, 3, 0],
    ]
    assert sequence_padding.pad_2d_list_to_length([[1], [2, 3]], 0, max_length=1).tolist() == [
        [1, 0],
        [2, 3],
    ]


@pytest.mark.parametrize(
    ("truncation", "kept"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])]
)
def test_postprocessing_truncates_or_pads(truncation, kept):
    ids, mask = torch.tensor([[1, 2, 3, 4, 5]]), torch.ones(1, 5, dtype=torch.int64)
    assert sequence_padding.postprocess_data(ids, mask, 3, 0, truncation=truncation)[
        0
    ].tolist() == [kept]
    padded, padded_mask = sequence_padding.postprocess_data(
        ids, mask, 7, 9, left_pad=True, truncation=truncation
    )
    assert padded.tolist() == [[9, 9, 1, 2, 3, 4, 5]] and padded_mask.tolist() == [
        [0, 0, 1, 1, 1, 1, 1]
    ]


def test_postprocessing_refuses_what_is_too_long_unless_told_how_to_cut():
    ids = torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"5 tokens, .*max_prompt_length is 3.* data\.truncation to left"
    ):
        sequence_padding.postprocess_data(ids, ids, 3, 0)
    with pytest.raises(
        ValueError, match="truncation='centre' is unknown; allowed: error, left, middle, right"
    ):
        sequence_padding.postprocess_data(ids, ids, 3, 0, truncation="centre")


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
    assert rates(
        schedules.get_constant_schedule_with_warmup, 3, num_warmup_steps=0, num_training_steps=9
    ) == [
        2.0,
        2.0,
        2.0,
    ]
    assert rates(schedules.get_constant_schedule_with_warmup, 4, num_warmup_steps=2) == [
        0.0,
        1.0,
        2.0,
        2.0,
    ]


def test_cosine_schedule_falls_to_its_floor_and_rises_again_behind_its_last_step():
    settings = {"num_warmup_steps": 2, "num_training_steps": 6, "min_lr_ratio": 0.1}
    half = 2 * (0.1 + 0.9 / 2)
    quarter = 2 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    measured = rates(schedules.get_cosine_schedule_with_warmup, 8, **settings)
    assert measured == pytest.approx(
        [0, 1, 2, quarter, half, 2 * (1.1) - quarter, 0.2, 2 * (1.1) - quarter]
    )


def test_wsd_schedule_stays_full_and_then_decays():
    settings = {"num_warmup_steps": 2, "num_training_steps": 12, "stable_ratio": 0.8}
    measured = rates(schedules.get_wsd_schedule_with_warmup, 14, **settings)
    assert measured == pytest.approx([0, 1, *[2] * 9, 1, 0, 0])


def test_wsd_schedule_warms_up_from_its_floor_and_ends_there():
    settings = {
        "num_warmup_steps": 2,
        "num_training_steps": 12,
        "stable_ratio": 0.8,
        "min_lr_ratio": 0.1,
    }
    measured = rates(schedules.get_wsd_schedule_with_warmup, 14, **settings)
    # The rate is 2, its floor 0.2, and half way between them 1.1.
    assert measured == pytest.approx([0.2, 1.1, *[2] * 9, 1.1, 0.2, 0.2])


MODULES = [module.name for module in pkgutil.iter_modules(training.batch.__path__)]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", MODULES)
def test_no_file_of_the_package_imports_transformers_when_it_is_imported(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    runpy.run_module(f"training.batch.{name}")


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of three rows of a vocabulary of 50, so that a few rows make several."""
    monkeypatch.setattr(head_module, "BLOCK_ENTRIES", 150)


def make_head(rows=20, hidden=6, vocabulary=50, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    states, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((rows, hidden), (vocabulary, hidden), (vocabulary,))
    )
    return states, weight, bias, torch.randint(vocabulary, (rows,), generator=generator)


def plain_head(states, weight, bias, labels, form):
    """The formulas, on whole logits."""
    z = torch.nn.functional.linear(states, weight, bias) / form.divisor
    log_p = (z if form.cap is None else form.cap * torch.tanh(z / form.cap)).log_softmax(-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def test_a_heads_log_prob_entropy_and_gradient_match_numbers_worked_by_hand():
    # Logits 0 and log 3, so probabilities 1/4 and 3/4.
    states, weight = (
        torch.tensor([[1.0]], requires_grad=True),
        torch.tensor([[0.0], [math.log(3)]], requires_grad=True),
    )
    log_probs, entropies = head_log_probs(
        states, weight, None, torch.tensor([1]), LogitForm(), "grad"
    )
    assert log_probs.item() == pytest.approx(math.log(0.75))
    assert entropies.item() == pytest.approx(0.25 * math.log(4) + 0.75 * math.log(4 / 3))
    of_state, of_weight = torch.autograd.grad(log_probs, (states, weight), retain_graph=True)
    assert of_state.item() == pytest.approx(0.25 * math.log(3))
    torch.testing.assert_close(of_weight, torch.tensor([[-0.25], [0.25]]))
    # -p (log p + H) with log p + H = -(3/4) log 3 and (1/4) log 3.
    (of_weight,) = torch.autograd.grad(entropies, weight)
    torch.testing.assert_close(of_weight, torch.tensor([[1.0], [-1.0]]) * 3 / 16 * math.log(3))


@pytest.mark.seconds
@pytest.mark.parametrize("chunk", [1000, 200, 1])
@pytest.mark.parametrize("form", [LogitForm(), LogitForm(0.7), LogitForm(1.3, 2.0)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_heads_gradients_are_the_differences_of_its_values(small_blocks, chunk, form, biased):
    states, weight, bias, labels = make_head(rows=7, hidden=3, dtype=torch.float64)

    def head(*inputs):
        return head_log_probs(*inputs, *([] if biased else [None]), labels, form, "grad", chunk)

    inputs = (states, weight, bias) if biased else (states, weight)
    assert torch.autograd.gradcheck(head, inputs, eps=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(lambda *x: head(*x)[0], inputs, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [1000, 999, 170, 50, 1])
def test_a_head_gives_the_same_whatever_the_size_of_its_chunks(small_blocks, chunk):
    form, results = LogitForm(0.8), []
    for head in (partial(head_log_probs, entropy="grad", chunk=chunk), plain_head):
        states, weight, bias, labels = make_head()
        log_probs, entropies = head(states, weight, bias, labels, form)
        (log_probs @ torch.linspace(-1, 2, 20) + entropies @ torch.linspace(1, -2, 20)).backward()
        results.append((log_probs, entropies, states.grad, weight.grad, bias.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class Operations(TorchDispatchMode):
    """Counts the operations, and keeps the most entries that the result of any has."""

    def __init__(self):
        super().__init__()
        self.counts, self.entries = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        self.entries = max(
            [self.entries, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))]
        )
        return result


@pytest.mark.parametrize(("chunk", "products"), [(5000, 1 + 2), (600, 9 + 9 * 3)])
def test_no_more_logits_exist_than_a_chunk_and_only_those_of_several_are_made_twice(
    chunk, products
):
    """100 rows of 50 words: chunks of 600 are 12 rows, and then 6 words."""
    states, weight, _, labels = make_head(rows=100)
    with Operations() as operations:
        head_log_probs(states, weight, None, labels, LogitForm(), "value", chunk)[
            0
        ].sum().backward()
    assert operations.counts["mm"] == products
    # The states have 600 entries.
    assert operations.entries == chunk


def test_a_heads_entropy_is_computed_and_has_a_gradient_where_it_is_asked_for():
    states, weight, bias, labels = make_head()
    given = states, weight, bias, labels, LogitForm()
    results = {mode: head_log_probs(*given, mode) for mode in ("none", "value", "grad")}
    assert results["none"][1] is None
    assert not results["value"][1].requires_grad and results["grad"][1].requires_grad
    assert torch.equal(results["value"][1], results["grad"][1])
    assert all(torch.equal(log_probs, results["none"][0]) for log_probs, _ in results.values())
    for mode, exponentials in (("none", 0), ("value", 1)):
        with Operations() as operations:
            head_log_probs(*given, mode)
        assert operations.counts["exp"] == exponentials


def test_a_bfloat16_heads_log_probs_are_those_of_its_products_in_float32():
    states, weight, _, labels = make_head(dtype=torch.bfloat16)
    log_probs, entropies = head_log_probs(states, weight, None, labels, LogitForm(0.7), "value")
    assert log_probs.dtype == entropies.dtype == torch.float32
    distribution = ((states @ weight.T).float() / 0.7).log_softmax(-1)
    torch.testing.assert_close(
        log_probs, distribution.gather(1, labels[:, None])[:, 0], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        entropies, -(distribution.exp() * distribution).sum(-1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("chunk", [1000, 60])
def test_autocast_computes_a_heads_products_in_its_type_near_float32(chunk):
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        states, weight, bias, labels = make_head()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            log_probs, entropies = head_log_probs(
                states, weight, bias, labels, LogitForm(), "grad", chunk
            )
        (log_probs.sum() + entropies.sum()).backward()
        assert log_probs.dtype == states.grad.dtype == weight.grad.dtype == torch.float32
        results.append((log_probs, entropies, states.grad, weight.grad, bias.grad))
    for expected, got in zip(*results, strict=True):
        assert 1e-6 < (got - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("chunk", [1000, 60])
def test_a_bfloat16_gradient_of_a_likely_label_keeps_its_digits(chunk):
    """Its probability is 0.999 or so, which bfloat16 rounds to 1.

    P - 1 would be zero, or off by a factor.
    """
    states, weight, _, _ = make_head(vocabulary=6, dtype=torch.bfloat16)
    states = (8 * torch.eye(6)).bfloat16().requires_grad_()
    weight = torch.eye(6).bfloat16().requires_grad_()
    head_log_probs(states, weight, None, torch.arange(6), LogitForm(), chunk=chunk)[
        0
    ].sum().backward()
    expected = 8 * (1 - torch.softmax(8 * torch.eye(6), -1).diagonal())
    torch.testing.assert_close(weight.grad.diagonal().float(), expected, rtol=0.01, atol=0)


def test_a_head_without_rows_gives_nothing_and_zero_gradients():
    states, weight, bias, labels = make_head(rows=0)
    log_probs, entropies = head_log_probs(states, weight, bias, labels, LogitForm(), "grad")
    (log_probs.sum() + entropies.sum()).backward()
    assert log_probs.shape == entropies.shape == (0,)
    assert states.grad.shape == (0, 6) and not weight.grad.any() and not bias.grad.any()


def test_a_head_of_one_row_may_have_a_chunk_below_its_vocabulary():
    whole, cut = make_head(rows=1), make_head(rows=1)
    for inputs, chunk in ((whole, 1000), (cut, 1)):
        head_log_probs(*inputs, LogitForm(), "none", chunk)[0].sum().backward()
    for a, b in zip(whole[:3], cut[:3], strict=True):
        torch.testing.assert_close(b.grad, a.grad)


@pytest.mark.parametrize("entropy", ["none", "value", "grad"])
@pytest.mark.parametrize("chunk", [1000, 60])
def test_a_head_reads_no_number_off_the_device(entropy, chunk):
    """On the meta device there are none to read."""
    states, weight, bias, labels = (
        x.detach().to("meta").requires_grad_(x.is_floating_point()) for x in make_head()
    )
    log_probs, entropies = head_log_probs(
        states, weight, bias, labels, LogitForm(0.7, 3.0), entropy, chunk
    )
    (log_probs.sum() + (entropies.sum() if entropy == "grad" else 0)).backward()
    assert weight.grad.shape == (50, 6) and log_probs.shape == (20,)


@pytest.mark.seconds
def test_the_heads_functions_compile_to_the_same_numbers():
    form, (states, weight, _, labels) = LogitForm(0.8, 3.0), make_head()
    products = (states @ weight.T).detach()
    stats = head_module._row_stats(products, labels, form, True)
    compiled = torch.compile(head_module._row_stats.__wrapped__, fullgraph=True)
    torch.testing.assert_close(compiled(products, labels, form, True), stats, rtol=1e-5, atol=1e-5)
    rows = torch.stack([stats[1], torch.linspace(-1, 2, 20), stats[2], torch.linspace(1, -2, 20)])
    expected, got = products.clone(), products.clone()
    head_module._make_gradient(expected, labels - 30, rows, form)
    torch.compile(head_module._make_gradient.__wrapped__, fullgraph=True)(
        got, labels - 30, rows, form
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.seconds
def test_a_function_that_cannot_be_compiled_runs_as_it_is_written_and_says_so_once(caplog):
    @compiled_on("cpu")
    def doubled(x):
        return x * 2.125 + 0.0625

    with inductor_config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        for _ in range(2):
            assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 2.1875))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and said[0].startswith(
        "doubled runs slower, because it cannot be compiled"
    )


def test_compiled_functions_are_compiled_on_their_device_alone():
    @compiled_on("cpu")
    def compiling(x):
        return x + torch.compiler.is_compiling()

    assert compiling(torch.zeros(1)).item() == 1
    assert compiling(torch.zeros(1, device="meta")).is_meta
