"""The proofs of every family: four in each run of the tests, all by `make zoo`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.conftest import PROJECT
from tests.e2e.test_training import read_steps, train
from tests.needed_features import require_features
from tests.zoo import proofs
from tests.zoo.families import FAMILIES, FAST, REFUSED
from tests.zoo.proofs import ENGINE_TOLERANCE, ROW_TOLERANCE, Subject
from training.config import ModelConfig, RolloutConfig
from training.config.loader import load_config
from training.config.row_layout import describe_layout, names_a_state
from workers.model.attention import NAME
from workers.model.builder import ModelSpec
from workers.model.forward_settings import forward_settings
from workers.model.packing_check import (
    check_forward,
    check_shared_sequences,
    check_training,
    keeps_state,
)
from workers.rollout.cached_rows import may_pad_rows
from workers.rollout.kv_cache import kv_cache_bytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def entries() -> list[object]:
    """Lists the families; all but a few are slow."""
    params = []
    for name in FAMILIES:
        marks = [pytest.mark.zoo]
        if name not in FAST:
            marks.append(pytest.mark.slow)
        params.append(pytest.param(name, marks=marks))
    return params


@pytest.fixture(scope="module", params=entries())
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A family's policy and engine, with one set of weights."""
    family = FAMILIES[request.param]
    folder: Path = tmp_path_factory.mktemp("zoo") / family.name
    return Subject.load(family, family.make(folder))


def test_a_row_beside_longer_ones_is_the_row_alone(subject: Subject) -> None:
    assert proofs.row_beside_others_is_row_alone(subject) <= ROW_TOLERANCE


def test_the_engine_has_the_trainers_log_probs_before_and_after_an_update(
    subject: Subject,
) -> None:
    assert proofs.engine_is_trainer(subject) <= ENGINE_TOLERANCE
    assert not proofs.update(subject)
    assert proofs.engine_is_trainer(subject) > ENGINE_TOLERANCE, "the update moved nothing"
    subject.sync()
    assert proofs.engine_is_trainer(subject) <= ENGINE_TOLERANCE


# A bias before a state, which padding then reaches.
BIASES = {
    "granite4": {"mamba_proj_bias": True},
    "lfm2": {"conv_bias": True},
    "bamba": {"mamba_proj_bias": True},
}


