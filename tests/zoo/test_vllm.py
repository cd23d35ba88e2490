"""Families with vLLM: two in each run of the tests, all by `make zoo`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.olmo2.modeling_olmo2 import Olmo2Model

from tests.zoo import proofs, vllm_proofs
from tests.zoo.families import FAMILIES
from tests.zoo.proofs import ENGINE_TOLERANCE, Subject
from workers.weight_sync.manifest import iter_weights, weight_manifest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A model with sinks and experts, which its code in vLLM copies by itself."""
    family = FAMILIES["gpt_oss"].for_vllm()
    return vllm_proofs.load(family, family.make(tmp_path_factory.mktemp("gpt_oss")))


def test_weights_that_a_models_code_copies_by_itself_arrive_after_every_update(
    gpt_oss: Subject,
) -> None:
    for _ in range(2):
        assert max(vllm_proofs.engine_twice(gpt_oss)) <= ENGINE_TOLERANCE
        assert not proofs.update(gpt_oss)
        assert proofs.engine_is_trainer(gpt_oss) > ENGINE_TOLERANCE, "the update moved nothing"
        assert not vllm_proofs.shared_with(gpt_oss)
        gpt_oss.sync()
    assert max(vllm_proofs.engine_twice(gpt_oss)) <= ENGINE_TOLERANCE
    vllm_proofs.try_engine(gpt_oss)


def test_a_tensor_that_the_sync_leaves_out_is_refused_by_name(gpt_oss: Subject) -> None:
    manifest = weight_manifest(gpt_oss.lm)
    for name in ("model.layers.0.self_attn.sinks", "model.layers.1.mlp.experts.down_proj_bias"):
        without = {other: shape for other, shape in manifest.items() if other != name}
        weights = [(other, each) for other, each in sent(gpt_oss) if other != name]
        with pytest.raises(ValueError, match=r"missing: \S+(sinks|w2_bias) gets 0 of its"):
            gpt_oss.engine.update_weights(weights, without)


def test_an_order_of_experts_that_differs_is_refused_before_a_run_with_the_number(
    gpt_oss: Subject,
) -> None:
    def turned() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in sent(gpt_oss):
            yield name, tensor.roll(1, 0) if "experts.gate_up_proj" in name else tensor

    gpt_oss.engine.update_weights(turned(), weight_manifest(gpt_oss.lm))
    with pytest.raises(ValueError, match=r"other log-probs for model type 'gpt_oss' .*: \S+ nats"):
        vllm_proofs.try_engine(gpt_oss)
    gpt_oss.sync()
    vllm_proofs.try_engine(gpt_oss)


def test_a_tensor_that_kept_its_old_values_is_refused_before_a_run(gpt_oss: Subject) -> None:
    def keep_old_sinks(model: nn.Module) -> None:
        for name, tensor in model.named_parameters():
            if name.endswith("sinks"):
                tensor.data.add_(1.0)

    vllm_proofs.engine_of(gpt_oss).apply_model(keep_old_sinks)
    with pytest.raises(ValueError, match="other log-probs"):
        vllm_proofs.try_engine(gpt_oss)
    gpt_oss.sync()
    vllm_proofs.try_engine(gpt_oss)


def sent(subject: Subject) -> list[tuple[str, Tensor]]:
    """Lists what the trainer sends."""
    return list(iter_weights(subject.lm, torch.float32, casts=False))


def test_transformers_own_class_stays_as_it_is_where_vllm_plays_by_it(tmp_path: Path) -> None:
    family = FAMILIES["olmo2"].for_vllm()
    folder = family.make(tmp_path / "model")
    made_before = AutoModelForCausalLM.from_pretrained(folder)
    bases = Olmo2Model.__bases__
    initialize = Olmo2Model.__init__
    subject = vllm_proofs.load(family, folder)
    assert Olmo2Model.__bases__ == bases
    assert Olmo2Model.__init__ is initialize
    assert "__call__" not in vars(Olmo2Model)
    [own] = vllm_proofs.engine_of(subject).apply_model(lambda model: type(model.model))
    assert own is not Olmo2Model
    assert issubclass(own, Olmo2Model)
    ids = torch.arange(10, 20)[None]
    made_after = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(made_before(ids).logits, made_after(ids).logits)
    assert max(vllm_proofs.engine_twice(subject)) <= ENGINE_TOLERANCE
    assert not proofs.update(subject)
    subject.sync()
    assert max(vllm_proofs.engine_twice(subject)) <= ENGINE_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "ernie4_5_moe", "minimax_m2", "gemma4"])
def test_a_family_that_vllm_plays_wrongly_by_itself_has_the_trainers_log_probs(
    name: str, tmp_path: Path
) -> None:
    seen = vllm_proofs.prove(FAMILIES[name], tmp_path)
    assert seen.holds, seen
