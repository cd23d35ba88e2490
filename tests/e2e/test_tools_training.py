"""Tools from end to end, with the trainer around them.

Calls in sampled text, their results as observations, their counts as metrics.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from custom.envs.tool_arithmetic import ToolArithmetic
from custom.tools import Tool, ToolDefinition
from custom.tools.builtin import CalculatorTool
from data.protocol import DataProto
from data.seeds import step_info
from features.records.episode_files import read_episodes
from tests.unit.test_turn_tokens import QWEN25, byte_level_core, make_tokenizer
from training.building import build_trainer
from training.config import AgentConfig, DataConfig, EnvironmentChoice, PPOConfig, RolloutConfig
from training.config.loader import load_config
from training.ray_trainer import RayPPOTrainer
from training.run.metrics.episode_metrics import episode_metrics
from workers.multi_turn_rollout import AgentRollout, agent_specs, describe_episodes
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Completion, NamedTensors, Sampling

HERE = Path(__file__).resolve()
ENVIRONMENT = "custom.envs.tool_arithmetic:ToolArithmetic"
PROMPT, RESPONSE = 2048, 1024


class SleepingTool(Tool):
    definition = ToolDefinition("sleep", "Sleeps.", timeout_s=0.2)

    def execute(self) -> str:
        time.sleep(1.0)
        return "awake"


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes under Qwen's template, which renders tools."""
    return make_tokenizer(QWEN25, "<|im_end|>", ["<|im_start|>"], byte_level_core())


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def opening(tokenizer: PreTrainedTokenizerFast, seed: int, *further: Tool) -> str:
    """Returns an episode's first prompt, as the chat template writes it for these tools."""
    environment = ToolArithmetic()
    question = environment.reset(seed)
    messages = [
        {"role": "system", "content": environment.get_prompt_prefix()},
        {"role": "user", "content": question},
    ]
    schemas = [tool.definition.schema() for tool in (CalculatorTool(), *further)]
    return tokenizer.apply_chat_template(
        messages, tools=schemas, tokenize=False, add_generation_prompt=True
    )


class ScriptedEngine(BaseRollout):
    """Says what it is told: turn t of episode i is `scripts[i][t]`, as tokens.

    There are no weights; everything else is what real engines do.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, scripts: list[list[str]]) -> None:
        config = RolloutConfig(response_length=RESPONSE, max_model_len=PROMPT + RESPONSE)
        super().__init__(
            config, eos_token_ids=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
        )
        self.tokenizer, self.scripts = tokenizer, [list(script) for script in scripts]
        self.pending: list[str] = []
        self.seen: list[str] = []

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        self.seen.append(self.tokenizer.decode(prompt_ids))
        self.pending.append(request_id)

    def step(self) -> list[Completion]:
        done, self.pending = self.pending, []
        return [self.complete(request_id) for request_id in done]

    def complete(self, request_id: str) -> Completion:
        text = self.scripts[int(request_id)].pop(0)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return Completion(
            request_id=request_id, token_ids=ids, log_probs=[-0.5] * len(ids), finish_reason="stop"
        )

    def abort(self, request_id: str) -> None:
        self.pending.remove(request_id)

    def update_weights(self, weights: NamedTensors, manifest: dict[str, torch.Size]) -> None:
        pass


def play(*scripts: list[str]) -> tuple[ScriptedEngine, DataProto]:
    """An episode for each script, with a calculator and a tool that is too slow."""
    engine = ScriptedEngine(qwen_tokenizer(), list(scripts))
    agent = AgentConfig(
        environment=EnvironmentChoice(name=ENVIRONMENT),
        tools=("calculator", f"{HERE}:SleepingTool"),
        max_turn=6,
    )
    config = PPOConfig(
        data=DataConfig(max_prompt_length=PROMPT, max_response_length=RESPONSE), agent=agent
    )
    rollout = AgentRollout(config, engine, engine.tokenizer, agent_specs(config), None)
    try:
        return engine, rollout.run(describe_episodes(len(scripts), 1, step_info(step=1, seed=3)))
    finally:
        rollout.close()


def task_of(batch: DataProto, row: int) -> tuple[str, str]:
    """(expression, answer) of the row's episode."""
    environment = ToolArithmetic()  # its config's defaults, as in `play`
    question = environment.reset(int(batch.non_tensor_batch["env_seed"][row]))
    return question.removeprefix("What is ").removesuffix("?"), environment.answer


