"""Programs against the same agent in an environment: tokens a second, first request to last token.

    python -m tests.benchmarks.program_speed [--episodes 16 64] [--client http openai] [--tokens 24]

The engine samples a token of every running request in each step, and a step takes PACE_S, as a
GPU's would: what is measured is what the loop, the server and the programs add. At least AT_LEAST
of the environment's speed is wanted.

Programs run on the machine's processors, of which a client takes what it takes. So each is compared
with a second environment, too, whose processes work as long as its programs do: at their start, and
for each turn. These seconds are measured first, of programs of one turn and of all turns. All are
played in turn, several rounds; told are medians.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from custom.agent import AgentSpec
from data.seeds import step_info
from examples.prepare_tiny_prompts import make_tokenizer
from features.programs.spec import ProgramSpec
from tests.benchmarks.same_agent import FIRST, NEXT, Same
from training.config import AgentConfig, DataConfig, PPOConfig, RolloutConfig
from training.config.schema.agent import EnvironmentChoice
from workers.multi_turn_rollout import AgentRollout
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode_descriptions import describe_episodes

TURNS = 6
TOKENS_OF_TURN = 24
PACE_S = 0.02
AT_LEAST = 0.95
PROMPT, RESPONSE = 64, 4096
HTTP = """
import http.client, json, os, sys
from urllib.parse import urlparse
base = urlparse(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(base.hostname, base.port)
def ask(messages):
    body = json.dumps({"model": "m", "messages": messages})
    connection.request("POST", base.path + "/chat/completions", body)
    return json.load(connection.getresponse())["choices"][0]["message"]["content"]
"""
OPENAI = """
import sys
from openai import OpenAI
client = OpenAI()
def ask(messages):
    answer = client.chat.completions.create(model="m", messages=messages)
    return answer.choices[0].message.content
"""
STREAM = """
import sys
from openai import OpenAI
client = OpenAI()
def ask(messages):
    chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
"""
PLAY = f"""
turns, words = map(int, sys.argv[1:])
messages = [{{"role": "user", "content": {FIRST!r} + " 5" * words}}]
for _ in range(turns):
    messages.append({{"role": "assistant", "content": ask(messages)}})
    messages.append({{"role": "user", "content": {NEXT!r}}})
print(1)
"""
FUNCTION = f"""
async def solve(task, client, seed):
    messages = [{{"role": "user", "content": {FIRST!r} + " 5" * WORDS}}]
    for _ in range(TURNS):
        answer = await client.chat.completions.create(model="m", messages=messages)
        messages.append({{"role": "assistant", "content": answer.choices[0].message.content}})
        messages.append({{"role": "user", "content": {NEXT!r}}})
    return 1.0
"""
CLIENTS = {
    "http": (HTTP, ("json", "http.client")),
    "openai": (OPENAI, ("openai",)),
    "stream": (STREAM, ("openai",)),
}


class PacedEngine(BaseRollout):
    """Samples a token of each request a step, as many as `answer` has; a step takes PACE_S."""

    def __init__(self, config: RolloutConfig, answer: list[int], pad_token_id: int) -> None:
        super().__init__(config, eos_token_ids=answer[-1:], pad_token_id=pad_token_id)
        self.answer = answer
        self.left: dict[str, int] = {}
        self.forget()

    def forget(self) -> None:
        """Begins to count anew."""
        self.tokens = 0
        self.steps = 0
        self.last_token = 0.0
        self.requests: list[float] = []

    def submit(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        self.requests.append(time.perf_counter())
        self.left[request_id] = len(self.answer)

    def step(self) -> list[Completion]:
        time.sleep(PACE_S)
        self.steps += 1
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
        lost_s: of the time from the first request to the last token, when no step was being made.
        programs_s: seconds of processors that programs took.
    """

    tokens_per_s: float
    apart_s: float
    lost_s: float
    programs_s: float


class Bench(AbstractContextManager["Bench", None]):
    """Plays batches of one kind of agent.

    Args:
        tokens: of a turn.
        words: further ones of the first message.
        isolation: where an environment lives.
    """

    def __init__(
        self, spec: AgentSpec | ProgramSpec, tokens: int, words: int, isolation: Any = "thread"
    ) -> None:
        prompt = PROMPT + 2 * words
        config = PPOConfig(
            data=DataConfig(max_prompt_length=prompt, max_response_length=RESPONSE),
            agent=AgentConfig(max_turn=TURNS, environment=EnvironmentChoice(isolation=isolation)),
        )
        tokenizer = make_tokenizer()
        self.engine = PacedEngine(
            RolloutConfig(response_length=RESPONSE, max_model_len=prompt + RESPONSE),
            tokenizer.encode("5 " * (tokens - 1) + "<|im_end|>"),
            tokenizer.pad_token_id,
        )
        self.rollout = AgentRollout(config, self.engine, tokenizer, [spec], None)
        self.batches = 0

    def __exit__(self, *_: object) -> None:
        self.rollout.close()

    def play(self, episodes: int, turns: int = TURNS) -> Speed:
        """Plays a batch of episodes that have so many turns each."""
        engine = self.engine
        engine.forget()
        before = seconds_of_programs()
        info = step_info(step=self.batches, seed=0)
        self.rollout.run(describe_episodes(episodes, 1, info))
        taken = seconds_of_programs() - before
        self.batches += 1
        assert engine.tokens == episodes * turns * len(engine.answer), engine.tokens
        span = engine.last_token - engine.requests[0]
        return Speed(
            tokens_per_s=engine.tokens / span,
            # Few come a second time before the last has begun.
            apart_s=engine.requests[episodes - 1] - engine.requests[0],
            lost_s=span - engine.steps * PACE_S,
            programs_s=taken,
        )


def seconds_of_programs() -> float:
    """Returns the processor time of all processes but this one: those that ended, and that live."""
    processes = psutil.Process().children(recursive=True)
    return sum(sum(process.cpu_times()[:4]) for process in processes)


def program_of(name: str, folder: Path, turns: int, words: int) -> ProgramSpec:
    """Writes a program, or a function, and describes it."""
    script = folder / f"{name}_{turns}.py"
    if name == "function":
        script.write_text(f"TURNS, WORDS = {turns}, {words}\n{FUNCTION}")
        return ProgramSpec(function=f"{script}:solve")
    code, preload = CLIENTS[name]
    script.write_text(code + PLAY)
    command = (sys.executable, str(script), str(turns), str(words))
    return ProgramSpec(command=command, preload=preload)


def work_of(name: str, folder: Path, episodes: int, words: int) -> tuple[float, float]:
    """Measures the processor time of a program's start, its end included, and of each turn."""
    seconds = []
    for turns in (1, TURNS):
        spec = program_of(name, folder, turns, words)
        with Bench(spec, TOKENS_OF_TURN, words, isolation="process") as bench:
            bench.play(episodes, turns)
            seconds.append(bench.play(episodes, turns).programs_s / episodes)
    turn_s = (seconds[1] - seconds[0]) / (TURNS - 1)
    return seconds[0] - turn_s, turn_s


def compare(benches: dict[str, Bench], episodes: int, rounds: int) -> dict[str, list[Speed]]:
    """Plays all kinds of agents in turn, one batch to warm up and then `rounds`."""
    for bench in benches.values():
        bench.play(episodes)
    # As vLLM does: to look all of torch over for garbage takes 0.3 s, whoever plays just then.
    gc.collect()
    gc.freeze()
    speeds: dict[str, list[Speed]] = {name: [] for name in benches}
    for _ in range(rounds):
        for name, bench in benches.items():
            speeds[name].append(bench.play(episodes))
    gc.unfreeze()
    return speeds


def measure(clients: Sequence[str], episodes: int, tokens: int, words: int, rounds: int) -> None:
    """Measures so many episodes at once with each client, and prints it."""
    folder = Path(tempfile.mkdtemp())
    works: dict[str, tuple[float, float]] = {}
    with ExitStack() as stack:
        native = Bench(AgentSpec(Same, {"words": words}), tokens, words)
        benches = {"environment": stack.enter_context(native)}
        for name in clients:
            spec = program_of(name, folder, TURNS, words)
            # A function then has a process, too, which plays one episode after the other.
            program = Bench(spec, tokens, words, isolation="process")
            benches[name] = stack.enter_context(program)
            start_s, turn_s = works[name] = work_of(name, folder, episodes, words)
            working = AgentSpec(Same, {"words": words, "start_s": start_s, "turn_s": turn_s})
            as_busy = Bench(working, tokens, words, isolation="process")
            benches[f"like {name}"] = stack.enter_context(as_busy)
        speeds = compare(benches, episodes, rounds)
    medians = {name: median_of(of_name, "tokens_per_s") for name, of_name in speeds.items()}
    native_speed = medians["environment"]
    print(
        f"{episodes} episodes, {native_speed:.0f} tokens/s in an environment (at least {AT_LEAST})"
    )
    for name in clients:
        apart_s = median_of(speeds[name], "apart_s")
        lost_s = median_of(speeds[name], "lost_s")
        print(
            f"  {name}: {medians[name] / native_speed:.3f}; first requests {apart_s:.2f} s apart, "
            f"{lost_s:.2f} s between steps"
        )
        start_s, turn_s = works[name]
        print(
            f"    {medians[name] / medians[f'like {name}']:.3f} of an environment that works "
            f"{1e3 * start_s:.1f} ms at its start and {1e3 * turn_s:.1f} ms a turn, which has "
            f"{medians[f'like {name}'] / native_speed:.3f}"
        )


def median_of(speeds: Sequence[Speed], name: str) -> float:
    """Returns the median of what was measured several times."""
    return statistics.median(vars(speed)[name] for speed in speeds)


def main() -> None:
    """Measures each number of episodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, nargs="+", default=[16, 64])
    clients = [*CLIENTS, "function"]
    parser.add_argument("--client", nargs="+", default=["http", "openai"], choices=clients)
    parser.add_argument("--tokens", type=int, default=TOKENS_OF_TURN, help="of a turn")
    parser.add_argument("--words", type=int, default=0, help="further ones of the first message")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} processors, load {os.getloadavg()[0]:.1f} before")
    for episodes in chosen.episodes:
        measure(chosen.client, episodes, chosen.tokens, chosen.words, chosen.rounds)
    print(f"load {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
