"""Tests rewards: where they land, what reward functions may return, who scores text, and how."""

import asyncio
import functools
import gc
import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from custom.env import BadRewardFunction
from custom.reward_manager import (
    BatchRewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
    get_reward_manager_cls,
    register_reward_manager,
)
from custom.reward_score import default_compute_score, extract_answer
from data.array_ops import object_array
from data.outcome_rewards import move_to_sampled_tokens, place_outcome_rewards
from data.protocol import DataProto
from tests.conftest import PROJECT
from training.config.schema.reward import OverlongBufferConfig
from training.reward import (
    compute_reward,
    compute_reward_async,
    get_custom_reward_fn,
    load_reward_manager,
)

WORDS = ["<pad>", "</s>", "what", "is", "one", "two", "five", "tool", "says", "####", "5", "7"]
IDS = {word: i for i, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def ids(text, width):
    row = [IDS[word] for word in text.split()]
    return row + [0] * (width - len(row))


def make_batch():
    """Makes rows: 0 ends with its own answer, 1 with a tool's, 2 sampled nothing, 3 is full."""
    responses = ["#### 5 </s>", "#### 7 tool says 5", "", "one two five #### 5"]
    mask = [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    prompts = [[0, IDS["what"], IDS["is"]]] * 4
    attention = [[0, 1, 1] + [1 if i < len(r.split()) else 0 for i in range(5)] for r in responses]
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor(prompts),
            "responses": torch.tensor([ids(r, 5) for r in responses]),
            "response_mask": torch.tensor(mask),
            "attention_mask": torch.tensor(attention),
        },
        non_tensors={
            "data_source": np.array(
                ["openai/gsm8k", "openai/gsm8k", "openai/gsm8k", "other"], dtype=object
            ),
            "reward_model": np.array(
                [{"ground_truth": t} for t in ("5", "5", "5", "5")], dtype=object
            ),
            "extra_info": np.array([{"index": i} for i in range(4)], dtype=object),
        },
    )


SCORES = [0.5, -1.0, 2.0, 0.25]
PLACED = torch.tensor([[0, 0, 0.5, 0, 0], [0, -1.0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0.25]])


# Placing


def test_outcome_lands_on_the_last_sampled_token_even_if_an_environments_token_is_last():
    placed = place_outcome_rewards(torch.tensor(SCORES), make_batch().batch["response_mask"])
    assert placed.dtype == torch.float32
    torch.testing.assert_close(placed, PLACED)


def test_rewards_on_environment_tokens_move_to_the_action_before_them():
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0, 0], [0] * 7])
    rewards = torch.tensor([[0.1, 0, 1.0, 0, 0.5, 0, 0.25], [1.0, 0, 0, 2.0, 0, 0, 0], [1.0] * 7])
    expected = torch.tensor([[0.1, 1.0, 0, 0, 0.75, 0, 0], [0, 3.0, 0, 0, 0, 0, 0], [0.0] * 7])
    torch.testing.assert_close(move_to_sampled_tokens(rewards, mask), expected)


def test_placing_agrees_with_a_loop_over_random_masks():
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(200, 9, generator=generator) < 0.3).long()
    scores = torch.randn(200, generator=generator)
    expected = torch.zeros(200, 9)
    for row in range(200):
        sampled = [t for t in range(9) if mask[row, t]]
        if sampled:
            expected[row, sampled[-1]] = scores[row]
    torch.testing.assert_close(place_outcome_rewards(scores, mask), expected)


# Values that a reward function may return


def full(scores):
    return torch.tensor(scores)[:, None] * torch.tensor([0.0, 0, 0, 0, 1])


