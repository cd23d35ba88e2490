"""Turns GSM8K (arXiv:2110.14168) into train.parquet and test.parquet, as RLHFDataset reads them.

    # From the Hugging Face hub, or from a folder that holds train.jsonl and test.jsonl.
    python examples/prepare_gsm8k.py --source openai/gsm8k
    python examples/prepare_gsm8k.py --source FOLDER --out outputs/gsm8k

A row: data_source "openai/gsm8k" (custom/reward_score.py has its rule), prompt (one user message),
reward_model.ground_truth (the number after "####", without commas) and extra_info (split, index,
question, answer). Invariant: a file is there only when it is complete.
"""

import argparse
import importlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Think step by step, then write the final answer, a number, after "####".'


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the rows under a temporary name and renames it.

    `path` exists only when it is complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(pa.Table.from_pylist(rows), temporary)
    os.replace(temporary, path)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Reads an original file, one {"question": ..., "answer": ...} per line.

    A bad line is named.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; --source must be a hub dataset or hold train.jsonl and "
            "test.jsonl"
        )
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            example = json.loads(line)
            yield {"question": example["question"], "answer": example["answer"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}:{number} is not {{"question": ..., "answer": ...}}: {line[:80]!r}'
            ) from error


def read_hub(name: str, split: str) -> Iterable[dict[str, Any]]:
    """Reads a split from the Hugging Face hub; ValueError says what else can be done."""
    advice = "; or download train.jsonl and test.jsonl and give their folder as --source"
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"--source {name!r} is no folder, so it is read from the hub: pip install datasets"
            + advice
        ) from error
    try:
        return datasets.load_dataset(name, "main", split=split)
    except Exception as error:
        raise ValueError(f"the hub did not give {name!r} ({error})" + advice) from error


def to_row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Makes one training row; raises ValueError for an answer without '####'."""
    _, marker, truth = example["answer"].rpartition("####")
    if not marker:
        raise ValueError(
            f'{split} row {index}: its answer has no "####": {example["answer"][:80]!r}'
        )
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{example['question']}\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, **example},
    }


def prepare(source: str, out_dir: Path) -> dict[str, int]:
    """Writes both files; returns the number of rows of each split."""
    folder = Path(source)
    counts = {}
    for split in ("train", "test"):
        examples: Iterable[dict[str, Any]]
        if folder.is_dir():
            examples = read_jsonl(folder / f"{split}.jsonl")
        else:
            examples = read_hub(source, split)
        rows = [to_row(example, split, index) for index, example in enumerate(examples)]
        write_parquet(rows, out_dir / f"{split}.parquet")
        counts[split] = len(rows)
    return counts


def main(argv: list[str] | None = None) -> None:
    """Prepares both files from the command line."""
    parser = argparse.ArgumentParser(description="GSM8K as parquet files for training")
    parser.add_argument(
        "--source",
        default=DATA_SOURCE,
        help="hub dataset, or folder with train.jsonl and test.jsonl",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/gsm8k"), help="folder of the parquet files"
    )
    args = parser.parse_args(argv)
    try:
        counts = prepare(args.source, args.out)
    except ValueError as error:
        raise SystemExit(f"prepare_gsm8k: {error}") from error
    for split, count in counts.items():
        print(f"{args.out / split}.parquet: {count} rows")


if __name__ == "__main__":
    main()
