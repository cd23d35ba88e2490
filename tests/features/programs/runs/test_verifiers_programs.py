"""Released tasksets of verifiers, unmodified and played by verifiers itself, train a tiny model.

They need verifiers' own interpreter: VERIFIERS_PYTHON, or .venv-verifiers of `make verifiers-env`.
A slow test makes one. The taskset is verifiers' `nemo_gym`, with a tool, against a server in that
form (gym_server.py); with `user-sim` around it there are two agents.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from prepare_game import make_tokenizer, warm_up
from prepare_tiny_prompts import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.protocol import DataProto
from tests.conftest import PROJECT
from tests.e2e.test_agents import GRPO, endings, facts_of, fit, game_config
from tests.e2e.test_training import read_steps
from tests.features.programs.task_rewards import AGAIN, TRIAL, WAYS
from training.config.loader import ConfigError
from workers.hf_rollout import HFRollout
from workers.rollout.engine import Completion, Sampling

SERVER = PROJECT / "tests/features/programs/gym_server.py"
REWARDS = PROJECT / "tests/features/programs/task_rewards.py"
CALL = '<tool_call> {"name": "look", "arguments": {"name": "x"}} </tool_call>'
SECRET = '{"secret": 4}'
ANSWERS = [f"It is {number}" for number in range(4, 10)]
ROWS = 6
TEMPERATURE = 0.3
# What the engine sampled with, and what transformers makes of the same row in float32, in nats.
LARGEST_DIFFERENCE = 5e-5
# verifiers' harness that compacts: from so many tokens on it asks for a summary, and goes on from
# that. It has a tool for commands as well, which the model has never seen.
COMPACTING = (
    "{agent: {harness: {id: bash, edit: false, compaction: {summarize_at_tokens: 40}}, "
    "runtime: {type: subprocess}, max_turns: 5}}"
)


@pytest.fixture(scope="module")
def verifiers_python() -> str:
    """An interpreter that has verifiers."""
    path = os.environ.get("VERIFIERS_PYTHON", str(PROJECT / ".venv-verifiers/bin/python"))
    if not Path(path).exists():
        pytest.skip("needs verifiers' interpreter: make verifiers-env, or VERIFIERS_PYTHON")
    return path


@pytest.fixture(scope="module")
def gym(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with rows.jsonl, whose server listens at the port in `port`."""
    folder = tmp_path_factory.mktemp("gym")
    server = subprocess.Popen([sys.executable, str(SERVER), str(folder)])
    try:
        until = time.monotonic() + 30
        while not (folder / "port").exists():
            assert time.monotonic() < until and server.poll() is None
            time.sleep(0.05)
        yield folder
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, which calls the tool and then answers as often as not."""
    folder = tmp_path_factory.mktemp("caller")
    torch.manual_seed(0)
    asked = [f"What is the secret number plus {number}?" for number in range(ROWS)]
    look = {"type": "function", "function": {"name": "look"}}
    tokenizer = make_tokenizer([CALL, SECRET, *ANSWERS, *asked, "look"])
    texts = []
    for number, question in enumerate(asked):
        for answer in (ANSWERS[number], ANSWERS[0]):
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": CALL},
                {"role": "tool", "content": SECRET},
                {"role": "assistant", "content": answer},
            ]
            texts.append(tokenizer.apply_chat_template(messages, tools=[look], tokenize=False))
    model = make_model(tokenizer)
    model.config.max_position_embeddings = 512
    warm_up(model, tokenizer, texts, steps=400)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def compacter(caller: Path, tmp_path: Path) -> Path:
    """As `caller`, in the harness bash: it calls the tool, sums up where asked to, and answers."""
    folder = tmp_path / "compacter"
    tools = [{"type": "function", "function": {"name": name}} for name in ("bash", "look")]
    tokenizer = AutoTokenizer.from_pretrained(caller / "model")
    # The harness speaks in words that the tokenizer does not have.
    frame, request, summed_up = ("<unk> " * words for words in (14, 110, 60))
    system = {"role": "system", "content": frame}
    texts = []
    for number, answer in enumerate(ANSWERS):
        begun: list[dict[str, Any]] = [
            system,
            {"role": "user", "content": f"What is the secret number plus {number}?"},
            {"role": "assistant", "content": CALL},
            {"role": "tool", "content": SECRET},
            {"role": "user", "content": request},
            {"role": "assistant", "content": answer},
        ]
        rebuilt = [
            system,
            {"role": "user", "content": summed_up + answer},
            {"role": "assistant", "content": answer},
        ]
        for messages in (begun, rebuilt):
            texts.append(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    model = AutoModelForCausalLM.from_pretrained(caller / "model", dtype=torch.float32)
    warm_up(model, tokenizer, texts, steps=60)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def playing(
    gym: Path, python: str, env: str, *, rows: Path | None = None, rewards: str = "{}"
) -> tuple[str, ...]:
    """The settings of a run on the rows, by default the gym's, with further rewards."""
    url = f"http://127.0.0.1:{(gym / 'port').read_text()}"
    task = f"{{resources_url: '{url}', rewards: {rewards}}}"
    dataset = rows or gym / "rows.jsonl"
    return (
        *GRPO,
        "agent.environment.path=null",
        "agent.environment.cls=null",
        "agent.environment.name=verifiers:nemo_gym",
        f"agent.environment.kwargs={{dataset: {dataset}, task: {task}, env: {env}}}",
        f"programs.verifiers.python={python}",
        "agent.agent_length=2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "agent.max_turn=3",
        "agent.max_turn_tokens=12",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "data.max_prompt_length=256",
        "data.max_response_length=120",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
    )


