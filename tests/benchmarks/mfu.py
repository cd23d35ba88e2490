"""Model FLOP utilisation (MFU) of the actor update on one device.

Weights are random, rows of full length; nothing is fetched.

    python -m tests.benchmarks.mfu      0.5B parameters, 64 rows of 512 + 1,024 tokens
    python -m tests.benchmarks.mfu --size 1.5B --budget 32768
    python -m tests.benchmarks.mfu --size tiny --device cpu --rows 8 --prompt 16 --response 16 \\
        --group 4

Convention: PaLM, appendix B (arXiv:2204.02311): 6 FLOPs a token for every parameter of a matrix
product, and 12 x layers x hidden for every pair of tokens of which one attends to the other. Pairs
are causal, n (n + 1) / 2 of a row of n tokens, where PaLM counts n^2: our figure is the lower one.
The head counts where its result is used, on sampled tokens; embeddings and recomputation
(checkpointing) do not count.

    rows       what the update is asked for: every row's prompt and response, as if each were
               computed by itself
    computed   what the forward pass really holds: a prompt that rows share once, with every
               response as a branch
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
import transformers
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from data.protocol import DataProto
from training.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    DataConfig,
    ModelConfig,
    PPOConfig,
    RolloutConfig,
    TrainerConfig,
)
from workers.fsdp_workers import ActorRolloutRefWorker
from workers.model.micro_batches import plan_batch
from workers.model.packing import row_tokens
from workers.model.shared_prefix import MicroBatch, cut_segments

TERA, GIB = 1e12, 1 << 30
# Dense bf16 TFLOP/s with float32 accumulation, by the data sheets; the first name that the device's
# name contains.
PEAKS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "RTX 4090": 165,
}
SIZES = {
    "0.5B": {},
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "intermediate": 8960},
    "tiny": {
        "hidden": 64,
        "layers": 2,
        "heads": 4,
        "intermediate": 128,
        "vocab": 256,
        "budget": 256,
    },
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One measurement: a Qwen2 model with tied embeddings, a batch, and how it is cut."""

    device: str = "cuda"
    dtype: str = "bfloat16"  # autocast compute type
    hidden: int = 896
    layers: int = 24
    heads: int = 14
    kv_heads: int = 2
    intermediate: int = 4864
    vocab: int = 151_936
    rows: int = 64
    prompt: int = 512  # tokens of a prompt
    response: int = 1024  # tokens of a response
    group: int = 8  # rows that share a prompt
    budget: int = 16_384  # tokens of a micro-batch
    share_prompts: int = 1
    checkpointing: int = 1
    deterministic: int = 0
    warmup: int = 2
    updates: int = 5


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one update comes to."""

    tokens: int  # that pass through the layers
    sampled: int  # that pass through the head
    pairs: int  # of tokens of which one attends to the other

    def flops(
        self, layer_parameters: int, head_parameters: int, layers: int, attention_width: int
    ) -> float:
        """FLOPs of forward and backward pass; `attention_width` is heads x their size."""
        matrices = 6.0 * (layer_parameters * self.tokens + head_parameters * self.sampled)
        return matrices + 12.0 * layers * attention_width * self.pairs


@dataclass(frozen=True, kw_only=True)
class Result:
    """Medians; times in seconds, peaks in FLOP/s, memory in bytes (0 on a CPU)."""

    name: str
    settings: Settings
    layer_parameters: int
    head_parameters: int
    rows: Work
    computed: Work
    row_flops: float
    computed_flops: float
    seconds: list[float] = field(default_factory=list)
    sheet_peak: float | None = None
    measured_peak: float = 0.0
    peak_memory: int = 0


def build_worker(settings: Settings) -> ActorRolloutRefWorker:
    """The worker of a run, with the actor that it builds from a folder of random weights."""
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    config = Qwen2Config(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.prompt + settings.response,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(config).save_pretrained(folder)
        model = ModelConfig(
            path=folder,
            dtype=settings.dtype,
            enable_gradient_checkpointing=bool(settings.checkpointing),
        )
        actor = ActorConfig(
            ppo_mini_batch_size=settings.rows // settings.group,
            ppo_max_token_len_per_gpu=settings.budget,
            use_prefix_grouper=bool(settings.share_prompts),
        )
        policy = ActorRolloutRefConfig(
            model=model, actor=actor, rollout=RolloutConfig(n=settings.group)
        )
        trainer = TrainerConfig(device=settings.device, deterministic=bool(settings.deterministic))
        worker = ActorRolloutRefWorker(
            PPOConfig(
                data=DataConfig(train_batch_size=actor.ppo_mini_batch_size),
                actor_rollout_ref=policy,
                trainer=trainer,
            ),
            "actor",
        )
        worker.init_model(1000, worker.config.batch_plan)
    return worker


def make_batch(settings: Settings) -> DataProto:
    """Rows of full length, groups after one another, with random tokens and advantages."""
    generator = torch.Generator().manual_seed(0)

    def ids(rows: int, tokens: int) -> torch.Tensor:
        return torch.randint(settings.vocab, (rows, tokens), generator=generator)

    groups = settings.rows // settings.group
    prompts = ids(groups, settings.prompt).repeat_interleave(settings.group, dim=0)  # (B, P)
    responses = ids(settings.rows, settings.response)  # (B, R)
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "response_mask": torch.ones_like(responses),
            "attention_mask": torch.ones(
                settings.rows, settings.prompt + settings.response, dtype=torch.long
            ),
            "advantages": torch.randn(settings.rows, 1, generator=generator)
            .expand(responses.shape)
            .clone(),
        },
        non_tensors={"uid": np.repeat(np.arange(groups), settings.group).astype(object)},
        meta_info={"temperature": 1.0, "seed": 0, "global_steps": 1},
    )


def work_of(plan: Sequence[MicroBatch], length: int, sampled: int) -> Work:
    """Counts micro-batches of rows of one length, `sampled` tokens in all.

    Two rows of 5 tokens that share 3, in a plan:
    3 + 2 + 2 tokens, 6 + 9 + 9 pairs.
    """
    tokens = pairs = 0
    for micro_batch in plan:
        segments = cut_segments(
            [(i, shared) for i, (_, shared) in enumerate(micro_batch)], [length] * len(micro_batch)
        )
        for (_, _, n), keys in zip(segments.parts, segments.keys, strict=True):
            tokens, pairs = tokens + n, pairs + n * len(keys) - n * (n - 1) // 2
    return Work(tokens=tokens, sampled=sampled, pairs=pairs)


def linear_parameters(module: nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def measure(settings: Settings) -> Result:
    """Runs `warmup` and then `updates` updates of one batch."""
    worker, data = build_worker(settings), make_batch(settings)
    device = worker.device
    if settings.share_prompts:
        # However little it saves.
        worker.actor.settings = replace(worker.actor.settings, key_cost=0.0)
    plan = plan_batch(
        row_tokens(data, True), worker.actor.settings, worker.actor.config.micro_batching
    )
    size = (settings.prompt + settings.response, settings.rows * settings.response)
    computed, rows = (
        work_of(plan, *size),
        work_of([[(row, 0)] for row in range(settings.rows)], *size),
    )
    lm = worker.module
    shape = {
        "layer_parameters": linear_parameters(lm.base_model),
        "head_parameters": lm.get_output_embeddings().weight.numel(),
    }
    attention = {"layers": settings.layers, "attention_width": settings.hidden}
    for _ in range(settings.warmup):
        worker.update_actor(data)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [timed(lambda: worker.update_actor(data), device) for _ in range(settings.updates)]
    name = torch.cuda.get_device_name(device) if on_cuda else "CPU"
    return Result(
        name=name,
        settings=settings,
        **shape,
        rows=rows,
        computed=computed,
        row_flops=rows.flops(**shape, **attention),
        computed_flops=computed.flops(**shape, **attention),
        seconds=seconds,
        sheet_peak=sheet_peak(name),
        measured_peak=measured_peak(device),
        peak_memory=torch.cuda.max_memory_allocated(device) if on_cuda else 0,
    )


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sheet_peak(name: str) -> float | None:
    """FLOP/s of PEAKS, or None for a device that is not in it."""
    return next((tera * TERA for part, tera in PEAKS.items() if part in name), None)


def measured_peak(device: torch.device, repeats: int = 10) -> float:
    """FLOP/s of a large bf16 matrix product of random numbers.

    The median of five times `repeats` products.
    """
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=out)

    products()
    return repeats * 2 * n**3 / statistics.median(timed(products, device) for _ in range(5))


def report(result: Result) -> str:
    """The result in lines."""
    s, seconds = result.settings, statistics.median(result.seconds)
    peaks = {"data sheet": result.sheet_peak, "measured": result.measured_peak}
    lines = [
        f"{result.name}, torch {torch.__version__}, {s.dtype}, "
        f"checkpointing {'on' if s.checkpointing else 'off'}",
        f"model      {result.layer_parameters / 1e6:.1f}M parameters in the layers' matrices, "
        f"{result.head_parameters / 1e6:.1f}M in the head (tied)",
        f"batch      {s.rows} rows x ({s.prompt} + {s.response}) tokens in groups of {s.group}, "
        f"micro-batches of {s.budget} tokens, "
        f"prompts {'shared' if s.share_prompts else 'not shared'}",
        f"update     {seconds:.3f} s, median of {len(result.seconds)} "
        f"({min(result.seconds):.3f} to {max(result.seconds):.3f})",
        "peak       " + ", ".join(f"{n} {p / TERA:.1f} TFLOP/s" for n, p in peaks.items() if p),
    ]
    for name, work, flops in (
        ("rows", result.rows, result.row_flops),
        ("computed", result.computed, result.computed_flops),
    ):
        rate = flops / seconds
        shares = ", ".join(f"{rate / p:.1%} of the {n} peak" for n, p in peaks.items() if p)
        lines.append(
            f"{name:10s} {work.tokens / seconds:,.0f} tokens/s, {flops / TERA:.4g} TFLOP, "
            f"{rate / TERA:.4g} TFLOP/s, MFU {shares}"
        )
    if result.peak_memory:
        lines.append(f"memory     {result.peak_memory / GIB:.2f} GiB allocated at most")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(description="MFU of the actor update")
    parser.add_argument("--size", choices=SIZES, default="0.5B")
    for item in fields(Settings):
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=type(item.default))
    given = {
        name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None
    }
    return replace(Settings(), **(SIZES[given.pop("size")] | given))


if __name__ == "__main__":
    print(report(measure(parse())))
