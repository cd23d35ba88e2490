"""What a turn costs beside sampling: instant environments behind an engine that answers at once.

Of all episodes together, after one round that builds their environments: the milliseconds of
processor time a turn, from the reset to the rows of the batch, of this process and of those that
its environments live in. Processor time, not the wall's: other load hardly moves it. An episode is
a reset, TURNS turns and a finish.

    python -m tests.benchmarks.turn_loop_cost [--episodes 64 256 1024] [--isolation thread process]
    python -m tests.benchmarks.turn_loop_cost --join 10 100      # a join, by the number of turns

Fails where it is more than MOST_MS.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from custom.agent import AgentSpec
from custom.env import BaseEnvironment
from data.protocol import DataProto
from data.seeds import step_info
from tests.unit.test_turn_tokens import QWEN25, of_template
from training.config import (
    AgentConfig,
    DataConfig,
    EnvironmentChoice,
    PPOConfig,
    RolloutConfig,
)
from workers.multi_turn_rollout import AgentRollout
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode_descriptions import describe_episodes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from prepare_tiny_prompts import make_tokenizer

MOST_MS = {"thread": 0.25, "process": 0.8}
# Environments at once: a process holds memory of its own.
NUM_WORKERS = {"thread": None, "process": 64}
TURNS = 3
PROMPT, RESPONSE = 32, 64


class Instant(BaseEnvironment):
    """Answers at once, in few words."""

    def reset(self, seed: int | None = None) -> str:
        return "guess the number"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "higher", 0.0, False, {}


class InstantEngine(BaseRollout):
    """Answers each request of a step with the same two tokens."""

    def __init__(self, config: RolloutConfig, answer: list[int], pad_token_id: int) -> None:
        super().__init__(config, eos_token_ids=answer[-1:], pad_token_id=pad_token_id)
        self.answer = answer
        self.pending: list[str] = []

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        self.pending.append(request_id)

    def step(self) -> list[Completion]:
        pending = self.pending
        self.pending = []
        log_probs = [-1.0] * len(self.answer)
        return [
            Completion(
                request_id=request_id,
                token_ids=list(self.answer),
                log_probs=list(log_probs),
                finish_reason="stop",
            )
            for request_id in pending
        ]

    def update_weights(self, weights: Any, manifest: dict[str, torch.Size]) -> None:
        pass


def cpu_seconds() -> float:
    """Returns the processor time of this process and of all that descend from it."""
    nanoseconds = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError):
            for task in Path(f"/proc/{child.pid}/task").iterdir():
                nanoseconds += int((task / "schedstat").read_text().split()[0])
    return time.process_time() + nanoseconds / 1e9


def play(rollout: AgentRollout, episodes: int, number: int) -> DataProto:
    described = describe_episodes(episodes, 1, step_info(step=number, seed=0))
    return rollout.run(described)


def milliseconds_per_turn(isolation: Any, episodes: int, rounds: int) -> float:
    """Returns the median over rounds."""
    config = PPOConfig(
        data=DataConfig(max_prompt_length=PROMPT, max_response_length=RESPONSE),
        agent=AgentConfig(
            max_turn=TURNS,
            environment=EnvironmentChoice(
                path=__file__,
                cls="Instant",
                isolation=isolation,
                num_workers=NUM_WORKERS[isolation],
            ),
        ),
    )
    tokenizer = make_tokenizer()
    engine = InstantEngine(
        RolloutConfig(response_length=RESPONSE, max_model_len=PROMPT + RESPONSE),
        tokenizer.encode("5 <|im_end|>"),
        tokenizer.pad_token_id,
    )
    rollout = AgentRollout(config, engine, tokenizer, [AgentSpec(Instant)], None)
    times = []
    try:
        play(rollout, episodes, 0)
        for number in range(1, rounds + 1):
            begun = cpu_seconds()
            batch = play(rollout, episodes, number)
            times.append((cpu_seconds() - begun) / (episodes * TURNS) * 1e3)
            sampled = int(batch.batch["response_mask"].sum())
            assert sampled == episodes * TURNS * len(engine.answer), f"{sampled} tokens sampled"
    finally:
        rollout.close()
    return statistics.median(times)


def milliseconds_per_join(turns: int, num_tools: int, rounds: int = 5) -> float:
    """Returns what joining the last of so many turns costs, the median over rounds."""
    tokens = of_template(QWEN25)
    tools = [tool_schema(number) for number in range(num_tools)] or None
    answer = tokens.encode("5<|im_end|>")
    reply = [{"role": "user", "content": "higher"}]
    times = []
    for _ in range(rounds):
        conversation = tokens.conversation([{"role": "user", "content": "guess"}], tools)
        for _ in range(turns):
            begun = time.process_time()
            conversation.join(answer, reply)
            seconds = time.process_time() - begun
        times.append(seconds * 1e3)
    return statistics.median(times)


def tool_schema(number: int) -> dict[str, Any]:
    text = {"type": "string", "description": "what the tool is given, in words"}
    parameters = {"type": "object", "properties": {"first": text, "second": text}}
    function = {
        "name": f"tool_{number}",
        "description": "does something of use",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def main(args: argparse.Namespace) -> int:
    too_much = 0
    for isolation in args.isolation:
        for episodes in args.episodes:
            cost = milliseconds_per_turn(isolation, episodes, args.rounds)
            print(
                f"{isolation}, {episodes} episodes: {cost:.3f} ms of CPU a turn, "
                f"at most {MOST_MS[isolation]}",
                flush=True,
            )
            too_much += cost > MOST_MS[isolation]
    for turns in args.join:
        for num_tools in (0, 10):
            cost = milliseconds_per_join(turns, num_tools)
            print(f"join behind {turns} turns, {num_tools} tools: {cost:.3f} ms", flush=True)
    return int(too_much > 0)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU of a turn beside sampling")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--isolation", nargs="*", default=list(MOST_MS), choices=list(MOST_MS))
    parser.add_argument("--join", type=int, nargs="*", default=[])
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(parse()))
