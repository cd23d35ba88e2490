"""Brings the weights of a model that is evaluated to an engine, without a model that trains.

    form         what the folder holds                  how it reaches the engine
    folder       a Hugging Face model                   the engine reads it; one that reads nothing
                                                        is sent it
    checkpoint   DCP: a policy's weights                read from disk and sent piece by piece
    adapters     DCP: a policy's LoRA adapters          merged into their base, or as adapters
    peft         LoRA adapters as peft saves them       merged into their base

Tensors come under the names and in the order in which training sends them to an engine, and
adapters are merged by peft in the compute type as there. An export instead writes the names and the
form of a model's files, without peft (training/run/checkpoint_weights.py). Invariant: of a
checkpoint an engine gets, to the bit, what it got of the policy that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from data.plain_pickles import NotPlain, reading_plainly
from training.config import ModelConfig
from workers.model.builder import ModelSpec, torch_dtype
from workers.model.checkpoint_reader import SafeReader, load_tensors, read_portions
from workers.model.lora import adapter_export, add_adapters
from workers.model.policy_model import PolicyModel, PolicyValueModel
from workers.model.state import model_tensors, require_fit
from workers.rollout.base_rollout import BaseRollout
from workers.weight_sync.manifest import Manifest, iter_weights, weight_manifest

Form = Literal["folder", "checkpoint", "adapters", "peft"]
NamedTensor = tuple[str, Tensor]
# So many bytes of a checkpoint are read at a time.
PIECE_BYTES = 1 << 30


@dataclass(frozen=True)
class EvaluatedWeights:
    """Says where weights are, and in what form.

    Attributes:
        form: see above.
        folder: of the DCP files, or of peft's; of form `folder` the model's own.
        has_values: the DCP files hold a value head, too.
    """

    form: Form
    folder: str
    has_values: bool = False


def send_weights(
    weights: EvaluatedWeights, engine: BaseRollout, spec: ModelSpec, *, as_adapter: bool
) -> None:
    """Brings the weights to the engine of this rank; every rank reads for itself.

    Args:
        spec: of the folder that the engine was built from, with the base of adapters.
        as_adapter: adapters go by themselves, as `rollout.lora_as_adapter` has it.
    Raises:
        ValueError: they are of another model.
    """
    dtype = torch_dtype(engine.config.dtype)
    if weights.form == "folder":
        if not engine.reads_folder:
            send_module(engine, _read_lm(spec, dtype), dtype)
    elif weights.form == "checkpoint":
        manifest, pieces = read_checkpoint(weights, spec, dtype)
        engine.update_weights(pieces, manifest)
    elif weights.form == "peft":
        send_module(engine, _with_peft_adapters(weights.folder, spec), dtype)
    else:
        lm = _with_saved_adapters(weights, spec)
        if as_adapter:
            with TemporaryDirectory() as folder:
                adapter_export(Path(folder), lm)()
                engine.load_adapter(folder)
        else:
            send_module(engine, lm, dtype)


def send_module(engine: BaseRollout, lm: nn.Module, dtype: torch.dtype) -> None:
    """Sends a language model, with its adapters merged, as the trainer does."""
    engine.update_weights(iter_weights(lm, dtype), weight_manifest(lm))


def read_checkpoint(
    weights: EvaluatedWeights, spec: ModelSpec, dtype: torch.dtype
) -> tuple[Manifest, Iterator[NamedTensor]]:
    """Returns names and shapes of a saved policy, and what reads it from disk piece by piece.

    A tied tensor, which is saved once, comes under each of its names.
    """
    with torch.device("meta"):
        lm = spec.empty_causal_lm(torch.float32)
    reader = SafeReader(weights.folder)
    module = PolicyModel(PolicyValueModel(lm)) if weights.has_values else lm
    require_fit(reader, {name: tensor.shape for name, tensor in model_tensors(module).items()})
    prefix = "lm." if weights.has_values else ""
    saved_names = {name: prefix + saved for name, saved in _saved_names(lm).items()}
    return weight_manifest(lm), _read_pieces(weights.folder, saved_names, dtype)


def _saved_names(lm: nn.Module) -> dict[str, str]:
    """Maps the name of each tensor of a model to the one that it is saved under."""
    first_names: dict[int, str] = {}
    names = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        names[name] = first_names.setdefault(id(tensor), name)
    return names


def _read_pieces(
    folder: str, saved_names: Mapping[str, str], dtype: torch.dtype
) -> Iterator[NamedTensor]:
    """Yields (name, tensor) cast to `dtype`, with PIECE_BYTES or so in memory at a time."""
    saved: dict[str, Any] = SafeReader(folder).read_metadata().state_dict_metadata
    read = read_portions(folder, saved, list(saved_names.values()), PIECE_BYTES)
    for name, (_, tensor) in zip(saved_names, read, strict=True):
        yield name, tensor.to(dtype)


def _read_lm(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """Reads a language model whole, into CPU memory, on whichever rank.

    Raises:
        ValueError: the folder lacks tensors of the model, which would be random numbers.
    """
    with reading_plainly(spec.path):
        if spec.whole_model is not None:
            return spec.whole_model.language_model(
                dtype, trust_remote_code=spec.config.trust_remote_code
            )
        lm, found = AutoModelForCausalLM.from_pretrained(
            spec.path,
            config=spec.hf_config,
            dtype=dtype,
            trust_remote_code=spec.config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    lacking = sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    if lacking:
        raise ValueError(
            f"{spec.path}: its weights are not those of its config.json: {len(lacking)} tensors "
            f"are missing or of another shape, as {lacking[0]}"
        )
    return lm


def _with_saved_adapters(weights: EvaluatedWeights, spec: ModelSpec) -> nn.Module:
    """Reads the base of the spec in its compute type, and a checkpoint's adapters into it."""
    config = spec.config
    assert isinstance(config, ModelConfig)
    lm = _read_lm(spec, torch_dtype(config.dtype)).requires_grad_(False)
    lm = add_adapters(lm, config, spec.path)
    module = PolicyModel(PolicyValueModel(lm)) if weights.has_values else lm
    tensors = model_tensors(module)
    reader = SafeReader(weights.folder)
    require_fit(reader, {name: tensor.shape for name, tensor in tensors.items()})
    load_tensors(tensors, reader, no_dist=True)
    return lm


def _with_peft_adapters(folder: str, spec: ModelSpec) -> nn.Module:
    """Reads the base of the spec, and merges the adapters of a peft folder into it.

    Raises:
        ValueError: they are of another model.
    """
    from peft import PeftModel

    lm = _read_lm(spec, torch.float32)
    try:
        with reading_plainly(folder):
            merge: Callable[[], nn.Module] = PeftModel.from_pretrained(lm, folder).merge_and_unload
        return merge()
    except NotPlain:
        raise
    # Shapes that do not fit, and layers that are not there.
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the adapters in {folder} do not fit {spec.path}: {reason[:300]}"
        ) from error
