"""The small API's engines: answers, conversations, episodes, tools; and one's own parts alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from custom.env_dataset import CustomEnvDataset
from custom.reward_manager import CustomRewardManager
from setup import (
    BaseInferenceEngine,
    BatchInferenceManager,
    CustomEnvironmentDataset,
    EnvironmentConfig,
    EnvironmentStepTool,
    FunctionCallingParser,
    JSONActionParser,
    MultiTurnInferenceEngine,
    MultiTurnManager,
    ReActActionParser,
    SimpleGameEnvironment,
    ToolRegistry,
    create_inference_engine,
)
from tests.e2e.setup_parts import BACKENDS, MyTool, TextGameEnv, make_hf_engine

JSON_CALL = '{"name": "my_tool", "arguments": {"param": "x"}}'


@pytest.fixture(scope="module")
def hf_engine(tiny_game: Path) -> BaseInferenceEngine:
    return make_hf_engine(tiny_game)


# Engines


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_generates(tiny_game: Path, backend: str) -> None:
    settings = {
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "max_model_len": 200,
        "max_num_seqs": 8,
    }
    engine = create_inference_engine(
        model_path=str(tiny_game / "model"), backend=backend, config=settings
    )
    output = engine.generate(prompts=["higher 5"], max_tokens=6, temperature=0.7, top_p=0.9)
    assert isinstance(output.sequences[0], str)
    length = len(output.token_ids[0])
    assert output.tokens.shape == (1, length)
    assert len(output.log_probs[0]) == length <= 6
    assert max(output.log_probs[0]) <= 0
    assert len(engine.generate(["test prompt"]).sequences) == 1

    of_messages = engine.generate([{"role": "user", "content": "higher 5"}], 6, seed=3)
    assert of_messages.token_ids == engine.generate("higher 5", 6, seed=3).token_ids
    raw_ids = engine.encode("higher 5", raw=True)
    assert raw_ids == engine.tokenizer.encode("higher 5")
    assert engine.encode("higher 5")[-3:] != raw_ids[-3:]

    prompts = [f"{i} 3" for i in range(10)]
    many = BatchInferenceManager(engine, batch_size=4).generate_batch(prompts, max_tokens=5, seed=1)
    assert len(many.sequences) == len(many.tokens) == 10
    alone = [engine.generate(text, 5, temperature=0).token_ids[0] for text in ("1 3", "9 3")]
    together = BatchInferenceManager(engine, batch_size=1).generate_batch(
        ["1 3", "9 3"], max_tokens=5, temperature=0
    )
    assert together.token_ids == alone
    with pytest.raises(ValueError, match=r"prompt 0 has .* max_model_len=200"):
        engine.generate("higher " * 300)

    multi_turn = MultiTurnInferenceEngine(
        engine=engine, max_turns=5, system_prompt="You are a helpful assistant."
    )
    env = SimpleGameEnvironment()
    responses = multi_turn.run_episode(
        env, initial_prompt="Start playing the game.", max_turns=3, max_tokens=6
    )
    assert 1 <= len(list(responses)) <= 3
    assert responses.total_reward == pytest.approx(env.score)
    assert responses.ending in ("max_turns", "done")
    first = multi_turn.messages[1]["content"]
    assert first.startswith("Start playing the game.\n\nYou are in a room.")


def test_an_unknown_backend_and_a_missing_package_are_named(
    tiny_game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_game / "model")
    with pytest.raises(ValueError, match="backend='tgi' is unknown; allowed: hf, sglang, vllm"):
        create_inference_engine(model, "tgi")
    for backend in ("vllm", "sglang"):
        monkeypatch.setitem(sys.modules, backend, None)
        with pytest.raises(ImportError, match=f"pip install .?{backend}"):
            create_inference_engine(model, backend, {"max_model_len": 64})


def test_an_engine_refuses_what_it_cannot_do_and_leaves_environments_open(
    hf_engine: BaseInferenceEngine, tiny_game: Path
) -> None:
    for wrong in ({"temperature": -1.0}, {"top_p": 2.0}, {"max_tokens": 0}, {"temperatur": 1.0}):
        with pytest.raises(ValueError, match="temperature"):
            hf_engine.generate("higher", **wrong)
    model = str(tiny_game / "model")
    with pytest.raises(ValueError, match="max_model_length"):
        create_inference_engine(model, "hf", {"max_model_length": 100})
    with pytest.raises(ValueError, match="HFInferenceEngine has one rank"):
        create_inference_engine(model, "hf", {"tensor_parallel_size": 2})
    # Left by a call that was interrupted.
    hf_engine.rollout.submit("0", [1, 2, 3], hf_engine.sampling(4))
    alone = hf_engine.generate("higher", max_tokens=4, temperature=0).token_ids
    assert alone == hf_engine.generate(["higher"], max_tokens=4, temperature=0).token_ids

    class Closing(TextGameEnv):
        open = True

        def close(self) -> None:
            self.open = False

    env = Closing()
    for _ in range(2):
        MultiTurnInferenceEngine(hf_engine, max_turns=2).run_episode(env, max_tokens=4)
    assert env.open


# Conversations and tools


def test_a_conversation(hf_engine: BaseInferenceEngine) -> None:
    multi_turn = MultiTurnInferenceEngine(
        engine=hf_engine, max_turns=5, system_prompt="You are a helpful assistant."
    )
    with pytest.raises(ValueError, match="start_conversation"):
        multi_turn.step()
    multi_turn.start_conversation("Initial prompt")
    response = multi_turn.step(max_tokens=6)
    multi_turn.add_message("and now?")
    roles = [message["role"] for message in multi_turn.messages]
    assert roles == ["system", "user", "assistant", "user"]
    text = multi_turn.format_conversation()
    assert "Initial prompt" in text
    assert response in text
    assert text.index("and now?") > text.index("Initial prompt")


def test_tools_by_hand_and_in_an_episode(hf_engine: BaseInferenceEngine) -> None:
    env = SimpleGameEnvironment()
    registry = ToolRegistry()
    registry.register(MyTool())
    registry.register(EnvironmentStepTool(env))
    assert registry.execute_tool("my_tool", param="value") == (True, "value")
    success, result = registry.execute_tool("my_tool", colour="red")
    assert not success
    assert "param" in result
    for parser, text in {
        JSONActionParser(): f"I call {JSON_CALL}",
        ReActActionParser(): 'Thought: now\nAction: my_tool\nAction Input: {"param": "x"}',
        FunctionCallingParser(): f"<tool_call>{JSON_CALL}</tool_call>",
    }.items():
        manager = MultiTurnManager(registry, parser, env)
        assert manager.step(text, env.reset()).tool_call.result == "x"
        assert "no tool call" in manager.step("model output", env.reset()).tool_call.result
        summary = manager.summary()
        assert list(summary) == [text, "model output"]
        assert summary.tool_statistics["my_tool"]["calls"] == 1
    multi_turn = MultiTurnInferenceEngine(hf_engine, tool_manager=manager, enable_tools=True)
    summary = multi_turn.run_episode(env, "Play.", max_turns=2, max_tokens=6)
    of_manager = manager.summary()
    assert list(summary) == list(of_manager)
    assert summary.tool_statistics == of_manager.tool_statistics
    assert summary.total_reward == pytest.approx(of_manager.total_reward)


# One's own parts


def test_ones_own_parts_before_training(hf_engine: BaseInferenceEngine) -> None:
    env = SimpleGameEnvironment(EnvironmentConfig())
    env.reset()
    assert len(env.step("test action")) == 4
    dataset = CustomEnvDataset(env)
    assert len(dataset)
    assert dataset[0]["prompt"]
    assert callable(CustomRewardManager(env))
    rows = CustomEnvironmentDataset(env, hf_engine.tokenizer)
    assert {"input_ids", "attention_mask"} <= rows[0].keys()
