"""What a GRPO step would take at sizes that nobody has run here.

Computed, from public figures and measured ones.

    generate    decoding reads weights and cache once a token of a sequence; rows end at log-normal
                lengths, and the longest are left alone in the end
    update      8 FLOPs a weight and token (forward, backward, and the forward again of gradient
                checkpointing)
    reference   2 FLOPs a weight and token
    weights     the policy's shards to every engine: gathered over NVLink on a node, between nodes
                over its network
    driver      what the driver does while the ranks wait, in proportion to the rows of the step

python -m tests.benchmarks.extrapolate     prints docs/cluster.md's table
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from statistics import NormalDist

# Public: H100 SXM (dense bf16 FLOP/s, bytes/s of HBM3, of NVLink a direction), and a node's 8 x 400
# Gb/s network.
FLOPS, HBM, NVLINK, NETWORK = 989e12, 3.35e12, 450e9, 400e9
# Assumed, as others report them for FSDP at these sizes and for vLLM's decoding: shares of what the
# hardware could do.
TRAINING_SHARE, READING_SHARE, HBM_SHARE = 0.40, 0.50, 0.60
# Measured here, on one core of a server CPU (docs/benchmarks.md, the driver's memory): the driver's
# whole side of a row of log-normal length, where the longest may have 15,360 tokens, in seconds and
# bytes.
DRIVER_S_A_ROW, DRIVER_BYTES_A_ROW = 240 / 65_536, 23.4 * 2**30 / 65_536
# Rows: prompts of so many tokens, responses of log-normal lengths with this mean and 99th
# percentile.
PROMPT, MEAN, P99 = 1_024, 2_048, 8_192


@dataclass
class Shape:
    """Describes a model: weights, layers, key-value heads x head size, tensor parallelism."""

    name: str
    weights: float
    layers: int
    kv_width: int
    tensor_parallel: int

    @property
    def cache_bytes(self) -> int:
        """Counts a token's keys and values in bf16."""
        return self.layers * self.kv_width * 2 * 2


SEVEN = Shape("7B", 7.6e9, 28, 4 * 128, 1)
SEVENTY = Shape("70B", 70.6e9, 80, 8 * 128, 8)


def lengths(rows: int) -> list[float]:
    """Returns the quantiles of the responses' lengths, the shortest first."""
    z99 = NormalDist().inv_cdf(0.99)
    sigma = z99 - math.sqrt(z99**2 - 2 * math.log(P99 / MEAN))
    normal = NormalDist(math.log(P99) - z99 * sigma, sigma)
    return [math.exp(normal.inv_cdf((row + 0.5) / rows)) for row in range(rows)]


def decoding(shape: Shape, rows: int) -> float:
    """Adds up an engine's decoding steps for so many rows that begin together."""
    seconds, before = 0.0, 0.0
    for ended, length in enumerate(lengths(rows)):
        live = rows - ended
        read = 2 * shape.weights + live * (PROMPT + (before + length) / 2) * shape.cache_bytes
        seconds += (length - before) * read / shape.tensor_parallel / (HBM * HBM_SHARE)
        before = length
    return seconds


def step(shape: Shape, gpus: int, prompts: int, samples: int) -> dict[str, float]:
    """Returns a step's seconds by phase, colocated, one update, with a reference policy."""
    rows, nodes = prompts * samples, math.ceil(gpus / 8)
    tokens = rows * (PROMPT + MEAN)
    engines = gpus // shape.tensor_parallel
    prefill = 2 * shape.weights * prompts * PROMPT / (gpus * FLOPS * READING_SHARE)
    between = 2 * shape.weights / (NETWORK if nodes > 1 else NVLINK)
    return {
        "generate": prefill + decoding(shape, max(rows // engines, 1)),
        "reference": 2 * shape.weights * tokens / (gpus * FLOPS * READING_SHARE),
        "update": 8 * shape.weights * tokens / (gpus * FLOPS * TRAINING_SHARE),
        "weights": between + 2 * shape.weights / shape.tensor_parallel / NVLINK,
        "driver": rows * DRIVER_S_A_ROW,
        "driver's GiB": rows * DRIVER_BYTES_A_ROW / 2**30,
    }


def main() -> None:
    """Prints the table."""
    cases = [(SEVEN, 8, 64, 16), (SEVENTY, 64, 128, 16), (SEVENTY, 1_024, 2_048, 16)]
    found = [step(*case) for case in cases]
    print(
        "| | "
        + " | ".join(f"{s.name}, {g:,} GPUs, {p * n:,} rows" for s, g, p, n in cases)
        + " |\n|---|---|---|---|"
    )
    for name in found[0]:
        unit = "" if "GiB" in name else " s"
        print(f"| {name} | " + " | ".join(f"{seconds[name]:.1f}{unit}" for seconds in found) + " |")
    whole = [
        sum(value for name, value in seconds.items() if "GiB" not in name) for seconds in found
    ]
    print("| step | " + " | ".join(f"{value:.0f} s" for value in whole) + " |")


if __name__ == "__main__":
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    main()
