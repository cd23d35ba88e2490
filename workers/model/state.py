"""A model's and optimiser's state on disk: tensors through torch.distributed.checkpoint (DCP), the rest as JSON.

    FOLDER/model/       DCP: weights            FOLDER/scheduler.json   the schedule's place
    FOLDER/optimizer/   DCP: AdamW's moments    FOLDER/huggingface/     config and tokenizer; with `hf_model` weights
                                                FOLDER/adapter/         with `hf_model`, of a policy with LoRA: peft's

Of a policy with LoRA the adapters alone are weights here; the others are in the folder that the model came from.
It is written in a thread while training goes on: weights and optimiser state change only in an update, and an update
waits for the copy; so what is written is the state at `start`, and neither the copy nor the disk holds up the rest:

    main thread   start ........ generate, log-probs ........ wait_until_copied, update ...
    this thread         copy the tensors to CPU memory | write and force to disk

Invariant: a checkpoint holds no pickled code, and reading one runs none; a part whose tensors do not fit is not loaded.
"""

import json
import logging
import math
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import PreTrainedTokenizerBase as Tokenizer

from data.texts import say, table
from workers.model.forward import PolicyModel
from workers.model.lora import adapter_export, whole_weights
from workers.ranks.distributed import rank, world_size

# How tensors are copied to CPU memory: by plain copies, in the thread that asks for them.
STAGING = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)


class CheckpointWriter:
    """Writes one worker's checkpoints, on every rank.

    It is made after the process group, since the threads of all ranks have a group of their own. A single rank has
    none, whatever group an engine may have made in its process.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if world_size() > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copied = Event()
        self._copied.set()
        self._written: Future[None] | None = None

    def start(
        self, parts: Mapping[Path, dict[str, Tensor]], rest: Sequence[Callable[[], object]]
    ) -> None:
        """Begins to write each part, the tensors of a model or an optimiser, into its folder, then calls the `rest`.

        Every rank calls it with its own shards. The one before must have been waited for with `is_written`.
        """
        # The thread must not copy what is still being computed.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._copied.clear()
        self._written = self._thread.submit(self._write, parts, rest)

    def wait_until_copied(self) -> None:
        """Returns when the tensors may change again."""
        self._copied.wait()

    def is_written(self, wait: bool) -> bool:
        """Says whether everything of the last `start` is on disk; with `wait`, once it is.

        Raises:
            OSError: it could not be written, on whichever rank; says why.
        """
        if self._written is None or not (wait or self._written.done()):
            return self._written is None
        written, self._written = self._written, None
        try:
            written.result()
        # torch's own writer raises RuntimeError.
        except (CheckpointException, OSError, RuntimeError) as error:
            raise OSError(f"the checkpoint could not be written: {_causes(error)}") from None
        return True

    def _write(
        self, parts: Mapping[Path, dict[str, Tensor]], rest: Sequence[Callable[[], object]]
    ) -> None:
        try:
            # Sharded as the tensors are.
            copies = {
                folder: DefaultStager(STAGING).stage(tensors) for folder, tensors in parts.items()
            }
        finally:
            self._copied.set()
        for folder, tensors in copies.items():
            dcp.save(
                tensors,
                checkpoint_id=folder,
                process_group=self._group,
                no_dist=self._group is None,
            )
        for write in rest:
            write()


def _causes(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(
            f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items())
        )
    return str(error)


logger = logging.getLogger(__name__)
State: TypeAlias = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]
# The names that DCP's metadata may have, by module.
ALLOWED = table(__file__, "dcp_names")
FLAT = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    writer: CheckpointWriter,
    folder: Path,
    state: State,
    contents: Collection[str],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Begins to write the parts in `contents` (model, optimizer, extra) below `folder`; `writer` goes on by itself.

    With a tokenizer, also the Hugging Face folder, whose weights are the part hf_model.
    """
    module, optimizer, scheduler = state
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "model": partial(model_tensors, module),
        "optimizer": partial(optimizer_tensors, module, optimizer),
    }
    parts = {folder / name: own() for name, own in tensors.items() if name in contents}
    rest: list[Callable[[], object]] = []
    if "extra" in contents:
        place = {"last_epoch": scheduler.last_epoch, "lr": scheduler.get_last_lr()[0]}
        rest.append(partial((folder / "scheduler.json").write_text, json.dumps(place)))
    if tokenizer is not None:
        rest.append(
            huggingface_export(
                folder / "huggingface", module, tokenizer, weights="hf_model" in contents
            )
        )
    writer.start(parts, rest if rank() == 0 else [])


