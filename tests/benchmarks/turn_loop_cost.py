"""What a turn costs beside sampling, against a bare loop: environments and an engine are instant.

    ours   from the reset to the rows of the batch: seeds, templates, tokens, the pool, the records
    bare   one generator an episode, which is sent what a thread or a process has echoed to it:
           as many sends, and as many hops through queues or pipes, and nothing else

Both play in turns, after one round that builds the environments. An episode is a reset, TURNS turns
and a finish. Measured is processor time, of this process and of those that environments live in;
the least of the rounds counts, as other load on the machine only adds to it. A machine that is half
as fast is so for both, and the ratio stays.

    python -m tests.benchmarks.turn_loop_cost [--episodes 64 256 1024] [--isolation thread process]
    python -m tests.benchmarks.turn_loop_cost --join 10 100      # a join, by the number of turns

Fails where ours is more than MOST times the bare loop. To compare with an older commit, run this
file in that commit's tree, a few times in turns with this tree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import torch

from custom.agent import AgentSpec
from data.protocol import DataProto
from data.seeds import step_info
from tests.benchmarks import instant_environment
from tests.benchmarks.instant_environment import Instant
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

# How many times a bare loop's processor time a turn may take.
MOST = {"thread": 30.0, "process": 30.0}
# Environments at once: a process holds memory of its own.
NUM_WORKERS = {"thread": None, "process": 64}
TURNS = 3
PROMPT, RESPONSE = 32, 64
# The bare loop passes on what is about as long as an environment's reply.
WORDS = ("higher", 0.0, False)


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


def bare_episode() -> Generator[str, Any, None]:
    """Asks an environment and an engine as often as an episode does, and keeps nothing."""
    yield "reset"
    for _ in range(TURNS):
        yield "sample"
        yield "step"
    yield "finish"


def play_bare(hop: Callable[[Any], Any], episodes: int) -> None:
    """Plays bare episodes, all of them a turn at a time, to their end."""
    live = [bare_episode() for _ in range(episodes)]
    asked = [play.send(None) for play in live]
    while live:
        still_live = []
        now_asked = []
        for play, kind in zip(live, asked, strict=True):
            answer = WORDS if kind == "sample" else hop(WORDS)
            with suppress(StopIteration):
                now_asked.append(play.send(answer))
                still_live.append(play)
        live = still_live
        asked = now_asked


@contextmanager
def hop_of(isolation: str) -> Iterator[Callable[[Any], Any]]:
    """Gives what sends a value to a thread or a process, which sends it back, and waits for it."""
    if isolation == "thread":
        inbox: SimpleQueue[Any] = SimpleQueue()
        outbox: SimpleQueue[Any] = SimpleQueue()
        place: Any = threading.Thread(target=echo_in_queues, args=(inbox, outbox), daemon=True)
        send, receive = inbox.put, outbox.get
    else:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        place = context.Process(target=echo_in_pipe, args=(theirs,), daemon=True)
        send, receive = ours.send, ours.recv
    place.start()

    def hop(value: Any) -> Any:
        send(value)
        return receive()

    yield hop
    send(None)
    place.join()


def echo_in_queues(inbox: SimpleQueue[Any], outbox: SimpleQueue[Any]) -> None:
    """Passes on what comes, until None does."""
    while (value := inbox.get()) is not None:
        outbox.put(value)


def echo_in_pipe(connection: Connection) -> None:
    """Passes on what comes, until None does."""
    while (value := connection.recv()) is not None:
        connection.send(value)


@dataclass(frozen=True)
class Cost:
    """Holds the processor time of a turn in milliseconds, ours and the bare loop's."""

    ours_ms: float
    bare_ms: float

    @property
    def ratio(self) -> float:
        """Returns how many times the bare loop's ours is."""
        return self.ours_ms / self.bare_ms


def cost_of_turn(isolation: Any, episodes: int, rounds: int) -> Cost:
    """Measures both in turns; returns the least of the rounds of each."""
    config = PPOConfig(
        data=DataConfig(max_prompt_length=PROMPT, max_response_length=RESPONSE),
        agent=AgentConfig(
            max_turn=TURNS,
            environment=EnvironmentChoice(
                path=instant_environment.__file__,
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
    turns = episodes * TURNS
    ours = []
    bare = []
    try:
        with hop_of(isolation) as hop:
            play(rollout, episodes, 0)
            play_bare(hop, episodes)
            for number in range(1, rounds + 1):
                begun = cpu_seconds()
                batch = play(rollout, episodes, number)
                between = cpu_seconds()
                play_bare(hop, episodes)
                bare.append((cpu_seconds() - between) / turns * 1e3)
                ours.append((between - begun) / turns * 1e3)
                sampled = int(batch.batch["response_mask"].sum())
                assert sampled == turns * len(engine.answer), f"{sampled} tokens sampled"
    finally:
        rollout.close()
    return Cost(ours_ms=min(ours), bare_ms=min(bare))


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
            cost = cost_of_turn(isolation, episodes, args.rounds)
            print(
                f"{isolation}, {episodes} episodes: {cost.ratio:.1f} x a bare loop, at most "
                f"{MOST[isolation]:g} ({cost.ours_ms:.3f} ms of CPU a turn, "
                f"bare {cost.bare_ms:.4f} ms)",
                flush=True,
            )
            too_much += cost.ratio > MOST[isolation]
    for turns in args.join:
        for num_tools in (0, 10):
            cost = milliseconds_per_join(turns, num_tools)
            print(f"join behind {turns} turns, {num_tools} tools: {cost:.3f} ms", flush=True)
    return int(too_much > 0)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU of a turn beside sampling")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, nargs="*", default=[64, 256, 1024])
    parser.add_argument("--isolation", nargs="*", default=list(MOST), choices=list(MOST))
    parser.add_argument("--join", type=int, nargs="*", default=[])
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(parse()))
