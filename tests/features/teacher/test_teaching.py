"""The teacher's rows: the same tokens behind other prompts, aligned, and the gradient of it all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.array_ops import object_array
from data.protocol import DUMMY_UID, DataProto
from features.teacher import teaching
from features.teacher.contexts import TeacherFault, Telling, with_text
from features.teacher.losses import MASK, divergence_of, open_loss_terms
from features.teacher.row import TeacherRow
from features.teacher.settings import TeacherSettings
from features.teacher.teaching import Teaching, behind_prompts
from features.teacher.weights import LOG_PROBS, WORD_LOG_PROBS, WORDS, TeacherWeights
from tests.unit.test_actor_critic import SPLITS, close, make_update
from training.config import ActorConfig, MicroBatching, UpdatePlan
from workers.dp_actor import DataParallelPPOActor
from workers.model.attention import use_packed_attention
from workers.model.forward_settings import ForwardSettings
from workers.model.loss_terms import LossTerms

LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {"pack_rows": True, "key_cost": 0.0},
    "packed apart": {"pack_rows": True},
    "padded": {},
    "as they come": {"strip_padding": False},
}
NOTHING_ELSE = ActorConfig(grad_clip=1e9)


class FakeConfig(SimpleNamespace):
    """What a teaching reads of a config."""

    def section(self, kind: type) -> TeacherSettings:
        assert kind is TeacherSettings
        settings: TeacherSettings = self.settings
        return settings


@pytest.fixture(scope="module")
def lm(tiny_task: Path) -> nn.Module:
    lm = AutoModelForCausalLM.from_pretrained(tiny_task / "model")
    assert use_packed_attention(lm)
    return lm


class Ranks:
    """The policy's ranks, of which there is one, around a model."""

    def __init__(
        self,
        lm: nn.Module,
        settings: TeacherSettings,
        config: ActorConfig = NOTHING_ELSE,
        **layout: Any,
    ) -> None:
        self.module = copy.deepcopy(lm)
        self.settings = settings
        self.actor = DataParallelPPOActor(
            config,
            self.module,
            torch.optim.SGD(self.module.parameters(), lr=0.1),
            forward=ForwardSettings(**layout),
            terms=LossTerms(open_loss_terms(FakeConfig(settings=settings))),  # type: ignore[arg-type]
        )
        worker = SimpleNamespace(
            actor=self.actor,
            module=self.module,
            policy=SimpleNamespace(log_prob_micro_batching=MicroBatching(micro_batch_size=3)),
            writer=SimpleNamespace(wait_until_copied=lambda: None),
        )
        self.teacher = TeacherWeights(settings, worker)
        self.teacher.begin()
        self.asked: list[DataProto] = []

    def ask_companion(self, data: DataProto) -> DataProto:
        self.asked.append(data)
        return self.teacher.read(data)

    def compute_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"old_log_probs": self.actor.compute_log_prob(data)[0]})


def rows() -> DataProto:
    """Seven rows of three groups, of which one is empty and one has an environment's reply."""
    data = make_update()
    # The policy is the one that sampled.
    del data.batch["old_log_probs"]
    data.batch["advantages"] = torch.zeros_like(data.batch["advantages"])
    data.batch["token_level_scores"] = torch.zeros_like(data.batch["advantages"])
    scores = [1.0, 0.0, 0.0, 0.25, 1.0, 0.0, 0.5]
    data.batch["token_level_scores"][:, 0] = torch.tensor(scores)
    columns = {
        "episode_id": [f"e{number}" for number in range(7)],
        "raw_prompt": [[{"role": "user", "content": f"above {n} below 9"}] for n in range(7)],
        "solution": [str(number) for number in range(7)],
    }
    for name, values in columns.items():
        data.non_tensor_batch[name] = object_array(values)
    return data