@pytest.mark.parametrize(
    "reward_fn",
    [
        lambda data: torch.tensor(SCORES),
        lambda data: torch.tensor(SCORES, dtype=torch.float64, requires_grad=True),
        lambda data: SCORES,
        lambda data: np.array(SCORES),
        lambda data: full(SCORES),
        lambda data: {"reward_tensor": torch.tensor(SCORES)},
        lambda data, return_dict: {"reward_tensor": full(SCORES), "reward_extra_info": {}},
        lambda data, **kwargs: torch.tensor(SCORES) if kwargs["return_dict"] else None,
        lambda data, return_dict=False: {"reward_tensor": SCORES} if return_dict else None,
    ],
)
def test_every_form_of_answer_gives_the_same_rewards(reward_fn):
    rewards, infos = compute_reward(make_batch(), reward_fn)
    torch.testing.assert_close(rewards, PLACED)
    assert infos == {} and not rewards.requires_grad


def test_integer_scores_become_float32():
    rewards, _ = compute_reward(make_batch(), lambda data: torch.tensor([1, 0, 1, 1]))
    # Row 2 has no token to carry its score.
    assert rewards.dtype == torch.float32 and rewards.sum() == 2


def test_extra_infos_become_lists_of_one_value_per_row():
    infos = {
        "acc": np.array([1, 0, 1, 1]),
        "length": torch.tensor([1.0, 2, 3, 4]),
        "pred": ("a", "b", "c", "d"),
    }
    _, lists = compute_reward(
        make_batch(), lambda data: {"reward_tensor": SCORES, "reward_extra_info": infos}
    )
    assert lists == {
        "acc": [1, 0, 1, 1],
        "length": [1.0, 2.0, 3.0, 4.0],
        "pred": ["a", "b", "c", "d"],
    }


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.zeros(3), r"shape \(3,\); allowed: \(4,\) or \(4, 5\)"),
        (torch.zeros(4, 4), r"shape \(4, 4\); allowed: \(4,\) or \(4, 5\)"),
        (torch.zeros(5, 4), r"shape \(5, 4\)"),
        (torch.tensor(1.0), r"shape \(\)"),
        ([1.0, float("nan"), 0.0, float("inf")], r"2 rows: \[1, 3\]"),
        (full([0.0, 0.0, float("nan"), 0.0]), r"1 rows: \[2\]"),
        (None, "NoneType, not numbers"),
        ([[1.0], [1.0, 2.0], [], []], "list, not numbers"),
        ({"rewards": SCORES}, "'reward_tensor' is missing"),
        (
            {"reward_tensor": SCORES, "reward_extra_info": {"acc": [1, 2]}},
            r"\['acc'\] has 2 values.*4",
        ),
    ],
)
def test_bad_answers_say_what_is_wrong_and_allowed(answer, message):
    with pytest.raises(ValueError, match=message):
        compute_reward(make_batch(), lambda data: answer)


def test_async_reward_equals_the_sync_one_and_does_not_see_later_fields():
    added = threading.Event()

    def slow(data):
        assert added.wait(timeout=10)
        assert "old_log_probs" not in data.batch and data.meta_info == {}
        return SCORES

    data = make_batch()
    future = compute_reward_async(data, slow)
    data.batch["old_log_probs"] = torch.zeros(4, 5)
    data.meta_info["temperature"] = 1.0
    added.set()
    rewards, infos = future.result(timeout=10)
    torch.testing.assert_close(rewards, PLACED)
    assert infos == {}


def test_async_reward_raises_the_functions_error():
    future = compute_reward_async(make_batch(), lambda data: [float("nan")] * 4)
    with pytest.raises(ValueError, match="4 rows"):
        future.result(timeout=10)


# Managers


def test_naive_manager_scores_only_what_the_policy_sampled(tokenizer):
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.append((data_source, solution_str, ground_truth, extra_info["index"]))
        return extra_info["index"] + 1

    rewards = NaiveRewardManager(tokenizer, 0, compute_score)(make_batch())
    assert seen == [
        ("openai/gsm8k", "#### 5", "5", 0),
        ("openai/gsm8k", "#### 7", "5", 1),
        ("openai/gsm8k", "", "5", 2),
        ("other", "one two five #### 5", "5", 3),
    ]
    assert rewards.tolist() == [[0, 0, 1, 0, 0], [0, 2, 0, 0, 0], [0] * 5, [0, 0, 0, 0, 4]]


