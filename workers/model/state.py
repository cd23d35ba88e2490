"""What a checkpoint holds of one model, and how it is saved and loaded.

    part         file or folder             what it is
    model        FOLDER/model/              DCP: the weights; with LoRA the adapters alone
    optimizer    FOLDER/optimizer/          DCP: AdamW's moments
    extra        FOLDER/scheduler.json      the place of the schedule
    model        FOLDER/beside/NAME/        DCP: what a feature keeps beside it (companion.py)
    (always)     FOLDER/huggingface/        config and tokenizer, where there is a tokenizer
    hf_model     FOLDER/huggingface/        the same folder, with the weights
                 FOLDER/adapter/            of a policy with LoRA: peft's

`actor.checkpoint.save_contents` and `load_contents` choose the parts. Tensors go through
torch.distributed.checkpoint (DCP), in a thread (checkpoint_writer.py), the rest is JSON. What the
driver saves beside it (the data's position, the seeds) stands in training/run/.

Invariant: a checkpoint holds no pickled code, and a part whose tensors do not fit is not loaded.
"""

import errno
import json
import logging
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase as Tokenizer

from data.disk_errors import as_os_errors
from data.plain_state import CannotSave
from training.config.plain_files import read_plain_text
from workers.model.checkpoint_reader import DoesNotFit, SafeReader, load_tensors
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.language_part import whole_model_of
from workers.model.lora import adapter_export, whole_weights, write_adapter_settings
from workers.model.policy_model import PolicyModel
from workers.ranks.process_groups import rank, world_size

logger = logging.getLogger(__name__)
# A folder, or a file, may not grow.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

State: TypeAlias = tuple[nn.Module, Optimizer, LRScheduler]

# Where the parts that are loaded lie in a checkpoint's folder.
PARTS = {"model": "model", "optimizer": "optimizer", "extra": "scheduler.json"}
# The folder of what stands beside the model.
BESIDE = "beside"
# The optimiser's state by the parameters' names.
FLAT = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    writer: CheckpointWriter,
    folder: Path,
    state: State,
    contents: Collection[str],
    tokenizer: Tokenizer | None = None,
    beside: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> None:
    """Begins to write the parts in `contents` below `folder`; `writer` goes on by itself.

    The parts are model, optimizer and extra. With a tokenizer the Hugging Face folder comes with
    them, whose weights are the part hf_model. What stands beside the model, by name, comes with the
    part model.
    """
    module, optimizer, scheduler = state
    folder.mkdir(parents=True, exist_ok=True)
    tensors_by_folder: dict[Path, dict[str, Tensor]] = {}
    write_others: list[Callable[[], object]] = []
    if "model" in contents:
        tensors_by_folder[folder / PARTS["model"]] = model_tensors(module)
        for name, tensors in (beside or {}).items():
            if tensors:
                tensors_by_folder[folder / BESIDE / name] = dict(tensors)
    if "optimizer" in contents:
        tensors_by_folder[folder / PARTS["optimizer"]] = optimizer_tensors(module, optimizer)
    if "extra" in contents:
        place = {"last_epoch": scheduler.last_epoch, "lr": scheduler.get_last_lr()[0]}
        file = folder / PARTS["extra"]
        write_others.append(partial(file.write_text, json.dumps(place)))
    if tokenizer is not None:
        export = huggingface_export(
            folder / "huggingface", module, tokenizer, weights="hf_model" in contents
        )
        write_others.append(export)
    writer.start(tensors_by_folder, write_others if rank() == 0 else [])


def load(
    folder: Path, state: State, contents: Collection[str], *, other_optimizer: bool = False
) -> None:
    """Reads the parts in `contents` into the live objects, in place.

    Args:
        other_optimizer: an optimiser that the saved state does not fit begins with none.
    Raises:
        DoesNotFit: it does not hold a part, or was saved by another model or optimiser.
    """
    module, optimizer, scheduler = state
    for part, name in PARTS.items():
        if part in contents and not (folder / name).exists():
            raise DoesNotFit(
                f"{folder} holds no '{part}': it was saved without; take it out of "
                "checkpoint.load_contents to go on without it"
            )
    if "model" in contents:
        _load_tensors(model_tensors(module), folder / PARTS["model"])
    if "optimizer" in contents:
        _load_fitting_optimizer(module, optimizer, folder / PARTS["optimizer"], other_optimizer)
    if "extra" in contents:
        _load_scheduler(scheduler, folder)


