"""Programs against the same agent in an environment: tokens a second, first request to last token.

    python -m tests.benchmarks.program_speed [--episodes 16 64] [--client http openai] [--tokens 24]

The engine samples a token of every running request in each step, and a step takes PACE_S, as a
GPU's would: what is measured is what the loop, the server and the programs add. At least AT_LEAST
of the environment's speed is wanted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from custom.agent import AgentSpec
from custom.env import BaseEnvironment
from data.seeds import step_info
from examples.prepare_tiny_prompts import make_tokenizer
from training.config import AgentConfig, DataConfig, PPOConfig, RolloutConfig
from workers.multi_turn_rollout import AgentRollout
from workers.programs.spec import ProgramSpec
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode_descriptions import describe_episodes

TURNS = 6
TOKENS_OF_TURN = 24
PACE_S = 0.02
AT_LEAST = 0.95
PROMPT, RESPONSE = 64, 4096
HTTP = """
import http.client, json, os
from urllib.parse import urlparse
base = urlparse(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(base.hostname, base.port)
def ask(messages):
    body = json.dumps({"model": "m", "messages": messages})
    connection.request("POST", base.path + "/chat/completions", body)
    return json.load(connection.getresponse())["choices"][0]["message"]["content"]
"""
OPENAI = """
from openai import OpenAI
client = OpenAI()
def ask(messages):
    answer = client.chat.completions.create(model="m", messages=messages)
    return answer.choices[0].message.content
"""
PLAY = f"""
messages = [{{"role": "user", "content": "above 3"}}]
for _ in range({TURNS}):
    messages.append({{"role": "assistant", "content": ask(messages)}})
    messages.append({{"role": "user", "content": "higher"}})
print(1)
"""
CLIENTS = {"http": (HTTP, ("json", "http.client")), "openai": (OPENAI, ("openai",))}


class Same(BaseEnvironment):
    """What the programs do."""

    def reset(self, seed: int | None = None) -> str:
        return "above 3"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "higher", 0.0, False, {}


class PacedEngine(BaseRollout):
    """Samples a token of each request a step, as many as `answer` has; a step takes PACE_S."""

    def __init__(self, config: RolloutConfig, answer: list[int], pad_token_id: int) -> None:
        super().__init__(config, eos_token_ids=answer[-1:], pad_token_id=pad_token_id)
        self.answer = answer
        self.left: dict[str, int] = {}
        self.first_request = self.last_token = 0.0
        self.tokens = 0

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        self.first_request = self.first_request or time.perf_counter()
        self.left[request_id] = len(self.answer)

    def step(self) -> list[Completion]:
        time.sleep(PACE_S)
        done = []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            self.tokens += 1
            if not self.left[request_id]:
                del self.left[request_id]
                done.append(
                    Completion(
                        request_id=request_id,
                        token_ids=list(self.answer),
                        log_probs=[-1.0] * len(self.answer),
                        finish_reason="stop",
                    )
                )
        self.last_token = time.perf_counter()
        return done

    def update_weights(self, weights: Any, manifest: Any) -> None:
        raise NotImplementedError


def tokens_per_second(spec: AgentSpec | ProgramSpec, episodes: int, tokens: int) -> float:
    """Plays a batch to warm up and one that counts."""
    config = PPOConfig(
        data=DataConfig(max_prompt_length=PROMPT, max_response_length=RESPONSE),
        agent=AgentConfig(max_turn=TURNS),
    )
    tokenizer = make_tokenizer()
    engine = PacedEngine(
        RolloutConfig(response_length=RESPONSE, max_model_len=PROMPT + RESPONSE),
        tokenizer.encode("5 " * (tokens - 1) + "<|im_end|>"),
        tokenizer.pad_token_id,
    )
    rollout = AgentRollout(config, engine, tokenizer, [spec], None)
    try:
        for number in range(2):
            engine.first_request = 0.0
            engine.tokens = 0
            info = step_info(step=number, seed=0)
            rollout.run(describe_episodes(episodes, 1, info))
    finally:
        rollout.close()
    assert engine.tokens == episodes * TURNS * tokens, engine.tokens
    return engine.tokens / (engine.last_token - engine.first_request)


def main() -> None:
    """Measures each number of episodes with each client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--client", nargs="+", default=list(CLIENTS), choices=CLIENTS)
    parser.add_argument("--tokens", type=int, default=TOKENS_OF_TURN, help="of a turn")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    for episodes in chosen.episodes:
        native = tokens_per_second(AgentSpec(Same), episodes, chosen.tokens)
        print(f"{episodes} episodes: {native:.0f} tokens/s in an environment")
        for name in chosen.client:
            code, preload = CLIENTS[name]
            script = folder / f"{name}.py"
            script.write_text(code + PLAY)
            spec = ProgramSpec(command=(sys.executable, str(script)), preload=preload)
            speed = tokens_per_second(spec, episodes, chosen.tokens)
            share = speed / native
            print(f"  program, {name}: {speed:.0f} tokens/s, {share:.3f} (at least {AT_LEAST})")


if __name__ == "__main__":
    main()
