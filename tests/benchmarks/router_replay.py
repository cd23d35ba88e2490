"""Measures how far engine and trainer are apart in a mixture of experts, with replay and without.

    python -m tests.benchmarks.router_replay [--engine vllm|hf] [--dtype bfloat16]

The model is a tiny random Qwen3-MoE, whose engine samples answers; the trainer then reads their
log-probs packed, as in a run: once by its own routers, once with the engine's choices. Printed is a
table of what differs over the sampled tokens. docs/algorithms.md quotes it.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tests.zoo.families import FAMILIES, Family
from tests.zoo.proofs import prompt, vocabulary_of
from training.config import ActorConfig, ModelConfig, RolloutConfig
from training.rollout_mismatch import measure_mismatch
from workers.dp_actor import DataParallelPPOActor
from workers.model.builder import ModelSpec
from workers.model.forward_settings import forward_settings
from workers.model.policy_model import PolicyModel
from workers.model.router_replay import check_routers, open_routers
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Sampling
from workers.rollout.episode import Row
from workers.weight_sync.manifest import iter_weights, weight_manifest

PROMPTS = 8
SAMPLES = 6
PROMPT_LENGTH = 48
ANSWER = 48
SIZES = {
    "num_hidden_layers": 8,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}
# Experts' outputs are made so much larger, so that it matters which of them computes.
EXPERTS_MATTER = 4.0
# A difference of log-probs that counts as large, in nats.
LARGE = 0.1


@dataclass(frozen=True)
class Mismatch:
    """Holds what differs over the sampled tokens.

    Attributes:
        mean: of the absolute difference of log-probs, nats.
        large: the share of tokens that differ by more than LARGE.
        k3: KL(engine || trainer) by r - 1 - log r, nats a token.
    """

    mean: float
    large: float
    k3: float


def build_engine(name: str, spec: ModelSpec, dtype: str) -> BaseRollout:
    """Builds an engine that tells its experts."""
    rollout = RolloutConfig(
        name=name,
        dtype=dtype,
        response_length=ANSWER,
        max_model_len=PROMPT_LENGTH + ANSWER,
        max_num_seqs=64,
        enable_rollout_routing_replay=True,
    )
    if name == "hf":
        from workers.hf_rollout import HFRollout

        return HFRollout(rollout, spec)
    from workers.vllm_rollout_spmd import vLLMRollout

    return vLLMRollout(rollout, spec)


def play(engine: BaseRollout, vocabulary: int) -> list[Row]:
    """Samples several answers to each prompt."""
    rows = []
    for number in range(PROMPTS):
        ids = prompt(PROMPT_LENGTH - number, vocabulary)
        rows += [Row(prompt_ids=ids) for _ in range(SAMPLES)]
    for number, row in enumerate(rows):
        sampling = Sampling(max_tokens=ANSWER, seed=number)
        engine.submit(str(number), row.prompt_ids, sampling)
    missing = len(rows)
    while missing:
        for completion in engine.step():
            rows[int(completion.request_id)].append_sampled(completion, turn=0)
            missing -= 1
    return rows


def measure(log_probs: Tensor, sampled: Tensor, mask: Tensor) -> Mismatch:
    """Compares the trainer's log-probs (B, R) with the engine's."""
    gaps = (log_probs - sampled).abs()[mask.bool()]
    shares, _ = measure_mismatch(log_probs, sampled, mask)
    return Mismatch(
        mean=float(gaps.mean()),
        large=float((gaps > LARGE).float().mean()),
        k3=float(shares["training/rollout_k3"]),
    )


def run(family: Family, engine_name: str, dtype: str, folder: Path) -> list[tuple[str, Mismatch]]:
    """Samples, and reads log-probs without replay and with it; prints how many choices differ."""
    config = ModelConfig(path=str(folder), dtype=dtype, enable_gradient_checkpointing=False)
    spec = ModelSpec(config, str(family.make(folder)), torch.device("cpu"))
    lm = spec.causal_lm(trainable=True)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if name.endswith("experts.down_proj"):
                parameter.mul_(EXPERTS_MATTER)
    engine = build_engine(engine_name, spec, dtype)
    weights = iter_weights(lm, getattr(torch, dtype), casts=not engine.casts_weights)
    engine.update_weights(weights, weight_manifest(lm))
    rows = play(engine, vocabulary_of(lm))
    open_routers(lm)
    check_routers(lm)
    data = engine.build_batch(rows, PROMPT_LENGTH)
    settings = forward_settings(config, True, lm, spec.device)
    actor = DataParallelPPOActor(
        ActorConfig(),
        PolicyModel(lm, engine.banned_token_ids if engine_name == "hf" else ()),
        torch.optim.SGD(lm.parameters(), lr=0.0),
        forward=settings,
    )
    without = data.select()
    del without.batch["routed_experts"]
    found = []
    for name, batch in (("without replay", without), ("with replay", data)):
        log_probs, _ = actor.compute_log_prob(batch)
        mismatch = measure(log_probs, data.batch["rollout_log_probs"], data.batch["response_mask"])
        found.append((name, mismatch))
    data.batch["advantages"] = torch.zeros(data.batch["responses"].shape)
    metrics = actor.update_policy(data)
    print(
        f"choices that differ: {metrics['actor/router_replay_differing']:.4f} of tokens and layers"
    )
    print(f"tokens without a choice: {metrics['actor/router_replay_absent']:.4f}")
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    if arguments.engine == "vllm":
        from tests.zoo import vllm_proofs

        vllm_proofs.prepare()
    base = FAMILIES["qwen3_moe"].for_vllm()
    family = replace(base, settings=base.settings | SIZES)
    with tempfile.TemporaryDirectory() as folder:
        found = run(family, arguments.engine, arguments.dtype, Path(folder))
    print(f"| {arguments.engine}, {arguments.dtype} | mean | above {LARGE} | KL (k3) |")
    print("|---|---|---|---|")
    for name, mismatch in found:
        print(f"| {name} | {mismatch.mean:.5f} | {mismatch.large:.4f} | {mismatch.k3:.6f} |")


if __name__ == "__main__":
    main()
