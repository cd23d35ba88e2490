"""The teacher on two ranks under FSDP2: what it says, what is learnt of it, and its average."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.protocol import DataProto
from features.teacher.losses import MASK, TeacherTerm
from features.teacher.settings import TeacherSettings
from features.teacher.teaching import behind_prompts
from features.teacher.weights import (
    LOG_PROBS,
    POLICY_WORDS,
    QUESTION,
    TEACHER,
    TOP,
    WORD_LOG_PROBS,
    WORDS,
    TeacherWeights,
)
from tests.processes.test_ranks import (
    join_ranks,
    largest_difference,
    spawn_ranks,
    whole_weights,
)
from tests.unit.test_actor_critic import make_update
from training.config import ActorConfig, FSDPConfig, MicroBatching, ModelConfig, UpdatePlan
from workers.dp_actor import DataParallelPPOActor
from workers.model import state as model_state
from workers.model.builder import ModelSpec
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.forward_settings import ForwardSettings
from workers.model.loss_terms import LossTerms
from workers.model.optimizer import build_scheduler
from workers.model.policy_model import PolicyModel
from workers.ranks.sharding import full_tensor, shard_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SETTINGS = TeacherSettings(model="ema", loss="top_k", top_k=5, ema_decay=0.5)


def rows(seed: int) -> tuple[DataProto, DataProto]:
    """Rows of an update, and the same behind the teacher's prompts; eight, so that two divide."""
    data = make_update(seed).pad_with_dummies(2)
    data.batch["advantages"] = torch.zeros_like(data.batch["advantages"])
    prompts = [[4 + (row + place) % 50 for place in range(2 + row % 4)] for row in range(8)]
    return data, behind_prompts(data, prompts, pad=0)


def make_step(
    actor: DataParallelPPOActor, teacher: TeacherWeights, seed: int, number: int, world: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Asks the teacher as a step does, and makes its update; this rank's part."""
    data, question = (part.chunk(world)[number] for part in rows(seed))
    asked = {"temperature": 1.0}
    data.meta_info |= asked
    own = data.select(list(question.tensors()), ["uid"])
    own.meta_info = asked | {QUESTION: POLICY_WORDS, TOP: 5}
    question.batch[WORDS] = teacher.read(own).batch[WORDS]
    question.meta_info = asked | {QUESTION: TEACHER}
    said = teacher.read(question).tensors()
    words = question.batch[WORDS]
    data.batch.update(said | {WORDS: words, MASK: data.batch["response_mask"]})
    metrics = actor.update_policy(data, UpdatePlan.of_rows(len(data), len(data), 1, False))
    teacher.updated()
    return {**said, WORDS: words}, metrics


def build(folder: str, device: torch.device, lora: int) -> tuple[Any, Any, Any]:
    """Returns a sharded policy's actor, its teacher, and what a checkpoint saves."""
    config = ModelConfig(lora_rank=lora, dtype="float32", enable_gradient_checkpointing=False)
    spec = ModelSpec(config, str(Path(folder) / "model"), device)
    lm = spec.causal_lm(trainable=True)
    module = PolicyModel(lm)
    shard_model(module, FSDPConfig(), torch.float32, device)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=0.1)
    actor = DataParallelPPOActor(
        ActorConfig(ppo_micro_batch_size_per_gpu=2),
        module,
        optimizer,
        forward=ForwardSettings(device=device),
        terms=LossTerms([TeacherTerm(SETTINGS)]),
    )
    worker = SimpleNamespace(
        actor=actor,
        module=lm,
        policy=SimpleNamespace(log_prob_micro_batching=MicroBatching(micro_batch_size=3)),
        writer=CheckpointWriter(),
    )
    teacher = TeacherWeights(SETTINGS, worker)
    teacher.begin()
    from training.config import OptimConfig

    state = (lm, optimizer, build_scheduler(optimizer, OptimConfig(), 10))
    return actor, teacher, state


def run_rank(folder: str, number: int, world: int, port: int, kind: str) -> None:
    device = join_ranks(number, world, port, kind)
    results = {}
    for lora in (0, 2):
        torch.manual_seed(0)
        actor, teacher, state = build(folder, device, lora)
        before = whole_weights(actor.module)
        make_step(actor, teacher, 0, number, world)
        said, metrics = make_step(actor, teacher, 1, number, world)
        torch.save(said, Path(folder) / f"said-{lora}-{world}-{number}.pt")
        after = whole_weights(actor.module)
        average = {name: full_tensor(t).clone() for name, t in teacher.tensors().items()}
        # Another one goes on from its checkpoint.
        saved = Path(folder) / f"saved-{lora}-{world}"
        writer = CheckpointWriter()
        beside = {"teacher": teacher.tensors()}
        model_state.save(writer, saved, state, ("model", "extra"), beside=beside)
        writer.is_written(wait=True)
        again, its_teacher, its_state = build(folder, device, lora)
        model_state.load(saved, its_state, ("model", "extra"))
        assert model_state.load_beside(saved, "teacher", its_teacher.tensors())
        make_step(actor, teacher, 2, number, world)
        make_step(again, its_teacher, 2, number, world)
        for name, tensor in teacher.tensors().items():
            assert torch.equal(full_tensor(tensor), full_tensor(its_teacher.tensors()[name])), name
        one, other = whole_weights(actor.module), whole_weights(again.module)
        assert all(torch.equal(one[name], other[name]) for name in one)
        changes = {name: after[name] - before[name] for name in after}
        results[lora] = (changes, average, metrics)
    if number == 0:
        torch.save(results, Path(folder) / f"results-{world}.pt")
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tiny_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("teacher_ranks")
    (folder / "model").symlink_to(tiny_task / "model")
    for world in (1, 2):
        spawn_ranks(run_rank, str(folder), world, "cpu")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("lora", [0, 2])
def test_two_ranks_are_taught_as_one_and_average_and_go_on_alike(folder: Path, lora: int) -> None:
    one, two = (torch.load(folder / f"results-{world}.pt")[lora] for world in (1, 2))
    assert largest_difference(two[0], one[0]) < 1e-5, "the update"
    assert largest_difference(two[1], one[1]) < 1e-5, "the average"
    assert any(change.any() for change in one[0].values())
    assert two[2] == pytest.approx(one[2], rel=1e-4, abs=1e-6)
    said = [torch.load(folder / f"said-{lora}-2-{rank}.pt") for rank in (0, 1)]
    whole = torch.load(folder / f"said-{lora}-1-0.pt")
    for name in (LOG_PROBS, WORD_LOG_PROBS):
        together = torch.cat([half[name] for half in said])
        torch.testing.assert_close(together, whole[name], atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.cat([half[WORDS] for half in said]), whole[WORDS])
