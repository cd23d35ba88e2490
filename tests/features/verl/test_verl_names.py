"""The room of verl's names: configs, presets, packed tensors, registries, small helpers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

import features.verl.core_algos as core_algos
from data.protocol import DataProto
from features.verl import protocol, torch_functional, utils
from features.verl.config import (
    ActorConfig,
    AlgoConfig,
    BaseConfig,
    FSDPActorConfig,
    RolloutCorrectionConfig,
    omega_conf_to_dataclass,
)
from features.verl.rollout_corr import (
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_add_to_batch,
)
from training import config as sections
from training.config import AlgorithmConfig
from training.core_algos import registry
from training.rollout_correction import correct_as, rejection_limits


@dataclass
class Settings(BaseConfig):
    """A config of a user's own."""

    _mutable_fields = frozenset({"size"})
    size: int = 1
    name: str = "a"


def test_a_config_of_ones_own_is_read_by_key_and_set_once() -> None:
    settings = Settings(name="b")
    assert settings["name"] == settings.get("name") == "b" and settings.get("none", 3) == 3
    assert list(settings) == ["_target_", "size", "name"] and len(settings) == 3
    assert dict(settings)["size"] == 1
    settings.size = 2
    with pytest.raises(FrozenInstanceError, match=r"Settings\.name is set already"):
        settings.name = "c"


def test_targets_of_verl_are_the_classes_here() -> None:
    given = {
        "_target_": "verl.trainer.config.AlgoConfig",
        "gamma": 0.9,
        "kl_ctrl": {"_target_": "verl.trainer.config.KLControlConfig", "kl_coef": 0.01},
    }
    for form in (given, OmegaConf.create(given)):
        config = omega_conf_to_dataclass(form)
        assert isinstance(config, AlgoConfig) and config.gamma == 0.9
        assert config.kl_ctrl.kl_coef == 0.01 and "gamma" in list(config)
    assert omega_conf_to_dataclass({"lam": 0.5}, AlgorithmConfig).lam == 0.5
    own = omega_conf_to_dataclass({"_target_": f"{__name__}.Settings", "size": 4})
    assert isinstance(own, Settings) and own.size == 4
    assert omega_conf_to_dataclass(config) is config and omega_conf_to_dataclass({}) is None
    with pytest.raises(ValueError, match="has no _target_: add it, or give dataclass_type"):
        omega_conf_to_dataclass({"gamma": 1.0})
    with pytest.raises(ValueError, match="McoreActorConfig: nothing here has that name"):
        omega_conf_to_dataclass({"_target_": "verl.workers.config.McoreActorConfig"})


def test_an_actors_config_stands_where_the_section_does() -> None:
    config = FSDPActorConfig(strategy="fsdp", rollout_n=4, use_torch_compile=False)
    assert isinstance(config, sections.ActorConfig) and isinstance(config, ActorConfig)
    assert dict(config)["rollout_n"] == 4 and len(config) == len(list(config))
    with pytest.raises(ValueError, match="clip_rato"):
        ActorConfig(clip_rato=0.3)
    with pytest.raises(AttributeError):
        config.clip_ratio = 0.5  # type: ignore[misc]


PRESETS = [name for name in vars(RolloutCorrectionConfig.__mro__[1]) if not name.startswith("_")]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_correction_that_runs(name: str) -> None:
    config = getattr(RolloutCorrectionConfig, name)()
    assert isinstance(config, sections.RolloutCorrectionConfig)
    assert config.bypass_mode is ("bypass" in name or name.startswith("pg_"))
    old, engine, mask = torch.zeros(2, 3), torch.full((2, 3), -0.1), torch.ones(2, 3)
    weights, kept, _ = correct_as(config, old, engine, mask)
    weighs = {"disabled": False, "ppo_is_bypass": True, "pg_is": True}
    has_weights = any(word in name for word in ("_is", "tis", "icepop"))
    assert (weights is not None) is weighs.get(name, has_weights)
    rejects = "_rs" in name
    assert (config.rollout_rs is not None) is rejects
    if rejects:
        # The ratios are e^0.1: outside each range of the geometric mean, inside the others.
        is_geometric = "geo" in name or name == "pg_rs"
        assert bool(kept.any()) is not is_geometric
    assert AlgoConfig(rollout_correction=config).rollout_correction == config


