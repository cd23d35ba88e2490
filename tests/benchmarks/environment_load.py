"""What slow environments cost.

SmolLM2-135M-Instruct on vLLM, three turns of 24 tokens, environments whose `step` sleeps.

    still         event-driven turn loop, `step` answers at once: the others' measure
    event-driven  the same, `step` sleeps log-normally: mean 0.2 s, 99th percentile 2 s
                  (mu = -2.629, sigma = 1.428 of the seconds' logarithm)
    lockstep      the same sleeps, turns admitted together, as `trainer.deterministic` does

Speed is the sampled tokens over the time from the first reset to the last token. The whole rollout
takes longer, as the sleeps behind each episode's last turn are awaited too, though nothing is left
to sample meanwhile: given beside it; no order of the turns could hide those. The variants take
turns in one process on one engine, those that sleep share their sleeps, and `relative` is the
median over rounds of the time against the same round's `still`. With few episodes the rounds differ
much, since one long sleep may come late: so there are more of them.

make smollm2 makes the model. Run with nothing else on the machine: python -m
tests.benchmarks.environment_load [--rounds 7] [--episodes 64 24] [--model outputs/smollm2/model]
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from custom.agent import AgentSpec
from custom.env import BaseEnvironment
from data.seeds import step_info
from training.config import AgentConfig, DataConfig, ModelConfig, PPOConfig, RolloutConfig
from workers.model.builder import ModelSpec
from workers.multi_turn_rollout import AgentRollout, describe_episodes
from workers.rollout.engine import Completion
from workers.vllm_rollout_spmd import vLLMRollout

TURNS, TURN_TOKENS, PROMPT, RESPONSE = 3, 24, 64, 128
MEAN_S, P99_S = 0.2, 2.0
TARGETS = {64: 0.98, 24: 0.92}
Z99 = 2.3263478740408408  # the standard normal's 99th percentile
# mu + sigma^2 / 2 = ln mean and mu + Z99 sigma = ln p99; the smaller of the two solutions
SIGMA = Z99 - math.sqrt(Z99**2 - 2 * math.log(P99_S / MEAN_S))
MU = math.log(P99_S) - Z99 * SIGMA


class Still(BaseEnvironment):
    """Answers at once, in few words."""

    def reset(self, seed: int | None = None) -> str:
        self.rng = random.Random(seed)
        return "Name a number."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "Another.", 0.0, False, {}


class Slow(Still):
    """Thinks before it answers."""

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(self.rng.lognormvariate(MU, SIGMA))
        return super().step(action)


class TimedEngine(vLLMRollout):
    """Knows when its last token came."""

    last_token: float
    working: float = 0.0  # seconds in `step`

    def step(self) -> list[Completion]:
        start = time.perf_counter()
        done = super().step()
        self.last_token = time.perf_counter()
        self.working += self.last_token - start
        return done


class Timed(NamedTuple):
    """One rollout; times in seconds."""

    tokens: int
    sampling: float  # until the last token
    whole: float
    working: float  # of the engine
    longest: float  # the sleeps of the episode that slept most


def build_engine(model: str) -> tuple[TimedEngine, ModelSpec]:
    spec = ModelSpec(ModelConfig(dtype="bfloat16"), model, torch.device("cpu"))
    config = RolloutConfig(
        dtype="bfloat16",
        ignore_eos=True,
        max_num_seqs=max(TARGETS),
        response_length=RESPONSE,
        max_model_len=PROMPT + RESPONSE,
    )
    return TimedEngine(config, spec), spec


def play(rollout: AgentRollout, episodes: int, number: int, lock_step: bool = False) -> Timed:
    engine = rollout.engine
    assert isinstance(engine, TimedEngine)
    described = describe_episodes(episodes, 1, step_info(step=number, seed=0, seeded=lock_step))
    engine.working = 0.0
    start = time.perf_counter()
    batch = rollout.run(described)
    whole = time.perf_counter() - start
    tokens = int(batch.batch["response_mask"].sum())
    assert tokens == episodes * TURNS * TURN_TOKENS, f"{tokens} tokens: not every turn was whole"
    longest = max(facts["env_seconds"] for facts in batch.non_tensor_batch["episode_facts"])
    return Timed(tokens, engine.last_token - start, whole, engine.working, longest)


def measure(
    rollouts: dict[str, AgentRollout], episodes: int, rounds: int
) -> dict[str, list[Timed]]:
    """Each round begins with another variant, after a warm-up."""
    names = ["still", "event-driven", "lockstep"]
    times: dict[str, list[Timed]] = defaultdict(list)
    play(rollouts["still"], episodes, 0)
    for number in range(1, rounds + 1):
        for name in names[number % 3 :] + names[: number % 3]:
            rollout = rollouts["still" if name == "still" else "slow"]
            times[name].append(play(rollout, episodes, number, lock_step=name == "lockstep"))
            print(
                episodes,
                number,
                name,
                [round(value, 2) for value in times[name][-1]],
                file=sys.stderr,
            )
    return {name: times[name] for name in names}


def table(episodes: int, times: dict[str, list[Timed]]) -> str:
    lines = [
        f"{episodes} episodes, medians of {len(times['still'])} rounds; "
        f"load {os.getloadavg()[0]:.2f}",
        "| | tokens/s | relative | least and most | target "
        "| relative, whole rollout | engine works | longest sleep |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, own in times.items():
        speed = statistics.median(timed.tokens / timed.sampling for timed in own)
        pairs = list(zip(times["still"], own, strict=True))
        relative = [still.sampling / timed.sampling for still, timed in pairs]
        whole = statistics.median(still.whole / timed.whole for still, timed in pairs)
        target = (
            f"at least {TARGETS[episodes]}"
            if name == "event-driven" and episodes in TARGETS
            else ""
        )
        working, longest = (
            statistics.median(values) for values in zip(*[t[3:] for t in own], strict=True)
        )
        lines.append(
            f"| {name} | {speed:.0f} | {statistics.median(relative):.3f} "
            f"| {min(relative):.2f}, {max(relative):.2f} | {target} "
            f"| {whole:.3f} | {working:.2f} s | {longest:.2f} s |"
        )
    return "\n".join(lines)


def main(args: argparse.Namespace) -> None:
    engine, spec = build_engine(args.model)
    config = PPOConfig(
        data=DataConfig(max_prompt_length=PROMPT, max_response_length=RESPONSE),
        agent=AgentConfig(max_turn=TURNS, max_turn_tokens=TURN_TOKENS),
    )
    kinds = {"still": Still, "slow": Slow}
    rollouts = {
        name: AgentRollout(config, engine, spec.tokenizer, [AgentSpec(kind)], None)
        for name, kind in kinds.items()
    }
    try:
        print(
            f"sleeps of log-normal seconds, mu {MU:.3f}, sigma {SIGMA:.3f}; "
            f"{torch.get_num_threads()} threads"
        )
        for episodes in args.episodes:
            rounds = math.ceil(args.rounds * max(TARGETS) / episodes)
            print(f"\n{table(episodes, measure(rollouts, episodes, rounds))}", flush=True)
    finally:
        for rollout in rollouts.values():
            rollout.close()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens a second beside slow environments")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of 64 episodes; of fewer, more rounds"
    )
    parser.add_argument("--episodes", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--model", default="outputs/smollm2/model")
    args = parser.parse_args(argv)
    if not Path(args.model).is_dir():
        parser.error(f"there is no model in {args.model}; `make smollm2` makes it")
    return args


if __name__ == "__main__":
    main(parse())