def test_naive_manager_uses_the_built_in_rules_by_default(tokenizer):
    rewards = NaiveRewardManager(tokenizer, 0)(make_batch()[:3])
    # The tool's "5" in row 1 does not count.
    assert rewards.sum(dim=1).tolist() == [1, 0, 0]


def test_dict_results_become_extra_infos_with_none_where_a_row_lacks_one(tokenizer):
    def compute_score(extra_info, **_):
        return {"score": 1.0, "acc": True} if extra_info["index"] % 2 else 0.5

    result = NaiveRewardManager(tokenizer, 0, compute_score)(make_batch(), return_dict=True)
    assert result["reward_extra_info"] == {
        "score": [0.5, 1.0, 0.5, 1.0],
        "acc": [None, True, None, True],
    }
    assert result["reward_tensor"].sum(dim=1).tolist() == [0.5, 1, 0, 1]


def test_plain_scores_give_no_extra_infos(tokenizer):
    manager = NaiveRewardManager(tokenizer, 0, lambda **_: torch.tensor(0.5))
    rewards, infos = compute_reward(make_batch(), manager)
    assert infos == {} and rewards.sum() == 1.5


def test_batch_manager_passes_lists_and_equals_the_naive_one(tokenizer):
    def one(data_source, solution_str, ground_truth, extra_info, bonus):
        return {
            "score": float(solution_str.endswith(ground_truth)) + bonus,
            "n": extra_info["index"],
        }

    def many(data_sources, solution_strs, ground_truths, extra_infos, bonus):
        rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
        return [one(*row, bonus=bonus) for row in rows]

    single = NaiveRewardManager(tokenizer, 0, one, bonus=0.25)(make_batch(), return_dict=True)
    batch = BatchRewardManager(tokenizer, 0, many, bonus=0.25)(make_batch(), return_dict=True)
    torch.testing.assert_close(single["reward_tensor"], batch["reward_tensor"])
    assert batch["reward_tensor"].sum(dim=1).tolist() == [1.25, 0.25, 0, 1.25]
    assert single["reward_extra_info"] == batch["reward_extra_info"]


def test_batch_manager_wants_one_result_per_row(tokenizer):
    with pytest.raises(ValueError, match="returned 1 results; allowed: one per row, 4"):
        BatchRewardManager(tokenizer, 0, lambda **_: [1.0])(make_batch())


@pytest.mark.parametrize("manager_cls", [NaiveRewardManager, BatchRewardManager])
def test_an_error_in_the_users_function_names_the_row_and_keeps_its_cause(tokenizer, manager_cls):
    def broken(**_):
        raise KeyError("answer")

    with pytest.raises(
        RuntimeError, match=r"row 0, data_source='openai/gsm8k', response: '#### 5'"
    ) as caught:
        manager_cls(tokenizer, 0, broken)(make_batch())
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "result",
    [
        None,
        {"acc": 1},
        "good",
        10**400,
        {"score": 10**400},
        pytest.param(10**5000, id="unprintable"),
        torch.zeros(2),
        1j,
    ],
)
def test_a_result_that_is_no_score_names_the_row(tokenizer, result):
    with pytest.raises(
        ValueError,
        match=r"(?s)compute_score \(.*\) returned .*row 0.*allowed: a finite number that",
    ):
        NaiveRewardManager(tokenizer, 0, lambda **_: result)(make_batch())


def test_a_function_that_is_a_coroutine_is_awaited(tokenizer):
    async def compute_score(solution_str, **_):
        await asyncio.sleep(0)
        return float(len(solution_str))

    def plain(solution_str, **_):
        return float(len(solution_str))

    awaited, called = (
        NaiveRewardManager(tokenizer, 0, function)(make_batch())
        for function in (compute_score, plain)
    )
    assert torch.equal(awaited, called)