def test_there_are_the_presets_of_both_versions() -> None:
    assert len(PRESETS) == 22
    default = RolloutCorrectionConfig()
    assert default.rollout_is == "sequence" and default.rollout_is_threshold == 2.0
    older = RolloutCorrectionConfig.decoupled_seq_is_rs(3.0, 2.0, 0.25)
    limits = rejection_limits(older.rollout_rs, older.rollout_rs_threshold)
    assert limits["seq_sum_k1"] == pytest.approx((np.log(0.25), np.log(2.0)))


def test_tensors_come_back_bit_for_bit() -> None:
    half = torch.tensor([[1.5, float("nan")], [0.0, -2.0]], dtype=torch.bfloat16)
    dtype, shape, content = protocol.serialize_single_tensor(half)
    assert (dtype, shape, len(bytes(content))) == ("bfloat16", (2, 2), 8)
    back = protocol.deserialize_single_tensor((dtype, shape, content))
    assert torch.equal(back.view(torch.int16), half.view(torch.int16))
    nested = torch.nested.as_nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.strided)
    packed = protocol.serialize_tensordict(
        TensorDict({"a": half, "n": nested, "m": half > 0}, batch_size=[2])
    )
    again = protocol.deserialize_tensordict(packed)
    assert again.batch_size == (2,) and again["m"].tolist() == (half > 0).tolist()
    assert [part.tolist() for part in again["n"].unbind()] == [[0, 1], [0, 1, 2]]


def test_dicts_unite_unless_they_differ() -> None:
    arrays = {"a": np.array([1.0, np.nan])}
    assert protocol.union_numpy_dict(arrays, {"b": np.array([2])}).keys() == {"a", "b"}
    protocol.union_numpy_dict(arrays, {"a": np.array([1.0, np.nan])})
    with pytest.raises(AssertionError, match="'a'"):
        protocol.union_numpy_dict(arrays, {"a": np.array([1.0, 2.0])})
    assert utils.union_two_dict({"x": 1}, {"x": 1, "y": 2}) == {"x": 1, "y": 2}
    with pytest.raises(AssertionError, match="'x'"):
        utils.union_two_dict({"x": 1}, {"x": 2})
    assert protocol.list_of_dict_to_dict_of_list([{"k": 1}, {"k": 2}]) == {"k": [1, 2]}
    gathered: dict[str, list] = {}
    for number in (1, 2):
        utils.append_to_dict(gathered, {"loss": number}, prefix="actor/")
    assert gathered == {"actor/loss": [1, 2]}


def test_a_registry_that_is_given_anew_is_the_one_that_is_looked_into(monkeypatch) -> None:
    monkeypatch.setattr(registry, "ADV_ESTIMATOR_REGISTRY", registry.ADV_ESTIMATOR_REGISTRY)
    core_algos.ADV_ESTIMATOR_REGISTRY = {"mine": lambda x: 2 * x}
    assert core_algos.get_adv_estimator_fn("mine")(3) == 6
    core_algos.register_adv_est("other")(len)
    assert core_algos.ADV_ESTIMATOR_REGISTRY.keys() == {"mine", "other"}
    for table in (registry.ESTIMATOR_NEEDS, registry.ESTIMATOR_FACTS):
        table.pop("other")
    with pytest.raises(ValueError, match="is unknown; allowed: mine, other"):
        core_algos.get_adv_estimator_fn("gae")