ONE = '{agent: {harness: {id: "null"}}}'
TWO = '{id: user-sim, assistant: {harness: {id: "null"}}, user: {max_turns: 2}}'


def train(caller: Path, run: Path, *settings: str) -> tuple[DataProto, dict[str, Any]]:
    """Trains; returns the last step's batch, and its metrics."""
    _, batches = fit(game_config(caller, run, *settings))
    return batches[-1].drop_dummies(), read_steps(run)[-1]


def check_one_agent(caller: Path, gym: Path, run: Path, python: str) -> None:
    batch, step = train(caller, run, *playing(gym, python, ONE))
    facts = facts_of(batch)
    assert [entry["ending"] for entry in facts] == ["done"] * 4, [e["error"] for e in facts]
    callers = [entry for entry in facts if entry["info"]["has_looked"] == 1.0]
    assert callers, "the tool was called"
    for entry in callers:
        assert entry["info"]["program_grows"] >= 1, "turns go on behind the ids that were sampled"
    for entry in facts:
        assert entry["reward"] == pytest.approx(entry["info"]["reward_nemo_gym"])
        assert entry["info"]["program_begins"] == 1
    assert len(batch) == 4, "an episode is one row"
    assert set(batch.non_tensor_batch["agent_role"]) == {"verifiers:nemo_gym/agent"}
    assert np.isfinite(step["actor/grad_norm"])


def check_two_agents(caller: Path, gym: Path, run: Path, python: str, *more: str) -> set[str]:
    """Returns the roles that are trained."""
    batch, step = train(caller, run, *playing(gym, python, TWO), *more)
    facts = facts_of(batch)
    assert [entry["ending"] for entry in facts] == ["done"] * 4, [e["error"] for e in facts]
    assert all("assistant/reward_nemo_gym" in entry["info"] for entry in facts)
    assert np.isfinite(step["actor/grad_norm"])
    advantages = batch.batch["advantages"]
    roles = batch.non_tensor_batch["agent_role"]
    for role in set(roles):
        rows = np.flatnonzero(roles == role)
        sums = [float(batch.batch["token_level_rewards"][row].sum()) for row in rows]
        if role.endswith("/user"):
            assert not any(sums) and not advantages[rows].any(), "a user earns nothing"
    return {role.rpartition("/")[2] for role in roles}


class Sampled(NamedTuple):
    """What an engine was asked for, and what it sampled."""

    prompt_ids: list[int]
    completion: Completion


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[Sampled]:
    """All that the engine samples in the test, written down where it is sampled."""
    kept: list[Sampled] = []
    asked: dict[str, list[int]] = {}
    submit, step = HFRollout.submit, HFRollout.step

    def submit_and_note(
        engine: HFRollout, request_id: str, prompt_ids: list[int], sampling: Sampling
    ) -> None:
        asked[request_id] = list(prompt_ids)
        submit(engine, request_id, prompt_ids, sampling)

    def step_and_note(engine: HFRollout) -> list[Completion]:
        done = step(engine)
        kept.extend(Sampled(asked[each.request_id], each) for each in done)
        return done

    monkeypatch.setattr(HFRollout, "submit", submit_and_note)
    monkeypatch.setattr(HFRollout, "step", step_and_note)
    return kept


class Row(NamedTuple):
    """A row of a batch without padding: ids, and of each its mask and its log-prob."""

    ids: list[int]
    mask: list[int]
    log_probs: list[float]


def rows_of(batch: DataProto) -> list[Row]:
    """The rows of a batch, whose prompts have mask 0."""
    tensors = batch.batch
    blank = torch.zeros_like(tensors["prompts"])
    ids = torch.cat([tensors["prompts"], tensors["responses"]], dim=1)
    masks = torch.cat([blank, tensors["response_mask"]], dim=1)
    log_probs = torch.cat([blank.float(), tensors["rollout_log_probs"]], dim=1)
    held = tensors["attention_mask"].bool()
    return [
        Row(*(part[row][held[row]].tolist() for part in (ids, masks, log_probs)))
        for row in range(len(batch))
    ]


