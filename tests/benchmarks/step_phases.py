"""Where a whole GRPO step's time goes.

The real trainer in one process, a Llama of random weights, answers of full length; nothing is
fetched.

python -m tests.benchmarks.step_phases    0.5B parameters, 16 prompts x 8 answers of 256 tokens
python -m tests.benchmarks.step_phases --engine vllm
python -m tests.benchmarks.step_phases --size tiny --device cpu --prompts 2 --tokens 8
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections import defaultdict
from itertools import islice
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from examples.prepare_tiny_prompts import make_tokenizer
from tests.benchmarks.mfu import GIB, SIZES, Settings
from training.building import build_trainer
from training.config.loader import load_config

GROUP, PROMPT, WARMUP = 8, 128, 2


def write_task(folder: Path, shape: Settings) -> None:
    """model/ of random weights, and train.jsonl of prompts with nearly PROMPT tokens."""
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=max(shape.vocab, len(tokenizer)),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(256):
            text = " ".join(f"above {rng.randrange(10)}" for _ in range(PROMPT // 2 - 8))
            row = {
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"ground_truth": "3 8"},
            }
            file.write(json.dumps({"data_source": "benchmark"} | row) + "\n")


def overrides(folder: Path, args: argparse.Namespace) -> list[str]:
    return [
        "configs/tiny_prompts.yaml",
        f"data.train_files={folder}/train.jsonl",
        "data.val_files=null",
        f"data.train_batch_size={args.prompts}",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={args.tokens}",
        f"actor_rollout_ref.model.path={folder}/model",
        f"actor_rollout_ref.model.dtype={args.dtype}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        "actor_rollout_ref.actor.ppo_epochs=1",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
        f"actor_rollout_ref.rollout.name={args.engine}",
        f"actor_rollout_ref.rollout.dtype={args.dtype}",
        f"actor_rollout_ref.rollout.n={GROUP}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "algorithm.adv_estimator=grpo",
        f"trainer.device={args.device}",
        "trainer.launcher=local",
        f"trainer.default_local_dir={folder}/run",
        "trainer.logger=console",
        "trainer.total_training_steps=1000",
    ]


def main(args: argparse.Namespace) -> str:
    """Runs WARMUP steps, then `steps`; returns the report."""
    seconds: dict[str, list[float]] = defaultdict(list)
    # Records of the last step may still be written.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_task(folder, Settings(**SIZES[args.size]))
        trainer = build_trainer(load_config(overrides(folder, args)).config)
        trainer.init_workers()
        for number, rows in enumerate(islice(trainer.training_batches(), WARMUP + args.steps)):
            metrics = trainer.train_step(rows)
            if number < WARMUP:
                continue
            for key, value in metrics.items():
                if key.startswith("timing_s/"):
                    seconds[key.removeprefix("timing_s/")].append(value)
        trainer.shutdown()
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    lines = [
        f"{device}, {args.size}, {args.engine}, {args.prompts} prompts of about {PROMPT} tokens x "
        f"{GROUP} answers of {args.tokens}, "
        f"medians of {args.steps} steps"
    ]
    lines += [
        f"  {key:16s} {value:8.3f} s {value / medians['step']:7.1%}"
        for key, value in medians.items()
    ]
    if args.device == "cuda":
        peak = torch.cuda.max_memory_allocated() / GIB
        lines.append(f"  memory           {peak:8.2f} GiB allocated at most")
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Phases of a GRPO step")
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    for name, value in (("prompts", 16), ("tokens", 256), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(main(parse()))
