"""Replay of routing, by family: the engines' choices are those that the trainer computes with."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from tests.conftest import PROJECT
from tests.e2e.test_training import read_steps, train
from tests.zoo import proofs, vllm_proofs
from tests.zoo.families import FAMILIES, Family
from tests.zoo.proofs import ANSWERS, PROMPTS, Subject, prompt, vocabulary_of
from training.config import ModelConfig, RolloutConfig
from training.config.loader import load_config
from workers.hf_rollout import HFRollout
from workers.model.builder import ModelSpec
from workers.model.forward_settings import forward_settings
from workers.model.router_replay import (
    RouterPass,
    Routers,
    blocks_with_experts,
    check_routers,
    missing_choice,
    open_routers,
    routed,
)
from workers.rollout.base_rollout import BaseRollout, routed_experts
from workers.rollout.engine import Completion
from workers.rollout.episode import Row

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WITH_EXPERTS = (
    "qwen3_moe",
    "gpt_oss",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "kimi_k2",
    "minimax_m2",
    "ernie4_5_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "granite4",
    "nemotron_h",
    "jamba",
    "kimi_linear",
)
# Rows may be longer than a block of the cache of vLLM.
FAST = ("qwen3_moe", "deepseek_v3")


def marked(names: tuple[str, ...], fast: tuple[str, ...]) -> list[Any]:
    """Leaves all families but a few to `make zoo`."""
    params = []
    for name in names:
        marks = [pytest.mark.zoo]
        if name not in fast:
            marks.append(pytest.mark.slow)
        params.append(pytest.param(name, marks=marks))
    return params


@dataclass
class Replayed:
    """A family with an engine that tells its experts, and a trainer that heeds them."""

    subject: Subject
    routers: Routers

    def batch(self, answers: dict[int, Completion]) -> DataProto:
        """Lays answers out, with the choices of their tokens."""
        data = proofs.as_batch(self.subject, answers)
        rows = []
        for number, answer in sorted(answers.items()):
            row = Row(prompt_ids=self.subject.prompts[number])
            row.append_sampled(answer, turn=0)
            rows.append(row)
        width = data.batch["prompts"].shape[1]
        length = data.batch["responses"].shape[1]
        experts = routed_experts(rows, self.routers, width, length)
        data.batch["routed_experts"] = torch.from_numpy(experts)
        return data


def load_with_hf(family: Family, folder: Path) -> Replayed:
    config = ModelConfig(path=str(folder), dtype="float32", enable_gradient_checkpointing=False)
    spec = ModelSpec(config, str(family.make(folder)), torch.device("cpu"))
    rollout = RolloutConfig(
        dtype="float32",
        response_length=max(ANSWERS),
        max_model_len=max(PROMPTS) + max(ANSWERS),
        max_num_seqs=len(PROMPTS),
        enable_rollout_routing_replay=True,
    )
    return replayed(family, folder, spec, HFRollout(rollout, spec))


def replayed(family: Family, folder: Path, spec: ModelSpec, engine: BaseRollout) -> Replayed:
    lm = spec.causal_lm(trainable=True)
    subject = Subject(
        family=family,
        folder=folder,
        spec=spec,
        lm=lm,
        engine=engine,
        settings=forward_settings(spec.config, True, lm, spec.device),
        prompts=[prompt(length, vocabulary_of(lm)) for length in PROMPTS],
    )
    subject.sync()
    routers = open_routers(lm)
    check_routers(lm)
    assert routers == engine.routers
    return Replayed(subject, routers)


def check_choices(found: Replayed, answers: dict[int, Completion]) -> None:
    """Compares what an engine told with what each row alone chooses."""
    for number, answer in answers.items():
        ids = [*found.subject.prompts[number], *answer.token_ids][:-1]
        recorded = RouterPass()
        with routed(recorded), torch.no_grad():
            found.subject.lm(torch.tensor([ids]), use_cache=False)
        assert answer.routed_experts is not None
        expected = recorded.all_chosen().numpy()
        assert answer.routed_experts.shape == expected.shape
        assert (np.sort(answer.routed_experts) == np.sort(expected)).all()


@pytest.mark.parametrize("name", marked(WITH_EXPERTS, FAST))
def test_choices_that_are_told_are_those_of_each_row_and_are_replayed(
    name: str, tmp_path: Path
) -> None:
    found = load_with_hf(FAMILIES[name], tmp_path / "model")
    answers = found.subject.play(found.subject.rows)
    found.subject.lm.set_attn_implementation("eager")
    check_choices(found, answers)
    found.subject.settings = forward_settings(
        found.subject.spec.config, True, found.subject.lm, found.subject.spec.device
    )
    data = found.batch(answers)
    without = data.select()
    del without.batch["routed_experts"]
    plain = proofs.trainer_log_probs(found.subject, without)
    given = proofs.trainer_log_probs(found.subject, data)
    assert torch.equal(plain, given)
    # Others compute others.
    told = data.batch["routed_experts"]
    absent = told == missing_choice(told.dtype)
    moved = (told + 1) % found.routers.num_experts
    data.batch["routed_experts"] = torch.where(absent, told, moved)
    assert (proofs.trainer_log_probs(found.subject, data) - plain).abs().max() > 0.05


def test_adapters_train_with_choices_that_are_given(tmp_path: Path) -> None:
    """peft wraps what the experts are, and routers may have adapters of their own."""
    folder = FAMILIES["qwen3_moe"].make(tmp_path / "model")
    config = ModelConfig(
        path=str(folder), dtype="float32", enable_gradient_checkpointing=True, lora_rank=4
    )
    spec = ModelSpec(config, str(folder), torch.device("cpu"))
    lm = spec.causal_lm(trainable=True)
    routers = open_routers(lm)
    check_routers(lm)
    assert routers == Routers((0, 1), 2, 4)
    assert len(blocks_with_experts(lm)) == 2


def run(folder: Path, run_dir: Path, *settings: str) -> list[dict[str, Any]]:
    """Trains a tool game with two turns, and returns the metrics of its steps."""
    given = [
        "configs/quickstart.yaml",
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.model.use_remove_padding=true",
        f"agent.environment={{path: {PROJECT}/tests/zoo/game.py, cls: ZooGame}}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=4",
        "data.max_prompt_length=12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=1",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "agent.val_length=2",
        "trainer.logger=[file]",
        "trainer.deterministic=true",
        f"trainer.default_local_dir={run_dir}",
        *settings,
    ]
    train(load_config(given).config)
    return [line for line in read_steps(run_dir) if "actor/grad_norm" in line]


R3 = "actor_rollout_ref.actor.router_replay.mode=R3"
COMPARED = ("actor/grad_norm", "actor/pg_loss", "training/rollout_kl", "critic/score/mean")


def test_a_run_in_float32_is_the_same_with_replay_and_its_rows_lack_no_choice(
    tmp_path: Path,
) -> None:
    folder = FAMILIES["qwen3_moe"].make(tmp_path / "model")
    plain = run(folder, tmp_path / "plain")
    given = run(folder, tmp_path / "given", R3)
    assert len(plain) == len(given) == 2
    for one, other in zip(plain, given, strict=True):
        for name in COMPARED:
            assert one.get(name) == other.get(name), name
        assert "actor/router_replay_absent" not in one
        assert other["actor/router_replay_absent"] == 0
        # A step has one update, whose policy is the one that sampled.
        assert other["actor/router_replay_differing"] == 0


@pytest.mark.long
def test_two_ranks_are_one_with_replay(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3_moe"].make(tmp_path / "model")
    one = run(folder, tmp_path / "one", R3)
    two = run(folder, tmp_path / "two", R3, "trainer.n_gpus_per_node=2")
    for a, b in zip(one, two, strict=True):
        assert b["actor/router_replay_absent"] == 0
        for name in ("actor/grad_norm", "actor/router_replay_differing"):
            assert b[name] == pytest.approx(a[name], rel=1e-3), name


@pytest.mark.long
def test_a_run_with_replay_goes_on_bitwise_from_a_checkpoint(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3_moe"].make(tmp_path / "model")
    whole = run(folder, tmp_path / "whole", R3)
    first = ["trainer.save_freq=1", "trainer.total_training_steps=1"]
    run(folder, tmp_path / "parts", R3, *first)
    parts = run(folder, tmp_path / "parts", R3, "trainer.save_freq=1")
    for name in (*COMPARED, "actor/router_replay_differing"):
        assert parts[-1].get(name) == whole[-1].get(name), name


@pytest.mark.long
def test_a_run_whose_episodes_play_while_it_trains_has_all_choices(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3_moe"].make(tmp_path / "model")
    settings = ["trainer.async_level=1", "trainer.rollout_n_gpus=1", "trainer.deterministic=false"]
    steps = run(folder, tmp_path / "run", R3, *settings)
    assert all(step["actor/router_replay_absent"] == 0 for step in steps)


def test_an_engine_that_does_not_tell_is_refused_with_a_sentence(tmp_path: Path) -> None:
    problems = load_config(
        [R3, "actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.model.path=/model"],
        check=False,
    )
    from workers.sglang_rollout import SGLangRollout

    found = [each for each in SGLangRollout.check_config(problems.config) if "R3" in each]
    assert found == [
        "actor_rollout_ref.actor.router_replay.mode=R3: rollout.name=sglang does not say which "
        "experts it chose; use hf or vllm, or disabled"
    ]


# vLLM.


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_vllm_tells_its_choices_also_of_prompts_in_its_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.vllm_rollout_spmd import vLLMRollout

    def build_telling_engine(spec: ModelSpec) -> vLLMRollout:
        rollout = RolloutConfig(
            dtype=spec.config.dtype,
            response_length=max(ANSWERS),
            max_model_len=vllm_proofs.LONGEST,
            max_num_seqs=8,
            enable_rollout_routing_replay=True,
        )
        return vLLMRollout(rollout, spec)

    monkeypatch.setattr(vllm_proofs, "build_engine", build_telling_engine)
    family = FAMILIES[name].for_vllm()
    subject = vllm_proofs.load(family, family.make(tmp_path / "model"))
    found = Replayed(subject, open_routers(subject.lm))
    assert found.routers == subject.engine.routers
    subject.lm.set_attn_implementation("eager")
    # The second time prompts are found in the cache.
    for _ in range(2):
        check_choices(found, subject.play(subject.rows))
    # Requests that finish while others are scored.
    subject.engine.submit("0", subject.prompts[0], subject.engine.sampling({}))
    subject.engine.score([list(range(10, 40))] * 2)
    waiting: list[Completion] = []
    while not waiting:
        waiting = subject.engine.step()
    check_choices(found, {0: waiting[0]})


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_without_a_cache_of_prefixes_is_refused_on_cuda() -> None:
    from workers.rollout.vllm_routing import native_args, of_layers_with_experts

    assert native_args(True) == {"enable_return_routed_experts": True}
    with pytest.raises(ValueError, match=r"tells its experts only where it caches prefixes"):
        native_args(False)
    # What it tells of layers without experts is left out.
    told = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    kept = of_layers_with_experts(told, Routers((1, 2), 2, 8))
    assert kept.tolist() == told[:, 1:].tolist()
