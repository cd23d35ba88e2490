"""Says what this Python has, then runs every test of tests/gpu and the benchmarks for a GPU; `make gpu-check` runs it.

Invariant: it suits a bare CUDA machine: it installs nothing, needs no .venv, nothing it starts asks a hub, and it
imports only the standard library, so that it can say what is missing. GPU_TESTS_DEVICE=cpu makes a dry run on the CPU:
every body of the tests, and the benchmarks on a tiny model.
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
TINY = {
    "mfu": "--size tiny --device cpu --rows 8 --prompt 16 --response 16 --group 4",
    "step_phases": "--size tiny --device cpu --prompts 2 --tokens 8",
}
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
    for names, needed in ((REQUIRED, True), (OPTIONAL, False)):
        for name, purpose in names.items():
            found = version(name)
            if found is None and needed:
                missing.append(name)
            state = found or ("MISSING" if needed else "not there")
            print(
                f"{name:12s} {state:14s} {'required' if needed else 'optional'}: {purpose}".rstrip(
                    ": "
                )
            )
    if "torch" not in missing:
        torch = importlib.import_module("torch")
        print(f"CUDA         {torch.version.cuda or 'none: a CPU build of torch'}")
        for i in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(i).total_memory / (1 << 30)
            print(f"GPU {i}        {torch.cuda.get_device_name(i)}, {memory:.0f} GiB")
        if not torch.cuda.is_available() and not DRY_RUN:
            missing.append("a CUDA device")
    return missing


def run(title: str, *arguments: str) -> bool:
    """Runs this Python with arguments from the project's folder, offline; says whether it ended well."""
    print(f"\n== {title}: python {' '.join(arguments)}", flush=True)
    offline = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run([sys.executable, *arguments], cwd=PROJECT, env=os.environ | offline)
    return done.returncode == 0


def main() -> int:
    """Runs all; returns 0 where all ended well, 1 where something failed, 2 where something is missing."""
    if missing := describe():
        packages = [name for name in missing if name in REQUIRED]
        print(f"\nmissing: {', '.join(missing)}; nothing was run", file=sys.stderr)
        if packages:
            print(f"{sys.executable} -m pip install {' '.join(packages)}", file=sys.stderr)
        return 2
    ended = {"tests": run("tests", "-m", "pytest", "tests/gpu", "-m", "gpu", "-rs")}
    benchmarks = BENCHMARKS | (
        {"phases of a GRPO step, vLLM": "step_phases --engine vllm"} if version("vllm") else {}
    )
    for title, command in benchmarks.items():
        module, *arguments = command.split()
        # Of an option that is given twice the last value holds.
        arguments += TINY[module].split() if DRY_RUN else []
        ended[title] = run(title, "-m", f"tests.benchmarks.{module}", *arguments)
    print()
    for title, well in ended.items():
        print(f"{'ok' if well else 'FAILED':7s} {title}")
    return 0 if all(ended.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