@pytest.mark.parametrize("name", BIASES)
def test_padding_that_reaches_a_state_is_found_and_rows_of_one_length_play_together(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = FAMILIES[name]
    biased = replace(family, settings=family.settings | BIASES[name])
    subject = Subject.load(biased, biased.make(tmp_path / name))
    assert subject.engine.pads_rows is False
    assert "padding on the left reaches the state of its layers" in caplog.text
    assert proofs.row_beside_others_is_row_alone(subject) <= ROW_TOLERANCE
    # Seen by the same proof where the trial is left out.
    subject.engine.pads_rows = True
    assert proofs.row_beside_others_is_row_alone(subject) > ROW_TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_whose_numbers_do_not_hold_is_refused_at_the_start(
    name: str, tmp_path: Path
) -> None:
    family = REFUSED[name]
    with pytest.raises(ValueError, match=f"cannot play model type '{family.config().model_type}'"):
        Subject.load(family, family.make(tmp_path / name))


def test_a_cache_that_gives_other_numbers_is_refused_with_the_difference(tmp_path: Path) -> None:
    family = FAMILIES["qwen3"]
    subject = Subject.load(family, family.make(tmp_path / "qwen3"))
    module = subject.engine.module
    forward = module.forward

    def forgets_its_cache(**inputs: Any) -> Any:
        output = forward(**inputs)
        if inputs.get("use_cache"):
            output.logits = output.logits + 0.1 * output.logits.roll(1, dims=-1)
        return output

    module.forward = forgets_its_cache
    with pytest.raises(
        ValueError, match=r"cannot play model type 'qwen3'.* a row by itself is \S+ "
    ):
        may_pad_rows(module)


def test_rows_as_they_are_laid_out_have_the_log_probs_that_each_has_alone(
    subject: Subject,
) -> None:
    assert proofs.trainer_is_row_alone(subject) <= ENGINE_TOLERANCE
    # Here no kernel takes boundaries; see below.
    assert not (subject.family.keeps_state and subject.settings.pack_rows)
    assert keeps_state(subject.lm.config) == subject.family.keeps_state


def test_training_computes_what_reading_computes(subject: Subject) -> None:
    assert proofs.training_is_reading(subject) <= ROW_TOLERANCE


def test_a_run_that_goes_on_from_a_checkpoint_ends_bitwise_as_one_that_was_not_stopped(
    subject: Subject, tmp_path: Path
) -> None:
    own = Subject.load(subject.family, subject.folder)
    assert not proofs.resumed_differs(own, tmp_path)


def test_plain_transformers_loads_the_export_and_computes_the_policy(
    subject: Subject, tmp_path: Path
) -> None:
    require_features("export")
    own = Subject.load(subject.family, subject.folder)
    assert proofs.exported_is_policy(own, tmp_path / "run", tmp_path / "out") <= ROW_TOLERANCE


def test_adapters_learn_and_merged_weights_compute_what_they_do(subject: Subject) -> None:
    pytest.importorskip("peft")
    share, difference = proofs.adapters_are_merged(subject.family, subject.folder)
    assert 0.3 < share < 1
    assert difference <= ENGINE_TOLERANCE


def test_a_layer_whose_weight_is_read_past_its_adapter_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = str(FAMILIES["jamba"].make(tmp_path / "jamba"))
    settings = {"lora_rank": 4, "target_modules": ["dt_proj", "x_proj"]}
    spec = ModelSpec(ModelConfig(path=folder, **settings), folder, torch.device("cpu"))
    with pytest.raises(ValueError, match="reads the weight of dt_proj past the adapters"):
        spec.causal_lm(trainable=True)


def test_adapters_that_a_kernel_reads_past_are_found_before_training(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = FAMILIES["qwen3"].make(tmp_path / "qwen3")
    subject = Subject.load(FAMILIES["qwen3"], folder, lora_rank=4)
    for layer in subject.lm.base_model.layers:
        adapted = layer.mlp.up_proj
        adapted.forward = adapted.base_layer.forward
    with pytest.raises(ValueError, match="computes nothing with the adapters of up_proj"):
        check_training(subject.lm)


def test_the_memory_of_a_run_is_planned(subject: Subject) -> None:
    require_features("memory_plan")
    assert proofs.plan_is_made(subject)


def test_the_cache_of_layers_with_heads_of_two_sizes_is_their_sum(tmp_path: Path) -> None:
    spec = ModelSpec(
        ModelConfig(dtype="float32"), str(FAMILIES["gemma4"].make(tmp_path)), torch.device("cpu")
    )
    rollout = RolloutConfig(dtype="float32", max_num_seqs=2)
    # Keys and values of two heads: 32 numbers in one layer, 64 in the other.
    of_a_token = 4 * (2 * 2 * 32 + 2 * 2 * 64)
    assert kv_cache_bytes(spec, rollout, max_model_len=64, block=16) == 2 * 64 * of_a_token


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2", "qwen3_5", "nemotron_h"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_model_that_keeps_a_state_are_padded_and_a_line_says_why(
    name: str, dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = FAMILIES[name].make(tmp_path / name)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    settings = forward_settings(ModelConfig(path=str(folder)), True, lm, torch.device("cpu"))
    assert (settings.pack_rows, settings.key_cost, settings.strip_padding) == (False, None, True)
    assert "rows are padded on the right, not packed: a packed row's states d" in caplog.text
    assert "the prompt of a group is computed anew for each of its rows" in caplog.text


def test_a_state_that_leaks_over_packed_rows_is_found(tmp_path: Path) -> None:
    subject = Subject.load(FAMILIES["qwen3_5"], FAMILIES["qwen3_5"].make(tmp_path / "model"))
    subject.lm.set_attn_implementation(NAME)
    subject.settings = replace(subject.settings, pack_rows=True, tells_boundaries=True)
    assert proofs.trainer_is_row_alone(subject) > 100 * ENGINE_TOLERANCE


def per_row(
    compute: Callable[..., Any], lengths_of: Callable[[dict[str, Any]], list[int]], dim: int
) -> Callable[..., Any]:
    """Makes a kernel that heeds boundaries of one that does not, by calling it for each row."""

    def heed(*tensors: Any, **options: Any) -> Any:
        lengths = lengths_of(options)
        if not lengths:
            return compute(*tensors, **options)
        first, *weights = tensors
        parts = []
        cut = {
            name: each.split(lengths, dim)
            for name, each in options.items()
            if isinstance(each, torch.Tensor) and name in ("g", "beta")
        }
        sequences = [first, *(weights if cut else [])]
        pieces = [each.split(lengths, dim) for each in sequences]
        fixed = [] if cut else weights
        for number in range(len(lengths)):
            own = options | {name: each[number] for name, each in cut.items()}
            parts.append(compute(*[each[number] for each in pieces], *fixed, **own))
        if isinstance(parts[0], tuple):
            return torch.cat([part[0] for part in parts], dim), None
        return torch.cat(parts, dim)

    return heed


def test_kernels_that_heed_boundaries_have_packed_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_numbers(options: dict[str, Any]) -> list[int]:
        numbers = options.get("seq_idx")
        return [] if numbers is None else numbers[0].bincount().tolist()

    def by_boundaries(options: dict[str, Any]) -> list[int]:
        boundaries = options.get("cu_seqlens")
        return [] if boundaries is None else boundaries.diff().tolist()

    convolution = per_row(modeling_qwen3_5.causal_conv1d_fn, by_numbers, dim=2)
    delta_rule = per_row(modeling_qwen3_5.torch_chunk_gated_delta_rule, by_boundaries, dim=1)
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", convolution)
    family = FAMILIES["qwen3_5"]
    folder = family.make(tmp_path / "model")
    # The state of one of the two layers still leaks.
    assert not Subject.load(family, folder).settings.pack_rows
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", delta_rule)
    subject = Subject.load(family, folder)
    settings = subject.settings
    assert (settings.pack_rows, settings.tells_boundaries, settings.key_cost) == (True, True, None)
    assert proofs.trainer_is_row_alone(subject) <= ENGINE_TOLERANCE
    with pytest.raises(ValueError, match="hand a state from token to token"):
        check_shared_sequences(subject.lm, 2)


def test_padding_that_is_kept_does_not_reach_a_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    family = FAMILIES["granite4"]
    biased = replace(family, settings=family.settings | BIASES["granite4"])
    subject = Subject.load(biased, biased.make(tmp_path / "model"))
    config = ModelConfig(path="here", dtype="float32", use_remove_padding=False)
    subject.settings = forward_settings(config, False, subject.lm, torch.device("cpu"))
    assert "rows are padded on the right alone" in caplog.text
    assert proofs.trainer_is_row_alone(subject) <= ENGINE_TOLERANCE
    subject.settings = replace(subject.settings, strip_padding=False)
    assert proofs.trainer_is_row_alone(subject) > 10 * ENGINE_TOLERANCE


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("qwen3", {}, "are packed one behind the other without padding, and the beginning"),
        ("falcon_h1", {}, "are padded on the right, as its layers keep a state. They are"),
        ("qwen3", {"use_remove_padding": False}, "keep their padding"),
        ("lfm2", {"use_remove_padding": False}, "are padded on the right alone"),
    ],
)
def test_explain_says_how_rows_are_laid_out(
    name: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = ModelConfig(path=str(FAMILIES[name].make(tmp_path / name)), **settings)
    assert said in (describe_layout(config, share_prompts=True) or "")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_is_named_by_the_configuration_file_of_each_family(name: str) -> None:
    family = FAMILIES[name]
    config = family.config()
    content = json.loads(config.to_json_string(use_diff=False))
    content = content.get("text_config", content)
    assert names_a_state(content) == keeps_state(config) == family.keeps_state


def test_a_model_whose_states_depend_on_what_follows_is_refused_with_the_difference(
    tmp_path: Path,
) -> None:
    lm = AutoModelForCausalLM.from_pretrained(FAMILIES["qwen3"].make(tmp_path / "model"))
    norm = lm.base_model.norm
    lm.base_model.norm = MixesAlongRows(norm)
    with pytest.raises(ValueError, match=r"depend on tokens behind it \(by \d\S+ of the largest"):
        check_forward(lm.eval())


class MixesAlongRows(nn.Module):
    """Normalises states, and adds the mean of a row's."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Mixes states (B, L, hidden)."""
        states = self.norm(states)
        return states + states.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_a_tensor_that_the_sync_leaves_out_is_found_whichever_it_is(
    name: str, tmp_path: Path
) -> None:
    subject = Subject.load(FAMILIES[name], FAMILIES[name].make(tmp_path / name))
    before = {key: each.clone() for key, each in subject.engine.module.state_dict().items()}
    proofs.update(subject)
    subject.sync()
    live = subject.engine.module.state_dict()
    for key, stale in before.items():
        fresh = live[key].clone()
        live[key].copy_(stale)
        assert proofs.engine_is_trainer(subject) > ENGINE_TOLERANCE, key
        live[key].copy_(fresh)
    assert proofs.engine_is_trainer(subject) <= ENGINE_TOLERANCE


def test_an_order_of_experts_that_differs_is_found(tmp_path: Path) -> None:
    subject = Subject.load(FAMILIES["qwen3_moe"], FAMILIES["qwen3_moe"].make(tmp_path / "model"))
    for key, tensor in subject.engine.module.state_dict().items():
        if "experts" in key:
            tensor.copy_(tensor.roll(1, 0))
    assert proofs.engine_is_trainer(subject) > 10 * ENGINE_TOLERANCE


def test_a_run_trains_a_step_without_alarms_of_its_engine(subject: Subject, tmp_path: Path) -> None:
    settings = [
        "configs/quickstart.yaml",
        f"actor_rollout_ref.model.path={subject.folder}",
        "actor_rollout_ref.model.use_remove_padding=true",
        f"agent.environment={{path: {PROJECT}/tests/zoo/game.py, cls: ZooGame}}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=4",
        "data.max_prompt_length=12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=1",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "agent.val_length=2",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    train(load_config(settings).config)
    (step,) = [line for line in read_steps(tmp_path / "run") if "actor/grad_norm" in line]
    assert step["training/rollout_probs_diff_max"] <= ENGINE_TOLERANCE
    assert step["actor/grad_norm"] > 0
