"""The engines, SGLang's over HTTP: log-probs of what was sampled, seeds, stop reasons, masks, and
weights that are really replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.protocol import FIELDS, DataProto
from tests.sglang_server import Model, serving
from training.config import ModelConfig, RolloutConfig
from workers.hf_rollout import sample_tokens
from workers.model.builder import ModelSpec
from workers.ranks.memory import expandable_segments
from workers.rollout.base_rollout import BaseRollout, turn_seed
from workers.rollout.engine import Completion, Sampling
from workers.rollout.engine_registry import load_engine_class
from workers.rollout.episode import Episode, Row, Turn, TurnLimits
from workers.rollout.turn_loop import Batch, TurnLoop
from workers.weight_sync.manifest import iter_weights, weight_manifest

RESPONSE = 8
CONFIG = RolloutConfig(dtype="float32", response_length=RESPONSE, max_model_len=40, max_num_seqs=32)
PROMPTS = ["above 3 below 8", "above 0 below 3", "above 5 below 11"]


def build_engine(name: str, spec: ModelSpec, config: RolloutConfig = CONFIG) -> BaseRollout:
    if name == "vllm":
        pytest.importorskip("vllm")
    return load_engine_class(name)(config, spec)  # type: ignore[call-arg, arg-type]


def model_spec(path: Path, device: str | torch.device = "cpu") -> ModelSpec:
    return ModelSpec(
        ModelConfig(dtype="float32", enable_gradient_checkpointing=False),
        str(path),
        torch.device(device),
    )


MARKS = {"hf": (), "sglang": (), "vllm": pytest.mark.vllm}
ENGINES = [
    pytest.param((name, tying), marks=marks)
    for name, marks in MARKS.items()
    for tying in ("untied", "tied")
]


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request, tiny_task: Path, tied_model: Path
) -> Iterator[tuple[BaseRollout, nn.Module, ModelSpec]]:
    """Yields an engine, and a policy whose weights it has: one update away from the folder's."""
    name, tying = request.param
    # A machine for gpu-check may lack both.
    if package := {"vllm": "vllm", "sglang": "httpx"}.get(name):
        pytest.importorskip(package)
    spec = model_spec(tied_model if tying == "tied" else tiny_task / "model")
    lm = spec.causal_lm(trainable=True).eval()
    assert lm.config.tie_word_embeddings == (tying == "tied")
    perturb(lm, seed=0)
    with ExitStack() as server:
        config = CONFIG
        if name == "sglang":
            url = server.enter_context(serving(Model(spec, CONFIG.max_model_len)))
            config = replace(CONFIG, name=name, engine_kwargs={name: {"base_url": url}})
        rollout = build_engine(name, spec, config)
        rollout.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
        yield rollout, lm, spec