def test_entries_keep_their_names_and_one_named_reward_scores_nothing(tokenizer):
    manager = NaiveRewardManager(tokenizer, 0, lambda **_: {"score": 0.5, "reward": 7.0})
    rewards, infos = compute_reward(make_batch(), manager)
    assert infos == {"score": [0.5] * 4, "reward": [7.0] * 4}
    assert rewards.sum(dim=1).tolist() == [0.5, 0.5, 0, 0.5]


def test_a_functions_entries_are_no_marks_of_the_managers(tokenizer):
    """An entry `unscored` of a function's own took every row out of training."""

    def score(**_):
        return {"score": 1.0, "unscored": 1.0, "overlong": 3}

    manager = NaiveRewardManager(
        tokenizer,
        0,
        score,
        max_resp_len=5,
        overlong_buffer_cfg=OverlongBufferConfig(enable=True, len=2, log=True),
    )
    _, infos = compute_reward(make_batch(), manager)
    assert "unscored" not in infos and infos["own_unscored"] == [1.0] * 4
    assert infos["own_overlong"] == [3] * 4 and infos["overlong"][3] is True

    def manager_of_its_own(data):
        return {"reward_tensor": [1.0] * 4, "reward_extra_info": {"unscored": [0.5] * 4}}

    _, infos = compute_reward(make_batch(), manager_of_its_own)
    assert infos == {"own_unscored": [0.5] * 4}


def test_a_rows_own_extra_info_is_not_lost_to_what_the_manager_adds(tokenizer):
    seen = []

    def score(extra_info, **_):
        seen.append(extra_info)
        return 1.0

    batch = make_batch()
    batch.non_tensor_batch["extra_info"] = object_array([{"num_turns": 9, "level": 2}] * 4)
    NaiveRewardManager(tokenizer, 0, score)(batch)
    assert seen[0]["own_num_turns"] == 9 and seen[0]["level"] == 2 and seen[0]["num_turns"] != 9


def test_rows_without_extra_info_or_ground_truth(tokenizer):
    data = make_batch()
    # As collate_fn leaves it for a row that lacks the key.
    data.non_tensor_batch["extra_info"][1] = None
    seen = []
    NaiveRewardManager(tokenizer, 0, lambda extra_info, **_: seen.append(extra_info) or 0.0)(data)
    of_verl = {"num_turns": None, "rollout_reward_scores": {}}
    assert seen[1] == of_verl and seen[2] == {"index": 2, **of_verl}
    data.non_tensor_batch["reward_model"][2] = None
    with pytest.raises(
        ValueError, match="row 2: reward_model is None; it must be a dict with 'ground_truth'"
    ):
        NaiveRewardManager(tokenizer, 0)(data)


def test_examples_are_printed_per_data_source(tokenizer, capsys):
    NaiveRewardManager(tokenizer, 1, lambda **_: 0.5)(make_batch())
    printed = capsys.readouterr().out
    assert printed.count("prompt: what is\n") == 2 and printed.count("score: 0.5") == 2
    assert "[openai/gsm8k]" in printed and "[other]" in printed and "#### 7" not in printed


def test_a_missing_field_is_named_with_its_writer(tokenizer):
    data = make_batch()
    del data.non_tensor_batch["reward_model"]
    with pytest.raises(KeyError, match="NaiveRewardManager needs 'reward_model'"):
        NaiveRewardManager(tokenizer, 0)(data)


def test_registry_names_the_nearest_and_refuses_a_taken_name():
    assert get_reward_manager_cls("batch") is BatchRewardManager
    with pytest.raises(
        ValueError,
        match=r"'naiv' is unknown; allowed: batch.* custom, .*naive.*Did you mean 'naive'\?",
    ):
        get_reward_manager_cls("naiv")
    with pytest.raises(ValueError, match=r"'naive' is already registered by .*NaiveRewardManager"):
        register_reward_manager("naive")(BatchRewardManager)
    assert register_reward_manager("naive")(NaiveRewardManager) is NaiveRewardManager