@pytest.fixture
def make_teaching(tiny_task: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Teaching]:
    """Makes a teaching whose context is a function."""
    from training.config import DataConfig, ModelConfig

    def make(settings: TeacherSettings, function: Any = None) -> Teaching:
        if function is not None:
            monkeypatch.setitem(teaching.Telling.__init__.__globals__["CONTEXTS"], "mine", function)
            settings = replace(settings, context="mine")
        config = FakeConfig(
            settings=settings,
            actor_rollout_ref=SimpleNamespace(model=ModelConfig(path=str(tiny_task / "model"))),
            data=DataConfig(),
            agent=SimpleNamespace(parser="function"),
        )
        tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
        return Teaching(config, settings, tokenizer)  # type: ignore[arg-type]

    return make


def told(row: TeacherRow) -> list[dict[str, str]]:
    """Tells the solution; more of it in some rows, so that prompts have various lengths."""
    return with_text(row.messages, " ".join(["correct"] * (1 + int(row.columns["solution"]) % 3)))


def ids_behind(data: DataProto, row: int, prompt: list[int]) -> tuple[list[int], int]:
    """A row's real tokens behind another prompt, and where its response begins."""
    width = data.batch["responses"].shape[1]
    real = data.batch["attention_mask"][row, -width:].bool()
    return prompt + data.batch["responses"][row][real].tolist(), len(prompt)


def plain_log_probs(lm: nn.Module, data: DataProto, row: int, prompt: list[int]) -> Tensor:
    """Log-probs of all words at each place of a row's response: (response_len, vocabulary)."""
    ids, begin = ids_behind(data, row, prompt)
    logits = lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0, begin - 1 :]
    width = data.batch["responses"].shape[1]
    padded = nn.functional.pad(logits, (0, 0, 0, width))[:width]
    return torch.log_softmax(padded, -1)


def own_prompt(data: DataProto, row: int) -> list[int]:
    width = data.batch["prompts"].shape[1]
    real = data.batch["attention_mask"][row, :width].bool()
    ids: list[int] = data.batch["prompts"][row][real].tolist()
    return ids


def teachers_prompt(teaching: Teaching, data: DataProto, row: int) -> list[int]:
    message = dict(data.non_tensor_batch["raw_prompt"][row][0])
    message["content"] += "\n" + " ".join(["correct"] * (1 + row % 3))
    return teaching.tokens.prompt([message])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("other_padding", [0, 3])
def test_each_tokens_log_prob_behind_the_teachers_prompt_stands_in_its_own_column(
    lm: nn.Module, make_teaching: Any, layout: str, other_padding: int
) -> None:
    settings = TeacherSettings(model="policy", context="hint", loss="sampled")
    teacher = make_teaching(settings, told)
    ranks = Ranks(lm, teacher.settings, **LAYOUTS[layout])
    data = rows()
    if other_padding:
        wide = torch.nn.functional.pad(data.batch["prompts"], (other_padding, 0))
        attention = torch.nn.functional.pad(data.batch["attention_mask"], (other_padding, 0))
        data.batch["prompts"], data.batch["attention_mask"] = wide, attention
    before = {name: tensor.clone() for name, tensor in data.tensors().items()}
    added, metrics = teacher.add(data, ranks)
    mask = data.batch["response_mask"].bool()
    assert torch.equal(added.batch[MASK].bool(), mask)
    assert metrics["teacher/rows"] == 1.0 and metrics["teacher/too_long"] == 0
    for row in range(len(data)):
        whole = plain_log_probs(lm, data, row, teachers_prompt(teacher, data, row))
        expected = whole.gather(1, data.batch["responses"][row][:, None])[:, 0]
        got = added.batch[LOG_PROBS][row]
        assert torch.allclose(got[mask[row]], expected[mask[row]], atol=2e-5)
        assert not got[~mask[row]].any()
    # The batch itself is the estimator's, and its tokens are the policy's.
    assert data.tensors().keys() == before.keys()
    assert all(torch.equal(data.batch[name], tensor) for name, tensor in before.items())
    assert torch.equal(added.batch["responses"], data.batch["responses"])
    assert torch.equal(added.batch["response_mask"], data.batch["response_mask"])
    assert torch.equal(added.batch["prompts"], data.batch["prompts"])