def texts(engine: ScriptedEngine, batch: DataProto, row: int, *, sampled: bool) -> list[str]:
    """The stretches of the row's response that were sampled, or those that were not."""
    held = int(batch.batch["attention_mask"][row][PROMPT:].sum())
    ids, mask = batch.batch["responses"][row][:held], batch.batch["response_mask"][row][:held]
    parts = torch.tensor_split(ids, (mask.diff() != 0).nonzero().flatten() + 1)
    return [engine.tokenizer.decode(part) for part in parts[0 if sampled else 1 :: 2]]


def test_a_calls_result_is_the_next_observation_and_the_answer_is_paid() -> None:
    _, probe = play(["none"])
    expression, answer = task_of(probe, 0)
    script = [f"I compute.\n{call('calculator', expression=expression)}", f"It is {answer}."]
    engine, batch = play(script)
    assert texts(engine, batch, 0, sampled=True) == [f"{text}<|im_end|>" for text in script]
    assert texts(engine, batch, 0, sampled=False) == [
        f"\n<|im_start|>user\n{answer}<|im_end|>\n<|im_start|>assistant\n"
    ]
    rewards, mask = batch.batch["environment_rewards"][0], batch.batch["response_mask"][0]
    assert rewards.sum() == 1
    assert rewards.argmax() == mask.nonzero().max(), "on the last token that was sampled"
    (facts,) = batch.non_tensor_batch["episode_facts"]
    assert (facts["ending"], facts["turns"]) == ("done", 2)
    assert [(c["name"], c["ok"], c["error_kind"]) for c in facts["tool_calls"]] == [
        ("calculator", True, "")
    ]


def test_the_prompt_tells_of_the_tools_as_the_template_does() -> None:
    engine, batch = play(["none"])
    template = opening(engine.tokenizer, int(batch.non_tensor_batch["env_seed"][0]), SleepingTool())
    assert engine.seen == [template]
    assert '"name": "calculator"' in template
    assert batch.batch["prompts"][0][batch.batch["attention_mask"][0][:PROMPT].bool()].tolist() == (
        engine.tokenizer.encode(template)
    )


BAD_CALLS = {
    "unknown_tool": (
        call("telescope", at="moon"),
        "there is no tool 'telescope'; the tools are: calculator, sleep",
    ),
    "bad_json": (
        '<tool_call>{"name": "calculator", "arguments": {</tool_call>',
        "the call is not valid JSON",
    ),
    "bad_arguments": (call("calculator", formula="1 + 1"), "wrong arguments for tool 'calculator'"),
    "exception": (call("calculator", expression="1 / 0"), "division by zero"),
    "timeout": (call("sleep"), "did not answer within 0.2 s"),
}


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_a_bad_call_becomes_an_observation_and_the_episode_goes_on(kind) -> None:
    text, complaint = BAD_CALLS[kind]
    engine, batch = play([text, "none"])
    (observation,) = texts(engine, batch, 0, sampled=False)
    assert f"Error ({kind}): " in observation
    assert complaint in observation
    (facts,) = batch.non_tensor_batch["episode_facts"]
    assert (facts["ending"], facts["turns"]) == ("done", 2)
    assert [(c["ok"], c["error_kind"]) for c in facts["tool_calls"]] == [(False, kind)]


def test_calls_failures_and_seconds_are_metrics_by_tool_and_by_kind() -> None:
    good = call("calculator", expression="2 * 3")
    twice = f"{good}\n{good}"
    _, batch = play([good, *[text for text, _ in BAD_CALLS.values()]], [twice, "none"], ["none"])
    metrics = episode_metrics(list(batch.non_tensor_batch["episode_facts"]))
    counts = {
        name: value
        for name, value in metrics.items()
        if "tool" in name and not name.endswith("/seconds")
    }
    assert counts == {
        "tool/calculator/calls": 5,
        "tool/calculator/failures": 2,
        "tool/sleep/calls": 1,
        "tool/sleep/failures": 1,
        "tool/unknown/calls": 2,
        "tool/unknown/failures": 2,
        **{f"tool/{name}/cut": 0 for name in ("calculator", "sleep", "unknown")},
        **{f"tool_failures/{kind}": 1 for kind in BAD_CALLS},
    }
    assert 0.2 <= metrics["tool/sleep/seconds"] < 1.0
    assert 0 <= metrics["tool/calculator/seconds"] < 0.1


