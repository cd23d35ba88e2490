"""Runs every test of tests/gpu and the benchmarks for a GPU: `make gpu-check`.

It prints first what this Python has. Invariant: it suits a bare CUDA machine: it installs nothing,
needs no .venv, nothing it starts asks a hub, and it imports only the standard library, so that it
can name what is missing. GPU_TESTS_DEVICE=cpu makes a dry run on the CPU: every body of the tests,
and the benchmarks on a tiny model.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
# Import name -> what it is for; without those required nothing runs.
REQUIRED = {
    "torch": "with CUDA",
    "transformers": "models and tokenizers",
    "tensordict": "the tensors of a batch",
    "numpy": "its other columns",
    "omegaconf": "configs",
    "pydantic": "their types and bounds",
    "pyarrow": "prompts in parquet",
    "pytest": "the tests",
}
OPTIONAL = {
    "vllm": "the vLLM engine's tests and steps",
    "ray": "a rank that Ray places",
    "accelerate": "transformers loads large checkpoints with it",
    "matplotlib": "main.py's reward curve; the tests here do without",
    "tensorboard": "trainer.logger=tensorboard",
}
DRY_RUN = os.environ.get("GPU_TESTS_DEVICE") == "cpu"
# A dry run's arguments: module of tests/benchmarks -> its arguments.
TINY = {
    "mfu": "--size tiny --device cpu --rows 8 --prompt 16 --response 16 --group 4",
    "step_phases": "--size tiny --device cpu --prompts 2 --tokens 8",
}
# Title -> module of tests/benchmarks and its arguments.
BENCHMARKS = {
    "MFU of the actor update, 0.5B": "mfu",
    "MFU of the actor update, 0.5B, prompts not shared": "mfu --share-prompts 0",
    "MFU of the actor update, 1.5B": "mfu --size 1.5B",
    "phases of a GRPO step, hf": "step_phases",
}


def version(name: str) -> str | None:
    """Returns the installed version of an import name, None where it is not there."""
    if importlib.util.find_spec(name) is None:
        return None
    distributions = importlib.metadata.packages_distributions().get(name)
    return importlib.metadata.version(distributions[0]) if distributions else "?"


def describe() -> list[str]:
    """Prints packages and devices; returns what is missing."""
    print(f"python       {sys.version.split()[0]} at {sys.executable}")
    missing = []
    for name, purpose in REQUIRED.items():
        installed = version(name)
        if installed is None:
            missing.append(name)
        print(f"{name:12s} {installed or 'MISSING':14s} required: {purpose}")
    for name, purpose in OPTIONAL.items():
        print(f"{name:12s} {version(name) or 'not there':14s} optional: {purpose}")
    if "torch" not in missing and not describe_devices() and not DRY_RUN:
        missing.append("a CUDA device")
    return missing


def describe_devices() -> bool:
    """Prints torch's CUDA and its GPUs; returns whether there are any."""
    torch = importlib.import_module("torch")
    print(f"CUDA         {torch.version.cuda or 'none: a CPU build of torch'}")
    for i in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(i).total_memory / (1 << 30)
        print(f"GPU {i}        {torch.cuda.get_device_name(i)}, {memory:.0f} GiB")
    return torch.cuda.is_available()


def run(title: str, *arguments: str) -> bool:
    """Runs this Python with arguments from the project's folder, offline.

    Returns whether it ended well.
    """
    print(f"\n== {title}: python {' '.join(arguments)}", flush=True)
    offline = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run([sys.executable, *arguments], cwd=PROJECT, env=os.environ | offline)
    return done.returncode == 0


def main() -> int:
    """Runs all; returns the exit code: 1 where something failed, 2 where something is missing."""
    missing = describe()
    if missing:
        packages = [name for name in missing if name in REQUIRED]
        print(f"\nmissing: {', '.join(missing)}; nothing was run", file=sys.stderr)
        if packages:
            print(f"{sys.executable} -m pip install {' '.join(packages)}", file=sys.stderr)
        return 2
    benchmarks = dict(BENCHMARKS)
    if version("vllm"):
        benchmarks["phases of a GRPO step, vLLM"] = "step_phases --engine vllm"
    ended_well = {"tests": run("tests", "-m", "pytest", "tests/gpu", "-m", "gpu", "-rs")}
    for title, command in benchmarks.items():
        module, *arguments = command.split()
        if DRY_RUN:
            # The last value of an option that is given twice holds.
            arguments += TINY[module].split()
        ended_well[title] = run(title, "-m", f"tests.benchmarks.{module}", *arguments)
    print()
    for title, well in ended_well.items():
        print(f"{'ok' if well else 'FAILED':7s} {title}")
    return 0 if all(ended_well.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
