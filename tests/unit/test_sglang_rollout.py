"""SGLang as rollout engine: what it is asked, by HTTP and by `sglang.Engine`'s methods, and what
comes of its answers.

The tests of all engines (test_rollout.py) run over a server, too; here stand the cases that only
SGLang has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.sglang_server import Model, engine_class, serving
from tests.unit.test_rollout import (
    CONFIG,
    RESPONSE,
    encode,
    make_prompts,
    model_spec,
    perturb,
    worst_difference,
)
from workers import sglang_rollout
from workers.model.builder import ModelSpec
from workers.rollout.engine import Completion, Sampling
from workers.sglang_rollout import SGLangRollout
from workers.weight_sync.manifest import iter_weights, weight_manifest


@pytest.fixture(scope="module")
def spec(tiny_task: Path) -> ModelSpec:
    return model_spec(tiny_task / "model")


@pytest.fixture
def model(spec: ModelSpec) -> Model:
    return Model(spec, CONFIG.max_model_len)


@pytest.fixture
def server(model: Model) -> Iterator[str]:
    with serving(model) as url:
        yield url


def asking(spec: ModelSpec, url: str, **own: Any) -> SGLangRollout:
    return SGLangRollout(
        replace(CONFIG, name="sglang", engine_kwargs={"sglang": {"base_url": url, **own}}), spec
    )


def finished(rollout: SGLangRollout) -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    while rollout.running:
        found |= {completion.request_id: completion for completion in rollout.step()}
    return found


def verbs(model: Model) -> list[str]:
    return [verb for verb, _ in model.asked]


@pytest.mark.seconds
def test_what_the_server_cuts_or_refuses_is_aborted_and_not_an_answer(spec, server, caplog) -> None:
    rollout, prompt = asking(spec, server), encode(spec)[0]
    rollout.submit("cut", prompt, Sampling(max_tokens=200))
    rollout.submit("whole", prompt, Sampling(max_tokens=3))
    rollout.submit("refused", prompt * 9, Sampling(max_tokens=3))
    with caplog.at_level(logging.WARNING):
        done = finished(rollout)
    assert {name: own.finish_reason for name, own in done.items()} == {
        "cut": "abort",
        "whole": "length",
        "refused": "abort",
    }
    assert len(done["cut"].token_ids) > 3 and not done["refused"].token_ids
    assert "is longer than the context (40 tokens)" in caplog.text


@pytest.mark.seconds
def test_a_request_that_is_given_up_ends_and_the_others_go_on(spec, model, server) -> None:
    rollout, prompt = asking(spec, server), encode(spec)[0]
    model.hang = True
    rollout.submit("given up", prompt, Sampling(max_tokens=3))
    rollout.submit("goes on", prompt, Sampling(max_tokens=3))
    rollout.abort("given up")
    rollout.abort("never heard of")
    model.hang = False
    done = finished(rollout)
    assert [done[name].finish_reason for name in ("given up", "goes on")] == ["abort", "length"]
    assert not done["given up"].token_ids and len(done["goes on"].token_ids) == 3
    assert verbs(model).count("abort_request") == 1


@pytest.mark.seconds
def test_end_of_turn_tokens_stop_only_where_they_are_asked_for(spec, model, server) -> None:
    """SGLang's ignore_eos switches stop_token_ids off as well; without it the model's end stops."""
    rollout, prompt = asking(spec, server), encode(spec)[0]
    rollout.submit(
        "ends",
        prompt,
        Sampling(max_tokens=RESPONSE, stop_token_ids=tuple(range(len(spec.tokenizer)))),
    )
    rollout.submit("goes on", prompt, Sampling(max_tokens=RESPONSE))
    assert [len(own.token_ids) for _, own in sorted(finished(rollout).items())] == [1, RESPONSE]
    asked = [body["sampling_params"] for verb, body in model.asked if verb == "generate"]
    assert sorted((params["ignore_eos"], len(params["stop_token_ids"])) for params in asked) == [
        (False, len(spec.tokenizer)),
        (True, 0),
    ]


@pytest.mark.seconds
def test_weights_come_in_buckets_once_for_each_rank_of_the_server(
    spec, model, server, monkeypatch
) -> None:
    monkeypatch.setattr(sglang_rollout, "BUCKET_BYTES", 40_000)
    rollout, lm = asking(spec, server, tp_size=2), spec.causal_lm(trainable=True)
    perturb(lm, seed=1)
    rollout.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
    sent = [body for verb, body in model.asked if verb == "update_weights_from_tensor"]
    assert len(sent) > 3 and all(len(body["serialized_named_tensors"]) == 2 for body in sent)
    assert not any(body["flush_cache"] for body in sent)
    # base64 is a third longer; a bucket has one tensor past its size at most.
    largest = max(parameter.nbytes for parameter in lm.parameters())
    assert (
        max(len(body["serialized_named_tensors"][0]) for body in sent)
        < 1.4 * (40_000 + largest) + 10_000
    )
    for name, tensor in lm.state_dict().items():
        assert torch.equal(model.engine.module.state_dict()[name], tensor), name


@pytest.mark.seconds
def test_only_what_sleeps_is_woken(spec, model, server) -> None:
    """SGLang fails where memory is resumed that was not released.

    A second weight sync without generation in between would ask for that.
    """
    rollout = asking(spec, server)
    rollout.wake_up("weights")
    rollout.sleep()
    rollout.sleep()
    rollout.wake_up("weights")
    assert model.released == {"kv_cache"}
    rollout.wake_up("weights")
    rollout.wake_up("kv_cache")
    rollout.wake_up()
    assert [body["tags"] for verb, body in model.asked if "occupation" in verb] == [
        ["kv_cache", "weights"],
        ["weights"],
        ["kv_cache"],
    ]
    awake = SGLangRollout(replace(rollout.config, free_cache_engine=False), spec)
    awake.sleep()
    assert not model.released


@pytest.mark.seconds
def test_a_batch_begins_without_what_one_before_left_behind(spec, model, server) -> None:
    rollout, prompt = asking(spec, server), encode(spec)[0]
    model.hang, model.busy = True, 3
    for name in ("7", "8"):
        rollout.submit(name, prompt, Sampling(max_tokens=6))
    assert rollout.step() == []
    model.hang = False
    rollout.begin()
    asked = {body["rid"] for verb, body in model.asked if verb == "generate"}
    assert asked == model.aborted and len(asked) == 2
    assert model.busy < 0, "the cache was dropped once nothing ran"
    assert (
        not rollout.running
        and worst_difference(rollout, spec.causal_lm(trainable=True), spec, 1.0) < 1e-4
    )


@pytest.mark.seconds
def test_a_cache_that_others_keep_busy_is_reported(spec, model, server, monkeypatch) -> None:
    rollout = asking(spec, server)
    monkeypatch.setattr(sglang_rollout, "FLUSH_S", 0.1)
    model.busy = 1000
    with pytest.raises(RuntimeError, match="not this run's"):
        rollout.begin()


def test_a_server_that_is_not_there_is_named_with_what_to_do(spec) -> None:
    for url in ("http://127.0.0.1:1", "127.0.0.1:30000"):
        with pytest.raises(
            RuntimeError, match=rf"SGLang server {url} does not answer .*sglang.launch_server"
        ):
            asking(spec, url)


@pytest.mark.seconds
def test_a_server_that_dies_ends_the_run_and_is_asked_nothing_again(spec, model) -> None:
    with serving(model) as url:
        rollout = asking(spec, url)
        model.dead = True
        rollout.submit("0", encode(spec)[0], Sampling(max_tokens=6))
        with pytest.raises(RuntimeError, match=r"disconnected .* other weights"):
            finished(rollout)
    assert verbs(model) == ["generate"]
    with pytest.raises(RuntimeError, match="ConnectError"):
        rollout.begin()


@pytest.mark.seconds
def test_settings_of_a_server_are_its_own_and_not_the_engines(spec, server) -> None:
    with pytest.raises(TypeError, match="mem_fraction"):
        asking(spec, server, mem_fraction=0.3)


@pytest.mark.seconds
def test_requests_run_beside_each_other_and_a_step_does_not_wait_for_all(
    spec, model, server
) -> None:
    rollout, prompt = asking(spec, server), encode(spec)[0]
    model.hang = True
    rollout.submit("0", prompt, Sampling(max_tokens=2))
    started = time.perf_counter()
    assert rollout.step() == [] and time.perf_counter() - started < 5
    threading.Timer(0.2, lambda: setattr(model, "hang", False)).start()
    rollout.submit("1", prompt, Sampling(max_tokens=2))
    assert finished(rollout).keys() == {"0", "1"}


def test_an_engine_of_ones_own_is_asked_by_its_methods(spec, model, monkeypatch) -> None:
    monkeypatch.setitem(
        __import__("sys").modules, "sglang", SimpleNamespace(Engine=engine_class(model))
    )
    own = {"tp_size": 2, "mem_fraction_static": 0.3}
    rollout, lm = (
        SGLangRollout(replace(CONFIG, name="sglang", engine_kwargs={"sglang": own}), spec),
        None,
    )
    settings = rollout.client.engine.settings  # type: ignore[union-attr]
    assert (
        settings.items()
        >= {
            "model_path": spec.path,
            "skip_tokenizer_init": True,
            "context_length": 40,
            "max_running_requests": 32,
            "mem_fraction_static": 0.3,
            "tp_size": 2,
            "enable_memory_saver": True,
            "chunked_prefill_size": 8192,
        }.items()
    )
    rollout.sleep()
    lm = spec.causal_lm(trainable=True)
    perturb(lm, seed=1)
    rollout.wake_up("weights")
    rollout.update_weights(iter_weights(lm, torch.float32), weight_manifest(lm))
    rollout.wake_up("kv_cache")
    assert worst_difference(rollout, lm, spec, 0.7) < 1e-4
    assert rollout.generate_sequences(make_prompts(spec)).batch["response_mask"].any(dim=1).all()
    assert len(rollout.score(encode(spec))) == 3
    model.hang = True
    rollout.submit("0", encode(spec)[0], Sampling(max_tokens=6))
    rollout.step()
    rollout.begin()
    assert len(model.aborted) == 1
    last = [verb for verb in verbs(model) if verb != "flush_cache"]
    assert last == [
        "release_memory_occupation",
        "resume_memory_occupation",
        "update_weights_from_tensor",
        "resume_memory_occupation",
    ]