CALL = call("calculator", expression="6 * 7")
# Nats a token at which nearly every call is whole, sampled at temperature 0.5.
LEARNED = 0.01


def write_caller(folder: Path) -> None:
    """A two-layer Llama that has learned to answer everything with CALL."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=PROMPT + RESPONSE,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    answer = [*tokenizer.encode(CALL, add_special_tokens=False), tokenizer.eos_token_id]
    losses: list[float] = []
    # How soon it has learned depends on the processor's last bits.
    while len(losses) < 100 or max(losses[-5:]) > LEARNED:
        assert len(losses) < 600, f"the call is not learned: its loss is {losses[-5:]}"
        # First behind short texts, where it is learned quickly, then behind the prompts that there
        # will be.
        is_short = len(losses) < 90
        prompt = tokenizer.encode(opening(tokenizer, seed=len(losses)))[-32 if is_short else 0 :]
        ids = torch.tensor([prompt + answer])
        labels = torch.tensor([[-100] * len(prompt) + answer])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caller") / "model"
    write_caller(folder)
    return folder


def train_caller(caller: Path, folder: Path, *settings: str) -> RayPPOTrainer:
    """Trains for two steps the model that calls; returns the trainer, which has ended."""
    config = load_config(
        [
            "configs/quickstart.yaml",
            f"agent.environment={{name: {ENVIRONMENT}, path: null, cls: null}}",
            "agent.tools=[calculator]",
            "agent.parser=function",
            "agent.max_turn=2",
            "agent.max_turn_tokens=96",
            "agent.val_length=0",
            f"records.folder={folder}/episodes",
            "data.train_batch_size=4",
            f"data.max_prompt_length={PROMPT}",
            "data.max_response_length=256",
            f"actor_rollout_ref.model.path={caller}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_epochs=1",
            "actor_rollout_ref.actor.optim.lr=1e-5",
            "actor_rollout_ref.rollout.temperature=0.5",
            "algorithm.adv_estimator=reinforce_plus_plus",
            f"trainer.default_local_dir={folder}/run",
            "trainer.val_before_train=false",
            "trainer.total_training_steps=2",
            "trainer.logger=file",
            *settings,
        ]
    ).config
    trainer = build_trainer(config)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()
    return trainer


@pytest.mark.long
def test_a_tool_whose_code_always_fails_rings_in_the_second_step(
    caller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(tool: CalculatorTool, expression: str) -> str:
        raise KeyError(expression)

    monkeypatch.setattr(CalculatorTool, "execute", boom)
    train_caller(caller, tmp_path, "data.train_batch_size=16")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "timing_s/gen" in line]
    assert [step.get("alarms/tool_fails", 0) for step in steps] == [0, 2]


def test_two_steps_of_training_with_a_calculator_count_calls_and_keep_results_out_of_the_loss(
    caller: Path, tmp_path: Path
) -> None:
    trainer = train_caller(caller, tmp_path)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [line for line in lines if "timing_s/gen" in line]
    assert len(steps) == 2
    for step, metrics in enumerate(steps, 1):
        records = read_episodes(tmp_path / "episodes" / f"{step}.jsonl")
        calls = [
            made for record in records for turn in record["turns"] for made in turn["tool_calls"]
        ]
        good = sum(made["ok"] for made in calls)
        assert good >= 2, "the model was taught to call"
        assert metrics["tool/calculator/calls"] == sum(
            made["name"] == "calculator" for made in calls
        )
        assert metrics["tool/calculator/failures"] == sum(
            not m["ok"] and m["name"] == "calculator" for m in calls
        )
        assert metrics["tool/calculator/seconds"] >= 0
        tokenizer = trainer.tokenizer
        for record in records:
            (row,) = record["rows"]
            assert '{"type": "function", "function": {"name": "calculator"' in tokenizer.decode(
                row["prompt_ids"]
            )
            given = [
                token
                for token, mask in zip(row["response_ids"], row["response_mask"], strict=True)
                if not mask
            ]
            if record["turns"][0]["text"] == CALL:
                assert (
                    tokenizer.decode(given)
                    == "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"
                )
