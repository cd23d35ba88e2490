"""Models that also see, on text: the language part trains, and the rest comes out as it came in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen3VLConfig

import workers.model.state as model_state
from tests.conftest import PROJECT
from tests.needed_features import require_features
from tests.zoo import proofs
from tests.zoo.families import WHOLE, WholeFamily
from tests.zoo.proofs import ENGINE_TOLERANCE, Subject
from training.config import CriticModelConfig, ModelConfig
from workers.model.builder import ModelSpec
from workers.model.language_part import language_config

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module", params=WHOLE)
def family(request: pytest.FixtureRequest) -> WholeFamily:
    return WHOLE[request.param]


@pytest.fixture(scope="module")
def folder(family: WholeFamily, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.make(tmp_path_factory.mktemp("whole") / family.name)


def spec_of(folder: Path, **settings: object) -> ModelSpec:
    return ModelSpec(ModelConfig(dtype="float32", **settings), str(folder), torch.device("cpu"))


def of_language(name: str) -> bool:
    return "language_model" in name or name.startswith("lm_head")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def whole_state(folder: Path) -> dict[str, Tensor]:
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    return dict(model.state_dict())


def test_the_language_part_alone_is_built_and_computes_what_the_whole_model_does(
    family: WholeFamily, folder: Path
) -> None:
    lm = spec_of(folder).causal_lm(trainable=True).eval()
    whole = AutoModelForImageTextToText.from_pretrained(folder).eval()
    assert type(lm).__name__ == type(spec_of(folder).empty_causal_lm(torch.float32)).__name__
    language = [p for name, p in whole.named_parameters() if of_language(name)]
    assert sum(map(torch.numel, lm.parameters())) == sum(map(torch.numel, language))
    assert not any(tensor.is_meta for tensor in [*lm.parameters(), *lm.buffers()])
    ids = torch.arange(10, 40)[None]
    expected = whole(input_ids=ids, use_cache=False).logits
    computed = lm(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-6)


def check_whole(before: Path, after: Path, dtype: torch.dtype) -> None:
    """Requires all tensors of a folder in another: the language part's moved, others bitwise."""
    old = tensors_of(before)
    new = tensors_of(after)
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        if of_language(name):
            assert new[name].dtype == dtype
        else:
            assert torch.equal(new[name], tensor), name
    parameters = [n for n in old if of_language(n) and not n.endswith("layer_scalar")]
    assert not [n for n in parameters if torch.equal(new[n].float(), old[n])]
    towers = [whole_state(each) for each in (before, after)]
    for name, tensor in towers[0].items():
        if not of_language(name.removeprefix("model.")):
            assert torch.equal(tensor, towers[1][name]), name


def test_an_export_and_the_checkpoint_have_the_tower_bitwise(
    family: WholeFamily, folder: Path, tmp_path: Path
) -> None:
    require_features("export")
    subject = Subject.load(family, folder)
    assert proofs.exported_is_policy(subject, tmp_path / "run", tmp_path / "out") < 1e-5
    check_whole(folder, tmp_path / "out", torch.float32)
    written = tmp_path / "huggingface"
    model_state.huggingface_export(written, subject.lm, subject.spec.tokenizer, weights=True)()
    check_whole(folder, written, torch.bfloat16)


def test_text_is_played_and_trained_and_placeholders_are_never_sampled(
    family: WholeFamily, folder: Path
) -> None:
    subject = Subject.load(family, folder)
    assert subject.engine.banned_token_ids == sorted(family.placeholders.values())
    assert proofs.engine_is_trainer(subject) <= 1e-5
    assert proofs.trainer_is_row_alone(subject) <= ENGINE_TOLERANCE
    assert not proofs.update(subject)
    subject.sync()
    assert proofs.engine_is_trainer(subject) <= 1e-5
    data = proofs.as_batch(subject, subject.play(range(len(proofs.PROMPTS))))
    assert not set(data.batch["responses"].unique().tolist()) & set(subject.engine.banned_token_ids)


def test_a_critic_that_transformers_cannot_make_is_refused_with_what_to_set(folder: Path) -> None:
    spec = ModelSpec(CriticModelConfig(path=str(folder)), str(folder), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"critic\.share_backbone=true"):
        spec.value_model()


def test_a_language_part_that_is_no_language_model_is_refused() -> None:
    config = Qwen3VLConfig(text_config={"hidden_size": 64}, vision_config={"depth": 1})
    with pytest.raises(ValueError, match=r"no language model of the type of its .*'qwen3_vl_text'"):
        language_config(config)


NO_TORCHVISION = """
import sys
import torch
from training.config import ModelConfig
from workers.model.builder import ModelSpec
spec = ModelSpec(ModelConfig(dtype="float32"), sys.argv[1], torch.device("cpu"))
spec.tokenizer, spec.causal_lm(trainable=True), spec.empty_causal_lm(torch.float32)
assert not [name for name in sys.modules if name.split(".")[0] == "torchvision"]
"""


@pytest.mark.long
def test_text_needs_no_torchvision(folder: Path) -> None:
    """Where it is not installed, as here, and where it is: nothing imports it."""
    code = [sys.executable, "-c", NO_TORCHVISION, str(folder)]
    ended = subprocess.run(code, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_settings_of_the_language_part_are_overridden(folder: Path) -> None:
    spec = spec_of(folder, override_config={"max_position_embeddings": 128})
    assert spec.hf_config.max_position_embeddings == 128
    assert spec.causal_lm(trainable=False).config.max_position_embeddings == 128