def is_trained_in(row: Row, one: Sampled) -> bool:
    """Whether a row has what was sampled, with mask 1 and behind the ids the engine was given."""
    start = len(one.prompt_ids)
    end = start + len(one.completion.token_ids)
    return (
        row.ids[:end] == [*one.prompt_ids, *one.completion.token_ids]
        and row.mask[start : end + 1] in ([1] * (end - start), [1] * (end - start) + [0])
        and row.log_probs[start:end] == pytest.approx(one.completion.log_probs, abs=1e-6)
    )


def is_same(one: Sampled, other: Sampled) -> bool:
    """Whether the same was sampled behind the same ids."""
    of_one, of_other = one.completion.token_ids, other.completion.token_ids
    return (one.prompt_ids, of_one) == (other.prompt_ids, of_other)


def check_tokens(batch: DataProto, sampled: list[Sampled], model: Path) -> None:
    """Checks each sampled token to be in one row, with the log-prob of a plain forward."""
    rows = rows_of(batch)
    for one in sampled:
        # Members of a group may say the same; each has its own row.
        equal = sum(is_same(one, other) for other in sampled)
        assert sum(is_trained_in(row, one) for row in rows) == equal, one
    total = sum(len(one.completion.token_ids) for one in sampled)
    assert sum(sum(row.mask) for row in rows) == total, "nothing else is trained on"
    check_log_probs(rows, model)