def load_beside(folder: Path, name: str, tensors: dict[str, Tensor]) -> bool:
    """Reads what a feature keeps beside the model into its tensors, in place.

    Returns: whether the checkpoint has it; where it has not, the first rank says so.

    Raises:
        DoesNotFit: it was saved of another model.
    """
    if not tensors:
        return True
    place = folder / BESIDE / name
    if not place.is_dir():
        if rank() == 0:
            logger.warning(
                "%s holds no %s, which was saved without it: it begins from the policy's weights",
                folder,
                place.relative_to(folder),
            )
        return False
    _load_tensors(tensors, place)
    return True


def _load_scheduler(scheduler: LRScheduler, folder: Path) -> None:
    """Puts the schedule at the saved place; warns where the learning rate is then another."""
    place = _place_of_schedule(folder / PARTS["extra"])
    # Sets the learning rates too; `step` would warn that no step of the optimiser came before.
    scheduler._update_lr(place["last_epoch"])
    rate = scheduler.get_last_lr()[0]
    saved_rate = place.get("lr", rate)
    if rank() == 0 and not math.isclose(rate, saved_rate, rel_tol=1e-6):
        logger.warning(
            "%s: the learning rate jumps from %.4g to %.4g: its schedule is another one",
            folder,
            saved_rate,
            rate,
        )


def _place_of_schedule(file: Path) -> dict[str, Any]:
    """Reads where a schedule stood.

    Raises:
        ValueError: the file does not say.
    """
    try:
        place = json.loads(read_plain_text(file))
        is_place = type(place["last_epoch"]) is int and type(place.get("lr", 0.0)) in (int, float)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_place = False
    if not is_place:
        raise ValueError(f"{file} does not say where the schedule stood: it has no last_epoch")
    return dict(place)


def _load_fitting_optimizer(
    module: nn.Module, optimizer: Optimizer, folder: Path, may_be_other: bool
) -> None:
    """Reads the optimiser's state; one that it does not fit begins with none, or is refused."""
    kind = type(optimizer).__name__
    try:
        _load_optimizer(module, optimizer, folder)
    except DoesNotFit:
        optimizer.state.clear()
        if not may_be_other:
            raise
        if rank() == 0:
            logger.warning(
                "%s is of another optimizer than %s, which begins with a state of its own",
                folder,
                kind,
            )


