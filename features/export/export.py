"""Exports a checkpoint: `python -m features.export.export CHECKPOINT OUT [--adapter]`.

    CHECKPOINT   RUN_DIR/global_step_N, or RUN_DIR for its latest
    OUT          a folder that is not there yet, or empty: transformers, vLLM and peft load it

The folder has the weights as safetensors (LoRA adapters merged; with --adapter those alone, as peft
has them), config, tokenizer, chat template, and a model card. It needs no GPU, and the base model
only where adapters are merged into it. Invariant: OUT appears whole or not at all, and the run's
folder stays as it is.
"""

import argparse
import logging
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from features.export.exported_model import write_adapter, write_model
from features.export.model_card import CardFacts, write_card
from training.run.checkpoint_names import TEMPORARY
from training.run.files import folder_in_the_making, force_to_disk
from training.run.model_source import CheckpointModel, find_checkpoint_model, step_of_checkpoint
from training.run.named_model import CannotUse
from training.run.signals import EndingSignals

DTYPES = ("bfloat16", "float16", "float32")


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    adapter: bool = False,
    base: str | None = None,
) -> CheckpointModel:
    """Writes a checkpoint's policy to `out`; returns what was exported.

    Args:
        checkpoint: RUN_DIR/global_step_N, or RUN_DIR for its latest.
        out: a folder that is not there, or empty.
        dtype: of the weights; None: that in which the engine had them in training.
        adapter: LoRA adapters alone, as float32, in place of the merged model.
        base: where the base model lies, if not where the run's settings say.
    Raises:
        CannotUse: there is no checkpoint that can be exported, or `out` holds something.
        OSError: `out` cannot be written.
    """
    # A link leads to the folder that is meant.
    out = out.resolve()
    model = find_checkpoint_model(checkpoint, base)
    _require_free(out, model.checkpoint)
    if adapter:
        dtype = "float32"
    dtype = dtype or model.generation_dtype
    with _appearing_whole(out) as folder:
        if adapter:
            write_adapter(model, folder)
        else:
            write_model(model, folder, dtype)
        facts = CardFacts(
            model=model,
            step=step_of_checkpoint(model.checkpoint),
            dtype=dtype,
            is_adapter=adapter,
            name=out.name,
        )
        write_card(folder, facts)
    return model


def _require_free(out: Path, checkpoint: Path) -> None:
    """Raises CannotUse where the folder holds something, or the run would take it for its own."""
    if out.exists() and not out.is_dir():
        raise CannotUse(f"{out} is a file; name a folder that is not there yet")
    if out.is_dir() and any(out.iterdir()):
        raise CannotUse(f"{out} is not empty; name another folder, or empty it")
    checkpoint = checkpoint.resolve()
    if out.is_relative_to(checkpoint):
        raise CannotUse(f"{out} lies in the checkpoint, which a run removes; name a folder outside")
    if out.parent == checkpoint.parent and re.fullmatch(r"global_step_\d+", out.name):
        raise CannotUse(f"{out} has the name of a checkpoint of the run; name another folder")


@contextmanager
def _appearing_whole(out: Path) -> Iterator[Path]:
    """Gives a temporary folder that is renamed to `out` when the block has ended well."""
    with folder_in_the_making(out, TEMPORARY) as temporary:
        yield temporary
        force_to_disk(temporary)
        # Takes the place of an empty folder; of one that was filled meanwhile it does not.
        temporary.rename(out)


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m features.export.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument(
        "--adapter", action="store_true", help="LoRA adapters alone, as a peft folder, in float32"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the weights; default: rollout.dtype of the run, which it generated with",
    )
    parser.add_argument(
        "--base",
        metavar="FOLDER",
        help="where the base model of adapters, or of a model that also sees, lies now",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exports from the command line; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.adapter and args.dtype not in (None, "float32"):
        parser.error(f"--adapter writes float32, as adapters train; --dtype={args.dtype} is none")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # One process reads what any number of ranks wrote.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    signals = EndingSignals()
    try:
        with signals:
            model = export(
                args.checkpoint, args.out, dtype=args.dtype, adapter=args.adapter, base=args.base
            )
    except (CannotUse, OSError) as error:
        print(f"nothing was exported: {error}", file=sys.stderr)
        return 2 if isinstance(error, CannotUse) else 1
    except KeyboardInterrupt:
        print("nothing was exported: interrupted", file=sys.stderr)
        return 128 + (signals.received or signal.SIGINT)
    print(f"{args.out}: {model.checkpoint} as a Hugging Face folder, see its README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