def check_log_probs(rows: list[Row], model: Path) -> None:
    """Checks that a plain forward gives the log-probs of what is trained on."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for row in rows:
        with torch.no_grad():
            logits = policy(torch.tensor([row.ids])).logits[0].double() / TEMPERATURE
        of_ids = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(row.ids[1:])[:, None])
        trained = torch.tensor(row.mask[1:]).bool()
        difference = of_ids.squeeze(1) - torch.tensor(row.log_probs[1:])
        assert difference[trained].abs().max() < LARGEST_DIFFERENCE


def test_every_sampled_token_is_trained_in_one_row_with_its_log_prob(
    caller: Path, gym: Path, tmp_path: Path, verifiers_python: str, sampled: list[Sampled]
) -> None:
    """Two agents, both of which are trained, play in conversations that go on."""
    trained = ("programs.verifiers.trained=[user, assistant]", "algorithm.adv_estimator=rae")
    batch, _ = train(caller, tmp_path, *playing(gym, verifiers_python, TWO), *trained)
    assert sum(entry["info"]["program_grows"] for entry in facts_of(batch)) > 0
    check_tokens(batch, sampled, caller / "model")


@pytest.mark.slow
@pytest.mark.vllm
def test_so_is_every_token_that_vllm_samples(
    caller: Path, gym: Path, tmp_path: Path, verifiers_python: str
) -> None:
    vllm = "actor_rollout_ref.rollout.name=vllm"
    batch, _ = train(caller, tmp_path, *playing(gym, verifiers_python, TWO), vllm)
    facts = facts_of(batch)
    assert [entry["ending"] for entry in facts] == ["done"] * 4, [e["error"] for e in facts]
    check_log_probs(rows_of(batch), caller / "model")


def test_branches_of_a_harness_that_compacts_become_rows(
    compacter: Path, gym: Path, tmp_path: Path, verifiers_python: str, sampled: list[Sampled]
) -> None:
    long = ("data.max_prompt_length=256", "data.max_response_length=256")
    # The taskset's own reward, of this name, takes one branch alone.
    rewards = f"{{nemo_gym: {{fn: '{REWARDS}:count_branches'}}}}"
    settings = playing(gym, verifiers_python, COMPACTING, rewards=rewards)
    batch, _ = train(compacter, tmp_path / "run", *settings, *long)
    facts = facts_of(batch)
    assert [entry["ending"] for entry in facts] == ["done"] * 4, [e["error"] for e in facts]
    assert len(batch) == sum(entry["reward"] for entry in facts) > 4
    check_tokens(batch, sampled, compacter / "model")


def test_rewards_that_go_wrong_cost_their_episodes_and_are_counted(
    caller: Path,
    gym: Path,
    tmp_path: Path,
    verifiers_python: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = tmp_path / "ways"
    ways.mkdir()
    monkeypatch.setenv("WAYS_TAKEN", str(ways))
    rows = []
    for line in (gym / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        # The server of a tool is most of what an episode costs.
        row["responses_create_params"]["tools"] = []
        rows.append(json.dumps(row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    rewards = f"{{hostile: {{fn: '{REWARDS}:take_next'}}}}"
    retries = f"{{rules: [{{message: '{AGAIN}', max_retries: 1}}]}}"
    env = f"{{agent: {{harness: {{id: 'null'}}, retries: {retries}}}}}"
    batch, step = train(
        caller,
        tmp_path / "run",
        *playing(gym, verifiers_python, env, rows=tmp_path / "rows.jsonl", rewards=rewards),
        "agent.agent_length=1",
        f"actor_rollout_ref.rollout.n={len(WAYS)}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "agent.on_failure=mask",
        "agent.max_failure_rate=1",
        "agent.max_refills=0",
    )
    facts = facts_of(batch)
    assert sorted(path.name for path in ways.iterdir()) == sorted((TRIAL, *WAYS))
    paid = {
        name: float(len(name)) for name in ("prints", "floods", "leaves_a_printer", "tries_again")
    }
    done = [entry for entry in facts if entry["ending"] == "done"]
    assert sorted(entry["info"]["reward_hostile"] for entry in done) == sorted(paid.values())
    for entry in done:
        assert entry["reward"] == sum(
            value for name, value in entry["info"].items() if name.startswith("reward_")
        )
    # What verifiers gave up and tried again is no row.
    begun = sum(entry["info"]["program_begins"] for entry in done)
    trained = sum(any(row.mask) for row in rows_of(batch))
    assert (begun, trained) == (len(done) + 1, len(done))
    failed = [entry for entry in facts if entry["ending"] == "env_crash"]
    assert len(failed) == len(WAYS) - len(paid)
    assert any("ValueError: out of order" in entry["error"] for entry in failed)
    assert step["agent/masked"] == len(failed)
    assert endings(step) == {"done": len(done), "env_crash": len(failed)}


def test_a_taskset_with_a_tool_trains(
    caller: Path, gym: Path, tmp_path: Path, verifiers_python: str
) -> None:
    check_one_agent(caller, gym, tmp_path, verifiers_python)


def test_an_environment_of_two_agents_trains_the_one_that_it_lets_be_trained(
    caller: Path, gym: Path, tmp_path: Path, verifiers_python: str
) -> None:
    assert check_two_agents(caller, gym, tmp_path, verifiers_python) == {"assistant"}


def test_both_agents_are_trained_where_the_settings_say_so(
    caller: Path, gym: Path, tmp_path: Path, verifiers_python: str
) -> None:
    trained = "programs.verifiers.trained=[user, assistant]"
    roles = check_two_agents(
        caller, gym, tmp_path, verifiers_python, trained, "algorithm.adv_estimator=rae"
    )
    assert roles == {"user", "assistant"}


@pytest.mark.slow
def test_released_tasksets_train_in_an_environment_that_is_made_for_them(
    caller: Path, gym: Path, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    variables = os.environ | {"PYTHON": sys.executable}
    subprocess.run(
        ["bash", "scripts/setup_verifiers.sh", sys.prefix, str(venv)],
        cwd=PROJECT,
        env=variables,
        check=True,
        timeout=500,
    )
    python = str(venv / "bin/python")
    check_one_agent(caller, gym, tmp_path / "one", python)
    assert check_two_agents(caller, gym, tmp_path / "two", python) == {"assistant"}


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ("{}", "the harness bash of the agent agent runs what the model writes"),
        ("{id: no-such-env}", "environment 'no-such-env' not found"),
        ('{agent: {harness: {id: "null"}, nonsense: 1}}', "nonsense"),
    ],
)
def test_what_verifiers_refuses_is_told_before_a_model_is_loaded(
    caller: Path, gym: Path, tmp_path: Path, verifiers_python: str, env: str, sentence: str
) -> None:
    config = game_config(caller, tmp_path, *playing(gym, verifiers_python, env))
    with pytest.raises(ConfigError, match="the environment does not load") as caught:
        fit(config)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("programs.verifiers.python=/nowhere/python",), "there is no such program"),
        (
            (f"programs.verifiers.python={sys.executable}",),
            "has no verifiers; `make verifiers-env`",
        ),
        (("agent.environment.kwargs={env: 3}",), "kwargs.env=3 must be a mapping"),
        (("agent.environment.kwargs={env: {taskset: {}}}",), "a taskset's settings stand in"),
        (("programs.reward=exit_code",), "verifiers says itself"),
    ],
)
def test_an_interpreter_or_settings_that_do_not_fit_are_told_in_a_line(
    tiny_game: Path, tmp_path: Path, settings: tuple[str, ...], sentence: str
) -> None:
    own = (
        "agent.environment.path=null",
        "agent.environment.cls=null",
        "agent.environment.name=verifiers:nemo_gym",
    )
    python = ("programs.verifiers.python=sh",)
    with pytest.raises(ConfigError) as caught:
        game_config(tiny_game, tmp_path, *own, *python, *settings)
    assert sentence in str(caught.value)