def perturb(lm: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(
                0.03 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
            )


def encode(spec: ModelSpec) -> list[list[int]]:
    def ids(text: str) -> list[int]:
        return spec.tokenizer.encode(f"<|im_start|> user {text} <|im_end|> <|im_start|> assistant")

    return [ids(text) for text in PROMPTS]


@torch.no_grad()
def policy_log_probs(
    lm: nn.Module, prompt: list[int], completion: Completion, temperature: float
) -> Tensor:
    ids = torch.tensor([prompt + completion.token_ids], device=lm.device)
    log_probs = (lm(ids).logits[0].float() / temperature).log_softmax(-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


def worst_difference(
    rollout: BaseRollout, lm: nn.Module, spec: ModelSpec, temperature: float
) -> float:
    sampling = Sampling(
        max_tokens=RESPONSE, temperature=temperature, stop_token_ids=spec.eos_token_ids
    )
    rollout.begin()
    prompts = encode(spec) * 4
    completions = rollout.inference(prompts, sampling)
    assert len({tuple(c.token_ids) for c in completions}) > 3
    return max(
        (policy_log_probs(lm, p, c, temperature) - torch.tensor(c.log_probs)).abs().max().item()
        for p, c in zip(prompts, completions, strict=True)
    )


@pytest.mark.seconds
def test_an_engine_that_casts_takes_what_was_cast_before_and_what_was_not_alike(engine) -> None:
    rollout, lm, spec = engine
    if not rollout.casts_weights:
        pytest.skip("it takes its own dtype alone")
    coarse = copy.deepcopy(lm).to(torch.bfloat16)
    ids = torch.randint(len(spec.tokenizer), (2, 12), generator=torch.Generator().manual_seed(0))
    scores = []
    for casts in (True, False):
        weights = dict(iter_weights(coarse, torch.float32, casts))
        dtypes = {tensor.dtype for tensor in weights.values()}
        assert dtypes == {torch.float32 if casts else torch.bfloat16}
        rollout.update_weights(iter(weights.items()), weight_manifest(coarse))
        scores.append(rollout.score(ids.tolist()))
    rollout.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
    assert scores[0] == scores[1]
    assert scores[0] != rollout.score(ids.tolist())


@pytest.mark.seconds
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_log_probs_agree_with_the_policy_after_every_update(engine, temperature) -> None:
    rollout, lm, spec = engine
    for seed in (1, 2):
        perturb(lm, seed)
        rollout.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
        assert worst_difference(rollout, lm, spec, temperature) < 1e-4


@pytest.mark.seconds
def test_log_probs_disagree_when_one_tensor_is_kept_back(engine) -> None:
    """Shows what the agreement test is worth: a tensor that misses an update is seen at once."""
    rollout, lm, spec = engine
    old = {name: tensor.clone() for name, tensor in iter_weights(lm, torch.float32)}
    perturb(lm, seed=3)
    for name in ("lm_head.weight", "model.layers.1.self_attn.k_proj.weight"):
        stale = ((n, old[n] if n == name else t) for n, t in iter_weights(lm, torch.float32))
        rollout.update_weights(stale, weight_manifest(lm))
        assert worst_difference(rollout, lm, spec, 1.0) > 1e-3
    rollout.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
    assert worst_difference(rollout, lm, spec, 1.0) < 1e-4


def test_a_stream_that_leaves_a_tensor_out_is_refused_before_anything_is_sent(engine) -> None:
    rollout, lm, spec = engine
    manifest = weight_manifest(lm)
    dropped = "model.layers.0.mlp.up_proj.weight"
    partial = {name: shape for name, shape in manifest.items() if name != dropped}

    def untouched() -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the stream was read")
        yield

    # vLLM's name is that of the fused matrix.
    with pytest.raises(
        ValueError, match=r"missing: model\.layers\.0\.mlp\.(gate_)?up_proj\.weight"
    ):
        rollout.update_weights(untouched(), partial)
    assert worst_difference(rollout, lm, spec, 1.0) < 1e-4


def test_the_same_seed_gives_the_same_sample_in_any_order(engine) -> None:
    rollout, _, spec = engine
    prompts = encode(spec)
    sampling = Sampling(max_tokens=RESPONSE, stop_token_ids=spec.eos_token_ids)

    def sample(order: list[int]) -> dict[int, list[int]]:
        rollout.begin()
        for i in order:
            rollout.submit(str(i), prompts[i % 3], replace(sampling, seed=i))
        found: dict[int, list[int]] = {}
        while len(found) < len(order):
            found |= {int(c.request_id): c.token_ids for c in rollout.step()}
        return found

    first = sample(list(range(9)))
    assert sample(list(range(8, -1, -1))) == first
    assert len({tuple(first[i]) for i in range(0, 9, 3)}) > 1, (
        "other seeds give other samples of the same prompt"
    )


def make_prompts(spec: ModelSpec, width: int = 14) -> DataProto:
    encoded = encode(spec)
    ids = torch.full((3, width), spec.pad_token_id)
    mask = torch.zeros(3, width, dtype=torch.long)
    for i, prompt in enumerate(encoded):
        ids[i, -len(prompt) :] = torch.tensor(prompt)
        mask[i, -len(prompt) :] = 1
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask},
        non_tensors={"uid": np.array(["a", "b", "c"], dtype=object)},
        meta_info={"global_steps": 1, "seed": 5},
    )


def test_generate_sequences_lays_out_the_documented_fields(engine) -> None:
    rollout, _, spec = engine
    prompts = make_prompts(spec)
    batch = rollout.generate_sequences(prompts)
    mask, valid = batch.batch["response_mask"].bool(), batch.batch["attention_mask"][:, 14:].bool()
    assert torch.equal(mask, valid), "in a single turn every response token was sampled"
    assert torch.equal(batch.batch["prompts"].long(), prompts.batch["input_ids"])
    assert "input_ids" not in batch.batch and "position_ids" not in batch.batch
    described = {
        name: str(tensor.dtype).removeprefix("torch.") for name, tensor in batch.batch.items()
    }
    assert described == {name: FIELDS[name].dtype for name in described}
    assert torch.equal(batch.batch["turn_ids"], torch.where(mask, 0, -1))
    assert list(batch.non_tensor_batch["uid"]) == ["a", "b", "c"]
    for row, stop_reason in enumerate(batch.non_tensor_batch["ending"]):
        count = int(mask[row].sum())
        last = batch.batch["responses"][row, count - 1].item()
        assert stop_reason == ("stop" if last in spec.eos_token_ids else "length")
        assert stop_reason == "stop" or count == RESPONSE
    # What others do with the global generators, in a thread of theirs or before, changes nothing.
    torch.manual_seed(8)
    np.random.seed(8)
    again = rollout.batch_generation(make_prompts(spec))
    assert torch.equal(again.batch["responses"], batch.batch["responses"]), (
        "seeded by (run, step, group, sample)"
    )
    other = make_prompts(spec)
    other.meta_info["global_steps"] = 2
    assert not torch.equal(
        rollout.generate_sequences(other).batch["responses"], batch.batch["responses"]
    )


