"""What is proved of a family with vLLM, by the proofs of proofs.py over an engine of vLLM's.

A family is made in sizes that vLLM's kernels for a CPU know, and played in float32; gated delta
nets, for which it has a kernel in bfloat16 alone, in that. Prompts are longer than a block of its
cache, and played twice, so that the second time they come from the cache. Each family is proved in
a process of its own: what one leaves in vLLM's globals reaches no other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.zoo import proofs
from tests.zoo.families import Family, WholeFamily
from tests.zoo.proofs import ANSWERS, ENGINE_TOLERANCE, OPTIM, Subject, prompt, vocabulary_of
from training.config import ModelConfig, RolloutConfig
from workers.model.builder import ModelSpec
from workers.model.forward_settings import forward_settings
from workers.model.optimizer import build_optimizer
from workers.rollout.engine_check import check_engine
from workers.vllm_rollout_spmd import set_engine_environment, vLLMRollout

# Nats that bfloat16 rounds the log-probs of a tiny model by on average, whose experts may then be
# others: the trainer's own in bfloat16 are 0.06 from those in float32.
TOLERANCE_OF_TWO_BYTES = 0.1
# Tokens that a prompt has beyond a block of the cache.
BEYOND = 40
LONGEST = 2048


@dataclass(frozen=True)
class Proved:
    """Holds what was seen of a family with vLLM; numbers are nats.

    Attributes:
        model_class: vLLM's.
        engine: how far its log-probs are from the trainer's.
        again: the same, where prompts come from the cache.
        updated: the larger of the two, behind an update that moved every tensor.
        export: the same of an engine that reads the export.
    """

    model_class: str
    dtype: str
    engine: float
    again: float
    updated: float
    export: float

    @property
    def worst(self) -> float:
        """Returns the largest difference."""
        return max(self.engine, self.again, self.updated, self.export)

    @property
    def holds(self) -> bool:
        """Checks whether every number is within its bound."""
        return self.worst <= tolerance_of(self.dtype)


def tolerance_of(dtype: str) -> float:
    """Returns by how many nats log-probs may differ."""
    return ENGINE_TOLERANCE if dtype == "float32" else TOLERANCE_OF_TWO_BYTES


def dtype_of(family: Family) -> str:
    """Names the type in which vLLM has kernels for a family on a CPU."""
    settings = family.part.settings if isinstance(family, WholeFamily) else family.settings
    return "bfloat16" if "linear_conv_kernel_dim" in settings else "float32"


def load(family: Family, folder: Path) -> Subject:
    """Loads a folder that `Family.make` wrote, with an engine of vLLM's."""
    dtype = dtype_of(family)
    config = ModelConfig(path=str(folder), dtype=dtype, enable_gradient_checkpointing=False)
    spec = ModelSpec(config, str(folder), torch.device("cpu"))
    lm = spec.causal_lm(trainable=True)
    engine = build_engine(spec)
    vocabulary = vocabulary_of(lm)
    head = prompt(engine.cached_block + BEYOND, vocabulary)
    subject = Subject(
        family=family,
        folder=folder,
        spec=spec,
        lm=lm,
        engine=engine,
        settings=forward_settings(config, True, lm, spec.device),
        prompts=[
            prompt(1, vocabulary),
            prompt(5, vocabulary),
            prompt(19, vocabulary),
            prompt(33, vocabulary),
            head + prompt(5, vocabulary),
            head + prompt(17, vocabulary),
        ],
    )
    subject.sync()
    return subject


def build_engine(spec: ModelSpec) -> vLLMRollout:
    """Builds vLLM for a model's folder, with the settings of a run."""
    rollout = RolloutConfig(
        dtype=spec.config.dtype,
        response_length=max(ANSWERS),
        max_model_len=LONGEST,
        max_num_seqs=8,
    )
    return vLLMRollout(rollout, spec)