def test_a_prompt_takes_the_place_of_the_beginning_and_the_conversation_stays() -> None:
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, 7, 8], [5, 6, 7]]),
            # A0 A1 E0 A2, and A0.
            "responses": torch.tensor([[11, 12, 21, 13], [11, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]]),
        },
        non_tensors={"uid": np.array(["a", "b"], dtype=object)},
    )
    got = behind_prompts(data, [[1, 2, 3, 4], [9]], pad=0)
    assert got.batch["prompts"].tolist() == [[1, 2, 3, 4], [0, 0, 0, 9]]
    assert got.batch["attention_mask"].tolist() == [[1] * 8, [0, 0, 0, 1, 1, 0, 0, 0]]
    for name in ("responses", "response_mask"):
        assert torch.equal(got.batch[name], data.batch[name])


COEF = 0.7


def by_hand(lm: nn.Module, teacher: Teaching, data: DataProto, settings: TeacherSettings) -> Tensor:
    """The change of a step by the teacher's part alone, in plain autograd."""
    module = copy.deepcopy(lm)
    mask = data.batch["response_mask"].bool()
    loss = torch.zeros(())
    for row in range(len(data)):
        log_p = plain_log_probs(module, data, row, own_prompt(data, row))
        with torch.no_grad():
            log_q = plain_log_probs(lm, data, row, teachers_prompt(teacher, data, row))
        own = log_p.gather(1, data.batch["responses"][row][:, None])[:, 0]
        of_teacher = log_q.gather(1, data.batch["responses"][row][:, None])[:, 0]
        if settings.loss == "top_k":
            ranked = log_q if settings.divergence == "forward_kl" else log_p.detach()
            words = ranked.topk(min(settings.top_k, ranked.shape[1]), -1).indices
            each = divergence_of(
                log_p.gather(1, words), log_q.gather(1, words), settings.divergence
            )
        else:
            # The policy gradient of the log-ratio, on policy.
            each = (own.detach() - of_teacher) * own
        loss = loss + COEF * torch.where(mask[row], each, 0).sum() / mask.sum()
    loss.backward()
    return torch.cat([-0.1 * p.grad.flatten() for p in module.parameters()])