@pytest.mark.seconds
def test_a_call_has_sampling_of_its_own_and_needs_no_seed(engine) -> None:
    rollout, lm, spec = engine
    prompts = make_prompts(spec)
    prompts.meta_info = {"eos_token_id": 0, "recompute_log_prob": False}
    first, second = (rollout.generate_sequences(prompts).batch["responses"] for _ in range(2))
    assert not torch.equal(first, second), "calls without a step are counted"
    with torch.no_grad():
        likeliest = [
            int(lm(torch.tensor([prompt])).logits[0, -1].argmax()) for prompt in encode(spec)
        ]
    assert (
        rollout.generate_sequences(prompts, temperature=0.0).batch["responses"][:, 0].tolist()
        == likeliest
    )
    short = rollout.generate_sequences(prompts, max_tokens=2, stop_token_ids=(), top_k=3).batch[
        "response_mask"
    ]
    assert short.sum(dim=1).tolist() == [2, 2, 2]
    with pytest.raises(
        ValueError, match=r"sampling='temprature' is unknown; allowed: max_tokens, .* 'temperature'"
    ):
        rollout.generate_sequences(prompts, temprature=0.5)


def test_every_turn_sample_group_step_and_attempt_has_a_sampling_seed_of_its_own() -> None:
    seeds = {
        turn_seed({"seed": 1, "global_steps": step}, Episode(group=group, sample=sample), turn)
        for step in (1, 2)
        for group in (0, 1)
        for sample in (0, 1)
        for turn in (0, 1, 2)
    }
    assert len(seeds) == 2 * 2 * 2 * 3
    turn = Turn(text="a", finish_reason="stop", tokens=1, anchor="")
    played = Episode(group=0, sample=0, turns=[turn, turn])
    info = {"seed": 1, "global_steps": 1}
    assert turn_seed(info, played) == turn_seed(info, played, 2)
    again = Episode(group=0, sample=0, attempt=1)
    assert turn_seed(info, again) not in seeds
    assert turn_seed(info | {"validate": True}, again) not in seeds


@pytest.mark.seconds
def test_every_request_carries_a_seed_of_its_own(engine) -> None:
    rollout, _, spec = engine
    recorder = copy.copy(rollout)
    seeds: list[int] = []

    def submit(request_id: str, prompt_ids: list[int], sampling: Sampling) -> None:
        seeds.append(sampling.seed)
        rollout.submit(request_id, prompt_ids, sampling)

    recorder.submit = submit  # type: ignore[method-assign]
    recorder.generate_sequences(make_prompts(spec))
    first = recorder.inference(encode(spec) * 2)
    assert len(set(seeds)) == len(seeds) == 9
    assert [c.token_ids for c in rollout.inference(encode(spec) * 2)] == [
        c.token_ids for c in first
    ]
    assert any(a.token_ids != b.token_ids for a, b in zip(first[:3], first[3:], strict=True)), (
        "one prompt, other places"
    )


def vllm_of(engine: tuple[BaseRollout, nn.Module, ModelSpec]) -> Any:
    """Returns the engine, where it is vLLM with an untied model: once is enough for these."""
    rollout, lm, _ = engine
    if type(rollout).__name__ != "vLLMRollout" or lm.config.tie_word_embeddings:
        pytest.skip("of vLLM, on one model")
    return rollout


