"""Programs against the same agent in an environment: tokens a second, first request to last token.

    python -m tests.benchmarks.program_speed [--episodes 16 64] [--client http openai] [--tokens 24]

The engine samples a token of every running request in each step, and a step takes PACE_S, as a
GPU's would: what is measured is what the loop, the server and the programs add. At least AT_LEAST
of the environment's speed is wanted. Programs run on the machine's processors: told is, too, how
many seconds of these they took, of those that there were, and how long the programs' first requests
were apart.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

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
        self.tokens = 0
        self.first_request = self.last_token = 0.0
        self.requests: list[float] = []

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        self.requests.append(time.perf_counter())
        self.first_request = self.first_request or self.requests[-1]
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


@dataclass(frozen=True)
class Speed:
    """Holds what was measured of a batch.

    Attributes:
        tokens_per_s: from the first request to the last token.
        apart_s: from the first request to the last one of those that begin an episode.
        span_s: from the first request to the last token.
        programs_s: seconds of processors that programs took.
    """

    tokens_per_s: float
    apart_s: float
    span_s: float
    programs_s: float


def speed_of(spec: AgentSpec | ProgramSpec, episodes: int, tokens: int) -> Speed:
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
            engine.requests = []
            before = seconds_of_programs()
            rollout.run(describe_episodes(episodes, 1, step_info(step=number, seed=0)))
            taken = seconds_of_programs() - before
    finally:
        rollout.close()
    assert engine.tokens == episodes * TURNS * tokens, engine.tokens
    span = engine.last_token - engine.first_request
    # Of as many requests as there are episodes; few come a second time before the last has begun.
    apart = engine.requests[episodes - 1] - engine.requests[0]
    return Speed(engine.tokens / span, apart, span, taken)


def seconds_of_programs() -> float:
    """Returns the processor time of the programs that have ended."""
    launchers = [child.cpu_times() for child in psutil.Process().children()]
    return sum(times.children_user + times.children_system for times in launchers)


def main() -> None:
    """Measures each number of episodes with each client."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--client", nargs="+", default=list(CLIENTS), choices=CLIENTS)
    parser.add_argument("--tokens", type=int, default=TOKENS_OF_TURN, help="of a turn")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    cores = len(os.sched_getaffinity(0))
    for episodes in chosen.episodes:
        native = speed_of(AgentSpec(Same), episodes, chosen.tokens).tokens_per_s
        print(f"{episodes} episodes: {native:.0f} tokens/s in an environment")
        for name in chosen.client:
            code, preload = CLIENTS[name]
            script = folder / f"{name}.py"
            script.write_text(code + PLAY)
            spec = ProgramSpec(command=(sys.executable, str(script)), preload=preload)
            speed = speed_of(spec, episodes, chosen.tokens)
            share = speed.tokens_per_s / native
            print(
                f"  program, {name}: {speed.tokens_per_s:.0f} tokens/s, {share:.3f} (at least "
                f"{AT_LEAST}); first requests {speed.apart_s:.2f} s apart; programs took "
                f"{speed.programs_s:.2f} s of {speed.span_s * cores:.2f} s of processors"
            )


if __name__ == "__main__":
    main()