def test_estimators_leave_out_arguments_that_they_do_not_know() -> None:
    rewards, mask = torch.tensor([[1.0], [3.0]]), torch.ones(2, 1)
    index = np.array(["a", "a"])
    advantages, _ = core_algos.compute_rloo_outcome_advantage(
        rewards, mask, index=index, config=None, values=rewards, more=1
    )
    assert advantages.tolist() == [[-2.0], [2.0]]
    assert core_algos.agg_loss(rewards, mask, "token-mean").item() == 2.0, "the rest is there"


def test_a_batch_is_corrected_in_place() -> None:
    old, engine = torch.zeros(2, 2), torch.tensor([[0.0, -3.0], [0.0, 0.0]])
    tensors = {"old_log_probs": old, "rollout_log_probs": engine, "response_mask": old + 1}
    for config in (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
        sections.RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0"),
    ):
        batch = DataProto.from_dict(tensors=dict(tensors))
        batch, metrics = compute_rollout_correction_and_add_to_batch(batch, config)
        assert batch.batch["response_mask"].tolist() == [[1, 0], [1, 1]]
        assert "rollout_is_weights" not in batch.tensors()
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.25
    measured = compute_rollout_corr_metrics_from_logprobs(old, engine, old + 1)
    assert measured["rollout_corr/log_ppl_diff_min"] == pytest.approx(-1.5)


def test_groups_are_numbered_and_measured() -> None:
    assert utils.as_torch_index(np.array(["b", "a", "b"], dtype=object)).tolist() == [1, 0, 1]
    assert utils.as_torch_index(torch.tensor([2, 0])).tolist() == [2, 0]
    groups = torch.tensor([0, 0, 1])
    mean, std, count = utils.group_mean_std(torch.tensor([1.0, 3.0, 7.0]), groups)
    assert mean.tolist() == [2.0, 0.0] and count.tolist() == [2.0, 1.0]
    assert std.tolist() == pytest.approx([2**0.5, 1.0])


def test_random_masks_have_padding_around_one_run_of_ones() -> None:
    np.random.seed(0)
    mask = utils.create_random_mask(torch.zeros(50, 20), 0.8, 0.2, 0.3)
    lengths = mask.sum(1)
    assert mask.dtype == torch.int64 and lengths.min() >= 6 and lengths.max() <= 16
    steps = mask.diff(dim=1, prepend=torch.zeros(50, 1), append=torch.zeros(50, 1))
    assert (steps == 1).sum(1).tolist() == [1] * 50, "one run of ones a row"
    assert mask[:, :5].argmax(1).max() <= 4
    positions = utils.compute_position_id_with_mask(torch.tensor([[0, 1, 1, 0]]))
    assert positions.tolist() == [[0, 0, 1, 1]]
    with pytest.raises(ValueError, match="lower the ratios"):
        utils.create_random_mask(torch.zeros(1, 10), 0.9, 0.5)


def test_log_probs_of_a_response_are_those_of_the_logits_before_it() -> None:
    logits = torch.randn(2, 5, 7)
    ids = torch.randint(0, 7, (2, 5))
    given = torch_functional.log_probs_from_logits_response(ids, logits, 2)
    expected = logits.log_softmax(-1)[:, 2:4].gather(-1, ids[:, 3:, None]).squeeze(-1)
    torch.testing.assert_close(given, expected)
    whole = torch_functional.entropy_from_logits_with_chunking(logits[0], chunk_size=2)
    torch.testing.assert_close(whole, torch_functional.entropy_from_logits(logits[0]))
    squares = torch_functional.calculate_sum_pi_squared_from_logits(torch.zeros(1, 4))
    assert squares.item() == pytest.approx(0.25)
    assert torch_functional.gather_from_labels(logits, ids).shape == (2, 5)


def test_a_tokenizer_gets_a_token_for_padding(tiny_task) -> None:
    tokenizer = utils.hf_tokenizer(tiny_task / "model")
    assert tokenizer.pad_token_id is not None
    tokenizer.pad_token = None
    utils.set_pad_token_id(tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert utils.hf_processor(str(tiny_task / "model")) is None