WAYS = [
    {"loss": "advantage"},
    {"loss": "sampled"},
    {"loss": "top_k", "top_k": 4},
    {"loss": "top_k", "top_k": 4, "divergence": "forward_kl"},
    {"loss": "top_k", "top_k": 10_000, "divergence": "jsd"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("split", SPLITS[:2], ids=str)
def test_a_steps_gradient_is_that_of_plain_autograd(
    lm: nn.Module, make_teaching: Any, way: dict[str, Any], layout: str, split: dict[str, int]
) -> None:
    settings = TeacherSettings(model="policy", context="hint", coef=COEF, **way)
    teacher = make_teaching(settings, told)
    ranks = Ranks(lm, teacher.settings, replace(NOTHING_ELSE, **split), **LAYOUTS[layout])
    data = rows()
    added, metrics = teacher.add(data, ranks)
    update = ranks.actor.update_policy(added, UpdatePlan.of_rows(7, 7, 1, False))
    change = [p - q for p, q in zip(ranks.module.parameters(), lm.parameters(), strict=True)]
    got = torch.cat([part.detach().flatten() for part in change])
    assert close(got, by_hand(lm, teacher, data, settings))
    assert "teacher/kl" in (metrics if way["loss"] == "advantage" else update)


def test_the_reward_is_mixed_in_by_its_coefficient(lm: nn.Module, make_teaching: Any) -> None:
    data = rows()
    data.batch["advantages"] = make_update().batch["advantages"]
    mask = data.batch["response_mask"]
    of_ratios = {}
    for reward_coef in (0.0, 0.5, 1.0):
        settings = TeacherSettings(
            model="policy", context="hint", coef=2.0, reward_coef=reward_coef
        )
        teacher = make_teaching(settings, told)
        added, metrics = teacher.add(data, Ranks(lm, teacher.settings))
        of_ratios[reward_coef] = added.batch["advantages"]
        rest = added.batch["advantages"] - reward_coef * data.batch["advantages"]
        assert torch.allclose(rest, of_ratios[0.0], atol=1e-6)
        assert metrics["teacher/kl"] == pytest.approx(
            -float(of_ratios[0.0].sum()) / 2 / int(mask.sum()), rel=1e-4
        )
    assert of_ratios[0.0].any() and not of_ratios[0.0][~mask.bool()].any()


def test_failed_episodes_alone_are_taught_and_a_row_that_is_told_nothing_is_not(
    lm: nn.Module, make_teaching: Any
) -> None:
    settings = TeacherSettings(
        model="policy", context="hint", loss="sampled", where="failed", failed_below=0.5
    )
    seen = []

    def told_some(row: TeacherRow) -> list[dict[str, str]] | None:
        seen.append((row.columns["solution"], row.score, row.failed))
        return None if row.columns["solution"] == "5" else told(row)

    teacher = make_teaching(settings, told_some)
    added, metrics = teacher.add(rows(), Ranks(lm, teacher.settings))
    # Row 2 is empty, rows 0, 4 and 6 did not fail.
    assert seen == [("1", 0.0, True), ("3", 0.25, True), ("5", 0.0, True)]
    assert added.batch[MASK].any(dim=1).nonzero().flatten().tolist() == [1, 3]
    assert metrics["teacher/rows"] == pytest.approx(2 / 6)


@pytest.mark.parametrize("loss", ["advantage", "sampled", "top_k"])
def test_without_a_taught_row_a_step_is_that_of_the_reward(
    lm: nn.Module, make_teaching: Any, loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = rows()
    data.batch["advantages"] = make_update().batch["advantages"]
    settings = TeacherSettings(model="policy", context="hint", loss=loss)
    teacher = make_teaching(settings, lambda row: None)
    ranks = Ranks(lm, teacher.settings)
    added, _ = teacher.add(data, ranks)
    teacher.add(data, ranks)
    (said,) = [message for message in caplog.messages if "nothing to tell" in message]
    assert "of any of the step's 6 rows" in said and "returned None for each" in said
    ranks.actor.update_policy(added, UpdatePlan.of_rows(7, 7, 1, False))
    plain = Ranks(lm, TeacherSettings(model="ema"))
    plain.actor.update_policy(data, UpdatePlan.of_rows(7, 7, 1, False))
    for got, expected in zip(ranks.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(got, expected)
    assert not ranks.asked


def test_dummy_rows_are_asked_about_by_nobody(lm: nn.Module, make_teaching: Any) -> None:
    data = rows()
    data.non_tensor_batch["uid"][6] = DUMMY_UID
    settings = TeacherSettings(model="policy", context="hint", loss="sampled")
    seen = []
    teacher = make_teaching(settings, lambda row: seen.append(row.columns["solution"]) or told(row))
    added, _ = teacher.add(data, Ranks(lm, teacher.settings))
    assert "6" not in seen and not added.batch[MASK][6].any()


def test_a_row_knows_its_siblings_answer_and_score(lm: nn.Module, make_teaching: Any) -> None:
    seen: dict[str, TeacherRow] = {}

    def look(row: TeacherRow) -> None:
        seen[row.columns["solution"]] = row

    settings = TeacherSettings(model="policy", context="hint", loss="sampled")
    teacher = make_teaching(settings, look)
    data = rows()
    teacher.add(data, Ranks(lm, teacher.settings))
    assert [each.score for each in seen["0"].siblings] == [0.0, 0.0, 0.25]
    assert [each.score for each in seen["4"].siblings] == [0.0]
    assert seen["6"].siblings == ()
    assert seen["5"].siblings[0].answer == seen["4"].answer
    # The environment's words are no answer.
    sampled = data.batch["responses"][5][data.batch["response_mask"][5].bool()].tolist()
    assert seen["5"].answer == teacher.tokens.text(sampled)


def test_a_row_of_several_is_taught_behind_its_own_messages_and_scored_with_its_episode(
    lm: nn.Module, make_teaching: Any
) -> None:
    data = rows()
    columns = data.non_tensor_batch
    # Rows 0 and 1 are of one episode, whose facts stand in its first row.
    columns["episode_id"][1] = "e0"
    columns["episode_row"] = np.array([0, 1, 0, 0, 0, 0, 0])
    sources = [
        {"messages": [{"role": "user", "content": f"above {n} below 7"}], "tools": None}
        for n in range(2)
    ]
    facts: list[Any] = [{"teacher": {"sources": sources[:1], "texts": {}, "feedback": ""}}] * 7
    facts[0] = {"teacher": {"sources": sources, "texts": {"hint": "4"}, "feedback": "lost"}}
    facts[1] = None
    columns["episode_facts"] = object_array(facts)
    seen: dict[int, TeacherRow] = {}

    def look(row: TeacherRow) -> list[dict[str, str]]:
        seen.setdefault(int(row.columns["solution"]), row)
        return row.messages

    settings = TeacherSettings(model="policy", context="hint", loss="sampled")
    teacher = make_teaching(settings, look)
    ranks = Ranks(lm, teacher.settings)
    teacher.add(data, ranks)
    assert [seen[n].messages[0]["content"] for n in (0, 1)] == [
        "above 0 below 7",
        "above 1 below 7",
    ]
    assert [seen[n].number for n in (0, 1)] == [0, 1]
    assert seen[0].score == seen[1].score == 1.0
    assert seen[1].texts == {"hint": "4"} and seen[1].feedback == "lost"
    prompts = ranks.asked[0].batch["prompts"]
    assert not torch.equal(prompts[0], prompts[1])


# Faults


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda row: 1 / 0, "teacher.context=mine raised ZeroDivisionError"),
        (lambda row: [], r"teacher.context=mine returned \[\]"),
        (lambda row: "the answer is 4", "allowed: a list of one or more messages"),
        (lambda row: [{"content": "4"}], "allowed: a list of one or more messages"),
        (lambda row: [{"role": "user", "content": 4}], "allowed: a list of one or more messages"),
        (lambda row: [{"role": "nobody", "content": "4"}], "allowed: a list of one or more"),
        (
            lambda row: [{"role": "user", "content": "correct " * 300}],
            r"the teacher's prompt has 30\d tokens, and 5 follow it, and its model reads 256",
        ),
    ],
)
def test_a_context_that_cannot_be_used_ends_with_a_sentence(
    lm: nn.Module, make_teaching: Any, function: Any, sentence: str
) -> None:
    settings = TeacherSettings(model="policy", context="hint", loss="sampled")
    teacher = make_teaching(settings, function)
    with pytest.raises(TeacherFault, match=sentence):
        teacher.add(rows(), Ranks(lm, teacher.settings))


def test_a_prompt_that_is_too_long_may_leave_its_row_untaught(
    lm: nn.Module, make_teaching: Any
) -> None:
    def long(row: TeacherRow) -> list[dict[str, str]]:
        return with_text(row.messages, "correct " * (300 if row.columns["solution"] == "3" else 1))

    settings = TeacherSettings(model="policy", context="hint", loss="sampled", too_long="leave_out")
    teacher = make_teaching(settings, long)
    added, metrics = teacher.add(rows(), Ranks(lm, teacher.settings))
    assert metrics["teacher/too_long"] == 1 and not added.batch[MASK][3].any()
    assert added.batch[MASK].any(dim=1).sum() == 5


def test_a_row_whose_messages_nobody_kept_is_refused(lm: nn.Module, make_teaching: Any) -> None:
    data = rows()
    del data.non_tensor_batch["raw_prompt"]
    settings = TeacherSettings(model="policy", context="hint", loss="sampled")
    teacher = make_teaching(settings, told)
    with pytest.raises(TeacherFault, match="needs the messages of a row's prompt"):
        teacher.add(data, Ranks(lm, teacher.settings))


# The weights


def test_the_average_is_what_scores_and_the_policy_is_what_trains(
    lm: nn.Module, make_teaching: Any
) -> None:
    settings = TeacherSettings(model="ema", loss="sampled", ema_decay=0.5)
    teacher = make_teaching(settings)
    ranks = Ranks(lm, settings)
    with torch.no_grad():
        for parameter in ranks.module.parameters():
            parameter.mul_(3.0)
    # The average of the first weights and three times as much.
    ranks.teacher.updated()
    twice = copy.deepcopy(lm)
    with torch.no_grad():
        for parameter in twice.parameters():
            parameter.mul_(2.0)
    weights = copy.deepcopy(ranks.module.state_dict())
    data = rows()
    added, _ = teacher.add(data, ranks)
    mask = data.batch["response_mask"].bool()
    for row in range(len(data)):
        whole = plain_log_probs(twice, data, row, own_prompt(data, row))
        expected = whole.gather(1, data.batch["responses"][row][:, None])[:, 0]
        assert torch.allclose(
            added.batch[LOG_PROBS][row][mask[row]], expected[mask[row]], atol=1e-4
        )
    assert all(torch.equal(ranks.module.state_dict()[name], weights[name]) for name in weights)
    assert not any(parameter.grad is not None for parameter in ranks.module.parameters())


def test_reverse_kl_is_over_the_policys_words_and_forward_kl_over_the_teachers(
    lm: nn.Module, make_teaching: Any
) -> None:
    data = rows()
    mask = data.batch["response_mask"].bool()
    for divergence in ("reverse_kl", "forward_kl"):
        settings = TeacherSettings(
            model="policy", context="hint", loss="top_k", top_k=3, divergence=divergence
        )
        teacher = make_teaching(settings, told)
        added, _ = teacher.add(data, Ranks(lm, teacher.settings))
        for row in range(len(data)):
            of_policy = plain_log_probs(lm, data, row, own_prompt(data, row))
            of_teacher = plain_log_probs(lm, data, row, teachers_prompt(teacher, data, row))
            ranked = of_policy if divergence == "reverse_kl" else of_teacher
            words = ranked.topk(3, -1).indices
            got = added.batch[WORDS][row].long()
            assert torch.equal(got[mask[row]], words[mask[row]])
            expected = of_teacher.gather(1, words)
            found = added.batch[WORD_LOG_PROBS][row]
            assert torch.allclose(found[mask[row]], expected[mask[row]], atol=1e-4)


def test_telling_says_which_function_and_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def tell(row):\n    return row.solution\n")
    telling = Telling(f"{file}:tell")
    row = TeacherRow(messages=[], answer="", score=0.0, failed=True)
    with pytest.raises(TeacherFault, match=r"raised AttributeError.*mine\.py"):
        telling.messages(row)


def test_a_column_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def tell(row):\n    return row.columns['solution']\n")
    telling = Telling(f"{file}:tell")
    row = TeacherRow(messages=[], answer="", score=0.0, failed=True, columns={"task": 1, "uid": 2})
    with pytest.raises(TeacherFault, match=r"KeyError: 'solution'.*\(row\.columns has task, uid\)"):
        telling.messages(row)
