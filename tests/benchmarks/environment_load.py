"""What slow environments cost: SmolLM2-135M-Instruct on vLLM, three turns of 24 tokens, environments whose `step` sleeps.

    still         event-driven turn loop, `step` answers at once: what the others are measured against
    event-driven  the same, `step` sleeps log-normally: mean 0.2 s, 99th percentile 2 s (mu = -2.629, sigma = 1.428 of the seconds' logarithm)
    lock-step     the same sleeps, turns admitted in fixed rounds, as `trainer.deterministic` does

Tokens a second are those sampled over the whole rollout's wall time, from the first reset to the last reply: the sleep after an episode's last
turn counts, though nothing is sampled behind it. The variants take turns in one process on one engine, and the two that sleep share their sleeps.

make smollm2 makes the model. Run with nothing else on the machine:
python -m tests.benchmarks.environment_load [--rounds 7] [--episodes 64 24] [--model outputs/smollm2/model]
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from custom.agent import AgentSpec
from custom.env import BaseEnvironment
from training.agent_config import AgentConfig
from training.config import DataConfig, ModelConfig, PPOConfig, RolloutConfig
from workers.model_builder import ModelSpec
from workers.multi_turn_rollout import AgentRollout, describe_episodes
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


class UnseededEngine(vLLMRollout):
    """Fixed rounds come with seeds for each turn, which slow sampling; left out here, so that only the rounds differ."""

    def sampler(self, meta_info: dict[str, Any]) -> Any:
        return super().sampler(meta_info | {"seeded": False})


class Timed(NamedTuple):
    tokens: int
    seconds: float
    longest: float  # the sleeps of the episode that slept most


def build_engine(model: str) -> tuple[UnseededEngine, ModelSpec]:
    spec = ModelSpec(ModelConfig(dtype="bfloat16"), model, torch.device("cpu"))
    config = RolloutConfig(
        dtype="bfloat16",
        ignore_eos=True,
        max_num_seqs=max(TARGETS),
        response_length=RESPONSE,
        max_model_len=PROMPT + RESPONSE,
    )
    return UnseededEngine(config, spec), spec


def play(rollout: AgentRollout, episodes: int, number: int, lock_step: bool = False) -> Timed:
    described = describe_episodes(episodes, 1, step=number, seed=0, seeded=lock_step)
    start = time.perf_counter()
    batch = rollout.run(described)
    seconds = time.perf_counter() - start
    tokens = int(batch.batch["response_mask"].sum())
    assert tokens == episodes * TURNS * TURN_TOKENS, f"{tokens} tokens: not every turn was whole"
    return Timed(tokens, seconds, max(facts["env_seconds"] for facts in batch.non_tensor_batch["episode_facts"]))


def measure(rollouts: dict[str, AgentRollout], episodes: int, rounds: int) -> dict[str, list[Timed]]:
    """The first round is a warm-up; each of the others begins with another variant."""
    names = ["still", "event-driven", "lock-step"]
    times: dict[str, list[Timed]] = defaultdict(list)
    for number in range(rounds + 1):
        for name in names[number % 3 :] + names[: number % 3]:
            rollout = rollouts["still" if name == "still" else "slow"]
            timed = play(rollout, episodes, number, lock_step=name == "lock-step")
            if number:
                times[name].append(timed)
    return {name: times[name] for name in names}


def table(episodes: int, times: dict[str, list[Timed]]) -> str:
    speeds = {name: statistics.median(t.tokens / t.seconds for t in own) for name, own in times.items()}
    lines = [
        f"{episodes} episodes, medians of {len(times['still'])} rounds; load {os.getloadavg()[0]:.2f}",
        "| | tokens/s | relative | of each round | seconds | longest sleep of an episode | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in times.items():
        paired = [still.seconds / timed.seconds for still, timed in zip(times["still"], own, strict=True)]
        target = f"at least {TARGETS[episodes]}" if name == "event-driven" and episodes in TARGETS else ""
        seconds, longest = (statistics.median(values) for values in zip(*[t[1:] for t in own], strict=True))
        lines.append(
            f"| {name} | {speeds[name]:.0f} | {speeds[name] / speeds['still']:.3f} | {min(paired):.2f} to {max(paired):.2f} "
            f"| {seconds:.2f} | {longest:.2f} | {target} |"
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
        name: AgentRollout(config, engine, spec.tokenizer, [AgentSpec(kind)], None) for name, kind in kinds.items()
    }
    try:
        print(f"sleeps of log-normal seconds, mu {MU:.3f}, sigma {SIGMA:.3f}; {torch.get_num_threads()} threads")
        for episodes in args.episodes:
            print(f"\n{table(episodes, measure(rollouts, episodes, args.rounds))}", flush=True)
    finally:
        for rollout in rollouts.values():
            rollout.close()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens a second beside slow environments")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--episodes", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--model", default="outputs/smollm2/model")
    args = parser.parse_args(argv)
    if not Path(args.model).is_dir():
        parser.error(f"there is no model in {args.model}; `make smollm2` makes it")
    return args


if __name__ == "__main__":
    main(parse())