def test_what_vllm_cuts_at_its_own_limit_is_aborted_and_not_an_answer(engine) -> None:
    rollout, (prompt, *_) = vllm_of(engine), encode(engine[2])
    rollout.submit("cut", prompt, Sampling(max_tokens=200))
    rollout.submit("whole", prompt, Sampling(max_tokens=3))
    done = {}
    while len(done) < 2:
        done |= {c.request_id: c for c in rollout.step()}
    assert len(done["cut"].token_ids) == CONFIG.max_model_len - len(prompt)
    assert done["cut"].finish_reason == "abort"
    assert done["whole"].finish_reason == "length"
    limits = TurnLimits(prompt_length=40, response_length=200, max_model_len=240)
    episode = Episode(group=0, sample=0, rows=[Row(prompt_ids=prompt)])
    TurnLoop(rollout).run(Batch([episode], lambda _: Sampling(max_tokens=200), [limits]))
    assert (episode.ending, episode.error) == ("engine_error", "the engine aborted the request")


def test_an_engine_with_a_shorter_limit_than_the_configs_is_refused(engine) -> None:
    vllm_of(engine)
    config = replace(CONFIG, engine_kwargs={"vllm": {"max_model_len": 20}})
    with pytest.raises(
        ValueError, match=r"engine_kwargs.vllm.max_model_len is under rollout.max_model_len=40"
    ):
        build_engine("vllm", engine[2], config)


def test_prefixes_are_not_kept_where_requests_still_run(engine) -> None:
    rollout, prompt = vllm_of(engine), encode(engine[2])[0]
    for name in ("7", "8"):
        rollout.submit(name, prompt, Sampling(max_tokens=6))
    rollout.step()
    with pytest.raises(RuntimeError, match=r"requests run; .* \['7', '8'\]"):
        rollout.begin()
    while rollout.max_tokens_of:
        rollout.step()
    rollout.begin()


def test_vllm_keeps_to_the_devices_that_the_rank_sees(engine, monkeypatch) -> None:
    shared = copy.copy(vllm_of(engine))
    shared.config = replace(CONFIG, tensor_model_parallel_size=2)
    for devices, disabled in ((1, True), (2, False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        assert shared.engine_args(engine[2])["disable_custom_all_reduce"] is disabled


@pytest.mark.vllm
def test_only_the_shared_memory_that_the_engine_made_loses_its_name() -> None:
    pytest.importorskip("vllm")
    from workers.vllm_rollout_spmd import nameless_segments

    users = SharedMemory(create=True, size=8)
    with nameless_segments():
        engines = SharedMemory(create=True, size=8)
    try:
        SharedMemory(name=users.name).close()
        with pytest.raises(FileNotFoundError):
            SharedMemory(name=engines.name)
    finally:
        users.close()
        users.unlink()
        engines.close()
        resource_tracker.unregister(f"/{engines.name}", "shared_memory")


def test_memory_grows_in_place_in_updates_only_and_other_settings_stay() -> None:
    """The settings exist in a build without CUDA, too; nothing is allocated by them there."""
    before = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:512")
    try:
        with expandable_segments(torch.device("cpu")):
            assert torch._C._accelerator_getAllocatorSettings() == "max_split_size_mb:512"
        for _ in range(2):
            with expandable_segments(torch.device("cuda")):
                settings = torch._C._accelerator_getAllocatorSettings()
                assert settings == "max_split_size_mb:512,expandable_segments:True"
            settings = torch._C._accelerator_getAllocatorSettings()
            assert settings == "max_split_size_mb:512,expandable_segments:False"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def test_validation_is_greedy_by_default(engine) -> None:
    rollout, lm, spec = engine
    prompts = make_prompts(spec)
    prompts.meta_info["validate"] = True
    batch = rollout.generate_sequences(prompts)
    first = batch.batch["responses"][:, 0]
    for row, prompt in enumerate(encode(spec)):
        with torch.no_grad():
            assert lm(torch.tensor([prompt])).logits[0, -1].argmax() == first[row]


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (2, 1.0), (-1, 0.6)])
def test_sampled_frequencies_follow_the_filtered_distribution(top_k, top_p) -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    kept = {(-1, 1.0): 4, (2, 1.0): 2, (-1, 0.6): 2}[top_k, top_p]
    expected = probs[:kept] / probs[:kept].sum()
    logits = probs.log().repeat(20_000, 1)
    generators = [torch.Generator().manual_seed(0)] * 20_000
    tokens, log_probs = sample_tokens(
        logits, Sampling(max_tokens=1, top_k=top_k, top_p=top_p), generators
    )
    frequencies = torch.bincount(tokens, minlength=4)[:kept] / 20_000
    torch.testing.assert_close(frequencies, expected, atol=0.015, rtol=0)
    torch.testing.assert_close(log_probs, expected.log()[tokens], atol=1e-5, rtol=0)