def engine_of(subject: Subject) -> Any:
    """Returns vLLM's own engine."""
    assert isinstance(subject.engine, vLLMRollout)
    return subject.engine.engine


def try_engine(subject: Subject) -> None:
    """Tries the engine as the start of a run does.

    Raises:
        ValueError: its log-probs are not the trainer's.
    """
    check_engine(
        subject.engine,
        lambda data: proofs.trainer_log_probs(subject, data),
        vocabulary=vocabulary_of(subject.lm),
        kind=subject.lm.config.model_type,
        exact=dtype_of(subject.family) == "float32",
    )


def prove(family: Family, folder: Path) -> Proved:
    """Makes every proof of a family with vLLM, in a folder for its files.

    Raises:
        ValueError, or what vLLM raises: the start of a run refuses it.
        AssertionError: what follows the start failed.
    """
    family = family.for_vllm()
    subject = load(family, family.make(folder / "model"))
    try_engine(subject)
    try:
        return prove_started(subject, folder)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error


def prove_started(subject: Subject, folder: Path) -> Proved:
    """Makes the proofs of what started.

    Raises:
        AssertionError: a tensor did not move, or the engine had it before it was sent.
    """
    family = subject.family
    [model_class] = engine_of(subject).apply_model(lambda model: type(model).__name__)
    before, again = engine_twice(subject)
    unmoved = proofs.update(subject)
    assert not unmoved, f"these did not move: {', '.join(unmoved)}"
    tolerance = tolerance_of(dtype_of(family))
    assert gap_of(subject) > tolerance, "the update moved nothing"
    assert not shared_with(subject), f"the engine has the trainer's own {shared_with(subject)}"
    subject.sync()
    updated = max(engine_twice(subject))
    return Proved(
        model_class=model_class,
        dtype=dtype_of(family),
        engine=before,
        again=again,
        updated=updated,
        export=exported_is_policy(subject, folder),
    )


def engine_twice(subject: Subject) -> tuple[float, float]:
    """Measures how far the engine is from the trainer, and again with prompts of its cache."""
    subject.engine.begin()
    return gap_of(subject), gap_of(subject)


def gap_of(subject: Subject) -> float:
    """Measures how far the engine is from the trainer: at most, and in bfloat16 on average."""
    is_exact = dtype_of(subject.family) == "float32"
    return proofs.engine_is_trainer(subject, proofs.largest if is_exact else proofs.mean)


def shared_with(subject: Subject) -> list[str]:
    """Lists parameters of the engine that lie in the trainer's memory: they would train along."""
    own = {each.untyped_storage().data_ptr() for each in subject.lm.parameters()}

    def shared(model: nn.Module) -> list[str]:
        names = []
        for name, tensor in model.named_parameters():
            if tensor.untyped_storage().data_ptr() in own:
                names.append(name)
        return names

    [names] = engine_of(subject).apply_model(shared)
    return names


def exported_is_policy(subject: Subject, folder: Path) -> float:
    """Exports the policy; measures how far vLLM, which reads the folder alone, is from it.

    Where vLLM is sent a language part in place of reading a folder, it is sent the folder's.
    """
    from features.export.export import export

    run = folder / "run"
    proofs.write_checkpoint(subject, build_optimizer(subject.lm, OPTIM), run)
    export(run, folder / "out")
    spec = replace(subject.spec, path=str(folder / "out"))
    reader = replace(subject, engine=build_engine(spec))
    if not reader.engine.reads_folder:
        replace(reader, lm=spec.causal_lm(trainable=False)).sync()
    return gap_of(reader)


def prepare() -> None:
    """Imports what every family's process needs, once."""
    set_engine_environment()
    from vllm import EngineArgs, LLMEngine  # noqa: F401
    from vllm.model_executor.models import registry

    # Whether vLLM can import a model's class it tries in a process of its own: ours is one.
    registry._run_in_subprocess = lambda inspect: inspect()