def _load_optimizer(module: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Reads the optimiser's state; none, if it was saved before its first step."""
    if not SafeReader(folder).read_metadata().state_dict_metadata:
        optimizer.state.clear()
        return
    # Makes the state to read into, of every parameter.
    optimizer.state.clear()
    entries = dcp_state.get_optimizer_state_dict(module, optimizer, options=FLAT)
    tensors = _state_of(entries)
    saved = SafeReader(folder).read_metadata().state_dict_metadata.keys()
    for name, parameter in module.named_parameters():
        own = [key for key in tensors if key.rpartition(".")[0] == f"state.{name}"]
        if own and saved.isdisjoint(own):
            # It had no gradient yet, and begins with its first one.
            del optimizer.state[parameter]
            for key in own:
                del tensors[key], entries[key]
    unsaved = [key for key in tensors if isinstance(entries[key], int | float) and key not in saved]
    for key in unsaved:
        # An older checkpoint, which kept tensors alone.
        del tensors[key]
    if unsaved and rank() == 0:
        logger.warning("%s does not say %s, which begins anew", folder, unsaved[0])
    _load_tensors(tensors, folder)
    state = {name: _like(entries[name], tensor) for name, tensor in tensors.items()}
    dcp_state.set_optimizer_state_dict(module, optimizer, entries | state, options=FLAT)


def _load_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Reads into `tensors`, in place.

    Raises:
        DoesNotFit: the checkpoint's names or shapes are not exactly theirs.
    """
    reader = SafeReader(folder)
    require_fit(reader, {name: tensor.shape for name, tensor in tensors.items()})
    load_tensors(tensors, reader, no_dist=world_size() == 1)


def require_fit(reader: SafeReader, wanted: Mapping[str, torch.Size]) -> None:
    """Raises DoesNotFit where a checkpoint's names or shapes are not exactly those wanted."""
    entries = reader.read_metadata().state_dict_metadata
    saved = {name: entry.size for name, entry in entries.items()}
    if saved != wanted:
        all_names = sorted(saved.keys() | wanted.keys())
        names = [name for name in all_names if saved.get(name) != wanted.get(name)]
        examples = ", ".join(
            f"{name} ({saved.get(name)} saved, {wanted.get(name)} wanted)" for name in names[:3]
        )
        saver = "optimizer" if Path(reader.path).name == PARTS["optimizer"] else "model"
        raise DoesNotFit(
            f"{reader.path} was saved by another {saver}: {len(names)} tensors differ, such as "
            f"{examples}"
        )


def model_tensors(module: nn.Module, *, frozen: bool = False) -> dict[str, Tensor]:
    """Returns parameters, with `frozen` those too that do not train, and persistent buffers.

    A tied tensor is there once.
    """
    names = {name for name, _ in module.named_parameters()}
    names |= {name for name, _ in module.named_buffers()}
    options = dcp_state.StateDictOptions(ignore_frozen_params=not frozen)
    tensors = dcp_state.get_model_state_dict(module, options=options)
    return {name: tensor for name, tensor in tensors.items() if name in names}


def optimizer_tensors(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns the optimiser's state by parameter name; before its first step it has none.

    Settings such as the learning rate belong to config and schedule.
    """
    # To ask for what is not there would make it, by a step with nothing learnt that AdamW counts.
    if not optimizer.state:
        return {}
    try:
        return _state_of(dcp_state.get_optimizer_state_dict(module, optimizer, options=FLAT))
    # It flattens numbers and tensors alone.
    except NotImplementedError as error:
        raise CannotSave(
            f"{type(optimizer).__name__} keeps {_unsaved_entry(module, optimizer)}: a "
            "checkpoint keeps an optimizer's tensors; make it one, or leave optimizer out of "
            "checkpoint.save_contents"
        ) from error


def _unsaved_entry(module: nn.Module, optimizer: Optimizer) -> str:
    """Names an entry of the optimiser's state that is neither tensor nor number."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, Tensor | int | float | dict):
                name = names.get(parameter, "a parameter")
                return f"{key!r} of {name} as a {type(value).__name__}"
    return "what is neither a tensor nor a number"


def _state_of(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns what an optimiser keeps of its parameters; a number, such as a count, as a tensor."""
    state = {name: value for name, value in entries.items() if name.startswith("state.")}
    return {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=_dtype_of(value))
        for name, value in state.items()
        if isinstance(value, Tensor | int | float)
    }


def _dtype_of(number: float) -> torch.dtype:
    """Returns the dtype that holds a Python number as it is."""
    return torch.float64 if isinstance(number, float) else torch.int64


def _like(entry: Any, tensor: Tensor) -> Any:
    """Returns a read tensor as the entry was: as a tensor, or as a number of its type."""
    return tensor if isinstance(entry, Tensor) else type(entry)(tensor.item())


def try_settings(module: nn.Module, tokenizer: Tokenizer) -> None:
    """Writes what a checkpoint holds beside tensors, to a folder that is removed again.

    Where that folder has no room, this is left out: the run's own may have.

    Raises:
        ValueError: it cannot be written, such as a generation config that transformers refuses.
    """
    lm = module.lm if isinstance(module, PolicyModel) else module
    with TemporaryDirectory() as folder:
        try:
            _write_settings(Path(folder), lm, tokenizer)
            write_adapter_settings(Path(folder), lm)
        except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                logger.warning("what checkpoints hold beside tensors is not tried: %s", error)
                return
            cause = " ".join(str(error).split())
            raise ValueError(
                f"{lm.config.name_or_path}: no checkpoint could be saved, as the config, the "
                f"generation config or the tokenizer cannot be written: {cause}; mend that file in "
                "the model's folder"
            ) from error


def _write_settings(folder: Path, lm: nn.Module, tokenizer: Tokenizer) -> None:
    """Writes tokenizer, config and generation config of a language model."""
    whole = whole_model_of(lm)
    with as_os_errors(folder):
        tokenizer.save_pretrained(folder)
        if whole is None:
            lm.config.save_pretrained(folder)
        else:
            whole.write_settings(folder, lm)
        lm.generation_config.save_pretrained(folder)


def huggingface_export(
    folder: Path, module: nn.Module, tokenizer: Tokenizer, *, weights: bool
) -> Callable[[], None]:
    """Prepares a Hugging Face folder: config, generation config, tokenizer; returns what writes it.

    With `weights` also the model, in bfloat16, adapters merged into it, and those alone in a peft
    folder beside it; of a policy with values the language model alone. Where that is a part of a
    model, the folder is the whole model's, with the rest as it was read. Every rank takes part in
    gathering the weights, now; the first one alone keeps them, and is to call the result.
    """
    lm = module.lm if isinstance(module, PolicyModel) else module
    whole = whole_model_of(lm)
    gathered: dict[str, Tensor] = {}
    write_adapters: Callable[[], None] | None = None
    if weights:
        tensors = model_tensors(lm, frozen=True)
        for name, tensor in whole_weights(lm, tensors, torch.bfloat16):
            if rank() == 0:
                gathered[name] = tensor.cpu()
        write_adapters = adapter_export(folder.with_name("adapter"), lm)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _write_settings(folder, lm, tokenizer)
        if write_adapters is not None:
            with as_os_errors(folder):
                if whole is None:
                    lm.save_pretrained(folder, state_dict=gathered)
                else:
                    whole.write_weights(folder, gathered)
            write_adapters()

    return write