# From the config


def make_config(
    path=None, name="compute_score", fn_kwargs=None, manager="naive", manager_kwargs=None
):
    return SimpleNamespace(
        custom_reward_function=SimpleNamespace(path=path, name=name, reward_kwargs=fn_kwargs or {}),
        reward_model=SimpleNamespace(
            reward_manager=manager,
            reward_kwargs=manager_kwargs or {},
            overlong_buffer=OverlongBufferConfig(),
        ),
        data=SimpleNamespace(reward_fn_key="data_source", max_response_length=8),
        trainer=SimpleNamespace(run_dir="outputs"),
        section=lambda kind: kind(),
    )


def test_the_overlong_buffer_takes_reward_from_long_responses(tokenizer):
    """Limit 4, buffer 2: 2 tokens and fewer lose nothing, 3 half of the factor, 4 all of it."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    data = make_batch()
    data = data.select_idxs([0, 0, 0])
    width = data.batch["responses"].shape[1]
    mask = torch.nn.functional.pad(mask, (0, max(width - 4, 0)))[:, :width]
    data.batch["response_mask"] = mask
    buffer = OverlongBufferConfig(enable=True, len=2, penalty_factor=3.0, log=True)
    manager = get_reward_manager_cls("dapo")(
        tokenizer, 0, compute_score=lambda **row: 1.0, max_resp_len=4, overlong_buffer_cfg=buffer
    )
    result = manager(data, return_dict=True)
    lengths = mask.sum(1).tolist()
    expected = [1 + 3 * min((2 - length) / 2, 0) for length in lengths]
    assert max(lengths) > 2 and result["reward_tensor"].sum(1).tolist() == expected
    assert result["reward_extra_info"]["overlong"] == [length > 2 for length in lengths]
    with pytest.raises(
        ValueError, match=r"overlong_buffer\.len=2 must be 1 to max_resp_len=1 tokens"
    ):
        get_reward_manager_cls("dapo")(tokenizer, 0, max_resp_len=1, overlong_buffer_cfg=buffer)


def test_a_reward_function_never_sees_dummy_rows():
    data = make_batch()
    data.non_tensor_batch["uid"] = np.array(["a"] * len(data), dtype=object)
    data.batch["response_mask"] = torch.ones_like(data.batch["response_mask"])
    padded = data.pad_with_dummies(len(data) + 3)
    seen = []

    def score(batch):
        seen.append(len(batch))
        return {
            "reward_tensor": torch.arange(1.0, len(batch) + 1),
            "reward_extra_info": {"x": list(range(len(batch)))},
        }

    rewards, infos = compute_reward(padded, score)
    assert seen == [len(data)] and len(rewards) == len(padded) > len(data)
    assert rewards.sum(1).tolist() == [*range(1, len(data) + 1), *[0.0] * (len(padded) - len(data))]
    assert infos["x"] == [*range(len(data)), *[None] * (len(padded) - len(data))]


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text(
        "def length_score(\n"
        "    data_source, solution_str, ground_truth, extra_info, scale=1.0, offset=0.0\n"
        "):\n"
        "    return scale * len(solution_str.split()) + offset\n"
        "NUMBER = 3\n"
    )
    return str(file)


def test_custom_function_and_both_kinds_of_kwargs_reach_the_score(tokenizer, user_file):
    config = make_config(user_file, "length_score", {"scale": 2.0}, manager_kwargs={"offset": 0.5})
    rewards, _ = compute_reward(make_batch(), load_reward_manager(config, tokenizer, num_examine=0))
    assert rewards.sum(dim=1).tolist() == [4.5, 4.5, 0, 10.5]
    override = load_reward_manager(config, tokenizer, num_examine=0, offset=1.0)
    assert compute_reward(make_batch(), override)[0].sum(dim=1).tolist() == [5, 5, 0, 11]


def test_no_path_means_no_custom_function(user_file):
    assert get_custom_reward_fn(make_config()) is None


def test_reward_kwargs_choose_the_flexible_gsm8k_rule(tokenizer):
    data = make_batch()[3:]
    data.non_tensor_batch["data_source"][0] = "openai/gsm8k"
    # The text is "one two five is 5".
    data.batch["responses"][0, 3] = IDS["is"]
    strict = load_reward_manager(make_config(), tokenizer, 0)
    flexible = load_reward_manager(make_config(manager_kwargs={"method": "flexible"}), tokenizer, 0)
    assert strict(data).sum() == 0 and flexible(data).sum() == 1


# Built-in rules


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("so it is #### 72", "72", 1, 1),
        ("#### $1,200.", "1200", 1, 1),
        ("#### 1200.00", "1,200", 1, 1),
        ("#### 7 and then #### 8", "7", 0, 0),
        ("the answer is 72", "72", 0, 1),
        ("#### 72 apples, not 3", "72", 1, 0),
        ("#### -4", "-4", 1, 1),
        ("#### ", "4", 0, 0),
        ("#### none", "4", 0, 0),
        ("", "4", 0, 0),
    ],
)
def test_gsm8k_rule(text, truth, strict, flexible):
    assert default_compute_score("openai/gsm8k", text, truth) == strict
    assert default_compute_score("openai/gsm8k", text, truth, method="flexible") == flexible


def test_gsm8k_refuses_an_unknown_method():
    with pytest.raises(ValueError, match="method='loose' is unknown; allowed: strict"):
        default_compute_score("openai/gsm8k", "#### 1", "1", method="loose")


@pytest.mark.parametrize(
    ("text", "truth", "answer"),
    [
        ("4 + 3 = 7.", "7", "7"),
        ("3 - 7 equals -4", "-4", "-4"),
        ("that is 5-3", "2", "3"),
        ("<think>9</think> it is 7", "7", "7"),
        ("<answer>7</answer> because 3 + 4", "7", "7"),
        ("<answer>1</answer> no, <answer>x = 2</answer>", "2", "2"),
        ("about 1,200", "1200", "1200"),
        ("I do not know", "7", None),
        (" <answer> blue </answer>", "blue", "blue"),
        ("the sky is blue ", "blue", "the sky is blue"),
    ],
)
def test_answer_is_found_in_a_sentence(text, truth, answer):
    assert extract_answer(text, truth) == answer


def test_reasoning_gym_task_is_scored_by_its_own_verifier():
    entry = {"question": "3 - 7 =", "answer": "-4", "metadata": {}}
    infos = {"entry": json.dumps(entry)}
    score = [
        default_compute_score("reasoning_gym/chain_sum", text, "-4", infos)
        for text in ("It is -4.", "4", "", "-40")
    ]
    assert score == [1.0, 0.0, 0.0, pytest.approx(2 / 3)]


def test_a_missing_entry_and_an_unknown_source_say_what_to_do():
    with pytest.raises(ValueError, match="extra_info has no 'entry'"):
        default_compute_score("reasoning_gym/chain_sum", "4", "4")
    with pytest.raises(ValueError, match=r"data_source='mine': set custom_reward_function.path"):
        default_compute_score("mine", "4", "4")


def test_scoring_functions_see_turns_and_the_rollouts_own_scores(tokenizer) -> None:
    data = make_batch()
    seen = []
    data.batch["turn_ids"] = torch.where(data.batch["response_mask"].bool(), 0, -1)
    data.batch["turn_ids"][1, -1] = 2
    data.non_tensor_batch["reward_scores"] = object_array(
        [{"format": 1.0}] + [None] * (len(data) - 1)
    )
    NaiveRewardManager(tokenizer, 0, lambda extra_info, **_: seen.append(extra_info) or 0.0)(data)
    assert [extra["num_turns"] for extra in seen[:2]] == [2, 4]
    assert [extra["rollout_reward_scores"] for extra in seen[:2]] == [{"format": 1.0}, {}]


@pytest.mark.parametrize(
    ("source", "solution", "truth", "score"),
    [
        ("lighteval/MATH", r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("HuggingFaceH4/MATH-500", r"so $x = 3$", "4", 0.0),
        ("numina_cn_k12", r"\boxed{(1, 2)}", "(1,2)", 1.0),
        ("lighteval/MATH", "no formula at all", "4", 0.0),
        ("hiyouga/geometry3k", r"<think>a</think> \boxed{3}", "3", 1.0),
        ("hiyouga/geometry3k", r"\boxed{3}", "3", 0.9),
        (
            "searchR1_nq",
            "<answer>no</answer> <answer>The Beatles!</answer>",
            {"target": ["beatles", "x"]},
            1.0,
        ),
        ("searchR1_nq", "The Beatles", {"target": "beatles"}, 0.0),
    ],
)
def test_data_sources_of_verl_have_their_rules(source, solution, truth, score) -> None:
    pytest.importorskip("math_verify")
    assert default_compute_score(source, solution, truth) == pytest.approx(score)


@pytest.mark.parametrize(
    ("solution", "acc", "pred"),
    [
        ("thus\nAnswer: 42", True, "42"),
        ("Answer: 42\nanswer: $43$", False, "$43$"),
        ("42", False, "[INVALID]"),
    ],
)
@pytest.mark.parametrize("source", ["math_dapo", "aime2024"])
def test_dapos_rule_reads_the_last_answer_and_pays_one_or_minus_one(
    source, solution, acc, pred
) -> None:
    pytest.importorskip("math_verify")
    expected = {"score": 1.0 if acc else -1.0, "acc": acc, "pred": pred}
    assert default_compute_score(source, solution, "42") == expected
    assert default_compute_score(source, "Answer: 42" + "." * 300, "42")["pred"] == "[INVALID]"


@pytest.fixture
def slow_rules(tmp_path):
    """Writes a function whose rows hang, end their process, fail, or score, by their last word."""
    path = tmp_path / "slow_rules.py"
    path.write_text(
        "import os, time\n"
        "def compute_score(\n"
        "    data_source, solution_str, ground_truth, extra_info, base=0.0, pause=0.0\n"
        "):\n"
        "    time.sleep(pause)\n"
        "    word = solution_str.split()[-1] if solution_str else 'nothing'\n"
        "    if word == '7': time.sleep(60)\n"
        "    if word == 'nothing': os._exit(3)\n"
        "    if ground_truth == 'bad': raise KeyError(word)\n"
        "    return {'score': base + 1.0, 'pid': os.getpid()}\n"
    )
    return str(path)


def prime(tokenizer, path, **kwargs):
    config = make_config(
        path,
        manager="prime",
        fn_kwargs={"base": 0.5},
        manager_kwargs={"num_processes": 2, **kwargs},
    )
    return load_reward_manager(config, tokenizer, num_examine=0)


@pytest.mark.seconds
def test_prime_scores_in_processes_and_ends_what_hangs_or_dies(tokenizer, slow_rules, caplog):
    manager = prime(tokenizer, slow_rules, timeout_s=1.5)
    start = time.monotonic()
    for _ in range(2):
        rewards = manager(make_batch(), return_dict=True)
        # Rows 1 (hangs) and 2 (ends its process) score nothing, and the others what they should.
        assert rewards["reward_tensor"].sum(1).tolist() == [1.5, 0.0, 0.0, 1.5]
        assert os.getpid() not in rewards["reward_extra_info"]["pid"]
    assert time.monotonic() - start < 40
    assert "TimeoutError" in caplog.text and "ProcessExpired" in caplog.text


def test_prime_raises_what_the_function_raises_with_its_row(tokenizer, slow_rules):
    batch = make_batch()
    batch.non_tensor_batch["reward_model"] = object_array([{"ground_truth": "bad"}] * 4)
    with pytest.raises(RuntimeError, match=r"\w+ \(.*\) failed with KeyError\('5'\) on row 0"):
        prime(tokenizer, slow_rules)(batch)


@pytest.mark.seconds
def test_prime_scores_again_from_another_thread_that_ends(tokenizer, slow_rules):
    manager = prime(tokenizer, slow_rules, timeout_s=1.5)
    for _ in range(2):
        rewards, _ = compute_reward_async(make_batch()[[0, 3]], manager).result()
        assert rewards.sum(1).tolist() == [1.5, 1.5]
        time.sleep(0.3)


def test_prime_wants_a_function_that_a_process_can_find(tokenizer):
    for function in (lambda **_: 1.0, functools.partial(lambda **_: 1.0)):
        with pytest.raises(ValueError, match="must stand in a file, at its top level"):
            PrimeRewardManager(tokenizer, 0, function)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'score': 1.0, 'f': lambda: 0}", "pickle"),
        ("raise TimeoutError('the server is down')", "the server is down"),
        ("raise SystemExit(1)", "SystemExit"),
        (
            "class Mute(Exception):\n        def __repr__(self): raise KeyError\n    raise Mute",
            "its __repr__ raised KeyError",
        ),
        (
            "class Bad(Exception):\n"
            "        def __init__(self, a, b): super().__init__(a)\n"
            "    raise Bad('odd', 2)",
            "odd",
        ),
    ],
)
def test_prime_tells_every_failure_of_the_function(tokenizer, tmp_path, body, message):
    (tmp_path / "odd.py").write_text(f"def compute_score(**_):\n    {body}\n")
    config = make_config(
        str(tmp_path / "odd.py"), manager="prime", manager_kwargs={"num_processes": 1}
    )
    with pytest.raises(
        RuntimeError, match=rf"compute_score \(.*\) failed with .*{message}.* on row 0"
    ):
        load_reward_manager(config, tokenizer, num_examine=0)(make_batch())


def test_what_primes_processes_load_needs_no_torch():
    code = (
        "import sys, custom.reward_managers.prime_process, custom.confine, custom.reward_score\n"
        "print([name for name in ('torch', 'transformers', 'tensordict') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.seconds
def test_primes_processes_end_with_the_manager(tokenizer, slow_rules):
    manager = prime(tokenizer, slow_rules, timeout_s=1.5)
    infos = manager(make_batch(), return_dict=True)["reward_extra_info"]
    workers = [psutil.Process(pid) for pid in {*infos["pid"]} - {None} if psutil.pid_exists(pid)]
    del manager
    gc.collect()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


@pytest.mark.parametrize("key", [1, None, ("a",)])
def test_a_key_of_a_reward_dict_that_is_no_text_is_named(tokenizer, key: object) -> None:
    manager = NaiveRewardManager(tokenizer, 0, lambda **row: {"score": 1.0, key: 2.0})
    with pytest.raises(BadRewardFunction, match=r"returned a dict with the key .* on row 0.*texts"):
        manager(make_batch(), return_dict=True)
    with pytest.raises(BadRewardFunction, match="has the key"):
        compute_reward(
            make_batch(),
            lambda data, return_dict: {
                "reward_tensor": SCORES,
                "reward_extra_info": {key: [1.0] * len(SCORES)},
            },
        )


def test_a_lone_surrogate_in_a_reward_dicts_key_is_replaced(tokenizer) -> None:
    manager = NaiveRewardManager(tokenizer, 0, lambda **row: {"score": 1.0, "a\ud800": 2.0})
    _, infos = compute_reward(make_batch(), manager)
    assert set(infos) == {"score", "a?"}