def load(folder: Path, state: State, contents: Collection[str]) -> None:
    """Reads the parts in `contents` into the live objects, in place.

    Raises:
        FileNotFoundError: naming the part that this checkpoint does not hold.
    """
    module, optimizer, scheduler = state
    for part, name in {
        "model": "model",
        "optimizer": "optimizer",
        "extra": "scheduler.json",
    }.items():
        if part in contents and not (folder / name).exists():
            raise FileNotFoundError(say("part_missing", folder=folder, part=part))
    if "model" in contents:
        _load(model_tensors(module), folder / "model")
    if "optimizer" in contents:
        _load_optimizer(module, optimizer, folder / "optimizer")
    if "extra" in contents:
        place = json.loads((folder / "scheduler.json").read_text())
        # Sets the learning rates too; `step` would warn that no step of the optimiser came before.
        scheduler._update_lr(place["last_epoch"])
        lr = scheduler.get_last_lr()[0]
        if rank() == 0 and not math.isclose(lr, place.get("lr", lr), rel_tol=1e-6):
            logger.warning(say("rate_jumps", folder=folder, saved=place["lr"], now=lr))


def _load_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Reads the optimiser's state; none, if it was saved before its first step."""
    if not SafeReader(folder).read_metadata().state_dict_metadata:
        optimizer.state.clear()
        return
    # Makes the state to read into, where there is none yet.
    entries = dcp_state.get_optimizer_state_dict(module, optimizer, options=FLAT)
    tensors = _tensors(entries)
    _load(tensors, folder)
    dcp_state.set_optimizer_state_dict(module, optimizer, entries | tensors, options=FLAT)


def _load(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Reads into `tensors`, in place.

    Raises:
        ValueError: the checkpoint's names or shapes are not exactly theirs.
    """
    reader = SafeReader(folder)
    saved = {name: entry.size for name, entry in reader.read_metadata().state_dict_metadata.items()}
    wanted = {name: tensor.shape for name, tensor in tensors.items()}
    if saved != wanted:
        names = sorted(
            name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name)
        )
        first = ", ".join(
            f"{name} ({saved.get(name)} saved, {wanted.get(name)} wanted)" for name in names[:3]
        )
        raise ValueError(
            f"{folder} was saved by another model: {len(names)} tensors differ, such as {first}"
        )
    dcp.load(tensors, storage_reader=reader, no_dist=world_size() == 1)


class SafeReader(dcp.FileSystemReader):
    """Reads torch.distributed.checkpoint folders that hold tensors and nothing else; what could run code is refused.

    DCP's metadata is a pickle, and its entries that are no tensors are pickles too: the first is read with an
    allow-list, the others must not be there.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads what the folder holds.

        Raises:
            pickle.UnpicklingError: it names something other than tensors.
        """
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _AllowListUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(
                f"{self.path}: .metadata holds a {type(metadata).__name__}"
            )
        entries = metadata.state_dict_metadata.items()
        if others := [
            name for name, entry in entries if not isinstance(entry, TensorStorageMetadata)
        ]:
            raise pickle.UnpicklingError(
                f"{self.path}: {others} are no tensors; ours hold nothing else"
            )
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _AllowListUnpickler(pickle.Unpickler):
    """Builds the classes of DCP's metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Finds an allowed class, and raises UnpicklingError for others."""
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(
                f"a checkpoint's metadata names {module}.{name}, which it has no reason to"
            )
        return super().find_class(module, name)


def model_tensors(module: nn.Module, *, frozen: bool = False) -> dict[str, torch.Tensor]:
    """Returns the parameters, with `frozen` those too that do not train, and persistent buffers; a tied tensor once."""
    own = {name for name, _ in module.named_parameters()} | {
        name for name, _ in module.named_buffers()
    }
    options = dcp_state.StateDictOptions(ignore_frozen_params=not frozen)
    tensors = dcp_state.get_model_state_dict(module, options=options)
    return {name: tensor for name, tensor in tensors.items() if name in own}


def optimizer_tensors(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Returns the optimiser's state by parameter name; before its first step it has none.

    Settings such as the learning rate belong to config and schedule.
    """
    # To ask for what is not there would make it, by a step with nothing learnt that AdamW counts.
    return (
        _tensors(dcp_state.get_optimizer_state_dict(module, optimizer, options=FLAT))
        if optimizer.state
        else {}
    )


def _tensors(entries: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}


def huggingface_export(
    folder: Path, module: nn.Module, tokenizer: Tokenizer, *, weights: bool
) -> Callable[[], None]:
    """Returns what writes a plain Hugging Face folder: config, generation config and tokenizer.

    With `weights` also the model, in bfloat16, adapters merged into it, and those alone in a peft folder beside it.
    Every rank takes part in gathering the weights, now; the first one alone holds them, and is to call the result. Of a
    policy with values the language model alone.
    """
    module = module.lm if isinstance(module, PolicyModel) else module
    state: dict[str, torch.Tensor] = {}
    for name, whole in (
        whole_weights(module, model_tensors(module, frozen=True), torch.bfloat16) if weights else ()
    ):
        if rank() == 0:
            state[name] = whole.cpu()
    write_adapters = adapter_export(folder.with_name("adapter"), module) if weights else None

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
        module.config.save_pretrained(folder)
        module.generation_config.save_pretrained(folder)
        if write_adapters is not None:
            module.save_pretrained(folder, state_dict=state)
            write_adapters()

    return write
