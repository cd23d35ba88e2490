"""A whole GRPO step on SmolLM2-135M against the bare parts it is made of, in turns in one process.

    ours   trainer.train_step: generation, reward, advantages, update, weight sync, metrics
    limit  bare vLLM on the same prompts for as many tokens, then a bare forward/backward over the
           same tokens (bf16 autocast, every position through the head, rows sorted by length into
           micro-batches of 1,024 tokens) and AdamW; no reward, no advantages, no weight sync

Run with nothing else on the machine: python -m tests.benchmarks.step_vs_limit [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from data.protocol import DataProto
from training.building import build_trainer
from training.config.loader import load_config
from workers.vllm_rollout_spmd import vLLMRollout

OVERRIDES = [
    "data.max_response_length=64",
    "data.val_files=null",
    "trainer.logger=file",
    "trainer.total_training_steps=1000",
]
PHASES = ("gen", "update_actor", "update_weights", "reward", "adv")


def bare_generation(rollout: vLLMRollout, batch: DataProto) -> None:
    """The engine alone, on the same prompts, each for as many tokens as our step sampled for it."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    width = batch.batch["prompts"].shape[1]
    mask = batch.batch["attention_mask"].bool()
    engine = rollout.engine
    engine.reset_prefix_cache()
    for i in range(len(batch)):
        prompt = batch.batch["prompts"][i][mask[i, :width]].tolist()
        tokens = int(mask[i, width:].sum())
        params = SamplingParams(
            max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False
        )
        engine.add_request(str(i), TokensPrompt(prompt_token_ids=prompt), params)
    while engine.has_unfinished_requests():
        engine.step()


def sorted_micro_batches(
    batch: DataProto, budget: int = 1024
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields (ids, label mask, advantages) of padded rows, longest first, in `budget` tokens."""
    mask = batch.batch["attention_mask"].bool()
    width = batch.batch["prompts"].shape[1]
    whole = torch.cat([batch.batch["prompts"], batch.batch["responses"]], dim=1).long()
    rows = sorted(range(len(batch)), key=lambda i: -int(mask[i].sum()))
    while rows:
        length = int(mask[rows[0]].sum())
        taken, rows = rows[: max(1, budget // length)], rows[max(1, budget // length) :]
        ids = torch.zeros(len(taken), length, dtype=torch.long)
        labels = torch.zeros(len(taken), length)
        for k, i in enumerate(taken):
            own = whole[i][mask[i]]
            ids[k, : len(own)] = own
            labels[k, int(mask[i, :width].sum()) : len(own)] = 1
        yield ids, labels, batch.batch["advantages"][taken, :1]


def bare_update(lm: nn.Module, optimizer: torch.optim.Optimizer, batch: DataProto) -> None:
    total = batch.batch["response_mask"].sum()
    optimizer.zero_grad()
    for ids, labels, advantages in sorted_micro_batches(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = lm(input_ids=ids, attention_mask=None, use_cache=False).logits
        log_probs = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        loss = -(advantages * log_probs * labels[:, 1:]).sum() / total
        loss.backward()
    torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    optimizer.step()


def main(rounds: int) -> None:
    config = load_config(
        [
            "configs/smollm2_arithmetic.yaml",
            *OVERRIDES,
            "trainer.default_local_dir=outputs/benchmark",
        ]
    ).config
    trainer = build_trainer(config)
    trainer.init_workers()
    worker = trainer.actor_rollout_wg.worker
    seconds: dict[str, list[float]] = defaultdict(list)
    last: list[DataProto] = []
    trainer.on_batch = last.append  # type: ignore[method-assign]
    for round_number, rows in enumerate(trainer.training_batches()):
        start = time.perf_counter()
        metrics = trainer.train_step(rows)
        ours = time.perf_counter() - start
        batch = last.pop()
        start = time.perf_counter()
        bare_generation(worker.rollout, batch)
        generation = time.perf_counter() - start
        start = time.perf_counter()
        bare_update(worker.module, worker.optimizer, batch)
        update = time.perf_counter() - start
        if round_number == 0:
            continue  # both warm up
        for name, value in {
            "ours": ours,
            "limit generation": generation,
            "limit update": update,
        }.items():
            seconds[name].append(value)
        seconds["ratio"].append(ours / (generation + update))
        for phase in PHASES:
            seconds[f"ours {phase}"].append(metrics[f"timing_s/{phase}"])
        seconds["outside"].append(
            1 - (metrics["timing_s/gen"] + metrics["timing_s/update_actor"]) / ours
        )
        print(
            f"round {round_number}: ours {ours:.2f} s, limit {generation:.2f} + {update:.2f} s, "
            f"ratio {seconds['ratio'][-1]:.3f}",
            flush=True,
        )
        if round_number == rounds:
            break
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"\nmedians of {rounds} rounds, 64 samples a step")
    for name, value in medians.items():
        if name not in ("ratio", "outside"):
            share = f"{value / medians['ours']:7.1%} of our step" if name.startswith("ours") else ""
            print(f"  {name:22s} {value:7.3f} s {share}")
    print(f"  step / limit           {medians['ratio']:7.3f}   (at most 0.95)")
    print(f"  outside gen and update {medians['outside']:7.1%}   (under 5 %)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
